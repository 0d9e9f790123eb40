"""Threads that share one `LLM`: turns in order, one batch, right tokens; no thread is stuck."""

from __future__ import annotations

import gc
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.engine.worker import Turns
from foretoken.errors import UsageError
from tests.support.asynchronous import PATIENCE, until
from tests.support.steps import at_step

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = ["abc", "def f(x):", "import os", "x", "for i in", "class A:"]


class Crew:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.raised: list[BaseException] = []

    def start(self, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.raised.append(error)

        self.threads.append(threading.Thread(target=guarded, daemon=True))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def crew() -> Crew:
    return Crew()


def test_turns_come_in_the_order_of_asking(crew: Crew) -> None:
    turns, served = Turns("LLM"), []

    def once(name: int) -> None:
        with turns:
            served.append(name)

    with turns:
        for name in range(5):
            crew.start(lambda name=name: once(name))  # type: ignore[misc]
            until(lambda name=name: len(turns._queue) == name + 2)  # type: ignore[misc]
    once(99)  # at once, and yet last
    crew.join()
    assert served == [0, 1, 2, 3, 4, 99]
    assert len(turns._queue) == 0
    assert not turns.inside


def test_one_at_a_time(crew: Crew) -> None:
    turns, inside, most = Turns("LLM"), 0, 0

    def many() -> None:
        nonlocal inside, most
        for _ in range(300):
            with turns:
                inside += 1
                most = max(most, inside)
                inside -= 1

    for _ in range(6):
        crew.start(many)
    crew.join()
    assert (most, crew.raised) == (1, [])
    assert len(turns._queue) == 0


def test_ctrl_c_while_waiting_costs_the_place_alone(crew: Crew) -> None:
    turns, free, done = Turns("LLM"), threading.Event(), []

    def hold() -> None:
        with turns:
            free.wait(PATIENCE)

    def interrupt() -> None:
        crew.start(lambda: turns.later(lambda: done.append("other")))
        until(lambda: len(turns._queue) == 3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    crew.start(hold)
    until(lambda: len(turns._queue) == 1)
    threading.Timer(0.01, lambda: until(lambda: len(turns._queue) == 2) or interrupt()).start()
    with pytest.raises(KeyboardInterrupt):
        turns.later(lambda: done.append("mine"))
    assert (len(turns._queue), done) == (2, [])
    free.set()
    crew.join()
    assert sorted(done) == ["mine", "other"]  # what was left undone is done in the next turn
    with turns:
        assert turns.inside


@pytest.mark.parametrize("removed", [False, True])
def test_ctrl_c_while_a_turn_ends_leaves_it_to_the_next(crew: Crew, removed: bool) -> None:
    class Line(deque[threading.Lock]):
        is_cut = False

        def remove(self, place: threading.Lock) -> None:
            if removed or self.is_cut:
                super().remove(place)
            if not self.is_cut:
                self.is_cut = True
                raise KeyboardInterrupt

    turns, served = Turns("LLM"), []

    def wait() -> None:
        with turns:
            served.append(1)

    def begin() -> None:
        with turns:
            crew.start(wait)
            until(lambda: len(turns._queue) == 2)

    turns._queue = Line()
    with pytest.raises(KeyboardInterrupt):
        begin()
    crew.join()
    wait()
    assert (served, len(turns._queue), turns.inside) == ([1, 1], 0, False)


def test_a_call_within_a_call_is_refused(crew: Crew) -> None:
    turns, done = Turns("LLM"), []
    with turns:
        with pytest.raises(UsageError, match="signal handler"), turns:
            pass
        turns.later(lambda: done.append(1))
        assert not done
    assert done == [1]
    with turns:
        pass


@pytest.fixture
def llm(target: Path) -> Iterator[LLM]:
    with LLM(str(target), max_num_seqs=4, block_size=4) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_many_threads_get_what_one_gets(
    target: Path, draft: Path, backend: str, crew: Crew, request: pytest.FixtureRequest
) -> None:
    if backend == "native":
        request.getfixturevalue("kernels")
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    llm = LLM(str(target), speculation, backend=backend, max_num_seqs=4, block_size=4)
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=20, logprobs=1),
        SamplingParams(temperature=1.0, seed=2, top_p=0.9, max_tokens=25, stop=["e"]),
        SamplingParams(temperature=0, num_speculative_tokens=0, max_tokens=20),
    ]

    def tokens(outputs: Any) -> list[list[int]]:
        return [sample.token_ids for output in outputs for sample in output.outputs]

    expected = [[tokens([o]) for o in llm.generate(PROMPTS, one)] for one in params]

    def hammer(number: int) -> None:
        for i in range(number, number + 4):
            which, one, known = i % len(PROMPTS), params[i % 4], expected[i % 4]
            if i % 3 == 0:
                *_, last = llm.stream(PROMPTS[which], one)
                assert tokens([last]) == known[which]
            else:
                assert [tokens([o]) for o in llm.generate(PROMPTS, one)] == known
            assert llm.metrics.num_steps > 0
            next(llm.stream("left at once", GREEDY))

    for number in range(3):
        crew.start(lambda number=number: hammer(number))  # type: ignore[misc]
    crew.join()
    assert crew.raised == []
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    assert [tokens([o]) for o in llm.generate(PROMPTS, GREEDY)] == expected[0]


