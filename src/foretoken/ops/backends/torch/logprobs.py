"""Log-probabilities of given tokens and of the likeliest ones.

Shapes: N rows, R of them at a time, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.torch.process import chunks, ordered, processed
from foretoken.ops.types import Logprobs, Rows


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """See `Backend.logprobs`."""
    logits_NV = rows.logits_NV if isinstance(rows, Rows) else rows.detach()
    count, vocabulary = logits_NV.shape
    out = Logprobs(
        logprob_N=torch.empty_like(token_N, dtype=torch.float32),
        rank_N=torch.empty_like(token_N, dtype=torch.int64),
        top_logprob_NT=token_N.new_empty(count, num_top, dtype=torch.float32),
        top_token_NT=token_N.new_empty(count, num_top, dtype=torch.int64),
    )
    index_N, id_V = (torch.arange(n, device=token_N.device) for n in (count, vocabulary))
    for part in chunks(count, vocabulary):
        x_RV = processed(rows, index_N[part]) if isinstance(rows, Rows) else logits_NV[part].float()
        lse_R1 = x_RV.double().logsumexp(dim=1, keepdim=True)
        given_R1 = x_RV.gather(1, token_N[part, None].long())
        key_RV = (ordered(x_RV).long() << 32) - id_V  # all differ: of equal ones `topk` takes any
        top_RT = key_RV.topk(num_top, dim=1).indices
        out.logprob_N[part] = (given_R1 - lse_R1)[:, 0]
        out.rank_N[part] = (x_RV > given_R1).sum(dim=1) + 1
        out.top_logprob_NT[part] = x_RV.gather(1, top_RT) - lse_R1
        out.top_token_NT[part] = top_RT
    return out
