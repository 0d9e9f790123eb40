"""The fast CPU backend. See `foretoken.ops.Backend` for the contract of each function."""

from foretoken.ops.backends.torch_cpu.attention import attention
from foretoken.ops.backends.torch_cpu.process import process_logits
from foretoken.ops.backends.torch_cpu.sample import sample
from foretoken.ops.backends.torch_cpu.verify import verify

FUSES_DECODERS = False

__all__ = ["FUSES_DECODERS", "attention", "process_logits", "sample", "verify"]
