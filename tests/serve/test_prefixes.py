"""Which replica has seen a prompt's beginning, which gets the next request, what a front reads."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.serve.fleet.call import Routing, read_routing
from foretoken.serve.fleet.prefixes import CHUNK, MAX_CHARS, PrefixIndex, rank_replicas


def beginnings(prompt: str) -> list[str]:
    """The remembered parts of a prompt: its beginnings of whole chunks, or all of a short one."""
    text = prompt[:MAX_CHARS]
    if 0 < len(text) < CHUNK:
        return [text]
    return [text[: size * CHUNK] for size in range(1, len(text) // CHUNK + 1)]


class Naive:
    """The same index: a list of beginnings, the one used last at its end.
    Of one prompt the shortest counts as used last: without it the longer ones could not be found.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: list[tuple[str, str]] = []

    def add(self, prompt: str, replica: str) -> None:
        for text in reversed(beginnings(prompt)):
            self.seen = [each for each in self.seen if each[0] != text] + [(text, replica)]
        self.seen = self.seen[max(len(self.seen) - self.most, 0) :]

    def keep_only(self, replicas: set[str]) -> None:
        self.seen = [each for each in self.seen if each[1] in replicas]

    def longest(self, prompt: str, among: set[str]) -> tuple[str | None, int]:
        best: tuple[str | None, int] = (None, 0)
        known = dict(self.seen)
        for number, text in enumerate(beginnings(prompt)):
            if text not in known:
                break
            if known[text] in among:
                best = known[text], number + 1
        return best


# Prompts of few different chunks share beginnings often; a lone surrogate is no UTF-8.
CHUNKS = ["a" * CHUNK, "b" * CHUNK, "\ud800" + "é" * (CHUNK - 1)]
PROMPTS = st.builds(
    lambda parts, rest: "".join(parts) + rest,
    st.lists(st.sampled_from(CHUNKS), max_size=4),
    st.sampled_from(["", "a", "b", "a" * (CHUNK - 1), "\udfff"]),
)
REPLICAS = st.sampled_from("pqr")
SETS = st.frozensets(REPLICAS)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, REPLICAS), st.tuples(st.just("keep_only"), SETS, st.none())
)


@given(st.lists(ACTIONS, max_size=25), PROMPTS, SETS, st.integers(1, 9))
def test_the_index_is_the_naive_one(
    actions: list[tuple[str, Any, Any]], prompt: str, among: frozenset[str], most: int
) -> None:
    index, naive = PrefixIndex[str](most), Naive(most)
    for what, first, second in actions:
        for each in (index, naive):
            getattr(each, what)(*(part for part in (first, second) if part is not None))
        assert len(index) == len(naive.seen) <= most
        assert index.longest_match(prompt, among) == naive.longest(prompt, set(among))


def test_the_last_that_computed_a_beginning_has_it() -> None:
    """A case by hand; a prompt shorter than a chunk is known as a whole."""
    index = PrefixIndex[str]()
    index.add("s" * 2 * CHUNK + "x" * CHUNK, "p")
    index.add("s" * 2 * CHUNK + "y" * CHUNK, "q")
    assert index.longest_match("s" * 2 * CHUNK + "x" * CHUNK, "pq") == ("p", 3)
    assert index.longest_match("s" * 2 * CHUNK + "z" * CHUNK, "pq") == ("q", 2)
    assert index.longest_match("s" * 2 * CHUNK + "x" * CHUNK, "q") == ("q", 2)
    assert index.longest_match("t" + "s" * 2 * CHUNK, "pq") == (None, 0)
    assert index.longest_match("", "pq") == (None, 0)
    index.add("hello", "p")
    assert (index.longest_match("hello", "p"), index.longest_match("hello!", "p")) == (
        ("p", 1),
        (None, 0),
    )


