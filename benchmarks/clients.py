"""Public clients, unmodified, against `foretoken serve`: what each asks for, and what it reads.

    python -m benchmarks.clients --aiperf ~/aiperf/bin/aiperf

The SDKs of OpenAI and Anthropic are among the development tools; `curl` is the system's. The load
generator has many requirements (no PyTorch, 1.2 GB), and so an environment of its own; where there
is none, it is left out, and the results file says so:

    python -m venv ~/aiperf && ~/aiperf/bin/pip install aiperf
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import openai
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.common import DRAFT, TARGET, arguments, record
from benchmarks.served import served
from benchmarks.structured import TEMPLATE
from foretoken.lab.results import Row
from foretoken.models import resolve_checkpoint

MESSAGES: Any = [{"role": "user", "content": "def area(width, height):"}]
PROMPT = "def fibonacci(n):\n"
GREEDY: Any = {"model": TARGET, "max_tokens": 40, "temperature": 0}
FORCED: Any = {"model": TARGET, "max_tokens": 200, "seed": 3}
PER_REQUEST = {  # aiperf's name: the counter that our `/metrics` has for it
    "total_spec_decode_steps": "vllm:spec_decode_num_drafts",
    "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
}


class Area(BaseModel):
    """What answers are bound to."""

    model_config = ConfigDict(extra="forbid")

    w: Annotated[int, Field(ge=0, le=99)]
    of: Literal["a", "b"]


def must(holds: bool, what: str) -> None:
    """Fail by name."""
    if not holds:
        raise SystemExit(f"NOT as expected: {what}")


def openai_sync(url: str) -> dict[str, int]:
    """Whole and streamed answers are one text; usage and metrics come with the last chunk."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        must([model.id for model in client.models.list()] == [TARGET], "models.list")
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
        chat = client.chat.completions.create(messages=MESSAGES, **GREEDY)
        parts = client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
        must(said == chat.choices[0].message.content, "a streamed chat is the whole one")
        asked: Any = {"model": TARGET, "input": MESSAGES[0]["content"], "store": False}
        answer = client.responses.create(max_output_tokens=40, temperature=0, **asked)
        must(answer.output_text == said, "a response is the chat's text")
    return {"chunks": len(chunks), "drafts": block["num_spec_steps"]}


def openai_async(url: str) -> dict[str, int]:
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


def openai_tools(url: str) -> dict[str, int]:
    """A forced call, whole and through the SDK's own accumulation of a stream; a parsed schema."""
    tool = openai.pydantic_function_tool(Area, name="area")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        asked: Any = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required",
                      "parallel_tool_calls": False, **FORCED}  # fmt: skip
        done = client.chat.completions.parse(**asked)
        (call, *_) = done.choices[0].message.tool_calls or ()
        must(isinstance(call.function.parsed_arguments, Area), "a call's arguments are parsed")
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        (again, *_) = streamed.message.tool_calls or ()
        must(
            again.function.arguments == call.function.arguments, "a streamed call is the whole one"
        )
        must(streamed.finish_reason == "tool_calls", "finish_reason of calls")
        parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Area, **FORCED)
        must(isinstance(parsed.choices[0].message.parsed, Area), "a schema's answer is parsed")
    return {"calls": 2, "parsed": 2}


def anthropic_messages(url: str) -> dict[str, int]:
    """A message whole and streamed, and a forced call of a tool, both ways."""
    tool = {"name": "area", "input_schema": Area.model_json_schema()}
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        greedy: Any = {"model": TARGET, "max_tokens": 40, "extra_body": {"temperature": 0}}
        done = client.messages.create(messages=MESSAGES, **greedy)
        said = "".join(block.text for block in done.content if block.type == "text")
        with client.messages.stream(messages=MESSAGES, **greedy) as stream:
            must("".join(stream.text_stream) == said, "a streamed message is the whole one")
            final = stream.get_final_message()
        must(final.usage.output_tokens == done.usage.output_tokens == 40, "usage of messages")
        choice = {"type": "tool", "name": "area", "disable_parallel_tool_use": True}
        forced: Any = {"tools": [tool], "tool_choice": choice,
                       "model": TARGET, "max_tokens": 200, "extra_body": {"seed": 3}}  # fmt: skip
        called = client.messages.create(messages=MESSAGES, **forced)
        with client.messages.stream(messages=MESSAGES, **forced) as stream:
            again = stream.get_final_message()
        inputs = [
            block.input for m in (called, again) for block in m.content if block.type == "tool_use"
        ]
        must(called.stop_reason == again.stop_reason == "tool_use", "stop_reason of calls")
        must(inputs[0] == inputs[-1] == Area(**inputs[0]).model_dump(), "a streamed call's input")
    return {"calls": len(inputs)}


