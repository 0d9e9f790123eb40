"""llama.cpp's server on the loopback, with the same weights.

A server has one K and one number of threads for its whole life, so each case has its own; between
requests they sleep. What a request took is what the server says of it (prompt and generation), so
that it is not charged for HTTP, JSON and the waking of threads, which calls of `LLM` do without.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Ids = list[int]
CONTEXT = 2048  # what the embedded pair was trained with
START_SECONDS = 60.0
ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Model:
    """What a server runs: GGUF files; without a draft K is 0."""

    target: Path
    draft: Path | None = None
    k: int = 0


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    pid: int
    port: int

    def complete(
        self, prompt: Ids, max_tokens: int, temperature: float, seed: int
    ) -> tuple[Ids, float]:
        """The new tokens, and the seconds that the server spent on them, prefill included.

        Raises:
            RuntimeError: it refused, or gave another number of tokens.
        """
        request = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": temperature,
            "samplers": ["temperature"] if temperature else ["top_k"],
            "top_k": 1,  # read at temperature 0 only
            "seed": seed,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        status, answer = self.ask("POST", "/completion", request)
        if status != http.client.OK:
            raise RuntimeError(f"llama-server refused with status {status}: {answer}")
        tokens, timings = answer["tokens"], answer["timings"]
        if len(tokens) != max_tokens:
            raise RuntimeError(f"llama-server gave {len(tokens)} tokens in place of {max_tokens}")
        return tokens, (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(
                method, path, body and json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def version(binary: Path) -> str:
    """What the binary says of its version."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).partition("version: ")[2].partition("\n")[0]


@contextmanager
def serve(binary: Path, model: Model, threads: int, folder: Path) -> Iterator[Server]:
    """A server with its log in `folder`, on the cores of this process; it ends with the block."""
    port = free_port()
    log = folder / f"llama-server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments(binary, model, threads, port), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = Server(process.pid, port)
        await_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        process.wait()


def arguments(binary: Path, model: Model, threads: int, port: int) -> list[str]:
    """The command: one request at a time, no memory of earlier prompts.

    The rest are its defaults. So is a cache of keys and values in half precision, with which it was
    1.04 to 1.19 times as fast as with float32 (plain and K=5, one and two threads), tokens equal.
    """
    options = {
        "--model": model.target,
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": threads,
        "--threads-batch": threads,
        "--ctx-size": CONTEXT,
        "--parallel": 1,
        "--cache-ram": 0,
    }
    if model.draft is not None:
        options |= {
            "--model-draft": model.draft,
            "--spec-type": "draft-simple",
            "--spec-draft-n-max": model.k,
            "--spec-draft-n-min": 0,
            "--spec-draft-p-min": 0,  # always K drafts
            "--threads-draft": threads,
            "--threads-batch-draft": threads,
        }
    return [str(binary), *(str(word) for option in options.items() for word in option)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def await_ready(server: Server, process: subprocess.Popen, log: Path) -> None:
    """Return when the server has loaded its models; `RuntimeError` with its last words if not."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            if server.ask("GET", "/health")[0] == http.client.OK:
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.05)
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    raise RuntimeError(f"llama-server ended or took {START_SECONDS:g} s to start:\n{last}")
