"""The body of `/v1/chat/completions`.

Messages are checked by `models/chat.py`, which knows what the template reads.
"""

from __future__ import annotations

from typing import Any

from foretoken.serve.protocol.common import GenerationFields, Inert, Items, Refused, add_names


class ChatBody(GenerationFields):
    """A conversation, what its template is given, and what the answer holds."""

    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Tools and reasoning: made fields of their own types where their parsers are.
    tools: Refused = None
    tool_choice: Refused = None
    parallel_tool_calls: Inert = None
    functions: Refused = None
    function_call: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    modalities: Refused = None
    audio: Refused = None
    web_search_options: Refused = None


add_names(ChatBody)
