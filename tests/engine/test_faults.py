"""An exception ends what it must and no more: one request, or the batch; never the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.config.checks import machine_bytes
from foretoken.engine import build, memory_plan
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.engine import Engine
from foretoken.engine.rounds import describe
from foretoken.errors import (
    ConfigError,
    EngineMemoryError,
    IntegrityError,
    ProcessingError,
    StepError,
)
from foretoken.sampling.history import EditHistory
from tests.support.steps import OneLate, break_call

FAULTY = "bad prompt"
PROMPTS = ["abc", FAULTY, "def f(x):"]
PARAMS = SamplingParams(
    temperature=0.0,
    max_tokens=20,
    repetition_penalty=1.1,
    logprobs=1,
    prompt_logprobs=1,
    stop=["never said"],
)


class Broken(Exception):
    """What the tests inject."""


ORDERS = ["in turn", "one late"]


def make_llm(target: Path, draft: Path, order: str, **options: Any) -> LLM:
    """Steps are committed in turn, or each after the next one was launched."""
    llm = LLM(str(target), {"model": str(draft)}, block_size=4, **options)
    if order == "one late":
        llm.engine.step = OneLate(llm.engine).step  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="module", params=ORDERS)
def llm(target: Path, draft: Path, request: pytest.FixtureRequest) -> LLM:
    return make_llm(target, draft, request.param, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]


def failing(real: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """`real`, which raises where `when` says so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise Broken("injected")
        return real(*args, **kwargs)

    return call


Inject = Callable[[LLM, list[list[int]], pytest.MonkeyPatch], None]
"""Breaks something for the request of `FAULTY` alone; these would be everybody's tokens."""


def is_faulty(llm: LLM, prompt_ids: list[int]) -> bool:
    return prompt_ids == llm.tokenizer.encode(FAULTY)  # type: ignore[union-attr]


def inject_admit(llm: LLM, expected: list[list[int]], patch: pytest.MonkeyPatch) -> None:
    its_own = lambda tokenizer, prompt_ids, *given, **options: is_faulty(llm, prompt_ids)  # noqa: E731
    patch.setattr("foretoken.engine.engine.Detokenizer", failing(Detokenizer, its_own))


