"""The fast CPU backend that needs no compiler. See `foretoken.ops.Backend` for the contract."""

from foretoken.ops.backends.torch_cpu.attention import attention
from foretoken.ops.backends.torch_cpu.draft import draft
from foretoken.ops.backends.torch_cpu.logprobs import logprobs
from foretoken.ops.backends.torch_cpu.process import process_logits
from foretoken.ops.backends.torch_cpu.sample import sample
from foretoken.ops.backends.torch_cpu.verify import verify

FUSES_DECODERS = False

__all__ = [
    "FUSES_DECODERS",
    "attention",
    "draft",
    "logprobs",
    "process_logits",
    "sample",
    "verify",
]
