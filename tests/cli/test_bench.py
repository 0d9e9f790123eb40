"""`foretoken bench`: its files and tables, what a signal leaves, one message for bad input."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli import app as cli
from foretoken.lab.bench import run as bench_run
from foretoken.lab.results import read
from tests.project.source import ROOT

SMALL = ["--input-len", "12", "--output-len", "6", "--bandwidth", "40", "--threads", "1"]


def bench(*args: Any) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *SMALL, *map(str, args)])


@pytest.fixture
def speculation(draft: Path) -> str:
    return json.dumps({"model": str(draft), "num_speculative_tokens": 3})


def test_tables_results_and_figure(
    target: Path, draft: Path, speculation: str, tmp_path: Path
) -> None:
    path, figure = tmp_path / "my-run.json", tmp_path / "run.svg"
    result = bench(
        "--model", target, "--speculative-config", speculation, "--compare",
        "--batch-size", "1,2", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.9",
        "--output", path, "--plot", figure,
    )  # fmt: skip
    assert (result.exit_code, result.exception) == (0, None)
    found = read(path)
    assert found.name == "my_run"
    assert [row.case for row in found.rows] == [
        "batch 1, plain",
        "batch 1, draft_model, K=3",
        "batch 2, plain",
        "batch 2, draft_model, K=3",
    ]
    shapes = found.shapes
    assert shapes["model"] == target.name
    assert shapes["speculation"]["model"] == draft.name
    assert shapes["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 9}
    assert (shapes["engine"]["threads"], shapes["engine"]["max_num_seqs"]) == (1, 2)
    for row in found.rows:
        assert row.case in result.stdout
    assert "Speed-up over plain decoding" in result.stdout
    assert "memory that reads 40.0 GB/s (given)" in result.stdout
    assert "run.svg" in result.stderr
    assert list(ElementTree.parse(figure).getroot().iter("{http://www.w3.org/2000/svg}rect"))


def test_a_shape_alone_is_enough(tmp_path: Path) -> None:
    """That of Llama-3.1-8B, made small."""
    shape = json.loads((ROOT / "benchmarks/shapes/llama-3.1-8b/config.json").read_text())
    shape |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 16}))
    result = bench("--model", tmp_path, "--load-format", "dummy", "--batch-size", "2")
    assert (result.exit_code, result.exception) == (0, None)
    assert "batch 2, plain" in result.stdout
    assert "Speed-up" not in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_was_measured(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    path, figure, calls = tmp_path / "x.json", tmp_path / "x.svg", 0
    run_batch = bench_run.run_batch

    def counted(llm: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # one round warms up
            run = llm.engine.runner.run
            monkeypatch.setattr(llm.engine.runner, "run", lambda step: interrupted(run, step))
        return run_batch(llm, *args)

    def interrupted(run: Any, step: Any) -> Any:
        signal.raise_signal(number)
        return run(step)

    monkeypatch.setattr(bench_run, "run_batch", counted)
    result = bench("--model", target, "--batch-size", "1,2", "--output", path, "--plot", figure)
    assert result.exit_code == 128 + number
    found = read(path)
    (row,) = found.rows
    assert row.values["wall_s"].repeats == 2  # type: ignore[union-attr]
    assert "after 2 measured runs" in found.notes[-1]
    assert "batch 1, plain" in result.stdout
    assert ElementTree.parse(figure).getroot().get("height") == "800"
    said = "Interrupted: 3 of 8 runs were done." in result.stderr
    assert said == (number is signal.SIGINT)


def test_before_anything_was_measured_nothing_is_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "run_batch", lambda *args: signal.raise_signal(signal.SIGINT))
    result = bench("--model", target, "--batch-size", "1", "--output", tmp_path / "x.json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--batch-size", "a"], "`batch_size` is 'a': must be integers >= 1"),
        (["--repeats", "0"], "`repeats` is 0"),
        (["--prompts", "mine"], "`prompts` is 'mine': must be one of random, heldout."),
        (["--plot", "x.png"], "`plot` is 'x.png': must be a file that ends in .svg."),
        (["--output", "/no/such/x.json"], "`output` is '/no/such/x.json': must be a file in"),
        (["--compare"], "`compare` is True: must be left out without speculation."),
        (["--temperature", "-1"], "`temperature` is -1.0"),
        (["--max-num-seqs", "4"], "`max_num_seqs` is 4: must be at least 64"),
        (["--input-len", "251"], "`input_len + output_len` is 257: must be at most 256"),
        (["--no-speculation", "--speculative-config", "{}"], "`speculative-config`"),
        (["--device", "tpu"], "`device` is 'tpu'"),
    ],
)
def test_bad_input_is_one_message(target: Path, args: list[str], said: str) -> None:
    result = bench("--model", target, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {said}" in result.stderr


def test_options_of_length_and_end_are_not_offered() -> None:
    for name in ("--max-tokens", "--n", "--stop", "--ignore-eos"):
        result = bench(name, "3")
        assert result.exit_code == 2
        assert "No such option" in result.stderr


def test_every_value_is_documented() -> None:
    from foretoken.lab.bench.figures import UNITS

    document = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    part = document.partition("## `foretoken bench`")[2].partition("## `--json`")[0]
    assert [name for name in UNITS if f"`{name}`" not in part] == []
