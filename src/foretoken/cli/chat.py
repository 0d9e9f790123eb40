"""`foretoken chat`: an answer to given messages, or a conversation message by message."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from foretoken.cli.output import complete, exit_code
from foretoken.cli.terminal import Note, as_utf8, read_input, read_line, say
from foretoken.config.checks import template_text
from foretoken.errors import RequestError
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.models.chat import ChatTemplate

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer."


def read_messages(message: str | None, system: str | None) -> list[Any]:
    """The messages with which a conversation begins: an optional system message, then `message`.

    Args:
        message: a text; `-`: standard input has a text or a JSON list of messages; None: the user
            will type messages later.

    Raises:
        RequestError: a text is not UTF-8, standard input is closed, or messages are no JSON list.
    """
    messages: list[Any] = []
    if system is not None:
        messages.append({"role": "system", "content": as_utf8("system", system)})
    if message is None:
        return messages
    text = read_input("message") if message == "-" else as_utf8("message", message)
    if message != "-" or not re.match(r"\s*(\[\s*[{\]]|\{\s*\"role\")", text):
        return [*messages, {"role": "user", "content": text}]
    bound = "a JSON list of messages, since the text begins like JSON"
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError("message", text, bound, f"The parser says: {error}.") from None
    if not isinstance(parsed, list):
        raise RequestError("message", text, bound, "Put brackets around it.")
    return [*messages, *parsed]


def read_template(template: str | None) -> str | None:
    """The text of a template's file; Jinja text and names of templates are returned unchanged."""
    if template is None:
        return None
    if "{{" in template or "{%" in template:
        return as_utf8("chat-template", template)
    return template_text("chat-template", template)


def find_template(llm: LLM, source: str | None) -> ChatTemplate:
    """The chat template: `source`, which is Jinja text or a name, or the tokenizer's default.

    Raises:
        RequestError: the tokenizer has no template (of this name), or the template is not valid.
    """
    from foretoken.models.chat import ChatTemplate

    try:
        return ChatTemplate(llm.tokenizer, chat_template=source, add_generation_prompt=True)
    except RequestError as error:
        if error.field == "chat_template" and source is None:
            remedy = "Pass --chat-template FILE, or use `foretoken generate`."
            raise RequestError("chat-template", None, error.bound, remedy) from None
        raise


class Conversation:
    """A conversation typed on a terminal, or read from standard input, one message per line.

    Args:
        messages: the first messages, also after each /reset.
        json_output: print a JSON object per answer.
    """

    def __init__(self, messages: list[Any], params: SamplingParams, json_output: bool) -> None:
        if params.n != 1:
            raise RequestError("n", params.n, "1 in a conversation", "Give one message instead.")
        if sys.stdin is None:
            raise RequestError("message", None, "given: standard input is closed")
        self._params, self._json = params, json_output
        self._opening, self._messages = messages, list(messages)
        self._is_typed = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self, llm: LLM, template: ChatTemplate, note: Note) -> None:
        if self._is_typed:
            say(_HELP, style="dim")
        while (line := self._read()) is not None:
            command = line.strip()
            if command == "/exit":
                return
            if command == "/reset":
                self._messages = list(self._opening)
                say("The conversation begins again.", style="dim")
            elif command.startswith("/") and " " not in command:
                say(f"There is no command {command}: {_HELP}")
            elif command:
                self._answer(llm, template, line.rstrip("\n"), note)

    def _read(self) -> str | None:
        """The next message; None at the end of input."""
        if not self._is_typed:
            return read_line("message") or None
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` editing and a history)
        while True:
            try:
                return input("> ")
            except EOFError:
                say("")
                return None
            except KeyboardInterrupt:  # as in a shell, drop the line
                say("")
            except UnicodeDecodeError:
                say("Error: this line is no UTF-8 text.", style="bold red")

    def _answer(self, llm: LLM, template: ChatTemplate, text: str, note: Note) -> None:
        """Print and remember the answer to a message; after a failure forget the message."""
        from foretoken.models.chat import ChatPrompt

        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            output = complete(llm, ChatPrompt(template, messages), self._params, self._json, note)
        except KeyboardInterrupt:  # between two steps of the engine
            say("\nInterrupted: this message is forgotten.", interrupted=True)
            return
        except RequestError as error:
            if not self._is_typed:
                raise
            say(f"Error: {error}", style="bold red")
            return
        if output.interrupted_by == "SIGTERM":
            raise SystemExit(exit_code(output))
        self._messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
