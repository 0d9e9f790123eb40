"""Incremental text against whole-output decoding; stop strings across token borders."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretoken.engine.detokenizer import Detokenizer


class ByteTokenizer:
    """One token per byte, so that every non-ASCII character spans tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def feed(text: bytes, stop: tuple[str, ...] = ()) -> Detokenizer:
    out = Detokenizer(ByteTokenizer(), list(b"prompt"), stop)
    for byte in text:
        out.append(byte)
    return out


@given(st.text(max_size=30))
def test_text_equals_decoding_the_whole_output(text: str) -> None:
    out = feed(text.encode())
    out.flush()
    assert out.text == text


def test_a_character_appears_only_once_all_its_bytes_have() -> None:
    out = Detokenizer(ByteTokenizer(), [], ())
    seen = []
    for byte in "aß€".encode():
        out.append(byte)
        seen.append(out.text)
    assert seen == ["a", "a", "aß", "aß", "aß", "aß€"]


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    out = feed("a€".encode()[:-1])
    assert out.text == "a"
    out.flush()
    assert out.text == "a\ufffd"


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_across_tokens_cuts_the_text(include: bool, expected: str) -> None:
    out = Detokenizer(ByteTokenizer(), [], ("xyz", "cd"), include_stop=include)
    hits = []
    for byte in b"abcd":
        out.append(byte)
        hits.append(out.find_stop())
    assert hits == [None, None, None, "cd"]
    assert out.text == expected


def test_the_earliest_of_several_stop_strings_wins() -> None:
    out = Detokenizer(ByteTokenizer(), [], ("d", "bcd"))
    for byte in b"abc":
        out.append(byte)
    out.append(ord("d"))
    assert out.find_stop() == "bcd"
    assert out.text == "a"


def test_a_prompt_that_ends_within_a_character_is_continued() -> None:
    out = Detokenizer(ByteTokenizer(), "é".encode()[:1], ())
    for byte in "é".encode()[1:] + b"x":
        out.append(byte)
    assert out.text == "éx"


def test_a_long_stop_string_costs_no_more_than_the_text_that_waits() -> None:
    """Only as much of it is looked at as text waits: here one character in every step."""
    out = Detokenizer(ByteTokenizer(), [], ("b" * 1_000_000,))
    start = time.process_time()
    for _ in range(200):
        out.append(ord("a"))
        assert out.take() == "a"
    assert time.process_time() - start < 2


def test_stable_text_holds_back_what_may_begin_a_stop_string() -> None:
    out = feed(b"say STO", ("STOP", "TOX"))
    assert out.stable_text == "say "
    assert feed(b"say STOX", ("STOP",)).stable_text == "say STOX"


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens it is asked to decode; 300 and up are special and say nothing."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode([i for i in ids if i < 300])


@pytest.mark.parametrize(
    "pattern", [b"\x80", b"\xe2\x82", b"\xf0", b"\xef\xbf\xbd", b"a\xff\xff", [300], [300, 300, 65]]
)
def test_endless_tokens_without_a_character_cost_the_same_each(pattern: bytes | list[int]) -> None:
    def cost(length: int) -> int:
        tokenizer = CountingTokenizer()
        out = Detokenizer(tokenizer, [], ())
        for i in range(length):
            out.append(pattern[i % len(pattern)])
        out.flush()
        whole = tokenizer.decode([pattern[i % len(pattern)] for i in range(length)])
        assert out.text == whole
        return tokenizer.decoded

    assert cost(4000) < 2.2 * cost(2000)
    assert cost(4000) < 4000 * 100


@given(st.text(st.sampled_from("aé€😀\ufffd\u0301"), max_size=40))
def test_text_rich_in_replacement_characters_is_unchanged(text: str) -> None:
    out = feed(text.encode())
    out.flush()
    assert out.text == text


@given(st.binary(max_size=60))
def test_any_bytes_become_what_they_decode_to_at_once(data: bytes) -> None:
    out = feed(data)
    shown = ""
    for _ in range(2):
        assert out.text.startswith(shown)
        shown = out.text
        out.flush()
    assert out.text == data.decode("utf-8", errors="replace")


def test_a_tokens_that_never_end_with_a_character_are_shown_at_last() -> None:
    class Straddling(ByteTokenizer):
        """Every token ends one character and begins the next, which is never completed."""

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return (b"\x82\xe2" * len(ids)).decode("utf-8", errors="replace")

    out = Detokenizer(Straddling(), [], ())
    for _ in range(40):
        out.append(0)
    shown = out.text
    assert shown
    out.flush()
    assert len(out.text) - len(shown) < 16, "a character per token"


class CleaningTokenizer(ByteTokenizer):
    """Drops spaces before punctuation, as tokenizers of older models do."""

    clean_up_tokenization_spaces = True

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return super().decode(ids).replace(" .", ".").replace(" ,", ",").replace(" n't", "n't")


@given(st.text(st.sampled_from("a .,n't€"), max_size=150))
@example("do n't , now .")
def test_text_read_late_is_the_text_that_was_streamed(text: str) -> None:
    for tokenizer in (ByteTokenizer(), CleaningTokenizer()):
        streamed, late = (Detokenizer(tokenizer, list(b"say "), ()) for _ in range(2))
        shown = ""
        for byte in text.encode():
            late.append(byte)
            streamed.append(byte)
            assert streamed.text.startswith(shown)
            shown = streamed.text
        assert late.text == streamed.text
