"""An exception ends what it must and no more: one request, or the batch; never the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.config.checks import machine_bytes
from foretoken.engine import memory_plan
from foretoken.engine.build import EngineParts
from foretoken.engine.engine import Engine
from foretoken.engine.request import Request
from foretoken.engine.rounds import logprob_rows
from foretoken.errors import (
    ConfigError,
    EngineMemoryError,
    IntegrityError,
    ProcessingError,
    StepError,
)
from foretoken.sampling.history import EditHistory, HistoryRows
from tests.engine.doubles import double, failing, llm_of, nth

FAULTY = "bad prompt"
PROMPTS = ["abc", FAULTY, "def f(x):"]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=20, repetition_penalty=1.1, logprobs=1, prompt_logprobs=1,
    stop=["never said"],
)  # fmt: skip


class Broken(Exception):
    """What the tests inject."""


ORDERS = ["in turn", "one late"]


def make_llm(target: Path, draft: Path, order: str, **options: Any) -> LLM:
    ahead = order == "one late"
    return LLM(str(target), {"model": str(draft)}, block_size=4, async_scheduling=ahead, **options)


@pytest.fixture(scope="module", params=ORDERS)
def llm(target: Path, draft: Path, request: pytest.FixtureRequest) -> LLM:
    return make_llm(target, draft, request.param, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]


Fault = Callable[[LLM, list[list[int]]], AbstractContextManager[Any]]
"""Breaks something for the request of `FAULTY` alone; the lists are the tokens of all requests."""
INJECTED = Broken("injected")


def in_encoding(llm: LLM, expected: list[list[int]]) -> AbstractContextManager[Any]:
    encode = failing(INJECTED, lambda text, **options: text == FAULTY)
    return double(llm.engine, "tokenizer", encode=encode)


def in_decoding(llm: LLM, expected: list[list[int]]) -> AbstractContextManager[Any]:
    """Its text is read token by token, for the stop string, and cannot be read after seven."""

    def its_seventh(ids: list[int], **options: Any) -> bool:
        return len(ids) > 1 and ids[-3:] == expected[1][4:7]

    return double(llm.engine, "tokenizer", decode=failing(INJECTED, its_seventh))


def at_admission(llm: LLM, change: Callable[[Request], None]) -> AbstractContextManager[Any]:
    """Changes what the request of `FAULTY` brings, as soon as it waits."""

    def add(real: Callable[[Request], None], request: Request) -> None:
        if request.group.prompt == FAULTY:
            change(request)
        real(request)

    return double(llm.engine, "scheduler", add=add)


class Unreadable(frozenset[int]):
    def __iter__(self) -> Any:
        raise INJECTED


def in_admission(llm: LLM, expected: list[list[int]]) -> AbstractContextManager[Any]:
    def change(request: Request) -> None:
        request.stop_ids = Unreadable(request.stop_ids)

    return at_admission(llm, change)


class FailsToAppend(EditHistory):
    def append(self, token_ids: Any) -> None:
        if len(self.output_ids) >= 4:
            raise INJECTED
        super().append(token_ids)


class FailsToEdit(EditHistory):
    def rows(self, drafts: Any, vocab_size: int) -> HistoryRows:
        if len(self.output_ids) >= 4:
            raise INJECTED
        return super().rows(drafts, vocab_size)


def in_history(kind: type[EditHistory]) -> Fault:
    def change(request: Request) -> None:
        request.history = kind(request.params, request.group.prompt_ids, tuple(request.stop_ids))

    return lambda llm, expected: at_admission(llm, change)


@contextmanager
def in_logprobs(llm: LLM, expected: list[list[int]]) -> Iterator[None]:
    one, mine, other = expected
    late = set(mine[6:]) - {*mine[:6], *one, *other}
    fails = failing(INJECTED, lambda found, tokens, *others: not late.isdisjoint(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.engine.engine.logprob_rows", partial(fails, logprob_rows))
        yield


FAULTS: dict[str, Fault] = {
    "admission": in_admission,
    "encoding": in_encoding,
    "decoding": in_decoding,
    "history": in_history(FailsToAppend),
    "edits": in_history(FailsToEdit),
    "log-probabilities": in_logprobs,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_request_ends_it_alone(
    llm: LLM, expected: list[list[int]], fault: str
) -> None:
    leave_unfinished(llm)
    with FAULTS[fault](llm, expected):
        outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
    assert [o.outputs[0].token_ids for o in outputs[::2]] == expected[::2]
    assert all(o.error is None for o in outputs[::2])
    bad = outputs[1]
    assert isinstance(bad.error, ProcessingError)
    assert f"request {bad.request_id}" in str(bad.error)
    assert isinstance(bad.error.__cause__, Broken)
    if fault != "encoding":
        (sample,) = bad.outputs
        assert sample.finish_reason == "error"
        assert sample.token_ids == expected[1][: len(sample.token_ids)] != expected[1]
    assert_clean(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


def failing_pass(llm: LLM, error: Exception, number: int) -> AbstractContextManager[Any]:
    return double(llm.engine.runner, "model", forward=failing(error, nth(number)))


def leave_unfinished(llm: LLM) -> None:
    """Abort requests: what they had stays in their slots until the next admission."""
    engine = llm.engine
    for i in range(4):
        engine.add(str(i), [i, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort_all()


def assert_clean(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    engine.check_integrity()


def test_a_fault_while_the_text_is_built_ends_the_stream(llm: LLM) -> None:
    """Without stop strings no text is made before the stream asks for it."""
    readable = replace(PARAMS, stop=[])
    shown = [output.outputs[0].token_ids for output in llm.stream(FAULTY, readable)]
    tail = next(token_ids for token_ids in shown if token_ids)

    def its_own(ids: list[int], **options: Any) -> bool:
        return len(ids) > 1 and ids[-len(tail) :] == tail

    with double(llm.engine, "tokenizer", decode=failing(INJECTED, its_own)):
        *running, last = llm.stream(FAULTY, readable)
    assert last.finished
    assert not any(output.finished for output in running)
    assert isinstance(last.error, ProcessingError)
    assert last.outputs[0].finish_reason == "error"
    assert_clean(llm)


def test_one_sample_that_fails_leaves_the_others(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.8, max_tokens=8, n=3, seed=5, ignore_eos=True, stop=["never said"]
    )
    whole = llm.generate(["abc"], params)[0]
    fourth = whole.outputs[1].token_ids[2:4]
    decode = failing(INJECTED, lambda ids, **options: ids[-2:] == fourth)
    with double(llm.engine, "tokenizer", decode=decode):
        (output,) = llm.generate(["abc"], params)
    assert [s.finish_reason for s in output.outputs] == ["length", "error", "length"]
    assert "sample 1" in str(output.error)
    for mine, theirs in zip(output.outputs, whole.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]


class Jammed:
    """Keeps something of slots, and fails to release it."""

    is_jammed = True

    def release(self, slot: int) -> None:
        if self.is_jammed:
            raise INJECTED

    def held_slots(self) -> Iterable[int]:
        return ()


def test_an_owner_that_cannot_release_gives_the_slot_back(
    llm: LLM, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    jammed = Jammed()
    llm.engine.runner.slots.register("something", jammed)
    outputs = llm.generate(PROMPTS, [replace(PARAMS, max_tokens=5), PARAMS, PARAMS])
    tokens = [expected[0][:5], *expected[1:]]
    assert [(o.error, o.outputs[0].token_ids) for o in outputs] == [(None, ids) for ids in tokens]
    assert "injected" in caplog.text
    jammed.is_jammed = False
    assert_clean(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


BATCH_PARTS = {
    "forward": "model", "verify": "sampler", "propose": "drafter", "observe": "drafter",
    "clear": "drafter",
}  # fmt: skip


@pytest.mark.parametrize("method", BATCH_PARTS)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_a_fault_in_the_batch_ends_what_runs_and_the_engine_goes_on(
    target: Path, draft: Path, method: str, number: int, order: str
) -> None:
    llm = make_llm(target, draft, order, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = [o.outputs[0].token_ids for o in llm.generate(["abc", "abd", "abe", "abf"], params)]
    fails = {method: failing(Broken("wires"), nth(number))}
    with double(llm.engine.runner, BATCH_PARTS[method], **fails):
        outputs = llm.generate(["abc", "abd", "abe", "abf"], params)
    assert [type(o.error) for o in outputs[:2]] == [StepError] * 2
    assert all(isinstance(o.error.__cause__, Broken) for o in outputs[:2] if o.error)
    for output, tokens in zip(outputs, whole, strict=True):
        (sample,) = output.outputs
        assert sample.token_ids == tokens[: len(sample.token_ids)]
        assert sample.finish_reason == ("error" if output.error else "length")
    assert [o.outputs[0].token_ids for o in outputs[2:]] == whole[2:], "those that waited"
    assert_clean(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(["abc", "abd"], params)] == whole[:2]


def test_a_single_prompt_raises_its_fault(llm: LLM) -> None:
    said = "Broken in a step of the whole batch: wires"
    with failing_pass(llm, Broken("wires"), 2), pytest.raises(StepError, match=said) as caught:
        llm.generate("abc")
    assert isinstance(caught.value.__cause__, Broken)
    assert_clean(llm)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_that_runs_out_in_a_step_says_what_to_lower(llm: LLM, error: Exception) -> None:
    with failing_pass(llm, error, 2):
        (output,) = llm.generate(["abc"])
    assert isinstance(output.error, EngineMemoryError)
    assert output.error.__cause__ is error
    for option in ("kv_cache_gib", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert f"`{option}`" in str(output.error)


def test_a_schedule_that_raises_is_our_bug_and_leaves_nothing(llm: LLM) -> None:
    schedule = failing(Broken("plan"), nth(2))
    with double(llm.engine, "scheduler", schedule=schedule), pytest.raises(Broken):
        llm.generate(["abc", "abd"])
    assert_clean(llm)


def run_dry(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_what_is_leaked_is_told_when_the_engine_goes_idle(
    llm: LLM, expected: list[list[int]]
) -> None:
    pool, engine = llm.engine.scheduler.pool, llm.engine
    leaked = pool.allocate(1)
    group = engine.add("short", [1, 2], SamplingParams(max_tokens=2, num_speculative_tokens=0))
    other = engine.add("long", [3, 4], SamplingParams(max_tokens=9, ignore_eos=True))
    while not group.finished:
        engine.step()  # there is work left: nothing is checked
    with pytest.raises(IntegrityError, match=rf"block {leaked[0]} has 1 references, 0 owners"):
        run_dry(engine)
    assert other.finished
    # A step that fails as a whole ends idle, too: the fault is told, or else the leak.
    with failing_pass(llm, Broken("wires"), 1), pytest.raises(IntegrityError):
        llm.generate(["abc"], PARAMS)
    pool.free(leaked)
    with failing_pass(llm, Broken("wires"), 1):
        (output,) = llm.generate(["abc"], PARAMS)
    assert isinstance(output.error, StepError)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("num_blocks", [10**9, 10**14, 10**17])
def test_a_cache_beyond_the_machine_is_refused(target: Path, num_blocks: int) -> None:
    with pytest.raises(EngineMemoryError, match=r"GiB of memory.*`kv_cache_gib`"):
        LLM(str(target), num_blocks=num_blocks)


def test_memory_that_runs_out_while_building_is_typed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise Broken("else")

    with pytest.raises(Broken):
        llm_of(EngineParts(load_model=load), target)
    monkeypatch.setattr(memory_plan, "check_fits", lambda num_bytes: None)
    with pytest.raises(EngineMemoryError, match=r"engine was built.*`max_num_seqs`"):
        LLM(str(target), num_blocks=10**13)
    with pytest.raises(ConfigError):
        LLM(str(target), kv_cache_gib=1e-9)


def test_what_counts_as_out_of_memory() -> None:
    assert memory_plan.is_out_of_memory(MemoryError())
    assert memory_plan.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory_plan.is_out_of_memory(RuntimeError("shapes differ"))
    assert not memory_plan.is_out_of_memory(ValueError("out of memory"))
    assert (machine_bytes() or 0) > 2**20
