"""Long work is done in pieces, or in another thread: other requests need not wait for its end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken import SamplingParams
from foretoken.outputs import CompletionDelta, Logprob, TokenTrace
from foretoken.serve.answers.choices import ChatWriter, CompletionWriter
from foretoken.serve.answers.events import Event, Usage
from foretoken.serve.requests import GenerationRequest
from foretoken.serve.sse import LONG_BODY, SLICE, LazyList, in_thread_if_long, paced, pieces


@pytest.mark.parametrize(
    "value",
    [None, 5, "é\ud800", [], {}, [1, {"a": []}], {"a": {"b": [1.5, None], "c": {}}, "d": "x"}],
)
def test_pieces_are_json(value: Any) -> None:
    assert json.loads(b"".join(pieces(value))) == value


def test_long_lists_come_row_by_row() -> None:
    made = []

    def rows() -> Iterator[dict[str, int]]:
        for i in range(3):
            made.append(i)
            yield {"a": i}

    parts = pieces({"first": {"rows": LazyList(rows())}, "last": LazyList(())})
    found = b""
    while b"0" not in found:
        found += next(parts)
    assert made == [0], "the others are not made yet"
    assert json.loads(found + b"".join(parts)) == {
        "first": {"rows": [{"a": 0}, {"a": 1}, {"a": 2}]},
        "last": [],
    }


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
@pytest.mark.parametrize("stream", [False, True])
def test_no_piece_of_an_answer_is_long(kind: Any, stream: bool) -> None:
    """Log-probabilities of 500 tokens, those of a prompt, and traces; a client that reads slowly
    has them in one delta."""
    row = {i: Logprob(-1.5, i + 1, "some") for i in range(21)}
    trace = TokenTrace(0, "some", 0, 0, "standard", "accepted", 0.5)
    sample = CompletionDelta(
        0, [0] * 500, "some" * 500, "length", logprobs=[row] * 500, trace=[trace] * 500
    )
    asked = GenerationRequest(SamplingParams(logprobs=20), num_top=20, stream=stream)
    event = Event(0, (), sample, prompt_logprobs=[None, *[row] * 500])
    writer, usage = kind(asked, "m"), Usage(asked)
    parts = [*(writer.write([event], usage) if stream else writer.body({0: [event]}, usage))]
    last = b"".join(parts).strip().rpartition(b"\n\n")[2]
    answer = json.loads(last.removeprefix(b"data: "))["choices"][0]
    assert len(answer["prompt_logprobs"]) == 501
    assert len(answer["prompt_logprobs"][1]) == 21
    assert len(answer["trace"]) == 500
    lists = [value for value in answer["logprobs"].values() if value]
    assert {len(value) for value in lists} == {500}
    assert max(map(len, parts)) < 10_000 < sum(map(len, parts)) / 10


def test_others_have_their_turn_between_slices() -> None:
    turns, making = [0], []

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    def slow() -> Iterator[bytes]:
        for i in range(5):
            making.append(turns[0])
            time.sleep(2 * SLICE)
            yield b"%d" % i

    async def main() -> list[bytes]:
        other = asyncio.ensure_future(others())
        found = [part async for part in paced(slow())]
        other.cancel()
        return found

    assert b"".join(asyncio.run(main())) == b"01234"
    assert len(set(making)) == len(making), "each part of two slices was followed by a turn"


def test_quick_parts_are_one() -> None:
    async def main() -> list[bytes]:
        return [part async for part in paced([b"a", b"b", b"c"])]

    assert b"".join(asyncio.run(main())) == b"abc"


def test_a_long_body_is_read_in_a_thread() -> None:
    async def main() -> list[bool]:
        threads = [
            await in_thread_if_long(size, threading.current_thread) for size in (5, LONG_BODY)
        ]
        return [thread is threading.current_thread() for thread in threads]

    assert asyncio.run(main()) == [True, False]
