"""Incremental text against whole-output decoding; stop strings across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given
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
    out = Detokenizer(ByteTokenizer(), [], ("xyz", "cd"))
    hits = []
    for byte in b"abcd":
        before = len(out.text)
        out.append(byte)
        hits.append(out.find_stop(before, include))
    assert hits == [None, None, None, "cd"]
    assert out.text == expected


def test_the_earliest_of_several_stop_strings_wins() -> None:
    out = Detokenizer(ByteTokenizer(), [], ("d", "bcd"))
    for byte in b"abc":
        out.append(byte)
    out.append(ord("d"))
    assert out.find_stop(3, False) == "bcd"
    assert out.text == "a"


def test_a_prompt_that_ends_within_a_character_is_continued() -> None:
    out = Detokenizer(ByteTokenizer(), "é".encode()[:1], ())
    for byte in "é".encode()[1:] + b"x":
        out.append(byte)
    assert out.text == "éx"


def test_settled_text_holds_back_what_a_stop_string_may_take() -> None:
    out = feed(b"say STO", ("STOP", "TOX"))
    assert out.settled_text == "say "
    assert feed(b"say STOX", ("STOP",)).settled_text == "say STOX"
