"""Tables in the documents are what the results files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import TABLES, documents, regenerate
from tests.project.source import ROOT


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_tables_are_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert regenerate(text) == text, "run `make tables`"


def test_every_table_is_used() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in documents())
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in texts] == []


def test_a_changed_figure_is_noticed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("<!-- table: summary -->")
    digit = next(i for i in range(text.index("---:", start), len(text)) if text[i].isdigit())
    broken = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
    assert regenerate(broken) == text
