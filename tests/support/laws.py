"""Which backends the law tests run on, on this machine, and what they demand of a law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.drafting.control import ADAPTS, Acceptance, Load, StepCosts, StepTable, by_gain
from foretoken.lab.laws.chain import TRIALS, Propose
from foretoken.lab.laws.findings import Finding
from foretoken.lab.laws.joint import Case
from foretoken.ops import BACKENDS, Backend, DraftBlock, get_backend, unavailable

CPU = torch.device("cpu")
# Trials of one case in `make test`, on CPUs: 0.3 s of a core in `torch` on average, 0.35 s in
# `native` (2026-11). With so many a backend that is as wrong as a mutant fails its case, whatever
# the seed: of seeds 0 to 2 the greatest p are
#
#     trials                         5 000   10 000   17 500   20 000   25 000   30 000
#     shared_stream, standard       8.9e-2   3.4e-5   < 1e-6
#     one_uniform, standard         5.6e-1   1.1e-3   < 1e-6
#     residual_weight_before, block    1.0      1.0   2.2e-1   6.3e-4   1.4e-4   2.7e-6
#
# and all others but one are below 1e-6 from 10 000 on. That one, `residual_weight_one`, takes the
# 200 000 of `make law`; in `make test` it fails `test_the_residual_weight_of_block_scales_p`.
# `one_uniform` is of the rule that `torch` shares, `residual_weight_before` of the kernels.
QUICK = {"torch": 20_000, "native": 30_000}
# `torch` takes 0.2 ms to find a row's nucleus. With so many a nucleus that is ignored has p < 1e-6.
QUICK_NUCLEUS = 5_000


class On(NamedTuple):
    """A backend, its name, and the device its tensors are on."""

    name: str
    backend: Backend
    device: torch.device

    @property
    def quick(self) -> int:
        """Trials that `make test` can afford; `make law` has them all."""
        return QUICK.get(self.name, TRIALS)

    def trials(self, case: Case) -> int:
        """The same of a case."""
        is_slow = self.name == "torch" and case.filters == "top_p"
        return QUICK_NUCLEUS if is_slow else self.quick


def runnable() -> list[On]:
    """The fast backends that can run here; the reference takes a millisecond per row."""
    found = [
        On(name, get_backend(name), CPU) for name in ("torch", "native") if not unavailable(name)
    ]
    if "triton" in BACKENDS and torch.cuda.is_available() and not unavailable("triton"):
        found.append(On("triton", get_backend("triton"), torch.device("cuda")))
    return found


RUNNABLE = runnable()
FASTEST = RUNNABLE[-1]
TORCH = RUNNABLE[0]

each_backend = pytest.mark.parametrize("on", RUNNABLE, ids=lambda on: on.name)
"""The law holds on every backend."""

fastest = pytest.mark.parametrize("on", [FASTEST], ids=lambda on: on.name)
"""What shows the power of a law, not that a backend keeps it, is shown on one."""


def require(findings: Sequence[Finding]) -> None:
    """Fail with every law that is broken."""
    broken = [str(finding) for finding in findings if not finding.passed]
    assert findings
    assert not broken, "\n".join(broken)


def cut_by_prefix(propose: Propose) -> Propose:
    """A draft's length, 0 included, depends on what was known before it was drafted."""

    def ragged(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        most = drafts.token_BK.shape[1]
        num_B = (prefix_BL.sum(dim=1) + position_B) % (most + 1)
        return replace(drafts, num_B=torch.minimum(num_B, drafts.num_B))

    return ragged


def chosen_by_control(propose: Propose) -> Propose:
    """K of every request is chosen by the engine's own control, from rounds that are
    over: its own and all others'."""
    drafted = dict[int, tuple[int, int, int]]()  # of each slot: known tokens, asked for, drafted
    estimates = list[Acceptance]()

    def chosen(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts, slots, known_B = propose(prefix_BL, slot_B, position_B), slot_B.tolist(), position_B
        most = drafts.token_BK.shape[1]
        if not estimates:
            estimates.append(Acceptance(max(slots) + 1, most))
        (acceptance,) = estimates
        known = dict(zip(slots, known_B.tolist(), strict=True))
        rounds = [(s, k, n, known[s] - at - 1) for s, (at, k, n) in drafted.items() if s in known]
        acceptance.observe(rounds)
        # A draft takes half as long as a step: some requests are worth two, some none.
        rest_JK1 = 1 + np.arange(most + 1)[None] / 2
        table = StepTable(np.ones(1), rest_JK1, 0 * rest_JK1, 0 * rest_JK1[0])
        fixed_B, offered_K = np.full(len(slots), ADAPTS), np.ones(most)
        load = Load(acceptance.joint(slots), fixed_B, offered_K, context=0)
        asked_B = by_gain(StepCosts(table).curve(len(slots)), load).asked_B
        num_B = torch.minimum(torch.from_numpy(asked_B).to(drafts.num_B), drafts.num_B)
        made = zip(known_B.tolist(), asked_B.tolist(), num_B.tolist(), strict=True)
        drafted.update(zip(slots, made, strict=True))
        return replace(drafts, num_B=num_B)

    return chosen


def without_drafts(propose: Propose) -> Propose:
    """No request has a draft, and the block of drafts no column."""

    def none(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        no_BK = slot_B.new_zeros(len(slot_B), 0)
        return DraftBlock(no_BK, torch.zeros_like(slot_B), None, slot_B < 0)

    return none