def test_the_end_of_a_huge_prompt_decides_nothing() -> None:
    index = PrefixIndex[str]()
    index.add("a" * MAX_CHARS + "b" * CHUNK, "p")
    assert index.longest_match("a" * MAX_CHARS + "c" * CHUNK, "p") == ("p", MAX_CHARS // CHUNK)
    assert len(index) == MAX_CHARS // CHUNK


# The order in which replicas are asked


def test_the_longest_beginning_comes_first() -> None:
    index = PrefixIndex[str]()
    index.add("a" * 4 * CHUNK, "p")
    index.add("a" * 2 * CHUNK, "q")
    order = rank_replicas("a" * 4 * CHUNK, index, {"q": 0, "p": 3, "r": 1})
    assert order == ["p", "q", "r"]
    assert rank_replicas("a" * 2 * CHUNK, index, {"r": 0, "q": 3, "p": 1}) == ["q", "r", "p"]
    assert rank_replicas("a" * 4 * CHUNK, index, {"q": 5, "r": 1}) == ["q", "r"], "p is not there"


@pytest.mark.parametrize("imbalance", [0, 2, 8])
def test_a_replica_that_has_far_more_requests_loses_its_beginnings(imbalance: float) -> None:
    index = PrefixIndex[str]()
    index.add("a" * CHUNK, "p")
    for more, first in ((imbalance, "p"), (imbalance + 1, "q")):
        load = {"p": 5 + more, "r": 6, "q": 5}
        assert rank_replicas("a" * CHUNK, index, load, imbalance)[0] == first
    assert rank_replicas("a" * CHUNK, index, {"p": 9, "q": 0}) == ["q", "p"]
    assert rank_replicas("a" * CHUNK, index, {"p": 8, "q": 0}) == ["p", "q"]


LOADS = st.dictionaries(st.sampled_from("pqrstu"), st.integers(0, 12))


@given(st.lists(st.tuples(PROMPTS, st.sampled_from("pqrstu")), max_size=8), PROMPTS, LOADS)
def test_all_are_asked_once_and_by_load(
    seen: list[tuple[str, str]], prompt: str, load: dict[str, int]
) -> None:
    index = PrefixIndex[str]()
    for text, replica in seen:
        index.add(text, replica)
    order = list(rank_replicas(prompt, index, load))
    assert sorted(order) == sorted(load)
    favourite, _ = index.longest_match(prompt, load)
    if favourite is not None and load[favourite] - min(load.values()) <= 8:
        assert order.pop(0) == favourite
    assert all(load[one] <= load[other] for one, other in pairwise(order))


def test_ties_are_decided_by_the_beginning_of_the_prompt() -> None:
    names, index = [f"replica-{i}" for i in range(4)], PrefixIndex[str]()
    firsts = [
        rank_replicas(f"{i} {'x' * CHUNK}", index, dict.fromkeys(names, 1))[0] for i in range(200)
    ]
    counts = [firsts.count(name) for name in names]
    assert min(counts) > 20, "all get about as many"
    start = "y" * CHUNK
    orders = {
        tuple(rank_replicas(start + rest, index, dict.fromkeys(names, 0))) for rest in "abcdefgh"
    }
    assert len(orders) == 1, "what follows does not count"


@given(PROMPTS, LOADS)
def test_fronts_that_do_not_know_of_each_other_choose_alike(
    prompt: str, load: dict[str, int]
) -> None:
    backwards = dict(reversed(load.items()))
    order = rank_replicas(prompt, PrefixIndex[str](), load)
    assert order == rank_replicas(prompt, PrefixIndex[str](), backwards)


# What a front reads of a body

TOOLS = [{"type": "function", "function": {"name": "area", "description": "size"}}]
BODIES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "def f"}, "def f"),
    ({"prompt": ["a", "b"]}, "a\nb"),
    ({"prompt": [5, 17]}, "5\n17"),
    ({"prompt": [[1, 2], [3]]}, "1\n2\n3"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "user\nhi"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
     "user\ntext\nhi"),
    ({"input": "say"}, "say"),
    ({"input": [{"role": "user", "content": "hi"}], "instructions": "be kind"},
     "be kind\nuser\nhi"),
    ({"messages": [{"role": "user", "content": "hi"}], "system": "be kind"}, "be kind\nuser\nhi"),
    ({"system": [{"type": "text", "text": "be kind"}], "messages": []}, "text\nbe kind"),
    ({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS},
     "function\narea\nsize\nuser\nhi"),
    ({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "cache_salt": "s"},
     "s\nfunction\narea\nsize\nuser\nhi"),
    ({"prompt": "hi", "cache_salt": "s"}, "s\nhi"),
    ({"prompt": "hi", "suffix": "x", "temperature": 2, "user": "me"}, "hi"),
    ({"prompt": None, "tools": None}, ""),
    ({"temperature": 1}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "prompt"), BODIES)
