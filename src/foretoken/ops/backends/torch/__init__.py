"""Stock operators, on any device that PyTorch has. See `foretoken.ops.Backend` for the contract."""

from __future__ import annotations

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """None: it runs everywhere."""
    return None


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.torch import attention, logprobs, process, sample, steps, verify
    from foretoken.ops.backends.torch.evidence import evidence_by

    return Kernels(
        process_logits=process.process_logits,
        sample=sample.sample,
        draft=sample.draft,
        verify=verify.verify,
        evidence=evidence_by(process.process_logits, logprobs.logprobs),
        logprobs=logprobs.logprobs,
        attention=attention.attention,
        steps=steps.Steps,
    )
