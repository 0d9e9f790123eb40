"""How fast is it, and does speculation pay here? Latency and throughput of whole batches.

`options.py` what is measured; `workload.py` the prompts; `run.py` one batch, and all of them in
turns; `figures.py` the numbers of one run, `floor.py` what a step must read, `kernels.py` what it
runs; `report.py` results file and tables, `chart.py` the figure. Nothing is imported here: options
are made without torch.
"""
