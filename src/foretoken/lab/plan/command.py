"""`foretoken plan`: finds costs and acceptance, predicts, and shows it as a benchmark would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.lab.bench import report as bench
from foretoken.lab.desk import Desk, Section, Table
from foretoken.lab.plan.acceptance import Acceptance
from foretoken.lab.plan.options import PlanOptions
from foretoken.lab.plan.predict import Planner
from foretoken.lab.plan.profile import Profile, estimate
from foretoken.lab.results import Row, collect, stem
from foretoken.sampling.params import SamplingParams

_COLUMNS = {
    "tokens/s": ("output_tokens_per_second", 0, False),
    "speed-up": ("speedup", 2, False),
    "tokens/step": ("tokens_per_step", 2, False),
    "TPOT, ms": ("tpot_ms_p50", 2, False),
    "P95": ("tpot_ms_p95", 2, False),
    "TTFT, ms": ("ttft_ms_p50", 1, False),
    "P95 ": ("ttft_ms_p95", 1, False),
    "P99": ("ttft_ms_p99", 1, False),
}
_TITLES = {
    "simulated": ("Predicted: this many requests under way at a time", _COLUMNS),
    "outlook": (
        "Best K while a batch decodes",
        {
            "best K": ("best_k", 0, False),
            "tokens/s": ("output_tokens_per_second", 0, False),
            "speed-up": ("speedup", 2, False),
            "cache, GiB": ("cache_gib", 3, False),
        },
    ),
    "capacity": (
        "Requests per second within the bounds, of one engine",
        {"requests/s": ("capacity", 2, False), "engines": ("replicas", 0, False)},
    ),
    "fleet": (
        "One engine of the fleet",
        {
            **_COLUMNS,
            "within bounds": ("slo_met", 3, False),
            "memory, GiB": ("memory_gib", 2, False),
        },
    ),
}


def tables(rows: Sequence[Row]) -> dict[str, Table]:
    """By title; columns without a value are left out."""
    made = {}
    for kind, (title, columns) in _TITLES.items():
        found = [row for row in rows if row.labels["kind"] == kind]
        if found:
            made[title] = bench.table(found, columns)
        if kind == "outlook" and found and (needs := _needs(found)).lines:
            made["Mean tokens per round that K drafts must reach to pay, bonus included"] = needs
    return made


def _needs(rows: Sequence[Row]) -> Table:
    """Of each K; where not even K + 1 would pay, a dash."""
    drafts = sorted(int(n[12:]) for n in rows[0].values if n.startswith("need_length_"))
    lines = []
    for row in rows:
        cells = [bench.cell(row, f"need_length_{k}", 2) for k in drafts]
        possible = [float(c) <= k + 1 for c, k in zip(cells, drafts, strict=True)]
        lines.append([row.case, *(c if p else "–" for c, p in zip(cells, possible, strict=True))])
    return Table(["", *(f"K={k}" for k in drafts)], lines if drafts else [])


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the break-even rows say."""
    said = []
    for row in rows:
        if row.labels["kind"] == "break-even":
            last, most = row.values["last_batch"], row.labels["up_to"]
            where = f"At {row.labels['context']} tokens of context drafts"
            if not last:
                said.append(f"{where} do not pay at any batch up to {most}.")
            elif last == most:
                said.append(f"{where} pay up to batch {most}, the most that run at once.")
            else:
                said.append(f"{where} pay up to batch {last}, and at none above.")
    return said


def charts(rows: Sequence[Row]) -> list[str]:
    """SVGs of what was simulated: speed-up over the loads, a user's speed against all."""
    return bench.charts([row for row in rows if row.labels["kind"] == "simulated"])


_ESTIMATED = {
    *("model", "speculative_config", "dtype", "local_files_only", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "max_step_seconds", "block_size", "num_blocks", "kv_cache_gib"),
}
_FILES = {"acceptance_file", "output"}
_PARAMS = SamplingParams(temperature=0.0)
_REPEATS = 3  # of a calibration; no further one begins after so many seconds:
_PATIENCE_S = 40.0


