"""The commands that README.md and docs/ show, and which of them run where.

`make test` lets the real parser read every one (`tests/project/test_documented.py`) and runs those
that are in neither list below; `make trial` runs those of `SLOW`, too. Commands are the lines of
`sh` blocks, lines of other blocks that begin with `$ `, and `code` in the text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT, progress

START = re.compile(r"(?:foretoken|make|python -m|curl) ?")
# Of commands that the text names: what stands for a value that readers choose, and what those lack
# that are named without it.
PLACES = {
    "PROMPT": "'def f():'", "[MESSAGE]": "Hello --model path/to/checkpoint", "MODEL": "tiny-python",
    "--model …": "--model tiny-python", "--temperature …": "--temperature 0.8",
    "--speculative-config …": """--speculative-config '{"method": "ngram"}'""",
}  # fmt: skip
LACKING = {
    "foretoken generate": " 'def f():'",
    "foretoken generate --trace": " 'def f():'",
    "foretoken train-eagle3": " --data prompts.jsonl --output head",
}
# By how they begin, with the reason.
SLOW = {
    "foretoken demo": "10 s", "foretoken audit": "60,000 draws of each subject",
    "foretoken bench": "minutes of load", "foretoken plan": "times steps for half a minute",
    "curl": "needs a server on port 8000, which a trial starts",
}  # fmt: skip
PARSED = {
    "foretoken bench --model benchmarks/shapes/": "needs a GPU with 40 GB",
    "foretoken --install-completion": "changes the settings of the user's shell",
    "curl --cacert": "needs a server with a certificate; tests/serve/test_deploy.py has one",
    "foretoken serve": "runs until it is ended; tests/serve/ starts servers",
    "foretoken train-eagle3": "trains for hours",
    "make": "may install packages first; what its targets run is here by itself",
    "python -m": "measures for minutes or hours, some of them on a GPU",
}
SERVER = "http://127.0.0.1:8000"
PATIENCE = 1800.0  # seconds for a command, on a busy machine


class Documented(NamedTuple):
    """A command in a document, as a shell takes it, and the lines that it is said to print."""

    document: str
    line: str
    shown: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        words = shlex.split(self.line.replace("$'", "'"), comments=True)
        return words[: words.index("<")] if "<" in words else words

    @property
    def slow(self) -> bool:
        return begins(self.line, SLOW) and not self.only_parsed

    @property
    def only_parsed(self) -> bool:
        return begins(self.line, PARSED)


def begins(line: str, places: dict[str, str]) -> bool:
    return any(re.match(rf"{re.escape(place)}(?!(?<=\w)[\w-])", line) for place in places)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    text = document.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[Documented]:
    found: dict[str, Documented] = {}
    for document in documents():
        name = document.relative_to(ROOT).as_posix()
        for language, block in blocks(document):
            lines = block if language == "sh" else "".join(re.findall(r"^\$ (.*\n)", block, re.M))
            shown = () if language == "sh" else tuple(block.splitlines()[1:])
            for line in _joined(lines):
                found.setdefault(line, Documented(name, line, shown))
        prose = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.M | re.S)
        for code in re.findall(r"`([^`\n]+)`", prose):
            if START.match(code) and " " in code:
                line = code
                for place, value in PLACES.items():
                    line = line.replace(place, value)
                line += LACKING.get(line, "")
                found.setdefault(line, Documented(name, line))
    return [*found.values()]


def _joined(block: str) -> Iterator[str]:
    """The commands of a shell block, without comments; several lines of one command are joined."""
    text = ""
    for line in block.replace("\\\n", " ").splitlines():
        text += line
        try:
            shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on
            text += "\n"
            continue
        if START.match(text):
            yield re.split(r"\s+#\s", text)[0].strip()
        text = ""


def prepare(folder: Path) -> Path:
    from foretoken.models.locate import resolve_checkpoint

    for name, source in {
        "path/to/checkpoint": "tiny-python",
        "path/to/model": "tiny-python",
        "path/to/draft": "tiny-python-draft",
        "head": "tiny-python-eagle3",
    }.items():
        made = folder / name
        made.mkdir(parents=True)
        for file in resolve_checkpoint(source).iterdir():
            (made / file.name).symlink_to(file)
    turns = [{"role": "user", "content": "import os\n"}]
    verifier = dict(blocks(ROOT / "docs" / "audit.md"))["python"]
    for name, text in {
        "prompt.py": "import os\n",
        "project.txt": "import os\nimport sys\n",
        "module.py": "import os\nimport sys\n",
        "messages.json": json.dumps(turns),
        "chats.jsonl": "".join(
            json.dumps({"prompt": f"import os  # {i}\n"}) + "\n" for i in range(8)
        ),
        "prompts.jsonl": "".join(
            json.dumps({"prompt": f"def f{i}():\n"}) + "\n" for i in range(64)
        ),
        "my_verifier.py": verifier,
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    return folder


def run(command: Documented, folder: Path) -> list[str]:
    wanted = 2 if command.shown and command.shown[0].startswith("Error:") else 0
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-c", command.line], cwd=folder, env=os.environ | {"PATH": places},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"{command.line}: it took more than {PATIENCE:.0f} s"]
    if done.returncode == wanted:
        return []
    last = " / ".join(done.stdout.strip().splitlines()[-3:])
    return [f"{command.line} ({command.document}): exit code {done.returncode}: {last}"]


def run_all() -> tuple[int, list[str]]:
    """Run every command that is not in `PARSED`; returns their number and the failures."""
    todo = [command for command in commands() if not command.only_parsed]
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for command in progress(todo, "commands of the documents"):
            with serving(":8000" in command.line):
                failures += run(command, folder)
    return len(todo), failures


@contextmanager
def serving(wanted: bool) -> Iterator[None]:
    """A server on port 8000, as docs/server.md starts one, if wanted."""
    if not wanted:
        yield
        return
    server = subprocess.Popen([sys.executable, "-m", "foretoken", "serve", "tiny-python"])
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{SERVER}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.25)
        yield
    finally:
        server.terminate()
        server.wait()
