"""Checks that a request must pass before it is queued. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from foretoken.config import AUTO, LOSSLESS_METHODS
from foretoken.errors import CapacityError, RequestError
from foretoken.sampling.params import SamplingParams

BadWords = tuple[tuple[int, ...], ...]
# Under K = `auto`: the K of requests with a fixed K, and the first K of adapting requests; at most
# the engine's largest K.
FIXED_K = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's bounds on a request.

    cache_tokens: tokens that the block pool holds
    num_speculative_tokens: K of requests that set no K, or the largest K that `auto` chooses
    adapts: whether K is `auto`
    allows_synthetic: whether the engine's rule is `synthetic`; else no request may use that rule
    reads_prediction: names of drafters that draft from `prediction`
    drafter: the default drafter; "": this engine drafts nothing
    drafters: names of all drafters, if several are loaded; else ()
    """

    vocab_size: int
    max_model_len: int
    cache_tokens: int
    num_speculative_tokens: int
    has_tokenizer: bool
    adapts: bool = False
    allows_synthetic: bool = False
    reads_prediction: tuple[str, ...] = ()
    drafter: str = ""
    drafters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The drafters' names. Requests and slots have an index into this tuple."""
        return self.drafters or (self.drafter,)

    def drafter_index(self, name: str | None) -> int:
        """The index of a drafter in `names`; `None`: of the default drafter."""
        return self.names.index(name or self.drafter)

    def check_drafter(self, name: str) -> None:
        """Raise `RequestError` for a drafter that is not loaded."""
        names = self.names
        if not self.drafter:
            raise RequestError("drafter", name, "left out: this engine drafts nothing")
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.5)
            remedy = "Other drafters must be named in `speculative_config.drafters`."
            if near:
                remedy = f"Did you mean `{near[0]}`?"
            raise RequestError("drafter", name, f"one of {', '.join(names)}", remedy)


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, limits: Limits, prompt: str | None = None
) -> SamplingParams:
    """Check a request; returns its parameters, with a number for max_tokens=None. `prediction` must
    be token ids already, and `structured_outputs` compiled.

    Raises:
        RequestError, CapacityError: the engine cannot serve exactly this request.
    """
    if not prompt_ids:
        shown = list(prompt_ids) if prompt is None else prompt
        raise RequestError("prompt", shown, "at least one token", "Add some text.")
    all_ids: dict[str, Iterable[int]] = {
        "prompt": prompt_ids,
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "prediction": _checked_prediction(params, limits),
    }
    for name, ids in all_ids.items():
        check_token_ids(name, ids, limits.vocab_size)
    params = _with_max_tokens(len(prompt_ids), params, limits)
    num_drafts = params.num_speculative_tokens
    if num_drafts == AUTO and not limits.adapts:
        bound = f"an integer, at most {limits.num_speculative_tokens}: this engine's K is fixed"
        remedy = "Set `num_speculative_tokens` to `auto` in `speculative_config`."
        raise RequestError("num_speculative_tokens", num_drafts, bound, remedy)
    if isinstance(num_drafts, int) and num_drafts > limits.num_speculative_tokens:
        bound = f"at most the engine's {limits.num_speculative_tokens}"
        remedy = "Raise `num_speculative_tokens` in `speculative_config`."
        if not limits.drafter:
            remedy = "This engine drafts nothing: give it a `speculative_config`."
        raise RequestError("num_speculative_tokens", num_drafts, bound, remedy)
    if params.drafter is not None:
        limits.check_drafter(params.drafter)
    if params.rejection_sample_method == "synthetic" and not limits.allows_synthetic:
        bound = f"one of {', '.join(LOSSLESS_METHODS)}: this engine does not allow `synthetic`"
        remedy = "For its meaningless text, set this rule and its rates in `speculative_config`."
        raise RequestError("rejection_sample_method", "synthetic", bound, remedy)
    if params.structured_outputs is not None:
        _check_rule_keeps_grammar(params, limits)
    if not limits.has_tokenizer and (params.stop or params.bad_words):
        name = "stop" if params.stop else "bad_words"
        bound = "left out: this checkpoint has no tokenizer"
        remedy = "Use `stop_token_ids`, or add tokenizer files to the checkpoint."
        raise RequestError(name, getattr(params, name), bound, remedy)
    return params


def _check_rule_keeps_grammar(params: SamplingParams, limits: Limits) -> None:
    """Raise `RequestError` if the request's rule may accept drafts that its grammar forbids."""
    is_default = params.rejection_sample_method is None and limits.allows_synthetic
    is_synthetic = is_default or params.rejection_sample_method == "synthetic"
    if is_synthetic and params.num_speculative_tokens != 0:
        bound = "left out under the rule `synthetic`, which accepts drafts against the grammar"
        remedy = f"Set `rejection_sample_method` to one of {', '.join(LOSSLESS_METHODS)}."
        raise RequestError("structured_outputs", params.grammar, bound, remedy)


