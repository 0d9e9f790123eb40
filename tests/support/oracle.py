"""Random batches, and the comparison of a backend with the oracle on them.

A decision is a near-tie if the oracle itself decides otherwise once its logits move by about
`BOUND`: such decisions are excluded, and counted. FP32 arithmetic on logits of size 10 errs by
about 2e-6, so `BOUND` = 1e-5 nats leaves a factor of five. Equal logits move alike, so that a tie,
which is law, stays one.

Nothing here needs pytest: `compare_batch` raises AssertionError where a backend is wrong.

Shapes: B requests, K drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from foretoken.ops import (
    DRAFT,
    TARGET,
    Backend,
    DraftBlock,
    DraftCache,
    Edits,
    Noise,
    Rows,
    Rule,
    SlotParams,
    Verdict,
    VerifyBatch,
    get_backend,
)
from tests.support.cases import random_edits

BOUND = 1e-5
PERTURBATIONS = 4
CPU = torch.device("cpu")
T = TypeVar("T")


class Tally(NamedTuple):
    """Decisions that were compared, and those among them that were excluded as near-ties."""

    decisions: int = 0
    near_ties: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(self.decisions + other.decisions, self.near_ties + other.near_ties)


@dataclass(frozen=True)
class Case:
    """One batch. Requests use the slots `slot_B`, in any order, of more slots than there are.
    hidden_BK: drafts that become placeholders
    """

    params: SlotParams
    slot_B: Tensor
    position_B: Tensor
    num_B: Tensor
    raw_NV: Tensor
    raw_SKV: Tensor
    edits: Edits | None
    hidden_BK: Tensor
    real_q_B: Tensor
    rate_K: Tensor
    token_dtype: torch.dtype
    fp64_noise: bool

    @property
    def slot_N(self) -> Tensor:
        return self.slot_B.repeat_interleave(self.num_B + 1)

    @property
    def position_N(self) -> Tensor:
        first_B = (self.num_B + 1).cumsum(0) - (self.num_B + 1)
        offset_N = torch.arange(len(self.raw_NV)) - first_B.repeat_interleave(self.num_B + 1)
        return self.position_B.repeat_interleave(self.num_B + 1) + offset_N


CHOICES: dict[str, list[float]] = {
    "temperature": [0.0, 0.7, 1.0],
    "top_k": [0, 1, 3, 50, 2000],
    "top_p": [1.0, 0.9, 0.5],
    "min_p": [0.0, 0.1],
    "rule": [int(rule) for rule in Rule],
}


def random_case(
    vocabulary: int,
    seed: int,
    *,
    draft_vocabulary: int | None = None,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype = torch.float32,
    num_requests: int = 5,
    most: int = 3,
    num_slots: int = 7,
    edited: bool = True,
    most_edits: int = 8,
    junk: bool = False,
    fp64_noise: bool = False,
    fixed: Mapping[str, float] | None = None,
) -> Case:
    """Ragged K from 0, placeholders, one-hot and real q, every rule; drafts often accepted.
    junk: some rows of target and draft hold NaN or an infinity, or nothing but -inf
    fixed: parameters that all slots share, of `CHOICES`
    """
    random = torch.Generator().manual_seed(seed)
    width = draft_vocabulary or vocabulary

    def integers(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=random)

    def choose(name: str) -> Tensor:
        values = [fixed[name]] if fixed and name in fixed else CHOICES[name]
        return torch.tensor(values)[integers(len(values), num_slots)]

    params = SlotParams(
        torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=random),
        choose("temperature").float(), choose("top_k").long(), choose("top_p").float(),
        choose("min_p").float(), choose("rule").long(),
    )  # fmt: skip
    slot_B = torch.randperm(num_slots, generator=random)[:num_requests]
    if seed % 3:
        params = promised(params, slot_B, min(vocabulary, width))
    num_B = integers(most + 1, num_requests)
    rows = int(num_B.sum()) + num_requests
    raw_NV = torch.randn(rows, vocabulary, generator=random) * 3
    raw_SKV = torch.randn(num_slots, most, width, generator=random) * 3
    shared, row = min(vocabulary, width), 0
    for slot, num in zip(slot_B.tolist(), num_B.tolist(), strict=True):
        alike = raw_NV[row : row + num, :shared] + raw_SKV[slot, :num, :shared] / 6
        raw_SKV[slot, :num, :shared] = alike
        row += num + 1
    if junk:
        _spoil(raw_NV, random)
        _spoil(raw_SKV.view(-1, width), random)
    return Case(
        params=params, slot_B=slot_B, position_B=integers(10_000, num_requests), num_B=num_B,
        raw_NV=raw_NV.to(dtype), raw_SKV=raw_SKV.to(draft_dtype),
        edits=random_edits(rows, vocabulary, random, most_edits) if edited else None,
        hidden_BK=integers(8, num_requests, most) == 0, real_q_B=integers(3, num_requests) > 0,
        rate_K=torch.rand(most, generator=random, dtype=torch.float64),
        token_dtype=(torch.int64, torch.int32)[seed % 2], fp64_noise=fp64_noise,
    )  # fmt: skip


def promised(params: SlotParams, slot_B: Tensor, vocabulary: int) -> SlotParams:
    """The same with `has_filters` and `rules` as narrow as these slots allow."""
    top_k_B = params.top_k_S[slot_B]
    filtered_B = ((top_k_B > 0) & (top_k_B < vocabulary)) | (params.top_p_S[slot_B] < 1)
    filtered_B |= params.min_p_S[slot_B] > 0
    rules = frozenset(Rule(rule) for rule in params.rule_S[slot_B].tolist())
    return replace(params, has_filters=bool(filtered_B.any()), rules=rules)


def _spoil(x_NV: Tensor, random: torch.Generator) -> None:
    """One row in four is made not finite, in one of three ways."""
    for row in x_NV:
        kind = int(torch.randint(12, (), generator=random))
        at = int(torch.randint(len(row), (), generator=random))
        if kind == 0:
            row[at] = torch.nan
        elif kind == 1:
            row[at] = torch.inf
        elif kind == 2:
            row[:] = -torch.inf


def moved(value: T, device: torch.device) -> T:
    """The same with every tensor in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Rows):
        return value._replace(**{k: moved(part, device) for k, part in value._asdict().items()})
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **parts)
    return value


