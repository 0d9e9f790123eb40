"""Bodies of `/v1/responses` and `/v1/messages` as chats: the same request under other names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from foretoken.errors import RequestError
from foretoken.serve.errors import field_error, written_as
from foretoken.serve.parsers.message import call_fields
from foretoken.serve.protocol.chat import (
    AllowedNames,
    AllowedTools,
    ChatBody,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
)
from foretoken.serve.protocol.common import Fields, JsonSchema, ResponseFormat, SamplingFields
from foretoken.serve.protocol.messages import (
    ASSISTANT_BLOCKS,
    TEXT_BLOCKS,
    USER_BLOCKS,
    CountBody,
    MessagesBody,
    MessageToolChoice,
    Turn,
)
from foretoken.serve.protocol.responses import (
    ITEMS,
    AllowedFunctions,
    CallItem,
    CallOutputItem,
    InputText,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
)
from foretoken.serve.requests import GenerationRequest, Served, read_chat

_IN_RESPONSES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools": "tool_choice.tools",
}
_IN_MESSAGES = {
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}


def read_responses(body: ResponsesBody, served: Served) -> GenerationRequest:
    """The request of a body of `/v1/responses`; raises `RequestError`."""
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        names = AllowedNames(mode=choice.mode, tools=[*map(_named, choice.tools)])
        choice = AllowedTools(type="allowed_tools", allowed_tools=names)
    elif choice is not None and not isinstance(choice, str):
        choice = _named(choice)
    tools = [_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ()]
    chat = ChatBody(
        **_shared(body),
        messages=_with_system(body.instructions, _conversation(body.input)),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        stop=body.stop,
        structured_outputs=body.structured_outputs,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
    )
    return _read(chat, served, _IN_RESPONSES)


def read_messages(body: CountBody, served: Served) -> GenerationRequest:
    """The request of a body of `/v1/messages`, or of one to count; raises `RequestError`."""
    choice, parallel = _choice(body.tool_choice)
    system, answer = body.system, {}
    if isinstance(system, list):
        system = "\n".join(block.text for block in system)
    if isinstance(body, MessagesBody):
        answer = {**_shared(body), "max_tokens": body.max_tokens, "stop": body.stop_sequences}
        answer["response_format"] = _output(body)
    turns = [m for i, turn in enumerate(body.messages) for m in _turn(f"messages[{i}]", turn)]
    chat = ChatBody(
        **{"model": body.model, **answer},
        messages=_with_system(system, turns),
        tools=[_tool(t.name, t.description, t.input_schema) for t in body.tools or ()] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        **_reasoning(body, served),
    )
    return _read(chat, served, _IN_MESSAGES)


def _reasoning(body: CountBody, served: Served) -> dict[str, Any]:
    """A chat's fields about reasoning; a budget changes nothing if the model does not reason."""
    thinking, variables = body.thinking, body.chat_template_kwargs
    if thinking and thinking.budget_tokens is not None and served.format.reasons:
        bound = "left out: this model reasons as long as it likes"
        remedy = 'Write {"type": "adaptive"}, and bound the answer by `max_tokens`.'
        raise RequestError("thinking.budget_tokens", thinking.budget_tokens, bound, remedy)
    is_off = thinking is not None and thinking.type == "disabled"
    if is_off:
        variables = {"enable_thinking": False, **(variables or {})}
    return {
        "chat_template_kwargs": variables,
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "include_reasoning": not (is_off or (thinking and thinking.display == "omitted")),
    }


def _output(body: MessagesBody) -> ResponseFormat | None:
    """The schema of the answer, under its present name or its earlier one."""
    given = [body.output_format, body.output_config.format if body.output_config else None]
    named = [one.schema_ for one in given if one]
    if len(named) == 2 and named[0] != named[1]:
        bound = "left out beside `output_config.format`, which is its newer name"
        raise RequestError("output_format", named[0], bound)
    schema = JsonSchema(schema=named[0]) if named else None
    return ResponseFormat(type="json_schema", json_schema=schema) if schema else None