def curl(url: str) -> dict[str, int]:
    """The README's words: a stream of events; an error has its status and body."""

    def run(path: str, body: dict[str, Any]) -> tuple[str, str]:
        words = ["curl", "-sN", "-w", "\n%{http_code}", url + path, "-d", json.dumps(body)]
        words += ["-H", "Content-Type: application/json"]
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
        text, _, status = told.rpartition("\n")
        return text, status

    text, status = run("/v1/completions", {"prompt": PROMPT, "stream": True, **GREEDY})
    events = [line for line in text.splitlines() if line]
    must(status == "200" and events[-1] == "data: [DONE]", "curl reads a stream to its end")
    refused, status = run("/v1/completions", {"prompt": PROMPT, "max_tokens": -1})
    error = json.loads(refused)["error"]
    must(status == "400" and error["param"] == "max_tokens", "curl reads an error")
    return {"events": len(events)}


def load(url: str, aiperf: str, kind: str, *more: str) -> tuple[dict[str, float], list[str]]:
    """What aiperf found of speculation, per request and at `/metrics`, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [aiperf, "profile", "--model", TARGET, "--url", url, "--endpoint-type", kind, *more,
                 "--tokenizer", str(resolve_checkpoint(TARGET)), "--concurrency", "4",
                 "--request-count", "40", "--synthetic-input-tokens-mean", "64",
                 "--output-tokens-mean", "48", "--extra-inputs", "ignore_eos:true",
                 "--ui", "simple", "--artifact-dir", folder]  # fmt: skip
        paths = f"{Path(aiperf).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "PATH": paths}, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        must(done.returncode == 0, f"aiperf ends with 0: {done.stdout[-2000:]}")
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        scraped = json.loads((Path(folder) / "server_metrics_export.json").read_text())["metrics"]
    shown = re.search(r"[^\n]*Metrics: Spec Decode.*?Accepted drafts per step[^\n]*", done.stdout,
                      re.DOTALL)  # fmt: skip
    must(shown is not None, "aiperf prints a table of speculation")
    values = {name: found[name]["avg"] for name in found if "spec_decode" in name and
              isinstance(found[name], dict) and "avg" in found[name]}  # fmt: skip
    values |= {name: found[name]["avg"] for name in ("request_count", *PER_REQUEST)}
    for name, counter in PER_REQUEST.items():
        (series,) = scraped[counter]["series"]
        values[f"scraped {counter}"] = series["stats"]["total"]
        must(series["stats"]["total"] == found[name]["avg"], f"{counter} is the answers' sum")
    return values, shown[0].splitlines() if shown else []


CLIENTS: dict[str, tuple[str, Callable[[str], dict[str, int]]]] = {
    "openai: sync, streams, responses": ("openai", openai_sync),
    "openai: async": ("openai", openai_async),
    "openai: tools and structured output": ("openai", openai_tools),
    "anthropic: messages, streams, tools": ("anthropic", anthropic_messages),
}


def main() -> None:
    """Each client in turn; the first that does not find what it must ends the run."""
    parser = arguments(__doc__)
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), help="its executable")
    options = parser.parse_args()
    rows, notes = [], []
    with served("--chat-template", TEMPLATE, "--tool-call-parser", "hermes") as server:
        for name, (package, ask) in CLIENTS.items():
            found: dict[str, Any] = ask(server.url)
            rows.append(Row(name, {"version": version(package)}, found))
            print(rows[-1], flush=True)
        if shutil.which("curl"):
            said = subprocess.run(["curl", "--version"], capture_output=True, text=True).stdout
            rows.append(Row("curl", {"version": said.split()[1]}, curl(server.url)))
            print(rows[-1], flush=True)
        else:
            notes.append("skipped: there is no curl")
        if options.aiperf:
            told = subprocess.run([options.aiperf, "--version"], capture_output=True, text=True)
            for kind, more in (("completions", ("--streaming",)), ("chat", ())):
                values, shown = load(server.url, options.aiperf, kind, *more)
                case = f"aiperf: {kind}, {'streamed' if more else 'whole'}"
                rows.append(Row(case, {"version": told.stdout.strip()}, values))
                notes += [f"printed by {case}:", *shown]
                print(rows[-1], *shown, sep="\n", flush=True)
        else:
            notes.append("skipped: there is no aiperf; see the top of benchmarks/clients.py")
    print(*(note for note in notes if note.startswith("skipped")), sep="\n", file=sys.stderr)
    record("clients", options, {"target": TARGET, "draft": DRAFT, "K": 4}, rows, notes)


if __name__ == "__main__":
    main()
