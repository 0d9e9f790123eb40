"""Small builders for tests of `ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.ops import DraftBlock, Edits, SlotParams


def make_params(
    num_slots: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int = 0,
) -> SlotParams:
    """Parameters of every slot, one value for all or one each; keys are random 64-bit numbers."""

    def column(value: float | Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(num_slots).contiguous()

    generator = torch.Generator().manual_seed(seed)
    key_S = torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator)
    return SlotParams(
        key_S,
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
    )


def no_drafts(num_requests: int) -> DraftBlock:
    return drafts_of([[] for _ in range(num_requests)])


def drafts_of(
    tokens: Sequence[Sequence[int]],
    logits_SKV: Tensor | None = None,
    real_q: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.int64,
) -> DraftBlock:
    """A draft block from ragged lists; q is real for all requests if logits are given."""
    widest = max((len(row) for row in tokens), default=0)
    padded = [[*row, *[-1] * (widest - len(row))] for row in tokens]
    if real_q is None:
        real_q = [logits_SKV is not None] * len(tokens)
    return DraftBlock(
        torch.tensor(padded, dtype=dtype).reshape(len(tokens), widest),
        torch.tensor([len(row) for row in tokens], dtype=torch.int64),
        logits_SKV,
        torch.tensor(list(real_q), dtype=torch.bool),
    )


def make_edits(**fields: Sequence[float]) -> Edits:
    """Edits from lists; what is not named is empty."""
    floats = {"bias_value_M", "penalty_repetition_M", "penalty_frequency_M", "penalty_presence_M"}
    return Edits(
        **{
            name: torch.tensor(
                list(fields.get(name, [])), dtype=torch.float32 if name in floats else torch.int64
            )
            for name in Edits.__dataclass_fields__
        }
    )
