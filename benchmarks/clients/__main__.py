"""Public clients, unmodified, against `foretoken serve`: which of their checks pass.

    python -m benchmarks.clients --install --environments ~/clients

Clients pin versions of the same packages, and some bring a gigabyte, so each group has a virtual
environment of its own: `--install` makes those that are missing from the registry. A group without
an environment is left out, and the results file says so; OpenAI's and Anthropic's SDKs are among
the development tools. Each client is a module of this folder that its own interpreter runs on the
server's address; it prints one line of JSON for each check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.clients.checks import MODEL
from benchmarks.common import DRAFT, ROOT, arguments, record
from benchmarks.served import served
from foretoken.lab.results import Row


class Client(NamedTuple):
    """A client: the module that drives it, the package whose version counts, its environment."""

    module: str
    package: str
    environment: str = ""


REQUIREMENTS = {
    "agents": ["openai-agents", "pydantic-ai-slim[openai,anthropic]"],
    "frameworks": ["langchain-openai", "instructor", "anthropic", "jsonref"],
    "litellm": ["litellm"],
    "lm_eval": ["lm_eval[api]", "pydantic"],
    "guidellm": ["torch==2.13.0", "guidellm"],
    "aiperf": ["aiperf"],
}
CLIENTS = (
    Client("sdk_openai", "openai"),
    Client("sdk_anthropic", "anthropic"),
    Client("command_curl", "curl"),
    Client("agents_openai", "openai-agents", "agents"),
    Client("agents_pydantic_ai", "pydantic-ai-slim", "agents"),
    Client("framework_langchain", "langchain-openai", "frameworks"),
    Client("framework_instructor", "instructor", "frameworks"),
    Client("framework_litellm", "litellm", "litellm"),
    Client("tool_lm_eval", "lm_eval", "lm_eval"),
    Client("tool_guidellm", "guidellm", "guidellm"),
    Client("tool_aiperf", "aiperf", "aiperf"),
)


def install(folder: Path) -> None:
    """Make the environments that are not there."""
    for name, packages in REQUIREMENTS.items():
        if _interpreter(folder, name).exists():
            continue
        print(f"Installing {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        words = [_interpreter(folder, name), "-m", "pip", "--quiet", "install", *packages]
        subprocess.run(words, check=True)


def _interpreter(folder: Path, environment: str) -> Path:
    return folder / environment / "bin" / "python" if environment else Path(sys.executable)


def version(python: Path, package: str) -> str:
    """Of the package, as the client's own environment has it."""
    if package == "curl":
        told = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True)
        return told.stdout.split()[1]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def checked(client: Client, python: Path, url: str) -> Iterator[Row]:
    """One row for each check of a client; one that ends early is a failure, too."""
    told = version(python, client.package)
    done = subprocess.run(
        [python, "-m", f"benchmarks.clients.{client.module}", url],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        lines += [{"check": "the module ends", "error": f"exit code {done.returncode}"}]
    for line in lines:
        case = f"{client.package}: {line['check']}"
        labels = {"client": client.package, "version": told, "check": line["check"]}
        if "error" in line:
            labels["error"] = line["error"]
        yield Row(case, labels, {"passes": int("error" not in line), **line.get("found", {})})


def main() -> None:
    """All clients in turn, one server for all; fails if a check did."""
    parser = arguments(__doc__)
    parser.add_argument("--environments", type=Path, default=Path.home() / "clients")
    parser.add_argument("--install", action="store_true", help="make those that are missing")
    parser.add_argument("--only", nargs="*", help="modules; by default all")
    options = parser.parse_args()
    if options.install:
        install(options.environments)
    rows: list[Row] = []
    notes: list[str] = []
    with served("--max-num-seqs", "16") as server:
        for client in CLIENTS:
            if options.only and client.module not in options.only:
                continue
            python = _interpreter(options.environments, client.environment)
            if not python.exists():
                notes.append(f"left out: {client.package}, which has no environment")
                continue
            for row in checked(client, python, server.url):
                print(row, flush=True)
                rows.append(row)
    failed = [row.case for row in rows if not row.values["passes"]]
    notes += [f"failed: {case}" for case in failed]
    print(*notes, f"{len(rows) - len(failed)} of {len(rows)} checks pass", sep="\n")
    if not options.only:
        record("clients", options, {"target": MODEL, "draft": DRAFT, "K": 4}, rows, notes)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
