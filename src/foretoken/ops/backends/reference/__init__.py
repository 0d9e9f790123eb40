"""The fp64 oracle: each op as its paper states it, sharing no mathematics with other backends."""

from __future__ import annotations

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """None: this backend runs everywhere."""
    return None


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.reference import attention, process, sample, verify
    from foretoken.ops.backends.torch import steps

    return Kernels(
        process_logits=process.process_logits, sample=sample.sample, draft=sample.draft,
        verify=verify.verify, evidence=verify.evidence, logprobs=process.logprobs,
        attention=attention.attention, steps=steps.Steps,
    )  # fmt: skip