def _read(chat: ChatBody, served: Served, names: Mapping[str, str]) -> GenerationRequest:
    with written_as(names):
        generation = read_chat(chat, served)
    chained = {
        name: ", ".join(names.get(one, one) for one in written.split(", "))
        for name, written in generation.written.items()
    }
    return replace(generation, written={**names, **chained})


def _shared(body: SamplingFields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in SamplingFields.model_fields}


def _tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    function = Function(name=name, description=description, parameters=parameters)
    return Tool(type="function", function=function)


def _named(given: Any) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=given.name))


def _format(given: TextFormat) -> ResponseFormat:
    schema = JsonSchema(schema=given.schema_) if given.type == "json_schema" else None
    return ResponseFormat(type=given.type, json_schema=schema)


def _with_system(text: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages if text is None else [{"role": "system", "content": text}, *messages]


def _conversation(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages; reasoning and the calls after it become one message of the assistant."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    reasoning = ""
    for i, raw in enumerate(given):
        item = read_item(ITEMS, f"input[{i}]", raw, default="message")
        if isinstance(item, ReasoningItem):
            reasoning = _text(item.content or [])
        elif isinstance(item, MessageItem):
            found.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, CallOutputItem):
            result = {"tool_call_id": item.call_id, "content": _text(item.output)}
            found.append({"role": "tool", **result})
        elif isinstance(item, CallItem):
            if not found or found[-1]["role"] != "assistant" or reasoning:
                found.append({"role": "assistant", "content": None})
            calls = found[-1].setdefault("tool_calls", [])
            calls.append(call_fields(item.call_id, item.name, item.arguments))
        if reasoning and found and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"], reasoning = reasoning, ""
    return found


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _choice(given: MessageToolChoice | None) -> tuple[Any, bool | None]:
    """`tool_choice` and `parallel_tool_calls` of a chat."""
    if given is None:
        return None, None
    if (given.type == "tool") != (given.name is not None):
        bound = "given with `type`: tool, and only with it"
        raise RequestError("tool_choice.name", given.name, bound)
    choice: Any = {"any": "required"}.get(given.type, given.type)
    if given.name is not None:
        choice = _named(given)
    alone = given.disable_parallel_tool_use
    return choice, None if alone is None else not alone


def _turn(where: str, turn: Turn) -> list[dict[str, Any]]:
    """A message as the template reads it; each tool result becomes a message of its own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    kinds = {"assistant": ASSISTANT_BLOCKS, "user": USER_BLOCKS}.get(turn.role, TEXT_BLOCKS)
    blocks = [
        read_item(kinds, f"{where}.content[{i}]", block) for i, block in enumerate(turn.content)
    ]
    found = []
    for block in blocks:
        if block.type == "tool_result":
            said = block.content or ""
            text = said if isinstance(said, str) else "\n".join(part.text for part in said)
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    texts = [{"type": "text", "text": block.text} for block in blocks if block.type == "text"]
    calls = [
        call_fields(block.id, block.name, json.dumps(block.input))
        for block in blocks
        if block.type == "tool_use"
    ]
    if not found or texts:
        found.append({"role": turn.role, "content": texts or (None if calls else "")})
    if calls:
        found[-1]["tool_calls"] = calls
    if thought := "".join(block.thinking for block in blocks if block.type == "thinking"):
        found[-1]["reasoning_content"] = thought
    return found


T = TypeVar("T", bound=Fields)


def read_item(kinds: Mapping[str, type[T]], where: str, item: Any, default: str | None = None) -> T:
    """Read an item as the kind that its `type` names.

    A null counts as a field left out: clients send answers back with their nulls.

    Args:
        where: the item's name in errors.
        default: its kind if it names none.
    """
    if not isinstance(item, dict):
        raise RequestError(where, item, "an object")
    name = item.get("type", default)
    if not isinstance(name, str) or name not in kinds:
        raise RequestError(f"{where}.type", name, f"one of {', '.join(kinds)}")
    try:
        given = {key: value for key, value in item.items() if value is not None}
        return kinds[name].model_validate(given)
    except ValidationError as error:
        raise field_error(kinds[name], error.errors(), where) from None
