"""Hostile requests to a server: its answers, and what stays of them.

    python -m tests.long.hostile

Two sources. A table made by hand: wrong types, huge numbers, NaN, lone surrogates, texts of 10 MB,
deep JSON, heads without end, slow bodies, sockets that close halfway. And `schemathesis`, which
makes requests from the server's own OpenAPI, half of them against it. A request is answered well if
its status is none of 5xx; afterwards nothing runs, every block is free, and memory is what it was.
"""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.common import TARGET, parse, record
from benchmarks.served import served
from foretoken.lab.results import Row

JSON = "Content-Type: application/json"
NEEDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}  # the least that each endpoint takes
SERVED = ("--io-timeout", "1", "--request-timeout", "0.5")
SURROGATE = b'"\\ud800"'
DEEP = b"[" * 50_000 + b"]" * 50_000
HUGE = [b"1e400", b"-1e400", b"1" * 5000, b"9" * 400, b"NaN", b"-Infinity", b"1e-400"]
WRONG = [b"null", b"true", b'"5"', b"[]", b"{}", b"[[]]", b"[null]", b'{"a":{"b":[1]}}', b'""']
FIELDS = [
    "prompt", "messages", "tokens", "max_tokens", "n", "temperature", "top_p", "top_k", "seed",
    "stop", "stop_token_ids", "logit_bias", "logprobs", "model", "stream", "stream_options",
    "speculative", "response_format", "guided_regex", "guided_json", "guided_grammar",
    "guided_choice", "structured_outputs", "bad_words", "allowed_token_ids", "prediction", "user",
    "chat_template", "chat_template_kwargs", "echo", "unheard_of", "input", "text", "tools",
    "tool_choice", "metadata", "max_output_tokens", "max_completion_tokens", "system", "thinking",
]  # fmt: skip
TEXTS = [
    SURROGATE, b'"\\u0000"', b'"' + b"x" * 10_000_000 + b'"', b'"{{ 7 * 7 }}{% for x in y %}"',
    b'"../../../../etc/passwd"', b'"(a+)+$"', b'"(?R)"', b'"' + b"(" * 5000 + b'"',
    '"\U0001f600\u202e\ufeff"'.encode(),
]  # fmt: skip
CALL = b'{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": %b}]}'
ARGUMENTS = [b"[" * 5000, b'{\\"a\\": ' + b"1" * 5000 + b"}", b"NaN", b"\\ud800"]
WITHIN = [
    *(b"[" + CALL % (b'{"name": "f", "arguments": "%b"}' % text) + b"]" for text in ARGUMENTS),
    *(b'[{"type": "function_call", "call_id": "1", "name": "f", "arguments": "%b"}]' % text
      for text in ARGUMENTS),
    b'{"format": {"type": "text", "name": NaN}}',
    b'[{"type": "function", "name": "f", "strict": 1e999}]',
    b"[" + b"[]," * 500_000 + b"[]]", b"[" + b"7," * 2_000_000 + b"7]",
]  # fmt: skip  # values that are odd further inside, JSON within texts too


class Odd(NamedTuple):
    """A body with an odd value; one of 10 MB is written when it is sent, and shared until then."""

    path: str
    before: bytes
    value: bytes

    @property
    def body(self) -> bytes:
        return self.before + self.value + b"}"


class Attack(NamedTuple):
    name: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    closes: bool = False


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *(headers or (JSON,))]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}\r\n\r\n"]).encode() + body


def bodies() -> Iterator[Odd]:
    """Every field with every odd value, next to the fields that each endpoint needs."""
    for path, needed in NEEDS.items():
        for name in FIELDS:
            given = {key: value for key, value in needed.items() if key != name}
            head = json.dumps(given)[:-1] + (", " if given else "") + f'"{name}": '
            for value in [*HUGE, *WRONG, *TEXTS, *WITHIN, DEEP]:
                yield Odd(path, head.encode(), value)


