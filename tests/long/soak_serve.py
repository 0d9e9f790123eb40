"""A server for as long as asked: memory, acceptance and blocks stay what they were.

    python -m tests.long.soak_serve --minutes 30               # make soak

One deck of requests is played again and again, each round in another order, some at once: every
API, streamed and whole, sampled under every rule, with schemas, forced calls, predictions, several
drafters, requests that are refused, and clients that leave at random moments. Every request has its
seed, so that an answer must say in the last round what it said in the first. Between two rounds the
server must hold nothing, within a second, and its memory is read.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import jsonschema_rs

from benchmarks.common import DRAFT, TARGET, arguments, record
from benchmarks.served import Served, leave, served
from benchmarks.structured import as_value, asked, read
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout

SPECULATION = {
    "drafters": [{"method": name} for name in ("draft_model", "ngram", "prediction")],
    "method": "draft_model", "num_speculative_tokens": 5,
}  # fmt: skip
OPTIONS = ("--speculative-config", json.dumps(SPECULATION))
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9},
    {"speculative": {"rule": "coupled"}}, {"speculative": {"rule": "block"}, "top_k": 40},
    {"speculative": {"drafter": "ngram"}, "temperature": 0}, {"speculative": {"enabled": False}},
    {"logprobs": 2, "speculative": {"trace": True}}, {"stop": ["\n\n"], "temperature": 0.5},
    {"n": 2, "presence_penalty": 0.3, "prompt_logprobs": 1, "stream": False},
]  # fmt: skip
MOST = {"resident_mib_grown": 16.0, "acceptance_drift": 0.01, "most_seconds_to_free": 1.0}
MOST |= dict.fromkeys(
    ("held_afterwards", "unexpected_status", "different", "invalid", "exit_code"), 0.0
)
SPOKEN = ("text", "content", "arguments", "delta", "reasoning", "partial_json")
ENDS = ("[DONE]", '"message_stop"', '"response.completed"', '"response.incomplete"')
LEAVERS = 12


class Card(NamedTuple):
    """A request, and what must come of it.
    kind: of `structured.read`, where the answer is bound to `schema`
    leaves: whether its client does, at a random moment
    """

    path: str
    body: dict[str, Any]
    status: int = 200
    kind: str = ""
    schema: dict[str, Any] | None = None
    leaves: bool = False


def deck() -> list[Card]:
    """The requests of a round, always the same."""
    cards, items = [], heldout()
    for i in range(40):
        prompt, reference = items[i].prompt[-200:], items[i].reference
        path, extra = "/v1/completions", {"max_tokens": 16 + i, "seed": i, "stream": i % 3 > 0}
        body: dict[str, Any] = {"prompt": prompt, **extra, **SAMPLED[i % len(SAMPLED)]}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True, "split_tokens": i % 3 == 2}
        cards.append(Card(path, body))
        if i % 4 == 0:
            expected = {"type": "content", "content": reference}
            drafted = {"speculative": {"drafter": "prediction"}, "prediction": expected}
            cards.append(Card(path, {"prompt": prompt, **extra, **drafted, "temperature": 0}))
            says = {"messages": [{"role": "user", "content": prompt}], **extra}
            cards.append(Card("/v1/chat/completions", says))
            theirs = {"messages": says["messages"], "max_tokens": 16 + i, "temperature": 0}
            cards.append(Card("/v1/messages", theirs | {"stream": i % 8 == 0}))
    for i in range(18):
        kind, path, body, schema = asked(i, 120)
        cards.append(Card(path, body, kind=kind, schema=schema))
        if i < 6:
            cards.append(Card(path, body | {"stream": True}))
    long = {"prompt": items[0].prompt, "max_tokens": 400, "ignore_eos": True}
    cards += [Card("/v1/completions", long | {"stream": i % 2 == 0}, leaves=True)
              for i in range(LEAVERS)]  # fmt: skip
    wrong = [{"max_tokens": -1}, {"stop": 5}, {"best_of": 3}, {"logit_bias": {"x": 1}}]
    return cards + [Card("/v1/completions", long | more, 400) for more in wrong]


def spoken(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from spoken(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str):
                if name in SPOKEN:
                    yield item
            elif name != "trace":
                yield from spoken(item)


class Player:
    def __init__(self, url: str, at_once: int) -> None:
        self.url, self.cards, self.at_once = url, deck(), at_once
        self.first: dict[int, str] = {}
        self.found: Counter[str] = Counter()

    async def round(self, draw: random.Random) -> Counter[str]:
        self.turns = asyncio.Semaphore(self.at_once)
        drafts, order = Counter[str](), draw.sample(range(len(self.cards)), len(self.cards))
        moments = [draw.choice([0.0, 0.005, 0.05, 0.2]) for _ in order]
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            plays = zip(order, moments, strict=True)
            await asyncio.gather(*(self._play(client, *play, drafts) for play in plays))
        return drafts

    async def _play(
        self, client: httpx.AsyncClient, number: int, moment: float, drafts: Counter[str]
    ) -> None:
        card = self.cards[number]
        async with self.turns:
            self.found["requests"] += 1
            if card.leaves:
                self.found["left"] += 1
                await leave(client, card.path, card.body, moment)
                return
            answer = await client.post(card.path, json=card.body)
        self.found["unexpected_status"] += answer.status_code != card.status
        if answer.status_code != 200:
            return
        events = [answer.json()] if not card.body.get("stream") else list(chunks(answer.text))
        self.found["answers"] += 1
        for event in events:
            block = (event.get("metrics") or {}).get("speculative_decoding") or {}
            drafts["drafted"] += block.get("num_draft_tokens", 0)
            drafts["accepted"] += block.get("num_accepted_draft_tokens", 0)
        said = "".join(spoken(events))
        if said != self.first.setdefault(number, said):
            self.found["different"] += 1
            print(f"{card.path} {card.body}: {said!r}, and not {self.first[number]!r}")
        if card.schema is not None:
            is_cut, text = read(card.kind, events[0])
            is_valid = is_cut or jsonschema_rs.is_valid(card.schema, as_value(text))
            self.found["invalid"] += not is_valid


def chunks(text: str) -> Iterator[dict[str, Any]]:
    """The events of a stream, which must have ended."""
    if not any(end in text for end in ENDS):
        raise RuntimeError(f"a stream broke off: {text[-300:]!r}")
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Share the lock file while a round runs."""
    if lock is None:
        yield
        return
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def play(server: Served, options: Any) -> tuple[Player, dict[str, list[float]]]:
    """Rounds until time is up: acceptance, memory and seconds to free all blocks after each."""
    player, draw = Player(server.url, options.at_once), random.Random(7)
    seen: dict[str, list[float]] = {name: [] for name in ("acceptance", "memory", "free", "ends")}
    took = 0.0
    while took < 60 * options.minutes:
        with turn(options.lock):
            start = time.perf_counter()
            drafts = asyncio.run(player.round(draw))
            seen["free"].append(server.seconds_to_free())
            took += time.perf_counter() - start
        seen["acceptance"].append(drafts["accepted"] / drafts["drafted"])
        seen["memory"].append(server.resident_mib())
        seen["ends"].append(took)
        if len(seen["ends"]) % 20 == 1:
            now = {name: round(values[-1], 4) for name, values in seen.items()}
            print(now, dict(player.found), flush=True)
    return player, seen


