"""What every drafter gets and must return, through the engine's own runner.

The q of a draft reaches its request by slot, whatever the order of the batch. Outcomes come in one
call per step, also those of prompts. Nothing is kept for a request that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.drafting.base import DrafterSetup, one_hot_block
from foretoken.drafting.ngram import NGram
from foretoken.drafting.registry import DRAFTERS
from foretoken.errors import IntegrityError, StepError
from foretoken.ops import DraftBlock, DraftCache, Rule
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.step import (
    NONE,
    Admission,
    Outcome,
    StepInput,
    StepPlan,
    StepRequests,
    StepResult,
)
from tests.models.heads import drafter_options
from tests.support.checkpoints import VOCABULARY, ids_of

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
# By slot: sampling parameters, rule, K.
ASKED = [
    (SamplingParams(temperature=1.0), Rule.STANDARD, 3),
    (SamplingParams(temperature=0.7, top_k=9), Rule.BLOCK, 2),
    (SamplingParams(temperature=0.0), Rule.STANDARD, 4),
    (SamplingParams(temperature=1.3), Rule.COUPLED, 3),
]
PROMPTS = [ids_of(text) for text in ("abcabcab", "xyx", "def f(x): x", "import os")]
MAY_NOT_DRAFT = ("draft_text", "forced", "ngram", "prediction", "suffix")
IN_ORDER, MIXED = [0, 1, 2, 3], [2, 0, 3, 1]


def build(target: Path, name: str, **speculation: Any) -> LLM:
    """Where a drafter takes a model, the target drafts for itself: q is near p, but never equal."""
    options = {"method": name, **drafter_options(target, target).get(name, {}), **speculation}
    return LLM(str(target), options, num_blocks=64, **OPTIONS)


Propose = Callable[[DraftRequests], DraftBlock]
Change = Callable[[Propose], Propose]


def decide(llm: LLM, order: list[int], change: Change | None = None) -> list[dict[int, Outcome]]:
    """The outcomes of six steps of four requests in this order of the batch, by slot."""
    runner = llm.engine.runner
    drafter: Any = runner.drafter
    if change is not None:
        drafter.propose = change(drafter.propose)
    admissions = [
        Admission(slot, slot + 5, params, rule, prompt, len(prompt), limit=len(prompt) + 40)
        for slot, ((params, rule, _), prompt) in enumerate(zip(ASKED, PROMPTS, strict=True))
    ]
    blocks = [(slot, 0, range(16 * slot, 16 * slot + 16)) for slot in range(4)]
    decided = []
    for step in range(6):
        tokens = [len(PROMPTS[slot]) if step == 0 else 1 for slot in order]
        drafts = [0 if step == 0 else ASKED[slot][2] for slot in order]
        none = [NONE] * 4
        asked = StepInput(order, tokens, drafts, [True] * 4, none, none, [False] * 4)
        plan = StepPlan(step=asked)
        if step == 0:
            plan = plan._replace(admissions=admissions, new_blocks=blocks)
        decided.append(dict(sorted(runner.run(plan).decisions.items())))
    return decided


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_and_q_reach_their_request_in_any_order(target: Path, name: str) -> None:
    expected = decide(build(target, name), IN_ORDER)
    assert decide(build(target, name), MIXED) == expected
    if name not in MAY_NOT_DRAFT:
        decided = [outcome for step in expected[1:] for outcome in step.values()]
        drafted = sum(outcome.num_drafts for outcome in decided)
        assert drafted == 5 * sum(k for *_, k in ASKED)
        assert 0 < sum(outcome.num_accepted for outcome in decided) <= drafted


def with_q_by_row(propose: Propose) -> Propose:
    """A mutant: q is kept by the order of the batch."""

    def mutant(rows: DraftRequests) -> DraftBlock:
        block, slots = propose(rows), rows.slot_B.tolist()
        if block.cache is None:
            return block
        of_row = torch.tensor([*(slots.index(slot) for slot in range(4)), 4])  # and the spare
        held = (block.cache.logits_SKV, block.cache.threshold_SK, block.cache.lse_SK)
        return replace(block, cache=DraftCache(*(tensor[of_row].clone() for tensor in held)))

    return mutant


def test_a_q_that_is_kept_by_the_order_of_the_batch_is_noticed(target: Path, draft: Path) -> None:
    """With an unlike draft model: too many drafts of the target itself are accepted either way."""
    llms = [build(target, "draft_model", model=str(draft)) for _ in range(2)]
    assert decide(llms[0], IN_ORDER, with_q_by_row) != decide(llms[1], MIXED, with_q_by_row)


def without_q_of(lost: int) -> Change:
    def change(propose: Propose) -> Propose:
        def forgetful(rows: DraftRequests) -> DraftBlock:
            block = propose(rows)
            real_q_B = block.real_q_B & (rows.slot_B != lost)
            return replace(block, real_q_B=real_q_B)

        return forgetful

    return change


def test_a_q_that_is_missing_costs_its_own_request_alone(target: Path, draft: Path) -> None:
    """Its drafts are verified as one-hot, so fewer are accepted; other requests do not change."""
    whole, lossy = (
        decide(build(target, "draft_model", model=str(draft)), MIXED, change)
        for change in (None, without_q_of(0))
    )
    assert [{**step, 0: None} for step in lossy] == [{**step, 0: None} for step in whole]
    accepted = [sum(step[0].num_accepted for step in steps) for steps in (lossy, whole)]
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_proposal_has_no_more_drafts_than_requested(target: Path, name: str) -> None:
    proposals = []

    def recorded(propose: Propose) -> Propose:
        def record(rows: DraftRequests) -> DraftBlock:
            block = propose(rows)
            kept = replace(block, num_B=block.num_B.clone())  # the next step counts there again
            proposals.append((rows.slot_B.tolist(), rows.num_B.tolist(), kept))
            return block

        return record

    llm = build(target, name)
    only = {"forced": {"allowed_token_ids": [7]}, "prediction": {"prediction": "abc" * 9}}
    asked = only.get(name, {})
    params = [
        SamplingParams(temperature=t, max_tokens=20, seed=5, num_speculative_tokens=k, **asked)
        for t, k in ((1.0, 0), (0.0, 1), (0.9, 3), (1.0, 4))
    ]
    drafter: Any = llm.engine.runner.drafter
    drafter.propose = recorded(drafter.propose)
    outputs = llm.generate(["abcabcab"] * 4, params)
    assert outputs[0].metrics.num_draft_tokens == 0
    assert llm.metrics.num_draft_tokens > 0
    assert any(0 in asked and any(asked) for _, asked, _ in proposals), "0 is allowed"
    for slots, asked, block in proposals:
        counts, rows = block.num_B.tolist(), block.token_BK.tolist()
        assert len(slots) == len(counts) == len(rows)
        for most, count, row, real in zip(
            asked, counts, rows, block.real_q_B.tolist(), strict=True
        ):
            assert count <= most
            assert all(0 <= token < VOCABULARY for token in row[:count])
            assert set(row[count:]) <= {-1}
            assert not real or (count > 0 and block.cache is not None)


class Watching(NGram):
    """Remembers the steps that it observed, and a number for each slot."""

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self.seen: list[tuple[StepInput, list[int], list[int], StepResult]] = []
        self.lengths: dict[int, int] = {}

    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Where each request's tokens began and ended, drafts included."""
        starts = batch.position_T[batch.attention.query_start_B1[:-1]].tolist()
        self.seen.append((rows.step, starts, batch.attention.length_B.tolist(), result))
        for slot in rows.step.slot_B:
            self.lengths[slot] = int(self.slots.length_S[slot])

    def release(self, slot: int) -> None:
        self.lengths.pop(slot, None)

    def held_slots(self) -> Any:
        return self.lengths


