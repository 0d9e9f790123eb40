"""Tensor functions of sampling, verification and attention: one contract, several backends.

A backend is a folder under `ops/backends/` and a name in `BACKENDS`. All backends keep the contract
of `Backend` (`ops/dispatch.py`) and draw equal tokens for equal logits and noise. `reference` is
the fp64 oracle in the papers' notation; the others are fast.

Noise does not depend on the state of a generator: it is a function of the sample's 64-bit key and
of a counter (group, position, draft index, stream); see `Stream`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from foretoken.errors import ConfigError
from foretoken.ops.dispatch import Backend, draft_cache

from foretoken.ops.stack import (  # isort: skip
    DraftRound, ForwardOutput, LoadedStack, RoundStack, Stack, UnfitError,
)  # fmt: skip
from foretoken.ops.types import (  # isort: skip
    DRAFT, RESIDUAL, TARGET, AttentionBatch, AttentionOptions, DraftBlock, DraftCache, Edits,
    Evidence, Logprobs, Noise, Rows, Rule, SlotParams, Stream, Verdict, VerifyBatch,
)  # fmt: skip

__all__ = [
    "BACKENDS", "DRAFT", "RESIDUAL", "TARGET", "AttentionBatch", "AttentionOptions", "Backend",
    "DraftBlock", "DraftCache", "DraftRound", "Edits", "Evidence", "ForwardOutput", "LoadedStack",
    "Logprobs", "Noise", "RoundStack", "Rows", "Rule", "SlotParams", "Stack", "Stream",
    "UnfitError", "Verdict", "VerifyBatch", "draft_cache", "get_backend", "unavailable",
]  # fmt: skip

BACKENDS = ("reference", "torch", "native", "triton")
"""Folders with two functions: `available()` and `load()`, which returns `Kernels`."""


def unavailable(name: str) -> str | None:
    """Why this backend cannot run here, None if it can; `ConfigError` for an unknown name."""
    reason: str | None = _package(name).available()
    return reason


def get_backend(name: str, *, deterministic: bool = False) -> Backend:
    """Load a backend by name (`deterministic`: see `EngineConfig`); `ConfigError` if there is no
    such backend, or if it cannot run here."""
    if (reason := unavailable(name)) is not None:
        raise ConfigError("backend", name, "one that runs here", f"This one cannot: {reason}.")
    return _load(name, deterministic)


@cache
def _load(name: str, deterministic: bool) -> Backend:
    return Backend(name, _package(name).load(), deterministic)


def _package(name: str) -> Any:
    if name not in BACKENDS:
        former = {"torch_cpu": "torch", "native_cpu": "native"}
        hint = f"It is called `{former[name]}` now." if name in former else ""
        raise ConfigError("backend", name, f"one of {', '.join(BACKENDS)}", hint)
    return import_module(f"foretoken.ops.backends.{name}")
