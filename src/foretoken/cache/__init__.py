"""Cache: which block holds what (`block_pool`, no torch), and the K/V tensors (`kv_pool`, `batch`)."""
