"""Slots on a device, where the host knows only bounds: the same outputs as with slots on the host.

The same requests through both kinds of slots, in stock operators on a CPU: tokens, texts, log-
probabilities, finish reasons and counts of drafts are equal, with steps launched ahead and in turn,
padded as captured steps are, with preemption and prefix hits; and mutants of the device's own
bookkeeping are noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams
from foretoken.engine.build import EngineParts
from foretoken.engine.graphs import Graphs
from foretoken.engine.request import RequestGroup
from foretoken.errors import ForetokenError
from foretoken.ops import Rule, Verdict, get_backend
from foretoken.ops.steps import DraftRequests, StepTokens
from foretoken.outputs import RequestOutput
from foretoken.slots.step import Admission, StepInput, StepPlan, StepRequests, StepShape
from foretoken.slots.table import SlotSizes, SlotTable
from tests.engine.doubles import ON_DEVICE, ON_HOST, engine_of, llm_of
from tests.engine.same import check_same
from tests.engine.test_late_results import KeepsRejected
from tests.engine.test_traced_tokens import check_equal as check_traces
from tests.models.heads import head_of

PROMPTS = [
    "def f(x):\n", "import os", "a", "for i in x:\n    y\nfor i in x:\n", "x = 1\n" * 5, "zz",
]  # fmt: skip
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft_model": {},
    "greedy": {"draft_sample_method": "greedy"},
    "eagle3": {"method": "eagle3"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "several": {},
}
NAMES = ("draft_model", "ngram", "eagle3")  # of "several"


class Padding(Graphs):
    """Steps padded as captured ones are, and run as they come."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__((2, 5), (0, num_drafts))

    def __contains__(self, shape: object) -> bool:
        return True

    def stage(self, name: str, run: Callable[..., Any], requests: StepRequests, *given: Any) -> Any:
        return run(requests, *given)


def params_of(kind: str, number: int) -> list[SamplingParams]:
    rules = [None, "block", "coupled"]
    grammar = {"structured_outputs": {"regex": "[a-f]{5,20}x"}}
    edits = [
        {},
        {"repetition_penalty": 1.3},
        grammar,
        {"bad_words": ["a"]},
        {"logit_bias": {5: 2.0}},
    ]
    params = []
    for i in range(number):
        asked: dict[str, Any] = {"logprobs": 2 if i % 3 == 0 else None, "trace": i % 2 == 0}
        asked |= edits[i % 5] if i >= 6 else {}
        if kind != "plain":
            asked["num_speculative_tokens"] = (
                0 if asked.keys() - {"logprobs", "trace"} else (None, 2)[i % 2]
            )
            asked["rejection_sample_method"] = rules[i % 3]
        if kind == "several":
            asked["drafter"] = NAMES[i // 2 % 3]
        params.append(
            SamplingParams(
                temperature=(0.9, 0.0, 1.3)[i % 3], max_tokens=9 + 5 * (i % 4), seed=i, n=1 + i % 2,
                top_p=0.9 if i % 4 == 1 else 1.0, prompt_logprobs=1 if i in (2, 8) else None,
                **asked,
            )
        )  # fmt: skip
    return params


def serve(
    target: Path, draft: Path, kind: str, parts: EngineParts, num_blocks: int = 23, **options: Any
) -> list[RequestOutput]:
    spec = SPECULATION[kind]
    if kind == "several":
        models = {"draft_model": str(draft), "eagle3": str(head_of(target))}
        entries = [{"method": name, "model": models.get(name)} for name in NAMES]
        spec = {"drafters": entries, "method": "ngram"}
    elif spec is not None and kind != "ngram":
        spec = {"model": str(head_of(target) if kind == "eagle3" else draft), **spec}
    llm = llm_of(
        parts, target, spec, backend="torch", threads=1, num_blocks=num_blocks, block_size=4,
        max_num_seqs=5, max_num_batched_tokens=48, max_model_len=96, **options,
    )  # fmt: skip
    engine = llm.engine
    if not engine.runner.slots.on_host:
        engine.runner.graphs = Padding(4 if spec else 0)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    outputs = llm.generate(prompts, params_of(kind, len(prompts)))
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == num_blocks
    return outputs


@functools.cache
def on_the_host(target: Path, draft: Path, kind: str) -> list[RequestOutput]:
    return serve(target, draft, kind, ON_HOST)


def check_equal(mine: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        check_same(one, other)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            check_traces(a.trace, b.trace)


@pytest.mark.parametrize("kind", SPECULATION)
def test_slots_on_a_device_emit_what_slots_on_the_host_do(
    target: Path, draft: Path, kind: str
) -> None:
    expected = on_the_host(target, draft, kind)
    assert sum(output.metrics.num_preemptions for output in expected) > 0
    for ahead in (True, False) if kind in ("plain", "draft_model", "several") else (True,):
        outputs = serve(target, draft, kind, ON_DEVICE, async_scheduling=ahead)
        check_equal(outputs, expected)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert sum(output.metrics.num_cached_tokens for output in outputs) > 0


class ForgetsLimits(SlotTable):
    """Drafts that could never be emitted are made."""

    def count_drafts(self, requests: StepRequests) -> DraftRequests:
        return super().count_drafts(requests)._replace(num_B=requests.max_drafts_D)


class SlipsByOne(SlotTable):
    """Drafts are drawn with the noise of the next position."""

    def count_drafts(self, requests: StepRequests) -> DraftRequests:
        asked = super().count_drafts(requests)
        return asked._replace(position_B=asked.position_B + 1)


class GoesOn(SlotTable):
    """A request that has all its tokens gets more from a step that was launched meanwhile."""

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        self.state.limit_S.add_(1)
        return super().advance(tokens, verdict)


@pytest.mark.parametrize("mutant", [ForgetsLimits, KeepsRejected, SlipsByOne, GoesOn])
def test_mutants_of_the_device_slots_are_noticed(
    target: Path, draft: Path, mutant: type[SlotTable]
) -> None:
    expected = on_the_host(target, draft, "draft_model")
    parts = replace(ON_DEVICE, slot_table=mutant)
    with pytest.raises((AssertionError, ForetokenError)):
        check_equal(serve(target, draft, "draft_model", parts), expected)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_as_many_rows_as_tokens_need_not_be_all_tokens_in_order(target: Path, backend: str) -> None:
    """Chunks of a prompt with log-probabilities, older than a request that decodes with them."""

    def serve(parts: EngineParts) -> list[RequestOutput]:
        llm = llm_of(
            parts, target, backend=backend, threads=1, num_blocks=60, block_size=4,
            max_num_seqs=4, max_num_batched_tokens=12, async_scheduling=True,
        )  # fmt: skip
        prompts = [[3 + i % 50 for i in range(90)], [5, 3, 8, 1]]
        asked = [SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2)]
        asked += [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)]
        return llm.generate(prompts, asked)

    check_equal(serve(ON_DEVICE), serve(ON_HOST))


