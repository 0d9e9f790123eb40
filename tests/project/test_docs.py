"""What the documents say about the tree and about the measurements is true."""

from __future__ import annotations

import re
from pathlib import Path

from tests.project.source import PACKAGE, ROOT

TREE_LINE = re.compile(r"^(?P<indent> +)(?P<name>[\w.\-]+/?)(?:\s.*)?$")
SKIPPED_DIRECTORIES = {"__pycache__", "lib"}  # `lib`: compiled kernels
MOST_LINES = 250
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def tree_in(document: str, top: str) -> set[str]:
    for block in re.findall(r"```(?:text)?\n(.*?)```", document, flags=re.DOTALL):
        lines = block.splitlines()
        if lines and lines[0].split()[0] == top:
            break
    else:
        raise AssertionError(f"no tree that starts with {top}")
    found: set[str] = set()
    stack: list[tuple[int, str]] = []
    for line in lines[1:]:
        match = TREE_LINE.match(line)
        assert match, f"not `name  description`: {line}"
        indent, name = len(match["indent"]), match["name"]
        while stack and stack[-1][0] >= indent:
            stack.pop()
        prefix = "".join(part for _, part in stack)
        found.add(prefix + name)
        if name.endswith("/"):
            stack.append((indent, name))
    return found


def sources(top: Path) -> list[Path]:
    return [
        path
        for path in sorted(top.rglob("*"))
        if not SKIPPED_DIRECTORIES & {*path.relative_to(top).parts}
        and (path.is_dir() or path.suffix in (".py", ".cpp", ".h"))
    ]


def named_files(document: str) -> set[str]:
    """Paths and names of files between backticks."""
    names = re.findall(r"`([\w.\-]+(?:/[\w.\-]+)*/?)`", document)
    return {name for name in names if "/" in name or re.search(r"\.(py|cpp|h|md|txt)$", name)}


def test_architecture_is_short() -> None:
    assert ARCHITECTURE.count("\n") <= MOST_LINES


def test_the_tree_in_architecture_has_every_folder_and_nothing_else() -> None:
    said, found = tree_in(ARCHITECTURE, "src/foretoken/"), sources(PACKAGE)
    assert [name for name in said if not (PACKAGE / name).exists()] == []
    folders = {f"{path.relative_to(PACKAGE)}/" for path in found if path.is_dir()}
    assert folders - said == set(), "there, but not named"


def test_architecture_names_only_files_that_exist() -> None:
    bare = {path.name for path in sources(PACKAGE)}  # a file next to one that was named in full
    named = named_files(ARCHITECTURE)
    assert len(named) > 50
    missing = {
        name for name in named - bare if not any((top / name).exists() for top in (ROOT, PACKAGE))
    }
    assert missing == set()


def test_the_tests_of_architecture_can_fail() -> None:
    document = "```text\nsrc/x/\n  a.py   first\n  b/     folder\n    c.py second\n```\n"
    assert tree_in(document, "src/x/") == {"a.py", "b/", "b/c.py"}
    text = "`a.py` and `b/c.py`, `Stack.run`, `/v1/models`, `p / q`, `b/`, `method`"
    assert named_files(text) == {"a.py", "b/c.py", "b/"}


def has_charter(path: Path, text: str) -> bool:
    if path.suffix == ".cpp" and path.with_suffix(".h").exists():
        return True
    return text.startswith('"""' if path.suffix == ".py" else "//")


def test_every_source_begins_with_its_charter() -> None:
    """The tree of ARCHITECTURE.md has only folders; files describe themselves."""
    texts = {p: p.read_text(encoding="utf-8") for p in sources(PACKAGE) if p.is_file()}
    without = [str(p.relative_to(ROOT)) for p, text in texts.items() if not has_charter(p, text)]
    assert without == []
    assert not has_charter(PACKAGE / "x.py", "import os\n")
    assert not has_charter(PACKAGE / "x.h", "#pragma once\n")


def test_links_between_documents_resolve() -> None:
    bad = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if not (path.parent / target).exists():
                bad.append(f"{path.relative_to(ROOT)} -> {target}")
    assert not bad, "\n".join(bad)


TESTS = ROOT / "tests"


def unlisted(document: str, files: set[str]) -> tuple[set[str], set[str]]:
    """(files that no row names, by themselves or by their folder; names in rows without a file)."""
    named = set(re.findall(r"\| `([\w/.]+)` \|$", document, flags=re.MULTILINE))
    folders = tuple(name for name in named if name.endswith("/"))
    left_out = {file for file in files - named if not file.startswith(folders)}
    return left_out, {name for name in named if not any(f.startswith(name) for f in files)}


def test_every_test_file_is_listed_by_what_it_shows() -> None:
    files = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    left_out, in_vain = unlisted((TESTS / "README.md").read_text(encoding="utf-8"), files)
    assert left_out == set(), "in tests/, but not in tests/README.md"
    assert in_vain == set(), "in tests/README.md, but not in tests/"


def test_the_list_of_tests_can_be_wrong() -> None:
    rows = "| what | `a/test_b.py` |\n| more | `c/` |\n| gone | `d/test_e.py` |\n"
    found = unlisted(rows, {"a/test_b.py", "a/test_f.py", "c/test_g.py"})
    assert found == ({"a/test_f.py"}, {"d/test_e.py"})


def test_the_list_of_rare_tests_names_tests_that_exist() -> None:
    """A line that matches no test would leave its test in `make test`, unnoticed."""
    lines = (ROOT / "tests" / "trial.txt").read_text(encoding="utf-8").splitlines()
    for line in filter(lambda line: line and not line.startswith("#"), lines):
        file, _, test = line.replace("\\.py", ".py", 1).partition("::")
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        wanted = re.compile(test.partition(r"\[")[0])
        assert any(map(wanted.fullmatch, re.findall(r"def (test_\w+)", source))), line
