"""Anthropic's SDK: messages, streams, tools, counted tokens, and answers sent back."""

from __future__ import annotations

from typing import Any

import anthropic

from benchmarks.clients.checks import MESSAGES, MODEL, Area, must, run

GREEDY: Any = {"model": MODEL, "max_tokens": 40, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "area", "input_schema": Area.model_json_schema()}
CHOICE: Any = {"type": "tool", "name": "area", "disable_parallel_tool_use": True}
FORCED: Any = {"tools": [TOOL], "tool_choice": CHOICE, "model": MODEL, "max_tokens": 200,
               "extra_body": {"seed": 3}}  # fmt: skip


def _client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="-", max_retries=0)


def messages_and_streams(url: str) -> dict[str, Any]:
    """A message whole and streamed; how many tokens its conversation has."""
    with _client(url) as client:
        done = client.messages.create(messages=MESSAGES, **GREEDY)
        said = "".join(block.text for block in done.content if block.type == "text")
        with client.messages.stream(messages=MESSAGES, **GREEDY) as stream:
            must("".join(stream.text_stream) == said, "a streamed message is the whole one")
            final = stream.get_final_message()
        must(final.usage.output_tokens == done.usage.output_tokens, "usage of messages")
        counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
        must(counted.input_tokens == done.usage.input_tokens, "counted tokens")
    return {"tokens": done.usage.output_tokens}


def tools(url: str) -> dict[str, Any]:
    """A forced call of a tool, whole and streamed."""
    with _client(url) as client:
        called = client.messages.create(messages=MESSAGES, **FORCED)
        with client.messages.stream(messages=MESSAGES, **FORCED) as stream:
            again = stream.get_final_message()
        inputs: list[Any] = [
            block.input for m in (called, again) for block in m.content if block.type == "tool_use"
        ]
        must(called.stop_reason == again.stop_reason == "tool_use", "stop_reason of calls")
        must(inputs[0] == inputs[-1] == Area(**inputs[0]).model_dump(), "a streamed call's input")
    return {"calls": len(inputs)}


def answers_sent_back(url: str) -> dict[str, Any]:
    """Blocks of answers go back as they are, with their nulls."""
    with _client(url) as client:
        called = client.messages.create(messages=MESSAGES, **FORCED)
        ids = [block.id for block in called.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": i, "content": "4", "is_error": False,
             "cache_control": {"type": "ephemeral"}} for i in ids
        ]  # fmt: skip
        for blocks in (called.content, [block.model_dump() for block in called.content]):
            history: Any = [*MESSAGES, {"role": "assistant", "content": blocks}]
            history += [{"role": "user", "content": results}]
            done = client.messages.create(
                messages=history, tools=[TOOL], thinking={"type": "disabled"}, **GREEDY
            )
            history += [{"role": "assistant", "content": done.content}, *MESSAGES]
            client.messages.create(messages=history, tools=[TOOL], **GREEDY)
    return {"histories": 4}


if __name__ == "__main__":
    run(messages_and_streams, tools, answers_sent_back)
