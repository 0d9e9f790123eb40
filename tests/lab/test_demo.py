"""The demo's parts appear in order, plain where colour is not wanted, and every figure adds up."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foretoken import LLM
from foretoken.cli import app
from foretoken.cli.actions import Actions
from foretoken.lab.audit.engine import EngineAudit
from foretoken.lab.demo import STYLES, Demo
from foretoken.models.locate import PACKAGED
from foretoken.outputs import RequestMetrics
from tests.cli.fake_llm import WithLLM
from tests.support.kernels import needs_kernels


class Few(EngineAudit):
    batch = 4


class Short(Demo):
    rounds, audit = 1, Few


def show(pair: LLM, console: Console) -> tuple[str, list[str]]:
    notes: list[str] = []
    Short(pair, console, notes.append).run(prompts=2, max_tokens=16, samples=32)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), notes


def test_without_a_terminal(pair: LLM) -> None:
    text, notes = show(pair, Console(file=io.StringIO(), width=100, highlight=False))
    assert "\x1b" not in text
    headings = ["1 of 2:", "2 of 2:", "Acceptance by position", "Speed, batch 1", "lossless?"]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    for kinds in re.findall(r"16 tokens in \d+ passes of the target: (.*)", text):
        assert sum(int(n) for n in re.findall(r"\d+", kinds)) == 16
    said = " ".join(text.split())
    assert "Temperature 0: 64 of 64 tokens are the target's likeliest" in said
    assert re.search(r"not refuted: no difference in \d+ draws: TV <= [\d.]+ with 99%", said)
    assert notes[0].startswith("0 of 2 prompts")


def test_colours_tell_where_tokens_come_from(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=100, force_terminal=True, highlight=False)
    text, _ = show(pair, console)
    assert "\x1b[32m" in text  # accepted: green
    assert "\x1b[4;33m" in text  # resampled: yellow, underlined
    assert "\x1b[1;36m" in text  # bonus: cyan, bold


def test_styles_differ_without_colour() -> None:
    marks = [style.split()[1:] for kind, style in STYLES.items() if kind != "accepted"]
    assert len({tuple(mark) for mark in marks}) == len(marks)


@pytest.mark.skipif(find_spec(PACKAGED["smollm2-135m"].module) is None, reason="needs its package")
@needs_kernels
def test_a_model_of_chats_answers_questions() -> None:
    """It uses the model's own head, and completes no code."""

    class Quick(Actions):
        def demo(self, llm: LLM, note: Callable[[str], None]) -> Demo:
            return Short(llm, Console(width=100, highlight=False), note)

    args = ["demo", "--model", "smollm2-135m", "--prompts", "2", "--max-tokens", "16"]
    result = CliRunner().invoke(app.app, [*args, "--samples", "32"], obj=Quick())
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert (
        "Foretoken answers questions by smollm2-135m. A head on the model's hidden states" in said
    )
    assert re.findall(r"(\d) of 2: (\w+)-\d+, temperature", said) == [("1", "chat"), ("2", "code")]
    for kinds in re.findall(r"16 tokens in \d+ passes of the target: (.*)", result.output):
        assert sum(int(n) for n in re.findall(r"\d+", kinds)) == 16
    assert re.search(r"Temperature 0: \d+ of 64 tokens are the target's .* 0 bugs", said)
    assert re.search(r"not refuted: no difference in \d+ draws", said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_demo(pair: LLM, number: signal.Signals) -> None:
    class Interrupted(Demo):
        def show_acceptance(self, metrics: RequestMetrics) -> None:
            signal.raise_signal(number)

    class Signalled(WithLLM):
        def demo(self, llm: LLM, note: Callable[[str], None]) -> Demo:
            return Interrupted(llm, Console(), note)

    before = signal.getsignal(signal.SIGTERM)
    args = ["demo", "--prompts", "1", "--max-tokens", "4"]
    result = CliRunner().invoke(app.app, args, obj=Signalled(pair))
    assert result.exit_code == 128 + number
    said = "Interrupted: the prompts were completed; speed was not measured." in result.stderr
    assert said == (number is signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
