"""Deltas say what outputs say, every part once, and cost no more at the end of a long output."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, AsyncEngine, RequestDelta, RequestOutput, SamplingParams
from foretoken.engine import worker
from foretoken.engine.boundary import build_output, take_delta
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.request import Delivered, Request, RequestGroup
from foretoken.errors import ProcessingError, StepError
from tests.support.asynchronous import (
    LONG,
    OPTIONS,
    PARAMS,
    PROMPTS,
    Gate,
    idle,
    num_requests,
    run,
)
from tests.support.steps import OneLate

Contents = dict[str, Any]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
CASES = {
    "greedy": replace(PARAMS, seed=1),
    "samples": replace(SAMPLED, n=3),  # random bytes: most text is half characters
    "logprobs": replace(SAMPLED, n=2, logprobs=2, prompt_logprobs=1, stop=["\ufffd\ufffd\ufffd"]),
    "trace": replace(SAMPLED, n=2, trace=True),
    "stop": replace(SAMPLED, n=2, stop=["from the text"]),
    "stop in text": replace(SAMPLED, stop=["from the text"], include_stop_str_in_output=True),
    "stop too early": replace(SAMPLED, n=2, stop=["from the text"], min_tokens=39),
    "held to the end": replace(SAMPLED, stop=["\ufffd" * 60]),
    "one token": replace(SAMPLED, max_tokens=1),
}


def concatenated(deltas: Sequence[RequestDelta]) -> Contents:
    """What a reader of all deltas knows in the end."""
    samples: dict[int, Contents] = {}
    once: Contents = {"prompt": None, "prompt_token_ids": None, "prompt_logprobs": None}
    for delta in deltas:
        assert delta.outputs, "nothing is new"
        for name in once:
            if (value := getattr(delta, name)) is not None:
                assert once[name] is None, f"{name} came twice"
                once[name] = value
        for new in delta.outputs:
            empty: Contents = {"token_ids": [], "text": "", "logprobs": None, "origins": []}
            empty["trace"] = None
            sample = samples.setdefault(new.index, empty | {"finish_reason": None})
            assert sample["finish_reason"] is None, "something follows the end"
            if new.logprobs is not None:
                assert len(new.logprobs) == len(new.token_ids)
                sample["logprobs"] = [*(sample["logprobs"] or ()), *new.logprobs]
            if new.trace is not None:
                sample["trace"] = [*(sample["trace"] or ()), *new.trace]
            sample["token_ids"] += new.token_ids
            sample["text"] += new.text
            sample["origins"] += new.origins
            for name in ("finish_reason", "stop_reason", "seed", "synthetic_acceptance"):
                sample[name] = getattr(new, name)
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [delta.metrics is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return once | {"error": deltas[-1].error, "outputs": [samples[i] for i in sorted(samples)]}


def contents(output: RequestOutput) -> Contents:
    """The same of an output."""
    names = (
        "token_ids text logprobs trace origins finish_reason stop_reason seed synthetic_acceptance"
    ).split()
    samples = [{name: getattr(sample, name) for name in names} for sample in output.outputs]
    once = ("prompt", "prompt_token_ids", "prompt_logprobs", "error")
    return {name: getattr(output, name) for name in once} | {"outputs": samples}


def check_case(engine: AsyncEngine, llm: LLM, params: SamplingParams) -> None:
    """Two readers at once, of deltas and of outputs, are told what one is who asks at the end."""

    async def main() -> None:
        async def outputs() -> list[RequestOutput]:
            return [output async for output in engine.generate("abc", params)]

        async def deltas() -> list[RequestDelta]:
            return [delta async for delta in engine.generate("abc", params, deltas=True)]

        whole, parts = await asyncio.gather(outputs(), deltas())
        [at_the_end] = llm.generate(["abc"], params)
        assert concatenated(parts) == contents(whole[-1]) == contents(at_the_end)
        await idle(engine)

    run(main())


def check_slow_reader(engine: AsyncEngine, llm: LLM, params: SamplingParams) -> None:
    """Reads the first delta, and the second when all has been said."""

    async def main() -> list[RequestDelta]:
        gate = Gate(engine)
        gate.open(1)
        slow = engine.generate("abc", params, deltas=True)
        parts = [await anext(slow)]
        gate.open()
        while num_requests(engine):  # until its last delta is in the mailbox
            await asyncio.sleep(0.001)
        return [*parts, *[delta async for delta in slow]]

    parts = run(main())
    assert len(parts) == 2
    assert sum(len(sample.token_ids) for sample in parts[0].outputs) < 10
    assert concatenated(parts) == contents(llm.generate(["abc"], params)[0])


def case_of(llm: LLM, name: str) -> SamplingParams:
    """One of `CASES`, its stop strings taken from what is said: one in it, one that just begins."""
    params = CASES[name]
    if params.stop != ("from the text",):
        return params
    text = llm.generate(["abc"], SAMPLED)[0].outputs[0].text
    return replace(params, stop=[text[4:6] + "never", text[12:15]])


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), {"method": "ngram"}, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_deltas_are_the_output(engine: AsyncEngine, llm: LLM, case: str) -> None:
    check_case(engine, llm, case_of(llm, case))


def test_a_slow_reader_gets_many_deltas_as_one(engine: AsyncEngine, llm: LLM) -> None:
    check_slow_reader(engine, llm, replace(CASES["logprobs"], trace=True))


def test_a_reader_who_keeps_up_gets_one_delta_per_step(engine: AsyncEngine) -> None:
    async def main() -> None:
        gate = Gate(engine)
        stream = engine.generate("abc", PARAMS, deltas=True)
        gate.open(1)
        parts = [await anext(stream)]
        while not parts[-1].finished:
            gate.open(1)
            parts.append(await anext(stream))
        assert len(parts) == gate.count
        assert all(0 < len(part.outputs[0].token_ids) <= 6 for part in parts)
        await stream.aclose()
        await idle(engine)

    run(main())


def test_a_conversation_comes_in_deltas(engine: AsyncEngine, expected: Any) -> None:
    async def main() -> list[RequestDelta]:
        talk = [{"role": "user", "content": "abc"}]
        template = "{{ messages[0].content }}"
        stream = engine.chat(talk, PARAMS, deltas=True, chat_template=template)
        return [delta async for delta in stream]

    whole = concatenated(run(main()))
    assert (whole["prompt"], whole["outputs"][0]["token_ids"]) == ("abc", expected["abc"])


def test_an_aborted_request_keeps_what_it_gave(engine: AsyncEngine) -> None:
    async def main() -> None:
        seen, parts = [output async for output in engine.generate("abc", LONG)][-1], []
        gate = Gate(engine)
        gate.open(4)  # the fifth step waits until the request has been aborted
        async for delta in engine.generate("abc", LONG, "mine", deltas=True):
            parts.append(delta)
            if gate.count == 4 and not parts[-1].finished:
                assert await engine.abort("mine")
                gate.open(1)
        [sample] = concatenated(parts)["outputs"]
        assert sample["finish_reason"] == "abort"
        count = len(sample["token_ids"])
        assert 4 <= count < 200
        assert sample["token_ids"] == seen.outputs[0].token_ids[:count]
        assert len(sample["origins"]) == count
        await idle(engine)

    run(main())


def test_a_fault_of_the_request_is_told_with_what_there_is(
    engine: AsyncEngine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stable, calls = Detokenizer.stable_text.fget, []  # type: ignore[attr-defined]

    def failing(self: Detokenizer) -> str:
        calls.append(self)
        if len(calls) == 5:
            raise ZeroDivisionError("injected")
        return str(stable(self))

    monkeypatch.setattr(Detokenizer, "stable_text", property(failing))

    async def main() -> list[RequestDelta]:
        return [delta async for delta in engine.generate("abc", PARAMS, deltas=True)]

    whole = concatenated(run(main()))
    [sample] = whole["outputs"]
    assert isinstance(whole["error"], ProcessingError)
    assert sample["finish_reason"] == "error"
    count = len(sample["token_ids"])
    assert sample["token_ids"] == expected["abc"][:count]
    tokenizer: Any = engine.engine.tokenizer
    assert sample["text"] == tokenizer.decode(sample["token_ids"])


def test_what_is_unread_when_the_thread_fails_is_read_first(engine: AsyncEngine) -> None:
    async def main() -> None:
        gate = Gate(engine)
        stream = engine.generate("abc", PARAMS, deltas=True)
        gate.open(1)
        parts = [await anext(stream)]
        gate.open(2)
        while gate.count < 3:  # the second has been told
            await asyncio.sleep(0.001)

        def broken() -> None:
            raise ZeroDivisionError("injected")

        gate.step = broken  # type: ignore[assignment]
        gate.open()
        while not engine._worker._failure:
            await asyncio.sleep(0.001)
        parts.append(await anext(stream))
        assert parts[1].outputs[0].token_ids
        with pytest.raises(StepError, match="injected"):
            await anext(stream)

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_deltas_of_preempted_and_aborted_requests(folder: Path, late: bool) -> None:
    """Taken after every step, or after some; committed at once, or when the next one runs."""
    llm = LLM(str(folder), {"method": "ngram"}, max_num_seqs=4, block_size=4, num_blocks=24)
    engine = llm.engine
    params = [replace(case, max_tokens=40) for case in CASES.values()]
    groups = [
        engine.add(str(i), engine.tokenizer.encode(prompt), some, prompt)
        for i, (prompt, some) in enumerate(zip(PROMPTS * 2, params, strict=False))
    ]
    parts: dict[RequestGroup, list[RequestDelta]] = {group: [] for group in groups}
    steps: Any = OneLate(engine) if late else engine
    count = 0
    while steps.has_work:
        steps.step()
        count += 1
        if count == 20:
            engine.abort(groups[0])
            engine.abort(groups[-1])  # most likely it waits
        for i, group in enumerate(groups):
            if count % (1 + i % 3) == 0 and (delta := take_delta(engine, group)):
                parts[group].append(delta)
    for group in groups:
        if delta := take_delta(engine, group):
            parts[group].append(delta)
        assert take_delta(engine, group) is None
        assert concatenated(parts[group]) == contents(build_output(engine, group))
        merged = RequestDelta.merge(parts[group])
        assert concatenated([merged]) == concatenated(parts[group])
    assert sum(group.metrics.num_preemptions for group in groups) > 0
    engine.check_integrity()


def test_a_delta_of_a_long_output_costs_no_more() -> None:
    """By the memory that it takes: a copy of the output would be 800 KB."""
    group = RequestGroup(
        "1", None, [1] * 100_000, SamplingParams(logprobs=0), delivered_prompt=True
    )
    request = Request(group, 0, 7, [*group.prompt_ids, *[2] * 100_000])
    request.origins, request.pieces = ["plain"] * 100_000, ["ab"] * 100_000
    request.logprobs = [{}] * 100_000
    request.delivered = Delivered(99_998, 99_999)
    group.samples.append(request)

    class UpToDate:
        def update_text(self, request: Request) -> None:
            pass

    tracemalloc.start()
    delta = take_delta(UpToDate(), group)  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert delta is not None
    assert (delta.outputs[0].token_ids, delta.outputs[0].text) == ([2, 2], "ab")
    assert peak < 10_000


def forgetful(deltas: Sequence[RequestDelta]) -> RequestDelta:
    return deltas[-1]


def unstable(self: Detokenizer) -> str:
    return self.text


def repeated(engine: Any, group: RequestGroup) -> RequestDelta | None:
    delta = take_delta(engine, group)
    for request in group.samples:
        request.delivered = request.delivered._replace(
            num_tokens=max(request.delivered.num_tokens - 1, 0)
        )
    return delta


def textless(engine: Any, group: RequestGroup) -> RequestDelta | None:
    delta = take_delta(engine, group)
    for request in group.samples:
        request.delivered = request.delivered._replace(num_pieces=len(request.pieces) + 1)
    return delta


@pytest.mark.parametrize(
    ("place", "name", "mutant", "check", "case"),
    [
        pytest.param(RequestDelta, "merge", forgetful, check_slow_reader, "logprobs", id="skips"),
        pytest.param(
            Detokenizer, "stable_text", property(unstable), check_case, "stop", id="takes back"
        ),
        pytest.param(worker, "take_delta", repeated, check_case, "samples", id="repeats tokens"),
        pytest.param(worker, "take_delta", textless, check_case, "samples", id="skips text"),
    ],
)
def test_mutants_are_rejected(
    engine: AsyncEngine,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    mutant: Any,
    check: Callable[[AsyncEngine, LLM, SamplingParams], None],
    case: str,
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check(engine, llm, case_of(llm, case))