class Leaking(Watching):
    def release(self, slot: int) -> None:
        """Forgets to forget."""


class ForeignIds(NGram):
    """Every other draft is an id that the target lacks."""

    def propose(self, rows: DraftRequests) -> DraftBlock:
        block = super().propose(rows)
        token_BK = block.token_BK.clone()
        token_BK[:, 1::2] = VOCABULARY + 7
        return replace(block, token_BK=token_BK)


class TooMany(NGram):
    def propose(self, rows: DraftRequests) -> DraftBlock:
        return one_hot_block([[1] * (num + 1) for num in rows.num_B.tolist()], CPU)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for drafter in (Watching, Leaking, ForeignIds, TooMany):
        place = f"{__name__}:{drafter.__name__}"
        monkeypatch.setitem(DRAFTERS, drafter.__name__, place)


@pytest.mark.usefixtures("registered")
def test_every_step_is_observed_once_prompts_too(target: Path) -> None:
    llm = build(target, "Watching", prompt_lookup_min=1)
    prompts = ["abc" * 30, "xyz"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    drafter: Any = llm.engine.runner.drafter
    computed = dict.fromkeys(range(4), 0)
    emitted = dict.fromkeys(range(4), 0)
    for step, starts, ends, result in drafter.seen:
        assert result.step is step
        for slot, num_tokens, start, end in zip(
            step.slot_B, step.num_tokens_B, starts, ends, strict=True
        ):
            assert start == computed[slot], "in order, without a gap"
            outcome = result.decisions.get(slot, Outcome([]))
            assert end == start + num_tokens + outcome.num_drafts
            computed[slot] += num_tokens + outcome.num_accepted
            emitted[slot] += len(outcome.token_ids)
    assert sorted(computed.values()) == [0, 0, 3 + 29, 90 + 29]
    assert sum(emitted.values()) == sum(len(o.outputs[0].token_ids) for o in outputs) == 60
    seen = [(step.slot_B, result.decisions) for step, _, _, result in drafter.seen]
    assert any({*slots} - decided.keys() for slots, decided in seen), "a prompt"
    assert drafter.lengths == {}, "released with the request"


@pytest.mark.usefixtures("registered")
def test_state_that_a_drafter_keeps_for_a_free_slot_is_found(target: Path) -> None:
    llm = build(target, "Leaking")
    with pytest.raises(IntegrityError, match=r"`drafts` has state of slots that are free: \[0\]"):
        llm.generate("abc", SamplingParams(max_tokens=3))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("edits", [{}, {"repetition_penalty": 1.2, "logprobs": 1}])
def test_ids_that_the_target_lacks_are_rejected_and_cost_nothing_else(
    target: Path, edits: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **edits)
    expected, outputs = (
        build(target, name, prompt_lookup_min=1).generate(["abcabc", "xx"], params)
        for name in ("ngram", "ForeignIds")
    )
    for mine, theirs in zip(outputs, expected, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.metrics.accepted_per_position[1:] == [0] * 3
        assert mine.metrics.drafted_per_position[1] > 0


@pytest.mark.usefixtures("registered")
def test_more_drafts_than_were_asked_for_are_an_error(target: Path) -> None:
    llm = build(target, "TooMany")
    with pytest.raises(StepError, match=r"5\]? drafts.* requested"):
        llm.generate("abc", SamplingParams(max_tokens=9))
    llm.engine.check_integrity()
