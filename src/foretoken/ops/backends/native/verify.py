"""Verification in native code, in one call: `csrc/verify.cpp` states the rules once more.

A request's rows are read one by one, as far as its own rule needs them, whatever else is in the
batch; so `synthetic` takes the time of `standard` (decision 015).

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from ctypes import byref

import torch

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_batch, native_params
from foretoken.ops.types import Verdict, VerifyBatch


def verify(batch: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The law of the output is exactly the target's (Leviathan et al. 2023, appendix A.1; Chen et
    al. 2023, theorem 1; Sun et al. 2024, theorem 1). A request whose deciding row is not finite
    gets -1 instead of a token.
    """
    drafts = batch.drafts
    num_requests, most = drafts.token_BK.shape
    verdict = Verdict(
        torch.empty(num_requests, most + 1, dtype=drafts.token_BK.dtype),
        torch.empty(num_requests, dtype=torch.int64),
        torch.empty(num_requests, dtype=torch.bool),
    )
    outcome = library.Outcome(
        verdict.token_BK1.data_ptr(), verdict.n_accept_B.data_ptr(), verdict.finite_B.data_ptr()
    )
    library.load().foretoken_verify(
        byref(native_params(batch.params)), byref(native_batch(batch)), byref(outcome)
    )
    return verdict
