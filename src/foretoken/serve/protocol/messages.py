"""The body of `/v1/messages`, Anthropic's API: messages of blocks."""

from __future__ import annotations

from typing import Any, Literal

from foretoken.serve.protocol.chat import FunctionName
from foretoken.serve.protocol.common import Fields, Inert, Items, Refused, SamplingFields, by_type


class TextBlock(Fields):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: Inert = None
    citations: Inert = None


class ThinkingBlock(Fields):
    """Reasoning of an earlier answer; nothing is signed here."""

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
    """What came of it; that it is an error is said by its text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: Inert = None
    toolset_name: Inert = None
    cache_control: Inert = None


ASSISTANT_BLOCKS = by_type(TextBlock, ThinkingBlock, ToolUseBlock)
USER_BLOCKS = by_type(TextBlock, ToolResultBlock)
TEXT_BLOCKS = by_type(TextBlock)


class Turn(Fields):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class MessageTool(Fields):
    """A function; `strict` changes nothing, as in a chat."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Inert = None
    cache_control: Inert = None


class MessageToolChoice(Fields):
    """Whether and what must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(Fields):
    """A conversation."""

    model: str | None = None
    messages: Items[Turn]
    system: str | Items[TextBlock] | None = None
    tools: Items[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Inert = None
    thinking: Refused = None
    mcp_servers: Refused = None
    context_management: Refused = None
    output_config: Refused = None
    output_format: Refused = None
    speed: Refused = None


class MessagesBody(CountBody, SamplingFields):
    """And how its answer is made."""

    max_tokens: int
    stop_sequences: Items[str] | None = None
    metadata: Inert = None
    service_tier: Inert = None
    container: Refused = None
