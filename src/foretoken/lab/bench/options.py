"""Options of `foretoken bench`: names, defaults, bounds. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

from foretoken.config import BLOCK_SIZES, EngineConfig, SpeculativeConfig, check_int, check_number
from foretoken.config.checks import check_outputs
from foretoken.errors import ConfigError

SYNTHETIC = {"length": "synthetic_acceptance_length", "rate": "synthetic_acceptance_rate"}
SWEPT: dict[str, type] = {
    "k": int, "drafter": str, "rule": str, "temperature": float, "length": float, "rate": float,
}  # fmt: skip
"""The options that can be swept, with the types of their values."""


class Load(NamedTuple):
    """How requests arrive: `concurrency` requests at a time, or `rate` per second (Poisson)."""

    concurrency: int
    rate: float | None = None

    @property
    def name(self) -> str:
        if self.rate is None:
            return f"concurrency {self.concurrency}"
        return f"{self.rate:g} requests/s"


@dataclass(frozen=True, eq=False)
class BenchCase:
    """A way to decode that is measured. Two cases are never equal.

    Attributes:
        name: the name in rows of a results file, without settings that all cases share.
        labels: `method`, `k`, `rule`, `temperature`, and all other swept options.
        fields: fields of `SamplingParams` for all requests of the case.
        speculation: options of the engine that requests cannot set.
    """

    name: str
    labels: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the case has no drafts; other cases are compared with such a case."""
        return bool(self.labels["method"] == "plain")


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read texts such as `k=2,4`; returns the values by name."""
    sweep: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in SWEPT or name in sweep:
            bound = f"NAME=VALUE,VALUE with NAME one of {', '.join(SWEPT)}, each of them once"
            raise ConfigError("sweep", text, bound)
        try:
            sweep[name] = [SWEPT[name](value.strip()) for value in values.split(",")]
        except ValueError:
            raise ConfigError("sweep", text, f"{SWEPT[name].__name__} values of `{name}`") from None
        if len(set(sweep[name])) < len(sweep[name]) or "" in sweep[name]:
            raise ConfigError("sweep", text, "values that all differ, and are not empty")
    return sweep


def engine_cases(
    sweep: Mapping[str, list[Any]],
    temperature: float,
    speculation: SpeculativeConfig | None,
    *,
    compare: bool,
) -> list[list[BenchCase]]:
    """The cases of engines in this process: for each engine, the list of cases that take turns.

    A request sets its own K, drafter, rule and temperature. The rates of synthetic acceptance
    belong to an engine and its K: every combination of rate and K needs a separate engine.

    compare: whether there are also cases without drafts
    """
    if speculation is None:
        if others := [name for name in sweep if name != "temperature"]:
            remedy = "Say how to draft with --speculative-config."
            raise ConfigError("sweep", f"{others[0]}=...", "left out without drafts", remedy)
        return [_plain(sweep, temperature)]
    swept = [name for name in SYNTHETIC if name in sweep]
    if len(swept) > 1:
        raise ConfigError("sweep", "length=..., rate=...", "one of the two")
    rule = "synthetic" if swept else speculation.rejection_sample_method
    ks = sweep.get("k", [speculation.num_speculative_tokens])
    engines: dict[tuple[Any, ...], list[BenchCase]] = {}
    for k, value in product(ks, sweep[swept[0]] if swept else [None]):
        options = {"num_speculative_tokens": k}
        if rule != "synthetic" and len(ks) > 1:
            options["num_speculative_tokens"] = max(ks)  # a request may have fewer drafts
        suffix = ""
        if swept:
            options |= {**dict.fromkeys(SYNTHETIC.values()), SYNTHETIC[swept[0]]: value}
            options |= {"synthetic_acceptance_rates": None, "rejection_sample_method": "synthetic"}
            suffix = f", {swept[0]} {value:g}"
        cases = engines.setdefault(tuple(options.values()), [])
        if compare and not cases:
            has_own_engine = rule == "synthetic" and (swept or len(ks) > 1)
            engine_name = f" (K={k}{suffix})" if has_own_engine else ""
            cases += _plain(sweep, temperature, engine_name, options)
        for case in _drafting(sweep, temperature, str(speculation.method), [k], rule):
            labels = {**case.labels, swept[0]: value} if swept else case.labels
            name = case.name + suffix
            cases.append(replace(case, name=name, labels=labels, speculation=options))
    return [*engines.values()]


def server_cases(
    sweep: Mapping[str, list[Any]], temperature: float, *, speculates: bool, compare: bool
) -> list[list[BenchCase]]:
    """The cases of a server; if it does not speculate, requests set only a temperature."""
    known = {"k", "drafter", "rule", "temperature"} if speculates else {"temperature"}
    if others := [name for name in sweep if name not in known]:
        bound = f"one of {', '.join(sorted(known))}, which requests to this server can set"
        raise ConfigError("sweep", f"{others[0]}=...", bound)
    plain = _plain(sweep, temperature) if speculates and compare else []
    method = "speculative" if speculates else "server"
    return [[*plain, *_drafting(sweep, temperature, method, sweep.get("k", [None]), None)]]


def speculation_of(config: SpeculativeConfig | None, case: BenchCase) -> SpeculativeConfig | None:
    """The speculative options with the changes of a case; None without drafts."""
    return None if config is None else replace(config, **case.speculation)


def _plain(
    sweep: Mapping[str, list[Any]],
    temperature: float,
    engine_name: str = "",
    speculation: Mapping[str, Any] | None = None,
) -> list[BenchCase]:
    """The cases without drafts, one per temperature; their names end with `engine_name`."""
    cases = []
    for t in sweep.get("temperature", [temperature]):
        name = "plain" + (f", T={t:g}" if "temperature" in sweep else "") + engine_name
        labels = {"method": "plain", "k": 0, "rule": None, "temperature": t}
        fields = {"temperature": t, "num_speculative_tokens": 0}
        cases.append(BenchCase(name, labels, fields, speculation or {}))
    return cases


def _drafting(
    sweep: Mapping[str, list[Any]],
    temperature: float,
    method: str,
    ks: Sequence[int | str | None],
    unswept_rule: str | None,
) -> list[BenchCase]:
    """The cases with drafts: every combination of the swept fields of a request.

    A field that is None is not sent: the engine or server decides.
    """
    cases = []
    for k, t, drafter, rule in product(
        ks,
        sweep.get("temperature", [temperature]),
        sweep.get("drafter", [None]),
        sweep.get("rule", [unswept_rule]),
    ):
        name = f"{drafter or method}" + (f", K={k}" if k is not None else "")
        name += f", {rule}" if "rule" in sweep else ""
        name += f", T={t:g}" if "temperature" in sweep else ""
        labels = {"method": drafter or method, "k": k, "rule": rule, "temperature": t}
        fields = {"num_speculative_tokens": k, "drafter": drafter, "rejection_sample_method": rule}
        sent = {field: value for field, value in fields.items() if value is not None}
        cases.append(BenchCase(name, labels, {"temperature": t, **sent}))
    return cases


DATASETS = (".jsonl", ".json")
SLO = ("ttft", "tpot", "itl", "e2e")
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `foretoken bench` measures, and where it writes.

    Attributes:
        url: an OpenAI-compatible server to measure; None: an engine in this process.
        served_model: the name of a model of the server; None: the first model that it lists.
        api_key: the server's API key; it is kept out of the results.
        timeout: seconds without data after which a request to a server has failed.
        concurrency: requests that are under way at any time; several numbers, separated by commas,
            are measured one after another; None: 1,4,16, if there is no `request_rate`.
        request_rate: requests that arrive in a second, at random intervals (a Poisson process);
            several rates are separated by commas.
        num_requests: requests of each run; or several numbers, separated by commas, one for each
            load. If it is equal to the concurrency, all requests are sent at once. None: twice the
            concurrency and at least 8, or 32 under a rate.
        input_len: tokens of a prompt; for two numbers with a dash, such as 64-256, each prompt's
            length is drawn between them.
        output_len: tokens that a request generates, or two numbers as for `input_len`; no answer
            ends earlier.
        repeats: measured runs of each case; their median, quartiles and range are reported.
        warmup: runs of each case before the measured runs; their figures are left out.
        prompts: `heldout` (pieces of Python code that come with Foretoken), `random` (token ids), a
            file of text, or a dataset, *.jsonl or *.json (docs/bench.md); None: `heldout`, or
            `random` if the model has no tokenizer.
        seed: seed of prompts, arrivals and noise; every request of every run has its own seed.
        compare: measure plain decoding, too, in turns with speculative decoding.
        sweep: NAME=VALUE,VALUE with NAME one of k, drafter, rule, temperature, length and rate (of
            synthetic acceptance); every combination is measured.
        slo: bounds in ms on each request, such as ttft=200,tpot=50,e2e=4000; a bound on itl is for
            the longest gap of a request.
        bandwidth: GB/s at which the device reads its memory; None: measured at the start.
        output: a file for the results: *.json, *.csv, *.svg or *.html.
    """

    url: str | None = None
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    concurrency: str | None = None
    request_rate: str | None = None
    num_requests: str | None = None
    input_len: str = "128"
    output_len: str = "64"
    repeats: int = 3
    warmup: int = 1
    prompts: str | None = None
    seed: int = 0
    compare: bool = True
    sweep: tuple[str, ...] = ()
    slo: str | None = None
    bandwidth: float | None = None
    output: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        loads = self.loads
        if len(set(loads)) < len(loads):
            names = ", ".join(load.name for load in loads)
            raise ConfigError("concurrency, request_rate", names, "values that all differ")
        check_int("repeats", self.repeats, 1)
        if len(self._counts) not in (0, 1, len(loads)):
            bound = f"one number, or one for each of the {len(loads)} loads"
            raise ConfigError("num_requests", self.num_requests, bound)
        check_int("warmup", self.warmup, 0)
        check_int("seed", self.seed, 0, 2**62)
        check_number("timeout", self.timeout, 1e-3, 1e6, "It is in seconds.")
        if self.bandwidth is not None:
            check_number("bandwidth", self.bandwidth, 1e-3, 1e6, "It is in GB/s.")
        for name in ("served_model", "api_key"):
            if self.url is None and getattr(self, name) is not None:
                raise ConfigError(name, "given", "left out without --url")
        if self.url is not None and self.bandwidth is not None:
            raise ConfigError("bandwidth", self.bandwidth, "left out with --url")
        _ = self.lengths, self.bounds, parse_sweep(self.sweep)
        check_outputs(self.output)

    @property
    def loads(self) -> list[Load]:
        """The loads, which are measured one after another; raises `ConfigError`."""
        concurrency = self.concurrency
        if concurrency is None and self.request_rate is None:
            concurrency = "1,4,16"
        loads = [Load(int(n)) for n in numbers("concurrency", concurrency, "integers >= 1", int)]
        rates = numbers("request_rate", self.request_rate, "numbers > 0", float)
        return loads + [Load(0, rate) for rate in rates]

    def requests_of(self, load: Load) -> int:
        if counts := self._counts:
            return counts[self.loads.index(load) if len(counts) > 1 else 0]
        return 32 if load.rate else max(8, 2 * load.concurrency)

    @property
    def _counts(self) -> list[int]:  # empty without `num_requests`
        return [int(n) for n in numbers("num_requests", self.num_requests, "integers >= 1", int)]

    @property
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The smallest and largest number of tokens of a prompt, and of an output."""
        return _read_range("input_len", self.input_len), _read_range("output_len", self.output_len)

    @property
    def bounds(self) -> dict[str, float]:
        """The SLO as upper bounds in ms, by the name of a figure."""
        result = {}
        for text in self.slo.split(",") if self.slo is not None else ():
            name, _, value = text.strip().partition("=")
            try:
                ms = float(value)
            except ValueError:
                ms = 0.0
            if name not in SLO or f"{name}_ms" in result or not 0 < ms < float("inf"):
                bound = f"bounds in ms > 0 such as ttft=200,tpot=50, of {', '.join(SLO)}"
                raise ConfigError("slo", self.slo, bound)
            result[f"{name}_ms"] = ms
        return result

    def sized(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options, with default sizes that have room for the largest load.

        engine: the fields of `EngineConfig` that the user gave; `ConfigError` if its `max_num_seqs`
            is smaller than the largest concurrency
        """
        speculation = SpeculativeConfig.parse(engine.get("speculative_config"))
        largest = max(load.concurrency for load in self.loads)
        sized = {"max_num_seqs": largest or _DEFAULTS["max_num_seqs"], **engine}
        sized["speculative_config"] = speculation
        max_num_seqs = sized["max_num_seqs"]
        if largest > max_num_seqs:
            bound = f"at least {largest}, the highest concurrency"
            raise ConfigError("max_num_seqs", max_num_seqs, bound)
        ks = parse_sweep(self.sweep).get("k", [speculation.num_drafts if speculation else 0])
        tokens = max(_DEFAULTS["max_num_batched_tokens"], max_num_seqs * (1 + max(ks)))
        sized.setdefault("max_num_batched_tokens", tokens)
        has_cache_size = {"num_blocks", "kv_cache_gib"} & engine.keys()
        is_dataset = (self.prompts or "").endswith(DATASETS)  # its prompts may have any length
        if not (has_cache_size or is_dataset or self.request_rate):
            from foretoken.engine.devices import choose_device  # imported here: it loads torch

            device = choose_device(engine.get("device", "auto"))
            block_size = engine.get("block_size") or BLOCK_SIZES[device.type]
            # One more block per request: the scheduler keeps a free block for each running request.
            blocks = -(-sum(longest for _, longest in self.lengths) // block_size) + 1
            sized["num_blocks"] = largest * blocks
        return sized


def numbers(name: str, texts: str | None, bound: str, number_type: type) -> list[float]:
    """Read positive numbers separated by commas; None gives an empty list.

    `ConfigError`: option `name` has a wrong number; `bound` says which numbers are allowed.
    """
    values = []
    for text in texts.split(",") if texts is not None else ():
        try:
            number = number_type(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise ConfigError(name, texts, f"{bound}, separated by commas")
        values.append(number)
    return values


def _read_range(name: str, text: str) -> tuple[int, int]:
    """Read a range such as `64-256`; for a single number, both ends are this number."""
    low_text, dash, high_text = text.partition("-")
    ends = (low_text, high_text if dash else low_text)
    low, high = (int(end) if end.isdecimal() else 0 for end in ends)
    if not 1 <= low <= high:
        raise ConfigError(name, text, "an integer >= 1, or two such as 64-256")
    return low, high
