"""`foretoken plan`: get costs and acceptance, predict, and show the results like a benchmark's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.control import Array
from foretoken.errors import ConfigError
from foretoken.lab.bench import command as bench
from foretoken.lab.bench import figures as bench_figures
from foretoken.lab.bench.load import Record, Run
from foretoken.lab.plan.fleet import Replicas, engine_options, read_model, replicas_of, sized_for
from foretoken.lab.plan.options import PlanOptions
from foretoken.lab.plan.profile import Acceptance, Profile, estimate
from foretoken.lab.plan.simulate import Fleet, Outlook, RequestSpec, Served, Simulation, Step
from foretoken.lab.reporter import Report, Reporter, Section, Table
from foretoken.lab.results import Label, Row, collect, stem
from foretoken.sampling.params import SamplingParams

_ALL_DRAFTS = 8  # every K is simulated if the largest K is at most this
_CONTEXTS = (1, 4, 16)  # contexts of the outlook, in units of the requests' mean context
_RATES, _ENGINES, _REQUESTS = 8, 12, 400  # in a run that looks for an engine's capacity
_SETTLED = 0.03  # the capacity has settled if later requests lower it by at most this share
_MET = 0.95  # share of the requests that must meet the bounds
_MAX_SHOWN = 16  # the capacity is shown for every number of replicas up to this


class LoadPoint(NamedTuple):
    """A load to simulate: `batch` requests under way at once, and K; None: `auto`."""

    batch: int
    drafts: int | None

    @property
    def name(self) -> str:
        k = "auto" if self.drafts is None else f"K={self.drafts}" if self.drafts else "plain"
        return f"concurrency {self.batch}, {k}"


@dataclass
class Planner:
    """Makes all predictions. `rows` holds the finished predictions, even after an interruption."""

    profile: Profile
    acceptance: Acceptance
    options: PlanOptions
    replicas: Replicas | None = None

    def __post_init__(self) -> None:
        profile, options = self.profile, self.options
        self.outlook, self.rows = Outlook(profile, self.acceptance), list[Row]()
        self.sentences = list[str]()  # answers that are not in `rows`
        limit = profile.limits.max_num_seqs
        if max(options.batch_sizes) > limit:
            bound = f"at most {limit}, the `max_num_seqs` of the profile"
            raise ConfigError("batch_size", options.batch_size, bound)
        length = options.input_len + options.output_len
        if length > profile.limits.max_model_len:
            bound = f"at most {profile.limits.max_model_len}, the longest prompt + output"
            raise ConfigError("input_len + output_len", length, bound)
        if options.rate is not None and profile.prompts is None:
            raise ConfigError("rate", options.rate, "left out: the profile has no costs of prompts")
        largest = self.outlook.max_drafts
        known = range(largest + 1)
        self.drafts = [k for k in known if largest <= _ALL_DRAFTS or k in profile.drafts]
        choices = [*self.drafts, *([None] if largest else [])]
        self.points = [LoadPoint(batch, k) for batch in options.batch_sizes for k in choices]
        self.num_runs = len(self.points) + (len(self.drafts) + 1 if options.rate else 0)

    def joint(self, drafts: int | None) -> tuple[float, ...]:
        """`joint_K` of `Simulation` and `Fleet`; with `auto`, unknown chances are 0."""
        if drafts is not None:
            return self.acceptance.joint(drafts)
        known = self.acceptance.joint(self.outlook.max_drafts)
        return known + (0.0,) * (self.profile.max_drafts - self.outlook.max_drafts)

    def run(self, report: Report = lambda done, next_run: None) -> None:
        """Make all predictions.

        report: called with the number of simulations done, and the name of the next simulation
        """
        self._outlooks()
        plain_rate = math.nan
        for done, point in enumerate(self.points):  # each batch begins with plain decoding
            report(done, point.name)
            values = self._simulated(*point)
            if point.drafts == 0:
                plain_rate = values["output_tokens_per_second"]
            else:
                values["speedup"] = values["output_tokens_per_second"] / plain_rate
            self._add("simulated", point.name, values, concurrency=point.batch, k=point.drafts)
        if self.options.rate is not None:
            self._fleet(self.options.rate, report)
        report(self.num_runs, "done")

    def _simulated(self, batch: int, drafts: int | None) -> dict[str, float]:
        options, joint, steps = self.options, self.joint(drafts), list[Step]()
        simulation = Simulation(self.profile, joint, drafts, batch, options.seed, steps.append)
        count = options.requests or max(4 * batch, 20)
        served = simulation.run([RequestSpec(0.0, options.input_len, options.output_len)] * count)
        return self._figures(served, steps, {})

    def _figures(
        self, served: Sequence[Served], steps: Sequence[Step], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """The figures of served requests; TTFT and E2E only if the costs of prompts are known."""
        values = figures(served, bounds)
        if self.profile.prompts is None:
            values = {n: x for n, x in values.items() if not n.startswith(("ttft", "e2e"))}
        accepted, decoding = sum(s.num_accepted for s in steps), sum(s.num_decoding for s in steps)
        return values | {"steps": len(steps), "tokens_per_step": 1 + accepted / max(decoding, 1)}

    def _add(self, kind: str, name: str, values: Mapping[str, float], **labels: Label) -> None:
        self.rows.append(Row(name, {"kind": kind, **labels}, {**values}))

    def _outlooks(self) -> None:
        """Add rows with the best K by batch size and context, and the break-even batch sizes."""
        options, limits = self.options, self.profile.limits
        mean = options.input_len + options.output_len // 2
        contexts = [factor * mean for factor in _CONTEXTS if factor * mean <= limits.max_model_len]
        for context in contexts:
            for batch in options.batch_sizes:
                best = self.outlook.best(batch, context)
                rate, plain_rate = (self.outlook.rate(batch, k, context) for k in (best, 0))
                blocks = batch * -(-context // limits.block_size)
                values: dict[str, float] = {
                    "best_k": best, "output_tokens_per_second": rate, "speedup": rate / plain_rate,
                    "cache_gib": blocks * self.profile.block_bytes / 2**30,
                    "fits": int(blocks <= limits.num_blocks),
                }  # fmt: skip
                for k in self.drafts[1:]:
                    values[f"need_length_{k}"] = self.outlook.break_even_length(batch, k, context)
                name = f"batch {batch}, {context} tokens of context"
                self._add("outlook", name, values, batch=batch, context=context)
            if not self.outlook.max_drafts:
                continue
            last = self.outlook.largest_paying_batch(context)
            limit, name = limits.max_num_seqs, f"break-even, {context} tokens of context"
            self._add("break-even", name, {"last_batch": last}, context=context, up_to=limit)

    def _fleet(self, rate: float, report: Report) -> None:
        """Add rows about a fleet for `rate`: capacities, replicas, and one engine of the fleet."""
        options, done = self.options, len(self.points)
        capacities = dict[int, float]()  # by K
        for i, k in enumerate(self.drafts):
            report(done + i, f"capacity, K={k}")
            capacities[k] = self.capacity(k)
            engines = math.ceil(rate / capacities[k]) if capacities[k] else 0
            values: dict[str, float] = {"capacity": capacities[k], "replicas": engines}
            self._add("capacity", f"capacity, K={k}" if k else "capacity, plain", values, k=k)
        best = max(capacities, key=lambda k: capacities[k])
        if self.replicas is not None:
            best = self._drafts_of(self.replicas, best, capacities)
            self._replicas(self.replicas, capacities[best], best, rate)
        if not capacities[best]:
            return
        report(self.num_runs - 1, "fleet")
        engines, random = math.ceil(rate / capacities[best]), np.random.default_rng(options.seed)
        gaps = random.exponential(engines / rate, size=5 * _REQUESTS)
        lengths = options.input_len, options.output_len
        specs = [RequestSpec(arrival, *lengths) for arrival in np.cumsum(gaps).tolist()]
        steps = list[Step]()
        profile, joint = self.profile, self.joint(best)
        simulation = Simulation(profile, joint, best, seed=options.seed, on_step=steps.append)
        settled = simulation.run(specs)[_REQUESTS:]
        bounds = {"ttft_ms": options.slo_ttft_ms, "tpot_ms": options.slo_tpot_ms}
        values = self._figures(settled, steps, bounds)
        values |= {"replicas": engines, "memory_gib": sum(self.memory().values()) / 2**30}
        name = f"1 of {engines} engines at {rate:g} requests/s, K={best}"
        self._add("fleet", name, values, k=best, requests_per_second=rate)

    def _drafts_of(self, replicas: Replicas, best: int, capacities: Mapping[int, float]) -> int:
        """K of a file's engines, `best` for `auto`; `ConfigError` if its capacity is not known."""
        if replicas.drafts is None:
            return best
        if replicas.drafts not in capacities:
            known = ", ".join(map(str, capacities))
            bound = f"one of {known}: no costs or acceptance are known for other K"
            raise ConfigError("num_speculative_tokens", replicas.drafts, bound)
        return replicas.drafts

    def _replicas(self, replicas: Replicas, engine_rate: float, drafts: int, rate: float) -> None:
        """Add rows with the capacities of 1, 2, .. replicas, the needed and the most allowed."""
        steps = self.options.output_len / (1 + sum(self.joint(drafts)))
        needed = replicas.needed(engine_rate, steps, rate)
        max_count = replicas.max_count
        counts = {*range(1, min(max_count, _MAX_SHOWN) + 1), max_count, needed or 1}
        for count in sorted(counts):
            values = {"capacity": replicas.capacity(engine_rate, steps, count)}
            self._add("replicas", f"{count} replica{'s' * (count > 1)}", values, replicas=count)
        max_rate = replicas.capacity(engine_rate, steps, max_count)
        self.sentences.append(replicas.sentence(needed, self.options, max_rate))

    def capacity(self, drafts: int) -> float:
        """The highest rate in requests/s at which one engine keeps the bounds permanently, or 0.

        Engines are simulated in parallel at several rates, first over the whole range, then near
        the highest rate that keeps the bounds. Fuller queues take longer to settle: requests are
        doubled until their second and last quarter give the same rate.
        """
        options, joint = self.options, self.joint(drafts)
        fleet = Fleet(self.profile, joint, options.input_len, options.output_len)

        def kept_rates(rates: Array, count: int) -> list[float]:
            """The highest rate at which each quarter of `count` requests keeps the bounds."""
            gaps = np.random.default_rng(options.seed).exponential(size=(1, _ENGINES, count))
            arrival = np.cumsum(gaps / rates[:, None, None], axis=2).reshape(-1, count)
            times = fleet.run(arrival, options.seed)
            met = 1e3 * times.ttft() <= options.slo_ttft_ms
            met &= 1e3 * times.tpot(options.output_len) <= options.slo_tpot_ms
            shares = met.reshape(len(rates), _ENGINES, 4, -1).mean(axis=(1, 3)).T
            return [_crossing(rates, share) for share in shares]

        base_count = 4 * fleet.slots
        # An upper bound of the rate, from an engine that is never idle: all requests arrive at
        # once. Random arrivals can be served at a higher rate, hence 1.3.
        ends = np.sort(fleet.run(np.zeros((1, 2 * base_count))).end_EN[0])
        limit = 1.3 * base_count / float(ends[3 * base_count // 2] - ends[base_count // 2])
        guess = kept_rates(limit * np.geomspace(0.05, 1, 2 * _RATES), max(base_count, 48))[3]
        capacity = 0.0
        for doublings in range(4 if guess else 0):
            rates = np.geomspace(guess / 1.6, min(1.25 * guess, limit), _RATES)
            quarters = kept_rates(rates, max(_REQUESTS, 2 * base_count) << doublings)
            capacity = min(quarters[1], quarters[3])
            if capacity > (1 - _SETTLED) * quarters[1]:
                break
            guess = capacity or float(rates[0])
        return capacity

    def memory(self) -> dict[str, int]:
        """Bytes that an engine allocates, by name."""
        cache = self.profile.limits.num_blocks * self.profile.block_bytes
        return {**self.profile.memory, **({"cache": cache} if cache else {})}


def figures(served: Sequence[Served], bounds: Mapping[str, float]) -> dict[str, float]:
    """The figures of `foretoken bench` for these requests, without ITL."""
    records = [Record(s.arrival, [s.first, s.end][: s.tokens], s.end, 0, s.tokens) for s in served]
    seconds = max(s.end for s in served) - min(s.arrival for s in served)
    values = bench_figures.figures(Run(records, max(seconds, 1e-12)), None, bounds)
    values |= bench_figures.percentiles(bench_figures.latencies(records))
    return {name: value for name, value in values.items() if not name.startswith("itl")}


def _crossing(rates: Array, share: Array) -> float:
    """The rate up to which a share of `_MET` keeps the bounds, given the share at each rate."""
    kept = int(np.logical_and.accumulate(share >= _MET).sum())
    if not kept or kept == len(rates):
        return float(rates[-1]) if kept else 0.0
    return float(np.interp(-_MET, -share[kept - 1 : kept + 1], rates[kept - 1 : kept + 1]))


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
    "replicas": (
        "Requests per second within the bounds, of several replicas",
        {"requests/s": ("capacity", 2, False)},
    ),
    "fleet": (
        "One engine of the fleet",
        _COLUMNS
        | {"within bounds": ("slo_met", 3, False), "memory, GiB": ("memory_gib", 2, False)},
    ),
}


def tables(rows: Sequence[Row]) -> dict[str, Table]:
    """Tables by title; columns without a value are left out."""
    result = {}
    for kind, (title, columns) in _TITLES.items():
        if rows_of_kind := [row for row in rows if row.labels["kind"] == kind]:
            result[title] = bench.table(rows_of_kind, columns)
        if kind == "outlook" and rows_of_kind and (needs := _needs(rows_of_kind)).lines:
            result["Mean tokens per round that K drafts must reach to pay, bonus included"] = needs
    return result


def _needs(rows: Sequence[Row]) -> Table:
    """Mean tokens per round that each K needs to pay; a dash if K needs more than K + 1."""
    drafts = sorted(int(n[12:]) for n in rows[0].values if n.startswith("need_length_"))
    lines = []
    for row in rows:
        cells = {k: bench.cell(row, f"need_length_{k}", 2) for k in drafts}
        lines.append([row.case, *(c if float(c) <= k + 1 else "–" for k, c in cells.items())])
    return Table(["", *(f"K={k}" for k in drafts)], lines if drafts else [])


def sentences(rows: Sequence[Row]) -> list[str]:
    """The break-even rows as sentences."""
    lines = []
    for row in (row for row in rows if row.labels["kind"] == "break-even"):
        last, largest = row.values["last_batch"], row.labels["up_to"]
        if not last:
            finding = f"do not pay at any batch up to {largest}."
        elif last == largest:
            finding = f"pay up to batch {largest}, the most that run at once."
        else:
            finding = f"pay up to batch {last}, and at no larger batch."
        lines.append(f"At {row.labels['context']} tokens of context drafts {finding}")
    return lines


def charts(rows: Sequence[Row]) -> list[str]:
    """Charts of the simulated rows, as SVG: speed-up by load, a user's speed against the total."""
    return bench.charts([row for row in rows if row.labels["kind"] == "simulated"])


_ESTIMATED = {  # engine options that an estimate reads
    *("model", "speculative_config", "dtype", "local_files_only", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "max_step_seconds", "block_size", "num_blocks", "kv_cache_gib"),
}
_PATIENCE_S = 40.0  # after so many seconds a calibration begins no further repeat


class Command:
    """One call of `foretoken plan`."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def run(self, engine: Mapping[str, Any], options: PlanOptions, params: SamplingParams) -> None:
        """Predict and report. After an exception, the finished predictions are still reported.

        engine: all fields of `EngineConfig`
        """
        replicas = None
        if options.fleet is not None:
            model = read_model(options)
            replicas, options = replicas_of(model, options), sized_for(model, options)
            engine = engine_options(model, replicas.threads)
            if options.stored is not None or options.bandwidth is not None:
                names_read = {"model"} if options.stored is not None else _ESTIMATED
                engine = {name: engine[name] for name in names_read}
        profile = self._profile(engine, options, params)
        acceptance = _acceptance(profile, options)
        planner, notes = Planner(profile, acceptance, options, replicas), list[str]()
        try:
            with self._reporter.progress(planner.num_runs, "simulations") as report:
                planner.run(report)
        except BaseException as error:
            notes.append(f"Ended early by {type(error).__name__}: cases are missing.")
            raise
        finally:
            if planner.rows:
                self._finish(planner, notes)

    def _profile(
        self, engine: Mapping[str, Any], options: PlanOptions, params: SamplingParams
    ) -> Profile:
        is_timed = options.stored is None and options.bandwidth is None
        if not is_timed and replace(params, seed=None) != SamplingParams(temperature=0.0):
            bound = "left out where no steps are timed"
            raise ConfigError("sampling parameters", params, bound, "See --calibrate.")
        if options.stored is not None:
            profile = Profile.read(options.stored)
            bound = f"left out: the profile is of {profile.model}, {profile.method}"
            allowed = {"model"} if engine.get("model") in (None, profile.model) else set[str]()
            _check_unset(engine, allowed, bound)
            return profile
        config, length = _sized(engine, options), options.input_len + options.output_len
        if options.bandwidth is not None and options.tflops is not None:
            _check_unset(engine, _ESTIMATED, "left out beside `bandwidth`: no engine is built")
            return estimate(config, 1e9 * options.bandwidth, 1e12 * options.tflops, length)
        return self._calibrated(config, options, params)

    def _calibrated(
        self, config: EngineConfig, options: PlanOptions, params: SamplingParams
    ) -> Profile:
        llm_options = {f.name: getattr(config, f.name) for f in fields(config)}
        with self._reporter.status(f"Loading {config.model}"):
            from foretoken.lab.plan.calibrate import Calibration
            from foretoken.lab.workloads import heldout
            from foretoken.llm import LLM

            llm = LLM(**llm_options)
        text = list[int]()
        if (tokenizer := llm.engine.tokenizer) is not None:
            text = tokenizer.encode("".join(item.prompt + item.reference for item in heldout(24)))
        repeats, patience = options.repeats or 3, math.inf if options.repeats else _PATIENCE_S
        sizes = options.batch_sizes
        calibration = Calibration(llm.engine, sizes, params, repeats, text, patience=patience)
        with self._reporter.progress(calibration.num_runs, "calibrating runs") as report:
            profile = calibration.run(report)
        if options.profile is not None:
            profile.write(Path(options.profile))
            self._reporter.errors.print(f"Wrote {options.profile}.", markup=False, soft_wrap=True)
        return profile

    def _finish(self, planner: Planner, notes: list[str]) -> None:
        profile, options, rows = planner.profile, planner.options, planner.rows
        notes = [*planner.sentences, *_source_notes(planner), *notes]
        shapes = {
            **{k: v for k, v in asdict(options).items() if k not in ("acceptance_file", "output")},
            "profile": {**asdict(profile), "model": Path(profile.model).name},
            "acceptance": {"source": planner.acceptance.source, "joint": planner.joint(None)},
        }
        name, shown = stem(options.output, "plan"), tables(rows)
        results = collect(name, self._reporter.command_line, shapes, rows, notes)
        self._reporter.show(shown, [*sentences(rows), *notes])
        self._reporter.write(results, options.output, shown, [Section(charts=charts(rows))])


def _sized(engine: Mapping[str, Any], options: PlanOptions) -> EngineConfig:
    values = {name: value for name, value in engine.items() if value is not None}
    values["speculative_config"] = SpeculativeConfig.parse(values.get("speculative_config"))
    values = {"max_num_seqs": max(options.batch_sizes), **values, "enable_prefix_caching": False}
    return EngineConfig(**values)


def _check_unset(engine: Mapping[str, Any], allowed: Set[str], bound: str) -> None:
    """Raise `ConfigError` if an engine option is set that would be ignored."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    for name, value in engine.items():
        if name not in allowed and value is not None and value != defaults[name]:
            raise ConfigError(name, value, bound, "Or measure: --calibrate.")


def _acceptance(profile: Profile, options: PlanOptions) -> Acceptance:
    drafts = profile.max_drafts
    if not drafts:
        return Acceptance(source="no drafts")
    if options.acceptance_file is not None:
        return Acceptance.read(Path(options.acceptance_file), drafts, options.acceptance_name)
    stated = {
        "rate": options.acceptance_rate, "rates": options.rates,
        "length": options.acceptance_length,
    }  # fmt: skip
    if any(value is not None for value in stated.values()):
        return Acceptance.stated(drafts, **stated)
    if profile.acceptance is None:
        remedy = "Or give one of --acceptance-rates, --acceptance-length, --acceptance-file."
        bound = "given: the profile has no measured acceptance"
        raise ConfigError("acceptance_rate", None, bound, remedy)
    return Acceptance(tuple(profile.acceptance), source="measured with the steps")


def _source_notes(planner: Planner) -> list[str]:
    profile, options = planner.profile, planner.options
    known = planner.acceptance.joint(planner.outlook.max_drafts)
    joint = ", ".join(f"{chance:.2f}" for chance in known)
    memory = sum(planner.memory().values()) / 2**30
    lines = [
        f"Costs: {profile.origin}, {profile.model}, {profile.method}. Acceptance: "
        f"{planner.acceptance.source} ({joint or 'none'}). Memory of an engine: {memory:.2f} GiB. "
        f"Prompts of {options.input_len} tokens, outputs of {options.output_len}, no shared prefix."
    ]
    if (repeats := profile.made.get("repeats")) is not None:
        lines.append(f"Every case was timed {repeats} times (--repeats).")
    if profile.origin == "estimated":
        lines.append(
            "An estimate from shapes: weights are read at the stated rate; host work takes no time."
        )
    if profile.prompts is None:
        lines.append("The profile has no costs of prompts: prompts take no time here.")
    return lines
