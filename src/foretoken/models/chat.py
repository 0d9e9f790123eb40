"""Conversations as prompts: check messages, render them by a chat template, encode the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal, TypedDict, Unpack

from foretoken.errors import RequestError, check_known_keys
from foretoken.models.checkpoint import first_line
from foretoken.sampling.params import check_text

_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal")
# Fields of earlier answers that clients send back; templates do not use them.
_INERT = ("id", "type", "status", "phase", "annotations", "parsed", "cache_control",
          "provider_specific_fields")  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES_WITHOUT_TEXT = ("assistant", "tool")  # messages of these roles need no text
# Types of a message's parts that are text, with the field that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# `chat_template_kwargs` may not use these names, nor those of arguments of `apply_chat_template`,
# except for the arguments that are passed to the template.
_RESERVED_NAMES = {"self", "conversations", "messages"}
_TEMPLATE_ARGUMENTS = {"documents", "kwargs"}
_CONTENT_FORMATS = ("auto", "string", "openai")
# A template that iterates over a message's content reads lists of parts. Other templates read text.
_ITERATES_OVER_CONTENT = re.compile(r"""\bfor\s+\w+\s+in\s+\w+(\.content\b|\[['"]content['"]\])""")


class ChatOptions(TypedDict, total=False):
    """How a conversation is rendered.

    Attributes:
        chat_template: Jinja text, or the name of one of the tokenizer's templates; None: the
            tokenizer's default template.
        chat_template_content_format: how the template gets the content of messages. `string`: as
            one text, parts joined by line ends; `openai`: as a list of parts; `auto` (the default):
            in the form that the template reads.
        add_generation_prompt: end the prompt with the start of an assistant's answer (the default).
        continue_final_message: leave the last message open, so that the answer continues it; only
            with add_generation_prompt=False.
        add_special_tokens: add the tokens with which the tokenizer begins a text. False by default,
            because templates write these tokens.
        tools: descriptions of functions, as JSON schemas, for templates that show them.
        chat_template_kwargs: values of further variables of the template, which may ignore them.
    """

    chat_template: str | None
    chat_template_content_format: Literal["auto", "string", "openai"]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


CHAT_OPTIONS = tuple(ChatOptions.__annotations__)


class ChatTemplate:
    """The template of a call of `chat`, with all arguments of the call except the messages.

    Args:
        tokenizer: of the checkpoint; None if the checkpoint has no tokenizer.
        options: as in `ChatOptions`.

    Raises:
        RequestError: there is no tokenizer or no template; the template or an option is not valid;
            or the template does not use `tools`.
    """

    def __init__(self, tokenizer: Any | None, **options: Unpack[ChatOptions]) -> None:
        if tokenizer is None:
            remedy = "Use `generate` with token ids, or add tokenizer files to the checkpoint."
            bound = "set, to write messages as tokens: this checkpoint has no tokenizer"
            raise RequestError("tokenizer", None, bound, remedy)
        flags = {
            "add_generation_prompt": options.get("add_generation_prompt", True),
            "continue_final_message": options.get("continue_final_message", False),
        }
        self._adds_special = options.get("add_special_tokens", False)
        for name, value in {**flags, "add_special_tokens": self._adds_special}.items():
            if not isinstance(value, bool):
                raise RequestError(name, value, "true or false")
        if all(flags.values()):
            bound = "false if `add_generation_prompt` is true"
            remedy = "Pass add_generation_prompt=False."
            raise RequestError("continue_final_message", True, bound, remedy)
        content_format = options.get("chat_template_content_format", "auto")
        if content_format not in _CONTENT_FORMATS:
            bound = f"one of {', '.join(_CONTENT_FORMATS)}"
            raise RequestError("chat_template_content_format", content_format, bound)
        self._tokenizer = tokenizer
        tools = options.get("tools")
        self._text = find_template(tokenizer, options.get("chat_template"), tools)
        iterates = _ITERATES_OVER_CONTENT.search(self._text) is not None
        self._takes_parts = content_format == "openai" or (content_format == "auto" and iterates)
        variables = self._check_variables(tools, options.get("chat_template_kwargs"))
        self._options = {**flags, **variables}

    def render(self, messages: Any) -> tuple[str, list[int]]:
        """The text of a conversation, and the token ids of this text.

        Raises `RequestError` if `messages` is not a conversation, or the template is not valid or
        refuses the messages.
        """
        from jinja2 import TemplateSyntaxError

        if not _is_list(messages):
            raise RequestError("messages", messages, "a list of dicts with `role` and `content`")
        if not messages:
            raise RequestError("messages", messages, "at least one message")
        conversation = [self._check_message(i, message) for i, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, chat_template=self._text, tokenize=False, **self._options
            )
        except TemplateSyntaxError as error:
            bound = f"a Jinja template; line {error.lineno}: {first_line(error)}"
            raise RequestError("chat_template", self._text, bound) from error
        except Exception as error:  # the template's own code may raise anything
            bound = f"what the chat template accepts; it says: {first_line(error)}"
            raise RequestError("messages", messages, bound) from error
        check_text("messages", text)
        return text, list(self._tokenizer.encode(text, add_special_tokens=self._adds_special))

    def _check_variables(self, tools: Any, variables: Any) -> dict[str, Any]:
        """The template's variables: `tools`, and `variables` from `chat_template_kwargs`."""
        if tools is not None and not _is_list(tools):
            raise RequestError("tools", tools, "a list of JSON schemas of functions")
        if variables is not None and not isinstance(variables, Mapping):
            raise RequestError("chat_template_kwargs", variables, "a dict of template variables")
        template_variables = {} if tools is None else {"tools": list(tools)}
        arguments = signature(self._tokenizer.apply_chat_template).parameters if variables else {}
        for name, value in (variables or {}).items():
            if name in {*CHAT_OPTIONS, *_RESERVED_NAMES, *arguments} - _TEMPLATE_ARGUMENTS:
                bound = "given as an argument of its own, outside of `chat_template_kwargs`"
                raise RequestError(f"chat_template_kwargs.{name}", value, bound)
            template_variables[str(name)] = value
        if tools is not None:
            self._check_used("tools", "tools", tools, "Pass a `chat_template` that uses `tools`.")
        return template_variables

    def _check_used(self, name: str, field: str, value: Any, remedy: str) -> None:
        """Raise `RequestError` for the request's `field` if the template never mentions `name`."""
        if not re.search(rf"\b{re.escape(name)}\b", self._text):
            raise RequestError(field, value, "left out: this chat template does not use it", remedy)

    def _check_message(self, index: int, value: Any) -> dict[str, Any]:
        """A message as the template reads it: known fields without None, and content as one text or
        as a list of parts."""
        field = f"messages[{index}]"
        if not isinstance(value, Mapping):
            raise RequestError(field, value, "a dict with `role` and `content`")
        message = {k: v for k, v in value.items() if v is not None and k not in _INERT}
        if "reasoning" in message:  # vLLM's name, in answers that clients send back
            message.setdefault("reasoning_content", message.pop("reasoning"))
        if "function_call" in message:  # OpenAI's older name, for a single call
            message.setdefault("tool_calls", [{"function": message.pop("function_call")}])
        check_known_keys(field, message, _FIELDS, RequestError)
        message["role"] = self._check_role(f"{field}.role", message.get("role"))
        for name in ("name", "tool_call_id", "reasoning_content", "refusal"):
            if not isinstance(message.get(name, ""), str):
                raise RequestError(f"{field}.{name}", message[name], "a text")
        if calls := message.pop("tool_calls", None):
            remedy = "Write the calls as the message's `content`."
            self._check_used("tool_calls", f"{field}.tool_calls", calls, remedy)
            message["tool_calls"] = _check_calls(f"{field}.tool_calls", calls)
        texts = _check_content(f"{field}.content", message)
        texts += [refusal] if (refusal := message.pop("refusal", "")) else []
        parts = [{"type": "text", "text": text} for text in texts]
        message["content"] = parts if self._takes_parts else "\n".join(texts)
        return message

    def _check_role(self, field: str, role: Any) -> str:
        """The role under the name that the template uses for it. Unknown roles are an error,
        because most templates would silently drop their messages."""
        if not isinstance(role, str):
            raise RequestError(field, role, "a text")
        if role == "function":  # OpenAI's older name of `tool`
            return "tool"
        if any(f"{q}{role}{q}" in self._text for q in "'\""):
            return role
        if role not in _ROLES:
            bound = f"one of {', '.join(_ROLES)}, or a role that the chat template names"
            raise RequestError(field, role, bound)
        return "system" if role == "developer" else role  # `developer` is OpenAI's newer name


class ChatPrompt:
    """One conversation. Only `encode` renders it, so that an invalid conversation does not fail
    other conversations of the same call."""

    def __init__(self, template: ChatTemplate, messages: Any) -> None:
        self._template, self._messages = template, messages

    def encode(self) -> tuple[str, list[int]]:
        """Text and token ids; see `ChatTemplate.render`."""
        return self._template.render(self._messages)


def chat_prompts(template: ChatTemplate, messages: Any) -> tuple[bool, list[ChatPrompt]]:
    """Whether `messages` is a single conversation, and a prompt for each conversation."""
    if not _is_list(messages):
        bound = "a list of dicts with `role` and `content`, or a list of such lists"
        raise RequestError("messages", messages, bound)
    is_single = not (messages and _is_list(messages[0]))
    conversations = [messages] if is_single else messages
    return is_single, [ChatPrompt(template, conversation) for conversation in conversations]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _check_content(field: str, message: Mapping[str, Any]) -> list[str]:
    """The texts in a message's content; `RequestError` for `field` if they are not valid."""
    content = message.get("content")
    if content is None and message["role"] in _ROLES_WITHOUT_TEXT:
        return []
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else [content]
    texts = []
    for i, part in enumerate(parts):
        part_field = field if parts[0] is content else f"{field}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS:
            remedy = "Images, audio and video are not read."
            raise RequestError(f"{part_field}.type", kind, "`text`", remedy)
        text = part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise RequestError(part_field, text, "a text, or a list of parts of type `text`")
        check_text(part_field, text)
        texts.append(text)
    return texts


def _check_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates read them: with the fields `id`, `type` and `function`, and with
    arguments decoded if clients send JSON. `RequestError` for `field` if a call is not valid."""
    if not _is_list(calls) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(field, calls, "a list of dicts with `function`")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field}[{i}].function", function, "a dict with `name`")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:  # invalid, too many digits, too deep
                name, bound = f"{field}[{i}].function.arguments", "a dict, or JSON"
                raise RequestError(name, arguments, f"{bound}; the parser says: {error}") from None
        checked_call = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        checked_call["function"] = {"name": function["name"], "arguments": arguments}
        checked.append(checked_call)
    return checked


def find_template(tokenizer: Any, option: Any, tools: Any) -> str:
    """The Jinja text to use.

    Args:
        option: the option `chat_template`: Jinja text, or the name of one of the tokenizer's
            templates; None: the template `tool_use` if there are tools, else the default template.

    Raises:
        RequestError: there is no template, or `option` is not a template.
    """
    templates = getattr(tokenizer, "chat_template", None) or {}
    if not isinstance(templates, dict):
        templates = {"default": templates}
    names = ", ".join(sorted(templates))
    if option is None:
        if tools is not None and "tool_use" in templates:
            return str(templates["tool_use"])
        if "default" in templates:
            return str(templates["default"])
        known = f" named `default`, only {names}" if names else ""
        bound = f"given: this checkpoint's tokenizer has no chat template{known}"
        remedy = "Use `generate`, or a checkpoint with a `chat_template.jinja`."
        raise RequestError("chat_template", None, bound, remedy)
    if isinstance(option, str) and option in templates:
        return str(templates[option])
    # A text without Jinja's marks would itself be the prompt, whatever the messages are.
    if not isinstance(option, str) or not ("{{" in option or "{%" in option):
        choices = f", or one of {names}" if names else ""
        raise RequestError("chat_template", option, f"the text of a Jinja template{choices}")
    return option
