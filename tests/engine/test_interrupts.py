"""Ctrl-C and SIGTERM while requests run: no signal and no token is lost, handlers come back."""

from __future__ import annotations

import itertools
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
from foretoken.errors import RequestError
from foretoken.interrupts import Interrupt
from foretoken.outputs import RequestOutput
from tests.engine.doubles import double, failing
from tests.support.asynchronous import PATIENCE
from tests.support.steps import at_step

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


def interrupted(call: Callable[[], Any]) -> list[RequestOutput]:
    """What the exception brings that ends the call: Python's own, which ends programs rightly."""
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert caught.type is KeyboardInterrupt
    return caught.value.outputs  # type: ignore[no-any-return, attr-defined]


@pytest.mark.parametrize(
    ("on_interrupt", "number"),
    [("raise", signal.SIGINT), ("return", signal.SIGINT), ("return", signal.SIGTERM)],
)
def test_what_is_there_comes_back_marked(
    llm: LLM, on_interrupt: Any, number: signal.Signals
) -> None:
    whole = [o.outputs[0].token_ids for o in llm.generate(["abc", "abd", "abe"], PARAMS)]
    short = SamplingParams(temperature=0, max_tokens=3)
    at_step(llm, 3, lambda: signal.raise_signal(number))

    def call() -> list[RequestOutput]:
        prompts, params = ["abc", "abd", "abe", "abf", ""], [short, PARAMS, PARAMS, PARAMS, short]
        return llm.generate(prompts, params, on_interrupt=on_interrupt, on_error="return")

    done, cut, begun, waiting, refused = interrupted(call) if on_interrupt == "raise" else call()
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


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_a_signal_in_the_last_step_is_not_swallowed(llm: LLM, on_interrupt: Any) -> None:
    one = SamplingParams(max_tokens=1)
    at_step(llm, 1, lambda: signal.raise_signal(signal.SIGINT))
    (output,) = interrupted(lambda: llm.generate(["abc"], one, on_interrupt=on_interrupt))
    assert output.outputs[0].finish_reason == "length"
    at_step(llm, 1, lambda: signal.raise_signal(signal.SIGINT))
    (output,) = interrupted(lambda: list(llm.stream("abc", one, on_interrupt=on_interrupt)))
    assert output.outputs[0].finish_reason == "length"


def test_one_ctrl_c_stops_a_loop_of_calls(llm: LLM) -> None:
    at_step(llm, 40, lambda: signal.raise_signal(signal.SIGINT))
    calls = itertools.count(1)
    interrupted(lambda: [llm.generate("abc", PARAMS) for _ in calls])
    assert next(calls) < 40


@pytest.mark.parametrize("word", ["ignore", None])
def test_other_words_are_refused(llm: LLM, word: Any) -> None:
    with pytest.raises(RequestError, match="`raise` or `return`"):
        llm.generate("abc", PARAMS, on_interrupt=word)
    with pytest.raises(RequestError, match="`raise` or `return`"):
        next(llm.stream("abc", PARAMS, on_interrupt=word))
    assert not llm.engine.has_work


def test_prompts_not_yet_encoded_come_back_marked(llm: LLM) -> None:
    seen = []

    def signalling(encode: Callable[..., Any], text: str, **options: Any) -> Any:
        seen.append(text)
        if text == "b":
            signal.raise_signal(signal.SIGINT)
        return encode(text, **options)

    with double(llm.engine, "tokenizer", encode=signalling):
        outputs = interrupted(lambda: llm.generate(["a", "b", "c"], SamplingParams(n=2)))
    assert seen == ["a", "b"]
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    assert len({o.request_id for o in outputs}) == 3
    for output in outputs:
        assert [s.index for s in output.outputs] == [0, 1]
        assert {s.finish_reason for s in output.outputs} == {"interrupted"}


def test_a_second_signal_does_what_it_always_does(llm: LLM) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_step(llm, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "abd"], PARAMS)
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_second_signal_within_a_step_leaves_the_engine_usable(llm: LLM) -> None:
    whole = llm.generate(["abc"], PARAMS)[0].outputs[0].token_ids
    stream = llm.stream("xyz", PARAMS)
    next(stream)

    forward = failing(KeyboardInterrupt())
    with double(llm.engine.runner, "model", forward=forward), pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "abd"], PARAMS)
    assert [o.outputs[0].finish_reason for o in stream] == ["error"]
    llm.engine.check_integrity()
    assert llm.generate(["abc"], PARAMS)[0].outputs[0].token_ids == whole


def test_a_programs_own_handler_is_left_alone(llm: LLM) -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    at_step(llm, 2, lambda: signal.raise_signal(signal.SIGINT))
    (output,) = llm.generate("abc", PARAMS)
    signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stream_ends_with_what_there_is(llm: LLM, number: signal.Signals) -> None:
    at_step(llm, 3, lambda: signal.raise_signal(number))
    outputs = list(llm.stream("abc", PARAMS, on_interrupt="return"))
    assert [o.outputs[0].finish_reason for o in outputs] == [None, None, "interrupted"]
    assert outputs[-1].interrupted_by == number.name
    llm.engine.check_integrity()


def test_ctrl_c_in_a_stream(llm: LLM) -> None:
    at_step(llm, 3, lambda: signal.raise_signal(signal.SIGINT))
    seen = []
    (output,) = interrupted(lambda: seen.extend(llm.stream("abc", PARAMS)))
    assert output.interrupted_by == "SIGINT"
    assert len(output.outputs[0].token_ids) >= 3
    llm.engine.check_integrity()
    assert not llm.engine.has_work


def test_ctrl_c_before_a_stream_has_given_out_its_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupt, "deliver", lambda *_: signal.raise_signal(signal.SIGINT))
    (output,) = interrupted(lambda: list(llm.stream("abc", PARAMS)))
    assert output.outputs[0].token_ids
    assert not llm.engine.has_work


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
    thread.join(PATIENCE)
    assert found[0].outputs[0].finish_reason == "length"


def test_handlers_come_back_after_an_error(llm: LLM) -> None:
    def broken() -> None:
        raise ValueError("injected")

    at_step(llm, 1, broken)
    with pytest.raises(ValueError, match="injected"):
        llm.generate("abc", PARAMS)


SCRIPT = """
import sys
from foretoken.cli import main
from foretoken.cli.actions import Actions
from foretoken.llm import LLM

step_count = 0

def load(model, speculative_config, **options):
    llm = LLM(model, max_num_seqs=2)

    def told(trace):
        global step_count
        step_count += 1
        if step_count == 3:
            print("running", file=sys.stderr, flush=True)
            sys.stdin.readline()  # until the signal was sent

    llm.engine.on_step = told
    return llm

class Watched(Actions):
    load = staticmethod(load)

sys.argv = ["foretoken", "generate", "abc", "--model", sys.argv[1], "--temperature", "0",
            "--max-tokens", "60", "--ignore-eos", *sys.argv[2:]]
main(Watched())
"""


@pytest.mark.usefixtures("forked")
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
    stdout, stderr = process.communicate(b"go\n", timeout=PATIENCE)
    assert process.returncode == code
    assert b'"finish_reason": "interrupted"' in stdout
    assert b"Interrupted: 3 tokens were generated" in stderr
    assert b"Traceback" not in stderr
