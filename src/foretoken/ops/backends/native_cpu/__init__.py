"""C++ kernels on a CPU. See `foretoken.ops.Backend` for the contract of each function.

Attention of models that run through their Transformers modules is that of `torch_cpu`.
"""

from foretoken.ops.backends.native_cpu.attention import attention
from foretoken.ops.backends.native_cpu.logprobs import logprobs
from foretoken.ops.backends.native_cpu.process import process_logits
from foretoken.ops.backends.native_cpu.sample import draft, sample
from foretoken.ops.backends.native_cpu.verify import verify

FUSES_DECODERS = True

__all__ = [
    "FUSES_DECODERS",
    "attention",
    "draft",
    "logprobs",
    "process_logits",
    "sample",
    "verify",
]
