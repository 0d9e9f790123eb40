"""What a verdict rests on: stock operators over the log-probabilities of these kernels."""

from __future__ import annotations

from torch import Tensor

from foretoken.ops.backends.torch.evidence import Reading, evidence_by
from foretoken.ops.backends.triton.logprobs import logprobs
from foretoken.ops.backends.triton.process import process_logits
from foretoken.ops.types import Evidence, Verdict, VerifyBatch


def evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
    """See `Backend.evidence`."""
    return evidence_by(Reading(process_logits, logprobs), batch, verdict, request_R)
