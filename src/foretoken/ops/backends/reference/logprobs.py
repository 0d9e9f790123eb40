"""Log-probabilities in fp64, one row at a time.

Shapes: N rows, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference.process import process_logits
from foretoken.ops.backends.reference.sample import log_sum_exp
from foretoken.ops.types import Logprobs, Rows


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """See `Backend.logprobs`. log p(v) = logit_v - log sum exp of the row."""
    x_NV = (process_logits(rows) if isinstance(rows, Rows) else rows.detach().double()).numpy()
    out = Logprobs(
        logprob_N=torch.empty(len(x_NV), dtype=torch.float32),
        rank_N=torch.empty(len(x_NV), dtype=torch.int64),
        top_logprob_NT=torch.empty(len(x_NV), num_top, dtype=torch.float32),
        top_token_NT=torch.empty(len(x_NV), num_top, dtype=torch.int64),
    )
    for n, x in enumerate(token_N.tolist()):
        with np.errstate(invalid="ignore"):  # inf - inf, of rows that are not finite
            log_p = x_NV[n] - log_sum_exp(x_NV[n])
        likeliest = np.argsort(-x_NV[n], kind="stable")[:num_top]
        out.logprob_N[n] = torch.from_numpy(log_p)[x]  # a float beyond float32 would raise
        out.rank_N[n] = 1 + int((x_NV[n] > x_NV[n][x]).sum())
        out.top_token_NT[n] = torch.from_numpy(likeliest)
        out.top_logprob_NT[n] = torch.from_numpy(log_p[likeliest])
    return out
