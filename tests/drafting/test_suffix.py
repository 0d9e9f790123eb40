"""Suffix decoding against counting, and which tokens a request looks up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken import LLM, SamplingParams
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.registry import find_drafter
from foretoken.drafting.suffix import Suffix
from foretoken.errors import ConfigError
from foretoken.ops import Rule, get_backend, unavailable
from foretoken.ops.steps import DraftRequests
from foretoken.ops.suffix import SuffixIndexes, SuffixOptions, propose
from tests.support.cases import make_params
from tests.support.slots import GivenSlots

pytestmark = pytest.mark.skipif(bool(unavailable("native")), reason="no native kernels")
CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=16)
OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "num_blocks": 64}


class Letters:
    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(400)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


def make_drafter(tokenizer: Any = None, **options: Any) -> Suffix:
    speculation = SpeculativeConfig(method="suffix", num_speculative_tokens=6, **options)
    config = EngineConfig(model="none", speculative_config=speculation)
    backend = get_backend("torch")
    setup = DrafterSetup(config, speculation, backend, CPU, 400, 4096, tokenizer=tokenizer)
    drafter = Suffix(setup)
    drafter.allocate(GivenSlots(make_params(4), max_tokens=600, max_drafts=6, blocks=0), 0)
    return drafter


def asked(drafter: Suffix, tokens: list[int], k: int = 6, slot: int = 0) -> list[int]:
    slots: Any = drafter.slots
    slots.put(slot, tokens)
    block = drafter.propose(slots.asking([slot], [k]))
    assert block.cache is None
    assert not block.real_q_B.any()
    count = int(block.num_B[0])
    assert block.token_BK[0, count:].tolist() == [-1] * (k - count)
    return block.token_BK[0, :count].tolist()


def finish(drafter: Suffix, prompt: list[int], output: list[int], slot: int = 1) -> None:
    """A request that gets drafts once, and then ends."""
    slots: Any = drafter.slots
    slots.change(slot, num_prompt=len(prompt))
    asked(drafter, [*prompt, output[0]], slot=slot)
    slots.put(slot, [*prompt, *output])
    drafter.release(slot)


def test_a_request_with_a_salt_is_kept_apart() -> None:
    """Its drafts are not from other requests, with or without the salt, nor theirs from it."""
    drafter = make_drafter()
    slots: Any = drafter.slots
    plain, text = slots.admitted[0].params, [1, 2, 3, 4, 5, 6]
    salted = replace(plain, cache_salt="a")
    slots.change(0, params=salted)
    slots.change(1, params=salted)
    finish(drafter, [9], text)
    assert asked(drafter, [7, 1, 2, 3]) == []
    drafter.release(0)
    slots.change(0, params=plain)
    slots.change(1, params=plain)
    assert asked(drafter, [7, 1, 2, 3]) == []
    drafter.release(0)
    finish(drafter, [9], text)
    assert asked(drafter, [7, 1, 2, 3])[:3] == [4, 5, 6]
    drafter.release(0)
    slots.change(0, params=salted)
    assert asked(drafter, [7, 1, 2, 3]) == []


def naive(
    texts: list[list[int]], own: list[int], k: int, options: SuffixOptions
) -> tuple[float, list[int]]:
    """The expected number of accepted drafts, and the drafts, by counting occurrences in `texts`.
    Without `texts`, occurrences in `own` are counted; a match may continue into the drafts.
    """
    ends = [(text, end) for text in reversed(texts or [own]) for end in range(len(text), 0, -1)]
    if not texts:
        ends = ends[1:]

    def matched(text: list[int], end: int) -> int:
        most = min(options.depth, end, len(own))
        return next((i for i in range(most) if text[end - 1 - i] != own[-1 - i]), most)

    lengths = [matched(*one) for one in ends]
    longest = max(lengths, default=0)
    votes = [one for one, length in zip(ends, lengths, strict=True) if length == longest > 0]
    drafts: list[int] = []
    likely, expected = 1.0, 0.0
    while len(drafts) < min(k, int(options.max_factor * longest)):
        i = len(drafts)
        read = [(t if texts else own + drafts, end + i) for t, end in votes]
        known = [(one, t[at]) for one, (t, at) in zip(votes, read, strict=True) if at < len(t)]
        if not known:
            break
        [(best, count)] = Counter(token for _, token in known).most_common(1)
        likely *= count / len(known)
        if likely < options.min_product:
            break
        expected += likely
        drafts.append(best)
        votes = [one for one, token in known if token == best]
    return expected, drafts


def wrapped(texts: list[list[int]], capacity: int) -> list[list[int]]:
    flat = [token for text in texts for token in (*text, -1)][-capacity:]
    cut = [i for i, token in enumerate(flat) if token < 0]
    return [flat[a + 1 : b] for a, b in zip([-1, *cut], cut, strict=False)]


@given(
    own=TOKENS,
    grown=st.lists(st.integers(0, 3), max_size=10),
    texts=st.lists(TOKENS, max_size=6),
    capacity=st.integers(2, 30),
    k=st.integers(1, 6),
    options=st.builds(
        SuffixOptions,
        st.sampled_from([1, 2, 5, 24]), st.sampled_from([1.0, 0.5, 3.0]),
        st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    ),
)  # fmt: skip
def test_equals_counting_also_as_texts_grow_and_old_ones_make_room(
    own: list[int], grown: list[int], texts: list[list[int]], capacity: int, k: int,
    options: SuffixOptions,
) -> None:  # fmt: skip
    row = np.full(40, -1, dtype=np.int32)
    index = SuffixIndexes([row])
    others = SuffixIndexes([np.empty(capacity, dtype=np.int32)])
    held: list[list[int]] = []
    for end in range(len(own), len(own) + len(grown) + 1):
        text = (own + grown)[:end]
        row[:end] = text
        if len(held) < len(texts):
            held.append(texts[len(held)])
            assert others.append(0, np.array(held[-1])) == min(len(held[-1]) + 1, capacity)
        columns = torch.tensor([[0], [k], [end]]).unbind()
        rows = DraftRequests(*columns, most=k, params=make_params(1))
        for number in (0, 1):
            drafts, num_B, expected_B = propose(
                index, others, torch.tensor([number]), rows, options
            )
            got = drafts[0, : int(num_B)].tolist()
            allowed = [naive([], text, k, options)]
            kept = wrapped(held, capacity)
            allowed += [naive(kept, text, k, options)] if number and any(kept) else []
            most = max(expected for expected, _ in allowed)
            assert got in [one for expected, one in allowed if expected > most - 1e-9]
            assert float(expected_B) == pytest.approx(most)


def test_a_draft_is_as_long_as_the_match_allows_and_counts_say() -> None:
    drafter = make_drafter(suffix_decoding_max_spec_factor=2)
    assert asked(drafter, [7, 1, 2, 3, 4, 5, 8, 1], slot=0) == [2, 3]
    often = [9, 1, 6, 9, 1, 6, 9, 1, 5, 9, 1]
    assert asked(drafter, often, 1, slot=1) == [6], "two of three"
    strict = make_drafter(suffix_decoding_min_token_prob=0.7)
    assert asked(strict, often) == []


def test_each_request_is_looked_up_in_its_own_slot_and_a_new_one_afresh() -> None:
    drafter = make_drafter(suffix_decoding_max_cached_requests=0)
    slots: Any = drafter.slots
    texts = {3: [5, 6, 5], 0: [7, 8, 9], 2: [1, 1], 1: [4, 3, 4]}
    for slot, text in texts.items():
        slots.put(slot, text)
    block = drafter.propose(slots.asking([*texts], [2, 2, 1, 0]))
    assert block.token_BK.tolist() == [[6, -1], [-1, -1], [1, -1], [-1, -1]]
    assert sorted(drafter.held_slots()) == [0, 1, 2, 3]
    drafter.release(3)
    assert sorted(drafter.held_slots()) == [0, 1, 2]
    assert asked(drafter, [8, 6, 9, 6], slot=3) == [9]
    assert asked(drafter, [7, 8, 9, 4, 4, 4, 7], slot=0) == [8], "after a stretch without drafts"


def test_outputs_of_the_latest_requests_are_looked_up_and_prompts_are_not() -> None:
    drafter = make_drafter(suffix_decoding_max_cached_requests=2)
    finish(drafter, [30, 31, 32], [40, 41, 42])
    assert asked(drafter, [9, 40]) == [41]
    assert asked(drafter, [9, 30], slot=2) == []
    finish(drafter, [30], [50, 51])
    finish(drafter, [30], [60, 61])
    assert asked(drafter, [9, 8, 40], slot=2) == [], "two are kept"
    assert asked(drafter, [9, 8, 50], slot=3) == [51]
    finish(drafter, [1], [*range(100, 400), *range(100, 300)])
    assert asked(drafter, [9, 8, 50], slot=3) == []


def test_many_long_outputs_take_the_memory_of_a_few() -> None:
    drafter = make_drafter(suffix_decoding_max_cached_tokens=1024)
    size = drafter._shared_indexes.size_N
    for number in range(300):
        finish(drafter, [1], [number + 1000, number + 2000, *[7] * (number % 400)])
        assert int(size[0]) == sum(drafter._finished_lengths) <= 1024
    assert asked(drafter, [4, 1299]) == [2299]
    assert asked(drafter, [4, 1200], slot=2) == []
    assert drafter.bytes_shared == 4 * 1024 + SuffixIndexes.num_bytes(1024)


def test_a_preempted_request_is_kept_once() -> None:
    drafter = make_drafter()
    slots: Any = drafter.slots
    slots.change(1, num_prompt=1)
    asked(drafter, [1, 20], slot=1)
    slots.put(1, [1, 20, 21, 22])
    drafter.release(1)  # its next slot has its earlier output
    slots.change(2, num_prompt=1)
    asked(drafter, [1, 20, 21, 22, 23], slot=2)
    slots.put(2, [1, 20, 21, 22, 23, 24])
    drafter.release(2)
    assert list(drafter._finished_lengths) == [4, 3]


@pytest.mark.parametrize(
    ("params", "rule", "looks"),
    [
        ({"seed": 3, "temperature": 0.8}, Rule.STANDARD, False),
        ({"seed": 3, "temperature": 0.8}, Rule.BLOCK, False),
        ({"seed": 3, "temperature": 0.8}, Rule.COUPLED, True),
        ({"seed": 3, "temperature": 0.0}, Rule.STANDARD, True),
        ({"temperature": 0.8}, Rule.STANDARD, True),
    ],
)
def test_seeded_text_does_not_depend_on_others(
    tmp_path: Path, params: dict[str, Any], rule: Rule, looks: bool
) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_text("\x05\x06\x07", encoding="utf-8")
    drafter = make_drafter(Letters(), suffix_corpus=corpus)
    slots: Any = drafter.slots
    finish(drafter, [1], [20, 21])
    for slot in (0, 2):
        slots.change(slot, params=SamplingParams(**params), rule=rule)
    assert asked(drafter, [9, 20]) == ([21] if looks else [])
    assert asked(drafter, [9, 5], slot=2) == [6], "a corpus is always the same"


def test_a_seed_gives_the_same_text_after_any_other_requests(target: Path) -> None:
    params = [SamplingParams(temperature=0.9, max_tokens=60, seed=s) for s in (1, 2)]
    fresh, used = (LLM(str(target), {"method": "suffix"}, **OPTIONS) for _ in range(2))
    used.generate(["abab", "import os", "abab"] * 5, SamplingParams(max_tokens=60, seed=1))
    outputs = [llm.generate(["abab", "xyz"], params) for llm in (fresh, used)]
    tokens, counts = (
        [[read(o) for o in one] for one in outputs]
        for read in (lambda o: o.outputs[0].token_ids, lambda o: o.metrics.drafted_per_position)
    )
    assert tokens[0] == tokens[1]
    assert counts[0] == counts[1]
    assert sum(counts[0][0]) > 0
    used.engine.check_integrity()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"ab\xff", "Byte 2 is not UTF-8"),
        (b"", "with a token. It is empty"),
    ],
)
def test_a_corpus_that_is_none_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "corpus").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        make_drafter(Letters(), suffix_corpus=str(tmp_path / "corpus"))


def test_a_corpus_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("abc", encoding="utf-8")
    with pytest.raises(ConfigError, match="The target has no tokenizer"):
        make_drafter(suffix_corpus=str(tmp_path / "corpus"))


def test_the_plan_counts_what_is_kept(target: Path) -> None:
    llm = LLM(str(target), {"method": "suffix", "suffix_decoding_max_cached_tokens": 4096})
    plan, drafter = llm.memory_plan, llm.engine.runner.drafter
    assert plan is not None
    assert isinstance(drafter, Suffix)
    held = [sum(array.nbytes for array in arrays) for arrays in drafter._slot_indexes._memory]
    assert len(held) == 64
    assert plan.parts["drafts of slots"] >= sum(held)
    assert plan.parts["texts to draft from"] == 4 * 4096 + 3 * 8 * 4096


def test_it_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = SpeculativeConfig(method="suffix")
    with pytest.raises(ConfigError, match=r"draft_model, eagle3, ngram\. .*use `ngram` there"):
        find_drafter(speculation, on_host=False)
    monkeypatch.setattr("foretoken.drafting.suffix.unavailable", lambda _: "they were not built")
    with pytest.raises(ConfigError, match=r"kernels: they were not built\. `ngram` does not"):
        make_drafter()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "an integer in [1,"),
        (
            {"suffix_decoding_max_spec_factor": 0.1, "suffix_decoding_max_tree_depth": 5},
            "is 0.1: must be a number in [0.2, 64]. Below 1 / 5 not even a match",
        ),
        ({"suffix_decoding_min_token_prob": 1.5}, "a number in [0, 1]"),
        ({"suffix_decoding_max_cached_tokens": 10}, "is 10: must be an integer in [1024,"),
        ({"suffix_decoding_max_cached_requests": -1}, "an integer >= 0"),
        ({"suffix_corpus": 3}, "a file of UTF-8 text"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig(method="suffix", **options)
    assert message in str(raised.value)


def test_steps_that_are_timed_at_start_leave_no_texts(target: Path) -> None:
    speculation = {"method": "suffix", "num_speculative_tokens": "auto"}
    drafter = LLM(str(target), speculation, **OPTIONS).engine.runner.drafter
    assert isinstance(drafter, Suffix)
    assert drafter._finished_lengths == type(drafter._finished_lengths)()
    assert drafter._shared_indexes.size_N.sum() == 0
