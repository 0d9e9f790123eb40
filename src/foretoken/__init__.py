"""Foretoken: exactly lossless speculative decoding for language models.

    from foretoken import LLM, SamplingParams
    llm = LLM(model="tiny-python", speculative_config={"method": "draft_model"})
    print(llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].outputs[0].text)

Heavy libraries are imported when first needed: `import foretoken` itself loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.async_engine import AsyncEngine as AsyncEngine
    from foretoken.config import EngineConfig as EngineConfig
    from foretoken.config import SpeculativeConfig as SpeculativeConfig
    from foretoken.engine.boundary import TextPrompt as TextPrompt
    from foretoken.engine.boundary import TokensPrompt as TokensPrompt
    from foretoken.errors import AbsentError as AbsentError
    from foretoken.errors import CapacityError as CapacityError
    from foretoken.errors import CheckpointError as CheckpointError
    from foretoken.errors import ConfigError as ConfigError
    from foretoken.errors import EngineBrokenError as EngineBrokenError
    from foretoken.errors import EngineMemoryError as EngineMemoryError
    from foretoken.errors import ForetokenError as ForetokenError
    from foretoken.errors import IntegrityError as IntegrityError
    from foretoken.errors import NonFiniteLogitsError as NonFiniteLogitsError
    from foretoken.errors import OverloadedError as OverloadedError
    from foretoken.errors import ProcessingError as ProcessingError
    from foretoken.errors import RequestError as RequestError
    from foretoken.errors import StepError as StepError
    from foretoken.errors import UnsupportedModelError as UnsupportedModelError
    from foretoken.errors import UsageError as UsageError
    from foretoken.llm import LLM as LLM
    from foretoken.outputs import CompletionDelta as CompletionDelta
    from foretoken.outputs import CompletionOutput as CompletionOutput
    from foretoken.outputs import Logprob as Logprob
    from foretoken.outputs import RequestDelta as RequestDelta
    from foretoken.outputs import RequestOutput as RequestOutput
    from foretoken.sampling.params import RequestOutputKind as RequestOutputKind
    from foretoken.sampling.params import SamplingParams as SamplingParams
    from foretoken.sampling.params import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

# By module, its public names. A module is imported when one of its names is first used.
_NAMES = {
    "llm": "LLM",
    "async_engine": "AsyncEngine",
    "config": "EngineConfig SpeculativeConfig",
    "engine.boundary": "TextPrompt TokensPrompt",
    "errors": (
        "AbsentError CapacityError CheckpointError ConfigError EngineBrokenError "
        "EngineMemoryError ForetokenError IntegrityError NonFiniteLogitsError OverloadedError "
        "ProcessingError RequestError StepError UnsupportedModelError UsageError"
    ),
    "outputs": "CompletionDelta CompletionOutput Logprob RequestDelta RequestOutput",
    "sampling.params": "RequestOutputKind SamplingParams StructuredOutputsParams",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}
if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = ["__version__", *_PLACES]


def __dir__() -> list[str]:
    return ["__version__", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _PLACES:
        if not name.startswith("_"):
            foreign = import_module("foretoken.foreign")
            if name in foreign.NAMES:  # a name of vLLM's: using it raises, and says what to write
                return foreign.absent_name(name)
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    return getattr(import_module(f"foretoken.{_PLACES[name]}"), name)
