"""Conversations as prompts: the chat template of a tokenizer.

Belongs here: checking messages, rendering them, token ids of the result. Does not: requests.
"""

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
_MAY_BE_EMPTY = ("assistant", "tool")  # roles with messages that may have no text
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Names in `apply_chat_template` besides its arguments; and arguments that reach the template.
_TAKEN, _PASSED_ON = {"self", "conversations", "messages"}, {"documents", "kwargs"}
_FORMS = ("auto", "string", "openai")
# A template that iterates over a message's content takes lists of parts, others take a text.
_WALKS_OVER_CONTENT = re.compile(r"""\bfor\s+\w+\s+in\s+\w+(\.content\b|\[['"]content['"]\])""")


class ChatOptions(TypedDict, total=False):
    """How a conversation is rendered.

    Attributes:
        chat_template: Jinja text, or the name of one of the tokenizer's templates; None: its own.
        chat_template_content_format: `string` gives the template every content as one text, parts
            joined by line ends; `openai` as a list of parts; `auto` (the default) as it reads them.
        add_generation_prompt: end the prompt with the start of an assistant's answer (the default).
        continue_final_message: leave the last message open, for the answer to continue it; only
            with add_generation_prompt=False.
        add_special_tokens: add the tokens with which the tokenizer begins a text; False by default:
            templates write them.
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
    """The template of a call of `chat`, with its arguments besides the messages.

    Args:
        tokenizer: of the checkpoint; None if it has none.
        options: as in `ChatOptions`.

    Raises:
        RequestError: no tokenizer; no template, an invalid one, or one that ignores an option.
    """

    def __init__(self, tokenizer: Any | None, **options: Unpack[ChatOptions]) -> None:
        if tokenizer is None:
            remedy = "Use `generate` with token ids, or add tokenizer files to the checkpoint."
            bound = "one that writes messages as tokens: this checkpoint has no tokenizer"
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
            bound = "false where a new answer is opened"
            remedy = "Pass add_generation_prompt=False with it."
            raise RequestError("continue_final_message", True, bound, remedy)
        form = options.get("chat_template_content_format", "auto")
        if form not in _FORMS:
            raise RequestError("chat_template_content_format", form, f"one of {', '.join(_FORMS)}")
        self._tokenizer = tokenizer
        tools = options.get("tools")
        self._text = find_template(tokenizer, options.get("chat_template"), tools)
        walks = _WALKS_OVER_CONTENT.search(self._text) is not None
        self._takes_parts = form == "openai" or (form == "auto" and walks)
        variables = self._check_variables(tools, options.get("chat_template_kwargs"))
        self._options = {**flags, **variables}

    def render(self, messages: Any) -> tuple[str, list[int]]:
        """The text of a conversation and its token ids.

        The template writes all special tokens, so encoding adds none unless `add_special_tokens`.

        Raises:
            RequestError: `messages` is not a conversation, or the template refuses it.
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
            bound = f"what the chat template takes; it says: {first_line(error)}"
            raise RequestError("messages", messages, bound) from error
        check_text("messages", text)
        return text, list(self._tokenizer.encode(text, add_special_tokens=self._adds_special))

    def _check_variables(self, tools: Any, variables: Any) -> dict[str, Any]:
        """The template's further variables; refuse tools that it would not show."""
        if tools is not None and not _is_list(tools):
            raise RequestError("tools", tools, "a list of JSON schemas of functions")
        if variables is not None and not isinstance(variables, Mapping):
            raise RequestError("chat_template_kwargs", variables, "a dict of template variables")
        given = {} if tools is None else {"tools": list(tools)}
        arguments = signature(self._tokenizer.apply_chat_template).parameters if variables else {}
        for name, value in (variables or {}).items():
            if name in {*CHAT_OPTIONS, *_TAKEN, *arguments} - _PASSED_ON:
                bound = "given as an argument of its own"
                raise RequestError(f"chat_template_kwargs.{name}", value, bound)
            given[str(name)] = value
        if tools is not None:
            self._check_used("tools", "tools", tools, "Pass a `chat_template` that does.")
        return given

    def _check_used(self, name: str, where: str, value: Any, remedy: str) -> None:
        if not re.search(rf"\b{re.escape(name)}\b", self._text):
            raise RequestError(where, value, "left out: this chat template does not use it", remedy)

    def _check_message(self, index: int, given: Any) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(given, Mapping):
            raise RequestError(where, given, "a dict with `role` and `content`")
        message = {k: v for k, v in given.items() if v is not None and k not in _INERT}
        if "reasoning" in message:  # vLLM's name, in answers that clients send back
            message.setdefault("reasoning_content", message.pop("reasoning"))
        if "function_call" in message:  # OpenAI's older name, for a single call
            message.setdefault("tool_calls", [{"function": message.pop("function_call")}])
        check_known_keys(where, message, _FIELDS, RequestError)
        message["role"] = self._check_role(f"{where}.role", message.get("role"))
        for field in ("name", "tool_call_id", "reasoning_content", "refusal"):
            if not isinstance(message.get(field, ""), str):
                raise RequestError(f"{where}.{field}", message[field], "a text")
        if calls := message.pop("tool_calls", None):
            its_place = f"{where}.tool_calls"
            remedy = "Write the calls as the message's `content`."
            self._check_used("tool_calls", its_place, calls, remedy)
            message["tool_calls"] = _check_calls(its_place, calls)
        parts = _check_content(f"{where}.content", message)
        parts += [refusal] if (refusal := message.pop("refusal", "")) else []
        listed = [{"type": "text", "text": text} for text in parts]
        message["content"] = listed if self._takes_parts else "\n".join(parts)
        return message

    def _check_role(self, where: str, role: Any) -> str:
        """A role that the template knows: most templates silently drop messages of others."""
        if not isinstance(role, str):
            raise RequestError(where, role, "a text")
        if role == "function":  # OpenAI's older name of `tool`
            return "tool"
        if any(f"{q}{role}{q}" in self._text for q in "'\""):
            return role
        if role not in _ROLES:
            bound = f"one of {', '.join(_ROLES)}, or one the template names"
            raise RequestError(where, role, bound)
        return "system" if role == "developer" else role  # OpenAI's newer name


