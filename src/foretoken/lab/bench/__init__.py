"""How fast is it, and does speculation pay here? Latency and throughput under load.

`options.py` what is measured, `cases.py` what is compared; `workload.py` the prompts; `load.py` the
load generator, `offline.py` and `server.py` who answers it; `run.py` all of it, in turns;
`figures.py` the numbers of one run, `floor.py` what a step must read; `report.py` results file,
tables and figures. Nothing is imported here: options are made without torch.
"""
