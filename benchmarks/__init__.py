"""Measurements of Foretoken; each writes one file to `benchmarks/results`, see `lab/results.py`."""
