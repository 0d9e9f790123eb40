"""Calls of a case on one of our backends, or in a baseline module (protocol: `baseline`).

Belongs here: from a case's inputs to one callable per input. Does not: timing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.cases import SEEN, Case
from benchmarks.ops.inputs import PRESENCE, REPETITION, Inputs
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
)

Call = Callable[[], Any]
NUM_TOP = 5
TRIES = 20_000  # noises among which is one that accepts like standard; the rarest count needs most
RULES = {"one_hot": Rule.STANDARD} | {rule.name.lower(): rule for rule in Rule}


@dataclass(frozen=True)
class Drafted:
    """What drafting leaves for verification: the cache, and per input slots, positions, tokens."""

    cache: DraftCache
    slot_B: list[Tensor]
    position_B: list[Tensor]
    token_BK: list[Tensor]


@dataclass(frozen=True)
class Ours:
    """One of our backends."""

    name: str
    backend: Backend

    def calls(self, case: Case, inputs: Inputs) -> list[Call]:
        """One callable per input; they may be captured, and repeated."""
        return {
            "sample": self._sample,
            "draft": self._draft,
            "verify": self._verify,
            "logprobs": self._logprobs,
        }[case.op](case, inputs)

    def _sample(self, case: Case, inputs: Inputs) -> list[Call]:
        params, slot_N = slot_params(case, inputs, case.rows), permuted(inputs, case.rows)
        zero_N = torch.zeros_like(slot_N)

        def call(logits_NV: Tensor, position_N: Tensor) -> Call:
            return lambda: self.backend.sample(
                Rows(logits_NV, params, slot_N),
                Noise(position_N, zero_N, TARGET, fp64=case.fp64_noise),
            )

        return [call(x, positions(inputs, case.rows, i)) for i, x in enumerate(inputs.logits)]

    def _draft(self, case: Case, inputs: Inputs) -> list[Call]:
        slots = inputs.count * case.rows
        params, slot_S = slot_params(case, inputs, slots), permuted(inputs, slots)
        cache = DraftCache.empty(slots, 1, case.vocabulary, case.dtype, inputs.device)

        def call(logits_BV: Tensor, slot_B: Tensor, position_B: Tensor) -> Call:
            zero_B = torch.zeros_like(slot_B)
            return lambda: self.backend.draft(
                Rows(logits_BV, params, slot_B),
                Noise(position_B, zero_B, DRAFT, fp64=case.fp64_noise),
                cache,
            )

        slot_B = slot_S.split(case.rows)
        at = [positions(inputs, case.rows, i) for i in range(inputs.count)]
        return [call(*each) for each in zip(inputs.logits, slot_B, at, strict=True)]

    def _logprobs(self, case: Case, inputs: Inputs) -> list[Call]:
        def call(logits_NV: Tensor) -> Call:
            token_N = logits_NV.argmax(1)
            return lambda: self.backend.logprobs(logits_NV, token_N, NUM_TOP)

        return [call(x) for x in inputs.logits]

    def _verify(self, case: Case, inputs: Inputs) -> list[Call]:
        drafted = self.drafted(case, inputs)
        rate_K = None
        if case.rule == "synthetic":
            rate_K, position_B = self._equal_counts(case, inputs)
            drafted = replace(drafted, position_B=position_B)
        return self._verify_calls(case, inputs, drafted, rate_K)

    def _verify_calls(
        self, case: Case, inputs: Inputs, drafted: Drafted, rate_K: Tensor | None
    ) -> list[Call]:
        params = slot_params(case, inputs, inputs.count * case.requests)
        real_B = torch.full((case.requests,), case.rule != "one_hot", device=inputs.device)
        num_B = torch.full((case.requests,), case.k, device=inputs.device)
        edits = [edits_of(case, seen_BL) for seen_BL in inputs.seen_BL] or [None] * inputs.count

        def call(i: int) -> Call:
            cache = None if case.rule == "one_hot" else drafted.cache
            block = DraftBlock(drafted.token_BK[i], num_B, cache, real_B)
            return lambda: self.backend.verify(
                VerifyBatch(
                    inputs.logits[i],
                    params,
                    drafted.slot_B[i],
                    drafted.position_B[i],
                    block,
                    edits=edits[i],
                    synthetic_rate_K=rate_K,
                    fp64_noise=case.fp64_noise,
                )
            )

        return [call(i) for i in range(inputs.count)]

    def drafted(self, case: Case, inputs: Inputs) -> Drafted:
        """Drafts of every input by this backend, made once; the first backend's go to baselines."""
        if self.name not in inputs.kept:
            slots = inputs.count * case.requests
            params = slot_params(case, inputs, slots)
            slot_B = permuted(inputs, slots).split(case.requests)
            at = [positions(inputs, case.requests, i) for i in range(inputs.count)]
            cache = DraftCache.empty(slots, case.k, case.vocabulary, case.dtype, inputs.device)
            token_BK = []
            for i, logits_BKV in enumerate(inputs.draft_logits):
                drafts = [
                    self.backend.draft(
                        Rows(logits_BKV[:, k].contiguous(), params, slot_B[i]),
                        Noise(at[i] + k, torch.full_like(at[i], k), DRAFT),
                        cache,
                    )
                    for k in range(case.k)
                ]
                token_BK.append(torch.stack(drafts, dim=1))
            inputs.kept[self.name] = Drafted(cache, list(slot_B), at, token_BK)
            inputs.token_BK = inputs.token_BK or token_BK
        found: Drafted = inputs.kept[self.name]
        return found

    def _equal_counts(self, case: Case, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
        """Rates as `standard` accepts on these inputs, and positions that accept just as many.

        Which drafts a rate accepts is a matter of noise alone, so positions are tried on a tiny
        vocabulary: every request gets one at which it accepts as it does under `standard`.
        """
        drafted, device = self.drafted(case, inputs), inputs.device
        standard = replace(case, rule="standard")
        wanted_B = torch.cat(counts(self._verify_calls(standard, inputs, drafted, None)))
        rate_K = inputs.rate_K = rates(wanted_B, case.k).to(device)
        slot_B, first_B = torch.cat(drafted.slot_B), torch.cat(drafted.position_B)
        zero_BK = torch.zeros(len(slot_B), case.k, dtype=torch.int64, device=device)
        block = DraftBlock(zero_BK, zero_BK[:, 0] + case.k, None, zero_BK[:, 0] > 0)
        logits_NV = torch.zeros(len(slot_B) * (case.k + 1), 2, device=device)
        params = slot_params(case, inputs, len(slot_B))
        found_B = torch.full_like(first_B, -1)
        for number in range(TRIES):
            position_B = first_B + number * case.k
            verdict = self.backend.verify(
                VerifyBatch(
                    logits_NV,
                    params,
                    slot_B,
                    position_B,
                    block,
                    synthetic_rate_K=rate_K,
                    fp64_noise=case.fp64_noise,
                )
            )
            equal_B = verdict.n_accept_B == wanted_B.to(device)
            found_B = torch.where((found_B < 0) & equal_B, position_B, found_B)
            if bool((found_B >= 0).all()):
                return rate_K, list(found_B.split(case.requests))
        raise RuntimeError(f"no noise of {TRIES} accepts as many drafts as `standard`")


@dataclass(frozen=True)
class Module:
    """A baseline module. `calls` raises NotImplementedError for what it lacks."""

    name: str
    module: ModuleType

    def calls(self, case: Case, inputs: Inputs) -> list[Call]:
        """One callable per input."""
        make = getattr(self.module, case.op, None)
        if make is None:
            raise NotImplementedError(f"{self.name} has no {case.op}")
        return [make(**self._given(case, inputs, i)) for i in range(inputs.count)]

    @staticmethod
    def _given(case: Case, inputs: Inputs, i: int) -> dict[str, Any]:
        logits = inputs.logits[i]
        if case.op == "logprobs":
            return {"logits_NV": logits, "token_N": logits.argmax(1), "num_top": NUM_TOP}
        law: dict[str, Any] = {
            name: getattr(case, name) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        if case.op == "draft":
            return law | {"logits_BV": logits}
        if case.op == "sample":
            return law | {"logits_NV": logits, "fp64_noise": case.fp64_noise}
        return law | {
            "rule": case.rule,
            "logits_NV": logits,
            "draft_logits_BKV": inputs.draft_logits[i],
            "token_BK": inputs.token_BK[i],
            "rate_K": inputs.rate_K if case.rule == "synthetic" else None,
            "seen_BL": inputs.seen_BL[i] if inputs.seen_BL else None,
            "repetition": REPETITION,
            "presence": PRESENCE,
        }


def slot_params(case: Case, inputs: Inputs, slots: int) -> SlotParams:
    """The case's parameters in every slot, each with a key of its own."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((slots,), value, dtype=dtype, device=inputs.device)

    key_S = torch.randint(2**62, (slots,), generator=inputs.generator(2), device=inputs.device)
    rule, rule_S = RULES[case.rule or "standard"], key_S.clone()
    rule_S[:] = int(rule)
    for slot_B in permuted(inputs, slots).split(case.requests) if case.blocks else ():
        rule_S[slot_B[: case.blocks]] = int(Rule.BLOCK)
    return SlotParams(
        key_S,
        full(case.temperature, torch.float32),
        full(case.top_k, torch.int64),
        full(case.top_p, torch.float32),
        full(case.min_p, torch.float32),
        rule_S,
        has_filters=case.filtered,
        rules=frozenset({rule, Rule.BLOCK} if case.blocks else {rule}),
    )


def permuted(inputs: Inputs, slots: int) -> Tensor:
    """Every slot once, in an order that is not the batch's."""
    return torch.randperm(slots, generator=inputs.generator(3), device=inputs.device)


def positions(inputs: Inputs, rows: int, seed: int) -> Tensor:
    """A sequence position per row, below 4096."""
    generator = inputs.generator(1000 + seed)
    return torch.randint(4096, (rows,), generator=generator, device=inputs.device)


def edits_of(case: Case, seen_BL: Tensor) -> Edits:
    """Repetition and presence penalties on the seen tokens, in all rows of their request."""
    entries = case.rows * SEEN

    def full(value: float) -> Tensor:
        return torch.full((entries,), value, device=seen_BL.device)

    return Edits(
        mask_RW=None,
        mask_N=None,
        start_N1=torch.arange(0, entries + 1, SEEN, device=seen_BL.device),
        token_M=seen_BL.repeat_interleave(case.k + 1, 0).flatten(),
        bias_M=full(0.0),
        repetition_M=full(REPETITION),
        subtract_M=full(PRESENCE),
    )


def counts(calls: Sequence[Call]) -> list[Tensor]:
    """Accepted drafts of every request, per input, on the host."""
    verdicts: list[Verdict] = [call() for call in calls]
    return [verdict.n_accept_B.cpu() for verdict in verdicts]


def rates(n_accept_B: Tensor, k: int) -> Tensor:
    """c_i, float64 [K]: how often draft i was accepted where those before it were; 0 if never."""
    reached = [(n_accept_B >= i).sum().item() for i in range(k + 1)]
    pairs = zip(reached[1:], reached[:-1], strict=True)
    return torch.tensor([b / a if a else 0.0 for b, a in pairs], dtype=torch.float64)
