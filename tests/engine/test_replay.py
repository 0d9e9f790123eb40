"""A step is a message: what was sent in a run, as bytes, gives another process the same results.

The run has preemption, prefix hits, aborts, prompts in chunks, edits of every kind, evidence, log-
probabilities, several samples, three drafters and a K that changes from step to step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken import SamplingParams
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.sampling.edits import PackedEdits
from foretoken.slots.step import StepPlan, encode
from tests.engine.replay import Recorder, build, grammar_of, read, replay
from tests.models.heads import head_of

ROOT = Path(__file__).parents[2]
NAMES = ("draft_model", "ngram", "eagle3")
PROMPTS = ["def f(x):\n", "import os", "a", "for i in x:\n    y\n" * 3, "x = 1\n" * 5, "zz"]
EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"structured_outputs": {"regex": "[a-f]{5,20}x"}},
    {"bad_words": ["a", "b c"], "logit_bias": {5: 2.0}},
    {"min_tokens": 6, "stop_token_ids": [*range(0, 256, 9)]},
]


def options(target: Path, draft: Path, *, on_host: bool) -> dict[str, Any]:
    models = {"draft_model": str(draft), "eagle3": str(head_of(target))}
    entries = [{"method": name, "model": models.get(name)} for name in NAMES]
    sizes = {"num_blocks": 23, "block_size": 4, "max_num_seqs": 5, "max_model_len": 96}
    engine = {
        "model": str(target), "speculative_config": {"drafters": entries, "method": "ngram"},
        "threads": 1, "max_num_batched_tokens": 40, **sizes,
    }  # fmt: skip
    return {"on_host": on_host, "engine": engine}


def asked_of(engine: Engine, number: int) -> SamplingParams:
    params = SamplingParams(
        temperature=(0.9, 0.0, 1.3)[number % 3],
        rejection_sample_method=(None, "block", "coupled")[number % 3],
        num_speculative_tokens=(None, 2, 0, 3)[number % 4], drafter=NAMES[number // 2 % 3],
        max_tokens=9 + 5 * (number % 4), seed=number, n=1 + number % 2,
        top_p=0.9 if number % 4 == 1 else 1.0, logprobs=2 if number % 3 == 0 else None,
        prompt_logprobs=1 if number in (2, 8) else None, trace=number % 4 == 0, **EDITS[number % 5],
    )  # fmt: skip
    return replace(params, structured_outputs=grammar_of(engine, params.structured_outputs))


def serve(engine: Engine) -> list[RequestGroup]:
    """Requests come while others run, some are aborted, and K is another in each step."""
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(2)]  # type: ignore[union-attr]
    groups: list[RequestGroup] = []
    for step in range(1000):
        if len(groups) < len(prompts) and step % 2 == 0:
            number = len(groups)
            params = asked_of(engine, number)
            groups.append(engine.add(str(number), prompts[number], params))
        if step in (9, 16):
            engine.abort(groups[step // 4])
        for number, request in enumerate(engine.scheduler.running):
            if engine.runner.on_host or request.history is None:  # else there are no drafts at all
                request.num_speculative_tokens = (step + 3 * number) % 5
        engine.step()
        if len(groups) == len(prompts) and not engine.has_work:
            return groups
    raise AssertionError("requests are left over")


@pytest.fixture(scope="module")
def recorded(target: Path, draft: Path) -> tuple[dict[str, Any], Recorder]:
    return record(options(target, draft, on_host=True))


def record(asked: dict[str, Any]) -> tuple[dict[str, Any], Recorder]:
    engine: Any = build(asked)
    recorder = engine.runner = Recorder(engine.runner)
    groups = serve(engine)
    messages = [read(engine, one) for one in recorder.messages]
    plans = [message for message in messages if isinstance(message, StepPlan)]
    edits = len(recorder.messages) - len(plans)
    assert edits > 10
    assert sum(group.metrics.num_preemptions for group in groups) > 0
    assert sum(group.metrics.num_cached_tokens for group in groups) > 0
    samples = [sample for group in groups for sample in group.samples]
    assert Counter(sample.finish_reason for sample in samples).keys() >= {"abort", "length", "stop"}
    assert any(sample.logprobs for sample in samples)
    assert any(sample.trace for sample in samples)
    assert any(group.prompt_logprobs for group in groups)
    steps = [plan.step for plan in plans]
    assert {most for step in steps for most in step.max_drafts_B} == set(range(5))
    assert not all(decides for step in steps for decides in step.decides_B), "no prompt was cut"
    drafters = {group.params.drafter for group in groups if group.metrics.num_accepted_tokens}
    assert drafters >= {"draft_model", "eagle3"}
    return asked, recorder


def test_another_process_gets_the_same_results(
    recorded: tuple[dict[str, Any], Recorder], tmp_path: Path, forked: None
) -> None:
    check_elsewhere(*recorded, tmp_path)


def test_so_it_does_of_an_asynchronous_device(
    target: Path, draft: Path, tmp_path: Path, forked: None
) -> None:
    check_elsewhere(*record(options(target, draft, on_host=False)), tmp_path)


def check_elsewhere(asked: dict[str, Any], recorder: Recorder, folder: Path) -> None:
    (folder / "messages.jsonl").write_bytes(b"\n".join(recorder.messages))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.replay", folder / "messages.jsonl"],
        input=json.dumps(asked), cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == len(recorder.outcomes) > 50
    for number, (mine, theirs) in enumerate(zip(recorder.outcomes, found, strict=True)):
        assert theirs == mine, f"step {number}"


def without_edits(messages: list[Any]) -> None:
    """One step's edits get lost, masks of grammars among them."""
    masked = (isinstance(one, PackedEdits) and one.mask_RW is not None for one in messages)
    del messages[[*masked].index(True)]


def without_bias(messages: list[Any]) -> None:
    """Edits ban nothing and favour nothing."""
    for at, one in enumerate(messages):
        if isinstance(one, PackedEdits):
            messages[at] = one._replace(bias_M=np.zeros_like(one.bias_M))


def without_blocks(messages: list[Any]) -> None:
    """A request that has begun does not learn of its new blocks."""
    grows = (
        isinstance(one, StepPlan) and one.new_blocks and not one.admissions for one in messages
    )
    at = [*map(bool, grows)].index(True)
    messages[at] = messages[at]._replace(new_blocks=[])


def with_other_noise(messages: list[Any]) -> None:
    """One request has another key."""
    admission = messages[0].admissions[0]
    messages[0] = messages[0]._replace(admissions=[admission._replace(key=admission.key ^ 1)])


def with_other_drafts(messages: list[Any]) -> None:
    """Nothing is drafted in one step."""
    at = next(
        at for at, one in enumerate(messages)
        if isinstance(one, StepPlan) and any(one.step.max_drafts_B)
        and not isinstance(messages[at + 1], PackedEdits)
    )  # fmt: skip
    step = messages[at].step._replace(max_drafts_B=[0] * len(messages[at].step.slot_B))
    messages[at] = messages[at]._replace(step=step)


MUTANTS = [without_edits, without_bias, without_blocks, with_other_noise, with_other_drafts]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_message_that_is_not_the_same_gives_other_results(
    recorded: tuple[dict[str, Any], Recorder], mutate: Callable[[list[Any]], None]
) -> None:
    asked, recorder = recorded
    engine = build(asked)
    messages = [read(engine, one) for one in recorder.messages]
    mutate(messages)
    assert replay(engine, map(encode, messages)) != recorder.outcomes
