"""The recorder's requests cover what they claim, and its comparison overlooks nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from foretoken import CompletionOutput, Logprob, RequestOutput, SamplingParams
from foretoken.outputs import RequestMetrics

Lines = list[dict[str, Any]]
NEXT_DOUBLE = float.fromhex("-0x1.8000000000001p+0")


def recording() -> Lines:
    """Two requests of one sample each, with log-probabilities of output and prompt."""
    scored = [{4: Logprob(-1.5, 1, "a"), 7: Logprob(-2.5, 2, "b")}, {7: Logprob(-0.25, 1, "b")}]
    sample = CompletionOutput(0, [4, 7], "ab", "stop", 7, 11, scored, ["plain", "accepted"])
    output = RequestOutput("1", "x", [3], [sample], RequestMetrics(), [None, *scored])
    lines = [{"request": f"some/0/{i}"} | record.as_line(output) for i in range(2)]
    return json.loads(json.dumps(lines))  # no list is shared


def compared(tmp_path: Path, one: Lines, other: Lines) -> int:
    files = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    for path, lines in zip(files, (one, other), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return record.compare(*files)


def test_equal_recordings_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, recording(), recording()) == 0
    said = capsys.readouterr().out
    assert "2 requests, 2 samples, 4 tokens, 12 log-probabilities\n0 differences" in said


def change_token(lines: Lines) -> None:
    lines[1]["samples"][0]["token_ids"][1] = 8


def change_last_bit(lines: Lines) -> None:
    lines[1]["samples"][0]["logprobs"][0][0][1] = NEXT_DOUBLE.hex()


def change_prompt_logprob(lines: Lines) -> None:
    lines[1]["prompt_logprobs"][2] = None


def cut_a_token(lines: Lines) -> None:
    lines[1]["samples"][0]["token_ids"].pop()


def drop_a_sample(lines: Lines) -> None:
    lines[1]["samples"].clear()


def raise_an_error(lines: Lines) -> None:
    lines[1]["error"] = "RequestError"


def change_a_count(lines: Lines) -> None:
    lines[1]["counts"]["num_steps"] += 1


def drop_a_request(lines: Lines) -> None:
    lines.pop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_token, "some/0/1: samples[0].token_ids[1]: 7 → 8"),
        (change_last_bit, "some/0/1: samples[0].logprobs[0]: "),
        (change_prompt_logprob, "some/0/1: prompt_logprobs[2]: "),
        (cut_a_token, "some/0/1: samples[0].token_ids[1]: 7 → no more"),
        (drop_a_sample, "some/0/1: samples[0]: "),
        (raise_an_error, "some/0/1: error: None → 'RequestError'"),
        (change_a_count, "some/0/1: counts.num_steps: 0 → 1"),
        (drop_a_request, "some/0/1: only in "),
    ],
)
def test_one_change_is_found(
    change: Callable[[Lines], None],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, after = recording(), recording()
    change(after)
    for one, other in ((before, after), (after, before)):
        assert compared(tmp_path, one, other) == 1
    assert compared(tmp_path, before, after) == 1
    assert said in capsys.readouterr().out


def test_requests_are_many_and_of_every_kind() -> None:
    groups = [
        (recipe, request)
        for recipe in record.RECIPES
        for call in record.calls(recipe, record.LENGTHS["native"])
        for request in call
    ]
    assert len(groups) >= 300
    asked = [request.params for _, request in groups]
    for kind in (record.FILTERS, record.EDITS, record.ENDS, record.LOGPROBS):
        for value in kind:
            assert any(value.items() <= params.items() for params in asked), value
    rules = {
        (recipe.speculation["method"], params["rejection_sample_method"])
        for recipe, request in groups
        if recipe.speculation and "rejection_sample_method" in (params := request.params)
    }
    assert {(m, r) for m in ("draft_model", "ngram") for r in record._MIXED} <= rules
    assert {params.get("num_speculative_tokens") for params in asked} >= set(range(7))


def test_requests_are_the_same_each_time() -> None:
    for recipe in record.RECIPES:
        first, again = (record.calls(recipe, (5, 9)) for _ in range(2))
        assert first == again
        assert first[1][0].prompt == first[0][0].prompt  # so that the second call finds its blocks
        for request in first[0] + first[1]:
            SamplingParams(**request.params)
