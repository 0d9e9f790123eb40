"""Ctrl-C and SIGTERM while requests run: what is there comes back, handlers too."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.outputs import uninterrupted

PARAMS = SamplingParams(temperature=0, max_tokens=30)
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return LLM(str(target), {"model": str(target)}, max_num_seqs=2, block_size=4)


@pytest.fixture(autouse=True)
def _handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def at_step(llm: LLM, number: int, act: Callable[[], Any]) -> Callable[[], Any]:
    """The engine's step, which does something else, too, in its step `number`."""
    step, calls = llm.engine.step, 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return step()

    return counted


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_there_comes_back_marked(
    llm: LLM, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [o.outputs[0].token_ids for o in llm.generate(["abc", "abd", "abe"], PARAMS)]
    short = SamplingParams(temperature=0, max_tokens=3)
    act = at_step(llm, 3, lambda: signal.raise_signal(number))
    monkeypatch.setattr(llm.engine, "step", act)
    outputs = llm.generate(["abc", "abd", "abe", "abf", ""], [short, PARAMS, PARAMS, PARAMS, short])
    done, cut, begun, waiting, refused = outputs
    assert (done.outputs[0].finish_reason, done.outputs[0].token_ids) == ("length", whole[0][:3])
    assert done.interrupted_by is None
    tokens = cut.outputs[0].token_ids
    assert tokens == whole[1][: len(tokens)]
    assert 0 < len(tokens) < 30
    for output in (cut, begun, waiting):
        (sample,) = output.outputs
        assert (sample.finish_reason, sample.stop_reason) == ("interrupted", number.name)
        assert output.interrupted_by == number.name
        assert output.error is None
    assert waiting.outputs[0].token_ids == []
    assert refused.error is not None
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    expected = KeyboardInterrupt if number is signal.SIGINT else SystemExit
    with pytest.raises(expected) as caught:
        uninterrupted(outputs)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143
    assert uninterrupted([done]) == [done]


def test_prompts_not_yet_encoded_come_back_marked(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = llm.tokenizer.encode  # type: ignore[union-attr]
    seen = []

    def signalling(text: str, **options: Any) -> Any:
        seen.append(text)
        if text == "b":
            signal.raise_signal(signal.SIGINT)
        return encode(text, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", signalling)
    outputs = llm.generate(["a", "b", "c"], SamplingParams(n=2))
    assert seen == ["a", "b"]
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    assert len({o.request_id for o in outputs}) == 3
    for output in outputs:
        assert [s.index for s in output.outputs] == [0, 1]
        assert {s.finish_reason for s in output.outputs} == {"interrupted"}


def test_a_second_signal_does_what_it_always_does(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "step", at_step(llm, 2, twice))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "abd"], PARAMS)
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_second_signal_within_a_step_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llm.engine.runner.model
    whole = llm.generate(["abc"], PARAMS)[0].outputs[0].token_ids
    stream = llm.stream("xyz", PARAMS)
    next(stream)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "abd"], PARAMS)
    assert [o.outputs[0].finish_reason for o in stream] == ["error"]
    llm.engine.check_integrity()
    assert llm.generate(["abc"], PARAMS)[0].outputs[0].token_ids == whole


def test_a_programs_own_handler_is_left_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    act = at_step(llm, 2, lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(llm.engine, "step", act)
    (output,) = llm.generate("abc", PARAMS)
    signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
    assert output.outputs[0].finish_reason == "length"


def test_a_stream_ends_with_what_there_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    act = at_step(llm, 3, lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(llm.engine, "step", act)
    outputs = list(llm.stream("abc", PARAMS))
    assert [o.outputs[0].finish_reason for o in outputs] == [None, None, "interrupted"]
    assert outputs[-1].interrupted_by == "SIGTERM"
    llm.engine.check_integrity()


def test_between_steps_of_a_stream_signals_are_the_callers(llm: LLM) -> None:
    stream = llm.stream("abc", PARAMS)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    stream.close()


def test_other_threads_generate_without_handlers(llm: LLM) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate("abc", PARAMS)))
    thread.start()
    thread.join(60)
    assert found[0].outputs[0].finish_reason == "length"


def test_handlers_come_back_after_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ValueError("injected")

    monkeypatch.setattr(llm.engine, "step", broken)
    with pytest.raises(ValueError, match="injected"):
        llm.generate("abc", PARAMS)


SCRIPT = """
import sys
from foretoken.cli import app, main
from foretoken.llm import LLM

step_count = 0

def load(model, speculative_config, **options):
    llm = LLM(model, max_num_seqs=2)
    step = llm.engine.step

    def told():
        global step_count
        step_count += 1
        if step_count == 3:
            print("running", file=sys.stderr, flush=True)
            sys.stdin.readline()  # until the signal was sent
        return step()

    llm.engine.step = told
    return llm

app._load = load
sys.argv = ["foretoken", "generate", "abc", "--model", sys.argv[1], "--temperature", "0",
            "--max-tokens", "60", "--ignore-eos", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_prints_what_is_there(target: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(target), "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line == b"running\n":
            break
    process.send_signal(number)
    stdout, stderr = process.communicate(b"go\n", timeout=60)
    assert process.returncode == code
    assert b'"finish_reason": "interrupted"' in stdout
    assert b"Interrupted: 3 tokens were generated" in stderr
    assert b"Traceback" not in stderr