def check_token_ids(name: str, token_ids: Iterable[Any], vocab_size: int) -> None:
    """Raise `RequestError` for a value that is not a token id of the model."""
    token_ids = list(token_ids)
    if not set(map(type, token_ids)) - {int} and (
        not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
    ):  # lists may be long, so this check has no loop in Python
        return
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(name, token, f"made of token ids in [0, {vocab_size})")


def choose_num_drafts(params: SamplingParams, rule: str, limits: Limits) -> tuple[int, bool]:
    """A request's K, and whether the engine changes it from step to step.

    A seeded text under `synthetic`, or drawn at random under `standard` or `block`, depends on K,
    but must not depend on the batch. So its K is fixed, unless the request asks for `auto`.
    """
    num_drafts, largest = params.num_speculative_tokens, limits.num_speculative_tokens
    if isinstance(num_drafts, int):
        return num_drafts, False
    if not limits.adapts:
        return largest, False
    same_for_any_k = rule == "coupled" or (params.temperature == 0 and rule != "synthetic")
    return min(FIXED_K, largest), num_drafts == AUTO or params.seed is None or same_for_any_k


def _checked_prediction(params: SamplingParams, limits: Limits) -> Iterable[Any]:
    """The request's prediction; () for a request without one.

    Raises:
        RequestError: the engine drafts nothing, or the request's drafter reads no predictions.
        CapacityError: the prediction is longer than the context.
    """
    prediction = params.prediction or ()
    size = f"{len(prediction)} tokens"
    drafter = params.drafter or limits.drafter
    if params.prediction is not None and drafter not in limits.reads_prediction:
        reason = f"`{drafter}` does not read it" if drafter else "this engine drafts nothing"
        bound = f"left out: {reason}"
        remedy = 'Load a drafter that reads it: `speculative_config={"method": "prediction"}`.'
        if limits.reads_prediction:
            remedy = f"Set `drafter` to one of {', '.join(limits.reads_prediction)}."
        raise RequestError("prediction", size, bound, remedy)
    if len(prediction) > limits.max_model_len:
        bound = f"at most as long as the context, {limits.max_model_len} tokens"
        raise CapacityError("prediction", size, bound, "Shorten it.")
    return prediction


def _with_max_tokens(num_prompt: int, params: SamplingParams, limits: Limits) -> SamplingParams:
    """The parameters with a number as `max_tokens`; None means as many tokens as fit.

    Raises:
        CapacityError: prompt and output do not fit the context or the cache.
    """
    context, cache = limits.max_model_len, limits.cache_tokens
    room = context - num_prompt  # the most output tokens
    if room < 1:
        bound = f"shorter than the context of {context} tokens"
        remedy = "Shorten it, or raise `max_model_len` if the model allows."
        raise CapacityError("prompt", f"{num_prompt} tokens", bound, remedy)
    if params.max_tokens is None:
        params = replace(params, max_tokens=max(1, min(room, cache - num_prompt)))
    if params.token_limit > room:
        bound = f"at most {room} after this prompt of {num_prompt} tokens (context {context})"
        remedy = "Lower it, or shorten the prompt."
        raise CapacityError("max_tokens", params.max_tokens, bound, remedy)
    if num_prompt + params.token_limit > cache:
        bound = f"such that prompt ({num_prompt}) and output fit the cache of {cache} tokens"
        remedy = "Lower `max_tokens`, shorten the prompt, or raise `kv_cache_gib` or `num_blocks`."
        raise CapacityError("max_tokens", params.max_tokens, bound, remedy)
    return params


def last_tokens(prompt_ids: list[int], params: SamplingParams, limits: Limits) -> list[int]:
    """The tokens of a prompt that `truncate_prompt_tokens` keeps; -1: as many as fit with the
    output; `CapacityError` if not even one token fits."""
    count = params.truncate_prompt_tokens
    if count is None:
        return prompt_ids
    if count == -1:
        size, name = min((limits.max_model_len, "context"), (limits.cache_tokens, "cache"))
        count = size - params.token_limit
        if count < 1:
            bound = f"less than the {name} of {size} tokens, so that the prompt has room, too"
            raise CapacityError("max_tokens", params.max_tokens, bound, "Lower it.")
    return prompt_ids[-count:]


def bad_word_ids(words: Iterable[str], tokenizer: Any | None, vocab_size: int) -> BadWords:
    """Token sequences of the bad words: each word as the start of a text, and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if tokenizer else ()
            if ids and max(ids) < vocab_size:  # the model never draws other ids
                sequences[ids] = None
    return tuple(sequences)
