"""LangChain's `ChatOpenAI` and `OpenAI`: texts, streams, tools, three ways to a typed result."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from benchmarks.clients.checks import MODEL, PROMPT, Area, must, run


@tool
def width(of: Literal["a", "b"]) -> int:
    """The width of a thing."""
    return {"a": 4, "b": 5}[of]


def _chat(url: str, **more: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 200, **more}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="-", model=MODEL, max_retries=0, **given)


def chat(url: str) -> dict[str, Any]:
    """A chat whole, streamed, and two in a batch; its usage."""
    model = _chat(url, temperature=0, max_tokens=40, stream_usage=True)
    whole = model.invoke("def area(width, height):")
    parts = list(model.stream("def area(width, height):"))
    must("".join(str(part.content) for part in parts) == whole.content, "a stream is the whole")
    must(whole.usage_metadata is not None, "usage")
    must(len(model.batch(["a = ", "b = "])) == 2, "a batch")
    return {"parts": len(parts)}


def completions(url: str) -> dict[str, Any]:
    """A completion whole and streamed."""
    model = OpenAI(base_url=f"{url}/v1", api_key="-", model=MODEL, temperature=0, max_tokens=40)
    whole = model.invoke(PROMPT)
    must("".join(model.stream(PROMPT)) == whole, "a stream is the whole")
    return {"characters": len(whole)}


def tools(url: str) -> dict[str, Any]:
    """A forced call, its result, and the whole conversation sent back."""
    model = _chat(url)
    question = HumanMessage("The width of a?")
    forced = model.bind_tools([width], tool_choice="any", parallel_tool_calls=False)
    called = forced.invoke([question])
    must(bool(called.tool_calls), "a call")
    results = [
        ToolMessage(str(width.invoke(call["args"])), tool_call_id=call["id"])
        for call in called.tool_calls
    ]
    model.bind_tools([width]).invoke([question, called, *results])
    chunks = list(forced.stream([question]))
    must(any(chunk.tool_call_chunks for chunk in chunks), "a streamed call")
    return {"calls": len(called.tool_calls)}


def typed(url: str) -> dict[str, Any]:
    """`with_structured_output` by a schema, by a call, and as the schema beside tools."""
    model = _chat(url)
    for method in ("json_schema", "function_calling"):
        asked = model.with_structured_output(Area, method=method)
        must(isinstance(asked.invoke("area = "), Area), method)
    answer = model.with_structured_output(None, method="json_mode").invoke("As JSON: ")
    must(isinstance(answer, dict), "json_mode")
    one = _chat(url, extra_body={"parallel_tool_calls": False})
    both = one.with_structured_output(
        Area, method="json_schema", tools=[width], include_raw=True, strict=True
    )
    given: Any = both.invoke("area = ")
    must(bool(given["raw"].tool_calls) or isinstance(given["parsed"], Area), "a call or the schema")
    return {"ways": 4}


def responses(url: str) -> dict[str, Any]:
    """The same model over `/v1/responses`."""
    model = _chat(url, seed=None, use_responses_api=True, store=False)
    first = model.invoke("def area(width, height):")
    must(bool(first.text), "a text")
    model.invoke([HumanMessage("a"), first, HumanMessage("b")])
    must(isinstance(model.with_structured_output(Area).invoke("area = "), Area), "a schema")
    must(bool(model.bind_tools([width], tool_choice="any").invoke("a").tool_calls), "a call")
    return {"requests": 4}


if __name__ == "__main__":
    run(chat, completions, tools, typed, responses)
