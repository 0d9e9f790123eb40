"""Options of `foretoken plan`: names, defaults, bounds. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretoken.config import check_int, check_number
from foretoken.config.checks import check_file, check_outputs
from foretoken.errors import ConfigError
from foretoken.lab.bench.options import numbers

BATCH_SIZES = "1,4,16"
STREAM_MS = 0.17  # fitted to what replicas served: benchmarks/results/fleet_plan.json


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `foretoken plan` predicts, from what, and where it writes.

    Attributes:
        profile: a JSON file with the costs of steps. If the file exists, it is read; else costs are
            measured and written to it. None: costs are measured and not kept.
        calibrate: measure and write the profile, even if it exists.
        repeats: measured runs of each case of a calibration; None: 3, or 2 if those take longer
            than 40 s.
        bandwidth: GB/s at which weights are read. With `tflops`, costs are estimated from
            config.json instead of measured, and no weights are loaded.
        tflops: arithmetic rate of the hardware, in 10^12 operations per second.
        acceptance_rate: the mean over all drafts of the chance that a draft and all drafts before
            it are accepted; the chances decay from draft to draft. None: measured with the steps,
            on held-out code, if none of the next three options is given.
        acceptance_rates: the chance of each draft that it and all drafts before it are accepted,
            separated by commas.
        acceptance_length: mean tokens of a round at the largest K, including the bonus token.
        acceptance_file: a file with one of these three in JSON or YAML, with a public table of
            lengths by K, or with results of `foretoken bench`.
        acceptance_name: the name of a table in the file; nested names are joined by `/`.
        batch_size: requests that are under way at once; several sizes are separated by commas. With
            `fleet`, the default goes up to the engine's `max_num_seqs`.
        input_len: tokens of every prompt.
        output_len: tokens that every request generates.
        requests: number of requests simulated at each batch size; None: four times the batch size,
            at least 20.
        rate: requests per second of a fleet; the plan says how many engines it takes.
        slo_ttft_ms: for a fleet: the time to the first token that 95 % of the requests must meet.
        slo_tpot_ms: for a fleet: the time per token after the first that 95 % of the requests must
            meet.
        fleet: a YAML file for `serve deploy` (docs/scale.md); the plan says how many replicas of
            its model `rate` takes. The engine's options are those in the file.
        fleet_model: the name of a model in the file; None: the first model.
        cores: cores of the machine that runs all replicas, the front, and the client if it runs
            there, too; None: each replica has its own cores.
        stream_ms: for `cores`: milliseconds of a core to stream one step of an answer. They are
            spent in the replica, in addition to the engine's time, and again in the front; None:
            0.17, fitted to replicas on an EPYC. Answers that are not streamed take 0.02.
        seed: seed of acceptance and arrivals.
        output: a file for the results: *.json, *.csv, *.svg or *.html.
    """

    profile: str | None = None
    calibrate: bool = False
    repeats: int | None = None
    bandwidth: float | None = None
    tflops: float | None = None
    acceptance_rate: float | None = None
    acceptance_rates: str | None = None
    acceptance_length: float | None = None
    acceptance_file: str | None = None
    acceptance_name: str | None = None
    batch_size: str = BATCH_SIZES
    input_len: int = 128
    output_len: int = 128
    requests: int | None = None
    rate: float | None = None
    slo_ttft_ms: float = 1000.0
    slo_tpot_ms: float = 50.0
    fleet: str | None = None
    fleet_model: str | None = None
    cores: int | None = None
    stream_ms: float | None = None
    seed: int = 0
    output: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _ = self.batch_sizes  # raises an error if they are wrong
        for name in ("repeats", "input_len", "output_len", "requests"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("seed", self.seed, 0, 2**63 - 1)
        for name in ("slo_ttft_ms", "slo_tpot_ms"):
            check_number(name, getattr(self, name), 1e-3, 1e9, "It is in milliseconds.")
        if self.rate is not None:
            check_number("rate", self.rate, 1e-6, 1e9, "It is in requests per second.")
        self._check_fleet()
        self._check_sources()
        check_outputs(self.output)
        if self.stored is None:  # a file that is only read may have any name
            check_file("profile", self.profile, ".json")

    def _check_fleet(self) -> None:
        for name in ("fleet_model", "cores"):
            if getattr(self, name) is not None and self.fleet is None:
                raise ConfigError(name, getattr(self, name), "given with `fleet`")
        if self.fleet is not None and self.rate is None:
            raise ConfigError("rate", None, "given with `fleet`, in requests per second")
        if self.cores is not None:
            check_int("cores", self.cores, 1, 4096)
        if self.stream_ms is not None:
            check_number("stream_ms", self.stream_ms, 0, 1e3)
            if self.cores is None:
                raise ConfigError("stream_ms", self.stream_ms, "given with `cores`")

    def _check_sources(self) -> None:
        names = ("acceptance_rate", "acceptance_rates", "acceptance_length", "acceptance_file")
        stated = [name for name in names if getattr(self, name) is not None]
        if len(stated) > 1:
            bound = f"left out beside `{stated[0]}`"
            raise ConfigError(stated[1], getattr(self, stated[1]), bound, "Give one of the two.")
        if self.acceptance_name is not None and self.acceptance_file is None:
            bound = "left out without `acceptance_file`"
            raise ConfigError("acceptance_name", self.acceptance_name, bound)
        hardware = ("bandwidth", self.bandwidth), ("tflops", self.tflops)
        missing = [name for name, value in hardware if value is None]
        if len(missing) == 1:
            raise ConfigError(missing[0], None, "given: `bandwidth` and `tflops` need each other")
        for name, value in hardware:
            if value is not None:
                check_number(name, value, 1e-3, 1e6)
        if not missing:
            for name in ("profile", "calibrate"):
                if getattr(self, name):
                    bound = "left out beside `bandwidth` and `tflops`"
                    raise ConfigError(name, getattr(self, name), bound, "Estimates are not kept.")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        sizes = tuple(map(int, numbers("batch_size", self.batch_size, "integers >= 1", int)))
        if len(set(sizes)) < len(sizes):
            raise ConfigError("batch_size", self.batch_size, "sizes that all differ")
        return sizes

    @property
    def rates(self) -> list[float] | None:
        """The chances in `acceptance_rates` (`rate` counts requests); None if not given."""
        if self.acceptance_rates is None:
            return None
        try:
            return [float(text) for text in self.acceptance_rates.split(",")]
        except ValueError:
            bound = "numbers in [0, 1] that never rise, separated by commas"
            raise ConfigError("acceptance_rates", self.acceptance_rates, bound) from None

    @property
    def stored(self) -> Path | None:
        """The file of an existing profile; None without such a file, or with `calibrate`."""
        path = Path(self.profile) if self.profile is not None else None
        return path if path is not None and path.exists() and not self.calibrate else None