def perturbed(x: Tensor, trial: int) -> Tensor:
    """float64 logits moved by `BOUND`, equal ones alike."""
    value, place = torch.unique(x.double(), return_inverse=True)
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(trial))
    return (value + BOUND * noise)[place]


@dataclass(frozen=True)
class Outcome:
    """What a backend makes of a case, on the CPU.
    decisions: by name, whole numbers whose leading dimension is the decision: they must be equal
    values: by name, numbers that must be close
    token_BK, token_N: the drafts, and one token drawn from every row
    """

    decisions: dict[str, Tensor]
    values: dict[str, Tensor]
    token_BK: Tensor
    token_N: Tensor


def outcome(
    backend: Backend, case: Case, given: Outcome | None = None, device: torch.device = CPU
) -> Outcome:
    """Run every op of sampling and verification.
    given: whose drafts are verified, and whose tokens are looked up; None: this backend's own.
    """
    on = moved(case, device)
    fp64 = case.fp64_noise
    slot_N, position_N = on.slot_N, moved(case.position_N, device)
    logits_NV = backend.process_logits(Rows(on.raw_NV, on.params, slot_N, on.edits))
    drawn_N = backend.sample(
        Rows(on.raw_NV, on.params, slot_N, on.edits),
        Noise(position_N, slot_N * 0, TARGET, fp64=fp64),
    )
    assert bool(((drawn_N >= 0) & (drawn_N < on.raw_NV.shape[1])).all())
    drafted_BK, cache = drafted(backend, on, device)
    token_BK = drafted_BK if given is None else given.token_BK.to(device)
    token_N = drawn_N if given is None else given.token_N.to(device)
    hidden_BK = token_BK.masked_fill(on.hidden_BK, -1).to(case.token_dtype)
    batch = VerifyBatch(
        on.raw_NV, on.params, on.slot_B, on.position_B,
        DraftBlock(hidden_BK, on.num_B, cache, on.real_q_B), edits=on.edits,
        synthetic_rate_K=on.rate_K, fp64_noise=fp64,
    )  # fmt: skip
    verdict = backend.verify(batch)
    assert verdict.token_BK1.dtype == case.token_dtype
    top = min(3, case.raw_NV.shape[1])
    found = [backend.logprobs(on.raw_NV, token_N, top)]
    found += [backend.logprobs(Rows(on.raw_NV, on.params, slot_N, on.edits), token_N, top)]
    ranks = [part for one in found for part in (one.rank_N[:, None], one.top_token_NT)]
    logprobs = [part for one in found for part in (one.logprob_N[:, None], one.top_logprob_NT)]
    kept_SKV = (cache.logits_SKV >= cache.threshold_SK[..., None])[on.slot_B]
    decisions = {
        "kept": logits_NV > -torch.inf,
        "drawn": drawn_N,
        "drafted": drafted_BK.flatten(),
        "kept of q": kept_SKV.flatten(0, 1),
        "verdict": torch.cat(
            [verdict.n_accept_B[:, None], verdict.finite_B[:, None], verdict.token_BK1.long()],
            dim=1,
        ),
        "ranks": torch.cat(ranks, dim=1),
    }
    values = {
        "logits": logits_NV.double(),
        "lse of q": cache.lse_SK[on.slot_B].flatten(),
        "logprobs": torch.cat(logprobs, dim=1),
        "evidence": evidence_of(backend, batch, verdict),
    }
    return Outcome(
        {name: value.cpu().long() for name, value in decisions.items()},
        {name: value.cpu().double() for name, value in values.items()},
        drafted_BK.cpu(),
        drawn_N.cpu(),
    )


