"""OpenAI's Agents SDK: tools and a typed result in one request, by both of its models, streamed."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from benchmarks.clients.checks import MODEL, NO_CALL, Area, must, run

SETTINGS = ModelSettings(temperature=0.8, max_tokens=200, tool_choice="required",
                         parallel_tool_calls=False, store=False,
                         extra_body={"logit_bias": NO_CALL})  # fmt: skip


def _agent(model: Any, calls: list[str]) -> Agent[None]:
    """An agent that must call its tool first, and then calls it again or answers with an `Area`."""

    @function_tool
    def width(of: Literal["a", "b"]) -> int:
        """The width of a thing."""
        calls.append(of)
        return 4

    return Agent(name="a", instructions="Answer.", model=model, tools=[width], output_type=Area,
                 model_settings=SETTINGS)  # fmt: skip


def _asked(url: str, kind: Any) -> dict[str, Any]:
    set_tracing_disabled(True)

    async def ask() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            calls: list[str] = []
            agent = _agent(kind(model=MODEL, openai_client=client), calls)
            done = await Runner.run(agent, "The width of a?", max_turns=30)
            must(isinstance(done.final_output, Area), "the result has its type")
            streamed = Runner.run_streamed(agent, "The width of a?", max_turns=30)
            events = [event async for event in streamed.stream_events()]
            must(isinstance(streamed.final_output, Area), "the streamed result has its type")
        must(bool(calls), "the tool was called")
        return {"calls": len(calls), "events": len(events)}

    return asyncio.run(ask())


def chat_completions(url: str) -> dict[str, Any]:
    """Over `/v1/chat/completions`."""
    return _asked(url, OpenAIChatCompletionsModel)


def responses(url: str) -> dict[str, Any]:
    """Over `/v1/responses`."""
    return _asked(url, OpenAIResponsesModel)


if __name__ == "__main__":
    run(chat_completions, responses)
