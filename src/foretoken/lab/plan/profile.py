"""Costs of steps, on this machine or another: the file that `foretoken plan` keeps; and the
acceptance of drafts, in any of the forms in which it may be stated. No torch.

A profile is one JSON object; its fields are those of `Profile`, and `schema`. Times are in seconds.

`estimate` makes one from shapes alone: a pass takes as long as reading its weights at the stated
bandwidth, or as its products at the stated arithmetic rate, whichever is longer, plus the time of
reading contexts. Kernels reach some 75 to 90 % of either, and hosts add their part: state rates
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
    """The engine options that its scheduler reads."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_step_seconds: float | None = None


@dataclass(frozen=True)
class Profile:
    """Costs of an engine's steps, and its sizes.

    Shapes: J batch sizes, D numbers of drafts.

    Attributes:
        model: the target.
        method: how drafts are made; `plain` without drafts.
        origin: `measured` here, `estimated` from shapes and stated hardware, or `published`.
        drafts: K of the columns, rising from 0.
        batches: requests of the rows, rising from 1.
        rest: [J, D], a step without drafting and with empty contexts.
        draft: [J, D], drafting alone.
        context: [D], per token of all contexts together.
        missed: per token of a prompt, which the drafter computes when it first drafts.
        prompts: None: unknown; prompts are left out of all figures.
        limits: sizes of the engine.
        runs_ahead: each step is launched before the previous one is read.
        lockstep: all requests of a step take as many draft passes as the one with the most drafts.
        block_bytes: of a cache block, the drafter's part included.
        memory: bytes of everything else that the engine allocates, by name.
        acceptance: chances that the first i + 1 drafts are all accepted, measured with the steps.
        made: date, commit, hardware.
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
        """Raise `ConfigError` for the first field that is out of bounds."""
        check_choice("profile.origin", self.origin, ORIGINS)
        for name, first in (("drafts", 0), ("batches", 1)):
            _check_rising(f"profile.{name}", getattr(self, name), first)
        J, D = len(self.batches), len(self.drafts)
        _check_seconds("profile.rest", self.rest, J, D)
        _check_seconds("profile.draft", self.draft, J, D)
        _check_seconds("profile.context", self.context, D)
        _check_seconds("profile.missed", self.missed)
        if not (np.add(self.rest, self.draft) > 0).all():
            raise ConfigError("profile.rest", 0.0, "more than 0 seconds, with `draft`")
        if self.prompts is not None:
            _check_rising("profile.prompts.tokens", self.prompts.tokens, None, least=2)
            P = len(self.prompts.tokens)
            _check_seconds("profile.prompts.seconds", self.prompts.seconds, P)
            _check_seconds("profile.prompts.pair", self.prompts.pair)
        for name, value in asdict(self.limits).items():
            if name != "max_step_seconds":
                check_int(f"profile.limits.{name}", value, 1)
            elif value is not None:
                check_number(f"profile.limits.{name}", value, 0.001, 1e6)
        if self.acceptance is not None:
            before = 1.0
            for i, rate in enumerate(self.acceptance):
                check_number(f"profile.acceptance[{i}]", rate, 0, before)
                before = rate

    @property
    def most_drafts(self) -> int:
        """The largest K with known costs."""
        return self.drafts[-1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of drafts that captured steps may have; () without captured steps."""
        return draft_widths(self.most_drafts, adapts=True) if self.lockstep else ()

    @cached_property
    def table(self) -> StepTable:
        """Costs of all numbers of drafts, on smooth curves through the measured ones."""
        every = np.arange(self.most_drafts + 1)
        rest, draft = (smooth(self.drafts, np.array(x), every) for x in (self.rest, self.draft))
        context = np.interp(every, self.drafts, self.context)
        return StepTable(np.array(self.batches), rest, np.maximum(draft, 0), context, self.missed)

    def write(self, path: Path) -> None:
        """Write it as JSON, with a line per field."""
        from foretoken.lab.results import as_text, replace_text  # loads torch

        replace_text(path, as_text({"schema": SCHEMA, **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file; `ConfigError` says what is wrong with it."""
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
            raise ConfigError("profile", str(path), "complete", f"{error}.") from None


def _check_rising(name: str, given: Any, first: int | None, least: int = 1) -> None:
    """Check for integers in rising order that begin with `first`, or with any >= 1 for None."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) >= least
    if not is_list or (first is not None and given[0] != first):
        begins = "" if first is None else f" from {first} on"
        raise ConfigError(name, given, f"{least} or more integers in rising order{begins}")
    before = 0 if first is None else first - 1
    for i, value in enumerate(given):
        check_int(f"{name}[{i}]", value, before + 1)
        before = value


def _check_seconds(name: str, given: Any, *shape: int) -> None:
    if shape:
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != shape[0]:
            raise ConfigError(name, given, f"a list of length {shape[0]}")
        for i, part in enumerate(given):
            _check_seconds(f"{name}[{i}]", part, *shape[1:])
    else:
        check_number(name, given, 0, 3600, "It is in seconds.")


def smooth(x: Sequence[float], y_NX: Array, wanted: Array) -> Array:
    """Values [N, W] at `wanted`, on monotone cubic curves through points [N, X].

    The curves turn only where the points do (Fritsch and Butland 1984, ends as in Moler 2004).
    Outside the points they are constant. Between K=3 and K=7 of a published EAGLE-3 table this is
    1.2 % off, a straight line 3 %.
    """
    x_X, at = np.asarray(x, dtype=float), np.clip(np.asarray(wanted, dtype=float), x[0], x[-1])
    if len(x_X) < 3:
        return np.array([np.interp(at, x_X, y) for y in y_NX])
    wide, slope = np.diff(x_X), np.diff(y_NX, axis=1) / np.diff(x_X)
    tangent = np.zeros_like(y_NX, dtype=float)
    before, after = slope[:, :-1], slope[:, 1:]
    turns = before * after <= 0
    weight = (2 * wide[1:] + wide[:-1]) / (3 * (wide[1:] + wide[:-1]))
    safe = np.where(turns, 1.0, weight * after + (1 - weight) * before)
    tangent[:, 1:-1] = np.where(turns, 0.0, before * after / safe)
    for end, one, two in ((0, 0, 1), (-1, -1, -2)):
        h, k, near, far = wide[one], wide[two], slope[:, one], slope[:, two]
        found = ((2 * h + k) * near - h * far) / (h + k)
        found = np.where(found * near <= 0, 0.0, found)
        sharp = (near * far < 0) & (abs(found) > 3 * abs(near))
        tangent[:, end] = np.where(sharp, 3 * near, found)
    i = np.clip(np.searchsorted(x_X, at, side="right") - 1, 0, len(wide) - 1)
    t, h = (at - x_X[i]) / wide[i], wide[i]
    ends = (1 + 2 * t) * (1 - t) ** 2 * y_NX[:, i] + t**2 * (3 - 2 * t) * y_NX[:, i + 1]
    bends = t * (1 - t) ** 2 * tangent[:, i] - t**2 * (1 - t) * tangent[:, i + 1]
    return np.asarray(ends + h * bends)


# From shapes alone --------------------------------------------------------------------------------


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PASSES = ("draft_model", "eagle3")  # methods with one model pass per draft
_CHUNKS = tuple(2**i for i in range(15))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense decoder that decide the cost of a pass.

    Attributes:
        weights: parameters that a pass reads; the embedding's few rows are left out.
        kept: numbers in the keys and values of a token, all layers together.
    """

    weights: int
    kept: int

    @classmethod
    def read(cls, folder: Path, *, is_head: bool = False) -> Shape:
        """Read it from a folder's config.json.

        Args:
            is_head: it is an EAGLE-3 head. Its features, which are made once a step, are left out.

        Raises:
            CheckpointError: there is no such file, or it lacks a needed field.
            UnsupportedModelError: a mixture of experts, of which each token reads only a part.
        """
        given = config_of(folder)
        if any(given.get(name) for name in _EXPERTS):
            said = "is a mixture of experts: what a token reads of it does not follow from shapes."
            raise UnsupportedModelError(f"{folder} {said} Measure it: leave out --bandwidth.")
        try:
            width, heads = given["hidden_size"], given["num_attention_heads"]
            layers, middle = given["num_hidden_layers"], given["intermediate_size"]
            vocab = given.get("draft_vocab_size") or given["vocab_size"]
        except KeyError as error:
            raise CheckpointError(f"{folder}/config.json lacks {error}.") from None
        size = given.get("head_dim") or width // heads
        kept = 2 * (given.get("num_key_value_heads") or heads) * size
        inputs = 2 * width if is_head else width  # a head's layer reads embedding and state
        layer = inputs * (heads * size + kept) + heads * size * width + 3 * width * middle
        return cls(layers * layer + vocab * width, layers * kept)


def config_of(folder: Path) -> Mapping[str, Any]:
    """The text model's part of config.json, or the same from a GGUF file."""
    from foretoken.models.checkpoint import read_config

    if folder.is_file():
        return read_config(folder)
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return dict(given.get("text_config") or given)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}: config.json cannot be read: {error}.") from None


def _bytes_of_a_weight(path: Path) -> float:
    """Mean bytes per weight of a GGUF file."""
    from foretoken.models.gguf.reader import read_gguf

    file = read_gguf(path)
    return file.nbytes / sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def _limits(config: EngineConfig, folder: Path, block: int, kept: int, length: int) -> EngineLimits:
    """Limits with blocks for `max_num_seqs` requests, unless the options set the cache's size."""
    limit = config.max_model_len or config_of(folder).get("max_position_embeddings", 4096)
    check_int("max_model_len", limit, 1)
    blocks = config.num_blocks or config.max_num_seqs * (-(-length // block) + 1)
    if config.kv_cache_gib is not None and config.num_blocks is None:
        blocks = int(config.kv_cache_gib * 2**30 / (block * kept))
        check_int("blocks of `kv_cache_gib`", blocks, 1, remedy="Raise it.")
    return EngineLimits(
        config.max_num_seqs, config.max_num_batched_tokens, limit, block, blocks,
        config.max_step_seconds,
    )  # fmt: skip


def estimate(config: EngineConfig, bandwidth: float, flops: float, length: int) -> Profile:
    """The profile of an engine of these options.

    Args:
        bandwidth: bytes per second.
        flops: products and sums per second.
        length: tokens of a request; unless its size is set, the cache holds `max_num_seqs` of them.
    """
    from foretoken.models.locate import resolve_checkpoint

    def find(name: str) -> Path:
        local = config.local_files_only
        return resolve_checkpoint(name, local_files_only=local, weights=False)

    folder, speculation = find(config.model), config.speculative_config
    target, draft = Shape.read(folder), Shape(0, 0)
    if speculation is not None and speculation.method in _PASSES:
        if speculation.model is None:
            said = "The draft's shape is not known: name its folder as `model`"
            raise CheckpointError(f"{said} in --speculative-config.")
        draft = Shape.read(find(speculation.model), is_head=speculation.method == "eagle3")

    dtype = config_of(folder).get("dtype") if config.dtype == "auto" else config.dtype
    size = kv_size = float(_BYTES.get(str(dtype), 2))
    if folder.is_file():  # GGUF, as on a CPU
        size, kv_size = _bytes_of_a_weight(folder), float(_BYTES["float32"])

    def seconds(shape: Shape, rows: int) -> float:
        return max(size * shape.weights / bandwidth, 2 * shape.weights * rows / flops)

    most, batches = config.num_drafts, sorted({*_CHUNKS, config.max_num_seqs})
    batches = [b for b in batches if b <= config.max_num_seqs]
    drafts, kept = list(range(most + 1)), int(kv_size * (target.kept + draft.kept))
    block = config.block_size or BLOCK_SIZES["cuda"]
    limits = _limits(config, folder, block, kept, length)
    return Profile(
        model=config.model,
        method=str(speculation.method) if speculation else "plain",
        origin="estimated",
        drafts=drafts,
        batches=batches,
        rest=[[seconds(target, b * (1 + k)) for k in drafts] for b in batches],
        draft=[[k * seconds(draft, b) for k in drafts] for b in batches],
        context=[kv_size * (target.kept + k * draft.kept) / bandwidth for k in drafts],
        missed=2 * draft.weights / flops,
        prompts=PromptCosts(_CHUNKS, [seconds(target, n) for n in _CHUNKS]),
        limits=limits,
        runs_ahead=True,
        lockstep=True,
        block_bytes=block * kept,
        memory={
            "weights": int(size * target.weights),
            "weights of the draft": int(size * draft.weights),
        },
        made={"hardware": {"bytes_per_s": bandwidth, "flops": flops}},
    )


# Acceptance ---------------------------------------------------------------------------------------
# It is stated as a rate or a length at the largest K, with the decay of synthetic acceptance; as a
# rate for each position; or in a file. A file is JSON or YAML: results of `foretoken bench`,
# `{"rate": r}`, `{"rates": [..]}`, `{"length": L}`, or mean lengths by K, as in public tables of
# acceptance lengths, possibly under names: `{"a-model": {"thinking_on": {1: 1.78, ..}}}`.


_KINDS = ("rate", "rates", "length")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chances that the first 1, 2, .. drafts are all accepted, by K.

    Attributes:
        rates: the chances, for as many drafts as they are known.
        lengths: K -> mean tokens of a round, bonus included; instead of rates.
        source: where they come from, for a report.
    """

    rates: Sequence[float] = ()
    lengths: Mapping[int, float] = field(default_factory=dict)
    source: str = "stated"

    @property
    def most(self) -> int:
        """The largest K with known acceptance."""
        return max(self.lengths, default=len(self.rates))

    def joint(self, drafts: int) -> tuple[float, ...]:
        """Chances for K drafts. Between two K of known lengths, the length is interpolated.

        Raises:
            ConfigError: K is larger than `most`.
        """
        check_int("drafts", drafts, 0, self.most, "Nothing is known of the acceptance beyond.")
        if not self.lengths or not drafts:
            return tuple(self.rates[:drafts])
        known = sorted({0: 1.0, **self.lengths}.items())
        at, lengths = zip(*known, strict=True)
        length = float(np.interp(drafts, at, lengths))
        rate = (length - 1) / drafts
        return joint_rates(conditional_rates(drafts, synthetic_acceptance_rate=rate))

    @classmethod
    def stated(cls, drafts: int, **given: Any) -> Self:
        """From exactly one of `rate`, `rates` and `length`; K is `drafts`, or that of `rates`."""
        names = [name for name in _KINDS if given.get(name) is not None]
        if len(names) != 1:
            bound = f"one of {', '.join(_KINDS)}, and no other beside it"
            raise ConfigError("acceptance", names, bound)
        count = drafts
        if names == ["rates"]:
            count = len(given["rates"]) if isinstance(given["rates"], Sequence) else 0
        options = {f"synthetic_acceptance_{names[0]}": given[names[0]]}
        try:
            check_int("drafts", count, 1)
            conditional = conditional_rates(count, **_decayed(options, count))
        except ConfigError as error:
            name = error.field.replace("synthetic_acceptance_", "acceptance_")
            raise ConfigError(name, error.value, error.bound, error.remedy) from None
        return cls(joint_rates(conditional), source=f"stated: {names[0]} {given[names[0]]}")

    @classmethod
    def read(cls, path: Path, drafts: int, name: str | None = None) -> Self:
        """Read it from a file.

        Args:
            drafts: K of a rate or length.
            name: which of the file's tables, its names joined by `/`; None: the only one.
        """
        data = _parsed(path)
        source = f"{path.name}{f', {name}' if name else ''}"
        if isinstance(data, Mapping) and "rows" in data:
            return cls(_of_results(path, data["rows"]), source=source)
        if isinstance(data, Mapping) and (set(data) & {*_KINDS}):
            found = cls.stated(drafts, **{kind: data.get(kind) for kind in _KINDS})
            return cls(found.rates, source=source)
        tables = dict(_tables(data, ""))
        if name is None and len(tables) == 1:
            name = next(iter(tables))
        if name not in tables:
            bound = f"one of {', '.join(tables)}" if tables else "left out: the file has no table"
            raise ConfigError("acceptance_name", name, bound, f"It is about {path.name}.")
        lengths = tables[str(name)]
        for k, length in lengths.items():
            check_int(f"{path.name}: {name}", k, 1)
            check_number(f"{path.name}: {name}.{k}", length, 1, k + 1, "It counts the bonus token.")
        return cls((), lengths, f"{path.name}, {name}")


def _decayed(options: dict[str, Any], count: int) -> dict[str, Any]:
    """Replace a length by the rate with the same mean: its chances decay, as those of real drafts
    do."""
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


def _of_results(path: Path, rows: Any) -> tuple[float, ...]:
    """Rates of the last row with the largest K: acceptance does not depend on batch sizes."""
    found = list[list[Any]]()
    for row in rows if isinstance(rows, list) else ():
        values = row.get("values") if isinstance(row, Mapping) else None
        names = (f"unconditional_at_{i}" for i in count(1))
        known = values if isinstance(values, Mapping) else {}
        found.append([known[name] for name in takewhile(known.__contains__, names)])
    if not any(found):
        bound = "results with `unconditional_at_1`: those of a run with drafts"
        raise ConfigError("acceptance_file", str(path), bound)
    rates = list[float]()
    longest: list[Any] = max(found[::-1], key=len)
    for i, value in enumerate(longest, start=1):
        rate: Any = value.get("median") if isinstance(value, Mapping) else value
        check_number(f"{path.name}: unconditional_at_{i}", rate, 0, 1)
        rates.append(min([rate, *rates]))
    return tuple(rates)


def _tables(data: Any, name: str) -> Iterator[tuple[str, dict[int, Any]]]:
    """Mappings of numbers to numbers anywhere in nested mappings, by their names."""
    if not isinstance(data, Mapping) or not data:
        return
    keys = [int(k) if str(k).isdecimal() else None for k in data]
    if None not in keys:
        yield name, {int(k): v for k, v in data.items()}
        return
    for key, value in data.items():
        yield from _tables(value, f"{name}/{key}".lstrip("/"))
