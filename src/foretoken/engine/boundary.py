"""Between users and the engine: prompts and parameters in, outputs out.

Charter: what `LLM` and `AsyncEngine` share. Whatever is wrong with one prompt becomes a typed error
here; whatever is given out is a copy that later steps do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.engine.engine import Engine
from foretoken.engine.request import Request, RequestGroup
from foretoken.errors import ForetokenError, ProcessingError, RequestError
from foretoken.models.chat import ChatPrompt
from foretoken.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foretoken.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


def submit(
    engine: Engine, request_id: str, prompt: Prompt | ChatPrompt, params: SamplingParams
) -> RequestGroup:
    """Encode a prompt and queue it; nothing is queued if it raises.

    Raises:
        RequestError, CapacityError: it cannot be served as asked.
        ProcessingError: the tokenizer raised.
    """
    try:
        text, ids = _encode(engine.tokenizer, prompt)
        return engine.add(request_id, ids, params, text)
    except ForetokenError:
        raise
    except Exception as error:
        raise ProcessingError(
            f"request {request_id}: {type(error).__name__} while its prompt was encoded: {error}"
        ) from error


def build_output(engine: Engine, group: RequestGroup) -> RequestOutput:
    """What a request has so far."""
    samples = [_completion(engine, request) for request in group.samples]
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt,
        prompt_token_ids=[*group.prompt_ids],
        outputs=samples,
        metrics=group.metrics.copy(),
        prompt_logprobs=None if group.prompt_logprobs is None else [*group.prompt_logprobs],
        error=group.error,
    )


def unserved(request_id: str, prompt: Any, error: ForetokenError | None = None) -> RequestOutput:
    """The output of a prompt that never reached the engine; its caller adds samples, if any."""
    text = prompt if isinstance(prompt, str) else None
    ids = [] if text is not None else as_list(prompt) or []
    return RequestOutput(request_id, text, ids, [], RequestMetrics(), error=error)


def one_params(given: Any) -> SamplingParams:
    """Parameters as a user may give them; None means the defaults."""
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    if isinstance(given, Mapping):
        return SamplingParams.parse(given)
    raise RequestError("sampling_params", given, "a SamplingParams or a dict of its fields")


def as_list(value: Any) -> list[Any] | None:
    """A sequence, array or tensor as a list; None for anything else, texts and bytes included."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        return None
    return list(value)


def _encode(tokenizer: Any | None, prompt: Prompt | ChatPrompt) -> tuple[str | None, list[int]]:
    if isinstance(prompt, ChatPrompt):
        return prompt.encode()
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "prompt",
                prompt,
                "token ids: this checkpoint has no tokenizer",
                "Encode it first.",
            )
        return prompt, list(tokenizer.encode(prompt)) if prompt else []
    ids = as_list(prompt)
    if ids is None:
        raise RequestError("prompt", prompt, "a text or a list of token ids")
    return None, ids


def _completion(engine: Engine, request: Request) -> CompletionOutput:
    text = engine.text(request)
    return CompletionOutput(
        index=request.index,
        token_ids=request.output_ids,
        text=text,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        seed=request.key,
        logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
        origins=list(request.origins),
        synthetic_acceptance=request.rule == "synthetic",
    )
