"""The body of `/v1/responses`, which keeps nothing: a conversation comes whole, as items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import model_validator

from foretoken.serve.protocol.chat import Function
from foretoken.serve.protocol.common import (
    Fields,
    Inert,
    InertFields,
    Items,
    JsonSchema,
    Refused,
    SamplingFields,
    by_type,
)

Included = Annotated[list[Literal["reasoning.encrypted_content"]] | None, "inert"]


class InputText(Fields):
    """A text of a message or of a function's output, asked or answered; a refusal is one."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str
    annotations: Inert = None
    logprobs: Inert = None
    prompt_cache_breakpoint: Inert = None

    @model_validator(mode="before")
    @classmethod
    def read_refusal(cls, given: Any) -> Any:
        """Its text has a name of its own."""
        if isinstance(given, dict) and given.get("type") == "refusal":
            given = {"text" if key == "refusal" else key: value for key, value in given.items()}
        return given


class MessageItem(Fields):
    """A message; those of earlier answers come back as they were given."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Items[InputText]
    id: Inert = None
    status: Inert = None
    phase: Inert = None


class CallItem(Fields):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    caller: Inert = None
    id: Inert = None
    status: Inert = None
    created_by: Inert = None


class CallOutputItem(Fields):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]
    name: Inert = None
    caller: Inert = None
    id: Inert = None
    status: Inert = None
    created_by: Inert = None


class ReasoningItem(Fields):
    """Reasoning that stood before the next item of the assistant."""

    type: Literal["reasoning"]
    content: Items[InputText] | None = None
    summary: Inert = None
    encrypted_content: None = None
    id: Inert = None
    status: Inert = None


ITEMS = by_type(MessageItem, CallItem, CallOutputItem, ReasoningItem)


class FunctionTool(Function):
    """A function, as in a chat, in one object with its type."""

    type: Literal["function"]


class ChosenFunction(Fields):
    """The one that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    """A text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Fields):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Refused = None


class ResponsesBody(SamplingFields, InertFields):
    """An input, what its template is given, and what the answer holds."""

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Annotated[Literal[False] | None, "inert"] = None
    background: Annotated[Literal[False] | None, "inert"] = None
    truncation: Annotated[Literal["disabled"] | None, "inert"] = None
    include: Included = None
    stream_options: Inert = None
    prompt_cache_options: Inert = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    reasoning: Refused = None
    max_tool_calls: Refused = None
    top_logprobs: Refused = None
    context_management: Refused = None
    moderation: Refused = None
