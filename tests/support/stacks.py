"""Random small stacks of layers, with or without a `FeatureRule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.ops import AttentionOptions

from foretoken.ops.stack import (  # isort: skip
    Attention, Dense, FeatureRule, Gated, Layer, Linear, Rope, Stack,
)  # fmt: skip


@dataclass(frozen=True)
class StackCase:
    """Sizes and switches of a stack; `target` are the numbers of each of three states that a
    feature is made of (0: no `FeatureRule`), `drafted` the outputs of the output layer (0: V)."""

    hidden: int = 32
    wide: int = 40
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    vocabulary: int = 60
    drafted: int = 0
    target: int = 0
    bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.float32


def random_stack(seed: int = 0, **switches: Any) -> Stack:
    """The same for the same arguments; `switches` as in `StackCase`."""
    case, generator = StackCase(**switches), torch.Generator().manual_seed(seed)
    hidden, d = case.hidden, case.head_size

    def numbers(*shape: int, mean: float = 0.0) -> Tensor:
        return (mean + 0.1 * torch.randn(*shape, generator=generator)).to(case.dtype)

    def gain(*shape: int) -> Tensor:
        return numbers(*shape, mean=1.0)

    def linear(inputs: int, *split: int, bias: bool = case.bias) -> Linear:
        weight = Dense(numbers(sum(split), inputs))
        return Linear(weight, numbers(sum(split)) if bias else None, split)

    def layer(inputs: int) -> Layer:
        q, kv = case.heads * d, case.kv_heads * d
        half = d // 2
        norms = (gain(d), gain(d)) if case.qk_norm else (None, None)
        mixer = Attention(
            linear(inputs, q, kv, kv), linear(q, hidden), case.heads, case.kv_heads, d,
            Rope(10000 ** (-torch.arange(half) / half), 1.0),
            AttentionOptions(d**-0.5, case.window), *norms,
        )  # fmt: skip
        feed = Gated(linear(hidden, case.wide, case.wide), linear(case.wide, hidden))
        return Layer(gain(hidden), mixer, gain(hidden), feed)

    rule = None
    if case.target:
        fc = linear(3 * case.target, hidden, bias=False)
        fc_norm_PA = gain(3, case.target) if case.fc_norm else None
        switched = (case.norm_before_residual, case.norm_output)
        rule = FeatureRule(fc, fc_norm_PA, gain(hidden), *switched)
    width = 2 * hidden if case.target else hidden
    layers = tuple(layer(width if i == 0 else hidden) for i in range(case.layers))
    head = linear(hidden, case.drafted or case.vocabulary, bias=False)
    ids = torch.randperm(case.vocabulary, generator=generator)[: case.drafted]
    return Stack(
        numbers(case.vocabulary, hidden), layers, gain(hidden), head, 1e-5, case.vocabulary,
        ids if case.drafted else None, rule,
    )  # fmt: skip
