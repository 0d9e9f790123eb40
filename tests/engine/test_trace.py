"""The trace of a step: times by phase, rows, drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.slots.step import StepResult
from tests.engine.doubles import double, failing

PHASES = ["schedule", "admit", "batch", "draft", "forward", "verify", "advance", "observe"]
PHASES += ["read", "commit"]


@pytest.fixture
def llm(target: Path, draft: Path) -> LLM:
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    return LLM(str(target), speculation, max_num_seqs=3, max_num_batched_tokens=16, block_size=4)


def traces_of(llm: LLM, prompts: Any, params: Any) -> tuple[list[StepTrace], Any]:
    traces: list[StepTrace] = []
    llm.engine.on_step = traces.append
    outputs = llm.generate(prompts, params)
    llm.engine.on_step = None
    return traces, outputs


def test_a_trace_adds_up_to_what_was_done(llm: LLM) -> None:
    prompts = ["a prompt of more tokens than one step takes", "abc"]
    traces, outputs = traces_of(llm, prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    metrics = llm.metrics
    assert sum(trace.num_drafts for trace in traces) == metrics.num_draft_tokens > 0
    assert sum(trace.num_accepted for trace in traces) == metrics.num_accepted_tokens > 0
    # Every token but the last of each is computed, and every draft that was not accepted.
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    rejected = metrics.num_draft_tokens - metrics.num_accepted_tokens
    after = sum(trace.num_tokens for trace in traces) - tokens - rejected
    assert 0 <= after <= 3 * len(prompts), "drafts accepted after the last token"
    assert traces[0].num_requests == 2
    assert [trace.num_decoding for trace in traces][:2] == [0, 1]
    assert {trace.num_decoding for trace in traces[5:-5]} == {2}


def test_a_step_reads_the_tokens_before_its_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, num_speculative_tokens=0)
    traces, (output,) = traces_of(llm, ["a prompt of more tokens than a step takes"], params)
    contexts, length = [0], len(output.prompt_token_ids)
    while contexts[-1] < length + 3:
        contexts.append(
            min(contexts[-1] + 16, length) if contexts[-1] < length else contexts[-1] + 1
        )
    assert length > 16
    assert [trace.num_context for trace in traces] == contexts


def test_phases_come_in_order_and_add_up(llm: LLM) -> None:
    traces, _ = traces_of(llm, "abc", SamplingParams(max_tokens=9, logprobs=1))
    for trace in traces:
        assert [*trace.seconds] == PHASES
        assert min(trace.seconds.values()) >= 0
        assert sum(trace.seconds.values()) == pytest.approx(trace.total)
    plain, _ = traces_of(llm, "abc", SamplingParams(max_tokens=9))
    assert {tuple(trace.seconds) for trace in plain} == {tuple(PHASES)}


def test_without_a_reader_of_traces_no_phase_is_timed(llm: LLM) -> None:
    engine, results = llm.engine, list[StepResult]()

    def kept(finish: Callable[..., StepResult], *given: Any) -> StepResult:
        results.append(finish(*given))
        return results[-1]

    with double(engine, "runner", finish=kept):
        llm.generate("abc", SamplingParams(max_tokens=9))
        assert results
        assert not any(result.phases for result in results)
        results.clear()
        traces_of(llm, "abc", SamplingParams(max_tokens=9))
        assert all(result.phases for result in results)


def test_a_step_that_failed_has_a_trace(llm: LLM) -> None:
    with double(llm.engine.runner, "model", forward=failing(ValueError("broken"))):
        traces, (output,) = traces_of(llm, ["abc"], None)
    assert output.error is not None
    (trace,) = traces
    assert trace.num_requests == trace.num_tokens == 0
    assert "forward" not in trace.seconds
