"""Foretoken: exactly lossless speculative decoding for language models.

    from foretoken import LLM, SamplingParams
    llm = LLM(model="tiny-python", speculative_config={"method": "draft_model"})
    print(llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].outputs[0].text)

Heavy libraries are imported when first needed: `import foretoken` itself loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.async_engine import AsyncEngine
    from foretoken.config import EngineConfig, SpeculativeConfig
    from foretoken.engine.prompts import TextPrompt, TokensPrompt
    from foretoken.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineMemoryError,
        ForetokenError,
        IntegrityError,
        NonFiniteLogitsError,
        OverloadedError,
        ProcessingError,
        RequestError,
        StepError,
        UnsupportedModelError,
        UsageError,
    )
    from foretoken.llm import LLM
    from foretoken.outputs import (
        CompletionDelta,
        CompletionOutput,
        Logprob,
        RequestDelta,
        RequestOutput,
    )
    from foretoken.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CapacityError",
    "CheckpointError",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineMemoryError",
    "ForetokenError",
    "IntegrityError",
    "Logprob",
    "NonFiniteLogitsError",
    "OverloadedError",
    "ProcessingError",
    "RequestDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StepError",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
]
_PLACES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "SamplingParams": "sampling.params",
    "EngineConfig": "config",
    "SpeculativeConfig": "config",
    "TextPrompt": "engine.prompts",
    "TokensPrompt": "engine.prompts",
    "CompletionDelta": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestDelta": "outputs",
    "RequestOutput": "outputs",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"foretoken.{_PLACES.get(name, 'errors')}"), name)