def test_numbers_of_a_step_lie_where_no_kernel_is_compiled_again() -> None:
    """At multiples of 16 bytes, and of a captured step where they lay when it was captured."""
    steps = get_backend("torch").steps
    table = SlotTable(SlotSizes(6, 8, 2, 2, 0), torch.device("cpu"), steps, on_host=False)
    rule = Rule.STANDARD
    table.apply(
        StepPlan(admissions=[Admission(s, 0, SamplingParams(), rule, [1], 1, 8) for s in range(6)])
    )
    for size in (1, 2, 3, 5):
        for deciding in {size, size - 1} - {0}:
            decides = [True] * deciding + [False] * (size - deciding)
            numbers = list(range(size)), [1] * size, [i % 3 for i in range(size)], decides
            none = [[-1] * size] * 2
            step = StepInput(*numbers, *none, [False] * size)
            shape = StepShape(size + 2, 2, False, frozenset(), False) if all(decides) else None
            for captured in {None, shape}:
                rows, again = table.begin(step, captured), table.begin(step, captured)
                sent = rows.slot_B, rows.num_tokens_B, rows.slot_D, rows.max_drafts_D
                assert [part.data_ptr() % 16 for part in sent] == [0] * 4
                count = size if captured is None else captured.size
                assert rows.num_tokens_B.tolist() == [1] * count
                assert rows.max_drafts_D.tolist()[:deciding] == numbers[2][:deciding]
                same = rows.max_drafts_D.data_ptr() == again.max_drafts_D.data_ptr()
                assert captured is None or same


def test_tokens_of_a_request_that_lost_its_slot_are_not_the_next_ones(target: Path) -> None:
    """Both edit their logits; the slot changes hands while a step of the first is unread."""
    engine = engine_of(
        ON_DEVICE, target, backend="torch", threads=1, num_blocks=60, block_size=4, max_num_seqs=1,
        max_num_batched_tokens=32, async_scheduling=True,
    )  # fmt: skip
    scheduler = engine.scheduler
    params = SamplingParams(
        max_tokens=12, temperature=0.0, frequency_penalty=1.0, allowed_token_ids=[4, 5, 6]
    )

    def finish(*groups: RequestGroup) -> list[list[int]]:
        while not all(group.finished for group in groups):
            engine.step()
        return [group.samples[0].token_ids for group in groups]

    prompts = [[5, 3, 8, 1], [9, 9, 2]]
    alone = [finish(engine.add("alone", prompt, params))[0] for prompt in prompts]
    older = engine.add("older", prompts[0], params)
    scheduler.waiting.clear()  # as a sample that waits for its prompt's first one
    younger = engine.add("younger", prompts[1], params)
    engine.step()
    scheduler.waiting.insert(0, older.samples[0])
    scheduler.preempt(younger.samples[0])
    assert finish(older, younger) == alone
