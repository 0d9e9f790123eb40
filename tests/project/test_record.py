"""The recorder's requests cover what they claim, and its comparison overlooks nothing."""

from __future__ import annotations

import json
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


GONE = object()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("samples", 0, "token_ids", 1), 8, "samples[0].token_ids[1]: 7 → 8"),
        (("samples", 0, "logprobs", 0, 0, 1), NEXT_DOUBLE.hex(), "samples[0].logprobs[0]: "),
        (("prompt_logprobs", 2), None, "prompt_logprobs[2]: "),
        (("samples", 0, "token_ids", 1), GONE, "samples[0].token_ids[1]: 7 → no more"),
        (("samples", 0), GONE, "samples[0]: "),
        (("error",), "RequestError", "error: None → 'RequestError'"),
        (("counts", "num_steps"), 1, "counts.num_steps: 0 → 1"),
        ((), GONE, "only in "),
    ],
)
def test_one_change_is_found(
    place: tuple[Any, ...],
    value: Any,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, after = recording(), recording()
    inner: Any = after
    *path, last = 1, *place
    for key in path:
        inner = inner[key]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    for one, other in ((before, after), (after, before)):
        assert compared(tmp_path, one, other) == 1
    assert compared(tmp_path, before, after) == 1
    assert f"some/0/1: {said}" in capsys.readouterr().out


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
