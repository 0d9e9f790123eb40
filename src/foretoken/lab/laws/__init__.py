"""Statistical laws of drafting, verification and sampling, and mutants that they must reject.

A *law* is a statement about the emitted tokens that theory proves, checked by an experiment. (The
word never means a probability distribution here.) Examples: the emitted tokens have the target's
joint distribution; `standard` accepts a draft with probability sum_x min(p(x), q(x)); a token 20
logits below the head is drawn at its rate. A law is a function that runs on a backend,

    law(backend, device, trials) -> [Finding, ...]

and each finding is one number with the bounds that a correct backend keeps: a p-value above 1e-4, a
mean within four standard errors, a count that must be met. `suite.py` lists all laws.

The model is a table of logits by the last two tokens (`chain.py`). The exact distribution of any
run of tokens can be computed, and thousands of slots share a call. The draft's logits are the
target's negated, which makes the two as different as possible. Drafts come from the backend's own
`draft`, or from any given `propose`. `chain.emit` verifies them with the backend's own `verify`.

Mutants show that a law can fail: the drafter, the backend or the rule with one thing wrong
(`mutants.py`). Each must be rejected at p < 1e-6 in the case that is named there.

What belongs here: experiments, their models, their exact answers and their mutants. What does not:
pytest (the tests call these functions with fewer trials), files and processes (`benchmarks/law.py`
records the whole suite), and the engine, which `lab/audit` checks from outside.

To add a law: write a function as above in the file of its subject, add a line to `suite.LAWS`, and
a test that it rejects a mutant. A new rule or sampling parameter is a value of an axis in
`joint.py`.

Shape suffixes: S slots (the trials of one call), B requests of a round, K drafts, N rows, V
vocabulary, C contexts, L tokens of a prefix, M entries of edits.
"""
