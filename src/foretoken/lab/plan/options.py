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
        profile: a JSON file with the costs of steps: read if it exists, else written after they
            are measured; None: they are measured and not kept.
        calibrate: measure and write the profile, even if it exists.
        repeats: measured runs of each case of a calibration; None: 3, or 2 where those take
            longer than 40 s.
        bandwidth: GB/s at which weights are read: with `tflops`, costs are estimated from
            config.json instead of measured, and no weights are loaded.
        tflops: arithmetic of the hardware, in 10^12 operations per second.
        acceptance_rate: the mean over the drafts of the chance that a draft and all before it are
            accepted; the chances decay from draft to draft. None, and none of the next three:
            measured with the steps, on held-out code.
        acceptance_rates: that chance of each draft, separated by commas.
        acceptance_length: mean tokens of a round at the largest K, bonus included.
        acceptance_file: any of these in JSON or YAML, a public table of lengths by K, or results of
            `foretoken bench`.
        acceptance_name: which of the file's tables, names joined by `/`.
        batch_size: requests under way at once; several sizes are separated by commas. With `fleet`
            the default goes up to its `max_num_seqs`.
        input_len: tokens of every prompt.
        output_len: tokens that every request generates.
        requests: simulated at each batch size; None: four times the batch size, at least 20.
        rate: requests per second of a fleet: how many engines does it take?
        slo_ttft_ms: of a fleet, the time to the first token that 95 % of the requests must meet.
        slo_tpot_ms: likewise the time per token after the first.
        fleet: a YAML file for `serve deploy` (docs/scale.md): how many replicas of its model does
            `rate` take? Options of the engine are the file's.
        fleet_model: which of its models; None: the first.
        cores: of the one machine on which all replicas run, together with the front, and the client
            if it runs there; None: each replica has its own cores.
        stream_ms: for `cores`, milliseconds of a core per step of a streamed answer: once in its
            replica, in addition to the engine, and again in the front; None: 0.17, fitted to
            replicas on an EPYC. Answers that come whole take 0.02.
        seed: of acceptance and arrivals.
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
        _ = self.batch_sizes
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
        stated = ("acceptance_rate", "acceptance_rates", "acceptance_length", "acceptance_file")
        given = [name for name in stated if getattr(self, name) is not None]
        if len(given) > 1:
            bound = f"left out beside `{given[0]}`"
            raise ConfigError(given[1], getattr(self, given[1]), bound, "Give one of the two.")
        if self.acceptance_name is not None and self.acceptance_file is None:
            bound = "left out without `acceptance_file`"
            raise ConfigError("acceptance_name", self.acceptance_name, bound)
        hardware = ("bandwidth", self.bandwidth), ("tflops", self.tflops)
        missing = [name for name, value in hardware if value is None]
        if len(missing) == 1:
            raise ConfigError(missing[0], None, "given, since its companion is", "State both.")
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
        if self.acceptance_rates is None:
            return None
        try:
            return [float(text) for text in self.acceptance_rates.split(",")]
        except ValueError:
            bound = "numbers in [0, 1], separated by commas, none above the one before"
            raise ConfigError("acceptance_rates", self.acceptance_rates, bound) from None

    @property
    def stored(self) -> Path | None:
        """The profile to read; None: it does not exist yet, or is to be measured."""
        path = Path(self.profile) if self.profile is not None else None
        return path if path is not None and path.exists() and not self.calibrate else None
