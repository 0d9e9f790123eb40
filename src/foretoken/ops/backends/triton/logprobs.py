"""Log-probabilities of given tokens and of the likeliest, in torch operators on the device.

Only rows that somebody asked for come here, a few per step: they are copied to float32.

Shapes: N rows, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.triton.process import process_logits
from foretoken.ops.checks import check_logprobs
from foretoken.ops.types import Edits, Logprobs, SlotParams


def logprobs(
    logits_NV: Tensor,
    token_N: Tensor,
    num_top: int,
    *,
    params: SlotParams | None = None,
    slot_N: Tensor | None = None,
    edits: Edits | None = None,
) -> Logprobs:
    """Of raw logits, or of processed ones if `params` and `slot_N` are given.

    See `Backend.logprobs`.
    """
    check_logprobs(logits_NV, token_N, num_top, params, slot_N, edits)
    if params is not None and slot_N is not None:
        x_NV = process_logits(logits_NV, params, slot_N, edits)
    else:
        x_NV = logits_NV.float()
    lse_N1 = x_NV.logsumexp(dim=1, keepdim=True)
    own_N1 = x_NV.gather(1, token_N.long()[:, None])
    top_NT = _likeliest(x_NV, num_top)
    return Logprobs(
        (own_N1 - lse_N1)[:, 0],
        (x_NV > own_N1).sum(dim=1) + 1,
        x_NV.gather(1, top_NT) - lse_N1,
        top_NT,
    )


def _likeliest(x_NV: Tensor, num_top: int) -> Tensor:
    """Ids of the largest logits, falling, the lowest id first among equals.

    `topk` promises nothing about ties: the id is made the low half of an order-preserving key.
    """
    bits = (x_NV + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)
    ids = torch.arange(x_NV.shape[1], device=x_NV.device)
    key = (order << 32) + (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (key.topk(num_top, dim=1).values & 0xFFFFFFFF)