def evidence_of(backend: Backend, batch: VerifyBatch, verdict: Verdict) -> Tensor:
    """The evidence of every request, in reverse order; 0 after a request's last draft."""
    request_R = torch.arange(len(batch.slot_B), device=batch.slot_B.device).flip(0)
    found = backend.evidence(batch, verdict, request_R)
    most = found.token_RK.shape[1]
    behind_RK = torch.arange(most, device=request_R.device) >= batch.drafts.num_B[request_R, None]
    of_drafts = [found.token_RK, found.p_RK1[:, :most], found.q_RK1[:, :most], *found[3:5]]
    columns = [column.double().masked_fill(behind_RK, 0.0) for column in of_drafts]
    of_last = torch.stack([found.p_RK1[:, most], found.q_RK1[:, most], found.real_q_R], dim=1)
    return torch.cat([*columns, of_last], dim=1).flip(0)


def drafted(backend: Backend, on: Case, device: torch.device) -> tuple[Tensor, DraftCache]:
    slots, most, width = on.raw_SKV.shape
    cache = DraftCache.empty(slots, most, width, on.raw_SKV.dtype, device)
    for tensor in (cache.logits_SKV, cache.threshold_SK, cache.lse_SK):
        tensor.fill_(torch.nan)  # rows that are never written must not be read
    token_BK = torch.empty(len(on.slot_B), most, dtype=torch.int64, device=device)
    for i in range(most):
        token_BK[:, i] = backend.draft(
            Rows(on.raw_SKV[on.slot_B, i], on.params, on.slot_B),
            Noise(on.position_B + i, torch.full_like(on.slot_B, i), DRAFT, fp64=on.fp64_noise),
            cache,
        )
    kept, given = cache.logits_SKV[on.slot_B], on.raw_SKV[on.slot_B]
    assert torch.equal(kept.nan_to_num(7), given.nan_to_num(7)), (
        "cached logits are not the raw ones"
    )
    assert bool(((token_BK >= 0) & (token_BK < width)).all())
    return token_BK, cache


