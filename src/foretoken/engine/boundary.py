"""Between users (`LLM`, `AsyncEngine`) and the engine: prompts and parameters in, outputs out.

Prompts and parameters in any form are checked and brought into one form. Outputs are copies that
later steps do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, Required, TypedDict, TypeVar

from foretoken.config import plain
from foretoken.engine.admission import BadWords, check_request, check_token_ids, last_tokens
from foretoken.engine.engine import Engine
from foretoken.engine.request import Delivered, Request, RequestGroup
from foretoken.errors import ForetokenError, ProcessingError, RequestError, check_known_keys
from foretoken.foreign import CALL_OPTIONS, PROMPT_KEYS, without_foreign
from foretoken.models.chat import ChatPrompt
from foretoken.models.tokenizer import encode_after
from foretoken.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from foretoken.sampling.params import SamplingParams, check_salt, check_text

_log = logging.getLogger(__name__)


class TextPrompt(TypedDict, total=False):
    """A prompt as a text; `cache_salt` as in `SamplingParams`."""

    prompt: Required[str]
    cache_salt: str | None


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; the output shows the text `prompt`, which is not encoded."""

    prompt_token_ids: Required[Sequence[int]]
    prompt: str | None
    cache_salt: str | None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Params = SamplingParams | Mapping[str, Any]

_PROMPT_KINDS = "a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`"


class ParamsReader:
    """Reads sampling parameters in any form; None means the engine's defaults. If some of
    these come from the checkpoint, the first None logs a warning that names them."""

    def __init__(self, defaults: SamplingParams) -> None:
        self.defaults = defaults
        built_in = SamplingParams()
        pairs = [(f.name, getattr(defaults, f.name)) for f in fields(defaults)]
        self._checkpoint_defaults = [
            f"{name}={value!r}" for name, value in pairs if value != getattr(built_in, name)
        ]

    def read(self, params: Any) -> SamplingParams:
        """One set of parameters, checked: for None the defaults themselves, else a copy."""
        if params is None:
            if self._checkpoint_defaults:
                _log.warning(
                    "A request without sampling parameters uses the checkpoint's defaults, from "
                    "its generation_config.json: %s. To use Foretoken's own defaults, pass "
                    "SamplingParams, or build the engine with generation_config='vllm'.",
                    ", ".join(self._checkpoint_defaults),
                )
                self._checkpoint_defaults = []
            return self.defaults
        if isinstance(params, SamplingParams):
            return replace(params)
        if isinstance(params, Mapping):
            return SamplingParams.parse(params)
        raise RequestError("sampling_params", params, "a SamplingParams or a dict of its fields")

    def read_per_prompt(self, params: Any, count: int) -> list[SamplingParams]:
        """One set per prompt, each as by `read`; `params`: one set for all prompts, or a list."""
        if params is None or isinstance(params, (SamplingParams, Mapping)):
            return [self.read(params)] * count
        if not isinstance(params, Sequence) or len(params) != count:
            shown = f"a list of {len(params)}" if isinstance(params, Sequence) else params
            raise RequestError("sampling_params", shown, f"one for all, or a list of {count}")
        return [self.read(item) for item in params]


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """A call's further options, without vLLM's options at values that change nothing here.
    `RequestError` for vLLM's options at other values, and for options that are not in `known`."""
    options = without_foreign(options, CALL_OPTIONS, RequestError)
    check_known_keys("option", options, known, RequestError)
    return options


def check_call(on_error: str, use_tqdm: bool) -> None:
    """Raise `RequestError` for a bad option of `LLM.generate` or `LLM.chat`."""
    if on_error not in ("raise", "return"):
        raise RequestError("on_error", on_error, "`raise` or `return`")
    if not isinstance(use_tqdm, bool):
        raise RequestError(
            "use_tqdm", use_tqdm, "true or false", "A bar of another class is not shown."
        )


