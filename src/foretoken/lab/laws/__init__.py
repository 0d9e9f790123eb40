"""Statistical laws of drafting, verification and sampling, and mutants that the laws must reject.

A *law* (never a probability distribution) is a statement about emitted tokens that theory proves,
as a function that runs on a backend and returns findings. A *finding* is one number with the bounds
that a correct backend keeps. A *mutant* is a drafter, a backend or a rule with one error, which a
law must reject.

The model is a table of logits by the last two tokens (`chain.py`): the exact distribution of any
run of tokens can be computed, and thousands of slots share a call. The draft's logits are the
target's negated, which makes the two as different as possible.

To add a law: write a function (backend, device, trials) -> findings, add it to `suite.LAWS`, and
test that it rejects a mutant. A new rule or sampling parameter is a value of an axis in `joint.py`.

Shape suffixes: S slots (the trials of one call), B requests of a round, K drafts, N rows, V
vocabulary, C contexts, L tokens of a prefix, M entries of edits.
"""
