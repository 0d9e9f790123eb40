"""aiperf: load by both APIs, and what it reads of speculation, in answers and at `/metrics`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.checks import MODEL, must, run

TOKENIZER = Path(__file__).parents[2] / "src" / "foretoken" / "assets" / MODEL
PER_REQUEST = {  # aiperf's name: the counter that our `/metrics` has for it
    "total_spec_decode_steps": "vllm:spec_decode_num_drafts",
    "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
}


def _load(url: str, kind: str, *more: str) -> dict[str, Any]:
    folder_of_python = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        words = [str(folder_of_python / "aiperf"), "profile", "--model", MODEL, "--url", url,
                 "--endpoint-type", kind, *more,
                 "--tokenizer", str(TOKENIZER), "--concurrency", "4",
                 "--request-count", "40", "--synthetic-input-tokens-mean", "64",
                 "--output-tokens-mean", "48", "--extra-inputs", "ignore_eos:true",
                 "--ui", "simple", "--artifact-dir", folder]  # fmt: skip
        paths = f"{folder_of_python}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "PATH": paths}, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        must(done.returncode == 0, f"aiperf ends with 0: {done.stdout[-2000:]}")
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        scraped = json.loads((Path(folder) / "server_metrics_export.json").read_text())["metrics"]
    shown = re.search(r"Metrics: Spec Decode.*?Accepted drafts per step", done.stdout, re.DOTALL)
    must(shown is not None, "aiperf prints a table of speculation")
    names = ("request_count", "spec_decode_token_weighted_acceptance_length",
             "spec_decode_overall_draft_acceptance_rate", *PER_REQUEST)  # fmt: skip
    values: dict[str, Any] = {name: found[name]["avg"] for name in names}
    for name, counter in PER_REQUEST.items():
        (series,) = scraped[counter]["series"]
        must(series["stats"]["total"] == found[name]["avg"], f"{counter} is the answers' sum")
    return values


def completions_streamed(url: str) -> dict[str, Any]:
    """Forty completions, four at once."""
    return _load(url, "completions", "--streaming")


def chat_whole(url: str) -> dict[str, Any]:
    """The same as chats."""
    return _load(url, "chat")


if __name__ == "__main__":
    run(completions_streamed, chat_whole)
