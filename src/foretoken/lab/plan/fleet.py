"""How many replicas a rate takes: the engines of a file for `serve deploy`, and what they share.

Charter: from what one engine serves to what several do, on machines of their own or on the cores of
one. What one engine serves is `command.py`'s; what a file may say is `serve/fleet/config.py`'s.
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
        count: replicas that the file asks for; `most` with scaling.
        drafts: K of its engines; None: `auto`.
        threads: cores that an engine keeps busy.
        cores: of the one machine that all of them run on, the front and what else a request takes
            there included; None: each has its own.
        stream_s: seconds of a core that a step of a streamed answer takes in its replica, where the
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
        """Requests per second within the bounds, of so many.

        Args:
            one: of one engine that does nothing else.
            steps: of a request, on average.
        """
        if self.cores is None or not one:
            return one * replicas
        beside = steps * self.stream_s
        each = 1 / one + beside
        return min(replicas / each, self.cores / (self.threads * each + beside))

    def needed(self, one: float, steps: float, rate: float) -> int | None:
        """The fewest that serve a rate; None: however many there are, they do not."""
        alone = self.capacity(one, steps, 1)
        count = math.ceil(rate / alone) if alone else _MOST + 1
        served = self.capacity(one, steps, count) * (1 + 1e-9)  # of the division's rounding
        return count if count <= _MOST and served >= rate else None

    def sentence(self, needed: int | None, options: PlanOptions, most: float) -> str:
        """What a user wanted to know.

        Args:
            most: requests per second of as many as the file may have.
        """
        bounds = f"TTFT {options.slo_ttft_ms:g} ms and TPOT {options.slo_tpot_ms:g} ms"
        asked = f"{options.rate:g} requests/s within {bounds}"
        has = f"{self.count}" if self.most == self.count else f"{self.count} to {self.most}"
        if needed is None:
            why = "" if self.cores is None else f" on {self.cores} cores"
            return f"No number of replicas of {self.name} serves {asked}{why}."
        enough = "enough" if needed <= self.most else "too few"
        return (
            f"{asked} take {needed} replica{'s' * (needed != 1)} of {self.name}. The file has "
            f"{has}, which is {enough}: they serve {most:.3g} requests/s."
        )


def read_model(options: PlanOptions) -> FleetModel:
    """The model of the fleet that a plan is asked for: the first, or the one of a name.

    Raises:
        ConfigError: the file is none, or has no such model.
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
    """What a plan needs to know of a model's replicas."""
    scale, speculation = model.scale, model.engine.speculative_config
    count = scale.replicas or 1
    drafts = None if speculation is not None and speculation.is_auto else model.engine.num_drafts
    threads = model.engine.threads or max(int(scale.replica_cpus or 1), 1)
    return Replicas(
        model.names[0], count, scale.max_replicas or count, drafts, threads, options.cores,
        (STREAM_MS if options.stream_ms is None else options.stream_ms) / 1e3,
    )  # fmt: skip


def sized_for(model: FleetModel, options: PlanOptions) -> PlanOptions:
    """Batches up to the most that an engine runs at once, where none were asked for."""
    if options.batch_size != BATCH_SIZES:
        return options
    most = model.engine.max_num_seqs
    sizes = sorted({*(size for size in (1, 4, 16, 64) if size < most), most})
    return replace(options, batch_size=",".join(map(str, sizes)))


def engine_options(model: FleetModel, threads: int) -> dict[str, Any]:
    """Options of its engines, as `foretoken plan` takes them: cores as a replica has them."""
    given = {f.name: getattr(model.engine, f.name) for f in fields(model.engine)}
    given["max_num_waiting"] = None  # what would be refused is served late here
    return given | {"threads": threads}
