"""Small builders for tests of `ops`, and the list of backends that such tests run on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foretoken.ops import BACKENDS, DraftBlock, DraftCache, Edits, SlotParams, unavailable


def host_backends() -> list[str]:
    """Backends that take CPU tensors in this process; `triton` does under its interpreter only."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    names = [name for name in BACKENDS if name != "triton" or interpreted]
    return [name for name in names if not unavailable(name)]


def fast_backends() -> list[str]:
    """The same without the oracle that they are compared with."""
    return [name for name in host_backends() if name != "reference"]


def make_params(
    num_slots: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int = 0,
    rule: int | Sequence[int] = 0,
) -> SlotParams:
    """Parameters of every slot, one value for all or one each; keys are random 64-bit numbers."""

    def column(value: float | Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(num_slots).contiguous()

    generator = torch.Generator().manual_seed(seed)
    key_S = torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator)
    return SlotParams(
        key_S, column(temperature, torch.float32), column(top_k, torch.int64),
        column(top_p, torch.float32), column(min_p, torch.float32), column(rule, torch.int64),
    )  # fmt: skip


def no_drafts(num_requests: int) -> DraftBlock:
    return drafts_of([[] for _ in range(num_requests)])


def cache_of(logits_SKV: Tensor, temperature: float | Tensor = 1.0) -> DraftCache:
    """The q of unfiltered draft logits at one temperature, or one of each slot [S]."""
    scale = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1, 1)
    return DraftCache(
        logits_SKV.contiguous(),
        torch.full(logits_SKV.shape[:2], -torch.inf),
        (logits_SKV.double() / scale).logsumexp(dim=2),
    )


def drafts_of(
    tokens: Sequence[Sequence[int]],
    logits_SKV: Tensor | None = None,
    real_q: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.int64,
) -> DraftBlock:
    """A draft block from ragged lists; q is real for all requests if logits (at T=1) are given."""
    widest = max((len(row) for row in tokens), default=0)
    padded = [[*row, *[-1] * (widest - len(row))] for row in tokens]
    if real_q is None:
        real_q = [logits_SKV is not None] * len(tokens)
    return DraftBlock(
        torch.tensor(padded, dtype=dtype).reshape(len(tokens), widest),
        torch.tensor([len(row) for row in tokens], dtype=torch.int64),
        None if logits_SKV is None else cache_of(logits_SKV),
        torch.tensor(list(real_q), dtype=torch.bool),
    )


def make_edits(
    num_rows: int,
    entries: Mapping[tuple[int, int], tuple[float, float, float]] | None = None,
    masks: Sequence[Sequence[int]] = (),
    mask_of: Sequence[int] | None = None,
    vocabulary: int = 0,
) -> Edits:
    """Edits from plain numbers.
    entries: (row, token) -> (bias, repetition, subtract)
    masks: the tokens that each mask keeps, of `vocabulary`
    mask_of: the mask of each row, -1 for none; None: no masks at all
    """
    each = sorted((entries or {}).items())
    row_M = torch.tensor([row for (row, _), _ in each], dtype=torch.int64)
    values_M3 = torch.tensor([value for _, value in each]).reshape(-1, 3)
    start_N1 = torch.zeros(num_rows + 1, dtype=torch.int64)
    start_N1[1:] = torch.bincount(row_M, minlength=num_rows).cumsum(0)
    return Edits(
        mask_RW=None if mask_of is None else pack_masks(masks, vocabulary),
        mask_N=None if mask_of is None else torch.tensor(mask_of, dtype=torch.int64),
        start_N1=start_N1,
        token_M=torch.tensor([token for (_, token), _ in each], dtype=torch.int64),
        bias_M=values_M3[:, 0].contiguous(),
        repetition_M=values_M3[:, 1].contiguous(),
        subtract_M=values_M3[:, 2].contiguous(),
    )


def random_edits(rows: int, vocabulary: int, random: torch.Generator, most: int = 8) -> Edits:
    """Two masks that half of the rows use, and up to `most` entries a row, one in four a ban."""
    keep = torch.rand(2, vocabulary, generator=random) < 0.7
    masks = [torch.nonzero(one).flatten().tolist() for one in keep]
    mask_of = (torch.randint(4, (rows,), generator=random) - 2).clamp(min=-1).tolist()
    entries = {}
    for row in range(rows):
        count = int(torch.randint(most + 1, (), generator=random))
        for token in torch.randint(vocabulary, (count,), generator=random).tolist():
            bias, repetition, subtract = torch.rand(3, generator=random).tolist()
            ban = int(torch.randint(4, (), generator=random)) == 0
            entries[row, token] = (
                -torch.inf if ban else 4 * bias - 2,
                0.5 + repetition,
                2 * subtract - 1,
            )
    return make_edits(rows, entries, masks, mask_of, vocabulary)


def pack_masks(masks: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """int32 [R, W] words: bit v % 32 of word v // 32 is 1 where token v is kept."""
    words = torch.zeros(len(masks), -(-vocabulary // 32), dtype=torch.int64)
    for r, tokens in enumerate(masks):
        for v in tokens:
            words[r, v // 32] |= 1 << v % 32
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
