"""C++ kernels on a CPU. See `foretoken.ops.Backend` for the contract of each function.

`NativeStack` has native attention (`csrc/attention.cpp`); other stacks attend in stock operators.
"""

from __future__ import annotations

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """The reason why there are no native kernels on this machine; None if there are."""
    from foretoken.ops.backends.native import library

    return library.missing()


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.native import library, sampling, stack, steps
    from foretoken.ops.backends.torch.attention import attention
    from foretoken.ops.backends.torch.verify import evidence_by

    return Kernels(
        process_logits=sampling.process_logits,
        sample=sampling.sample,
        draft=sampling.draft,
        verify=sampling.verify,
        evidence=evidence_by(sampling.process_logits, sampling.logprobs),
        logprobs=sampling.logprobs,
        attention=attention,
        steps=steps.Steps,
        load_stack=stack.NativeStack,
        set_num_threads=library.set_num_threads,
        tunings=stack.tunings,
    )
