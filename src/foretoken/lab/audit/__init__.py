"""Audits: is a verifier lossless? If not, an audit refutes it and names its bug. If so, the audit
states how large a deviation it excludes.

A *subject* is anything that speculates: operators on a backend, a Python callable, a live engine, a
server. It draws outcomes, of which the exact distribution under the target is known. `evidence.py`
consumes the outcomes one after another. The evidence is an average of e-values, which may be read
after every draw: if the subject is lossless, the average ever exceeds 1/alpha with probability at
most alpha.

What does not belong here: laws of our own operators that need their internals (`lab/laws`).
"""
