"""`foretoken bench`: its files and tables, what a signal leaves, one message for bad input."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli import app as cli
from foretoken.cli.actions import Actions
from foretoken.lab.results import read
from tests.project.source import ROOT

SMALL = ["--input-len", "12", "--output-len", "6", "--num-requests", "2", "--bandwidth", "40"]
SMALL += ["--threads", "1"]


pytestmark = pytest.mark.usefixtures("known_memory")


def bench(*args: Any, actions: Actions | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *SMALL, *map(str, args)], obj=actions)


class Interrupted(Actions):
    """Sends a signal when the same line about the progress is noted for the `times`-th time."""

    def __init__(self, number: signal.Signals, line: str, times: int) -> None:
        self.number, self.line, self.left = number, line, times

    def bench(self, reporter: Any, *given: Any) -> None:
        def note(line: str) -> None:
            reporter.note(line)
            self.left -= line == self.line
            if line == self.line and not self.left:
                signal.raise_signal(self.number)

        super().bench(replace(reporter, note=note), *given)


def test_tables_results_and_figures(target: Path, draft: Path, tmp_path: Path) -> None:
    path, figure, report = (tmp_path / f"my-run.{kind}" for kind in ("json", "svg", "html"))
    speculation = json.dumps({"model": str(draft), "num_speculative_tokens": 3})
    result = bench(
        "--model", target, "--speculative-config", speculation, "--sweep", "k=2,3",
        "--concurrency", "1,2", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.9",
        "--repeats", "1", "--output", path, "--output", figure, "--output", report,
    )  # fmt: skip
    assert (result.exit_code, result.exception) == (0, None)
    found = read(path)
    assert found.name == "my_run"
    cases = ["plain", "draft_model, K=2", "draft_model, K=3"]
    assert [row.case for row in found.rows] == [
        f"concurrency {number}, {case}" for number in (1, 2) for case in cases
    ]
    shapes = found.shapes
    assert shapes["model"] == target.name
    assert shapes["speculation"]["model"] == draft.name
    assert shapes["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 9}
    assert (shapes["engine"]["threads"], shapes["engine"]["max_num_seqs"]) == (1, 2)
    for row in found.rows:
        assert row.case in result.stdout
        assert row.case in report.read_text()
    assert "Speed-up over plain decoding" in result.stdout
    assert "memory that reads 40.0 GB/s (given)" in result.stdout
    assert "my-run.svg" in result.stderr
    assert list(ElementTree.parse(figure).getroot().iter("{http://www.w3.org/2000/svg}rect"))


def test_a_shape_alone_is_enough(tmp_path: Path) -> None:
    """The shape of Llama-3.1-8B, made small."""
    shape = json.loads((ROOT / "benchmarks/shapes/llama-3.1-8b/config.json").read_text())
    shape |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 16}))
    result = bench("--model", tmp_path, "--load-format", "dummy", "--request-rate", "50")
    assert (result.exit_code, result.exception) == (0, None)
    assert "50 requests/s, plain" in result.stdout
    assert "Speed-up" not in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_was_measured(
    target: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """After three runs of two requests, one of which warmed up, and before the next."""
    path, figure = tmp_path / "x.json", tmp_path / "x.svg"
    given = ("--model", target, "--concurrency", "1,2", "--output", path, "--output", figure)
    result = bench(*given, actions=Interrupted(number, "6 of 16 requests were done.", 2))
    assert result.exit_code == 128 + number
    found = read(path)
    (row,) = found.rows
    assert row.values["wall_s"].repeats == 2  # type: ignore[union-attr]
    assert "after 2 measured runs" in found.notes[-1]
    assert "concurrency 1, plain" in result.stdout
    # A chart or two: tokens that a busy machine hands over all at once have no time between them.
    assert int(ElementTree.parse(figure).getroot().get("height", "")) >= 400
    said = "Interrupted: 6 of 16 requests were done." in result.stderr
    assert said == (number is signal.SIGINT)


def test_before_anything_was_measured_nothing_is_written(target: Path, tmp_path: Path) -> None:
    """The line is noted at the start, before the engine is loaded, and before the first run."""
    given = ("--model", target, "--concurrency", "1", "--output", tmp_path / "x.json")
    actions = Interrupted(signal.SIGINT, "0 of 8 requests were done.", 3)
    result = bench(*given, actions=actions)
    assert not actions.left
    assert (result.exit_code, result.stdout) == (130, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--concurrency", "a"], "`concurrency` is 'a': must be integers >= 1"),
        (["--repeats", "0"], "`repeats` is 0"),
        (["--prompts", "mine"], "`prompts` is 'mine': must be `heldout`, `random`, or a file"),
        (["--output", "x.png"], "`output` is 'x.png': must be a file that ends in .json"),
        (["--output", "/no/such/x.json"], "`output` is '/no/such/x.json': must be a file in"),
        (["--sweep", "k=3"], "`sweep` is 'k=...': must be left out where nothing is drafted."),
        (["--temperature", "-1"], "`temperature` is -1.0"),
        (["--max-num-seqs", "4"], "`max_num_seqs` is 4: must be at least 16"),
        (["--input-len", "251"], "`prompts` is None: must be requests that fit"),
        (["--no-speculation", "--speculative-config", "{}"], "`speculative-config`"),
        (["--device", "tpu"], "`device` is 'tpu'"),
    ],
)
def test_bad_input_is_one_message(target: Path, args: list[str], said: str) -> None:
    result = bench("--model", target, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {said}" in result.stderr


def test_a_server_that_is_not_there() -> None:
    given = ["bench", "--url", "http://127.0.0.1:9", "--api-key", "secret"]
    result = CliRunner().invoke(cli.app, given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "`url` is 'http://127.0.0.1:9': must be an OpenAI-compatible server" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--dtype", "float32"], "`dtype` is 'float32'"),
        (["--no-speculation"], "`speculative_config"),
    ],
)
def test_options_of_an_engine_are_refused_with_a_server(args: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--url", "http://127.0.0.1:9", *args])
    assert result.exit_code == 2
    assert f"Error: {said}" in result.stderr
    assert "left out with --url" in result.stderr


def test_options_of_length_and_end_are_not_offered() -> None:
    for name in ("--max-tokens", "--n", "--stop", "--ignore-eos"):
        result = bench(name, "3")
        assert result.exit_code == 2
        assert "No such option" in result.stderr


def test_every_value_is_documented() -> None:
    from foretoken.lab.bench.figures import PERCENTILES, POSITIONS, UNITS

    document = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    ends = tuple(f"_p{p}" for p in PERCENTILES)
    names = [name for name in UNITS if not name.endswith(ends)] + [*ends]
    names += [f"{name}1" for name in POSITIONS]
    assert [name for name in names if f"`{name}`" not in document] == []
