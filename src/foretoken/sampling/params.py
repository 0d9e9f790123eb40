"""`SamplingParams`: what a user may ask of one request. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from foretoken.config import AUTO, REJECTION_SAMPLE_METHODS, plain
from foretoken.errors import RequestError
from foretoken.foreign import SAMPLING_FIELDS, absent_attribute, names_checked
from foretoken.sampling.grammar import Grammar
from foretoken.sampling.structured import read_structured_outputs

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_SALT = 1024


def check_text(name: str, text: str) -> None:
    """Raise `RequestError` for a lone surrogate: half a character, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            name,
            text[max(error.start - 10, 0) : error.end + 10],
            f"text, without the lone surrogate {text[error.start]!r} at index {error.start}",
            "Decode its bytes with errors='replace', or join surrogate pairs.",
        ) from None


def _check_number(name: str, value: Any, low: float, high: float, bound: str) -> None:
    """Raise `RequestError` unless `value` is a number in [low, high]; the error names `bound`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(name, value, bound)


def _check_integer(
    name: str, value: Any, low: int, bound: str, remedy: str = "", *, high: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, value, bound, remedy)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids as a tuple of plain integers, () for None; `RequestError` for other values."""
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise RequestError(name, value, "a list of token ids")
    items = tuple(value)
    if set(map(type, items)) - {int} or min(items, default=0) < 0:  # fast: lists may be long
        items = tuple(map(plain, items))
        for item in items:
            _check_integer(name, item, 0, "a list of token ids >= 0")
    return items


def _is_plain_bias(bias: dict[Any, Any]) -> bool:
    """Whether `logit_bias` is valid and needs no conversion; fast, even with all tokens."""
    if set(map(type, bias)) - {int} or set(map(type, bias.values())) - {int, float}:
        return False
    is_within = all(map((100.0).__ge__, map(abs, bias.values())))  # False for NaN
    return is_within and min(bias, default=0) >= 0


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """A text or a list of texts as a tuple, () for None; `RequestError` for other or bad texts."""
    items = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(items, Sequence) or any(not isinstance(s, str) or not s for s in items):
        raise RequestError(name, value, "a list of non-empty strings")
    for i, item in enumerate(items):
        check_text(f"{name}[{i}]", item)
    return tuple(items)


def check_salt(salt: Any) -> None:
    """Raise `RequestError` unless `salt` is None or a valid `cache_salt`."""
    if salt is not None:
        if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT:
            raise RequestError("cache_salt", salt, f"a text of 1 to {MAX_SALT} characters")
        check_text("cache_salt", salt)


class RequestOutputKind(Enum):
    """Which tokens each output of a request has, by vLLM's names; here always `CUMULATIVE`."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@names_checked({}, RequestError, "structured_outputs")
@dataclass(slots=True)
class StructuredOutputsParams:
    """`SamplingParams.structured_outputs` as an object instead of a map.

    json, regex, choice, grammar, json_object: as in that map; exactly one is not None.
    disable_any_whitespace, disable_additional_properties, whitespace_pattern, structural_tag:
        options of vLLM, which are accepted or refused as in that map.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        pairs = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return {name: value for name, value in pairs if value is not None}


