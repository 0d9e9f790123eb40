"""The same arguments elsewhere in memory: what a backend decides must not depend on it.

A compiled kernel is called again only for arguments that it was compiled for; those with other
addresses, strides, dtypes or sizes in between must not get it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.ops import Backend, DraftCache, Edits, Noise, Rows, SlotParams, VerifyBatch
from tests.support.oracle import CPU, Case, Tally, compare_batch, expect

T = TypeVar("T")
KINDS = ("logits", "indices", "params", "edits", "drafts")
EMPTY = "empty edits"  # in place of none: another structure with the same meaning


def kind_of(argument: object) -> str:
    if isinstance(argument, Tensor):
        return "logits" if argument.dtype.is_floating_point and argument.dim() == 2 else "indices"
    return {SlotParams: "params", Edits: "edits"}.get(type(argument), "drafts")


def elsewhere(value: T, apart: bool) -> T:
    """Copies of every tensor in it, one element after an aligned address, NaN or 1 around them.
    apart: whether elements, or rows of two dimensions, are not adjacent; a cache's always are.
    """
    if isinstance(value, Tensor):
        shape = [*value.shape]
        around = torch.nan if value.is_floating_point() else 1
        if apart and len(shape) == 1:
            copy = value.new_full((2 * shape[0] + 1,), around)[1::2]
        elif apart and len(shape) == 2:
            copy = value.new_full((shape[0], shape[1] + 3), around)[:, 1:-2]
        else:
            copy = value.new_full((value.numel() + 1,), around)[1:].view(shape)
        return copy.copy_(value)
    if is_dataclass(value) and not isinstance(value, type):
        apart = apart and not isinstance(value, DraftCache)
        parts = {f.name: elsewhere(getattr(value, f.name), apart) for f in fields(value)}
        return replace(value, **parts)
    return value


def no_edits(logits_NV: Tensor) -> Edits:
    """Edits that change nothing: no mask, no entries."""
    ids, values = logits_NV.new_empty(0, dtype=torch.int64), logits_NV.new_empty(0).float()
    start_N1 = logits_NV.new_zeros(len(logits_NV) + 1, dtype=torch.int64)
    return Edits(None, None, start_N1, ids, values, values, values)


class Elsewhere:
    """A backend that is given arguments of some kinds at other addresses, or EMPTY edits."""

    def __init__(self, backend: Backend, kinds: tuple[str, ...], apart: bool) -> None:
        self.backend, self.kinds, self.apart = backend, kinds, apart

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self.backend, name)

        def moving(value: Any) -> Any:
            return elsewhere(value, self.apart) if kind_of(value) in self.kinds else value

        def moving_parts(value: Any) -> Any:
            if not isinstance(value, Rows | Noise | VerifyBatch):
                return moving(value)
            moved = value._replace(**{k: moving(part) for k, part in value._asdict().items()})
            if EMPTY in self.kinds and name != "draft" and getattr(value, "edits", 0) is None:
                return moved._replace(edits=no_edits(moved.logits_NV))
            return moved

        def call(*given: Any) -> Any:
            moved = [moving_parts(value) for value in given]
            result = op(*moved)
            for old, new in zip(given, moved, strict=True):
                if isinstance(old, DraftCache) and new is not old:  # what `draft` wrote
                    for field in fields(old):
                        getattr(old, field.name).copy_(getattr(new, field.name))
            return result

        return call


def compare_layouts(
    backend: Backend,
    cases: list[Case],
    layouts: list[tuple[tuple[str, ...], bool]],
    device: torch.device = CPU,
) -> Tally:
    """Raise AssertionError unless the cases, taken in turns, are decided as by the oracle.
    layouts: which kinds of arguments are elsewhere, and whether they are apart.
    """
    tally, expected = Tally(), [expect(case) for case in cases]
    for kinds, apart in layouts:
        there: Any = Elsewhere(backend, kinds, apart)
        for case, wanted in zip(cases, expected, strict=True):
            tally = tally.plus(compare_batch(there, case, wanted, device))
    return tally
