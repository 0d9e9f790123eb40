"""`Profile`: the costs of an engine's steps; `Acceptance`: how many drafts are accepted. No torch.

`estimate` makes a profile from shapes only. The time of a pass is the longer of two times: reading
its weights at the stated bandwidth, or its products at the stated arithmetic rate; plus the time of
reading contexts. Kernels reach some 75 to 90 % of either rate, and hosts add some time: state rates
that are reached in practice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import numpy as np

from foretoken.config import BLOCK_SIZES, EngineConfig, check_choice, check_int, check_number
from foretoken.drafting.control import Array, StepTable, draft_widths
from foretoken.engine.pace import PromptCosts
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError, check_known_keys
from foretoken.sampling.synthetic import conditional_rates, joint_rates

SCHEMA = 1
ORIGINS = ("measured", "estimated", "published")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine options that the scheduler reads."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_step_seconds: float | None = None


@dataclass(frozen=True)
class Profile:
    """Costs of an engine's steps in seconds, and sizes of the engine.

    Shapes: J batch sizes, D numbers of drafts. A file has these fields, and `schema`, as JSON.

    Attributes:
        method: the method of drafting; `plain` without drafts.
        origin: `measured` here, `estimated` from shapes and stated hardware, or `published`.
        drafts: K of the columns, rising from 0.
        batches: batch sizes of the rows, rising from 1.
        rest: [J, D], seconds of a step with empty contexts, without its drafting.
        draft: [J, D], seconds of the step's drafting.
        context: [D], seconds per token of context, summed over all requests.
        missed: seconds per token of a prompt, which the drafter computes before its first draft.
        prompts: costs of prompts; None: unknown, and prompts are left out of all figures.
        runs_ahead: whether each step is launched before the result of the previous step is read.
        lockstep: whether every request of a step makes as many draft passes as the request with
            the most drafts.
        block_bytes: bytes of a cache block, including the drafter's part.
        memory: bytes of everything else that the engine allocates, by name.
        acceptance: chances that the first i + 1 drafts are all accepted, measured with the steps.
        made: how the profile was made: date, commit, hardware.
    """

    model: str
    method: str
    origin: str
    drafts: Sequence[int]
    batches: Sequence[int]
    rest: Sequence[Sequence[float]]
    draft: Sequence[Sequence[float]]
    context: Sequence[float]
    missed: float
    prompts: PromptCosts | None
    limits: EngineLimits
    runs_ahead: bool = False
    lockstep: bool = False
    block_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    acceptance: Sequence[float] | None = None
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("profile.origin", self.origin, ORIGINS)
        for name, start in (("drafts", 0), ("batches", 1)):
            _check_rising(f"profile.{name}", getattr(self, name), start)
        J, D = len(self.batches), len(self.drafts)
        _check_seconds("profile.rest", self.rest, J, D)
        _check_seconds("profile.draft", self.draft, J, D)
        _check_seconds("profile.context", self.context, D)
        _check_seconds("profile.missed", self.missed)
        if not (np.add(self.rest, self.draft) > 0).all():
            raise ConfigError("profile.rest", 0.0, "more than 0 seconds together with `draft`")
        if self.prompts is not None:
            _check_rising("profile.prompts.tokens", self.prompts.tokens, None, min_count=2)
            P = len(self.prompts.tokens)
            _check_seconds("profile.prompts.seconds", self.prompts.seconds, P)
            _check_seconds("profile.prompts.pair", self.prompts.pair)
        for name, value in asdict(self.limits).items():
            if name != "max_step_seconds":
                check_int(f"profile.limits.{name}", value, 1)
            elif value is not None:
                check_number(f"profile.limits.{name}", value, 0.001, 1e6)
        if self.acceptance is not None:
            limit = 1.0
            for i, chance in enumerate(self.acceptance):
                check_number(f"profile.acceptance[{i}]", chance, 0, limit)
                limit = chance

    @property
    def max_drafts(self) -> int:
        return self.drafts[-1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of drafts that captured steps may have; () without captured steps."""
        return draft_widths(self.max_drafts, adapts=True) if self.lockstep else ()

    @cached_property
    def table(self) -> StepTable:
        """Costs for every K, interpolated between the measured K."""
        all_k = np.arange(self.max_drafts + 1)
        rest, draft = (smooth(self.drafts, np.array(x), all_k) for x in (self.rest, self.draft))
        context = np.interp(all_k, self.drafts, self.context)
        return StepTable(np.array(self.batches), rest, np.maximum(draft, 0), context, self.missed)

    def write(self, path: Path) -> None:
        from foretoken.lab.results import as_text, replace_text  # loads torch

        replace_text(path, as_text({"schema": SCHEMA, **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a profile's file; `ConfigError` says what is wrong with the file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            bound = "a file of JSON that `foretoken plan --profile FILE` wrote"
            raise ConfigError("profile", str(path), bound, f"{error}.") from None
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ConfigError("profile", str(path), f"an object with schema {SCHEMA}")
        try:
            check_known_keys("profile", data, [f.name for f in fields(cls)])
            if data.get("prompts") is not None:
                data["prompts"] = PromptCosts(**data["prompts"])
            data["limits"] = EngineLimits(**data["limits"])
            return cls(**data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError("profile", str(path), "a complete profile", f"{error}.") from None


def _check_rising(name: str, values: Any, start: int | None, min_count: int = 1) -> None:
    """Raise `ConfigError` unless `values` are at min_count `min_count` rising integers.

    They must begin with `start`, or, if `start` is None, with any integer >= 1.
    """
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or len(values) < min_count or (start is not None and values[0] != start):
        begins = "" if start is None else f" from {start} on"
        raise ConfigError(name, values, f"{min_count} or more integers in rising order{begins}")
    previous = 0 if start is None else start - 1
    for i, value in enumerate(values):
        check_int(f"{name}[{i}]", value, previous + 1)
        previous = value


def _check_seconds(name: str, values: Any, *shape: int) -> None:
    """Raise `ConfigError` unless `values` are seconds in nested lists of this shape."""
    if shape:
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != shape[0]:
            raise ConfigError(name, values, f"a list of length {shape[0]}")
        for i, part in enumerate(values):
            _check_seconds(f"{name}[{i}]", part, *shape[1:])
    else:
        check_number(name, values, 0, 3600, "It is in seconds.")


def smooth(x: Sequence[float], y_NX: Array, new_x: Array) -> Array:
    """Values [N, W] at `new_x` [W], on N monotone cubic curves through points (x, y_NX).

    A curve rises where its points rise, and falls where they fall (Fritsch and Butland 1984, slopes
    at the ends as in Moler 2004). Outside the points it is constant. Between K=3 and K=7 of a
    published EAGLE-3 table the curve is 1.2 % off, a straight line 3 %.
    """
    x_X, x_W = np.asarray(x, dtype=float), np.clip(np.asarray(new_x, dtype=float), x[0], x[-1])
    if len(x_X) < 3:
        return np.array([np.interp(x_W, x_X, y) for y in y_NX])
    width, slope = np.diff(x_X), np.diff(y_NX, axis=1) / np.diff(x_X)
    tangent = np.zeros_like(y_NX, dtype=float)
    before, after = slope[:, :-1], slope[:, 1:]
    is_extremum = before * after <= 0
    weight = (2 * width[1:] + width[:-1]) / (3 * (width[1:] + width[:-1]))
    divisor = np.where(is_extremum, 1.0, weight * after + (1 - weight) * before)
    tangent[:, 1:-1] = np.where(is_extremum, 0.0, before * after / divisor)
    for end, first, second in ((0, 0, 1), (-1, -1, -2)):  # intervals, counted from that end
        h, k, near, far = width[first], width[second], slope[:, first], slope[:, second]
        at_end = ((2 * h + k) * near - h * far) / (h + k)
        at_end = np.where(at_end * near <= 0, 0.0, at_end)
        too_steep = (near * far < 0) & (abs(at_end) > 3 * abs(near))
        tangent[:, end] = np.where(too_steep, 3 * near, at_end)
    i = np.clip(np.searchsorted(x_X, x_W, side="right") - 1, 0, len(width) - 1)
    t, h = (x_W - x_X[i]) / width[i], width[i]
    ends = (1 + 2 * t) * (1 - t) ** 2 * y_NX[:, i] + t**2 * (3 - 2 * t) * y_NX[:, i + 1]
    bends = t * (1 - t) ** 2 * tangent[:, i] - t**2 * (1 - t) * tangent[:, i + 1]
    return np.asarray(ends + h * bends)


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CHUNKS = tuple(2**i for i in range(15))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense decoder that decide the cost of a pass.

    weights: number of parameters that a pass reads; the few rows of the embedding are left out
    kv_numbers: numbers in the keys and values of a token, in all layers together
    """

    weights: int
    kv_numbers: int

    @classmethod
    def read(cls, folder: Path, *, is_head: bool = False) -> Shape:
        """Read a model's shape from its config.json.

        is_head: whether the model is an EAGLE-3 head. The cost of the head's features, which are
            made once a step, is left out.

        Raises:
            CheckpointError: config.json is missing, cannot be read, or lacks a field.
            UnsupportedModelError: a mixture of experts, of which each token reads only a part.
        """
        config = config_of(folder)
        if any(map(config.get, ("num_experts", "num_local_experts", "n_routed_experts"))):
            why = "is a mixture of experts: shapes do not tell which weights a token reads."
            raise UnsupportedModelError(f"{folder} {why} Measure the costs: leave out --bandwidth.")
        try:
            width, heads = config["hidden_size"], config["num_attention_heads"]
            layers, inner = config["num_hidden_layers"], config["intermediate_size"]
            vocab = config.get("draft_vocab_size") or config["vocab_size"]
        except KeyError as error:
            raise CheckpointError(f"{folder}/config.json lacks {error}.") from None
        dim = config.get("head_dim") or width // heads
        kv_numbers = 2 * (config.get("num_key_value_heads") or heads) * dim
        inputs = 2 * width if is_head else width  # a head's layer reads embedding and feature
        layer = inputs * (heads * dim + kv_numbers) + heads * dim * width + 3 * width * inner
        return cls(layers * layer + vocab * width, layers * kv_numbers)


def config_of(folder: Path) -> Mapping[str, Any]:
    """The text model's part of config.json, or the same fields from a GGUF file."""
    from foretoken.models.checkpoint import read_config

    if folder.is_file():
        return read_config(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return dict(config.get("text_config") or config)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}: config.json cannot be read: {error}.") from None


def _bytes_of_a_weight(path: Path) -> float:
    from foretoken.models.gguf.reader import read_gguf

    file = read_gguf(path)
    return file.nbytes / sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def _limits(
    config: EngineConfig, folder: Path, block: int, token_bytes: int, length: int
) -> EngineLimits:
    """An engine's limits; the cache holds `max_num_seqs` requests of `length` tokens by default.

    block: tokens of a block
    token_bytes: bytes of the keys and values of a token
    """
    limit = config.max_model_len or config_of(folder).get("max_position_embeddings", 4096)
    check_int("max_model_len", limit, 1)
    blocks = config.num_blocks or config.max_num_seqs * (-(-length // block) + 1)
    if config.kv_cache_gib is not None and config.num_blocks is None:
        blocks = int(config.kv_cache_gib * 2**30 / (block * token_bytes))
        check_int("blocks of `kv_cache_gib`", blocks, 1, remedy="Raise it.")
    sizes = config.max_num_seqs, config.max_num_batched_tokens, limit, block, blocks
    return EngineLimits(*sizes, config.max_step_seconds)


def estimate(config: EngineConfig, bandwidth: float, flops: float, length: int) -> Profile:
    """The profile of an engine of these options.

    bandwidth: bytes per second
    flops: products and sums per second
    length: tokens of a request; by default the cache holds `max_num_seqs` such requests
    """
    from foretoken.models.locate import resolve_checkpoint

    def find(name: str) -> Path:
        local = config.local_files_only
        return resolve_checkpoint(name, local_files_only=local, weights=False)

    folder, speculation = find(config.model), config.speculative_config
    target, draft = Shape.read(folder), Shape(0, 0)
    if speculation is not None and speculation.method in ("draft_model", "eagle3"):
        if speculation.model is None:
            why = "The draft's shape is not known: name its folder as `model`"
            raise CheckpointError(f"{why} in --speculative-config.")
        draft = Shape.read(find(speculation.model), is_head=speculation.method == "eagle3")
    dtype = config_of(folder).get("dtype") if config.dtype == "auto" else config.dtype
    weight_bytes = kv_bytes = float(_BYTES.get(str(dtype), 2))  # of one number
    if folder.is_file():  # a GGUF file, which runs on a CPU
        weight_bytes, kv_bytes = _bytes_of_a_weight(folder), float(_BYTES["float32"])

    def seconds(shape: Shape, rows: int) -> float:
        return max(weight_bytes * shape.weights / bandwidth, 2 * shape.weights * rows / flops)

    batches = [b for b in sorted({*_CHUNKS, config.max_num_seqs}) if b <= config.max_num_seqs]
    drafts = list(range(config.num_drafts + 1))
    token_bytes = int(kv_bytes * (target.kv_numbers + draft.kv_numbers))
    block = config.block_size or BLOCK_SIZES["cuda"]
    return Profile(
        model=config.model,
        method=str(speculation.method) if speculation else "plain",
        origin="estimated",
        drafts=drafts,
        batches=batches,
        rest=[[seconds(target, b * (1 + k)) for k in drafts] for b in batches],
        draft=[[k * seconds(draft, b) for k in drafts] for b in batches],
        context=[kv_bytes * (target.kv_numbers + k * draft.kv_numbers) / bandwidth for k in drafts],
        missed=2 * draft.weights / flops,
        prompts=PromptCosts(_CHUNKS, [seconds(target, n) for n in _CHUNKS]),
        limits=_limits(config, folder, block, token_bytes, length),
        runs_ahead=True,
        lockstep=True,
        block_bytes=block * token_bytes,
        memory={
            "weights": int(weight_bytes * target.weights),
            "weights of the draft": int(weight_bytes * draft.weights),
        },
        made={"hardware": {"bytes_per_s": bandwidth, "flops": flops}},
    )


_STATED = ("rate", "rates", "length")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The chances that the first 1, 2, .. drafts are all accepted.

    They are stated as a mean rate or a mean length at the largest K, with the decay of synthetic
    acceptance, as a rate for each position, or in a file.

    rates: the known chances, for 1, 2, .. drafts
    lengths: in place of rates: mean tokens of a round, bonus included, by K
    source: where the numbers come from, for a report
    """

    rates: Sequence[float] = ()
    lengths: Mapping[int, float] = field(default_factory=dict)
    source: str = "stated"

    @property
    def max_drafts(self) -> int:
        """The largest K with known acceptance."""
        return max(self.lengths, default=len(self.rates))

    def joint(self, drafts: int) -> tuple[float, ...]:
        """The chances for this number of drafts, interpolated between lengths of known K."""
        check_int("drafts", drafts, 0, self.max_drafts, "The acceptance of more drafts is unknown.")
        if not self.lengths or not drafts:
            return tuple(self.rates[:drafts])
        known = sorted({0: 1.0, **self.lengths}.items())
        ks, lengths = zip(*known, strict=True)
        length = float(np.interp(drafts, ks, lengths))
        mean = (length - 1) / drafts
        return joint_rates(conditional_rates(drafts, synthetic_acceptance_rate=mean))

    @classmethod
    def stated(cls, drafts: int, **given: Any) -> Self:
        """Acceptance from exactly one of `rate`, `rates` and `length`.

        drafts: K of a rate or length; for `rates`, K is their number
        """
        names = [name for name in _STATED if given.get(name) is not None]
        if len(names) != 1:
            bound = f"exactly one of {', '.join(_STATED)}"
            raise ConfigError("acceptance", names, bound)
        count = drafts
        if names == ["rates"]:
            count = len(given["rates"]) if isinstance(given["rates"], Sequence) else 0
        options = {f"synthetic_acceptance_{names[0]}": given[names[0]]}
        try:
            check_int("drafts", count, 1)
            conditional = conditional_rates(count, **_length_as_rate(options, count))
        except ConfigError as error:
            name = error.field.replace("synthetic_acceptance_", "acceptance_")
            raise ConfigError(name, error.value, error.bound, error.remedy) from None
        return cls(joint_rates(conditional), source=f"stated: {names[0]} {given[names[0]]}")

    @classmethod
    def read(cls, path: Path, drafts: int, name: str | None = None) -> Self:
        """Read acceptance from a file of JSON or YAML.

        The file has results of `foretoken bench`, `{"rate": r}`, `{"rates": [..]}`,
        `{"length": L}`, or public tables of lengths by K. Tables may have nested names, as in
        `{"a-model": {"thinking_on": {1: 1.78, ..}}}`.

        drafts: K of a rate or length
        name: the name of a table, nested names joined by `/`; None: the only table
        """
        data = _parsed(path)
        source = f"{path.name}{f', {name}' if name else ''}"
        if isinstance(data, Mapping) and "rows" in data:
            return cls(_rates_of_results(path, data["rows"]), source=source)
        if isinstance(data, Mapping) and (set(data) & {*_STATED}):
            stated = cls.stated(drafts, **{key: data.get(key) for key in _STATED})
            return cls(stated.rates, source=source)
        tables = dict(_tables(data, ""))
        if name is None and len(tables) == 1:
            name = next(iter(tables))
        if name not in tables:
            bound = f"one of {', '.join(tables)}" if tables else "a table, but the file has none"
            raise ConfigError("acceptance_name", name, bound, f"The file is {path.name}.")
        lengths = tables[str(name)]
        for k, length in lengths.items():
            check_int(f"{path.name}: {name}", k, 1)
            check_number(f"{path.name}: {name}.{k}", length, 1, k + 1, "It counts the bonus token.")
        return cls((), lengths, f"{path.name}, {name}")


def _length_as_rate(options: dict[str, Any], count: int) -> dict[str, Any]:
    """The options with a mean length replaced by the mean rate that gives this length.

    The chances of a mean rate decay from draft to draft, like the chances of real drafts.
    """
    length = options.get("synthetic_acceptance_length")
    if length is None:
        return options
    check_number("acceptance_length", length, 1, count + 1, f"With K={count}, bonus included.")
    return {"synthetic_acceptance_rate": (length - 1) / count}


def _parsed(path: Path) -> Any:
    import yaml  # type: ignore[import-untyped]  # reads JSON, too

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        bound = "a file of JSON or YAML"
        raise ConfigError("acceptance_file", str(path), bound, f"{error}.") from None


def _rates_of_results(path: Path, rows: Any) -> tuple[float, ...]:
    """The rates in the last row of `foretoken bench` with the largest K, at any batch size."""
    rates_of_rows = list[list[Any]]()
    for row in rows if isinstance(rows, list) else ():
        values = row.get("values") if isinstance(row, Mapping) else None
        names = (f"unconditional_at_{i}" for i in count(1))
        known = values if isinstance(values, Mapping) else {}
        rates_of_rows.append([known[name] for name in takewhile(known.__contains__, names)])
    if not any(rates_of_rows):
        bound = "results of a run with drafts, which have `unconditional_at_1`"
        raise ConfigError("acceptance_file", str(path), bound)
    rates = list[float]()
    longest: list[Any] = max(rates_of_rows[::-1], key=len)
    for i, value in enumerate(longest, start=1):
        rate: Any = value.get("median") if isinstance(value, Mapping) else value
        check_number(f"{path.name}: unconditional_at_{i}", rate, 0, 1)
        rates.append(min([rate, *rates]))
    return tuple(rates)


def _tables(data: Any, name: str) -> Iterator[tuple[str, dict[int, Any]]]:
    """All tables (mappings with integer keys) in nested mappings, as (name, table)."""
    if not isinstance(data, Mapping) or not data:
        return
    keys = [int(k) if str(k).isdecimal() else None for k in data]
    if None not in keys:
        yield name, {int(k): v for k, v in data.items()}
        return
    for key, value in data.items():
        yield from _tables(value, f"{name}/{key}".lstrip("/"))
