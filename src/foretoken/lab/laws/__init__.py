"""Statistical laws of drafting, verification and sampling, and mutants that the laws must reject.

A *law* is a statement about emitted tokens that theory proves, checked by an experiment. (The word
never means a probability distribution here.) A law is a function that runs on a backend and returns
findings. A *finding* is one number with the bounds that a correct backend keeps: a p-value above
1e-4, a mean within four standard errors. A *mutant* is a drafter, a backend or a rule with one
error; a law must reject it at p < 1e-6 (`mutants.py`).

The model is a table of logits by the last two tokens (`chain.py`): the exact distribution of any
run of tokens can be computed, and thousands of slots share a call. The draft's logits are the
target's negated, which makes the two as different as possible.

To add a law: write a function (backend, device, trials) -> findings, add it to `suite.LAWS`, and
test that it rejects a mutant. A new rule or sampling parameter is a value of an axis in `joint.py`.

Shape suffixes: S slots (the trials of one call), B requests of a round, K drafts, N rows, V
vocabulary, C contexts, L tokens of a prefix, M entries of edits.
"""
