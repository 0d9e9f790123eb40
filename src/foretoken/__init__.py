"""Foretoken: exactly lossless speculative decoding for language models.

    from foretoken import LLM, SamplingParams
    llm = LLM(model="tiny-python", speculative_config={"method": "draft_model"})
    print(llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).outputs[0].text)

Heavy libraries are imported when first needed: `import foretoken` itself loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.async_engine import AsyncEngine
    from foretoken.config import EngineConfig, SpeculativeConfig
    from foretoken.errors import ForetokenError
    from foretoken.llm import LLM
    from foretoken.sampling.params import SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "foretoken.llm",
    "AsyncEngine": "foretoken.async_engine",
    "SamplingParams": "foretoken.sampling.params",
    "EngineConfig": "foretoken.config",
    "SpeculativeConfig": "foretoken.config",
    "ForetokenError": "foretoken.errors",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "ForetokenError",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
