"""Is it lossless? Audits that refute a verifier, and name its bug, or state what they exclude.

A *subject* is whatever speculates: operators on a backend, a Python callable, a live engine, a
server. It draws outcomes whose exact distribution under the target is known, and `evidence.py`
consumes them one after another: an average of e-values, which may be looked at after every draw, is
above 1/alpha with probability alpha at most if the subject is lossless.

What does not belong here: laws of our own operators that need their internals (`lab/laws`).
"""
