"""Options of speculation: how tokens are drafted and verified."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Self

from foretoken.errors import ConfigError, check_known_keys
from foretoken.foreign import SPECULATIVE_FIELDS, names_checked, without_foreign

from foretoken.config.checks import (  # isort: skip
    check_choice, check_int, check_model, check_number, check_revision, make_plain,
)  # fmt: skip

DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
LOSSLESS_METHODS = ("standard", "block", "coupled")
REJECTION_SAMPLE_METHODS = (*LOSSLESS_METHODS, "synthetic")
MAX_SPECULATIVE_TOKENS = 64
AUTO = "auto"
HYBRID = "hybrid"
_WHERE = "speculative_config."


@names_checked(SPECULATIVE_FIELDS, ConfigError, "speculative_config", _WHERE)
@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted and verified.

    Attributes:
        method: the drafter: `draft_model`, `draft_text`, `eagle3`, `forced`, `ngram`, `prediction`
            or `suffix` (names registered in `drafting/registry.py`). None: `draft_model` if `model`
            is given, else an error. With `drafters`: the name of the default drafter, or `hybrid`;
            None: `hybrid`, or the only drafter.
        drafters: drafters that are loaded together. Each is a dict of `method`, its options, and
            `name` (by default its method). Requests choose a drafter by its name.
        model: checkpoint of the draft model or head, named as `EngineConfig.model`. None: the
            checkpoint that comes with the target: for `tiny-python` `tiny-python-draft`, or the
            head `tiny-python-eagle3`; for `smollm2-135m` the head `smollm2-135m-eagle3`.
        revision: branch, tag or commit of a `model` that is a hub id; None: `main`.
        num_speculative_tokens: K >= 1, the most tokens drafted per step; or `auto`: the number that
            pays, maybe 0, by measured costs of steps and earlier acceptance. Some requests keep a
            fixed K under `auto`: docs/decisions/002-drafts-are-never-dropped-for-the-batch.md.
        max_speculative_tokens: the most that `auto` drafts; None: 8. With a number as
            `num_speculative_tokens` it must be None.
        prompt_lookup_min, prompt_lookup_max: shortest and longest n-gram that is looked up;
            None: 2 and 4.
        suffix_corpus: a file of UTF-8 text, in which `suffix` looks up drafts, too.
        suffix_decoding_max_tree_depth: most tokens of a match that are compared.
        suffix_decoding_max_cached_requests: number of finished requests with outputs that are
            looked up, too; a new output replaces the oldest. 0: no outputs are looked up.
        suffix_decoding_max_cached_tokens: most tokens of these outputs together, 28 bytes each.
        suffix_decoding_max_spec_factor: most drafts per token of the match.
        suffix_decoding_min_token_prob: drafting stops before the product of the drafts' frequencies
            falls below this. A draft's frequency is how often it followed the text before it.
        draft_sample_method: `probabilistic` (None means this) draws drafts from q and verifies
            with it; `greedy` drafts the argmax and verifies it as one-hot.
        rejection_sample_method: the verification rule of requests that name no rule: `standard`,
            `block`, `coupled` (lossless, all three) or `synthetic` (see docs/verification.md).
        synthetic_acceptance_rate, synthetic_acceptance_rates, synthetic_acceptance_length: exactly
            one of the three with `synthetic`, none with other rules; all None by default. The rate
            is the mean, over positions i = 1..K, of the probability that the first i drafts are all
            accepted, in [0, 1]. The rates are these K probabilities; they never rise from one to
            the next. The length is the mean of accepted drafts + 1, in [1, K + 1].

    An option that the method does not read is refused when the drafter is built.
    """

    method: str | None = None
    drafters: Sequence[Mapping[str, Any]] | None = None
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int | str = 4
    max_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_corpus: str | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 2**20
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    draft_sample_method: str | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rate: float | None = None
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if self.model is not None:
            remedy = "Leave it out for the draft model that comes with the target, if there is one."
            object.__setattr__(self, "model", check_model(_WHERE + "model", self.model, remedy))
        check_revision(_WHERE + "revision", self.revision)
        self._check_num_drafts()
        shortest, longest = self.lookup_sizes
        check_int(_WHERE + "prompt_lookup_min", shortest, 1)
        remedy = "It must not be smaller than `prompt_lookup_min`."
        check_int(_WHERE + "prompt_lookup_max", longest, shortest, remedy=remedy)
        self._check_suffix()
        method = self.draft_sample_method
        gumbel = "`gumbel` is called `probabilistic` here: drafts are drawn by Gumbel-max from q."
        if method is not None:
            remedy = gumbel if method == "gumbel" else ""
            check_choice(_WHERE + "draft_sample_method", method, DRAFT_SAMPLE_METHODS, remedy)
        rule = self.rejection_sample_method
        check_choice(_WHERE + "rejection_sample_method", rule, REJECTION_SAMPLE_METHODS)
        self._check_synthetic()
        if self.drafters is not None:
            self._check_drafters()
        elif self.method is None:
            if self.model is None:
                remedy = "Use `draft_model` or `eagle3` (with `model`), `ngram`, or `drafters`."
                raise ConfigError(_WHERE + "method", None, "given", remedy)
            object.__setattr__(self, "method", "draft_model")

    def _check_num_drafts(self) -> None:
        count, most = self.num_speculative_tokens, self.max_speculative_tokens
        field, most_field = _WHERE + "num_speculative_tokens", _WHERE + "max_speculative_tokens"
        if count == AUTO:
            if most is not None:
                check_int(most_field, most, 1, MAX_SPECULATIVE_TOKENS)
            return
        if isinstance(count, str):
            raise ConfigError(field, count, f"`{AUTO}` or an integer")
        remedy = "Pass speculative_config=None to decode without speculation."
        check_int(field, count, 1, MAX_SPECULATIVE_TOKENS, remedy)
        if most is not None:
            bound = f"left out with num_speculative_tokens={count}"
            raise ConfigError(most_field, most, bound, f"It is only for `{AUTO}`.")

    def _check_suffix(self) -> None:
        if (corpus := self.suffix_corpus) is not None:
            path = fspath(corpus) if isinstance(corpus, PathLike) else corpus
            if not isinstance(path, str) or not path:
                raise ConfigError(_WHERE + "suffix_corpus", corpus, "a file of UTF-8 text")
            object.__setattr__(self, "suffix_corpus", path)
        where, depth = _WHERE + "suffix_decoding_", self.suffix_decoding_max_tree_depth
        check_int(where + "max_tree_depth", depth, 1, 2**31 - 1)
        check_int(where + "max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        remedy = "`suffix_decoding_max_cached_requests=0` keeps no outputs."
        tokens = self.suffix_decoding_max_cached_tokens
        check_int(where + "max_cached_tokens", tokens, 1024, 2**31 - 1, remedy)
        remedy = f"Below 1 / {depth} not even a match of {depth} tokens would give a draft."
        factor = self.suffix_decoding_max_spec_factor
        check_number(where + "max_spec_factor", factor, 1 / depth, MAX_SPECULATIVE_TOKENS, remedy)
        check_number(where + "min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)

    def _check_synthetic(self) -> None:
        options = {name: getattr(self, name) for name in _SYNTHETIC}
        if self.rejection_sample_method == "synthetic":
            check_synthetic(_WHERE, self.num_drafts, options)
        elif names := [name for name in _SYNTHETIC if options[name] is not None]:
            bound = f"left out with rejection_sample_method `{self.rejection_sample_method}`"
            remedy = "Set `rejection_sample_method` to `synthetic`, or leave it out."
            raise ConfigError(_WHERE + names[0], options[names[0]], bound, remedy)
        if self.synthetic_acceptance_rates is not None:
            rates = tuple(map(float, self.synthetic_acceptance_rates))
            object.__setattr__(self, "synthetic_acceptance_rates", rates)

    def _check_drafters(self) -> None:
        """Check `drafters` and set the `name` of each, then check `method` or set the default."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in self._drafter_options() and value != field.default:
                remedy = "Put it into the entry of the drafter that needs it."
                raise ConfigError(_WHERE + field.name, value, "left out with `drafters`", remedy)
        drafters, where = self.drafters, _WHERE + "drafters"
        is_list = isinstance(drafters, Sequence) and not isinstance(drafters, str)
        if not drafters or not is_list or not all(isinstance(entry, Mapping) for entry in drafters):
            bound = "a list of objects, one for each drafter"
            raise ConfigError(where, drafters, bound, 'For example [{"method": "ngram"}].')
        by_name: dict[str, Mapping[str, Any]] = {}
        for i, entry in enumerate(drafters):
            with errors_of_drafter(i):
                method, name = self._member(entry).method, entry.get("name")
            name = method if name is None else name
            if not isinstance(name, str) or not name or name == HYBRID or name in by_name:
                bound = f"a text, but not `{HYBRID}` and not the name of another drafter"
                raise ConfigError(f"{where}[{i}].name", name, bound)
            by_name[name] = {**entry, "method": method, "name": name}
        object.__setattr__(self, "drafters", tuple(by_name.values()))
        if self.method is None:
            object.__setattr__(self, "method", HYBRID if len(by_name) > 1 else next(iter(by_name)))
        remedy = "With `drafters` it is the drafter of requests that name no drafter."
        check_choice(_WHERE + "method", self.method, (*by_name, HYBRID), remedy)

    @classmethod
    def _drafter_options(cls) -> list[str]:
        """Names of the fields that may differ between drafters."""
        shared = ("method", "drafters", "num_", "max_", "rejection_", "synthetic_")
        return [f.name for f in fields(cls) if not f.name.startswith(shared)]

    def _member(self, entry: Mapping[str, Any]) -> Self:
        """The options of one entry of `drafters`, with the options that all drafters share."""
        entry = without_foreign(entry, SPECULATIVE_FIELDS, ConfigError, _WHERE)
        allowed = ("method", "name", *self._drafter_options())
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in allowed}
        del shared["drafters"]
        for key in shared.keys() & entry.keys():
            remedy = "All drafters share it: set it next to `drafters`."
            raise ConfigError(_WHERE + key, entry[key], "left out of an entry", remedy)
        check_known_keys("speculative_config", entry, allowed)
        return type(self)(**{k: v for k, v in entry.items() if k != "name"}, **shared)

    @property
    def members(self) -> dict[str, Self]:
        """The options of each drafter that is loaded, by name."""
        if self.drafters is None:
            return {str(self.method): self}
        return {entry["name"]: self._member(entry) for entry in self.drafters}

    @property
    def is_auto(self) -> bool:
        """Whether the engine chooses K, step by step."""
        return self.num_speculative_tokens == AUTO

    @property
    def num_drafts(self) -> int:
        """K, or the most that `auto` drafts."""
        if isinstance(self.num_speculative_tokens, int):
            return self.num_speculative_tokens
        return 8 if self.max_speculative_tokens is None else self.max_speculative_tokens

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """Shortest and longest n-gram to look up; each default depends on the other length."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = 2 if longest is None else min(2, longest)
        return shortest, max(4, shortest) if longest is None else longest

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str | Self | None) -> Self | None:
        """A config from a dict (None means a default) or JSON text; None, or a config, as it is."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                remedy = f"The parser says: {error}."
                raise ConfigError("speculative_config", given, "a JSON object", remedy) from error
        if not isinstance(given, Mapping):
            raise ConfigError("speculative_config", given, "a JSON object or a dict")
        names = {f.name for f in fields(cls)}
        options = {str(k): v for k, v in given.items() if v is not None or k not in names}
        return cls(**options)


@contextmanager
def errors_of_drafter(index: int) -> Iterator[None]:
    """In the body, a `ConfigError` about `speculative_config.x` becomes one about
    `speculative_config.drafters[index].x`."""
    try:
        yield
    except ConfigError as error:
        field = f"{_WHERE}drafters[{index}].{error.field.removeprefix(_WHERE)}"
        raise ConfigError(field, error.value, error.bound, error.remedy) from error


_SYNTHETIC = tuple(f"synthetic_acceptance_{kind}" for kind in ("rate", "rates", "length"))


def check_synthetic(where: str, count: int, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, with `where` before the option's name, unless exactly one of the three
    options is not None, and it is in range for K = `count`."""
    names = [name for name in _SYNTHETIC if options[name] is not None]
    remedy = "Rule `synthetic` takes exactly one of these options."
    if not names:
        first, *others = _SYNTHETIC
        raise ConfigError(where + first, None, f"given, or one of {', '.join(others)}", remedy)
    name = names[0]
    if len(names) > 1:
        second = names[1]
        raise ConfigError(where + second, options[second], f"left out with `{name}`", remedy)
    field, value = where + name, options[name]
    if name == "synthetic_acceptance_rate":
        check_number(field, value, 0, 1)
    elif name == "synthetic_acceptance_length":
        remedy = "It counts the bonus token: at most num_speculative_tokens + 1."
        check_number(field, value, 1, count + 1, remedy)
    else:
        _check_rates(field, value, count)


def _check_rates(field: str, rates: Any, count: int) -> None:
    if not isinstance(rates, Sequence) or isinstance(rates, str) or len(rates) != count:
        bound = f"a list of num_speculative_tokens = {count} numbers in [0, 1]"
        raise ConfigError(field, rates, bound)
    highest = 1.0
    for i, rate in enumerate(rates):
        remedy = f"It is the chance that the first {i + 1} drafts are all accepted: it cannot rise."
        check_number(f"{field}[{i}]", rate, 0, highest, remedy)
        highest = float(rate)