def test_what_a_prompt_begins_with(body: dict[str, Any], prompt: str) -> None:
    said = json.dumps({**body, "model": "m"}).encode()
    assert read_routing(said) == Routing("m", prompt)
    backwards = json.dumps(dict(reversed(body.items()))).encode()
    assert read_routing(backwards) == Routing(None, prompt), "whatever the order of the fields"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"5", b"null", b"\xff\xfe", b"a=b&c=d", b"[" * 100_000,
     b'{"prompt": "a"} x'],
)  # fmt: skip
def test_of_what_is_no_object_nothing_is_read(body: bytes) -> None:
    assert read_routing(body) == Routing(None, "")


@pytest.mark.parametrize("model", [None, 5, ["m"], {"a": "m"}, True])
def test_a_model_is_a_text(model: Any) -> None:
    said = json.dumps({"model": model, "prompt": "a"}).encode()
    assert read_routing(said) == Routing(None, "a")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * (MAX_CHARS + 5)},
        {"prompt": "ab" * 2**21},
        {"prompt": [7] * 2**19},
        {"messages": [{"role": "user", "content": "y" * 999}] * 900},
        {"cache_salt": "s" * 2**20, "prompt": "a"},
    ],
)
def test_a_huge_prompt_is_cut(body: dict[str, Any]) -> None:
    found = read_routing(json.dumps({**body, "model": "m"}).encode())
    assert (found.model, len(found.prompt)) == ("m", MAX_CHARS)


def test_odd_numbers_are_texts_too() -> None:
    """The replica decides whether they are allowed there."""
    found = read_routing(
        b'{"model": "m", "prompt": [1e999, -0.5, true, null, 12345678901234567890]}'
    )
    assert found.model == "m"
    assert found.prompt.split("\n")[1::2] == ["-0.5", "12345678901234567890"]
    assert read_routing(b'{"prompt": [' + b"9" * 4000 + b"]}").prompt == "9" * 4000


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "second", "tools": [{"description": "\\ud83d"}], "prompt": "a"}',
        b'\xef\xbb\xbf{"model": "second", "prompt": "a"}',
    ],
    ids=["half a surrogate pair", "a byte order mark"],
)
def test_what_a_replica_can_read_goes_to_its_model(body: bytes) -> None:
    """A replica reads both: see `JsonRoute`."""
    found = read_routing(body)
    assert found.model == "second"
    assert found.prompt.endswith("a")
    index = PrefixIndex[str]()
    index.add(found.prompt, "p")
    assert index.longest_match(found.prompt, "p") == ("p", 1)


TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}),
    max_size=5,
)


@pytest.mark.parametrize("name", ["messages", "input"])
@given(begun=TURNS, one=TURNS, other=TURNS, system=st.none() | st.text())
def test_equal_beginnings_of_conversations_are_equal_beginnings_of_texts(
    name: str, begun: list[Any], one: list[Any], other: list[Any], system: str | None
) -> None:
    fields = {"system": system, "model": "m"}
    texts = [
        read_routing(json.dumps({**fields, name: turns}).encode()).prompt
        for turns in (begun, begun + one, begun + other)
    ]
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[0])