class ChatPrompt:
    """One conversation, rendered later, so that an invalid one fails alone."""

    def __init__(self, template: ChatTemplate, messages: Any) -> None:
        self._template, self._messages = template, messages

    def encode(self) -> tuple[str, list[int]]:
        """Text and token ids; see `ChatTemplate.render`."""
        return self._template.render(self._messages)


def chat_prompts(template: ChatTemplate, messages: Any) -> tuple[bool, list[ChatPrompt]]:
    """Whether `messages` is a single conversation, and a prompt for each conversation."""
    if not _is_list(messages):
        bound = "a list of dicts with `role` and `content`, or a list of such"
        raise RequestError("messages", messages, bound)
    single = not (messages and _is_list(messages[0]))
    return single, [ChatPrompt(template, one) for one in ([messages] if single else messages)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _check_content(where: str, message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content; an assistant's or tool's message may have none."""
    content = message.get("content")
    if content is None and message["role"] in _MAY_BE_EMPTY:
        return []
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else [content]
    texts = []
    for i, part in enumerate(parts):
        its_place = where if parts[0] is content else f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS:
            remedy = "Images, audio and video are not read."
            raise RequestError(f"{its_place}.type", kind, "`text`", remedy)
        text = part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise RequestError(its_place, text, "a text, or a list of parts of type `text`")
        check_text(its_place, text)
        texts.append(text)
    return texts


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates read them: arguments as a dict instead of clients' JSON text, and no
    fields besides `id`, `type` and `function`."""
    if not _is_list(calls) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(where, calls, "a list of dicts with `function`")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}].function", function, "a dict with `name`")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:  # invalid, too many digits, too deep
                place, bound = f"{where}[{i}].function.arguments", "a dict, or JSON"
                raise RequestError(place, arguments, f"{bound}; the parser says: {error}") from None
        named = {"name": function["name"], "arguments": arguments}
        kept = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        found.append({**kept, "function": named})
    return found


def find_template(tokenizer: Any, given: Any, tools: Any) -> str:
    """The Jinja text to use; among named templates `tool_use` if there are tools.

    Raises:
        RequestError: there is no template, or `given` is not one.
    """
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, dict) else {"default": own} if own else {}
    if given is None:
        if tools is not None and "tool_use" in named:
            return str(named["tool_use"])
        if "default" in named:
            return str(named["default"])
        known = f" without a name; it has {', '.join(sorted(named))}" if named else ""
        bound = f"given: this checkpoint's tokenizer has no chat template{known}"
        remedy = "Use `generate`, or a checkpoint with a `chat_template.jinja`."
        raise RequestError("chat_template", None, bound, remedy)
    if isinstance(given, str) and given in named:
        return str(named[given])
    # A text without Jinja's marks would itself be the prompt, whatever the messages are.
    if not isinstance(given, str) or not ("{{" in given or "{%" in given):
        names = f", or one of {', '.join(sorted(named))}" if named else ""
        raise RequestError("chat_template", given, f"the text of a Jinja template{names}")
    return given