def split_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether `prompts` is a single prompt, and the list of prompts, which may be empty."""
    if isinstance(prompts, (str, Mapping)):
        return True, [prompts]
    items = as_list(prompts)
    if items is None:
        raise RequestError("prompts", prompts, f"{_PROMPT_KINDS}, or a list of such")
    if items and isinstance(plain(items[0]), int):
        return True, [items]
    return False, items


def encode(
    tokenizer: Any | None, prompt: Any, *, add_special_tokens: bool = True
) -> tuple[str | None, list[int]]:
    """The text and the token ids of a prompt; the text is None if the prompt is only ids.

    Args:
        add_special_tokens: False: a plain `str` is encoded without the special tokens that the
            tokenizer adds. For every other kind of prompt this argument has no effect.

    Raises:
        RequestError: `prompt` is no valid prompt, or it is a text and there is no tokenizer.
    """
    if isinstance(prompt, ChatPrompt):
        return prompt.encode()
    if isinstance(prompt, Mapping):
        return _encode_dict(tokenizer, prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "prompt", prompt, "token ids: this checkpoint has no tokenizer", "Encode it first."
            )
        check_text("prompt", prompt)
        options = {} if add_special_tokens else {"add_special_tokens": False}
        return prompt, list(tokenizer.encode(prompt, **options)) if prompt else []
    ids = as_list(prompt)
    if ids is None:
        raise RequestError("prompt", prompt, _PROMPT_KINDS)
    return None, [plain(token) for token in ids]


def salt_of(prompt: Any, params: SamplingParams) -> str | None:
    """The `cache_salt` of a prompt or of its parameters; `RequestError` if the prompt has a wrong
    salt, or if both have a salt and these differ."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is None:
        return params.cache_salt
    check_salt(salt)
    if params.cache_salt not in (None, salt):
        bound = "left out of the prompt, or equal to `cache_salt` of the sampling parameters"
        raise RequestError("cache_salt", salt, bound)
    return str(salt)


def decode(tokenizer: Any | None, token_ids: Sequence[int]) -> str:
    """The text of tokens without special ones; `RequestError` if there is no tokenizer."""
    if tokenizer is None:
        bound = "left out: this checkpoint has no tokenizer"
        raise RequestError("tokens", f"{len(token_ids)} tokens", bound)
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def encode_prediction(
    tokenizer: Any | None, prompt_ids: Sequence[int], prediction: str | Sequence[int] | None
) -> Sequence[int] | None:
    """A prediction as token ids that follow the prompt; `RequestError` for a text if there is no
    tokenizer."""
    if not isinstance(prediction, str):
        return prediction
    if tokenizer is None:
        bound = "token ids: this checkpoint has no tokenizer"
        raise RequestError("prediction", prediction, bound, "Encode it first.")
    return encode_after(tokenizer, prompt_ids, prediction)


def as_list(value: Any) -> list[Any] | None:
    """A sequence, array or tensor as a list; None for a text, bytes or anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        return None
    return list(value)


def shown_parts(prompt: Any) -> tuple[str | None, list[int]]:
    """The text (or None) and the ids (or []) in a prompt, for the output of a refused prompt."""
    text, ids = prompt, prompt
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    return text if isinstance(text, str) else None, as_list(ids) or []


def _encode_dict(tokenizer: Any | None, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """As `encode`, for a dict. The text of a dict with token ids is not encoded."""
    prompt = without_foreign(prompt, PROMPT_KEYS, RequestError)
    known = ("prompt", "prompt_token_ids", "cache_salt")
    check_known_keys("prompt", prompt, known, RequestError)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is None:
        if not isinstance(text, str):
            raise RequestError("prompt", text, "a text, or given as `prompt_token_ids`")
        return encode(tokenizer, text)
    if as_list(ids) is None:
        raise RequestError("prompt_token_ids", ids, "a list of token ids")
    if text is not None and not isinstance(text, str):
        raise RequestError("prompt", text, "a text, or left out if there are `prompt_token_ids`")
    return text, encode(tokenizer, ids)[1]


_Sample = TypeVar("_Sample", bound=CompletionOutput)


class Submission(NamedTuple):
    """The arguments of `Engine.add`, for a prompt that was encoded and checked."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None
    bad_words: BadWords


