"""How fast is it, and does speculation pay here? Latency and throughput under load.

Nothing is imported here, so that options are made without torch.
"""
