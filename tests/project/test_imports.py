"""Imports go one way, never in a circle, and stay light where they must."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.project.source import ROOT, Module, imports, modules
from tests.support.asynchronous import PATIENCE

# Low to high. A module may import from its own component and from lower ones.
LAYERS = [
    {"config", "errors", "foreign", "interrupts", "outputs", "progress"},
    {"ops"},
    {"sampling"},
    {"slots"},
    {"cache"},
    {"models"},
    {"drafting"},
    {"engine"},
    {"llm", "async_engine"},
    {"serve"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
RANK = {component: rank for rank, layer in enumerate(LAYERS) for component in layer}
DATA_ONLY = {"assets"}
TORCH_FREE = [
    "foretoken.config",
    "foretoken.errors",
    "foretoken.foreign",
    "foretoken.interrupts",
    "foretoken.outputs",
    "foretoken.progress",
    "foretoken.sampling.params",
    "foretoken.cache.block_pool",
    "foretoken.drafting.control",
    "foretoken.engine.control",
    "foretoken.engine.pace",
    "foretoken.engine.request",
    "foretoken.engine.scheduler",
    "foretoken.lab.reporter",
    "foretoken.lab.plan.simulate",
]


def component(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def steps_upward(module: Module, imported: set[str]) -> list[str]:
    mine = component(module.name)
    bad = []
    for name in sorted(imported):
        theirs = component(name)
        if theirs in ("", mine) or theirs in DATA_ONLY:
            continue  # the facade `foretoken` itself only carries the version
        if RANK[theirs] > RANK[mine] or (RANK[theirs] == RANK[mine] > 0):
            bad.append(f"{module.name} imports {name}")
    return bad


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for following in sorted(graph.get(node, ())):
            if cycle := visit(following):
                return cycle
        path.pop()
        done.add(node)
        return None

    for node in sorted(graph):
        if cycle := visit(node):
            return cycle
    return None


def test_every_component_has_a_rank() -> None:
    components = {component(name) for name in modules()} - {""} - DATA_ONLY
    assert components <= set(RANK), components - set(RANK)


def test_imports_go_one_way() -> None:
    bad = [
        step
        for module in modules().values()
        if component(module.name) not in ("", *DATA_ONLY)
        for step in steps_upward(module, imports(module, type_checking=True))
    ]
    assert not bad, "\n".join(bad)


def test_models_and_drafters_reach_backends_through_their_contract() -> None:
    bad = [
        f"{module.name} imports {name}"
        for module in modules().values()
        if component(module.name) in ("sampling", "cache", "models", "drafting")
        for name in imports(module, type_checking=True)
        if name.startswith("foretoken.ops.backends.")
    ]
    assert not bad, "\n".join(bad)


SERVERS = {"fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client", "ray"}
OF_RAY = {"deployment", "fleet.command", "fleet.replica", "fleet.router"}
"""Modules of `serve` that may import Ray, which is an extra of its own."""


def test_libraries_of_the_server_are_imported_in_it_alone() -> None:
    found = {
        module.name
        for module in modules().values()
        for node in ast.walk(module.tree)
        if SERVERS & {name.split(".")[0] for name in imported_names(node)}
    }
    assert "foretoken.serve.app" in found
    assert {component(name) for name in found} == {"serve"}


def test_ray_is_imported_where_it_is_used_alone() -> None:
    found = {
        module.name.removeprefix("foretoken.serve.")
        for module in modules().values()
        for node in ast.walk(module.tree)
        if "ray" in {name.split(".")[0] for name in imported_names(node)}
    }
    assert found == OF_RAY


def imported_names(node: ast.AST) -> list[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return names + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])


def test_no_import_cycle() -> None:
    facade = {"foretoken"}  # names the public classes, imports them only when asked
    graph = {
        name: imports(module, type_checking=False) - facade
        for name, module in modules().items()
        if name not in facade
    }
    assert find_cycle(graph) is None


def test_the_direction_test_can_fail() -> None:
    low = modules()["foretoken.config"]
    assert steps_upward(low, {"foretoken.cli"}) == ["foretoken.config imports foretoken.cli"]
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_benchmarks_import_nothing_from_tests() -> None:
    """What both need lies in the package, where users have it too."""
    bad = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if imports_tests(node)
    ]
    assert not bad, "\n".join(bad)
    assert imports_tests(ast.parse("from tests.support import laws").body[0])


def imports_tests(node: ast.AST) -> bool:
    return any(name.split(".")[0] in ("tests", "pytest") for name in imported_names(node))


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_no_torch(name: str) -> None:
    code = f"import sys, {name}; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_import_foretoken_is_light_and_quick() -> None:
    """Quick by the number of modules: a machine's speed and load have no say."""
    code = (
        "import sys; before = len(sys.modules); import foretoken;"
        "print(len(sys.modules) - before); print([m for m in ('torch', 'transformers', 'typer',"
        " 'rich', 'numpy', 'fastapi') if m in sys.modules])"
    )
    modules, heavy = run_python(code).splitlines()
    assert heavy == "[]"
    assert int(modules) <= 50
