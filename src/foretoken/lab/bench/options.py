"""Options of `foretoken bench`: names, defaults, bounds. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from foretoken.config import (
    BLOCK_SIZES,
    EngineConfig,
    SpeculativeConfig,
    check_choice,
    check_int,
    check_number,
)
from foretoken.errors import ConfigError

PROMPTS = ("random", "heldout")
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `foretoken bench` measures, and where it writes.

    Attributes:
        batch_size: requests that run together; several sizes are separated by commas.
        input_len: tokens of every prompt, exactly.
        output_len: tokens that every request generates, exactly: nothing stops it earlier.
        repeats: measured runs of each batch, whose median, quartiles and range are reported.
        warmup: runs of each batch before those, which are not measured.
        prompts: `random` token ids, or pieces of `heldout`, Python code that comes along.
        seed: of prompts and noise; every request of every run has its own.
        compare: measure plain decoding, too, in turns with the speculative.
        bandwidth: GB/s at which the device reads its memory; None: measured at the start.
        kernels: record, behind all that is measured, which kernels a step runs on a GPU.
        output: the results file, *.json.
        plot: the figure, *.svg.
    """

    batch_size: str = "1,8,64"
    input_len: int = 1024
    output_len: int = 256
    repeats: int = 3
    warmup: int = 1
    prompts: str = "random"
    seed: int = 0
    compare: bool = False
    bandwidth: float | None = None
    kernels: bool = False
    output: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if len(set(sizes)) < len(sizes):
            raise ConfigError("batch_size", self.batch_size, "sizes that all differ")
        for name in ("input_len", "output_len", "repeats"):
            check_int(name, getattr(self, name), 1)
        check_int("warmup", self.warmup, 0)
        check_choice("prompts", self.prompts, PROMPTS)
        check_int("seed", self.seed, 0, 2**63 - 1)
        if self.bandwidth is not None:
            check_number("bandwidth", self.bandwidth, 1e-3, 1e6, "It is in GB/s.")
        _check_file("output", self.output, ".json")
        _check_file("plot", self.plot, ".svg")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """`batch_size` as numbers; `ConfigError` if it is none or holds anything else."""
        sizes = []
        for text in self.batch_size.split(","):
            size = int(text) if text.strip().isdecimal() else 0
            if size < 1:
                bound = "integers >= 1, separated by commas"
                raise ConfigError("batch_size", self.batch_size, bound)
            sizes.append(size)
        return tuple(sizes)

    def sized(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """Engine options with room for the largest batch, where they leave that open.

        Args:
            engine: fields of `EngineConfig`, of which those that were left out are missing.
        """
        speculation = SpeculativeConfig.parse(engine.get("speculative_config"))
        if self.compare and speculation is None:
            remedy = "Say how to draft with --speculative-config."
            raise ConfigError("compare", True, "left out without speculation", remedy)
        largest = max(self.batch_sizes)
        sized = {"max_num_seqs": largest, **engine, "speculative_config": speculation}
        most = sized["max_num_seqs"]
        if largest > most:
            raise ConfigError("max_num_seqs", most, f"at least {largest}, the largest batch")
        drafts = speculation.num_drafts if speculation else 0
        tokens = max(_DEFAULTS["max_num_batched_tokens"], most * (1 + drafts))
        sized.setdefault("max_num_batched_tokens", tokens)
        from foretoken.engine.devices import choose_device  # which loads torch

        device = choose_device(engine.get("device", "auto"))
        if self.kernels:
            from foretoken.lab.bench.kernels import sees_kernels

            if device.type == "cpu" or not sees_kernels():
                remedy = "There, the phases of a step tell where its time goes."
                bound = "left out on a CPU, and where PyTorch's profiler sees no kernels"
                raise ConfigError("kernels", True, bound, remedy)
        if not {"num_blocks", "kv_cache_gib"} & engine.keys():
            block_size = engine.get("block_size") or BLOCK_SIZES[device.type]
            # One more for each: the scheduler keeps one free per running request.
            blocks = -(-(self.input_len + self.output_len) // block_size) + 1
            sized["num_blocks"] = largest * blocks
        return sized


def _check_file(name: str, given: str | None, suffix: str) -> None:
    """Raise `ConfigError` before minutes of measuring for a file that cannot be written after."""
    if given is None:
        return
    path = Path(given)
    if path.suffix != suffix:
        raise ConfigError(name, given, f"a file that ends in {suffix}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(name, given, "a file in a folder that exists and can be written to")
