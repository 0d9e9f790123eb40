"""Instructor: a typed result in every mode that OpenAI's and Anthropic's APIs have, and streamed.

Some modes only ask in words for JSON, or for calls; the embedded model cannot follow words. There
`extra_body` has the server force what was asked for; the rest of the body, and how the answer is
read, are the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import instructor
import openai
from instructor import Mode

from benchmarks.clients.checks import MODEL, Area, Check, must, run

SCHEMA = Area.model_json_schema()
FENCED = r'```json\n\{"w": [0-9]{1,2}, "of": "(a|b)"\}\n```'
IN_WORDS = {Mode.MD_JSON: {"structured_outputs": {"regex": FENCED}},
            Mode.JSON: {"response_format": None, "structured_outputs": {"json": SCHEMA}},
            Mode.PARALLEL_TOOLS: {"tool_choice": "required",
                                  "parallel_tool_calls": False}}  # fmt: skip
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "area = "}],
              "max_retries": 1}  # fmt: skip
OPENAI = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON, Mode.JSON_O1, Mode.JSON_SCHEMA,
          Mode.MD_JSON, Mode.PARALLEL_TOOLS, Mode.RESPONSES_TOOLS)  # fmt: skip
ANTHROPIC = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON, Mode.ANTHROPIC_PARALLEL_TOOLS)


def _openai_mode(mode: Any) -> Check:
    def check(url: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as sdk:
            client: Any = instructor.from_openai(sdk, mode=mode)
            more: Any = {"extra_body": IN_WORDS.get(mode, {}), "max_tokens": 200}
            if mode == Mode.RESPONSES_TOOLS:
                more = {"max_output_tokens": 200, "store": False}
            if mode == Mode.PARALLEL_TOOLS:
                found = client.create(response_model=Iterable[Area], **ASKED, **more)
                must(all(isinstance(one, Area) for one in found), "every call has its type")
                return {}
            must(isinstance(client.create(response_model=Area, **ASKED, **more), Area), "a result")
            if mode not in IN_WORDS and mode != Mode.RESPONSES_TOOLS:
                parts = list(client.create_partial(response_model=Area, **ASKED, **more))
                must(parts[-1].of in ("a", "b"), "a streamed result")
        return {}

    check.__name__ = f"{mode.name.lower()}, openai"
    return check


def _anthropic_mode(mode: Any) -> Check:
    def check(url: str) -> dict[str, Any]:
        with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as sdk:
            client: Any = instructor.from_anthropic(sdk, mode=mode)
            more: Any = {"max_tokens": 200}
            if mode == Mode.ANTHROPIC_JSON:
                more["extra_body"] = {"output_format": {"type": "json_schema", "schema": SCHEMA}}
            if mode == Mode.ANTHROPIC_PARALLEL_TOOLS:
                more["extra_body"] = {
                    "tool_choice": {"type": "any", "disable_parallel_tool_use": True}
                }
                found = client.create(response_model=Iterable[Area], **ASKED, **more)
                must(all(isinstance(one, Area) for one in found), "every call has its type")
                return {}
            must(isinstance(client.create(response_model=Area, **ASKED, **more), Area), "a result")
        return {}

    check.__name__ = f"{mode.name.lower().removeprefix('anthropic_')}, anthropic"
    return check


def modes() -> list[Callable[[str], dict[str, Any]]]:
    """One check for each mode."""
    return [*map(_openai_mode, OPENAI), *map(_anthropic_mode, ANTHROPIC)]


if __name__ == "__main__":
    run(*modes())