class Command:
    """One call of the command."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def run(self, engine: Mapping[str, Any], options: PlanOptions, params: SamplingParams) -> None:
        """Predict and report; what was predicted is reported, too, if an exception ends it.

        Args:
            engine: fields of `EngineConfig`, those that were not given at their defaults.
        """
        profile = self._profile(engine, options, params)
        acceptance = _acceptance(profile, options)
        planner, said = Planner(profile, acceptance, options), list[str]()
        try:
            with self._desk.progress(planner.num_runs, "simulations") as report:
                planner.run(report)
        except BaseException as error:
            said.append(f"Ended early by {type(error).__name__}: cases are missing.")
            raise
        finally:
            if planner.rows:
                self._finish(planner, said)

    def _profile(
        self, engine: Mapping[str, Any], options: PlanOptions, params: SamplingParams
    ) -> Profile:
        is_timed = options.stored is None and options.bandwidth is None
        if not is_timed and replace(params, seed=None) != _PARAMS:
            bound = "left out where no steps are timed"
            raise ConfigError("sampling parameters", params, bound, "See --calibrate.")
        if options.stored is not None:
            profile = Profile.read(options.stored)
            bound = f"left out beside a profile, which is of {profile.model}, {profile.method}"
            same = {"model"} if engine.get("model") in (None, profile.model) else set[str]()
            _check_unset(engine, same, bound)
            return profile
        config, length = _sized(engine, options), options.input_len + options.output_len
        if options.bandwidth is not None and options.tflops is not None:
            _check_unset(engine, _ESTIMATED, "left out beside `bandwidth`: no engine is built")
            return estimate(config, 1e9 * options.bandwidth, 1e12 * options.tflops, length)
        return self._calibrated(config, options, params)

    def _calibrated(
        self, config: EngineConfig, options: PlanOptions, params: SamplingParams
    ) -> Profile:
        given = {f.name: getattr(config, f.name) for f in fields(config)}
        with self._desk.status(f"Loading {config.model}"):
            from foretoken.lab.plan.calibrate import Calibration
            from foretoken.lab.workloads import heldout
            from foretoken.llm import LLM

            llm = LLM(**given)
        text = list[int]()
        if (tokenizer := llm.engine.tokenizer) is not None:
            text = tokenizer.encode("".join(item.prompt + item.reference for item in heldout(24)))
        repeats, patience = options.repeats, math.inf
        if repeats is None:
            repeats, patience = _REPEATS, _PATIENCE_S
        calibration = Calibration(
            llm.engine, options.batch_sizes, params, repeats, text, patience=patience
        )
        with self._desk.progress(calibration.num_runs, "calibrating runs") as report:
            profile = calibration.run(report)
        if options.profile is not None:
            profile.write(Path(options.profile))
            said = f"Wrote {options.profile}."
            self._desk.errors.print(said, markup=False, soft_wrap=True)
        return profile

    def _finish(self, planner: Planner, notes: list[str]) -> None:
        profile, options, rows = planner.profile, planner.options, planner.rows
        said = [*_about(planner), *notes]
        shapes = {
            **{k: v for k, v in asdict(options).items() if k not in _FILES},
            "profile": {**asdict(profile), "model": Path(profile.model).name},
            "acceptance": {"source": planner.acceptance.source, "joint": planner.joint(None)},
        }
        found = collect(stem(options.output, "plan"), self._desk.typed, shapes, rows, said)
        self._desk.show(made := tables(rows), [*sentences(rows), *said])
        self._desk.write(found, options.output, made, [Section(charts=charts(rows))])


def _sized(engine: Mapping[str, Any], options: PlanOptions) -> EngineConfig:
    """Options of the engine with room for the largest batch, where they leave that open."""
    given = {name: value for name, value in engine.items() if value is not None}
    given["speculative_config"] = SpeculativeConfig.parse(given.get("speculative_config"))
    given = {"max_num_seqs": max(options.batch_sizes), **given, "enable_prefix_caching": False}
    return EngineConfig(**given)


def _check_unset(engine: Mapping[str, Any], taken: Set[str], bound: str) -> None:
    """Raise `ConfigError` for an option of the engine that would be ignored."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    for name, value in engine.items():
        if name not in taken and value is not None and value != defaults[name]:
            raise ConfigError(name, value, bound, "Or measure: --calibrate.")


def _acceptance(profile: Profile, options: PlanOptions) -> Acceptance:
    most = profile.most_drafts
    if not most:
        return Acceptance(source="no drafts")
    if options.acceptance_file is not None:
        path = Path(options.acceptance_file)
        return Acceptance.read(path, most, options.acceptance_name)
    given = {
        "rate": options.acceptance_rate, "rates": options.rates,
        "length": options.acceptance_length,
    }  # fmt: skip
    if any(value is not None for value in given.values()):
        return Acceptance.stated(most, **given)
    if profile.acceptance is None:
        remedy = "Or give one of --acceptance-rates, --acceptance-length, --acceptance-file."
        bound = "given: this profile has measured none"
        raise ConfigError("acceptance_rate", None, bound, remedy)
    return Acceptance(tuple(profile.acceptance), source="measured with the steps")


def _about(planner: Planner) -> list[str]:
    """Notes: where the figures are from."""
    profile, options = planner.profile, planner.options
    joint = ", ".join(f"{rate:.2f}" for rate in planner.acceptance.joint(planner.outlook.most))
    memory = sum(planner.memory().values()) / 2**30
    said = [
        f"Costs: {profile.origin}, {profile.model}, {profile.method}. Acceptance: "
        f"{planner.acceptance.source} ({joint or 'none'}). Memory of an engine: {memory:.2f} GiB. "
        f"Prompts of {options.input_len} tokens, outputs of {options.output_len}, no shared prefix."
    ]
    if (repeats := profile.made.get("repeats")) is not None:
        said.append(f"Every case was timed {repeats} times (--repeats).")
    if profile.origin == "estimated":
        said.append("An estimate from shapes: weights are read at the stated rate, hosts are idle.")
    if profile.prompts is None:
        said.append("The profile knows no prompts: they take no time here.")
    return said
