"""The results format refuses what would make a figure meaningless."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.results import (
    Results,
    Row,
    Spread,
    as_text,
    collect,
    commit,
    read,
    validate,
    write,
)
from tests.project.source import ROOT


@functools.cache
def sample() -> Any:
    """Once: to read what the machine is takes half a second."""
    rows = [
        Row("plain", {"k": 0}, {"speed": Spread.of([3.0, 1.0, 2.0], "tok/s"), "tokens": 64}),
        Row("draft", {"k": 4}, {"speed": Spread.of([5.0], "tok/s"), "tokens": 64}),
    ]
    return collect("example", "python -m benchmarks.example", {"batch": 1}, rows, ["a note"])


def test_round_trip(tmp_path: Path) -> None:
    results = sample()
    path = write(results, tmp_path)
    assert path.name == "example.json"
    assert read(path) == results
    assert read(path).rows[1].labels == {"k": 4}


def test_a_row_is_a_line(tmp_path: Path) -> None:
    lines = write(sample(), tmp_path).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line.strip().rstrip(",")) for line in lines if '"case"' in line]
    assert [row["case"] for row in rows] == ["plain", "draft"]
    assert '  "a note"' in lines
    braces, ends_of_lists, notes = 2, 2, 1
    assert len(lines) == len(Results.__slots__) + len(rows) + notes + braces + ends_of_lists


def test_spread() -> None:
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0], "ms")
    assert (spread.min, spread.q1, spread.median, spread.q3, spread.max) == (1, 2, 3, 4, 5)
    assert spread.repeats == 5
    with pytest.raises(ConfigError, match="measured"):
        Spread.of([], "ms")


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("schema", 0, "schema"),
        ("date", "yesterday", "date"),
        ("commit", "main", "commit"),
        ("command", "", "command"),
        ("hardware", {"cpu": "x"}, "hardware"),
        ("versions", {}, "versions"),
        ("shapes", {}, "shapes"),
        ("rows", [], "rows"),
        ("rows", [{"case": "a", "labels": {}, "values": {"x": None}}], "a.x"),
        ("rows", [{"case": "a", "labels": {}, "values": {}}] * 2, "rows"),
    ],
)
def test_what_is_missing_is_refused(tmp_path: Path, key: str, value: Any, field: str) -> None:
    data = json.loads(write(sample(), tmp_path).read_text())
    data[key] = value
    with pytest.raises(ConfigError) as caught:
        validate(data)
    assert caught.value.field == field


def test_a_spread_out_of_order_is_refused(tmp_path: Path) -> None:
    data = json.loads(write(sample(), tmp_path).read_text())
    data["rows"][0]["values"]["speed"]["median"] = 99.0
    with pytest.raises(ConfigError, match="median"):
        validate(data)


def test_a_copy_in_another_repository_has_no_commit(tmp_path: Path) -> None:
    own, _ = commit()
    assert re.fullmatch("[0-9a-f]{40}|unknown", own)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert commit(tmp_path / "results.py") == ("unknown", False)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=str)
def test_recorded_results_are_valid_and_as_written_today(path: Path) -> None:
    results = read(path)
    text = path.read_text(encoding="utf-8")
    assert text == as_text(json.loads(text))
    assert results.name == path.stem
    assert results.commit != "unknown"
