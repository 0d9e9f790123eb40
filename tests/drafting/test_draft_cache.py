"""The drafter's half of the cache: what counts as complete was computed, whatever the steps were.

Requests come, decode with a K that changes from step to step, give way, hit prefixes and are
aborted. Blocks that change hands are filled with a number that no model computes, so that whatever
was left out shows. A seeded request then gets from these blocks what it gets from an empty cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.draft_model import DraftModel
from foretoken.drafting.lockstep import LockstepDraftModel
from foretoken.drafting.registry import DRAFTERS, ON_HOST_ALONE
from foretoken.engine.request import Request, RequestGroup, Status
from foretoken.ops import unavailable
from tests.models.heads import head_of

STALE, K, SIZE = 3e4, 3, 4
ASKED: dict[str, dict[str, Any]] = {
    "forced": {"allowed_token_ids": [7]},
    "prediction": {"prediction": "abc" * 20},
}
SEVERAL = {
    "several": ("draft_model", "ngram", "eagle3"),
    "hybrid": ("ngram", "draft_model"),
}


class Case(NamedTuple):
    """A drafter, over slots on a host or on a device."""

    name: str
    on_host: bool

    @property
    def members(self) -> tuple[str, ...]:
        return SEVERAL.get(self.name, (self.name,))


CASES = [
    *(Case(name, True) for name in (*DRAFTERS, *SEVERAL)),
    *(Case(name, False) for name in (*DRAFTERS, "several") if name not in ON_HOST_ALONE),
]
WITH_KV = [case for case in CASES if {"draft_model", "eagle3"} & {*case.members}]


def build(target: Path, draft: Path, case: Case, **options: Any) -> LLM:
    given: dict[str, dict[str, Any]] = {
        "draft_model": {"model": str(draft)},
        "draft_text": {"model": str(draft)},
        "eagle3": {"model": str(head_of(target))},
        "ngram": {"prompt_lookup_min": 1},
        "suffix": {"suffix_decoding_max_cached_requests": 0},
    }
    entries: list[dict[str, Any]] = [{"method": n, **given.get(n, {})} for n in case.members]
    spec = entries[0]
    if case.name in SEVERAL:
        spec = {"drafters": entries, "method": "hybrid" if case.name == "hybrid" else "draft_model"}
    sizes = {"num_blocks": 34, "max_num_seqs": 4, "max_num_batched_tokens": 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.engine.build.is_on_host", lambda device: case.on_host)
        return LLM(
            str(target), {**spec, "num_speculative_tokens": K}, threads=1,
            backend="auto" if case.on_host else "torch", block_size=SIZE, **{"max_model_len": 96, **sizes, **options},
        )  # fmt: skip


def keepers(llm: LLM) -> Iterator[Autoregressive]:
    """The drafters that keep K/V in the target's blocks."""
    drafter: Any = llm.engine.runner.drafter
    for member in getattr(drafter, "members", [drafter]):
        if isinstance(member, Autoregressive):
            yield member


def kept(drafter: Autoregressive, blocks: list[int]) -> Tensor:
    """All it keeps in these blocks, a row each: where in it a position is, kernels decide."""
    caches = (*drafter.kv.keys, *drafter.kv.values)
    return torch.cat([cache[blocks].flatten(1) for cache in caches], dim=1)


