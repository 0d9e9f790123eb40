"""Cache: who owns which block (`block_pool`, no torch); the K/V tensors (`kv_pool`)."""
