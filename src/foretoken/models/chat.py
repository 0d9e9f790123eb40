"""Conversations as prompts: the chat template of a tokenizer, and what it refuses.

Belongs here: checking messages, rendering them, token ids of the result. Does not: requests.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.errors import RequestError
from foretoken.models.checkpoint import first_line

__all__ = ["ChatPrompt", "ChatTemplate", "split_conversations"]

_FIELDS = ("role", "content")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """The template that a call of `LLM.chat` uses: the tokenizer's own, or one given.

    Args:
        tokenizer: of the checkpoint; None if it has none.
        chat_template: Jinja text, or the name of one of the tokenizer's templates; None: its own.
        add_generation_prompt: end with what opens the assistant's answer.

    Raises:
        RequestError: no tokenizer, no template, or a template that is not one.
    """

    def __init__(
        self, tokenizer: Any | None, chat_template: str | None, add_generation_prompt: bool
    ) -> None:
        if tokenizer is None:
            raise RequestError(
                "messages",
                "a conversation",
                "left out: this checkpoint has no tokenizer",
                "Use `generate` with token ids, or add tokenizer files to the checkpoint.",
            )
        if not isinstance(add_generation_prompt, bool):
            raise RequestError("add_generation_prompt", add_generation_prompt, "true or false")
        self._tokenizer = tokenizer
        self._text = _find_template(tokenizer, chat_template)
        self._add_generation_prompt = add_generation_prompt

    def render(self, messages: Any) -> tuple[str, list[int]]:
        """The text of a conversation and its token ids.

        The template writes the special tokens, the first one included, so encoding adds none.

        Raises:
            RequestError: `messages` is not a conversation, or the template refuses it.
        """
        from jinja2 import TemplateSyntaxError

        conversation = self._check(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=self._text,
                add_generation_prompt=self._add_generation_prompt,
                tokenize=False,
            )
        except TemplateSyntaxError as error:
            raise RequestError(
                "chat_template",
                self._text,
                f"a Jinja template; line {error.lineno}: {first_line(error)}",
            ) from error
        except Exception as error:  # whatever the template's own code raises
            raise RequestError(
                "messages", messages, f"what the chat template takes; it says: {first_line(error)}"
            ) from error
        return text, list(self._tokenizer.encode(text, add_special_tokens=False))

    def _check(self, messages: Any) -> list[dict[str, str]]:
        if not _is_list(messages):
            raise RequestError("messages", messages, "a list of dicts with `role` and `content`")
        if not messages:
            raise RequestError("messages", messages, "at least one message")
        return [self._check_message(i, message) for i, message in enumerate(messages)]

    def _check_message(self, index: int, message: Any) -> dict[str, str]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, message, "a dict with `role` and `content`")
        for key in message:
            if key not in _FIELDS:
                near = difflib.get_close_matches(str(key), _FIELDS, n=1)
                remedy = f"Did you mean `{near[0]}`?" if near else ""
                raise RequestError(f"{where}.{key}", message[key], "left out", remedy)
        for field in _FIELDS:
            if not isinstance(message.get(field), str):
                raise RequestError(f"{where}.{field}", message.get(field), "a text")
        role = message["role"]
        # Most templates drop a message of a role that they do not know, and say nothing.
        if role not in _ROLES and not any(f"{q}{role}{q}" in self._text for q in "'\""):
            raise RequestError(
                f"{where}.role", role, f"one of {', '.join(_ROLES)}, or one the template names"
            )
        return {field: message[field] for field in _FIELDS}


class ChatPrompt:
    """One conversation that waits to be rendered, so that a bad one can fail alone."""

    def __init__(self, template: ChatTemplate, messages: Any) -> None:
        self._template, self._messages = template, messages

    def encode(self) -> tuple[str, list[int]]:
        """Text and token ids; see `ChatTemplate.render`."""
        return self._template.render(self._messages)


def split_conversations(messages: Any) -> tuple[bool, list[Any]]:
    """Whether it is one conversation, and the conversations as a list."""
    if not _is_list(messages):
        raise RequestError(
            "messages", messages, "a list of dicts with `role` and `content`, or a list of such"
        )
    if messages and _is_list(messages[0]):
        return False, list(messages)
    return True, [messages]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _find_template(tokenizer: Any, given: Any) -> str:
    """The Jinja text to use."""
    own = tokenizer.chat_template
    named = own if isinstance(own, dict) else {"default": own} if own else {}
    if given is None:
        if "default" in named:
            return str(named["default"])
        known = f" without a name; it has {', '.join(sorted(named))}" if named else ""
        raise RequestError(
            "chat_template",
            None,
            f"given: this checkpoint's tokenizer has no chat template{known}",
            "Use `generate`, or a checkpoint with a `chat_template.jinja`.",
        )
    if isinstance(given, str) and given in named:
        return str(named[given])
    # Text without any of Jinja's marks would be the prompt itself, whatever the messages say.
    if not isinstance(given, str) or not ("{{" in given or "{%" in given):
        names = f", or one of {', '.join(sorted(named))}" if named else ""
        raise RequestError("chat_template", given, f"the text of a Jinja template{names}")
    return given