def inject_encode(llm: LLM, expected: list[list[int]], patch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.tokenizer
    encode = failing(tokenizer.encode, lambda text, **k: text == FAULTY)  # type: ignore[union-attr]
    patch.setattr(tokenizer, "encode", encode)


def inject_decode(llm: LLM, expected: list[list[int]], patch: pytest.MonkeyPatch) -> None:
    """Its text is read token by token, for the stop string, and cannot be read after seven."""

    def its_seventh(ids: list[int], **options: Any) -> bool:
        return len(ids) > 1 and ids[-3:] == expected[1][4:7]

    tokenizer = llm.tokenizer
    patch.setattr(tokenizer, "decode", failing(tokenizer.decode, its_seventh))  # type: ignore[union-attr]


class FaultyHistory(EditHistory):
    """Takes or gives four tokens, then no more."""

    def __init__(self, part: str, *args: Any) -> None:
        super().__init__(*args)
        if part == "append":
            self.append = failing(self.append, self.is_long)  # type: ignore[method-assign]
        else:
            self.rows = failing(self.rows, self.is_long)  # type: ignore[method-assign]

    def is_long(self, *args: Any) -> bool:
        return len(self.output_ids) >= 4


def inject_history(part: str) -> Inject:
    def inject(llm: LLM, expected: list[list[int]], patch: pytest.MonkeyPatch) -> None:
        def made(params: SamplingParams, prompt_ids: list[int], *given: Any) -> EditHistory:
            if is_faulty(llm, prompt_ids):
                return FaultyHistory(part, params, prompt_ids, *given)
            return EditHistory(params, prompt_ids, *given)

        patch.setattr("foretoken.engine.engine.EditHistory", made)

    inject.__name__ = f"inject_history_{part}"
    return inject


def inject_logprobs(llm: LLM, expected: list[list[int]], patch: pytest.MonkeyPatch) -> None:
    one, mine, other = expected
    late = set(mine[6:]) - {*mine[:6], *one, *other}

    def its_own(found: Any, tokens: list[int], *others: Any) -> bool:
        return not late.isdisjoint(tokens)

    patch.setattr("foretoken.engine.engine.describe", failing(describe, its_own))


INJECTIONS: list[Inject] = [
    inject_admit,
    inject_encode,
    inject_decode,
    inject_history("append"),
    inject_history("rows"),
    inject_logprobs,
]


@pytest.mark.parametrize("inject", INJECTIONS, ids=lambda f: f.__name__)
def test_a_fault_in_one_request_ends_it_alone(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, inject: Inject
) -> None:
    leave_unfinished(llm)
    inject(llm, expected, monkeypatch)
    outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
    monkeypatch.undo()
    assert [o.outputs[0].token_ids for o in outputs[::2]] == expected[::2]
    assert all(o.error is None for o in outputs[::2])
    bad = outputs[1]
    assert isinstance(bad.error, ProcessingError)
    assert f"request {bad.request_id}" in str(bad.error)
    assert isinstance(bad.error.__cause__, Broken)
    if inject is not inject_encode:
        (sample,) = bad.outputs
        assert sample.finish_reason == "error"
        assert sample.token_ids == expected[1][: len(sample.token_ids)] != expected[1]
    assert_clean(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


def leave_unfinished(llm: LLM) -> None:
    """Slots whose last requests were aborted: what they had stays until the next admission."""
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


def test_a_fault_while_the_text_is_built_ends_the_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without stop strings nobody reads it before the stream does."""
    readable = replace(PARAMS, stop=[])
    shown = [output.outputs[0].token_ids for output in llm.stream(FAULTY, readable)]
    tail = next(token_ids for token_ids in shown if token_ids)

    def its_own(ids: list[int], **options: Any) -> bool:
        return len(ids) > 1 and ids[-len(tail) :] == tail

    tokenizer = llm.tokenizer
    monkeypatch.setattr(tokenizer, "decode", failing(tokenizer.decode, its_own))  # type: ignore[union-attr]
    *running, last = llm.stream(FAULTY, readable)
    assert last.finished
    assert not any(output.finished for output in running)
    assert isinstance(last.error, ProcessingError)
    assert last.outputs[0].finish_reason == "error"
    assert_clean(llm)


def test_one_sample_that_fails_leaves_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        temperature=0.8, max_tokens=8, n=3, seed=5, ignore_eos=True, stop=["never said"]
    )
    whole = llm.generate(["abc"], params)[0]
    fourth = whole.outputs[1].token_ids[2:4]
    tokenizer = llm.tokenizer
    decode = failing(tokenizer.decode, lambda ids, **k: ids[-2:] == fourth)  # type: ignore[union-attr]
    monkeypatch.setattr(tokenizer, "decode", decode)
    (output,) = llm.generate(["abc"], params)
    assert [s.finish_reason for s in output.outputs] == ["length", "error", "length"]
    assert "sample 1" in str(output.error)
    for mine, theirs in zip(output.outputs, whole.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]


def test_a_drafter_that_cannot_release_gives_the_slot_back(
    llm: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = llm.engine.runner.drafter
    assert drafter is not None
    release = drafter.release
    broken_slots = []

    def first_time(slot: int) -> None:
        kept = slot in drafter.held_slots()
        release(slot)
        if kept and not broken_slots:
            broken_slots.append(slot)
            raise Broken("injected")

    monkeypatch.setattr(drafter, "release", first_time)
    short = replace(PARAMS, max_tokens=5)
    first, *others = llm.generate(PROMPTS, [short, PARAMS, PARAMS])
    assert (first.error, first.outputs[0].token_ids) == (None, expected[0][:5])
    assert broken_slots
    for output, ids in zip(others, expected[1:], strict=True):  # it is over: others go on
        assert (output.error, output.outputs[0].token_ids) == (None, ids)
    assert "injected" in caplog.text
    assert_clean(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


BATCH_PARTS = {
    "forward": lambda llm: (llm.engine.runner.model, "forward"),
    "sampler": lambda llm: (llm.engine.runner.sampler, "verify"),
    "proposal": lambda llm: (llm.engine.runner.drafter, "propose"),
    "outcome": lambda llm: (llm.engine.runner.drafter, "observe"),
    "clearing": lambda llm: (llm.engine.runner, "clear"),
}


@pytest.mark.parametrize("part", BATCH_PARTS)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_a_fault_in_the_batch_ends_what_runs_and_the_engine_goes_on(
    target: Path, draft: Path, part: str, number: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(target, draft, order, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = [o.outputs[0].token_ids for o in llm.generate(["abc", "abd", "abe", "abf"], params)]
    owner, name = BATCH_PARTS[part](llm)
    monkeypatch.setattr(owner, name, break_call(number, Broken("wires"), getattr(owner, name)))
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


def test_a_single_prompt_raises_its_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm.engine.runner.model
    monkeypatch.setattr(model, "forward", break_call(2, Broken("wires"), model.forward))
    with pytest.raises(StepError, match="Broken in a step of the whole batch: wires") as caught:
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
def test_memory_that_runs_out_in_a_step_says_what_to_lower(
    llm: LLM, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llm.engine.runner.model
    monkeypatch.setattr(model, "forward", break_call(2, error, model.forward))
    (output,) = llm.generate(["abc"])
    assert isinstance(output.error, EngineMemoryError)
    assert output.error.__cause__ is error
    for option in ("kv_cache_gib", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert f"`{option}`" in str(output.error)


def test_a_schedule_that_raises_is_our_bug_and_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = llm.engine.scheduler
    monkeypatch.setattr(scheduler, "schedule", break_call(2, Broken("plan"), scheduler.schedule))
    with pytest.raises(Broken):
        llm.generate(["abc", "abd"])
    assert_clean(llm)


def run_dry(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_what_is_leaked_is_told_when_the_engine_goes_idle(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
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
    model = engine.runner.model
    monkeypatch.setattr(model, "forward", break_call(1, Broken("wires"), model.forward))
    with pytest.raises(IntegrityError):
        llm.generate(["abc"], PARAMS)
    pool.free(leaked)
    monkeypatch.setattr(model, "forward", break_call(1, Broken("wires"), model.forward))
    (output,) = llm.generate(["abc"], PARAMS)
    assert isinstance(output.error, StepError)
    monkeypatch.undo()
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("num_blocks", [10**9, 10**14, 10**17])
def test_a_cache_beyond_the_machine_is_refused(target: Path, num_blocks: int) -> None:
    with pytest.raises(EngineMemoryError, match=r"GiB of memory.*`kv_cache_gib`"):
        LLM(str(target), num_blocks=num_blocks)


def test_memory_that_runs_out_while_building_is_typed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "check_fits", lambda num_bytes: None)
        with pytest.raises(EngineMemoryError, match=r"engine was built.*`max_num_seqs`"):
            LLM(str(target), num_blocks=10**13)
    monkeypatch.setattr(build, "load_model", break_call(1, Broken("else"), build.load_model))
    with pytest.raises(Broken):
        LLM(str(target))
    with pytest.raises(ConfigError):
        LLM(str(target), kv_cache_gib=1e-9)


def test_what_counts_as_out_of_memory() -> None:
    assert memory_plan.is_out_of_memory(MemoryError())
    assert memory_plan.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory_plan.is_out_of_memory(RuntimeError("shapes differ"))
    assert not memory_plan.is_out_of_memory(ValueError("out of memory"))
    assert (machine_bytes() or 0) > 2**20