def failures(values: dict[str, Any]) -> list[str]:
    found = {**values, "most_seconds_to_free": values["seconds_to_free"].max}
    return [
        f"{name} is {found[name]}, not at most {bound}"
        for name, bound in MOST.items()
        if found[name] > bound
    ]


def main() -> int:
    parser = arguments(__doc__, minutes=30, at_once=6)
    parser.add_argument("--lock", type=Path, help="a file to hold while a round runs (flock)")
    options = parser.parse_args()
    with served(*OPTIONS) as server:
        player, seen = play(server, options)
        held, code = server.num_held(), server.end()
    quarter, found = len(seen["ends"]) // 4, player.found
    parts = slice(quarter, 2 * quarter + 1), slice(-quarter - 1, None)
    begin, end = ({name: median(all_[part]) for name, all_ in seen.items()} for part in parts)
    values: dict[str, Any] = {
        "seconds": round(seen["ends"][-1], 1),
        "rounds": len(seen["ends"]),
        **{name: found[name] for name in ("requests", "answers", "left")},
        "acceptance": Spread.of(seen["acceptance"], ""),
        "acceptance_drift": abs(end["acceptance"] / begin["acceptance"] - 1),
        "resident_mib": begin["memory"],
        "resident_mib_grown": end["memory"] - begin["memory"],
        "seconds_to_free": Spread.of(seen["free"], "s"),
        "held_afterwards": held,
        **{name: found[name] for name in ("unexpected_status", "different", "invalid")},
        "exit_code": code,
    }
    notes = ["Memory and acceptance: the median of the last quarter's rounds against that of the "
             "second's; the first one warms up."]  # fmt: skip
    shapes = {"target": TARGET, "draft": DRAFT, "at_once": options.at_once,
              "requests_per_round": len(player.cards), **SPECULATION}  # fmt: skip
    record(
        "soak_serve", options, shapes, [Row("soak of the server", {}, values)], notes, "tests.long"
    )
    failed = failures(values)
    print(values, *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
