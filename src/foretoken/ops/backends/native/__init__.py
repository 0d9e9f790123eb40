"""C++ kernels on a CPU. See `foretoken.ops.Backend` for the contract of each function.

Attention of models that run through their Transformers modules is that of `torch`.
"""

from foretoken.ops.backends.native.attention import attention
from foretoken.ops.backends.native.decoder import decoder
from foretoken.ops.backends.native.logprobs import logprobs
from foretoken.ops.backends.native.process import process_logits
from foretoken.ops.backends.native.sample import draft, sample
from foretoken.ops.backends.native.verify import verify

__all__ = [
    "attention",
    "decoder",
    "draft",
    "logprobs",
    "process_logits",
    "sample",
    "verify",
]
