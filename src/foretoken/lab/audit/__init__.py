"""Is it lossless? Audits that refute a verifier, and name its bug, or state what they exclude.

A *subject* is anything that speculates: operators on a backend, a Python callable, a live engine, a
server. It draws outcomes with a known exact distribution under the target. `evidence.py` consumes
them one after another: an average of e-values, which may be read after every draw. If the subject
is lossless, the average exceeds 1/alpha with probability at most alpha.

What does not belong here: laws of our own operators that need their internals (`lab/laws`).
"""
