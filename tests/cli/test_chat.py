"""`foretoken chat`: one message, a list of them, or a conversation."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken import LLM
from foretoken.cli import app as cli
from foretoken.errors import CapacityError
from foretoken.outputs import RequestOutput
from tests.cli.fake_llm import WithLLM
from tests.support.asynchronous import PATIENCE
from tests.support.checkpoints import save_checkpoint

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
SHORT = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos"]
USER = {"role": "user", "content": "abc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("chat"), seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_blocks=64)


class Chat:
    """Runs the command on a model and keeps the prompts that reach it, and its texts."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.prompts: list[str | None] = []
        self.texts: list[str] = []
        self.error: Exception | None = None

    def stream(self, *args: Any, **options: Any) -> Iterator[RequestOutput]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        output = None
        for output in self.llm.stream(*args, **options):
            yield output
        assert output is not None
        self.prompts.append(output.prompt)
        self.texts.append(output.outputs[0].text)

    def __call__(self, *args: str, given: str | None = None) -> Result:
        return CliRunner().invoke(cli.app, ["chat", *args, *SHORT], input=given, obj=WithLLM(self))


@pytest.fixture
def chat(llm: LLM) -> Chat:
    return Chat(llm)


def test_one_message(chat: Chat) -> None:
    result = chat("abc")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == chat.texts[0] + "\n"
    chat("abc", "--system", "Be brief, ä.")
    assert chat.prompts == [
        "<user>abc\n<assistant>",
        "<system>Be brief, ä.\n<user>abc\n<assistant>",
    ]


def test_messages_from_standard_input(chat: Chat) -> None:
    messages = [USER, {"role": "assistant", "content": "de"}, {"role": "user", "content": "f"}]
    result = chat("-", "--json", given=json.dumps(messages))
    assert json.loads(result.stdout)["prompt"] == chat.prompts[0]
    for text in ("two\nlines\n", "[no list"):
        chat("-", given=text)
    assert chat.prompts == [
        "<user>abc\n<assistant>de\n<user>f\n<assistant>",
        "<user>two\nlines\n\n<assistant>",
        "<user>[no list\n<assistant>",
    ]


@pytest.mark.parametrize(
    ("args", "given", "said"),
    [
        (
            ["-"],
            '{"role": "user", "content": "x"}',
            '`message` is \'{"role": "user", "content": "x"}\': must be a JSON list',
        ),
        (["-"], '[{"role": "user"', '`message` is \'[{"role": "user"\': must be a JSON list'),
        (["-"], '[{"role": "user"}]', "`messages[0].content` is None"),
        (["-"], "[]", "`messages` is []: must be at least one message"),
        (["-"], b"\xff", "`message` is b'\\xff': must be UTF-8 text."),
        ([], b"a\n\xff\n", "`message` is b'\\xff\\n': must be UTF-8 text."),
        (["--n", "2"], "a\n", "`n` is 2: must be 1 in a conversation."),
        (["x", "--chat-template", "a/b"], None, "`chat-template` is 'a/b': must be a file"),
        (["x", "--chat-template", "{% if %}"], None, "`chat_template`"),
    ],
)
def test_what_is_refused(chat: Chat, args: list[str], given: Any, said: str) -> None:
    result = chat(*args, given=given)
    assert result.exit_code == 2
    assert f"Error: {said}" in result.stderr


def test_templates(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "ö.jinja").write_text("{{ messages[0].content }}ö", encoding="utf-8")
    chat("abc", "--chat-template", str(tmp_path / "ö.jinja"))
    chat("abc", "--chat-template", "{{ messages[0].content }}!")
    chat("abc", "--chat-template", "default")
    assert chat.prompts == ["abcö", "abc!", "<user>abc\n<assistant>"]


def test_a_model_without_a_template_names_the_remedy(tmp_path: Path) -> None:
    with LLM(str(save_checkpoint(tmp_path)), num_blocks=64) as llm:
        result = Chat(llm)("abc")
    assert result.exit_code == 2
    assert "has no chat template. Pass --chat-template FILE, or use" in result.stderr


def test_a_conversation_remembers_and_forgets(chat: Chat) -> None:
    result = chat("--system", "S", given="abc\n\nde/f g\n/reset\n/other\nabc\n/exit\nabc\n")
    assert result.exit_code == 0
    first, second, third = chat.texts
    assert result.stdout == f"{first}\n{second}\n{third}\n"
    start = "<system>S\n<user>abc\n<assistant>"
    assert chat.prompts == [start, f"{start}{first}\n<user>de/f g\n<assistant>", start]
    assert "The conversation begins again." in result.stderr
    assert "There is no command /other" in result.stderr


def test_a_scripted_conversation_ends_with_an_answer_that_failed(chat: Chat) -> None:
    chat.error = CapacityError("prompt", "9 tokens", "shorter")
    result = chat(given="abc\nde\n")
    assert (result.exit_code, chat.prompts) == (2, [])


# A step waits for a Ctrl-C, so that the test is sure to send it while an answer is made.
SCRIPT = """
import fcntl, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from foretoken.cli import main
from foretoken.cli.actions import Actions
from foretoken.llm import LLM

class Slow(Actions):
    count = 0

    def load(self, model, speculative_config, **options):
        llm = LLM(model, num_blocks=64)
        llm.engine.on_step = self.wait
        return llm

    def wait(self, trace):
        self.count += 1
        if self.count == 3:
            print("[waiting]", flush=True)
            while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                time.sleep(0.01)  # until it was noticed

sys.argv[0] = "foretoken"
main(Slow())
"""


class Terminal:
    def __init__(self, *args: str) -> None:
        self.fd, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *args],
            stdin=there, stdout=there, stderr=there, start_new_session=True,
        )  # fmt: skip
        os.close(there)
        self.seen = ""

    def expect(self, text: str, seconds: float = PATIENCE) -> str:
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {text!r}: {self.seen!r}") from None
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C until `text` is shown: the line editor may take one only at the next key."""
        for _ in range(12):
            self.send("\x03")
            try:
                self.expect(text, 5)
            except AssertionError:
                continue
            return
        raise AssertionError(f"12 times Ctrl-C, and no {text!r}")


@pytest.mark.usefixtures("forked")
def test_a_conversation_on_a_terminal(folder: Path) -> None:
    """Ctrl-C ends the answer and the line, Ctrl-D the conversation."""
    terminal = Terminal("chat", "--model", str(folder), *SHORT, "--max-tokens", "50")
    try:
        terminal.expect("Ctrl-D ends it")
        terminal.expect("> ")
        terminal.send("abc\n")
        terminal.expect("[waiting]")
        terminal.send("\x03")
        terminal.expect("Interrupted: 3 tokens were generated")
        terminal.expect("> ")
        terminal.send("dropped")
        terminal.expect("dropped")
        terminal.interrupt("> ")
        terminal.send("/reset\n")
        terminal.expect("The conversation begins again.")
        terminal.expect("> ")
        terminal.send("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