def attacks() -> list[Attack]:
    path = "/v1/completions"
    whole = post(path, b'{"prompt": "a", "max_tokens": 2}')
    head, _, body = whole.partition(b"\r\n\r\n")
    chunked = "Transfer-Encoding: chunked\r\nContent-Length: 5"
    return [
        Attack("no HTTP", (b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n")),
        Attack("nothing", ()),
        Attack("half a head", (head[:40],)),
        Attack("a head without end", (b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000,)),
        Attack("many headers", (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",)),
        Attack("a long path", (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",)),
        Attack("a slow head", tuple(head[i : i + 5] for i in range(0, 60, 5)), 0.1),
        Attack("a slow body", (head + b"\r\n\r\n", *(bytes([c]) for c in body[:12])), 0.1),
        Attack("half a body", (whole[:-5],)),
        Attack("a half-closed socket", (whole,), closes=True),
        Attack("a half-closed half of a body", (whole[:-5],), closes=True),
        Attack("two lengths", (post(path, b"{}", JSON, "Content-Length: 90"),)),
        Attack("both kinds of length", (post(path, b"5\r\n{}", JSON, chunked),)),
        Attack("a length below 0", (head.replace(b"Length: ", b"Length: -") + b"\r\n\r\n",)),
        Attack("a huge length", (head.replace(b"Length: ", b"Length: 9999999") + b"\r\n\r\n",)),
        Attack("bytes that are no text", (post(path, b'{"prompt": "\xff\xfe"}'),)),
        Attack("no JSON", (post(path, b"prompt=a", "Content-Type: text/plain"),)),
        Attack("a path that climbs", (b"GET /v1/models/..%2f..%2fetc/passwd HTTP/1.1\r\n\r\n",)),
        Attack("an unknown method", (b"BREW /v1/completions HTTP/1.1\r\n\r\n",)),
        Attack("two requests at once", (whole * 2,)),
        Attack(
            "an upgrade",
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",),
        ),
        Attack("keys beyond number", (post(path, keys(300_000)),)),
        Attack("items beyond number", (post(path, b'{"prompt":[' + b"null," * 900_000 + b"0]}"),)),
    ]


def keys(count: int) -> bytes:
    """An object of so many keys."""
    return b"{" + b",".join(b'"k%d":0' % i for i in range(count)) + b"}"


def attack(port: int, what: Attack, seconds: float = 20) -> bytes:
    """The bytes received until the server hangs up, or the answer is whole."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as stream:
        try:
            for piece in what.pieces:
                stream.sendall(piece)
                time.sleep(what.pause)
            if what.closes:
                stream.shutdown(socket.SHUT_WR)
            while not is_whole(got) and (more := stream.recv(65536)):
                got += more
        except ConnectionError:
            pass  # it hung up while it was still being sent to
    return got


def is_whole(answer: bytes) -> bool:
    """Whether an answer has ended, though its connection has not."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if not length:
        return body.endswith(b"0\r\n\r\n")
    return bool(end) and len(body) >= int(length[1])


def status_of(answer: bytes) -> int:
    """The status of an answer; 0: the server hung up without one."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def generated(url: str, per_kind: int) -> Counter[int]:
    """Statuses of requests that schemathesis makes: by and against the schema, per endpoint."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, seed, settings

    found: Counter[int] = Counter()
    checks, phases = list(HealthCheck), (Phase.generate,)
    quick = settings(max_examples=per_kind, deadline=None, suppress_health_check=checks,
                     database=None, phases=phases)  # fmt: skip
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        if operation.method.upper() != "POST" or not operation.body:
            continue
        for mode in schemathesis.GenerationMode:

            @seed(7)
            @quick
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                answer = case.call(timeout=30)
                note(found, answer.status_code, case.path, str(case.body))

            send()
    return found


def table(port: int, count: int, draw: random.Random) -> Counter[int]:
    made, found = [*bodies()], Counter[int]()
    for odd in draw.choices(made, k=count):
        status = status_of(attack(port, Attack(odd.path, (post(odd.path, odd.body),))))
        note(found, status, odd.path, str(odd.body[:300]))
    return found


def note(found: Counter[int], status: int, path: str, body: str) -> None:
    found[status] += 1
    if status >= 500:
        print(f"{status} for {path}: {body[:300]}", flush=True)
    if found.total() % 500 == 0:
        print(f"{found.total()}, at last {path}: {dict(sorted(found.items()))}", flush=True)


def main() -> int:
    options = parse(__doc__, generated=210, by_hand=5000)
    draw = random.Random(7)
    with served(*SERVED) as server:
        warm = table(server.port, 200, draw)
        before, start = server.resident_mib(), time.perf_counter()
        found = table(server.port, options.by_hand, draw)
        for what in attacks():
            note(found, status_of(attack(server.port, what)), what.name, "")
        found += generated(server.url, options.generated)
        half = server.resident_mib()
        found += table(server.port, options.by_hand // 2, draw)
        seconds, after = time.perf_counter() - start, server.resident_mib()
        num_held, code = server.num_held(), server.end()
    failed = sum(count for status, count in (found + warm).items() if status >= 500)
    values = {
        "requests": float(found.total()),
        "status_5xx": float(failed),
        "hung_up": float(found[0]),
        "held_afterwards": num_held,
        "exit_code": float(code),
        "resident_mib": before,
        "resident_mib_grown": after - before,
        "resident_mib_grown_at_last": after - half,
        "seconds": seconds,
    }
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(found.items()))
    notes = [f"By status, 0 where the server hung up: {statuses}."]
    record(
        "hostile", options, {"model": TARGET}, [Row("hostile", {}, values)], notes,
        "tests.long.hostile",
    )  # fmt: skip
    print(values)
    return int(failed > 0 or num_held > 0 or code != 0)


if __name__ == "__main__":
    sys.exit(main())
