"""Predictions that are nearly what a target says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretoken import LLM, SamplingParams


def edited(tokens: Sequence[int]) -> list[int]:
    """Of every 15 tokens one is replaced, one is left out, and one is new."""
    changed: list[int] = []
    for i, token in enumerate(tokens):
        kind = i % 15
        changed += {3: [token ^ 1], 7: [], 12: [5, token]}.get(kind, [token])
    return changed


def with_predictions(
    plain: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[SamplingParams]:
    without_k = [replace(one, num_speculative_tokens=None) for one in params]
    outputs = plain.generate(prompts, without_k)
    return [
        replace(one, prediction=edited(output.outputs[0].token_ids))
        for one, output in zip(params, outputs, strict=True)
    ]
