"""The bodies of `/v1/completions`, `/v1/chat/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from foretoken.serve.protocol.common import Fields, GenerationFields, Inert, Items, TemplateFields
from foretoken.serve.protocol.foreign import CHAT, COMPLETION, TOKENIZE, TOOL

ToolMode = Literal["none", "auto", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Fields):
    """A function that the model may call; `strict` has no effect: forced calls fit the schema."""

    foreign = TOOL
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Inert = None


class Tool(Fields):
    """A tool, which is always a function."""

    foreign = TOOL
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedNames(Fields):
    """The tools that may be called, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(Fields):
    """A restriction of the tools; the model sees only the named tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class ChatBody(GenerationFields, TemplateFields):
    """A conversation, options of its template, and options of the answer."""

    foreign = CHAT
    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolMode | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None


class CompletionBody(GenerationFields):
    """One prompt or several, as texts or token ids."""

    foreign = COMPLETION
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeBody(TemplateFields):
    """A text, or a conversation."""

    foreign = TOKENIZE
    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]
