"""Log-probabilities in native code.

Shapes: N rows, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_rows
from foretoken.ops.types import Logprobs, Rows


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of a given token and of the likeliest ones; see `Backend.logprobs`.

    A row that is not finite has NaN throughout.
    """
    num_rows = len(token_N)
    found = Logprobs(
        torch.empty(num_rows, dtype=torch.float32),
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows, num_top, dtype=torch.float32),
        torch.empty(num_rows, num_top, dtype=torch.int64),
    )
    given_N = token_N.long().contiguous()
    library.load().foretoken_logprobs(
        native_rows(rows),
        given_N.data_ptr(),
        found.logprob_N.data_ptr(),
        found.rank_N.data_ptr(),
        found.top_logprob_NT.data_ptr(),
        found.top_token_NT.data_ptr(),
        num_top,
    )
    return found
