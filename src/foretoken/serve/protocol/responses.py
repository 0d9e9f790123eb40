"""The body of `/v1/responses`. The server stores nothing: a conversation comes whole, as items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import model_validator

from foretoken.serve.protocol.chat import Effort, Function, ToolMode
from foretoken.serve.protocol.common import (
    Fields,
    Inert,
    InertFields,
    Items,
    JsonSchema,
    SamplingFields,
    by_type,
)
from foretoken.serve.protocol.foreign import REASONING, RESPONSES, TEXT

_NotHere = Literal[
    "reasoning.encrypted_content", "web_search_call.results", "web_search_call.action.sources",
    "file_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "message.input_image.image_url",
]  # fmt: skip
Included = Annotated[list[_NotHere] | None, "inert"]
"""Values of `include` for things that do not exist here. `message.output_text.logprobs` is refused:
log-probabilities exist, but this API does not show them."""


class InputText(Fields):
    """A text of a message or of a function's output; the text of a refusal is read, too."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str
    annotations: Inert = None
    logprobs: Inert = None
    prompt_cache_breakpoint: Inert = None

    @model_validator(mode="before")
    @classmethod
    def read_refusal(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "refusal":
            value = {"text" if key == "refusal" else key: value for key, value in value.items()}
        return value


class MessageItem(Fields):
    """A message, also one of an earlier answer, which clients send back unchanged."""

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
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]
    name: Inert = None
    caller: Inert = None
    id: Inert = None
    status: Inert = None
    created_by: Inert = None


class ReasoningItem(Fields):
    """Reasoning that precedes the assistant's next item."""

    type: Literal["reasoning"]
    content: Items[InputText] | None = None
    summary: Inert = None
    encrypted_content: None = None
    id: Inert = None
    status: Inert = None


ITEMS = by_type(MessageItem, CallItem, CallOutputItem, ReasoningItem)


class FunctionTool(Function):
    """A function as in a chat, but with its `type` in the same object."""

    type: Literal["function"]


class ChosenFunction(Fields):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Fields):
    """The functions that may be called, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ChosenFunction]


class TextFormat(JsonSchema):
    """The format of the answer: a text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Fields):
    """How the text is written."""

    foreign = TEXT
    format: TextFormat | None = None


class Reasoning(Fields):
    """How much the model reasons; the answer has the whole reasoning, without a summary."""

    foreign = REASONING
    effort: Effort | None = None


class ResponsesBody(SamplingFields, InertFields):
    """An input, options of its template, and options of the answer."""

    foreign = RESPONSES
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: ToolMode | ChosenFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stop: str | Items[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Included = None
    stream_options: Inert = None
    max_tool_calls: Inert = None
    background_options: Inert = None
    image: Inert = None
