"""Triton kernels on a GPU, or on a CPU through Triton's interpreter. See `foretoken.ops.Backend`.

Reading order: `rows` (what a kernel loads), `scan` (the one pass), `filters` (thresholds), `draw`
(one token), `request`, `decide`, `rules` and `residual` (verification), `settle` (of few requests),
`guess`, `sweep` and `wide` (wide nuclei); `sample`, `verify`, `process` and `logprobs` launch them,
through `launch`.
"""

from foretoken.ops.backends.triton.attention import attention
from foretoken.ops.backends.triton.logprobs import logprobs
from foretoken.ops.backends.triton.process import process_logits
from foretoken.ops.backends.triton.sample import draft, sample
from foretoken.ops.backends.triton.verify import verify
from foretoken.ops.decoder import no_decoder as decoder

__all__ = ["attention", "decoder", "draft", "logprobs", "process_logits", "sample", "verify"]
