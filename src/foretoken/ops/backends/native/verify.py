"""Verification in native code, in one call: `csrc/verify.cpp` states the rules once more.

A request's rows are read one by one, as far as its own rule needs them, whatever else is in the
batch; so `synthetic` takes the time of `standard` (decision 015).
"""

from __future__ import annotations

import torch

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_batch
from foretoken.ops.types import Verdict, VerifyBatch


def verify(batch: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The output's distribution is exactly the target's (Leviathan et al. 2023, appendix A.1; Chen et
    al. 2023, theorem 1; Sun et al. 2024, theorem 1). A request whose deciding row is not finite
    gets -1 instead of a token.
    """
    token_BK = batch.drafts.token_BK
    num_requests, most = token_BK.shape
    token_BK1 = torch.empty(num_requests, most + 1, dtype=torch.int64)
    n_accept_B = torch.empty(num_requests, dtype=torch.int64)
    finite_B = torch.empty(num_requests, dtype=torch.bool)
    library.load().foretoken_verify(
        native_batch(batch), token_BK1.data_ptr(), n_accept_B.data_ptr(), finite_B.data_ptr()
    )
    if token_BK.dtype is not torch.int64:
        token_BK1 = token_BK1.to(token_BK.dtype)
    return Verdict(token_BK1, n_accept_B, finite_B)
