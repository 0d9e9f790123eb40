"""How models write tool calls and reasoning, as their chat templates show; grammars of calls.

Transformers' own parser (`PreTrainedTokenizer.parse_response`) is not used, for four reasons: it
needs a `response_template`, which few tokenizers have; it raises `ValueError` for broken JSON,
which is text here; it ends a call at a `</tool_call>` within a string of the arguments; and it does
not read calls without an opening mark, as Llama 3 writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.errors import ConfigError, RequestError
from foretoken.models.chat import find_template
from foretoken.sampling.structured import as_text

_TYPE_KEYS = {"type", "$ref", "anyOf", "oneOf", "allOf"}  # each states the type of a schema
_JSON_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}  # as templates write JSON
THINK, END_THINK = "<think>", "</think>"
REASONING_PARSERS = ("think", "qwen3", "deepseek_r1")  # names of one format, that of `THINK`


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls: as JSON between marks.

    Attributes:
        opener, closer: the marks; `closer` is "" if there is none.
        inside: white space between a mark and the JSON.
        arguments: the key of a call's arguments.
        is_bare: whether an answer can also begin with the JSON, without a mark.
        is_list: whether all calls are one list after one mark.
        name_can_precede: whether the name can stand before JSON that has only the arguments.
        id_length: characters of a call's id, if the template demands a length.
    """

    opener: str
    closer: str = ""
    inside: str = ""
    arguments: str = "arguments"
    is_bare: bool = False
    is_list: bool = False
    name_can_precede: bool = False
    id_length: int | None = None


FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", "\n"),
    "llama3_json": CallFormat("<|python_tag|>", arguments="parameters", is_bare=True),
    "mistral": CallFormat("[TOOL_CALLS]", is_list=True, name_can_precede=True, id_length=9),
}
# Templates of Qwen 3 Coder and 3.5 have the marks of `hermes`, but XML between them, which is not
# read.
_TEMPLATE_PATTERNS = {
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "hermes": re.compile(r"<tool_call>(?!.*<function=)", re.DOTALL),
    "llama3_json": re.compile(r'<\|python_tag\|>|\{"name": function name, "parameters"'),
}


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How the served model writes messages.

    Attributes:
        calls: the format of tool calls; None if it is not known.
        has_reasoning: whether `<think>` and `</think>` mark reasoning.
        special: ids of special tokens by their texts.
        has_template: whether conversations can be written as prompts.
        summary: a line for the user: which template is used, and which formats are read.
        decode: the tokenizer's method `decode`.
    """

    calls: CallFormat | None = None
    has_reasoning: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    has_template: bool = True
    summary: str = field(default="", compare=False)
    decode: Callable[..., str] = field(default=lambda ids, **options: "", compare=False)

    @classmethod
    def from_options(
        cls, tokenizer: Any, template: str | None, calls: str, reasoning: str
    ) -> MessageFormat:
        """The formats that options name, or that `auto` finds in the template.

        Args:
            template: a Jinja template, or the name of a template of the tokenizer; None: default.
            calls, reasoning: names of formats, `auto` or `none`.

        Raises:
            ConfigError: `template` is not a chat template.
        """
        refusal = "Chats are refused: there is no"
        if tokenizer is None:
            return cls(has_template=False, summary=f"{refusal} tokenizer.")
        try:
            text, tool_text = (find_template(tokenizer, template, tools) for tools in (None, ()))
        except RequestError as error:
            if template is not None:
                raise ConfigError(error.field, template, error.bound) from None
            return cls(has_template=False, summary=f"{refusal} chat template.")
        if calls == "auto":
            patterns = _TEMPLATE_PATTERNS.items()
            calls = next((name for name, each in patterns if each.search(tool_text)), "none")
        decoder = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token.content: token_id for token_id, token in decoder.items() if token.special}
        is_marked = reasoning == "auto" and END_THINK in text
        has_reasoning = is_marked or reasoning in REASONING_PARSERS
        source = "the checkpoint's own" if template is None else "of --chat-template"
        if template is not None and text != template:
            source = f"the checkpoint's `{template}`"
        marks = THINK if has_reasoning else "none"
        summary = f"Chat template: {source}; tool calls: {calls}; reasoning: {marks}."
        call_format = FORMATS.get(calls)
        return cls(call_format, has_reasoning, special, summary=summary, decode=tokenizer.decode)

    def grammar(
        self,
        calls: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        parallel: bool,
        answer: str | None = None,
    ) -> str:
        """A Lark grammar for llguidance: a call of one of the tools, or several if `parallel`.

        Each schema is a separate grammar, since a `$ref` is relative to the schema that has it.

        Args:
            answer: the schema of an answer without calls; None: every answer has calls.
        """
        rules, bodies = [], []
        for i, tool in enumerate(tools):
            function = tool["function"]
            name = json.dumps(function["name"])
            # Split into lexemes of JSON: the lexer takes the longest lexeme that fits, and `answer`
            # can begin with the same characters.
            head = ("{", '"name"', ": ", name, ", ", f'"{calls.arguments}"', ": ")
            schema = function.get("parameters") or {"properties": {}}
            if not schema.keys() & _TYPE_KEYS:
                schema = {"type": "object", **schema}  # arguments are always an object
            rules.append(f'body_{i}: {" ".join(map(json.dumps, head))} arguments_{i} "}}"')
            arguments = as_text(f"tools.{function['name']}", schema, **_JSON_SEPARATORS)
            rules.append(f"arguments_{i}: %json {arguments}")
            bodies.append(f"body_{i}")
        opener = "" if calls.is_bare else self._mark(calls.opener, suffix=calls.inside)
        if calls.is_list:
            repetition = ' (", " body)*' if parallel else ""
            call, start = f'{opener} "[" body{repetition} "]"', "call"
        else:
            call = f"{opener} body {self._mark(calls.closer, prefix=calls.inside)}"
            separator = '"; "' if calls.is_bare else r'"\n"'
            start = f"call ({separator} call)*" if parallel else "call"
        if answer is not None:
            start = f"{start} | answer"
            rules.append(f"answer: %json {answer}")
        body = " | ".join(bodies)
        return "\n".join([f"start: {start}", f"call: {call}", f"body: {body}", *rules])

    def _mark(self, text: str, *, prefix: str = "", suffix: str = "") -> str:
        """A mark in Lark, where a special token is written by its id; "" for an empty mark."""
        if not text:
            return ""
        token = f"<[{self.special[text]}]>" if text in self.special else json.dumps(text)
        parts = (json.dumps(prefix) if prefix else "", token, json.dumps(suffix) if suffix else "")
        return " ".join(filter(None, parts))
