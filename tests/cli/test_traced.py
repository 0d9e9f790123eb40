"""`--trace`: each token's text has its own colour, and the table shows the trace."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.cli import app as cli
from foretoken.cli.output import Painter
from foretoken.outputs import RequestOutput
from tests.cli.fake_llm import WithLLM

STYLE_OF = {"green": "accepted", "bold red": "resampled", "cyan": "bonus", "": "plain"}


@pytest.fixture(scope="module")
def llm(target: Path, draft: Path) -> LLM:
    return LLM(str(target), {"model": str(draft), "num_speculative_tokens": 3}, num_blocks=64)


def streamed(llm: LLM, **given: Any) -> list[RequestOutput]:
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40, **given}
    return [*llm.stream("import os", SamplingParams(trace=True, **asked))]


@pytest.mark.parametrize("cut", [False, True])
def test_pieces_are_the_text_and_colours_the_origins(llm: LLM, cut: bool) -> None:
    """A stop string cuts the text in the midst of a token: the rest is not painted."""
    whole = streamed(llm)[-1].outputs[0].text
    stop = {"stop": [whole[-4:-2]]} if cut else {}
    outputs = streamed(llm, **stop)
    painter, shown, length, styles = Painter(llm.tokenizer, SamplingParams()), "", 0, []
    for output in outputs:
        (sample,) = output.outputs
        painted = painter.paint(output.prompt_token_ids, sample, length)
        shown, length = shown + painted.plain, len(sample.text)
        styles += [(painted.plain[s.start : s.end], STYLE_OF[str(s.style)]) for s in painted.spans]
    (sample,) = outputs[-1].outputs
    assert shown == sample.text
    assert len({style for _, style in styles}) > 1
    assert sample.trace is not None
    alone = [(t.decoded_token, t.origin) for t in sample.trace if t.origin != "plain"]
    whole_tokens = [pair for pair in alone if "\ufffd" not in str(pair[0])]
    painted_tokens = [pair for pair in styles if pair in whole_tokens]
    assert len(painted_tokens) > 5
    assert (
        painted_tokens
        == [pair for pair in whole_tokens if pair in painted_tokens][: len(painted_tokens)]
    )


def test_the_table_is_the_trace(llm: LLM) -> None:
    command = ["generate", "import os", "--seed", "5", "--temperature", "0.9", "--max-tokens", "40"]
    plain = CliRunner().invoke(cli.app, command, obj=WithLLM(llm)).stdout
    traced = CliRunner().invoke(cli.app, [*command, "--trace"], obj=WithLLM(llm)).stdout
    assert traced.startswith(plain), "without a terminal there are no colours"
    heading, names, *lines = traced.removeprefix(plain).strip().splitlines()
    assert heading == "trace of sample 1 · rule standard · drafts by draft_model"
    assert names.split()[:4] == ["round", "at", "token", "origin"]
    trace = streamed(llm)[-1].outputs[0].trace or []
    records = [one for token in trace for one in (token, *token.dropped)]
    for line, record in zip(lines, records, strict=True):
        assert repr(record.decoded_token) in line
        place, number = re.match(r" *(\d+) +(\d+) ", line).groups()  # type: ignore[union-attr]
        assert (int(place), int(number)) == (record.round, record.position)
        assert f" {record.origin} " in line
        assert line.endswith(record.reason or "")
        shown = [f"{x:.3g}" for x in (record.p, record.q, record.u, record.threshold) if x]
        assert all(value in line for value in shown)


def test_a_terminal_is_shown_colours(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    (sample,) = streamed(llm)[-1].outputs
    out = Terminal()
    painted = Painter(llm.tokenizer, SamplingParams()).paint([], sample, 0)
    Console(file=out, soft_wrap=True).print(painted, end="")
    assert "\x1b[32m" in out.getvalue()
