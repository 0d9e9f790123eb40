"""Bodies of `/v1/responses` and `/v1/messages`, read as bodies of chats with other field names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from foretoken.errors import RequestError
from foretoken.serve.errors import client_field_names, field_error
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
    BLOCKS,
    CountBody,
    MessagesBody,
    MessageToolChoice,
    Turn,
)
from foretoken.serve.protocol.responses import ITEMS, AllowedFunctions, InputText, ResponsesBody
from foretoken.serve.requests import GenerationRequest, ServedModel, read_chat

_IN_RESPONSES = {  # names of fields, by their names in a chat
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools": "tool_choice.tools",
}
_IN_MESSAGES = {  # as `_IN_RESPONSES`
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}


def read_responses(body: ResponsesBody, served: ServedModel) -> GenerationRequest:
    """The request of a body of `/v1/responses`; raises `RequestError`."""
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        names = AllowedNames(mode=choice.mode, tools=[*map(_named_tool, choice.tools)])
        choice = AllowedTools(type="allowed_tools", allowed_tools=names)
    elif choice is not None and not isinstance(choice, str):
        choice = _named_tool(choice)
    tools = [_chat_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ()]
    response_format = None
    if body.text and (form := body.text.format):
        schema = JsonSchema(schema=form.schema_) if form.type == "json_schema" else None
        response_format = ResponseFormat(type=form.type, json_schema=schema)
    chat = ChatBody(
        **_shared_fields(body),
        messages=_with_system(body.instructions, _conversation(body.input)),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        stop=body.stop,
        structured_outputs=body.structured_outputs,
        response_format=response_format,
    )
    return _read_as_chat(chat, served, _IN_RESPONSES)


def read_messages(body: CountBody, served: ServedModel) -> GenerationRequest:
    """The request of a body of `/v1/messages` or its `/count_tokens`; raises `RequestError`."""
    choice, parallel = _tool_choice(body.tool_choice)
    answer_fields: dict[str, Any] = {}
    system = body.system
    if isinstance(system, list):
        system = "\n".join(block.text for block in system)
    if isinstance(body, MessagesBody):
        answer_fields = _shared_fields(body) | {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "response_format": _answer_schema(body),
        }
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(body.messages):
        messages += _chat_messages(f"messages[{i}]", turn)
    tools = [
        _chat_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()
    ]
    chat = ChatBody(
        **{"model": body.model, **answer_fields},
        messages=_with_system(system, messages),
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        **_reasoning(body, served),
    )
    return _read_as_chat(chat, served, _IN_MESSAGES)


def _reasoning(body: CountBody, served: ServedModel) -> dict[str, Any]:
    """The fields of a chat about reasoning; a budget is refused if the model reasons."""
    thinking, variables = body.thinking, body.chat_template_kwargs
    if thinking and thinking.budget_tokens is not None and served.format.has_reasoning:
        bound = "left out: this model decides how long it reasons"
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


def _answer_schema(body: MessagesBody) -> ResponseFormat | None:
    """The schema of the answer, from `output_config.format` or its older name `output_format`."""
    formats = [body.output_format, body.output_config.format if body.output_config else None]
    schemas = [answer_format.schema_ for answer_format in formats if answer_format]
    if len(schemas) == 2 and schemas[0] != schemas[1]:
        bound = "left out if `output_config.format`, its newer name, is given"
        raise RequestError("output_format", schemas[0], bound)
    schema = JsonSchema(schema=schemas[0]) if schemas else None
    return ResponseFormat(type="json_schema", json_schema=schema) if schema else None


def _read_as_chat(
    chat: ChatBody, served: ServedModel, names: Mapping[str, str]
) -> GenerationRequest:
    """The request of a chat that was made from another body.

    Errors use `names`: by a field's name in a chat, the name in that body.
    """
    with client_field_names(names):
        generation = read_chat(chat, served)
    body_names = {
        name: ", ".join(names.get(part, part) for part in chat_names.split(", "))
        for name, chat_names in generation.client_names.items()
    }
    return replace(generation, client_names={**names, **body_names})


def _shared_fields(body: SamplingFields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in SamplingFields.model_fields}


def _chat_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    function = Function(name=name, description=description, parameters=parameters)
    return Tool(type="function", function=function)


def _named_tool(choice: Any) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _with_system(text: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages if text is None else [{"role": "system", "content": text}, *messages]


def _conversation(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat; reasoning becomes part of the assistant's message that follows."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for i, value in enumerate(items):
        item = read_item(ITEMS, f"input[{i}]", value, default="message")
        if item.type == "reasoning":
            reasoning = _joined_text(item.content or [])
        elif item.type == "message":
            messages.append({"role": item.role, "content": _joined_text(item.content)})
        elif item.type == "function_call_output":
            result = {"tool_call_id": item.call_id, "content": _joined_text(item.output)}
            messages.append({"role": "tool", **result})
        else:
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(call_fields(item.call_id, item.name, item.arguments))
        if reasoning and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _joined_text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool_choice(choice: MessageToolChoice | None) -> tuple[Any, bool | None]:
    """A chat's `tool_choice` and `parallel_tool_calls` for Anthropic's `tool_choice`."""
    if choice is None:
        return None, None
    if (choice.type == "tool") != (choice.name is not None):
        bound = "given with `type`: tool, and left out with another `type`"
        raise RequestError("tool_choice.name", choice.name, bound)
    is_single = choice.disable_parallel_tool_use
    parallel = None if is_single is None else not is_single
    if choice.name is not None:
        return _named_tool(choice), parallel
    return "required" if choice.type == "any" else choice.type, parallel


def _chat_messages(place: str, turn: Turn) -> list[dict[str, Any]]:
    """A turn as a chat's messages: one per tool result, one for the rest; `place` is for errors."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    classes = BLOCKS[turn.role]
    blocks = [
        read_item(classes, f"{place}.content[{i}]", block) for i, block in enumerate(turn.content)
    ]
    messages = []
    for block in blocks:
        if block.type == "tool_result":
            content = block.content or ""
            text = content if isinstance(content, str) else "\n".join(part.text for part in content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    texts = [{"type": "text", "text": block.text} for block in blocks if block.type == "text"]
    tool_uses = [block for block in blocks if block.type == "tool_use"]
    calls = [call_fields(each.id, each.name, json.dumps(each.input)) for each in tool_uses]
    if not messages or texts:
        messages.append({"role": turn.role, "content": texts or (None if calls else "")})
    if calls:
        messages[-1]["tool_calls"] = calls
    if reasoning := "".join(block.thinking for block in blocks if block.type == "thinking"):
        messages[-1]["reasoning_content"] = reasoning
    return messages


T = TypeVar("T", bound=Fields)


def read_item(
    classes: Mapping[str, type[T]], place: str, item: Any, default: str | None = None
) -> T:
    """An item or block as an object of the class that its `type`, or else `default`, names.

    Fields that are null are ignored, since clients send earlier answers back with nulls.

    Args:
        classes: the classes by `type`.
        place: the item's name in errors.
    """
    if not isinstance(item, dict):
        raise RequestError(place, item, "an object")
    name = item.get("type", default)
    if not isinstance(name, str) or name not in classes:
        raise RequestError(f"{place}.type", name, f"one of {', '.join(classes)}")
    try:
        fields = {key: value for key, value in item.items() if value is not None}
        return classes[name].model_validate(fields)
    except ValidationError as error:
        raise field_error(classes[name], error.errors(), place) from None
