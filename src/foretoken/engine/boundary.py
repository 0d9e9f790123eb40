"""Between users and the engine: prompts and parameters in, outputs out.

Charter: what `LLM` and `AsyncEngine` share. Whatever is wrong with one prompt becomes a typed error
here; whatever is given out is a copy that later steps do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from foretoken.engine.admission import BadWords, check_request, check_token_ids, last_tokens
from foretoken.engine.engine import Engine
from foretoken.engine.prompts import encode, encode_prediction, salt_of, shown_parts
from foretoken.engine.request import Given, Request, RequestGroup
from foretoken.errors import ForetokenError, ProcessingError
from foretoken.outputs import (
    CompletionDelta,
    CompletionOutput,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
)
from foretoken.sampling.params import SamplingParams

_Sample = TypeVar("_Sample", bound=CompletionOutput)


class Submission(NamedTuple):
    """The arguments of `Engine.add`: a prompt that was encoded and checked."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None
    bad_words: BadWords


def prepare(engine: Engine, request_id: str, prompt: Any, params: SamplingParams) -> Submission:
    """Encode a prompt and check it against the engine's limits; nothing is queued.

    Raises:
        RequestError, CapacityError: it cannot be served as asked.
        ProcessingError: the tokenizer raised, perhaps on bad words.
        EngineBrokenError: the device failed; nothing is served any more.
    """
    engine.check_works()
    is_default = params is engine.default_params
    with _encoding(request_id):
        text, ids = encode(engine.tokenizer, prompt)
        ids = last_tokens(ids, params, engine.limits)
        if params.prediction is not None:  # it is encoded after the text of these ids
            check_token_ids("prompt", ids, engine.limits.vocab_size)
        prediction = encode_prediction(engine.tokenizer, ids, params.prediction)
        bad_words = engine.encode_bad_words(params) if engine.tokenizer is not None else ()
    grammar, salt = engine.grammars.compiled(params.structured_outputs), salt_of(prompt, params)
    is_same = prediction is params.prediction and grammar is params.structured_outputs
    if not is_same or salt is not params.cache_salt:
        params = replace(params, prediction=prediction, structured_outputs=grammar, cache_salt=salt)
    limits = engine.limits
    if is_default and len(ids) + params.token_limit > limits.max_model_len:
        params = replace(params, max_tokens=None)  # the default is no demand: as many as fit
    params = check_request(ids, params, limits, text)
    return Submission(request_id, ids, params, text, bad_words)


def build_output(engine: Engine, group: RequestGroup) -> RequestOutput:
    """What a request has so far."""
    samples = []
    for request in group.samples:
        engine.settle(request)  # which may end it
        samples.append(_sample(CompletionOutput, request, Given()))
    return RequestOutput(
        request_id=group.request_id, prompt=group.prompt, prompt_token_ids=[*group.prompt_ids],
        outputs=samples, metrics=group.metrics.copy(),
        prompt_logprobs=None if group.prompt_logprobs is None else [*group.prompt_logprobs],
        error=group.error,
    )  # fmt: skip


def take_delta(engine: Engine, group: RequestGroup) -> RequestDelta | None:
    """What a request has that no delta held before, or None; its cost grows with that alone."""
    samples = []
    for request in group.samples:
        engine.settle(request)
        given, is_ended = request.given, request.finish_reason is not None
        request.given = Given(request.num_output, len(request.pieces), is_ended)
        if request.given != given:
            samples.append(_sample(CompletionDelta, request, given))
    if not samples:
        return None
    prompt, prompt_ids, prompt_logprobs = None, None, None
    if not group.gave_prompt:
        prompt, prompt_ids, group.gave_prompt = group.prompt, [*group.prompt_ids], True
    finished, rows = group.finished, group.prompt_logprobs
    is_whole = rows is not None and (finished or len(rows) == len(group.prompt_ids))
    if rows is not None and is_whole and not group.gave_prompt_logprobs:
        prompt_logprobs, group.gave_prompt_logprobs = [*rows], True
    return RequestDelta(
        request_id=group.request_id, outputs=samples, finished=finished, prompt=prompt,
        prompt_token_ids=prompt_ids, prompt_logprobs=prompt_logprobs,
        metrics=group.metrics.copy() if finished else None, error=group.error,
    )  # fmt: skip


def unserved(request_id: str, prompt: Any, error: ForetokenError) -> RequestOutput:
    """The output of a prompt that was refused."""
    text, ids = shown_parts(prompt)
    return RequestOutput(request_id, text, ids, [], RequestMetrics(), error=error)


def not_begun(request_id: str, prompt: Any, params: SamplingParams, signal: str) -> RequestOutput:
    """The output of a prompt that a signal came before: empty samples, marked `interrupted`."""
    text, ids = shown_parts(prompt)
    samples = [CompletionOutput(j, [], "", "interrupted", signal) for j in range(params.n)]
    return RequestOutput(request_id, text, ids, samples, RequestMetrics())


@contextmanager
def _encoding(request_id: str) -> Iterator[None]:
    """What a tokenizer raises becomes an error that names the request."""
    try:
        yield
    except ForetokenError:
        raise
    except Exception as error:
        raise ProcessingError(
            f"request {request_id}: {type(error).__name__} while its prompt was encoded: {error}"
        ) from error


def _sample(kind: type[_Sample], request: Request, given: Given) -> _Sample:
    """What a sample has beyond what was given out before, as copies."""
    first = given.num_tokens
    return kind(
        index=request.index, token_ids=request.token_ids[request.num_prompt + first :],
        text="".join(request.pieces[given.num_pieces :]), finish_reason=request.finish_reason,
        stop_reason=request.stop_reason, seed=request.key,
        logprobs=request.logprobs[first:] if request.params.logprobs is not None else None,
        origins=request.origins[first:], synthetic_acceptance=request.rule == "synthetic",
        trace=request.trace[first:] if request.params.trace else None,
    )  # fmt: skip
