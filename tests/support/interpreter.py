"""Triton's interpreter: processes in which kernels are interpreted, in half the time.

Triton decides when it is imported whether kernels are compiled or interpreted, so the interpreter
needs a process that starts with TRITON_INTERPRET=1. There, `quicken` keeps what the interpreter
otherwise works out anew: it patches all of `triton.language` for every call of a function, and
builds a type and a shape for every result. What is computed and refused stays the same.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def interpret(*command: str) -> str:
    """What `python -m command` prints where kernels are interpreted; it must end well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", *command],  # numpy's, of infinities
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def few_each_time(names: Iterable[str], few: Iterable[str]) -> list[Any]:
    """Parameters of a test: `few` run at every commit, the others in `make trial`."""
    return [pytest.param(name, marks=[] if name in few else pytest.mark.trial) for name in names]


def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Every `name` for which this session runs a test that asks for the requesting fixture."""
    found = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        asks = request.fixturename in getattr(item, "fixturenames", ())
        if item.path == request.path and asks and "name" in parameters:
            found[parameters["name"]] = None
    return list(found)


def interpret_tests(file: str, which: str = "") -> None:
    """Run a file's tests of that `-k`, at least one, where kernels are interpreted."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning")
    assert " passed" in interpret("pytest", *options, file, "-k", which)


def quicken() -> None:
    """Patch this process's interpreter."""
    importlib.import_module("triton.experimental.gluon")  # its import fails once `tl` is patched
    tl: Any = importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core, patch = tl.core, interpreter._patch_lang
    patched: set[tuple[bool, ...]] = set()

    @functools.cache
    def patch_once(fn: Any) -> Any:
        visible = tuple(any(x is lang for x in fn.__globals__.values()) for lang in (tl, core))
        if visible not in patched:
            patched.add(visible)
            patch(fn)
            # Triton 3.6 asks NumPy for the `int` of one row, which NumPy 2.4 and later refuse.
            core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        return interpreter._LangPatchScope()  # restores nothing

    of_scalar, of_pointer = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)

    def numpy_type(kind: Any) -> Any:
        scalar = kind.scalar
        return of_pointer if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    @functools.cache
    def shapes(sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """Of a type, and its numel; of a tensor, and its numel."""
        wrapped = core.tuple([core.constexpr(size) for size in sizes])
        numel = core.validate_block_shape(sizes)
        return core.tuple(sizes), numel, wrapped, core.constexpr(math.prod(sizes))

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes((*kind.shape.values,) if kind.is_block() else ())[2:]

    def make_block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if not sizes:
            raise TypeError("a block has at least one dimension")
        self.element_ty = element
        self.shape, self.numel = shapes(sizes)[:2]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_type
    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_block
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    builder = interpreter.interpreter_builder  # it finds overflow, and does not report it
    builder.options = replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    quicken()