@dataclass(frozen=True)
class Expected:
    oracle: Outcome
    counts: dict[str, Tensor]
    near: dict[str, Tensor]


def expect(case: Case) -> Expected:
    """Run the oracle on a case, and on copies of it moved by `BOUND`."""
    oracle = get_backend("reference")
    first = outcome(oracle, case)
    near = {name: torch.zeros(len(value)).bool() for name, value in first.decisions.items()}
    for trial in range(PERTURBATIONS):
        copy = replace(
            case, raw_NV=perturbed(case.raw_NV, trial), raw_SKV=perturbed(case.raw_SKV, trial + 100)
        )
        other = outcome(oracle, copy, first)
        for name, value in other.decisions.items():
            differs = (value != first.decisions[name]).reshape(len(value), -1)
            near[name] |= differs.any(dim=1)
    finite_N = first.values["logits"].amax(dim=1).isfinite()
    raw_N = case.raw_NV.double().amax(dim=1).isfinite()
    finite_q = case.raw_SKV[case.slot_B].double().amax(dim=2).isfinite().flatten()
    warm_q = (case.params.temperature_S[case.slot_B] > 0).repeat_interleave(case.raw_SKV.shape[1])
    counts = {
        "kept": finite_N,
        "drawn": finite_N,
        "drafted": finite_q,
        "kept of q": finite_q & warm_q,  # at T=0 there is no q to keep
        "verdict": torch.ones(len(case.slot_B)).bool(),
        "ranks": finite_N & raw_N,
        "logits": finite_N,
        "lse of q": finite_q & warm_q,
        "logprobs": finite_N & raw_N,
        "evidence": torch.ones(len(case.slot_B)).bool(),
    }
    near["logits"], near["lse of q"] = near["kept"], near["kept of q"]
    near["logprobs"] = near["ranks"]
    rows_B, near_N = (case.num_B + 1).tolist(), near["kept"] | near["drawn"]
    of_rows_B = torch.stack([rows.any() for rows in near_N.split(rows_B)])
    of_q_B = near["kept of q"].view(len(rows_B), -1).any(dim=1)
    near["evidence"] = near["verdict"] | of_rows_B | of_q_B
    return Expected(first, counts, near)


def compare_batch(
    backend: Backend, case: Case, expected: Expected | None = None, device: torch.device = CPU
) -> Tally:
    """Raise AssertionError unless a backend decides as the oracle does, near-ties apart."""
    expected = expected or expect(case)
    ours, oracle = outcome(backend, case, expected.oracle, device), expected.oracle
    tally = Tally()
    for name, want in oracle.decisions.items():
        counts, near = expected.counts[name], expected.near[name]
        assert ours.decisions[name].shape == want.shape, name
        for n in torch.nonzero(counts & ~near).flatten().tolist():
            have = ours.decisions[name][n]
            assert torch.equal(have, want[n]), _difference(name, n, case, have, want[n])
        tally = tally.plus(Tally(int(counts.sum()), int((counts & near).sum())))
    for name, want in oracle.values.items():
        at = expected.counts[name] & ~expected.near[name]
        torch.testing.assert_close(
            ours.values[name][at], want[at], rtol=1e-5, atol=2e-5, equal_nan=True
        )
    return tally


def _difference(name: str, n: int, case: Case, have: Tensor, want: Tensor) -> str:
    by_draft = case.slot_B.repeat_interleave(case.raw_SKV.shape[1])
    slots = {"verdict": case.slot_B, "drafted": by_draft, "kept of q": by_draft}
    slot = int(slots.get(name, case.slot_N)[n])
    held = {
        field.name: value[slot].item()
        for field in fields(case.params)
        if isinstance(value := getattr(case.params, field.name), Tensor)
    }
    if have.dim() and len(have) > 20:
        differ = torch.nonzero(have != want).flatten().tolist()
        return f"{name} {n} of slot {slot} ({held}): differs at {differ[:20]}"
    return f"{name} {n} of slot {slot} ({held}): {have.tolist()}, the oracle has {want.tolist()}"
