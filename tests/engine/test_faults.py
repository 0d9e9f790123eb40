"""An exception ends what it must and no more: one request, or the batch; never the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foretoken.sampling.history import SlotHistory

from foretoken import LLM, SamplingParams
from foretoken.engine import build, memory
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.engine import Engine
from foretoken.errors import (
    ConfigError,
    EngineMemoryError,
    IntegrityError,
    ProcessingError,
    StepError,
)

FAULTY = "bad prompt"
PROMPTS = ["abc", FAULTY, "def f(x):"]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=20, repetition_penalty=1.1, logprobs=1, prompt_logprobs=1
)


class Broken(Exception):
    """What the tests inject."""


@pytest.fixture(scope="module")
def llm(target: Path, draft: Path) -> LLM:
    options = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(str(target), {"model": str(draft)}, **options)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]


def slot_of(llm: LLM) -> int:
    running = llm.engine.scheduler.running
    return next((r.slot for r in running if r.group.prompt == FAULTY), -1)


def failing(real: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """`real`, which raises where `when` says so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise Broken("injected")
        return real(*args, **kwargs)

    return call


def inject_admit(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    slots = llm.engine.runner.sampler.slots
    patch.setattr(slots, "admit", failing(slots.admit, lambda slot, *a, **k: slot == slot_of(llm)))


def inject_detokenizer(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    tail = llm.tokenizer.encode(FAULTY)[-5:]  # type: ignore[union-attr]
    calls: dict[int, int] = {}

    def third(self: Detokenizer, token: int) -> bool:
        calls[id(self)] = calls.get(id(self), 0) + 1
        return self._ids[: len(tail)] == tail and calls[id(self)] == 3

    patch.setattr(Detokenizer, "append", failing(Detokenizer.append, third))


def inject_tokenizer(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.tokenizer
    encode = failing(tokenizer.encode, lambda text, **k: text == FAULTY)  # type: ignore[union-attr]
    patch.setattr(tokenizer, "encode", encode)


def inject_history(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    slots = llm.engine.runner.sampler.slots

    def own(slot: int, *rest: Any) -> bool:
        return slot == slot_of(llm)

    patch.setattr(slots, "append", failing(slots.append, own))


def inject_edits(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    slots = llm.engine.runner.sampler.slots

    def own(history: SlotHistory, *rest: Any) -> bool:
        mine = slots.histories.get(slot_of(llm))
        return history is mine and len(history.output_ids) >= 4

    patch.setattr(SlotHistory, "rows", failing(SlotHistory.rows, own))


def inject_logprobs(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.runner

    def own(share: Any, *rest: Any) -> bool:
        return share.request.group.prompt == FAULTY and share.request.num_output > 5

    patch.setattr(runner, "_token_logprobs", failing(runner._token_logprobs, own))


def inject_observe(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    drafter = llm.engine.drafter
    assert drafter is not None
    own = failing(drafter.observe, lambda slot, *rest: slot == slot_of(llm))
    patch.setattr(drafter, "observe", own)


def inject_stop_logic(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    def own(request: Any, token: int) -> bool:
        return request.group.prompt == FAULTY and request.num_output == 7

    patch.setattr(llm.engine, "_stops", failing(llm.engine._stops, own))


def inject_text(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    settled = Detokenizer.settled_text.fget  # type: ignore[attr-defined]
    tail = llm.tokenizer.encode(FAULTY)[-5:]  # type: ignore[union-attr]
    own = failing(settled, lambda self: self._ids[: len(tail)] == tail)
    patch.setattr(Detokenizer, "settled_text", property(own))


INJECTIONS = [
    inject_admit,
    inject_detokenizer,
    inject_tokenizer,
    inject_history,
    inject_edits,
    inject_logprobs,
    inject_observe,
    inject_stop_logic,
]


@pytest.mark.parametrize("inject", INJECTIONS, ids=lambda f: f.__name__)
def test_a_fault_in_one_request_ends_it_alone(
    llm: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    inject: Callable[[LLM, pytest.MonkeyPatch], None],
) -> None:
    inject(llm, monkeypatch)
    outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
    monkeypatch.undo()
    assert [o.outputs[0].token_ids for o in outputs[::2]] == expected[::2]
    assert all(o.error is None for o in outputs[::2])
    bad = outputs[1]
    assert isinstance(bad.error, ProcessingError)
    assert f"request {bad.request_id}" in str(bad.error)
    assert isinstance(bad.error.__cause__, Broken)
    if inject is not inject_tokenizer:
        (sample,) = bad.outputs
        assert sample.finish_reason == "error"
        assert sample.token_ids == expected[1][: len(sample.token_ids)] != expected[1]
    assert_clean(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


def assert_clean(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    engine.check_integrity()


def test_a_fault_while_the_text_is_built_ends_the_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_text(llm, monkeypatch)
    *running, last = llm.stream(FAULTY, PARAMS)
    assert last.finished
    assert not any(output.finished for output in running)
    assert isinstance(last.error, ProcessingError)
    assert last.outputs[0].finish_reason == "error"
    assert_clean(llm)


def test_one_sample_that_fails_leaves_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=8, n=3, seed=5, ignore_eos=True)
    whole = llm.generate(["abc"], params)[0]

    def second(request: Any, token: int) -> bool:
        return request.index == 1 and request.num_output == 4

    monkeypatch.setattr(llm.engine, "_stops", failing(llm.engine._stops, second))
    (output,) = llm.generate(["abc"], params)
    assert [s.finish_reason for s in output.outputs] == ["length", "error", "length"]
    assert "sample 1" in str(output.error)
    for mine, theirs in zip(output.outputs, whole.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]


def test_a_drafter_that_cannot_release_gives_the_slot_back(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = llm.engine.drafter
    assert drafter is not None
    release = drafter.release
    broken_slots = []

    def first_time(slot: int) -> None:
        release(slot)
        if not broken_slots:
            broken_slots.append(slot)
            raise Broken("injected")

    monkeypatch.setattr(drafter, "release", first_time)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    (bad,) = [o for o in outputs if o.error is not None]
    assert isinstance(bad.error, ProcessingError)
    assert bad.outputs[0].finish_reason == "error"
    assert_clean(llm)


def break_call(number: int, error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, whose call `number` (from 1) raises `error`."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return real(*args, **kwargs)

    return call


BATCH_PARTS = {
    "forward": lambda llm: (llm.engine.runner.model, "forward"),
    "sampler": lambda llm: (llm.engine.runner.sampler, "verify"),
    "drafter": lambda llm: (llm.engine.drafter, "propose"),
    "clearing": lambda llm: (llm.engine.runner, "clear"),
}


@pytest.mark.parametrize("part", BATCH_PARTS)
@pytest.mark.parametrize("number", [1, 3])
def test_a_fault_in_the_batch_ends_what_runs_and_the_engine_goes_on(
    target: Path, draft: Path, part: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(target), {"model": str(draft)}, max_num_seqs=2, block_size=4)
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
    assert memory.is_out_of_memory(MemoryError())
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory.is_out_of_memory(RuntimeError("shapes differ"))
    assert not memory.is_out_of_memory(ValueError("out of memory"))
    assert (memory.machine_bytes() or 0) > 2**20
