"""The fp64 oracle: each op as the papers and the contract define it, a row at a time.

What belongs here: the most readable correct form. What does not: speed, and anything shared with
the backends that are compared with it (the noise, the filters, the rules are written again).
"""

from foretoken.ops.backends.reference.attention import attention
from foretoken.ops.backends.reference.draft import draft
from foretoken.ops.backends.reference.logprobs import logprobs
from foretoken.ops.backends.reference.process import process_logits
from foretoken.ops.backends.reference.sample import sample
from foretoken.ops.backends.reference.verify import verify
from foretoken.ops.decoder import no_decoder as decoder

__all__ = [
    "attention",
    "decoder",
    "draft",
    "logprobs",
    "process_logits",
    "sample",
    "verify",
]
