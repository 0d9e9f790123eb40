"""How many replicas of `serve deploy` a rate of requests needs, on separate machines or on one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.lab.plan.options import BATCH_SIZES, STREAM_MS, PlanOptions
from foretoken.serve.fleet.config import Fleet, FleetModel

_MAX_REPLICAS = 10_000


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of one model's engine, and the cores that they share.

    Attributes:
        count: number of replicas in the file.
        max_count: largest number of replicas that scaling allows.
        drafts: K of the engines; None: `auto`.
        threads: number of cores that an engine keeps busy.
        cores: cores of the machine that runs all engines, the front, and all other work for
            requests; None: each engine has a machine to itself.
        stream_s: seconds of a core to stream one step of an answer. They are spent in the replica,
            where the engine waits meanwhile (Python runs one thread at a time), and again in the
            front.
    """

    name: str
    count: int
    max_count: int
    drafts: int | None
    threads: int
    cores: int | None
    stream_s: float

    def capacity(self, engine_rate: float, steps: float, replicas: int) -> float:
        """Requests per second that `replicas` replicas serve within the bounds.

        engine_rate: requests per second of one engine, without the cost of streaming
        steps: mean steps per request
        """
        if self.cores is None or not engine_rate:
            return engine_rate * replicas
        streaming = steps * self.stream_s
        request_s = 1 / engine_rate + streaming
        return min(replicas / request_s, self.cores / (self.threads * request_s + streaming))

    def needed(self, engine_rate: float, steps: float, rate: float) -> int | None:
        """The smallest number of replicas that serves a rate; None: even `_MAX_REPLICAS` do not."""
        single = self.capacity(engine_rate, steps, 1)
        count = math.ceil(rate / single) if single else _MAX_REPLICAS + 1
        served = self.capacity(engine_rate, steps, count) * (1 + 1e-9)  # the division rounds
        return count if count <= _MAX_REPLICAS and served >= rate else None

    def sentence(self, needed: int | None, options: PlanOptions, max_rate: float) -> str:
        """How many replicas are needed, and what the replicas in the file can serve.

        max_rate: requests per second of `max_count` replicas
        """
        bounds = f"TTFT {options.slo_ttft_ms:g} ms and TPOT {options.slo_tpot_ms:g} ms"
        demand = f"{options.rate:g} requests/s within {bounds}"
        counts = str(self.count) + (f" to {self.max_count}" if self.max_count != self.count else "")
        if needed is None:
            why = "" if self.cores is None else f" on {self.cores} cores"
            return f"No number of replicas of {self.name} serves {demand}{why}."
        enough = "enough" if needed <= self.max_count else "too few"
        return (
            f"{demand} take {needed} replica{'s' * (needed != 1)} of {self.name}. The file allows "
            f"{counts}, which is {enough}: at most {max_rate:.3g} requests/s."
        )


def read_model(options: PlanOptions) -> FleetModel:
    """The model to plan for: the model that `fleet_model` names, or the first of the file.

    `ConfigError`: the file does not describe a fleet, or has no such model.
    """
    fleet = Fleet.read(Path(str(options.fleet)))
    if options.fleet_model is None:
        return fleet.models[0]
    for model in fleet.models:
        if options.fleet_model in model.names:
            return model
    known = ", ".join(name for model in fleet.models for name in model.names)
    raise ConfigError("fleet_model", options.fleet_model, f"one of {known}")


def replicas_of(model: FleetModel, options: PlanOptions) -> Replicas:
    """The replicas of a model in a fleet's file."""
    scale, speculation = model.scale, model.engine.speculative_config
    count = scale.replicas or 1
    drafts = None if speculation is not None and speculation.is_auto else model.engine.num_drafts
    threads = model.engine.threads or max(int(scale.replica_cpus or 1), 1)
    stream_s = (STREAM_MS if options.stream_ms is None else options.stream_ms) / 1e3
    counts = count, scale.max_replicas or count
    return Replicas(model.names[0], *counts, drafts, threads, options.cores, stream_s)


def sized_for(model: FleetModel, options: PlanOptions) -> PlanOptions:
    """The options with batches up to the engine's `max_num_seqs`, unless the user gave sizes."""
    if options.batch_size != BATCH_SIZES:
        return options
    largest = model.engine.max_num_seqs
    sizes = sorted({*(size for size in (1, 4, 16, 64) if size < largest), largest})
    return replace(options, batch_size=",".join(map(str, sizes)))


def engine_options(model: FleetModel, threads: int) -> dict[str, Any]:
    """The engine options of a model's replicas, with `threads` threads."""
    options = {f.name: getattr(model.engine, f.name) for f in fields(model.engine)}
    options["max_num_waiting"] = None  # a plan serves requests late instead of refusing them
    return options | {"threads": threads}
