"""Is it lossless? Audits that refute a verifier, and name its bug, or state what they exclude.

A *subject* is whatever speculates: operators on a backend, a Python callable, a live engine, a
server. It draws outcomes whose exact distribution under the target is known, and `evidence.py`
consumes them one after another: an average of e-values, which may be looked at after every draw, is
above 1/alpha with probability alpha at most if the subject is lossless.

    toys.py         small models with 16 outcomes each, their exact distributions
    enumeration.py  a verifier's distribution without sampling: uniforms that fork
    gallery.py      the rules, and the bugs that were published about them
    evidence.py     e-values, bounds, a verdict that names the bug
    subjects.py     callables and backends as sources of outcomes
    engine.py       a live engine, against probabilities computed beside it
    server.py       an OpenAI-compatible server, against the target at hand
    report.py       verdicts, tables, results files, a page
    command.py      `foretoken audit`

What does not belong here: laws of our own operators that need their internals (`lab/laws`).
"""
