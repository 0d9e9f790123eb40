"""The heaviest requests that a server's limits admit, and how long other clients wait for each.

    python -m tests.long.heavy

While one such request is answered, another client asks for `/health` again and again, and a third
reads a stream. A step of the engine holds up every stream. So steps are kept short here
(`--max-num-batched-tokens`). A twin of each request, which computes the same and returns little,
shows the effect of the steps by themselves on that stream.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.common import TARGET, arguments, goal, record, use_cores
from benchmarks.served import Served, served
from foretoken.lab.results import Row

MAX_HEALTH, MAX_GAP = 0.2, 0.3  # seconds; the second beyond those of the twin
STEP, SLOTS = 192, 32  # tokens, samples
OPTIONS = (
    "--max-num-batched-tokens", str(STEP),
    "--max-num-seqs", str(SLOTS),
    "--allow-priority",
    "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}',
)  # fmt: skip
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LIVELY = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True,
          "priority": -1}  # fmt: skip
MOST_VALUES, MOST_CHARS, MOST_BYTES = 2**17, 64 * 2048, 8 * 2**20


class Heavy(NamedTuple):
    """A request, and the fields that its twin lacks or changes; neither: it has no twin."""

    name: str
    path: str
    body: dict[str, Any] | bytes
    twin: dict[str, Any] | None = None
    without: tuple[str, ...] = ()

    @property
    def text(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else _encoded(self.body)

    @property
    def of_twin(self) -> bytes | None:
        if isinstance(self.body, bytes) or (self.twin is None and not self.without):
            return None
        kept = {key: value for key, value in self.body.items() if key not in self.without}
        return _encoded(kept | (self.twin or {}))


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def heavy() -> Iterator[Heavy]:
    """Long answers, then long bodies, then texts that take long to encode."""
    draw = random.Random(7)

    def ids(count: int) -> list[int]:
        return [draw.randrange(300, 2000) for _ in range(count)]

    def odd(count: int) -> str:
        return "".join(chr(draw.randrange(0x20, 0x2000)) for _ in range(count))

    out = {"ignore_eos": True, "temperature": 1}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    yield Heavy("prompt_logprobs, 128 samples", COMPLETIONS,
                {"prompt": ids(1900), "n": 128, "prompt_logprobs": 20, "max_tokens": 4, **out},
                without=("prompt_logprobs",))  # fmt: skip
    echo = {"prompt": ids(1900), "n": 6, "logprobs": 20, "max_tokens": 16, "echo": True, **out}
    yield Heavy("echo and logprobs", COMPLETIONS, echo, without=("logprobs", "echo"))
    streamed = {**echo, "prompt": ids(1900), "stream": True}
    yield Heavy("echo and logprobs, streamed", COMPLETIONS, streamed, without=("logprobs", "echo"))
    long = {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 97, **out}
    yield Heavy("logprobs, 128 samples", COMPLETIONS, long, without=("logprobs",))
    yield Heavy("logprobs, 128 samples, streamed", COMPLETIONS, {**long, "stream": True},
                without=("logprobs",))  # fmt: skip
    yield Heavy("top_logprobs, 64 samples", CHATS,
                {**chat, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 195, **out},
                without=("logprobs", "top_logprobs"))  # fmt: skip
    yield Heavy("trace, 64 samples", COMPLETIONS,
                {"prompt": "a = a = a =", "n": 64, "max_tokens": 400, **out,
                 "speculative": {"trace": True}}, without=("speculative",))  # fmt: skip
    yield Heavy("text alone, 128 samples", COMPLETIONS,
                {"prompt": "a", "n": 128, "max_tokens": 150, **out}, {"stream": True})  # fmt: skip
    yield from bodies()
    unlike = odd(MOST_CHARS - 100)
    yield Heavy("a text to tokenize", "/tokenize", {"prompt": unlike})
    yield Heavy("ids to detokenize", "/detokenize", {"tokens": ids(MOST_VALUES - 100)})
    yield Heavy("a prompt that is too long", COMPLETIONS, {"prompt": unlike, "max_tokens": 1})
    yield Heavy("a conversation that is too long", CHATS,
                {"messages": [{"role": "user", "content": unlike}]})  # fmt: skip
    many = {"prompt": [odd(25_000) for _ in range(100)], "max_tokens": 1}
    yield Heavy("100 prompts that are too long", COMPLETIONS, many)
    words = {"bad_words": [odd(120) for _ in range(1024)], "stop": [odd(2000) for _ in range(60)]}
    short = {"prompt": "a", "n": 64, "max_tokens": 50, **out}
    yield Heavy("bad words and stops", COMPLETIONS, {**short, **words}, without=tuple(words))
    edits = {"logit_bias": {str(i): 0.5 for i in range(4096)}, "allowed_token_ids": [*range(4000)],
             "presence_penalty": 0.5}  # fmt: skip
    yield Heavy("a bias for all tokens", COMPLETIONS, {**short, **edits}, without=tuple(edits))
    grammar = {"guided_regex": "(" + "|".join(f"{odd(2)[0]}[a-f]{{1,9}}x{i}" for i in range(900))
               .replace("\\", "") + ")+"}  # fmt: skip
    yield Heavy("a grammar", COMPLETIONS, {**short, **grammar}, without=tuple(grammar))


def bodies() -> Iterator[Heavy]:
    """Bodies with as many values, or as many bytes, as they may have."""
    third, half = MOST_VALUES // 3 - 10, MOST_VALUES // 2 - 10
    said = b'{"role":"user","content":"a"}'
    yield Heavy("a body of messages", CHATS, b'{"messages":[%b]}' % b",".join([said] * third))
    yield Heavy("a body of Anthropic's messages", "/v1/messages",
                b'{"max_tokens":1,"messages":[%b]}' % b",".join([said] * third))  # fmt: skip
    yield Heavy("a body of lists of ids", COMPLETIONS,
                b'{"prompt":[%b]}' % b",".join([b"[1]"] * half))  # fmt: skip
    numbers = b",".join([b"9" * 59] * (MOST_VALUES - 20))
    yield Heavy("a body of long numbers", COMPLETIONS, b'{"prompt":"a","user":[%b]}' % numbers)
    floats = b",".join([b"1.5e3"] * (MOST_VALUES - 20))
    yield Heavy("a body of floats", COMPLETIONS,
                b'{"prompt":"a","max_tokens":1,"user":[%b]}' % floats)  # fmt: skip
    empty = b'""' * (MOST_BYTES // 2 - 100)
    yield Heavy("a body of quotes", COMPLETIONS, b'{"prompt":%b %b}' % (b"[" * 90, empty))
    ids = b",".join([b"5"] * (MOST_VALUES - 30))
    yield Heavy("a body of allowed ids", COMPLETIONS,
                b'{"prompt":"a","n":64,"max_tokens":4,"allowed_token_ids":[%b]}' % ids)  # fmt: skip


class Probe:
    def __init__(self, wait: Callable[[Served, Probe], None], server: Served) -> None:
        self._most, self._since, self.is_over = 0.0, time.perf_counter(), False
        self._thread = threading.Thread(target=wait, args=(server, self))
        self._thread.start()

    def came(self) -> None:
        now = time.perf_counter()
        self._most, self._since = max(self._most, now - self._since), now

    def begin(self) -> None:
        self._since = time.perf_counter()

    def take(self) -> float:
        most, self._most = max(self._most, time.perf_counter() - self._since), 0.0
        return most

    def end(self) -> None:
        self.is_over = True
        self._thread.join()


def ask_health(server: Served, probe: Probe) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    while not probe.is_over:
        probe.begin()
        connection.request("GET", "/health")
        connection.getresponse().read()
        probe.came()
        time.sleep(0.02)


def read_stream(server: Served, probe: Probe) -> None:
    """Read streams one after another, and measure the time between chunks."""
    while not probe.is_over:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        connection.request(
            "POST", COMPLETIONS, json.dumps(LIVELY), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        probe.begin()
        while answer.readline() and not probe.is_over:
            probe.came()
        connection.close()


@contextmanager
def probing(server: Served) -> Iterator[tuple[Probe, Probe]]:
    probes = Probe(ask_health, server), Probe(read_stream, server)
    try:
        time.sleep(1)
        yield probes
    finally:
        for probe in probes:
            probe.end()


def ask(server: Served, path: str, body: bytes) -> tuple[int, int]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=900)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer, size = connection.getresponse(), 0
    while part := answer.read(2**20):
        size += len(part)
    connection.close()
    return answer.status, size


def measure(server: Served, what: Heavy) -> Row:
    """How long other clients waited while it was answered, and while its twin was."""
    with probing(server) as (health, stream):
        health.take(), stream.take()
        if what.of_twin is None:
            time.sleep(1)
        else:
            ask(server, what.path, what.of_twin)
        usual_health, usual = health.take(), stream.take()
        time.sleep(0.5)
        health.take(), stream.take()
        before, start = server.resident_mib(), time.perf_counter()
        status, size = ask(server, what.path, what.text)
        seconds = time.perf_counter() - start
        values = {
            "status": float(status),
            "seconds": seconds,
            "mib_answered": size / 2**20,
            "seconds_health": health.take(),
            "seconds_health_of_twin": usual_health,
            "seconds_gap": (gap := stream.take()),
            "seconds_gap_of_twin": usual,
            "seconds_gap_beyond": max(gap - usual, 0.0),
        }
    grown = server.resident_mib() - before
    return Row(what.name, {"path": what.path}, {**values, "resident_mib_grown": grown})


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="part of the names of those that are asked")
    options = parser.parse_args()
    use_cores(2)
    rows = []
    with served(*OPTIONS) as server:
        ask(server, COMPLETIONS, b'{"prompt": "a", "max_tokens": 200, "ignore_eos": true}')
        for what in heavy():
            if options.only in what.name:
                rows.append(measure(server, what))
                told = {name: round(value, 3) for name, value in rows[-1].values.items()}
                print(what.name, told, flush=True)
        values = {
            name: max(row.values[name] for row in rows)
            for name in ("seconds_health", "seconds_gap_beyond")
        }
        values |= {"held_afterwards": server.num_held(), "exit_code": float(server.end())}
    rows.append(worst := Row("the worst of all", {}, values))
    notes = [
        goal("seconds for /health", worst, "seconds_health", MAX_HEALTH, least=False),
        goal("seconds between chunks beyond the twin", worst, "seconds_gap_beyond", MAX_GAP,
             least=False),
    ]  # fmt: skip
    shapes = {"model": TARGET, "max_num_batched_tokens": STEP}
    record("heavy", options, shapes, rows, notes, "tests.long.heavy")
    print(*notes, sep="\n")
    return int(values["held_afterwards"] > 0 or values["exit_code"] != 0)


if __name__ == "__main__":
    sys.exit(main())
