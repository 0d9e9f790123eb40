"""What a verdict rests on, in native code: `csrc/verify.cpp`, from the same numbers.

Shapes: R requests, K most drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_batch, struct
from foretoken.ops.types import Evidence, Verdict, VerifyBatch


def evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
    """See `Backend.evidence`."""
    requests, most = len(request_R), batch.drafts.token_BK.shape[1]
    found = Evidence(
        batch.drafts.token_BK[request_R].long(),
        torch.empty(requests, most + 1, dtype=torch.float64),
        torch.empty(requests, most + 1, dtype=torch.float64),
        torch.empty(requests, most, dtype=torch.float64),
        torch.empty(requests, most, dtype=torch.float64),
        torch.empty(requests, dtype=torch.bool),
    )
    library.load().foretoken_evidence(
        native_batch(batch),
        struct((verdict.token_BK1.long(), verdict.n_accept_B, request_R), requests),
        struct(found[1:]),
    )
    return found