@names_checked(SAMPLING_FIELDS, RequestError, "sampling_params")
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, applied in the order of `Backend.process_logits`.

    Numbers may be numpy's. Fields may be assigned later: every call that takes the parameters
    checks a copy of them again.

    Attributes:
        temperature: >= 0; 0 takes the most likely token.
        top_p: in (0, 1]; keeps the smallest set of tokens with at least this probability in total;
            1 is off.
        top_k: keeps the k most likely tokens (all ties at the k-th); 0 or -1 is off.
        min_p: in [0, 1]; drops tokens less likely than min_p times the likeliest; 0 is off.
        max_tokens: most tokens to generate, >= 1; None: as many as context and cache hold.
        min_tokens: the end of text and `stop_token_ids` cannot be drawn before this many tokens.
        n: independent samples of the same prompt, 1..128.
        seed: fixes the request's noise. Its tokens then do not depend on the rest of the batch, as
            far as the documentation of the engine's `dtype` says; None or -1: the seed is made from
            the engine's seed and the number of the admission.
        stop: strings that end the output.
        stop_token_ids: ids that end the output; the last of `token_ids` is then that token.
        include_stop_str_in_output: keep in `text` the string or token that ended it; by default
            it is cut off.
        skip_special_tokens: leave special tokens out of `text`.
        detokenize: make `text`, and the texts of tokens in log-probabilities and traces. False:
            `text` is empty, the texts of tokens are None, and `stop` is not allowed.
        ignore_eos: do not stop at the model's end-of-text token.
        logprobs: log-probabilities of the drawn token and of this many likeliest tokens, 0..20,
            from the model's raw logits; None is off.
        prompt_logprobs: the same for each prompt token.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of tokens in the
            output, once (presence) or for each occurrence (frequency).
        repetition_penalty: in [0.001, 1000]; for tokens in the prompt or output, positive logits
            are divided by it and negative logits are multiplied by it; 1 is off.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        bad_words: strings that must not appear: the last token of a string is banned if its other
            tokens were just generated.
        allowed_token_ids: only these tokens can be drawn.
        structured_outputs: what the text must be: a map with one of `json` (a schema, or its JSON
            text), `json_object` (true), `regex`, `choice` (a list of texts) and `grammar` (Lark, or
            GBNF). JSON has no white space, unless `disable_any_whitespace` is false or there is a
            `whitespace_pattern`. The end of text can be drawn only where the text may end. Drawing
            it ends the output.
        num_speculative_tokens: K of this request, from 0 (no drafts) to the engine's K; `auto`, if
            the engine's K is `auto`: the number that pays in each step, even if the text of a
            seeded request then depends on the rest of the batch; None: the engine's.
        drafter: the drafter of this request, by its name in the engine's `drafters`, or `hybrid`:
            see docs/drafters.md; None: the engine's.
        rejection_sample_method: the verification rule of this request: `standard`, `block` or
            `coupled`, or `synthetic` if that is the engine's rule; None: the engine's.
        prediction: a text that the output may resemble, or its token ids, for the drafter
            `prediction` to draft from; it changes the speed, not the distribution.
        truncate_prompt_tokens: keep this many of the prompt's last tokens, >= 1; -1: as many as
            leave room for `max_tokens`, which must then be given; None keeps all.
        cache_salt: a text of 1 to 1024 characters; only requests with the same salt share blocks of
            the prefix cache. It changes no token.
        priority: requests with lower values get slots and blocks first and keep them. Of requests
            with the same value, the earlier one does. It changes when a text comes, not the text.
        trace: report for each token which draft it was, with p, q and the random number that
            decided; also which drafts were not used, and why.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] | list[str] | None = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    structured_outputs: Mapping[str, Any] | StructuredOutputsParams | Grammar | None = None
    num_speculative_tokens: int | str | None = None
    drafter: str | None = None
    rejection_sample_method: str | None = None
    prediction: str | Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    trace: bool = False

    def __post_init__(self) -> None:
        for name in _NAMES:
            if type(value := getattr(self, name)) not in _PLAIN:
                setattr(self, name, plain(value))
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e6, "a number >= 0, at most 1e6")
        if 0.0 < self.temperature < 1e-5:
            remedy = "Use 0 for greedy decoding."
            raise RequestError("temperature", self.temperature, "0 or >= 1e-5", remedy)
        _check_number("top_p", self.top_p, math.ulp(0.0), 1.0, "in (0, 1]")
        _check_integer("top_k", self.top_k, -1, "an integer >= 1, or 0 or -1 (off)")
        _check_number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, "an integer >= 1")
        _check_integer("min_tokens", self.min_tokens, 0, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            bound = f"at most max_tokens ({self.max_tokens})"
            raise RequestError("min_tokens", self.min_tokens, bound)
        bound, remedy = f"an integer in [1, {MAX_SAMPLES}]", "For more, send the prompt again."
        _check_integer("n", self.n, 1, bound, remedy, high=MAX_SAMPLES)
        if self.seed == -1:
            self.seed = None
        if self.seed is not None:
            bound = "an integer in [0, 2**64), or -1"
            remedy = "None: a seed is made from the engine's seed."
            _check_integer("seed", self.seed, 0, bound, remedy, high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                bound, remedy = f"an integer in [0, {MAX_LOGPROBS}]", ""
                if value == -1:
                    remedy = "The whole vocabulary would be 10^5 entries for each token."
                _check_integer(name, value, 0, bound, remedy, high=MAX_LOGPROBS)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, "in [-2, 2]")
        _check_number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "in [0.001, 1000]")
        if (num_kept := self.truncate_prompt_tokens) == -1 and self.max_tokens is None:
            remedy = "Give `max_tokens`: -1 leaves room for it."
            raise RequestError("truncate_prompt_tokens", -1, ">= 1 without `max_tokens`", remedy)
        if num_kept is not None and num_kept != -1:
            _check_integer("truncate_prompt_tokens", num_kept, 1, "an integer >= 1, or -1")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "true or false")
        bound = "an integer in [-2**63, 2**63)"
        _check_integer("priority", self.priority, -(2**63), bound, high=2**63 - 1)
        if self.num_speculative_tokens not in (None, AUTO):
            bound = f"an integer >= 0, or `{AUTO}`"
            _check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, bound)
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise RequestError("drafter", self.drafter, "the name of a drafter, or None")
        rule = self.rejection_sample_method
        if rule is not None and rule not in REJECTION_SAMPLE_METHODS:
            bound = f"one of {', '.join(REJECTION_SAMPLE_METHODS)}, or None (the engine's)"
            raise RequestError("rejection_sample_method", rule, bound)

    def _check_lists(self) -> None:
        """Check the fields that hold texts, lists or maps, and convert them to plain types."""
        self.stop = _strings("stop", self.stop)
        if self.stop and not self.detokenize:
            remedy = "Use `stop_token_ids`, or set `detokenize` to True."
            raise RequestError("stop", self.stop, "left out with detokenize=False", remedy)
        check_salt(self.cache_salt)
        stops = _token_ids("stop_token_ids", self.stop_token_ids)
        self.stop_token_ids = tuple(dict.fromkeys(stops))
        if isinstance(self.bad_words, str):
            raise RequestError("bad_words", self.bad_words, "a list of non-empty strings")
        self.bad_words = _strings("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids", [], "a non-empty list, or None")
            # Each sample reads all ids at its start: for 64 samples, 2**17 copies of one id would
            # take 0.4 s.
            self.allowed_token_ids = tuple(dict.fromkeys(allowed))
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            self.structured_outputs = self.structured_outputs.given
        if self.structured_outputs is not None and self.grammar is None:
            self.structured_outputs = read_structured_outputs(self.structured_outputs)
        if isinstance(self.prediction, str):
            check_text("prediction", self.prediction)
        elif self.prediction is not None:
            is_list = isinstance(self.prediction, Sequence) or hasattr(self.prediction, "tolist")
            if not is_list or isinstance(self.prediction, bytes):
                raise RequestError("prediction", self.prediction, "a text or a list of token ids")
            self.prediction = _token_ids("prediction", self.prediction)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError("logit_bias", self.logit_bias, "a map of token id to value")
            bias = dict(self.logit_bias)
            if not _is_plain_bias(bias):
                bias = {plain(token): plain(value) for token, value in bias.items()}
                for token, value in bias.items():
                    _check_integer("logit_bias", token, 0, "keyed by token ids >= 0")
                    _check_number(f"logit_bias[{token}]", value, -100.0, 100.0, "in [-100, 100]")
            self.logit_bias = bias

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SamplingParams:
        return cls(**{str(name): value for name, value in values.items()})

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """vLLM's constructor: None means the default of a field."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """A copy, checked again (vLLM's name for it)."""
        return replace(self)

    @property
    def grammar(self) -> Grammar | None:
        """The compiled grammar of `structured_outputs`; None before admission, or if not set."""
        outputs = self.structured_outputs
        return outputs if isinstance(outputs, Grammar) else None

    @property
    def token_limit(self) -> int:
        """`max_tokens` of an admitted request, which is always a number."""
        return cast(int, self.max_tokens)

    @property
    def filters_logits(self) -> bool:
        """Whether top-k, top-p or min-p may drop tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are edited (masks, bias, bans, penalties) before temperature."""
        restricts = self.structured_outputs is not None or self.allowed_token_ids is not None
        penalizes = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(restricts or penalizes or self.logit_bias or self.min_tokens or self.bad_words)


_FLAGS = (
    "include_stop_str_in_output", "skip_special_tokens", "detokenize", "ignore_eos", "trace",
)  # fmt: skip
_NAMES = tuple(f.name for f in fields(SamplingParams))
_PLAIN = {type(None), bool, int, float, str, tuple}  # types that `plain` would return unchanged
