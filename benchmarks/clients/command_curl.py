"""`curl`, as the README has it: a stream of events; an error has its status and body."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks.clients.checks import GREEDY, PROMPT, must, run


def _sent(url: str, body: dict[str, Any]) -> tuple[str, str]:
    words = ["curl", "-sN", "-w", "\n%{http_code}", f"{url}/v1/completions", "-d", json.dumps(body)]
    words += ["-H", "Content-Type: application/json"]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    text, _, status = told.rpartition("\n")
    return text, status


def stream_and_error(url: str) -> dict[str, Any]:
    """A stream to its end, and what is refused."""
    text, status = _sent(url, {"prompt": PROMPT, "stream": True, **GREEDY})
    events = [line for line in text.splitlines() if line]
    must(status == "200" and events[-1] == "data: [DONE]", "curl reads a stream to its end")
    refused, status = _sent(url, {"prompt": PROMPT, "max_tokens": -1})
    error = json.loads(refused)["error"]
    must(status == "400" and error["param"] == "max_tokens", "curl reads an error")
    return {"events": len(events)}


if __name__ == "__main__":
    run(stream_and_error)
