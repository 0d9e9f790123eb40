"""Log-probabilities in fp64, one row at a time.

Shapes: N rows, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference.process import process_logits
from foretoken.ops.backends.reference.sample import log_sum_exp
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
    """See `Backend.logprobs`. log p(v) = logit_v - log sum exp of the row."""
    check_logprobs(logits_NV, token_N, num_top, params, slot_N, edits)
    rows = logits_NV.detach().double().numpy()
    if params is not None and slot_N is not None:
        rows = process_logits(logits_NV, params, slot_N, edits).numpy()
    out = Logprobs(
        logprob_N=torch.empty(len(rows), dtype=torch.float32),
        rank_N=torch.empty(len(rows), dtype=torch.int64),
        top_logprob_NT=torch.empty(len(rows), num_top, dtype=torch.float32),
        top_token_NT=torch.empty(len(rows), num_top, dtype=torch.int64),
    )
    for n, x in enumerate(token_N.tolist()):
        with np.errstate(invalid="ignore"):  # inf - inf, of rows that are not finite
            log_p = rows[n] - log_sum_exp(rows[n])
        likeliest = np.argsort(-rows[n], kind="stable")[:num_top]
        out.logprob_N[n] = torch.from_numpy(log_p)[x]  # a float beyond float32 would raise
        out.rank_N[n] = 1 + int((rows[n] > rows[n][x]).sum())
        out.top_token_NT[n] = torch.from_numpy(likeliest)
        out.top_logprob_NT[n] = torch.from_numpy(log_p[likeliest])
    return out
