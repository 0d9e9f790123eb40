"""Budgets that only tighten: sizes, parameters, and things that never belong in the package."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter

import pytest

from tests.project.source import PACKAGE, ROOT, functions, modules, where

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 8
MAX_TREE = 48 * 2**20  # bytes of what a clone checks out
MAX_SUPPORT_LINES = 2100  # of tests/support in all
# Functions with published parameters keep the limit that they have.
WIDE_CONTRACTS = {
    "foretoken.models.attention": 9  # the signature that Transformers calls
}
SUPPORT = ROOT / "tests" / "support"


def python_files() -> list[str]:
    folders = ("src", "tests", "benchmarks", "training")
    return sorted(
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


@pytest.mark.parametrize("name", python_files())
def test_file_length(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES


def test_length_of_native_sources() -> None:
    sources = list((PACKAGE / "ops" / "backends" / "native" / "csrc").iterdir())
    assert sources
    lines = {path.name: path.read_text(encoding="utf-8").count("\n") for path in sources}
    assert {name: n for name, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_length_of_what_tests_share() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in SUPPORT.rglob("*.py")}
    assert 0 < sum(text.count("\n") for text in files.values()) <= MAX_SUPPORT_LINES


def test_size_of_the_tree() -> None:
    """A clone keeps every file for ever."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    total = sum(path.stat().st_size for path in paths if path.is_file())
    assert total <= MAX_TREE, f"{total / 2**20:.1f} MiB"


def test_no_test_helper_is_dead() -> None:
    """A name that `tests/support` defines occurs elsewhere, too: in a test or in another helper."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in SUPPORT.parent.rglob("*.py"))
    times = Counter(re.findall(r"\w+", tests))
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SUPPORT.rglob("*.py")
        for name in defined(ast.parse(path.read_text(encoding="utf-8")))
        if times[name] < 2
    ]
    assert not dead, "\n".join(dead)


def defined(tree: ast.Module) -> list[str]:
    found = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found


def test_function_length() -> None:
    bad = [
        f"{where(module, node)} {node.name}: {length} lines"
        for module in modules().values()
        for node in functions(module)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1)
        > (MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES)
    ]
    assert not bad, "\n".join(bad)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Code of a device, called by kernels or launched by a host function, which is counted."""
    return any(
        ast.unparse(decorator).startswith(("triton.", "gluon."))
        for decorator in node.decorator_list
    )


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters a caller must think of: `self` and `cls` are not among them."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(1 for arg in named if arg.arg not in ("self", "cls"))


def test_parameter_count() -> None:
    bad = [
        f"{where(module, node)} {node.name}: {count} parameters"
        for module in modules().values()
        for node in functions(module)
        if not is_kernel(node)
        and (count := parameter_count(node)) > WIDE_CONTRACTS.get(module.name, MAX_PARAMETERS)
    ]
    assert not bad, "\n".join(bad)


def test_environment_is_read_in_config_alone() -> None:
    bad = [
        where(module, node)
        for module in modules().values()
        if not module.name.startswith("foretoken.config")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert not bad, "\n".join(bad)


def test_no_assert_in_the_package() -> None:
    bad = [
        where(module, node)
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
    ]
    assert not bad, "raise a typed error instead:\n" + "\n".join(bad)


def test_no_unsafe_loading() -> None:
    """Weights come from safetensors only: nothing here can run code found in a file."""
    bad = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            if names & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}:
                bad.append(where(module, node))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "eval"):
                bad.append(where(module, node))
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                off = isinstance(node.value, ast.Constant) and node.value.value is False
                bad.extend([] if off else [where(module, node.value)])
    assert not bad, "\n".join(bad)