def prepare(engine: Engine, request_id: str, prompt: Any, params: SamplingParams) -> Submission:
    """Encode a prompt and check it against the engine's limits; nothing is queued.

    Raises:
        RequestError, CapacityError: the engine cannot serve exactly this request.
        ProcessingError: the tokenizer raised, perhaps on bad words.
        EngineBrokenError: the device failed; nothing is served any more.
    """
    engine.check_works()
    is_default, limits = params is engine.default_params, engine.limits
    try:
        text, ids = encode(engine.tokenizer, prompt)
        ids = last_tokens(ids, params, limits)
        if params.prediction is not None:  # `encode_prediction` decodes the prompt's ids
            check_token_ids("prompt", ids, limits.vocab_size)
        prediction = encode_prediction(engine.tokenizer, ids, params.prediction)
        bad_words = engine.encode_bad_words(params) if engine.tokenizer is not None else ()
    except ForetokenError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} while its prompt was encoded: {error}"
        raise ProcessingError(f"request {request_id}: {reason}") from error
    grammar, salt = engine.grammars.compiled(params.structured_outputs), salt_of(prompt, params)
    unchanged = prediction is params.prediction and grammar is params.structured_outputs
    if not unchanged or salt is not params.cache_salt:
        params = replace(params, prediction=prediction, structured_outputs=grammar, cache_salt=salt)
    if is_default and len(ids) + params.token_limit > limits.max_model_len:
        params = replace(params, max_tokens=None)  # the default is too large: take what fits
    params = check_request(ids, params, limits, text)
    return Submission(request_id, ids, params, text, bad_words)


def build_output(engine: Engine, group: RequestGroup) -> RequestOutput:
    """The output of a request so far: tokens, text, metrics and error."""
    samples = []
    for request in group.samples:
        engine.update_text(request)  # may end the request with an error
        samples.append(_sample(CompletionOutput, request, Delivered()))
    return RequestOutput(
        request_id=group.request_id, prompt=group.prompt, prompt_token_ids=[*group.prompt_ids],
        outputs=samples, metrics=group.metrics.copy(),
        prompt_logprobs=None if group.prompt_logprobs is None else [*group.prompt_logprobs],
        error=group.error,
    )  # fmt: skip


def take_delta(engine: Engine, group: RequestGroup) -> RequestDelta | None:
    """What is new in a request since its last delta; None if nothing is new."""
    samples = []
    for request in group.samples:
        engine.update_text(request)
        before, has_ended = request.delivered, request.finish_reason is not None
        request.delivered = Delivered(request.num_output, len(request.pieces), has_ended)
        if request.delivered != before:
            samples.append(_sample(CompletionDelta, request, before))
    if not samples:
        return None
    prompt, prompt_ids, prompt_logprobs = None, None, None
    if not group.delivered_prompt:
        prompt, prompt_ids, group.delivered_prompt = group.prompt, [*group.prompt_ids], True
    finished, rows = group.finished, group.prompt_logprobs
    has_all_rows = rows is not None and (finished or len(rows) == len(group.prompt_ids))
    if rows is not None and has_all_rows and not group.delivered_prompt_logprobs:
        prompt_logprobs, group.delivered_prompt_logprobs = [*rows], True
    return RequestDelta(
        request_id=group.request_id, outputs=samples, finished=finished, prompt=prompt,
        prompt_token_ids=prompt_ids, prompt_logprobs=prompt_logprobs,
        metrics=group.metrics.copy() if finished else None, error=group.error,
    )  # fmt: skip


def _sample(output_class: type[_Sample], request: Request, delivered: Delivered) -> _Sample:
    """A copy of a sample's output, without the part that was delivered before."""
    start = delivered.num_tokens
    return output_class(
        index=request.index, token_ids=request.token_ids[request.num_prompt + start :],
        text="".join(request.pieces[delivered.num_pieces :]), finish_reason=request.finish_reason,
        stop_reason=request.stop_reason, seed=request.key,
        logprobs=request.logprobs[start:] if request.params.logprobs is not None else None,
        origins=request.origins[start:], synthetic_acceptance=request.rule == "synthetic",
        trace=request.trace[start:] if request.params.trace else None,
    )  # fmt: skip
