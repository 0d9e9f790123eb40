"""Triton kernels on a GPU, or on a CPU through Triton's interpreter. See `foretoken.ops.Backend`.

Reading order: `records` (what kernels are given, and the letters of shapes), `rows` (what they
load), `scan` (the one pass), `filters` (thresholds), `draw` (one token); `rules`, `decide` and
`verify` (verification); `sweep` and `wide` (wide nuclei). `sample`, `verify` and `process` launch
them, through `launch` and `compiled`; `steps` is bookkeeping. `attention/` and `decoder/` have
reading orders of their own.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from foretoken.ops.dispatch import Kernels


def available() -> str | None:
    """Why Triton cannot run here, or None. Triton is imported only if there is no GPU."""
    if find_spec("triton") is None:
        return "the package `triton` is not installed"
    if torch.cuda.is_available():
        return None
    from triton import knobs  # half a second

    return None if knobs.runtime.interpret else "no GPU is here, nor is TRITON_INTERPRET=1 set"


def load() -> Kernels:
    """The functions of this backend."""
    from foretoken.ops.backends.torch.verify import evidence_by
    from foretoken.ops.backends.triton import process, sample, steps, verify
    from foretoken.ops.backends.triton.attention import attention
    from foretoken.ops.backends.triton.compiled import compile_ahead, zero_if_noted
    from foretoken.ops.backends.triton.decoder import FusedStack

    return Kernels(
        process_logits=zero_if_noted(process.process_logits),
        sample=zero_if_noted(sample.sample),
        draft=zero_if_noted(sample.draft),
        verify=zero_if_noted(verify.verify),
        evidence=zero_if_noted(evidence_by(process.process_logits, process.logprobs)),
        logprobs=zero_if_noted(process.logprobs),
        attention=zero_if_noted(attention),
        steps=steps.Steps,
        load_stack=FusedStack,
        compile_ahead=compile_ahead,
    )
