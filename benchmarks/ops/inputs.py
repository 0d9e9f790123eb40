"""Inputs of a case: many of equal shape, so that no call finds its logits in a cache.

Logits of a case are slices of one pool of at least `ROTATED` bytes (the L2 of an H200 holds 60 MB,
the L3 of the CPUs here 32 MB) and at least two inputs; a timed loop walks through all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.cases import SEEN, Case

ROTATED = 192 * 2**20
DRAFT_NOISE = {"usual": 1.2, "low": 4.0}
"""Standard deviation, times T (at T = 0 as at 1). Of first drafts 0.6 to 0.7 are accepted, or 0.3
(at T = 0: 0.5, or 0.2)."""
HEAD = 16  # dominating tokens of a peaked row
POOLS_KEPT = 3
REPETITION, PRESENCE = 1.1, 0.5


def rows_of(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Raw logits, float32 [rows, vocabulary].

    Args:
        kind: `flat`: normal, standard deviation 1 (a nucleus of 0.95 holds 3/4 of the tokens).
            `peaked`, as a trained model's: normal with standard deviation 3, and HEAD random tokens
            that fall by 0.2 to 1.2 each and together hold 0.95 or more of the mass (the first is 3
            to 8 above the log of all other mass). `mixed`: peaked, every sixteenth row flat.
    """
    device = generator.device
    logits = torch.randn(rows, vocabulary, generator=generator, device=device)
    if kind == "flat":
        return logits
    wide = logits[::16].clone() if kind == "mixed" else None
    logits *= 3
    shape = (rows, HEAD)
    token = torch.randint(vocabulary, shape, generator=generator, device=device)
    gap = 3 + 5 * torch.rand(rows, 1, generator=generator, device=device)
    tail = math.log(vocabulary) + 4.5  # log of the mean of exp(3 z) is 3 * 3 / 2
    fall = (0.2 + torch.rand(rows, 1, generator=generator, device=device)) * torch.arange(
        HEAD, device=device
    )
    jitter = 0.3 * torch.randn(shape, generator=generator, device=device)
    logits.scatter_(1, token, tail + gap - fall + jitter)
    if wide is not None:
        logits[::16] = wide
    return logits


class Pools:
    """Pools of logits by (kind, vocabulary, dtype), the latest few kept and grown on demand."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[tuple[Any, ...], Tensor] = {}

    def get(self, case: Case, rows: int) -> Tensor:
        """At least `rows` rows of the case's kind, the same ones for every case of that kind."""
        key = (case.logits, case.vocabulary, case.dtype)
        pool = self._pools.pop(key, None)
        if pool is None or len(pool) < rows:
            pool = self._filled(case, rows)
        self._pools[key] = pool  # the last one used stands last
        while len(self._pools) > POOLS_KEPT:
            self._pools.pop(next(iter(self._pools)))
        return pool

    def _filled(self, case: Case, rows: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(rows)
        shape = (rows, case.vocabulary)
        pool = torch.empty(shape, dtype=case.dtype, device=self.device)
        for part in pool.split(512):  # no float32 copy of the whole
            part.copy_(rows_of(case.logits, len(part), case.vocabulary, generator))
        return pool


@dataclass
class Inputs:
    """What every implementation of a case is given, on one device.

    Attributes:
        logits: target logits [N, V] per input; rows of a request are adjacent.
        draft_logits: raw draft logits [B, K, V] per input; empty but for verify.
        seen_BL: int64, rising token ids with penalties, one list per input; empty without.
        token_BK: the drafts per input, filled by the first backend that drafts.
        rate_K: as `standard` was measured to accept, once a synthetic case was built.
        kept: what a backend made of these inputs and wants to find again, by its name.
    """

    case: Case
    device: torch.device
    logits: list[Tensor]
    draft_logits: list[Tensor] = field(default_factory=list)
    seen_BL: list[Tensor] = field(default_factory=list)
    token_BK: list[Tensor] = field(default_factory=list)
    rate_K: Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many inputs there are."""
        return len(self.logits)

    def generator(self, seed: int) -> torch.Generator:
        """A fresh generator on the device."""
        return torch.Generator(self.device).manual_seed(seed)


def make(case: Case, pools: Pools) -> Inputs:
    """The inputs of a case: logits from the pool, drafts and penalties made for it."""
    row_bytes = (case.rows + case.requests * case.k) * case.row_bytes
    count = max(2, math.ceil(ROTATED / row_bytes))
    pool = pools.get(case, count * case.rows)
    inputs = Inputs(case, pools.device, list(pool[: count * case.rows].split(case.rows)))
    generator = inputs.generator(1)
    for logits_NV in inputs.logits if case.k else ():
        shape = (case.requests, case.k + 1, case.vocabulary)
        scale = DRAFT_NOISE[case.acceptance] * (case.temperature or 1.0)
        draft_BKV = logits_NV.view(shape)[:, :-1].contiguous()
        noise = torch.randn(
            draft_BKV.shape, generator=generator, device=pools.device, dtype=torch.float32
        )
        inputs.draft_logits.append((draft_BKV + scale * noise).to(case.dtype))
    if case.penalties:
        inputs.seen_BL = [_seen(case, generator) for _ in range(count)]
    return inputs


def _seen(case: Case, generator: torch.Generator) -> Tensor:
    """SEEN distinct rising ids per request: one from each of SEEN equal parts of the vocabulary."""
    part = case.vocabulary // SEEN
    shape = (case.requests, SEEN)
    offset = torch.randint(part, shape, generator=generator, device=generator.device)
    return offset + part * torch.arange(SEEN, device=generator.device)
