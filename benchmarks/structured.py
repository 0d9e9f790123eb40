"""Answers that a schema forces, through the server with drafts: how many of them are valid.

    python -m benchmarks.structured --requests 500

A third are chats with `response_format`, a third calls of a function that is forced, a third
`/v1/responses` with `text.format`; at temperature 0.8, 16 at once, by the embedded pair with K = 5.
Each answer is checked by another implementation of JSON schema than the one that made its masks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.common import DRAFT, TARGET, parse, record
from benchmarks.served import in_thread
from foretoken import AsyncEngine
from foretoken.lab.results import Row
from foretoken.serve.options import ServeOptions

SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "integer", "minimum": -5, "maximum": 500}}, "required": ["a"]},
    {"properties": {"kind": {"enum": ["é", 'q"', 3, None]}}, "required": ["kind"]},
    {"properties": {"list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2,
                             "maxItems": 6}}, "required": ["list"]},
    {"properties": {"x": {"$ref": "#/$defs/X"}, "y": {"$ref": "#/$defs/X"}},
     "required": ["x", "y"], "$defs": {"X": {"type": "string", "maxLength": 12}}},
    {"properties": {"at": {"type": "string", "format": "date"}, "n": {"type": "number"}},
     "required": ["at"]},
    {"properties": {"u": {"anyOf": [{"type": "null"}, {"pattern": "^[a-f]{4}$", "type": "string"}]},
                    "v": {"type": "null"}}, "required": ["u", "v"]},
    {"properties": {"o": {"type": "object", "properties": {"p": {"const": 1}},
                          "additionalProperties": {"type": "integer"}}}, "required": ["o"]},
]  # fmt: skip


def asked(number: int, tokens: int) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """Request of this number: its kind, path and body, and the schema that it asks for."""
    schema = {"type": "object", "additionalProperties": False, **SCHEMAS[number % len(SCHEMAS)]}
    text = "assert load(path) == "
    body: dict[str, Any] = {"seed": number, "temperature": 0.8}
    kind = ("chat", "tools", "responses")[number % 3]
    if kind == "responses":
        form = {"type": "json_schema", "name": "x", "schema": schema}
        more = {"input": text, "text": {"format": form}, "max_output_tokens": tokens}
        return kind, "/v1/responses", body | more, schema
    body |= {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    if kind == "chat":
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return kind, "/v1/chat/completions", body | {"response_format": form}, schema
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forced = {"tools": [function], "tool_choice": "required", "parallel_tool_calls": False}
    return kind, "/v1/chat/completions", body | forced, schema


def read(kind: str, answer: dict[str, Any]) -> tuple[bool, str]:
    """Whether an answer was cut by length, and its JSON."""
    if kind == "responses":
        return answer["status"] != "completed", answer["output"][-1]["content"][0]["text"]
    choice = answer["choices"][0]
    is_cut, message = choice["finish_reason"] == "length", choice["message"]
    if kind == "tools" and not is_cut:
        return False, message["tool_calls"][0]["function"]["arguments"]
    return is_cut, message["content"]


def as_value(text: str) -> Any:
    """JSON as it is checked: a number that no float holds is a number, too."""
    most = sys.float_info.max
    return json.loads(text, parse_float=lambda digits: min(max(float(digits), -most), most))


async def measure(url: str, requests: int, tokens: int) -> tuple[Counter[str], Counter[str]]:
    """Outcomes by kind of request, and drafts."""
    found, drafts, turns = Counter[str](), Counter[str](), asyncio.Semaphore(16)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        kind, path, body, schema = asked(number, tokens)
        async with turns:
            answer = (await client.post(path, json=body)).json()
        is_cut, text = read(kind, answer)
        is_valid = not is_cut and jsonschema_rs.is_valid(schema, as_value(text))
        if not is_valid and not is_cut:
            print(f"invalid: request {number}, {schema}: {text!r}")
        found[f"{kind}_{'cut' if is_cut else 'valid' if is_valid else 'invalid'}"] += 1
        metrics = answer["metrics"]["speculative_decoding"]
        drafts["drafted"] += metrics["num_draft_tokens"]
        drafts["accepted"] += metrics["num_accepted_draft_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(ask(client, number) for number in range(requests)))
    return found, drafts


def main() -> None:
    """Count, record, and fail if one is invalid."""
    options = parse(__doc__, requests=500, tokens=300)
    engine = AsyncEngine(
        TARGET, {"method": "draft_model", "num_speculative_tokens": 5}, threads=1
    )  # fmt: skip
    with in_thread(engine, ServeOptions()) as server:
        found, drafts = asyncio.run(measure(server.url, options.requests, options.tokens))
    rows = []
    for kind in ("chat", "tools", "responses"):
        counts = {name: found[f"{kind}_{name}"] for name in ("valid", "cut", "invalid")}
        rows.append(Row(kind, {"kind": kind}, counts))
        print(rows[-1])
    rows.append(Row("drafts", {"kind": "all"}, dict(drafts)))
    num_invalid = sum(count for name, count in found.items() if name.endswith("invalid"))
    notes = [f"invalid: {num_invalid} of {options.requests}, those cut by length not judged"]
    shapes = {"target": TARGET, "draft": DRAFT, "tokens": options.tokens, "K": 5, "at_once": 16}
    record("structured", options, shapes, rows, notes)
    if num_invalid:
        raise SystemExit(notes[0])


if __name__ == "__main__":
    main()
