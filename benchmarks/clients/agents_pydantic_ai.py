"""Pydantic AI: its three ways to a typed result, by OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from benchmarks.clients.checks import MODEL, NO_CALL, Area, must, run

SETTINGS: Any = {"max_tokens": 200, "temperature": 0.8, "seed": 3}


def _provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(
        openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    )


def _typed(model: Any, output: Any, settings: Any = SETTINGS) -> dict[str, Any]:
    agent: Agent[None, Any] = Agent(model, output_type=output, model_settings=settings, retries=5)
    done = agent.run_sync("def area(width, height):")
    must(isinstance(done.output, Area), "the result has its type")
    again = agent.run_sync("Again.", message_history=done.all_messages())
    must(isinstance(again.output, Area), "with the history of the first")
    return {"requests": done.usage.requests + again.usage.requests}


def chat_tool_output(url: str) -> dict[str, Any]:
    """A forced call."""
    return _typed(OpenAIChatModel(MODEL, provider=_provider(url)), ToolOutput(Area))


def chat_native_output(url: str) -> dict[str, Any]:
    """`response_format`."""
    return _typed(OpenAIChatModel(MODEL, provider=_provider(url)), NativeOutput(Area))


def chat_prompted_output(url: str) -> dict[str, Any]:
    """`json_object`, which any object would satisfy; the schema comes as this server's option."""
    schema = {"structured_outputs": {"json": Area.model_json_schema()}, "response_format": None}
    settings = {**SETTINGS, "extra_body": schema}
    return _typed(OpenAIChatModel(MODEL, provider=_provider(url)), PromptedOutput(Area), settings)


def chat_tools_beside_output(url: str) -> dict[str, Any]:
    """A tool and a native result in one request: the answer is a call or the result."""
    model = OpenAIChatModel(MODEL, provider=_provider(url))
    agent: Agent[None, Any] = Agent(model, output_type=NativeOutput(Area), retries=5)
    calls: list[str] = []

    @agent.tool_plain
    def width(of: Literal["a", "b"]) -> int:
        """The width of a thing."""
        calls.append(of)
        return 4

    settings = {**SETTINGS, "parallel_tool_calls": False, "logit_bias": NO_CALL}
    for seed in range(8):
        done = agent.run_sync("area = ", model_settings={**settings, "seed": seed})
        must(isinstance(done.output, Area), "the result has its type")
    return {"calls": len(calls)}


def chat_stream(url: str) -> dict[str, Any]:
    """A text as it comes."""

    async def ask() -> int:
        agent = Agent(OpenAIChatModel(MODEL, provider=_provider(url)), model_settings=SETTINGS)
        async with agent.run_stream("def area(width, height):") as stream:
            parts = [part async for part in stream.stream_text(delta=True)]
        return len(parts)

    return {"parts": asyncio.run(ask())}


def responses_tool_output(url: str) -> dict[str, Any]:
    """A forced call over `/v1/responses`."""
    settings = {"max_tokens": 200, "temperature": 0.8}
    return _typed(OpenAIResponsesModel(MODEL, provider=_provider(url)), ToolOutput(Area), settings)


def responses_native_output(url: str) -> dict[str, Any]:
    """`text.format` over `/v1/responses`."""
    settings = {"max_tokens": 200, "temperature": 0.8}
    model = OpenAIResponsesModel(MODEL, provider=_provider(url))
    return _typed(model, NativeOutput(Area), settings)


def messages_tool_output(url: str) -> dict[str, Any]:
    """A forced call over `/v1/messages`."""
    client = AsyncAnthropic(base_url=url, api_key="-", max_retries=0)
    model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    return _typed(model, ToolOutput(Area), {"max_tokens": 200})


if __name__ == "__main__":
    run(
        chat_tool_output,
        chat_native_output,
        chat_prompted_output,
        chat_tools_beside_output,
        chat_stream,
        responses_tool_output,
        responses_native_output,
        messages_tool_output,
    )