def test_calls_of_two_threads_are_one_batch(llm: LLM, crew: Crew) -> None:
    steps = 0

    def counted(_: StepTrace) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:  # the other call is made now
            until(lambda: len(llm._turns._queue) == 2)

    llm.engine.on_step = counted
    found: list[Any] = []
    for prompt in ("abc", "x"):
        crew.start(lambda prompt=prompt: found.extend(llm.generate(prompt, GREEDY)))  # type: ignore[misc]
    crew.join()
    assert [o.outputs[0].finish_reason for o in found] == ["length"] * 2
    assert steps <= 33, "one call after the other takes 60"


def test_close_ends_the_calls_of_other_threads(llm: LLM, crew: Crew) -> None:
    begun = threading.Event()

    def held(_: StepTrace) -> None:
        begun.set()
        until(lambda: llm._turns._deferred)  # what `close` leaves for the end of this turn

    llm.engine.on_step = held
    crew.start(lambda: llm.generate(["abc"] * 9, GREEDY))
    crew.start(lambda: list(llm.stream("abc", GREEDY)))
    assert begun.wait(PATIENCE)
    llm.close()
    crew.join()
    assert [type(error) for error in crew.raised] == [UsageError] * 2


def test_ctrl_c_while_another_thread_has_its_turn(llm: LLM, crew: Crew) -> None:
    whole = llm.generate("x", GREEDY)[0].outputs[0].token_ids
    main, others = threading.main_thread(), []

    def interrupt() -> None:
        until(lambda: threading.current_thread() is main or len(llm._turns._queue) == 2)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    at_step(llm, 5, interrupt)
    crew.start(lambda: others.extend(llm.generate("x", GREEDY)))
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True))
    (output,) = caught.value.outputs  # type: ignore[attr-defined]
    assert output.interrupted_by == "SIGINT"
    crew.join()
    assert others[0].outputs[0].token_ids == whole
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_handler_that_reads_and_closes(llm: LLM) -> None:
    seen = []

    def handler(number: int, frame: Any) -> None:
        seen.append(llm.metrics.num_steps)
        llm.close()

    before = signal.signal(signal.SIGUSR1, handler)
    at_step(llm, 3, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(UsageError, match="closed"):
        llm.generate("abc", GREEDY)
    signal.signal(signal.SIGUSR1, before)
    assert seen == [3]


def test_a_forgotten_stream_is_collected_within_a_step(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    cycle: list[Any] = [llm.stream("x", GREEDY)]
    cycle.append(cycle)
    next(cycle[0])
    held = [cycle]
    del cycle
    at_step(llm, 3, lambda: held.clear() or gc.collect())
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == whole
    assert not llm.engine.has_work
    llm.engine.check_integrity()
