"""Log-probabilities in native code.

Shapes: N rows, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_params, native_rows
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
    """Log-probabilities of a given token and of the likeliest ones; see `Backend.logprobs`.

    A row that is not finite has NaN throughout.
    """
    check_logprobs(logits_NV, token_N, num_top, params, slot_N, edits)
    num_rows = len(logits_NV)
    found = Logprobs(
        torch.empty(num_rows, dtype=torch.float32),
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows, num_top, dtype=torch.float32),
        torch.empty(num_rows, num_top, dtype=torch.int64),
    )
    out = library.TopLogprobs(
        found.logprob_N.data_ptr(),
        found.rank_N.data_ptr(),
        found.top_logprob_NT.data_ptr(),
        found.top_token_NT.data_ptr(),
        num_top,
    )
    given_N = token_N.to(torch.int64).contiguous()
    library.load().foretoken_logprobs(
        None if params is None else byref(native_params(params)),
        byref(native_rows(logits_NV, slot_N, edits)),
        given_N.data_ptr(),
        byref(out),
    )
    return found