def claimed(drafter: Autoregressive, request: Request) -> list[int]:
    """Blocks of a running request that by the drafter's contract are complete."""
    if isinstance(drafter, DraftModel):
        return [block for block in request.block_ids if drafter.complete[block]]
    known = len(request.token_ids) - drafter.reads_next_token
    num = min(request.num_computed - drafter.num_behind, known)
    return request.block_ids[: max(num, 0) // SIZE]


def found(llm: LLM, drafter: Autoregressive, tokens: list[int]) -> list[int]:
    """Blocks that others find for a text, as far as the drafter's half counts as complete."""
    blocks = [b for b, _ in llm.engine.scheduler.pool.match(tokens, len(tokens) // SIZE)]
    if isinstance(drafter, DraftModel):
        ends = (i for i, block in enumerate(blocks) if not drafter.complete[block])
        blocks = blocks[: next(ends, len(blocks))]
    return blocks


class Workload:
    """Requests at random; `check` looks at what they leave after every step."""

    def __init__(self, llm: LLM, fresh: LLM, case: Case, seed: int) -> None:
        self.llm, self.fresh, self.case = llm, fresh, case
        self.rng = random.Random(seed)
        self.texts: list[list[int]] = [[i % 60 for i in range(7, 60, 5)]]
        self.live: list[RequestGroup] = []
        self.num_added = self.num_checked = 0
        self.seen = dict.fromkeys(("hits", "preemptions", "aborts", "whole", "plain"), 0)
        runner = llm.engine.runner
        clear = runner.clear

        def poison(block_ids: Any) -> None:
            clear(block_ids)
            for drafter in keepers(llm):
                for cache in (*drafter.kv.keys, *drafter.kv.values):
                    cache[list(block_ids)] = STALE

        runner.clear = poison  # type: ignore[method-assign]

    def params(self, **given: Any) -> SamplingParams:
        name = self.rng.choice(self.case.members)
        asked = {"drafter": name} if self.case.name == "several" else ASKED.get(name, {})
        return SamplingParams(**{"ignore_eos": True, "seed": self.num_added, **asked, **given})

    def add(self) -> None:
        rng = self.rng
        text = rng.choice(self.texts)
        prompt = text[: rng.randint(1, 50)] + [rng.randrange(60) for _ in range(rng.randint(0, 9))]
        params = self.params(
            temperature=rng.choice([0.0, 0.9]),
            max_tokens=rng.choice([1, 2, 9, 30]),
            num_speculative_tokens=rng.choice([None, None, None, 0]),
        )
        self.num_added += 1
        self.live.append(self.llm.engine.add(str(self.num_added), prompt or [1], params))

    def step(self) -> None:
        rng, engine = self.rng, self.llm.engine
        if len(self.live) < 5 and rng.random() < 0.4:
            self.add()
        most = rng.choice([0, 0, K])
        for group in self.live:
            if group.params.num_speculative_tokens != 0:
                group.samples[0].num_speculative_tokens = rng.choice([most, most, most // 2])
        if self.live and rng.random() < 0.03:
            engine.abort(rng.choice(self.live))
            self.seen["aborts"] += 1
        engine.step()
        engine.check_integrity()
        self.check()

    def check(self) -> None:
        for group in self.live:
            request = group.samples[0]
            for drafter in keepers(self.llm):
                if request.status is Status.RUNNING:
                    rows = kept(drafter, claimed(drafter, request))
                    assert not (rows == STALE).any(), "a position was never computed"
                elif request.status is Status.FINISHED:
                    self.compare(drafter, request.token_ids)
            if group.finished:
                assert group.error is None
                metrics = group.metrics
                self.texts.append(request.token_ids)
                self.seen["hits"] += metrics.num_cached_tokens
                self.seen["preemptions"] += metrics.num_preemptions
                self.seen["whole"] += metrics.num_accepted_tokens
        self.live = [group for group in self.live if not group.finished]

    def compare(self, drafter: Autoregressive, text: list[int]) -> None:
        """What others find of a text is what an engine keeps that computes it at once."""
        blocks = found(self.llm, drafter, text)
        if not blocks:
            return
        mine = kept(drafter, blocks)
        index = [type(d) for d in keepers(self.llm)].index(type(drafter))
        theirs = expected(self.fresh, index, self.case, text)[: len(mine)]
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        self.num_checked += len(mine)


def expected(fresh: LLM, index: int, case: Case, text: list[int]) -> Tensor:
    """K/V of a text's positions; without a prefix hit, since log-probabilities are wanted."""
    engine, asked = fresh.engine, {"drafter": "draft_model"} if case.name in SEVERAL else {}
    params = SamplingParams(
        temperature=0.0, max_tokens=2 * K + 2, ignore_eos=True, prompt_logprobs=1, seed=1, **asked
    )
    group = engine.add("fresh", text, params)
    while group.samples[0].num_output < 2 and not group.finished:
        engine.step()
    rows = kept([*keepers(fresh)][index], group.samples[0].block_ids)
    engine.abort(group)
    return rows


@pytest.mark.parametrize("case", WITH_KV, ids=str)
def test_it(target: Path, draft: Path, case: Case) -> None:
    for seed, model, ahead in ((0, target, False), (1, draft, True)):
        llm = build(target, model, case, async_scheduling=ahead)
        fresh = build(target, model, case, num_blocks=99, max_num_batched_tokens=128, max_model_len=128)
        work = Workload(llm, fresh, case, seed)
        for _ in range(250):
            work.step()
        print(case, work.num_checked, work.seen, work.num_added)
