"""LiteLLM: this server as `openai/`, `hosted_vllm/`, `text-completion-openai/`, `anthropic/`."""

from __future__ import annotations

import json
from typing import Any

import litellm

from benchmarks.clients.checks import FORCED, GREEDY, MESSAGES, MODEL, PROMPT, Area, must, run

TOOL = {"type": "function", "function": {"name": "area", "parameters": Area.model_json_schema()}}


def _ask(url: str, provider: str, **more: Any) -> Any:
    given = {**GREEDY, "messages": MESSAGES, **more, "model": f"{provider}/{MODEL}"}
    base = url if provider == "anthropic" else f"{url}/v1"
    return litellm.completion(api_base=base, api_key="-", num_retries=0, **given)


def chat(url: str) -> dict[str, Any]:
    """By three providers, whole and streamed: one text."""
    said = set()
    for provider in ("openai", "hosted_vllm", "anthropic"):
        said.add(_ask(url, provider).choices[0].message.content)
        stream = _ask(url, provider, stream=True)
        said.add("".join(part.choices[0].delta.content or "" for part in stream))
    must(len(said) == 1, "three providers, one text")
    return {"providers": 3}


def completions(url: str) -> dict[str, Any]:
    """`text_completion`."""
    done = litellm.text_completion(
        prompt=PROMPT, api_base=f"{url}/v1", api_key="-",
        **{**GREEDY, "model": f"text-completion-openai/{MODEL}"},
    )  # fmt: skip
    must(bool(done.choices[0].text), "a text")
    return {"characters": len(done.choices[0].text)}


def tools_and_schemas(url: str) -> dict[str, Any]:
    """A forced call and a schema by each of OpenAI's providers, and both in one request."""
    for provider in ("openai", "hosted_vllm"):
        called = _ask(url, provider, tools=[TOOL], tool_choice="required", **FORCED)
        (call, *_) = called.choices[0].message.tool_calls
        Area(**json.loads(call.function.arguments))
        parsed = _ask(url, provider, response_format=Area, **FORCED).choices[0].message
        Area(**json.loads(parsed.content))
        both = _ask(url, provider, response_format=Area, tools=[TOOL],
                    parallel_tool_calls=False, **FORCED)  # fmt: skip
        message = both.choices[0].message
        calls = [call.function.arguments for call in message.tool_calls or []]
        for text in calls or [message.content]:
            Area(**json.loads(text))
        history = [*MESSAGES, called.choices[0].message.model_dump(),
                   {"role": "tool", "tool_call_id": call.id, "content": "4"}]  # fmt: skip
        _ask(url, provider, messages=history)
    return {"providers": 2}


def responses(url: str) -> dict[str, Any]:
    """`litellm.responses`."""
    done: Any = litellm.responses(
        model=f"openai/{MODEL}", input="def area(", max_output_tokens=40, store=False,
        api_base=f"{url}/v1", api_key="-",
    )  # fmt: skip
    must(bool(done.output[0].content[0].text), "a text")
    return {"items": len(done.output)}


if __name__ == "__main__":
    run(chat, completions, tools_and_schemas, responses)
