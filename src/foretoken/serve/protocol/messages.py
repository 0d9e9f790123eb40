"""The body of `/v1/messages`, Anthropic's API: messages of blocks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from foretoken.serve.protocol.chat import Effort, FunctionName
from foretoken.serve.protocol.common import Fields, Inert, Items, SamplingFields, by_type
from foretoken.serve.protocol.foreign import COUNT, MESSAGES, TOOL


class TextBlock(Fields):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: Inert = None
    citations: Inert = None


class ThinkingBlock(Fields):
    """Reasoning of an earlier answer; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Inert = None


class ToolUseBlock(Fields):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Inert = None
    toolset_name: Inert = None
    cache_control: Inert = None


class ToolResultBlock(Fields):
    """The result of a call. `is_error` has no effect: the model sees only the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: Inert = None
    toolset_name: Inert = None
    cache_control: Inert = None


BLOCKS = {  # by the role of a message
    "assistant": by_type(TextBlock, ThinkingBlock, ToolUseBlock),
    "user": by_type(TextBlock, ToolResultBlock),
    "system": by_type(TextBlock),
}


class Turn(Fields):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class MessageTool(Fields):
    """A function that the model may call; `strict` has no effect, as in a chat."""

    foreign = TOOL
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Inert = None
    cache_control: Inert = None
    eager_input_streaming: Inert = None


class MessageToolChoice(Fields):
    """Whether a tool must be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """Whether the model reasons; the model decides for how long."""

    type: Literal["disabled", "adaptive", "enabled"]
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: int | None = None


class OutputFormat(Fields):
    """A schema that the answer must satisfy."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How much the model reasons, and the format of its text."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountBody(Fields):
    """A conversation, and what its prompt depends on."""

    foreign = COUNT
    model: str | None = None
    messages: Items[Turn]
    system: str | Items[TextBlock] | None = None
    tools: Items[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Inert = None
    user_profile_id: Inert = None
    workspace_id: Inert = None
    billing_policy: Inert = None


class MessagesBody(CountBody, SamplingFields):
    """A conversation, and how its answer is generated."""

    foreign = MESSAGES
    max_tokens: int
    output_format: OutputFormat | None = None
    stop_sequences: Items[str] | None = None
    metadata: Inert = None
    service_tier: Inert = None
