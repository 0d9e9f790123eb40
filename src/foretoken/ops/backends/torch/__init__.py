"""Stock PyTorch operators, on any device. See `foretoken.ops.Backend` for the contract."""

from __future__ import annotations

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """None: this backend runs everywhere."""
    return None


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.torch import attention, process, sample, steps, verify

    return Kernels(
        process_logits=process.process_logits, sample=sample.sample, draft=sample.draft,
        verify=verify.verify, logprobs=process.logprobs,
        evidence=verify.evidence_by(process.process_logits, process.logprobs),
        attention=attention.attention, steps=steps.Steps,
    )  # fmt: skip
