"""Cache: who owns which block (`block_pool`, no torch), and the K/V tensors (`kv_pool`, `batch`)."""
