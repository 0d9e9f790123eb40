"""The resources that a replica needs, estimated before it loads, and whether a cluster has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.config import HOST_CACHE_GIB, EngineConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models import folder_of
from foretoken.models.checkpoint import check_weights, read_config
from foretoken.models.compressed_scheme import is_compressed
from foretoken.models.gguf.reader import is_gguf, read_gguf
from foretoken.models.locate import BUILT_IN, PACKAGED
from foretoken.models.sizes import stored_sizes
from foretoken.serve.fleet.config import FleetModel

_PROCESS_GIB = 1.5
"""For PyTorch, Transformers and Ray: a replica of the embedded model has 1.1 GiB resident."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that Ray reserves for one replica.

    Attributes:
        cpus: number of cores.
        gpus: number of GPUs; less than 1 if replicas share a GPU.
        memory: bytes of the machine's memory; 0: not known, and not reserved.
    """

    cpus: float
    gpus: float
    memory: int

    @property
    def resources(self) -> dict[str, float]:
        """The amounts that are not 0, by Ray's names of the resources."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory)}
        return {name: value for name, value in amounts.items() if value}

    @property
    def threads(self) -> int:
        """Threads of an engine on these cores: one for each whole core, and at least one."""
        return max(int(self.cpus), 1)

    def described(self) -> str:
        words = [f"{self.cpus:.3g} CPU", f"{self.gpus:.3g} GPU" if self.gpus else ""]
        words.append(f"{self.memory / 2**30:.1f} GiB of memory" if self.memory else "")
        return ", ".join(filter(None, words))


def compute_needs(model: FleetModel, *, has_gpus: bool) -> Needs:
    """What a replica of this model needs; `has_gpus` tells whether the cluster has GPUs for `auto`.

    Raises:
        ConfigError: `device` names one GPU of several; `replica_gpus` contradicts `device`; or
            `replica_gpus` is a share of a GPU that is smaller than `memory_fraction`.
    """
    engine, scale = model.engine, model.scale
    if ":" in engine.device:
        bound = "left out, `cpu` or `cuda`: Ray chooses the GPU of each replica"
        raise ConfigError("device", engine.device, bound)
    gpus = scale.replica_gpus
    on_gpu = engine.device != "cpu"
    if engine.device == "auto":
        on_gpu = bool(gpus) or (gpus is None and has_gpus)
    if gpus is None:
        gpus = 1 / max(int(1 / engine.memory_fraction), 1) if on_gpu else 0
    if 0 < gpus < engine.memory_fraction <= 1 and gpus < 1:
        remedy = "Engines that share a GPU also share the GPU's memory: lower `memory_fraction`."
        raise ConfigError("replica_gpus", gpus, f"at least {engine.memory_fraction:g}", remedy)
    if bool(gpus) != on_gpu:
        bound = "more than 0 with a GPU as `device`, and left out or 0 with a CPU"
        raise ConfigError("replica_gpus", gpus, bound)
    cpus = scale.replica_cpus
    if cpus is None:
        cpus = float(engine.threads or 1)
    gib = scale.replica_memory_gib
    if gib is not None:
        return Needs(cpus, gpus, int(gib * 2**30))
    weights = _weight_bytes(engine, on_gpu)
    cache = 0.0 if on_gpu else engine.kv_cache_gib or HOST_CACHE_GIB
    return Needs(cpus, gpus, int(weights + (cache + _PROCESS_GIB) * 2**30))


def _weight_bytes(config: EngineConfig, on_gpu: bool) -> int:
    """Bytes of the target's and the drafters' weights on the host; 0 for missing files.

    Weights for a GPU, which pass through a small buffer, and random weights count 0.
    """
    if on_gpu or config.load_format != "auto":
        return 0
    bytes_each = _DTYPE_BYTES[config.dtype if config.dtype != "auto" else "float32"]
    total = 0
    for name, revision in [(config.model, config.revision), *_draft_checkpoints(config)]:
        with suppress(CheckpointError, OSError):  # the checkpoint is not downloaded yet
            folder = folder_of(config, name, revision, weights=False)
            total += (
                _stored_bytes(folder)
                or bytes_each * stored_sizes(check_weights(folder, plain=False).values()).numbers
            )
    return total


