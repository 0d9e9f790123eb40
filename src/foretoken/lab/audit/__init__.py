"""Audits: is a verifier lossless? An audit refutes this and names the bug, or bounds the deviation.

A *subject* is anything that speculates: operators on a backend, a Python callable, a live engine, a
server. It draws *outcomes* from *sources*, that is, experiments in which the target's distribution
is known. `evidence.py` consumes the outcomes one after another. Laws that need the internals of our
operators are in `lab/laws`.
"""
