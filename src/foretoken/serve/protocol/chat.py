"""The body of `/v1/chat/completions`.

Messages are checked by `models/chat.py`, which knows what the template reads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from foretoken.serve.protocol.common import (
    Fields,
    GenerationFields,
    Inert,
    Items,
    Refused,
    TemplateFields,
)

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Fields):
    """A function; `strict` changes nothing: forced calls always fit, others are the model's."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Inert = None


class Tool(Fields):
    """A tool: there are no others."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of one of them."""

    name: str


class NamedTool(Fields):
    """The one that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationFields, TemplateFields):
    """A conversation, what its template is given, and what the answer holds."""

    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Refused = None
    function_call: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    modalities: Refused = None
    audio: Refused = None
    web_search_options: Refused = None
