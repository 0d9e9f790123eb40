"""C++ kernels on a CPU. See `foretoken.ops.Backend` for the contract of each function.

What the kernels do not cover is served by `torch_cpu`: FP64 noise, edits and filters of logits,
attention of models that run through their Transformers modules.
"""

from foretoken.ops.backends.native_cpu.attention import attention
from foretoken.ops.backends.native_cpu.process import process_logits
from foretoken.ops.backends.native_cpu.sample import sample
from foretoken.ops.backends.native_cpu.verify import verify

FUSES_DECODERS = True

__all__ = ["FUSES_DECODERS", "attention", "process_logits", "sample", "verify"]
