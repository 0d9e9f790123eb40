"""`foretoken bench`: latency and throughput under load, and what speculation gains."""
