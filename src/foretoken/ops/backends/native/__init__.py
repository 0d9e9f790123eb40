"""C++ kernels on a CPU; `foretoken.ops.Backend` is the contract of each function."""

from __future__ import annotations

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """Why native kernels cannot run on this machine; None if they can."""
    from foretoken.ops.backends.native import library

    return library.missing()


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.native import library, sampling, stack, steps
    from foretoken.ops.backends.torch.attention import attention
    from foretoken.ops.backends.torch.verify import evidence_by

    # `attention` is for other stacks: `NativeStack` has its own in `csrc/attention.cpp`.
    return Kernels(
        process_logits=sampling.process_logits, sample=sampling.sample, draft=sampling.draft,
        verify=sampling.verify, logprobs=sampling.logprobs,
        evidence=evidence_by(sampling.process_logits, sampling.logprobs),
        attention=attention, steps=steps.Steps, load_stack=stack.NativeStack,
        set_num_threads=library.set_num_threads, tunings=stack.tunings,
    )  # fmt: skip
