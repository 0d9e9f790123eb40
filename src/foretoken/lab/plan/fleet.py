"""How many replicas a rate takes: the engines of a file for `serve deploy`, and shared cores.

Charter: from the capacity of one engine to that of several, on separate machines or on the cores of
one machine. `command.py` finds the capacity of one; `serve/fleet/config.py` defines the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.lab.plan.options import BATCH_SIZES, STREAM_MS, PlanOptions
from foretoken.serve.fleet.config import Fleet, FleetModel

_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Replicas:
    """Engines of one model, and the cores that they share.

    Attributes:
        name: of the model.
        count: replicas that the file asks for.
        most: replicas that scaling allows.
        drafts: K of its engines; None: `auto`.
        threads: cores that an engine keeps busy.
        cores: of the one machine on which all engines, the front and all other work for a request
            run; None: each engine has its own machine.
        stream_s: seconds of a core per step of a streamed answer: once in its replica, where the
            engine waits for it (Python runs one thread at a time), and again in the front.
    """

    name: str
    count: int
    most: int
    drafts: int | None
    threads: int
    cores: int | None
    stream_s: float

    def capacity(self, one: float, steps: float, replicas: int) -> float:
        """Requests per second within the bounds, of so many replicas.

        Args:
            one: requests per second of one engine without streaming.
            steps: mean steps per request.
        """
        if self.cores is None or not one:
            return one * replicas
        streaming = steps * self.stream_s
        each = 1 / one + streaming
        return min(replicas / each, self.cores / (self.threads * each + streaming))

    def needed(self, one: float, steps: float, rate: float) -> int | None:
        """The fewest replicas that serve a rate; None: no number of them does."""
        alone = self.capacity(one, steps, 1)
        count = math.ceil(rate / alone) if alone else _MOST + 1
        served = self.capacity(one, steps, count) * (1 + 1e-9)  # allows for the division's rounding
        return count if count <= _MOST and served >= rate else None

    def sentence(self, needed: int | None, options: PlanOptions, most: float) -> str:
        """The answer: how many replicas are needed, and what the file's can serve.

        Args:
            most: requests per second of the most replicas that the file allows.
        """
        bounds = f"TTFT {options.slo_ttft_ms:g} ms and TPOT {options.slo_tpot_ms:g} ms"
        wanted = f"{options.rate:g} requests/s within {bounds}"
        has = f"{self.count}" if self.most == self.count else f"{self.count} to {self.most}"
        if needed is None:
            why = "" if self.cores is None else f" on {self.cores} cores"
            return f"No number of replicas of {self.name} serves {wanted}{why}."
        enough = "enough" if needed <= self.most else "too few"
        return (
            f"{wanted} take {needed} replica{'s' * (needed != 1)} of {self.name}. The file has "
            f"{has}, which is {enough}: they serve {most:.3g} requests/s."
        )


def read_model(options: PlanOptions) -> FleetModel:
    """The model of the fleet to plan for: the first, or the named one.

    Raises:
        ConfigError: the file is not a fleet's, or has no such model.
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
    """The facts about a model's replicas that a plan needs."""
    scale, speculation = model.scale, model.engine.speculative_config
    count = scale.replicas or 1
    drafts = None if speculation is not None and speculation.is_auto else model.engine.num_drafts
    threads = model.engine.threads or max(int(scale.replica_cpus or 1), 1)
    return Replicas(
        model.names[0], count, scale.max_replicas or count, drafts, threads, options.cores,
        (STREAM_MS if options.stream_ms is None else options.stream_ms) / 1e3,
    )  # fmt: skip


def sized_for(model: FleetModel, options: PlanOptions) -> PlanOptions:
    """Options with batches up to the engine's `max_num_seqs`, unless batches were given."""
    if options.batch_size != BATCH_SIZES:
        return options
    most = model.engine.max_num_seqs
    sizes = sorted({*(size for size in (1, 4, 16, 64) if size < most), most})
    return replace(options, batch_size=",".join(map(str, sizes)))


def engine_options(model: FleetModel, threads: int) -> dict[str, Any]:
    """Options of its engines as `foretoken plan` takes them, with a replica's number of cores."""
    given = {f.name: getattr(model.engine, f.name) for f in fields(model.engine)}
    given["max_num_waiting"] = None  # a plan serves requests late instead of refusing them
    return given | {"threads": threads}
