"""What the documents say about the tree and about the measurements is true."""

from __future__ import annotations

import re
from pathlib import Path

from tests.project.source import PACKAGE, ROOT

TREE_LINE = re.compile(r"^(?P<indent> +)(?P<name>[\w.\-]+/?)(?:\s.*)?$")
SKIPPED_DIRECTORIES = {"__pycache__", "lib"}  # `lib`: compiled kernels


def tree_in(document: str, top: str) -> set[str]:
    """Paths named in the fenced block that starts with the line `top`; folders end in a slash."""
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


def real_tree(top: Path) -> set[str]:
    """Folders and sources below `top`; `__init__.py` of a subfolder goes without saying, and so
    does the header of a C++ file."""
    found = set()
    for path in top.rglob("*"):
        relative = path.relative_to(top)
        if SKIPPED_DIRECTORIES & set(relative.parts):
            continue
        if path.is_dir():
            found.add(f"{relative}/")
        elif (
            (path.suffix == ".py" and (path.name != "__init__.py" or path.parent == top))
            or path.suffix == ".cpp"
            or (path.suffix == ".h" and not path.with_suffix(".cpp").exists())
        ):
            found.add(str(relative))
    return found


def test_the_tree_in_architecture_is_the_real_tree() -> None:
    said = tree_in((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), "src/foretoken/")
    real = real_tree(PACKAGE)
    assert said - real == set(), "named, but not there"
    assert real - said == set(), "there, but not named"


def test_the_tree_test_can_fail() -> None:
    document = "```text\nsrc/x/\n  a.py   first\n  b/     folder\n    c.py second\n```\n"
    assert tree_in(document, "src/x/") == {"a.py", "b/", "b/c.py"}


def test_architecture_names_only_files_that_exist() -> None:
    document = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks|training)/[\w./-]+)`", document)
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_links_between_documents_resolve() -> None:
    bad = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if not (path.parent / target).exists():
                bad.append(f"{path.relative_to(ROOT)} -> {target}")
    assert not bad, "\n".join(bad)


TESTS = ROOT / "tests"


def unlisted(document: str, files: set[str]) -> tuple[set[str], set[str]]:
    """(files that no row names, alone or by their folder; names of rows that name no file)."""
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
