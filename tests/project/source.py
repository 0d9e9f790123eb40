"""What the project tests share: the package's modules, parsed once."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "foretoken"


@dataclass(frozen=True)
class Module:
    name: str  # dotted, for example foretoken.ops.types
    path: Path
    tree: ast.Module
    lines: int

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path, ast.parse(text), text.count("\n"))
    return found


def imports(module: Module, *, type_checking: bool) -> set[str]:
    """Modules of foretoken that `module` imports, at any depth of nesting.
    Imports under `if TYPE_CHECKING` run for the type checker only; they count if asked for.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if guarded and not type_checking:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.package.split(".")
                base = ".".join(up[: len(up) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in modules() else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(module.tree)
    return {name for name in found if name in modules() and name != module.name}


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def where(module: Module, node: ast.stmt | ast.expr) -> str:
    return f"{module.path.relative_to(ROOT)}:{node.lineno}"