def _stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint that stays in its quantised format in memory; else 0."""
    if is_gguf(folder):
        return read_gguf(folder).nbytes
    config = read_config(folder)
    if not is_compressed(config.get("quantization_config")):
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _draft_checkpoints(config: EngineConfig) -> list[tuple[str, str | None]]:
    """Names and revisions of the drafters' checkpoints, except those in this package."""
    speculation = config.speculative_config
    if speculation is None:
        return []
    drafters = speculation.drafters
    if drafters is None:
        return [(speculation.model, speculation.revision)] if speculation.model else []
    return [
        (drafter["model"], drafter.get("revision")) for drafter in drafters if drafter.get("model")
    ]


def check_cluster(
    needs: Mapping[str, tuple[int, Needs]], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Raise `ConfigError` unless a cluster has room for all replicas.

    Args:
        needs: by the model's name, the number of replicas and the needs of each.
        nodes: resources of each machine, by Ray's names.
    """
    free = [dict(node) for node in nodes]
    for name, (count, replica_needs) in needs.items():
        num_placed = sum(_place_replica(replica_needs, free) for _ in range(count))
        if num_placed == count:
            continue
        keys = ("CPU", "GPU", "memory")
        totals = {key: sum(node.get(key, 0.0) for node in nodes) for key in keys}
        total = Needs(totals["CPU"], totals["GPU"], int(totals["memory"]))
        scarce = sorted(
            key for key, value in replica_needs.resources.items()
            if value * count > totals[key] + 1e-9
        )  # fmt: skip
        cause = f"too little {' and '.join(scarce)}" if scarce else "no machine has so much left"
        bound = f"at most {num_placed}: {cause}"
        if len(needs) > 1:
            bound = f"at most {num_placed}, with {len(needs)} models in all: {cause}"
        remedy = (
            f"A replica of {name} needs {replica_needs.described()}; the cluster's {len(nodes)} "
            f"machines have {total.described()}. Lower `replicas`, `replica_cpus`, `replica_gpus` "
            "or `replica_memory_gib`."
        )
        raise ConfigError("replicas", count, bound, remedy)


def _place_replica(needs: Needs, free: Sequence[dict[str, float]]) -> bool:
    """Subtract the needs from the first machine that has room; False if no machine has room."""
    for node in free:
        if all(node.get(key, 0.0) >= value - 1e-9 for key, value in needs.resources.items()):
            for key, value in needs.resources.items():
                node[key] -= value
            return True
    return False


def with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """The engine's options with absolute paths, for a process with another working folder."""
    changed: dict[str, Any] = _absolute_paths(
        {"model": config.model, "tokenizer": config.tokenizer}
    )
    if (speculation := config.speculative_config) is not None:
        paths: dict[str, Any] = _absolute_paths(
            {"model": speculation.model, "suffix_corpus": speculation.suffix_corpus}
        )
        if speculation.drafters is not None:
            paths["drafters"] = [{**each, **_absolute_paths(each)} for each in speculation.drafters]
        changed["speculative_config"] = replace(speculation, **paths)
    return replace(config, **changed)


def _absolute_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that name files, with absolute paths."""
    names = {"model", "tokenizer", "suffix_corpus"}
    return {name: _absolute(options[name]) for name in names if options.get(name) is not None}


def _absolute(name: str) -> str:
    """The absolute path of a file that exists. Built-in names and other names are unchanged."""
    path = Path(name)
    return str(path.resolve()) if name not in {*BUILT_IN, *PACKAGED} and path.exists() else name


def cores_per_replica(cores: float, replicas: int) -> float:
    """An equal share of a machine's cores: rounded down to a whole number, or to 0.01 below 1."""
    share = cores / replicas
    return float(math.floor(share)) if share >= 1 else math.floor(share * 100) / 100
