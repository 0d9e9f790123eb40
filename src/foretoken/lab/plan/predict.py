"""Every prediction, as rows of results.

Charter: which questions are asked of outlook, simulation and fleet, and under what names their
answers stand in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from foretoken.drafting.control import Array
from foretoken.errors import ConfigError
from foretoken.lab.bench import figures as bench
from foretoken.lab.bench.load import Record, Run
from foretoken.lab.plan.acceptance import Acceptance
from foretoken.lab.plan.options import PlanOptions
from foretoken.lab.plan.profile import Profile
from foretoken.lab.plan.simulate import Ask, Fleet, Outlook, Served, Simulation, Step
from foretoken.lab.results import Label, Row

_EVERY = 8  # the largest K up to which all are simulated
_LONGER = (1, 4, 16)  # contexts of the outlook, times the mean one of the requests
_RATES, _ENGINES, _REQUESTS = 8, 12, 400  # by which the capacity of an engine is found
_SETTLED = 0.03  # so much lower may it be later on
_MET = 0.95  # of the requests


class Case(NamedTuple):
    """Requests under way at once, and K; None: `auto`."""

    batch: int
    drafts: int | None

    @property
    def name(self) -> str:
        """For a row."""
        how = "auto" if self.drafts is None else f"K={self.drafts}" if self.drafts else "plain"
        return f"concurrency {self.batch}, {how}"


@dataclass
class Planner:
    """Predicts; `rows` holds what is done if it is interrupted."""

    profile: Profile
    acceptance: Acceptance
    options: PlanOptions

    def __post_init__(self) -> None:
        profile, options = self.profile, self.options
        self.outlook, self.rows = Outlook(profile, self.acceptance), list[Row]()
        largest, most = max(options.batch_sizes), profile.limits.max_num_seqs
        if largest > most:
            bound = f"at most {most}, the `max_num_seqs` of the profile"
            raise ConfigError("batch_size", options.batch_size, bound)
        length = options.input_len + options.output_len
        if length > profile.limits.max_model_len:
            bound = f"at most {profile.limits.max_model_len}, the longest prompt + output"
            raise ConfigError("input_len + output_len", length, bound)
        if options.rate is not None and profile.prompts is None:
            raise ConfigError("rate", options.rate, "left out: the profile knows no prompts")
        every, known = self.outlook.most <= _EVERY, range(self.outlook.most + 1)
        self.drafts = drafts = [k for k in known if every or k in profile.drafts]
        kinds = [*drafts, *([None] if self.outlook.most else [])]
        self.cases = [Case(batch, k) for batch in options.batch_sizes for k in kinds]
        self.num_runs = len(self.cases) + (len(drafts) + 1 if options.rate else 0)

    def joint(self, drafts: int | None) -> tuple[float, ...]:
        """What `Simulation` and `Fleet` take: `auto` takes nothing that is not known to count."""
        if drafts is not None:
            return self.acceptance.joint(drafts)
        known = self.acceptance.joint(self.outlook.most)
        return known + (0.0,) * (self.profile.most_drafts - self.outlook.most)

    def run(self, report: Callable[[int, str], None] = lambda done, what: None) -> None:
        """Fill `rows`.

        Args:
            report: gets how many simulations are done, and what comes next.
        """
        self._outlooks()
        plain = dict[int, float]()
        for done, case in enumerate(self.cases):
            report(done, case.name)
            values = self._simulated(case)
            if case.drafts == 0:
                plain[case.batch] = values["output_tokens_per_second"]
            else:
                values["speedup"] = values["output_tokens_per_second"] / plain[case.batch]
            self._add("simulated", case.name, values, concurrency=case.batch, k=case.drafts)
        if self.options.rate is not None:
            self._fleet(self.options.rate, report)
        report(self.num_runs, "done")

    def _simulated(self, case: Case) -> dict[str, float]:
        options, steps = self.options, list[Step]()
        simulation = Simulation(
            self.profile, self.joint(case.drafts), case.drafts, case.batch, options.seed,
            steps.append,
        )  # fmt: skip
        count = options.requests or max(4 * case.batch, 20)
        served = simulation.run([Ask(0.0, options.input_len, options.output_len)] * count)
        return self._figures(served, steps, {})

    def _figures(
        self, served: Sequence[Served], steps: Sequence[Step], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        found = figures(served, bounds)
        if self.profile.prompts is None:
            found = {n: x for n, x in found.items() if not n.startswith(("ttft", "e2e"))}
        return found | {"steps": len(steps), "tokens_per_step": _per_round(steps)}

    def _add(self, kind: str, name: str, values: Mapping[str, float], **labels: Label) -> None:
        self.rows.append(Row(name, {"kind": kind, **labels}, {**values}))

    def _outlooks(self) -> None:
        options, limits = self.options, self.profile.limits
        middle = options.input_len + options.output_len // 2
        contexts = [c * middle for c in _LONGER if c * middle <= limits.max_model_len]
        for context in contexts:
            for batch in options.batch_sizes:
                best = self.outlook.best(batch, context)
                rate, plain = (self.outlook.rate(batch, k, context) for k in (best, 0))
                blocks = batch * -(-context // limits.block_size)
                values: dict[str, float] = {
                    "best_k": best, "output_tokens_per_second": rate, "speedup": rate / plain,
                    "cache_gib": blocks * self.profile.block_bytes / 2**30,
                    "fits": int(blocks <= limits.num_blocks),
                }  # fmt: skip
                for k in self.drafts[1:]:
                    values[f"need_length_{k}"] = self.outlook.need(batch, k, context)
                name = f"batch {batch}, {context} tokens of context"
                self._add("outlook", name, values, batch=batch, context=context)
            if not self.outlook.most:
                continue
            last = self.outlook.last_that_pays(context)
            most, name = limits.max_num_seqs, f"break-even, {context} tokens of context"
            self._add("break-even", name, {"last_batch": last}, context=context, up_to=most)

    def _fleet(self, rate: float, report: Callable[[int, str], None]) -> None:
        options, done = self.options, len(self.cases)
        found = dict[int, float]()
        for i, k in enumerate(self.drafts):
            report(done + i, f"capacity, K={k}")
            found[k] = self.capacity(k)
            count = ceil(rate / found[k]) if found[k] else 0
            capacity = {"capacity": found[k], "replicas": count}
            self._add("capacity", f"capacity, K={k}" if k else "capacity, plain", capacity, k=k)
        best = max(found, key=lambda k: found[k])
        if not found[best]:
            return
        report(self.num_runs - 1, "fleet")
        count, chance = ceil(rate / found[best]), np.random.default_rng(options.seed)
        gaps = chance.exponential(count / rate, size=5 * _REQUESTS)
        asks = [Ask(t, options.input_len, options.output_len) for t in np.cumsum(gaps).tolist()]
        steps = list[Step]()
        profile, joint = self.profile, self.joint(best)
        run = Simulation(profile, joint, best, seed=options.seed, on_step=steps.append)
        settled = run.run(asks)[_REQUESTS:]
        bounds = {"ttft_ms": options.slo_ttft_ms, "tpot_ms": options.slo_tpot_ms}
        values = self._figures(settled, steps, bounds)
        values |= {"replicas": count, "memory_gib": sum(self.memory().values()) / 2**30}
        name = f"1 of {count} engines at {rate:g} requests/s, K={best}"
        self._add("fleet", name, values, k=best, requests_per_second=rate)

    def capacity(self, drafts: int) -> float:
        """Most requests per second at which one engine keeps to the bounds for good; 0: none does.

        Engines at several rates run side by side, first over all that one can serve, then near the
        highest that keeps. Queues take the longer to settle the fuller they are: requests are
        doubled until the second quarter of them and the last one agree.
        """
        options, joint = self.options, self.joint(drafts)
        fleet = Fleet(self.profile, joint, options.input_len, options.output_len)

        def highest(rates: Array, count: int) -> list[float]:
            """By the requests of each quarter; every rate has the same ones, nearer together."""
            gaps = np.random.default_rng(options.seed).exponential(size=(1, _ENGINES, count))
            arrival = np.cumsum(gaps / rates[:, None, None], axis=2).reshape(-1, count)
            times = fleet.run(arrival, options.seed)
            met = (1e3 * times.ttft() <= options.slo_ttft_ms) & (
                1e3 * times.tpot(options.output_len) <= options.slo_tpot_ms
            )
            shares = met.reshape(len(rates), _ENGINES, 4, -1).mean(axis=(1, 3)).T
            return [_crossing(rates, share) for share in shares]

        few = 4 * fleet.slots
        ends = np.sort(fleet.run(np.zeros((1, 2 * few))).end_EN[0])  # never idle
        # In lockstep, which serves fewer than come at random.
        most = 1.3 * few / float(ends[3 * few // 2] - ends[few // 2])
        found = highest(most * np.geomspace(0.05, 1, 2 * _RATES), max(few, 48))[3]
        kept = 0.0
        for doubled in range(4 if found else 0):
            rates = np.geomspace(found / 1.6, min(1.25 * found, most), _RATES)
            _, early, _, late = highest(rates, max(_REQUESTS, 2 * few) << doubled)
            kept = min(early, late)
            if kept > (1 - _SETTLED) * early:
                break
            found = kept or float(rates[0])
        return kept

    def memory(self) -> dict[str, int]:
        """Bytes of all that an engine allocates, by name."""
        limits = self.profile.limits
        cache = {"cache": limits.num_blocks * self.profile.block_bytes}
        return {**self.profile.memory, **{k: v for k, v in cache.items() if v}}


def figures(served: Sequence[Served], bounds: Mapping[str, float]) -> dict[str, float]:
    """What `foretoken bench` says of as many requests, but ITL."""
    records = [
        Record(one.arrival, [one.first, one.end][: one.tokens], one.end, num_output=one.tokens)
        for one in served
    ]
    seconds = max(one.end for one in served) - min(one.arrival for one in served)
    found = bench.figures(Run(records, max(seconds, 1e-12)), None, bounds)
    found |= bench.percentiles(bench.latencies(records))
    return {name: value for name, value in found.items() if not name.startswith("itl")}


def _crossing(rates: Array, share: Array) -> float:
    """The rate at which too few requests keep the bounds, on a line between those that ran."""
    kept = int(np.logical_and.accumulate(share >= _MET).sum())
    if not kept or kept == len(rates):
        return float(rates[-1]) if kept else 0.0
    return float(np.interp(-_MET, -share[kept - 1 : kept + 1], rates[kept - 1 : kept + 1]))


def _per_round(steps: Sequence[Step]) -> float:
    """Tokens of a request in a step in which it decodes, on average."""
    decoding = sum(step.num_decoding for step in steps)
    return 1 + sum(step.num_accepted for step in steps) / max(decoding, 1)
