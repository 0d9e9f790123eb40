"""llama.cpp as a library: its rule of lookup, the loop of steps, and what is refused.

The library itself is not needed: a model that counts stands for it.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import pytest

from benchmarks import llama_library, speed_gguf
from benchmarks.llama_library import Lookup

SIZES = [80, 160, 56, 528]  # of the structures, as a C compiler lays out the headers of v0.5.0


def test_lookup_drafts_what_came_next() -> None:
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert Lookup(2, 3).draft(text) == [3, 4, 5]
    assert Lookup(2, 6).draft(text) == [3, 4, 5, 6, 7, 8]
    assert Lookup(2, 3).draft([*text[:-1], 7]) == []
    assert Lookup(2, 8).draft(text) == [], "the text is too short for its rule"
    assert Lookup(1, 3).draft([5, 1, 7, 1, 8, 8, 1]) == [8, 8], "the latest place counts"


class Counting:
    """A model: its likeliest token is the last plus one, modulo 5."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.rested = 0

    def forget(self, length: int = 0) -> None:
        del self.seen[length:]

    def step(self, tokens: list[int], outputs: int = 1) -> list[int]:
        self.seen += tokens
        return [(token + 1) % 5 for token in tokens[-outputs:]]

    def rest(self) -> None:
        self.rested += 1


@pytest.mark.parametrize("lookup", [None, Lookup(1, 2), Lookup(2, 7)])
def test_lookup_changes_the_steps_and_not_the_tokens(lookup: Lookup | None) -> None:
    model: Any = Counting()
    done = llama_library.complete(model, [3, 3, 3, 4], 21, lookup)
    assert done.tokens == [(4 + i) % 5 for i in range(1, 22)]
    assert model.seen == [3, 3, 3, 4, *done.tokens[:-1]]
    assert model.rested == 1
    assert (done.steps < 20) == (lookup is not None)


def test_the_structures_have_the_sizes_of_the_headers() -> None:
    sizes = [
        ctypes.sizeof(getattr(llama_library, name))
        for name in ("ModelParams", "ContextParams", "Batch", "PoolParams")
    ]
    assert sizes == SIZES


def test_a_folder_without_the_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no llama\.cpp libraries"):
        llama_library.load(tmp_path)
    with pytest.raises(RuntimeError, match="no backend for this processor"):
        llama_library.chosen(["something else"])
    line = "load_backend: loaded CPU backend from /some/where/libggml-cpu-zen4.so"
    assert llama_library.chosen(["first", line, "last"]).name == "libggml-cpu-zen4.so"


def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--machine", default="")
    speed_gguf.add_options(parser)
    (tmp_path / "small.Q8_0.gguf").touch()
    model = ["--model", str(tmp_path / "small.Q8_0.gguf")]
    library = ["--llama-library", str(tmp_path)]

    def parsed(words: list[str]) -> argparse.Namespace:
        options = parser.parse_args(words)
        speed_gguf.check_options(parser, options)
        return options

    assert parsed([]).machine == ""
    assert parsed([*model, *library]).machine == "small_q8_0"
    assert parsed([*model, *library, "--machine", "xeon"]).machine == "small_q8_0_xeon"
    for words, message in (
        (model, "go together"),
        ([*model, *library, "--llama-cpp", "x"], "for the embedded pair"),
        (["--model", "none.gguf", *library], "none.gguf does not exist"),
    ):
        with pytest.raises(SystemExit):
            parsed(words)
        assert message in capsys.readouterr().err


def test_texts_are_compared_with_both_plain_ones() -> None:
    tokens = {"plain": [[1], [2]], "llama.cpp": [[1], [3]], "n-gram, K=3": [[1], [2]]}
    assert speed_gguf.agreement(tokens)["n-gram, K=3"] == {
        "prompts_equal_to_plain": 2,
        "prompts_equal_to_llama_cpp": 1,
    }
