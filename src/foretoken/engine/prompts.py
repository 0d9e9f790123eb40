"""Prompts and parameters as users write them, in the forms that the engine takes.

Charter: forms, not limits: a text, ids, a dict or an array becomes text and ids; one set of
parameters, a list or None becomes one per prompt. What an engine can serve is `admission.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Required, TypedDict

from foretoken.config import plain
from foretoken.errors import RequestError, check_known_keys
from foretoken.foreign.python import CALL_OPTIONS, PROMPT_KEYS
from foretoken.foreign.table import without_foreign
from foretoken.models.chat import ChatPrompt
from foretoken.models.tokenizer import encode_after
from foretoken.sampling.params import SamplingParams, check_salt, check_text

_log = logging.getLogger(__name__)


class TextPrompt(TypedDict, total=False):
    """A prompt as a text; its `cache_salt` is that of `SamplingParams`."""

    prompt: Required[str]
    cache_salt: str | None


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, and the text that the output shall name as its prompt."""

    prompt_token_ids: Required[Sequence[int]]
    prompt: str | None
    cache_salt: str | None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Params = SamplingParams | Mapping[str, Any]

_PROMPT_KINDS = "a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`"


class ParamsReader:
    """Sampling parameters as a caller gave them; None means the engine's defaults.

    Where the choice is left to the checkpoint, a warning says once what it chose.
    """

    def __init__(self, defaults: SamplingParams) -> None:
        self.defaults = defaults
        ours = SamplingParams()
        pairs = [(f.name, getattr(defaults, f.name)) for f in fields(defaults)]
        self._chosen = [
            f"{name}={value!r}" for name, value in pairs if value != getattr(ours, name)
        ]

    def read(self, given: Any) -> SamplingParams:
        """A checked copy of one set of parameters: the caller may go on changing theirs."""
        if given is None:
            if self._chosen:
                _log.warning(
                    "Without sampling parameters the checkpoint's own hold, from its "
                    "generation_config.json: %s. Pass SamplingParams, or build the engine with "
                    "generation_config='vllm', to leave them aside.",
                    ", ".join(self._chosen),
                )
                self._chosen = []
            return self.defaults
        if isinstance(given, SamplingParams):
            return replace(given)
        if isinstance(given, Mapping):
            return SamplingParams.parse(given)
        raise RequestError("sampling_params", given, "a SamplingParams or a dict of its fields")

    def read_per_prompt(self, given: Any, count: int) -> list[SamplingParams]:
        """One for every prompt, of what was given for all of them or for each."""
        if given is None or isinstance(given, (SamplingParams, Mapping)):
            return [self.read(given)] * count
        if not isinstance(given, Sequence) or len(given) != count:
            shown = f"a list of {len(given)}" if isinstance(given, Sequence) else given
            raise RequestError("sampling_params", shown, f"one, or a list of {count}")
        return [self.read(one) for one in given]


def check_options(others: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Those of a call's further options that it knows.

    Raises:
        RequestError: an unknown name, or one of vLLM's with a value that would change something.
    """
    others = without_foreign(others, CALL_OPTIONS, RequestError)
    check_known_keys("option", others, known, RequestError)
    return others


def check_call(on_error: str, use_tqdm: bool) -> None:
    """Raise `RequestError` for a value that the calls of `LLM` do not take."""
    if on_error not in ("raise", "return"):
        raise RequestError("on_error", on_error, "`raise` or `return`")
    if not isinstance(use_tqdm, bool):
        raise RequestError("use_tqdm", use_tqdm, "true or false", "The bar is not exchangeable.")


def split_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and the prompts as a list; [] is no prompts at all."""
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
    """Text (None if ids were given alone) and token ids of a prompt.

    Args:
        add_special_tokens: whether a text gets those that the tokenizer begins one with.

    Raises:
        RequestError: it is no prompt, no text, or a text where there is no tokenizer.
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
    """The `cache_salt` of a prompt: its own, or that of its parameters.

    Raises:
        RequestError: it has two, or one that is none.
    """
    own = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if own is None:
        return params.cache_salt
    check_salt(own)
    if params.cache_salt not in (None, own):
        bound = "that of the sampling parameters, or given in one place alone"
        raise RequestError("cache_salt", own, bound)
    return str(own)


def decode(tokenizer: Any | None, token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones left out; `RequestError` where there is no tokenizer."""
    if tokenizer is None:
        bound = "left out: this checkpoint has no tokenizer"
        raise RequestError("tokens", f"{len(token_ids)} tokens", bound)
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def encode_prediction(
    tokenizer: Any | None, prompt_ids: Sequence[int], prediction: str | Sequence[int] | None
) -> Sequence[int] | None:
    """Token ids of a predicted text, as they would follow the prompt.

    Raises:
        RequestError: it is a text, and there is no tokenizer.
    """
    if not isinstance(prediction, str):
        return prediction
    if tokenizer is None:
        bound = "token ids: this checkpoint has no tokenizer"
        raise RequestError("prediction", prediction, bound, "Encode it first.")
    return encode_after(tokenizer, prompt_ids, prediction)


def as_list(value: Any) -> list[Any] | None:
    """A sequence, array or tensor as a list; None for anything else, texts and bytes included."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        return None
    return list(value)


def shown_parts(prompt: Any) -> tuple[str | None, list[int]]:
    """What an output names as the prompt where it could not be encoded."""
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, ids = prompt, prompt
    return text if isinstance(text, str) else None, as_list(ids) or []


def _encode_dict(tokenizer: Any | None, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
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
        raise RequestError("prompt", text, "a text, or left out beside `prompt_token_ids`")
    return text, encode(tokenizer, ids)[1]
