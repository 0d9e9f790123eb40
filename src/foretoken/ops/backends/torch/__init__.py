"""The fast CPU backend that needs no compiler. See `foretoken.ops.Backend` for the contract."""

from foretoken.ops.backends.torch.attention import attention
from foretoken.ops.backends.torch.draft import draft
from foretoken.ops.backends.torch.logprobs import logprobs
from foretoken.ops.backends.torch.process import process_logits
from foretoken.ops.backends.torch.sample import sample
from foretoken.ops.backends.torch.verify import verify
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
