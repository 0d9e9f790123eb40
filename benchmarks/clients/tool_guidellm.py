"""guidellm: load by three of OpenAI's APIs, with the tokens that it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.checks import MODEL, must, run

TOKENIZER = Path(__file__).parents[2] / "src" / "foretoken" / "assets" / MODEL
REQUESTS = 20
OUTPUT_TOKENS = 32


def _load(url: str, path: str) -> dict[str, Any]:
    """Twenty requests, four at once: all succeed, with as many tokens as were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress",
                 "--backend", f"kind=openai_http,target={url},model={MODEL},request_format={path}",
                 "--profile", "kind=concurrent,streams=4",
                 "--constraint", f"kind=max_requests,count={REQUESTS}",
                 "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
                 "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
                 "--output", f"kind=json,path={folder}/found.json"]  # fmt: skip
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        must(done.returncode == 0, f"guidellm ends with 0: {done.stdout[-1500:]}")
        found = json.loads((Path(folder) / "found.json").read_text())["benchmarks"][0]["metrics"]
    must(found["request_totals"]["successful"] == REQUESTS, "every request succeeds")
    tokens = found["output_token_count"]["successful"]
    must(tokens["min"] == tokens["max"] == OUTPUT_TOKENS, "as many tokens as were asked for")
    steps = found["output_tokens_per_iteration"]["successful"]["mean"]
    must(steps > 1, "several tokens in a chunk, where drafts were accepted")
    return {"requests": REQUESTS, "tokens_per_chunk": round(steps, 2)}


def chat(url: str) -> dict[str, Any]:
    """Streamed chats."""
    return _load(url, "/v1/chat/completions")


def completions(url: str) -> dict[str, Any]:
    """Streamed completions."""
    return _load(url, "/v1/completions")


def responses(url: str) -> dict[str, Any]:
    """Streamed responses."""
    return _load(url, "/v1/responses")


if __name__ == "__main__":
    run(chat, completions, responses)
