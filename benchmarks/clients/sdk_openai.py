"""OpenAI's SDK: completions, chats, responses, streams, tools, schemas, and answers sent back."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from benchmarks.clients.checks import FORCED, GREEDY, MESSAGES, MODEL, PROMPT, Area, must, run


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


def completions_and_streams(url: str) -> dict[str, Any]:
    """Whole and streamed answers are one text; usage and metrics come with the last chunk."""
    with _client(url) as client:
        must([model.id for model in client.models.list()] == [MODEL], "models.list")
        whole = client.completions.create(prompt=PROMPT, **GREEDY)
        usage: Any = {"include_usage": True}
        stream = client.completions.create(
            prompt=PROMPT, stream=True, stream_options=usage, **GREEDY
        )
        *chunks, last = stream
        said = "".join(chunk.choices[0].text for chunk in chunks)
        must(said == whole.choices[0].text, "a streamed completion is the whole one")
        must(last.usage == whole.usage, "usage of a stream")
        extra: Any = last.model_extra
        block = extra["metrics"]["speculative_decoding"]
        must(sum(block["acceptance_histogram"]) == block["num_spec_steps"], "the histogram's sum")
    return {"chunks": len(chunks), "drafts": block["num_spec_steps"]}


def chat_and_responses(url: str) -> dict[str, Any]:
    """A chat whole and streamed, and a response, are one text at temperature 0."""
    with _client(url) as client:
        chat = client.chat.completions.create(messages=MESSAGES, **GREEDY)
        parts = client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
        must(said == chat.choices[0].message.content, "a streamed chat is the whole one")
        asked: Any = {"model": MODEL, "input": MESSAGES[0]["content"], "store": False}
        answer = client.responses.create(max_output_tokens=40, temperature=0, **asked)
        must(answer.output_text == said, "a response is the chat's text")
    return {"characters": len(said)}


def streams_at_once(url: str) -> dict[str, Any]:
    """Sixteen streams at once are sixteen times the same text."""

    async def stream(client: openai.AsyncOpenAI) -> str:
        parts = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(stream(client) for _ in range(16)))

    texts = asyncio.run(ask())
    must(len({*texts}) == 1 and bool(texts[0]), "streams at once are equal")
    return {"streams": len(texts)}


def tools(url: str) -> dict[str, Any]:
    """A forced call, whole and through the SDK's own accumulation of a stream."""
    tool = openai.pydantic_function_tool(Area, name="area")
    with _client(url) as client:
        asked: Any = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required",
                      "parallel_tool_calls": False, **FORCED}  # fmt: skip
        done = client.chat.completions.parse(**asked)
        (call, *_) = done.choices[0].message.tool_calls or ()
        must(isinstance(call.function.parsed_arguments, Area), "a call's arguments are parsed")
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        (again, *_) = streamed.message.tool_calls or ()
        same = again.function.arguments == call.function.arguments
        must(same, "a streamed call is the whole one")
        must(streamed.finish_reason == "tool_calls", "finish_reason of calls")
    return {"calls": 2}


def schemas(url: str) -> dict[str, Any]:
    """`parse` of a schema by both APIs, and of a schema beside tools: a call or the schema."""
    tool = openai.pydantic_function_tool(Area, name="area")
    seen = {"parsed": 0, "called": 0}
    with _client(url) as client:
        parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Area, **FORCED)
        must(isinstance(parsed.choices[0].message.parsed, Area), "a schema's answer is parsed")
        answer = client.responses.parse(
            model=MODEL, input="x = ", text_format=Area, max_output_tokens=200, store=False
        )
        must(isinstance(answer.output_parsed, Area), "a response's schema is parsed")
        for seed in range(12):
            both: Any = {**FORCED, "seed": seed, "tools": [tool], "response_format": Area,
                         "parallel_tool_calls": False}  # fmt: skip
            message = client.chat.completions.parse(messages=MESSAGES, **both).choices[0].message
            calls = message.tool_calls or []
            fits = [isinstance(call.function.parsed_arguments, Area) for call in calls]
            must(all(fits) if calls else isinstance(message.parsed, Area), "a call or the schema")
            seen["called" if calls else "parsed"] += 1
    return seen


def answers_sent_back(url: str) -> dict[str, Any]:
    """What the SDK returned goes back as it is: messages with their nulls, items of responses."""
    tool = openai.pydantic_function_tool(Area, name="area")
    with _client(url) as client:
        asked: Any = {"tools": [tool], "tool_choice": "required", **FORCED}
        first = client.chat.completions.create(messages=MESSAGES, **asked).choices[0].message
        (call, *_) = first.tool_calls or ()
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        for sent in (first.model_dump(), first.to_dict(), first):
            history: Any = [*MESSAGES, sent, result]
            done = client.chat.completions.create(messages=history, **GREEDY).choices[0].message
            again: Any = [*history, done.model_dump(), *MESSAGES]
            client.chat.completions.create(messages=again, **GREEDY)
        flat: Any = {"type": "function", "name": "area", "strict": True,
                     "parameters": Area.model_json_schema()}  # fmt: skip
        more: Any = {"model": MODEL, "store": False, "max_output_tokens": 200, "tools": [flat]}
        items: Any = [{"role": "user", "content": "def area("}]
        answer = client.responses.create(input=items, tool_choice="required", **more)
        items += [item.model_dump() for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
            for item in answer.output if item.type == "function_call"
        ]  # fmt: skip
        last = client.responses.create(input=items, **more)
        items += [*last.output, {"role": "user", "content": "Again."}]
        client.responses.create(input=items, **more)
    return {"histories": 8}


if __name__ == "__main__":
    run(
        completions_and_streams,
        chat_and_responses,
        streams_at_once,
        tools,
        schemas,
        answers_sent_back,
    )
