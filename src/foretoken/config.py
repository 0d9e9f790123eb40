"""Options of the engine and of speculation: names, defaults, bounds. No torch.

Charter: every default lives here and is documented here; every value is checked here, once, with
the nearest valid name for an unknown key. Environment switches, if there ever are any, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Self

from foretoken.errors import ConfigError, check_known_keys
from foretoken.foreign import ENGINE_OPTIONS, SPECULATIVE_FIELDS, without_foreign

DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
LOSSLESS_METHODS = ("standard", "block", "coupled")
REJECTION_SAMPLE_METHODS = (*LOSSLESS_METHODS, "synthetic")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_SPECULATIVE_TOKENS = 64
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
"""Tokens per cache block where nobody says how many, by type of device."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def plain(value: Any) -> Any:
    """A number or truth value of numpy or torch as Python's own; anything else as it is."""
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value


def check_int(field: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is an int in [low, high]; bool is not an int here."""
    bad_type = isinstance(value, bool) or not isinstance(value, int)
    if bad_type or value < low or (high is not None and value > high):
        bound = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ConfigError(field, value, bound, remedy)


def check_number(field: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is a number in [low, high]; bool and NaN are none here."""
    bad_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad_type or not low <= value <= high:
        raise ConfigError(field, value, f"a number in [{low:g}, {high:g}]", remedy)


def check_choice(field: str, value: Any, choices: tuple[str, ...], remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(field, value, f"one of {', '.join(choices)}", remedy)


def check_model(field: str, value: Any, remedy: str = "") -> str:
    """The name, folder or hub id of a model as a string; `ConfigError` if it is none of them."""
    text = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(text, str) or not text:
        raise ConfigError(field, value, "a model name, a folder or a hub id", remedy)
    return text


def check_revision(field: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is None or may be a branch, a tag or a commit."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(field, value, "a branch, a tag or a commit", "None means `main`.")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted and verified.

    Attributes:
        method: the drafter: `draft_model`, `eagle3`, `ngram` or `suffix` (names registered in
            `drafting/registry.py`). None: `draft_model` if `model` is given, else an error.
        model: checkpoint of the draft model or head, named as `EngineConfig.model`. None with the
            built-in target `tiny-python` means its own draft, `tiny-python-draft`.
        revision: branch, tag or commit of a draft model that is a hub id; None: `main`.
        num_speculative_tokens: K >= 1, the most tokens drafted per step.
        prompt_lookup_min, prompt_lookup_max: shortest and longest n-gram that is looked up;
            None: 2 and 4.
        suffix_corpus: a file of UTF-8 text, in which `suffix` looks up what tokens follow.
        suffix_decoding_max_tree_depth: most tokens of a match that are compared.
        suffix_decoding_max_cached_requests: finished requests whose output is looked up, too; the
            oldest makes room for a new one. 0: no request sees what others put out.
        suffix_decoding_max_cached_tokens: most tokens of these outputs together, 28 bytes each.
        suffix_decoding_max_spec_factor: most drafts per token of the match.
        suffix_decoding_min_token_prob: drafts go on while the product of the frequencies with which
            they followed is at least this.
        draft_sample_method: `probabilistic` (None means this) draws drafts from q and verifies
            with it; `greedy` drafts the argmax and verifies it as one-hot.
        rejection_sample_method: the verification rule of requests that name none: `standard`,
            `block`, `coupled` (lossless, all three) or `synthetic` (see docs/verification.md).
        synthetic_acceptance_rate, synthetic_acceptance_rates, synthetic_acceptance_length: exactly
            one of them with `synthetic`, none of them without; all None by default. The rate is the
            mean, over positions i = 1..K, of the probability that the first i drafts are all
            accepted, in [0, 1]. The rates are these K probabilities, none above the one before. The
            length is the mean of accepted drafts + 1, in [1, K + 1].

    An option that the method does not take is refused when its drafter is built.
    """

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int = 4
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
        _make_plain(self)
        where = "speculative_config."
        if self.model is not None:
            remedy = "Leave it out for the draft model that comes with the target, if one does."
            object.__setattr__(self, "model", check_model(where + "model", self.model, remedy))
        check_revision(where + "revision", self.revision)
        remedy = "Pass speculative_config=None to decode without speculation."
        most = MAX_SPECULATIVE_TOKENS
        check_int(where + "num_speculative_tokens", self.num_speculative_tokens, 1, most, remedy)
        shortest, longest = self.lookup_sizes
        check_int(where + "prompt_lookup_min", shortest, 1)
        remedy = "It must not be smaller than `prompt_lookup_min`."
        check_int(where + "prompt_lookup_max", longest, shortest, remedy=remedy)
        self._check_suffix(where)
        method = self.draft_sample_method
        gumbel = "`gumbel` is called `probabilistic` here: drafts are drawn by Gumbel-max from q."
        if method is not None:
            remedy = gumbel if method == "gumbel" else ""
            check_choice(where + "draft_sample_method", method, DRAFT_SAMPLE_METHODS, remedy)
        rule = self.rejection_sample_method
        check_choice(where + "rejection_sample_method", rule, REJECTION_SAMPLE_METHODS)
        self._check_synthetic(where)
        if self.method is None:
            if self.model is None:
                remedy = "Use `draft_model` or `eagle3` (with `model`), `ngram` or `suffix`."
                raise ConfigError(where + "method", None, "given", remedy)
            object.__setattr__(self, "method", "draft_model")

    def _check_suffix(self, where: str) -> None:
        corpus, where = self.suffix_corpus, where + "suffix_"
        if corpus is not None:
            path = fspath(corpus) if isinstance(corpus, PathLike) else corpus
            if not isinstance(path, str) or not path:
                raise ConfigError(where + "corpus", corpus, "a file of UTF-8 text")
            object.__setattr__(self, "suffix_corpus", path)
        where += "decoding_"
        depth = self.suffix_decoding_max_tree_depth
        check_int(where + "max_tree_depth", depth, 1, 2**31 - 1)
        check_int(where + "max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        off = "`suffix_decoding_max_cached_requests=0` keeps none."
        tokens = self.suffix_decoding_max_cached_tokens
        check_int(where + "max_cached_tokens", tokens, 1024, 2**31 - 1, off)
        remedy = f"With matches of up to {depth} tokens there would be no drafts below."
        factor = self.suffix_decoding_max_spec_factor
        check_number(where + "max_spec_factor", factor, 1 / depth, MAX_SPECULATIVE_TOKENS, remedy)
        check_number(where + "min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)

    def _check_synthetic(self, where: str) -> None:
        options = {name: getattr(self, name) for name in _SYNTHETIC}
        if self.rejection_sample_method == "synthetic":
            check_synthetic(where, self.num_speculative_tokens, options)
        elif given := [name for name in _SYNTHETIC if options[name] is not None]:
            bound = f"left out with rejection_sample_method `{self.rejection_sample_method}`"
            remedy = "Set `rejection_sample_method` to `synthetic`, or leave it out."
            raise ConfigError(where + given[0], options[given[0]], bound, remedy)
        if self.synthetic_acceptance_rates is not None:
            rates = tuple(map(float, self.synthetic_acceptance_rates))
            object.__setattr__(self, "synthetic_acceptance_rates", rates)

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """Shortest and longest n-gram to look up, defaults filled in; each follows the other."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = 2 if longest is None else min(2, longest)
        return shortest, max(4, shortest) if longest is None else longest

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str | Self | None) -> Self | None:
        """Accept a dict, its JSON text, an instance, or None (no speculation)."""
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
        given = without_foreign(given, SPECULATIVE_FIELDS, ConfigError)
        check_known_keys("speculative_config", given, [f.name for f in fields(cls)])
        return cls(**given)


def _make_plain(config: Any) -> None:
    for f in fields(config):
        object.__setattr__(config, f.name, plain(getattr(config, f.name)))


_SYNTHETIC = tuple(f"synthetic_acceptance_{kind}" for kind in ("rate", "rates", "length"))


def check_synthetic(where: str, count: int, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless exactly one of the three is given, and in range.

    Args:
        where: stands before a name in an error.
        count: num_speculative_tokens, K.
        options: `synthetic_acceptance_rate`, `_rates` and `_length`, None if not given.
    """
    given = [name for name in _SYNTHETIC if options[name] is not None]
    one = "Rule `synthetic` takes exactly one of the three."
    if not given:
        first, *others = _SYNTHETIC
        raise ConfigError(where + first, None, f"given, or one of {', '.join(others)}", one)
    if len(given) > 1:
        raise ConfigError(where + given[1], options[given[1]], f"left out beside `{given[0]}`", one)
    field, value = where + given[0], options[given[0]]
    if given[0] == "synthetic_acceptance_rate":
        check_number(field, value, 0, 1)
    elif given[0] == "synthetic_acceptance_length":
        bonus = "It counts the bonus token: at most num_speculative_tokens + 1."
        check_number(field, value, 1, count + 1, bonus)
    else:
        _check_rates(field, value, count)


def _check_rates(field: str, given: Any, count: int) -> None:
    """K unconditional rates; each is in [0, 1] and at most the one before."""
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        bound = f"a list of num_speculative_tokens = {count} numbers in [0, 1]"
        raise ConfigError(field, given, bound)
    before = 1.0
    for i, rate in enumerate(given):
        remedy = f"It is the chance that the first {i + 1} drafts are all accepted: it cannot rise."
        check_number(f"{field}[{i}]", rate, 0, before, remedy)
        before = float(rate)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine.

    Attributes:
        model: `tiny-python`, a checkpoint folder (a text or a `Path`), or a hub id, which is
            downloaded if it is not in the local cache.
        speculative_config: drafting and verification; None decodes one token per step.
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one that PyTorch can use.
        dtype: `float32`, `bfloat16`, `float16`, a torch dtype, or `auto`, which is float32 on a
            CPU; `float` and `half` are the first and the last. Where native kernels run the target,
            in float32, a request with a seed gets the same tokens in every batch. PyTorch's kernels
            round by what else is in the batch: in float32 that decides near-ties alone (1e-5 in a
            logit), in half types many choices.
        seed: the engine's; requests without one get one made of it and their number; None is 0.
        max_model_len: longest prompt + output; None: the checkpoint's own limit, or on a GPU the
            longest for which its memory suffices.
        max_num_seqs: most requests running at once; each owns one permanent slot.
        max_num_batched_tokens: most tokens in one forward pass; longer prompts are prefilled in
            chunks.
        max_num_waiting: refuse a request while so many wait; None takes any number.
        enable_prefix_caching: reuse the cache blocks of earlier requests that begin with the same
            tokens.
        block_size: tokens per cache block; None: 16 on a CPU, 64 on a GPU. Prefixes are reused by
            whole blocks, and a request's last block is half empty on average.
        memory_fraction: of a GPU's memory, the most that the engine takes, weights, steps and
            graphs included; the cache gets what they leave. Plays no part on a CPU, nor if the
            size of the cache is given.
        num_blocks: blocks in the pool; None: enough for `kv_cache_gib`.
        kv_cache_gib: memory of the target's and the drafter's cache and of the drafts'
            probabilities together when `num_blocks` is None. Never more than `max_num_seqs`
            requests of `max_model_len` need. None: 0.5 on a CPU; on a GPU what `memory_fraction`
            leaves.
        generation_config: what a request without sampling parameters gets: `auto`, the defaults of
            the checkpoint's generation_config.json; `vllm`, those of `SamplingParams`, whatever the
            file says.
        tokenizer: name, folder or hub id of another tokenizer; None: the model's own.
        revision: branch, tag or commit of a model that is a hub id; None: `main`.
        local_files_only: take hub ids from the local cache, and never look at the network.
        load_format: `auto` reads safetensors, `dummy` makes random weights from config.json alone.
        backend: `native`, `torch`, `triton`, `reference` (the fp64 oracle), or `auto`: the
            fastest for the device.
        threads: threads to compute with, exactly so many. None: one, or one per physical core that
            the process may use (no more than `OMP_NUM_THREADS`), whichever is faster, as steps of
            every size are timed now and then. Every step sets the number for the whole process;
            where native kernels run the target, PyTorch gets one. Native kernels give the same bits
            with any number; PyTorch may not, so that a request with a seed is the same to the bit
            there only with a number given.
        enforce_eager: launch every step operator by operator, and capture no CUDA graphs.
        async_scheduling: launch each step before the one before is read, so that a GPU never waits
            for the host. None: on a GPU; on a CPU True changes the order of work, not a token.
        use_fp64_gumbel: draw all noise in FP64.
        deterministic: on a GPU where Triton kernels run the whole model in bfloat16, in steps of up
            to 16 tokens: a token's logits are the same to the bit whatever runs beside it, so that
            greedy text is equal with and without speculation. Such steps take 1 to 4 % longer.
    """

    model: str
    speculative_config: SpeculativeConfig | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int | None = None
    enable_prefix_caching: bool = True
    block_size: int | None = None
    memory_fraction: float = 0.9
    num_blocks: int | None = None
    kv_cache_gib: float | None = None
    generation_config: str = "auto"
    tokenizer: str | None = None
    revision: str | None = None
    local_files_only: bool = False
    load_format: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    use_fp64_gumbel: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        _make_plain(self)
        object.__setattr__(self, "model", check_model("model", self.model))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", check_model("tokenizer", self.tokenizer))
        check_revision("revision", self.revision)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", self.device, "one of auto, cpu, cuda, cuda:N")
        dtype = str(self.dtype).removeprefix("torch.")
        aliases = {"half": "float16", "float": "float32"}
        object.__setattr__(self, "dtype", aliases.get(dtype, dtype))
        check_choice("dtype", self.dtype, DTYPES)
        if self.seed is None:
            object.__setattr__(self, "seed", 0)
        check_int("seed", self.seed, 0, 2**64 - 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_waiting is not None:
            check_int("max_num_waiting", self.max_num_waiting, 1, remedy="None takes any number.")
        if self.block_size is not None:
            check_int("block_size", self.block_size, 1, 1024)
        check_number("memory_fraction", self.memory_fraction, 0.01, 1)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, 1)
        if self.threads is not None:
            check_int("threads", self.threads, 1, 1024)
        if self.async_scheduling not in (None, True, False):
            raise ConfigError("async_scheduling", self.async_scheduling, "None, true or false")
        gib = self.kv_cache_gib
        is_number = isinstance(gib, (int, float)) and not isinstance(gib, bool)
        if gib is not None and not (is_number and 0 < gib < 2**40):
            raise ConfigError("kv_cache_gib", gib, "a finite number > 0")
        speculation = SpeculativeConfig.parse(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculation)
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        own_file = "A file of its own belongs into the checkpoint's folder."
        check_choice("generation_config", self.generation_config, ("auto", "vllm"), own_file)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(field.name, value, "true or false")

    @property
    def num_drafts(self) -> int:
        """K; 0 without speculation."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @classmethod
    def parse(cls, **options: Any) -> EngineConfig:
        """Build from what a user typed; unknown names are errors with the nearest valid one."""
        options = without_foreign(options, ENGINE_OPTIONS, ConfigError)
        check_known_keys("engine option", options, [f.name for f in fields(cls)])
        return cls(**options)
