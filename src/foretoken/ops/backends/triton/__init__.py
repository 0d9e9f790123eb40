"""Triton kernels on a GPU, or on a CPU through Triton's interpreter. See `foretoken.ops.Backend`.

Begin with `records.py`, which defines the arguments of kernels and the letters of shapes, and with
the ops in `sample.py` and `verify.py`, which launch the kernels.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """Why Triton cannot run here; None if it can. Imports Triton only if there is no GPU."""
    if find_spec("triton") is None:
        return "the package `triton` is not installed"
    if torch.cuda.is_available():
        return None
    from triton import knobs  # this import takes half a second

    return None if knobs.runtime.interpret else "no GPU is here, nor is TRITON_INTERPRET=1 set"


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.torch.verify import evidence_by
    from foretoken.ops.backends.triton import process, sample, steps, verify
    from foretoken.ops.backends.triton.attention import attention
    from foretoken.ops.backends.triton.compiled import compile_ahead, zero_if_recording
    from foretoken.ops.backends.triton.decoder import FusedStack

    return Kernels(
        process_logits=zero_if_recording(process.process_logits),
        sample=zero_if_recording(sample.sample),
        draft=zero_if_recording(sample.draft),
        verify=zero_if_recording(verify.verify),
        evidence=zero_if_recording(evidence_by(process.process_logits, process.logprobs)),
        logprobs=zero_if_recording(process.logprobs),
        attention=zero_if_recording(attention),
        steps=steps.Steps,
        load_stack=FusedStack,
        compile_ahead=compile_ahead,
    )
