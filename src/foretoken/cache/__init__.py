"""Cache: blocks and their owners (`block_pool`, no torch); the K/V tensors (`kv_pool`)."""
