"""The native backend in other forms: by another library, or with another class of stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from foretoken.ops import Backend, ForwardOutput, get_backend
from foretoken.ops.backends.native import build, library
from foretoken.ops.backends.native.stack import NativeStack

VARIANTS = [
    variant
    for variant in build.VARIANTS.get(build.platform.machine(), {"none": []})
    if library.NEEDS.get(variant, set()) <= library.cpu_features()
]
"""The libraries that this processor can run, whether they are built or not."""


@contextmanager
def use_library(variant: str) -> Iterator[Any]:
    """Inside, all kernels of this process are those of one library, which is yielded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.VARIANT, variant)
        _choose_again()
        try:
            kernels = library.load()
            assert kernels._name.endswith(f"-{variant}.so")
            yield kernels
        finally:
            library.set_num_threads(1)
            _choose_again()


def built_variants() -> list[str]:
    built = [variant for variant in VARIANTS if build.library_path(variant).exists()]
    if len(built) < 2:
        pytest.skip(f"this machine runs {built} only")
    return built


def _choose_again() -> None:
    library.choose_variant.cache_clear()
    library.load.cache_clear()


def native_backend_with_logits(change: Callable[[Tensor], Tensor]) -> Any:
    """The native backend, with kernels that give other logits."""

    class Changed(NativeStack):
        def run(self, *args: Any, **options: Any) -> ForwardOutput:
            output = super().run(*args, **options)
            return output._replace(logits_NV=change(output.logits_NV))

    return native_backend(Changed)


def native_backend(load_stack: Callable[..., Any]) -> Any:
    return Backend("native", replace(get_backend("native")._kernels, load_stack=load_stack))
