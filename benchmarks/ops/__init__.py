"""What an op costs: declared cases, their inputs, backends, timing; run.py is the driver."""
