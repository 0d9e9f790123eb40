"""The drafter's half of the cache: blocks that count as complete were computed, in any schedule.

Requests arrive, decode with a K that changes from step to step, are preempted, hit prefixes and
are aborted. Freed blocks are filled with a number that no model computes, so that a position that
was left out shows. At the end, seeded requests get the same tokens and accept as many drafts from
these blocks and slots as from an engine that has served no other request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.drafting.registry import DRAFTERS, ON_DEVICE, ON_HOST_ALONE
from foretoken.drafting.stacks import Autoregressive, DraftModel, Eagle3, LockstepDraftModel
from foretoken.engine.build import EngineParts
from foretoken.engine.request import Request, RequestGroup, Status
from foretoken.ops import unavailable
from foretoken.ops.steps import ForwardBatch
from foretoken.slots.step import StepRequests, StepResult
from tests.engine.doubles import llm_of
from tests.models.heads import drafter_options

STALE, K, SIZE = 3e4, 3, 2
ASKED: dict[str, dict[str, Any]] = {
    "forced": {"allowed_token_ids": [7]},
    "prediction": {"prediction": [1, 2, 3] * 20},
}
SEVERAL = {"several": ("draft_model", "ngram", "eagle3"), "hybrid": ("ngram", "draft_model")}


class Case(NamedTuple):
    """A drafter, over slots on a host or on a device."""

    name: str
    on_host: bool

    def __str__(self) -> str:
        return f"{self.name} on a {'host' if self.on_host else 'device'}"

    @property
    def members(self) -> tuple[str, ...]:
        return SEVERAL.get(self.name, (self.name,))


CASES = [
    *(Case(name, True) for name in (*DRAFTERS, *SEVERAL)),
    *(Case(name, False) for name in (*DRAFTERS, "several") if name not in ON_HOST_ALONE),
]
WITH_KV = [case for case in CASES if {"draft_model", "eagle3"} & {*case.members}]


def build(target: Path, draft: Path, case: Case, **options: Any) -> LLM:
    given = drafter_options(target, draft) | {"suffix": {"suffix_decoding_max_cached_requests": 0}}
    entries: list[dict[str, Any]] = [{"method": n, **given.get(n, {})} for n in case.members]
    spec = entries[0]
    if case.name in SEVERAL:
        spec = {"drafters": entries, "method": "hybrid" if case.name == "hybrid" else "draft_model"}
    sizes = {"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 20}
    sizes |= {"block_size": SIZE, "max_model_len": 96}
    return llm_of(
        EngineParts(on_host=lambda device: case.on_host), target,
        {**spec, "num_speculative_tokens": K}, threads=1,
        backend="auto" if case.on_host else "torch", **{**sizes, **options},
    )  # fmt: skip


def keepers(llm: LLM) -> Iterator[Autoregressive]:
    drafter: Any = llm.engine.runner.drafter
    for member in getattr(drafter, "members", [drafter]):
        if isinstance(member, Autoregressive):
            yield member


def kept(drafter: Autoregressive, blocks: list[int]) -> Tensor:
    """All K/V of these blocks, a row each. Where in the row a position is, kernels decide."""
    caches = (*drafter.kv.keys, *drafter.kv.values)
    return torch.cat([cache[blocks].flatten(1) for cache in caches], dim=1)


def claimed(drafter: Autoregressive, request: Request) -> list[int]:
    """Blocks of a running request that are complete by the drafter's contract."""
    if isinstance(drafter, DraftModel):
        return [block for block in request.block_ids if drafter.complete[block]]
    known = len(request.token_ids) - drafter.reads_next_token
    num = min(request.num_computed - drafter.num_behind, known)
    return request.block_ids[: max(num, 0) // SIZE]


def found(llm: LLM, drafter: Autoregressive, tokens: list[int]) -> list[int]:
    """Blocks that the prefix index finds for a text, up to the first that the drafter lacks."""
    blocks = [b for b, _ in llm.engine.scheduler.pool.match(tokens, len(tokens) // SIZE)]
    if isinstance(drafter, DraftModel):
        ends = (i for i, block in enumerate(blocks) if not drafter.complete[block])
        blocks = blocks[: next(ends, len(blocks))]
    return blocks


class Workload:
    def __init__(self, llm: LLM, fresh: LLM, case: Case, seed: int) -> None:
        self.llm, self.fresh, self.case = llm, fresh, case
        self.rng = random.Random(seed)
        self.texts: list[list[int]] = [[i % 60 for i in range(7, 60, 5)]]
        self.live: list[RequestGroup] = []
        self.num_added = 0
        self.most_live = 5
        self.seen = Counter[str]()
        runner = llm.engine.runner
        clear = runner.clear

        def poison(block_ids: Any) -> None:
            clear(block_ids)
            for drafter in keepers(llm):
                for cache in (*drafter.kv.keys, *drafter.kv.values):
                    cache[list(block_ids)] = STALE

        runner.clear = poison  # type: ignore[method-assign]

    def params(self, **given: Any) -> SamplingParams:
        first = self.rng.choice([1, None])  # other drafters' rounds hide what one leaves out
        name = self.rng.choice(self.case.members[:first])
        asked = {"drafter": name} if self.case.name == "several" else ASKED.get(name, {})
        return SamplingParams(**{"ignore_eos": True, "seed": self.num_added, **asked, **given})

    def add(self) -> None:
        rng = self.rng
        text = rng.choice(self.texts)
        prompt = text[: rng.randint(1, 40)] + [rng.randrange(60) for _ in range(rng.randint(0, 9))]
        params = self.params(
            temperature=rng.choice([0.0, 0.9]),
            max_tokens=rng.randint(1, 16),
            num_speculative_tokens=rng.choice([None, None, None, 0]),
        )
        self.num_added += 1
        self.live.append(self.llm.engine.add(str(self.num_added), prompt, params))

    def step(self, number: int) -> None:
        rng, engine = self.rng, self.llm.engine
        if rng.random() < 0.1:
            self.most_live = rng.choice([1, 2, 5])
        most = rng.choice([0, K])
        if len(self.live) < self.most_live and rng.random() < (0.2 if most else 0.8):
            self.add()
        for group in self.live:
            if group.params.num_speculative_tokens != 0:
                group.samples[0].num_speculative_tokens = rng.choice([most, most, most, most // 2])
        if self.live and number % 11 == 10:
            engine.abort(rng.choice(self.live))
            self.seen["aborts"] += 1
        if engine.scheduler.running and number % 9 == 8:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        engine.step()
        engine.check_integrity()
        self.check()

    def check(self) -> None:
        for group in self.live:
            request = group.samples[0]
            if request.status is Status.RUNNING:
                for drafter in keepers(self.llm):
                    rows = kept(drafter, claimed(drafter, request))
                    assert not (rows == STALE).any(), "a position was never computed"
            elif group.finished:
                assert group.error is None
                self.compare(request.token_ids)
                self.texts.append(request.token_ids)
                self.seen["hits"] += group.metrics.num_cached_tokens
                self.seen["preemptions"] += group.metrics.num_preemptions
        self.live = [group for group in self.live if not group.finished]

    def compare(self, text: list[int]) -> None:
        """Blocks found for a text equal those of an engine that computes the text at once."""
        mine = [kept(drafter, found(self.llm, drafter, text)) for drafter in keepers(self.llm)]
        if any(map(len, mine)):
            for rows, theirs in zip(mine, self.expected(text), strict=True):
                torch.testing.assert_close(rows, theirs[: len(rows)], rtol=1e-3, atol=1e-3)
                self.seen["compared"] += len(rows)

    def expected(self, text: list[int]) -> list[Tensor]:
        """The rows of each drafter, without a prefix hit, since log-probabilities are requested."""
        engine, name = self.fresh.engine, "draft_model" if self.case.name in SEVERAL else None
        params = SamplingParams(
            temperature=0.0, max_tokens=2 * K + 2, ignore_eos=True, prompt_logprobs=1, drafter=name
        )
        group = engine.add("fresh", text, params)
        while group.samples[0].num_output < 2:
            engine.step()
        rows = [kept(drafter, group.samples[0].block_ids) for drafter in keepers(self.fresh)]
        engine.abort(group)
        return rows


def play(target: Path, draft: Path, case: Case, **options: Any) -> Workload:
    llm = build(target, draft, case, **options)
    fresh = build(
        target, draft, case, num_blocks=198, max_num_batched_tokens=128, max_model_len=128
    )
    work = Workload(llm, fresh, case, seed=4)
    for number in range(64):
        work.step(number)
    return work


def check_warm(work: Workload, cold: LLM) -> None:
    """Seeded requests that continue the texts of finished ones."""
    for i, text in enumerate(work.texts[-3:]):
        asked = work.params(temperature=0.9, seed=i, max_tokens=9)
        mine, theirs = (llm.generate([[*text, 5]], asked)[0] for llm in (work.llm, cold))
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.metrics.drafted_per_position == theirs.metrics.drafted_per_position
        assert mine.metrics.accepted_per_position == theirs.metrics.accepted_per_position
        work.seen["warm"] += mine.metrics.num_cached_tokens


@pytest.mark.parametrize(
    ("case", "always_right"),
    [*((case, True) for case in CASES), *((case, False) for case in WITH_KV)],
    ids=str,
)
def test_what_counts_as_complete_was_computed(
    target: Path, draft: Path, case: Case, always_right: bool
) -> None:
    """With a draft model of which all drafts are accepted, and with one of which some are."""
    if case.name == "suffix" and unavailable("native"):
        pytest.skip("suffix needs the native kernels")
    model = target if always_right else draft
    work = play(target, model, case, async_scheduling=not always_right)
    check_warm(work, build(target, model, case, enable_prefix_caching=False))
    assert {"hits", "preemptions", "aborts", "warm"} <= (+work.seen).keys()
    assert (work.seen["compared"] > 0) == (case in WITH_KV)


class LikeTheTarget(LockstepDraftModel):
    """Computes what the target computes, and nothing that a round left out."""

    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        super().observe(rows._replace(most_drafts=1), batch, result)


class SkipsPlainSteps(LockstepDraftModel):
    def observes(self, rows: StepRequests) -> bool:
        return max(rows.step.num_tokens_B) > 1 and super().observes(rows)


class OneBehind(LockstepDraftModel):
    num_behind = 1


class KeepsMarks(DraftModel):
    """Counts blocks as complete although another request has them now."""

    def clear(self, block_ids: Sequence[int]) -> None:
        """Forgets to forget."""


class SkipsPrompts(Eagle3):
    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        if max(rows.step.num_tokens_B) == 1:
            super().observe(rows, batch, result)


@pytest.mark.parametrize(
    "mutant", [LikeTheTarget, SkipsPlainSteps, OneBehind, KeepsMarks, SkipsPrompts]
)
def test_a_drafter_that_leaves_something_out_is_noticed(
    target: Path, mutant: type[Autoregressive], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("eagle3" if mutant is SkipsPrompts else "draft_model", mutant is KeepsMarks)
    names = DRAFTERS if case.on_host or case.name == "eagle3" else ON_DEVICE
    monkeypatch.setitem(names, case.name, f"{__name__}:{mutant.__name__}")
    with pytest.raises(AssertionError):
        play(target, target, case, async_scheduling=False)


@pytest.mark.parametrize("asked", [None, 0])
def test_a_prompt_in_chunks_is_one_for_the_draft_model_too(
    target: Path, draft: Path, asked: int | None
) -> None:
    """No step computes more of a prompt than the target; a request without drafts computes none."""
    spec = {"model": str(draft), "num_speculative_tokens": 2}
    llm = LLM(str(target), spec, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=96)
    engine, drafter = llm.engine, llm.engine.runner.drafter
    assert isinstance(drafter, DraftModel)
    step, forward, sizes = engine.step, drafter.model.forward, list[int]()

    def counted(batch: ForwardBatch, *rest: Any) -> Any:
        sizes[-1] += len(batch.token_T)
        return forward(batch, *rest)

    def begun() -> Any:
        sizes.append(0)
        return step()

    engine.step, drafter.model.forward = begun, counted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4, num_speculative_tokens=asked, ignore_eos=True)
    llm.generate([[*range(5, 65)]], params)
    assert sizes[:3] == ([16] * 3 if asked is None else [0] * 3)
    assert max(sizes[3:]) <= 16
