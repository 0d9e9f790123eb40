"""What a replica needs of a machine, and whether a cluster has it. No Ray.

Charter: estimates before anything is loaded, from the headers of weights and the options that size
the cache. The replica's log shows the memory that its engine really takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
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
"""Memory of a process for PyTorch, Transformers and Ray. A replica of the embedded model has 1.1
GiB resident in all."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of a machine that one replica needs, and gets.

    Attributes:
        cpus: number of cores.
        gpus: number of GPUs; less than 1 for a part of one.
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

    def described(self) -> str:
        """The amounts that are not 0 in words, for the user."""
        words = [f"{self.cpus:.3g} CPU", f"{self.gpus:.3g} GPU" if self.gpus else ""]
        words.append(f"{self.memory / 2**30:.1f} GiB of memory" if self.memory else "")
        return ", ".join(filter(None, words))


def needs_of(model: FleetModel, *, has_gpus: bool) -> Needs:
    """What a replica of this model needs.

    Args:
        has_gpus: whether the cluster has a GPU. If it has one, `device: auto` takes it.

    Raises:
        ConfigError: `device` names one GPU of several, or `replica_gpus` contradicts `device`.
    """
    engine, scale = model.engine, model.scale
    if ":" in engine.device:
        bound = "left out, `cpu` or `cuda`: of a machine's GPUs Ray gives each replica its own"
        raise ConfigError("device", engine.device, bound)
    gpu_by_device = {
        "cpu": False,
        "auto": scale.replica_gpus != 0 and (has_gpus or scale.replica_gpus),
    }
    on_gpu = bool(gpu_by_device.get(engine.device, True))
    gpus = scale.replica_gpus
    if gpus is None:
        gpus = 1 / max(int(1 / engine.memory_fraction), 1) if on_gpu else 0
    if 0 < gpus < engine.memory_fraction <= 1 and gpus < 1:
        remedy = "Engines that share a GPU share its memory, too: lower `memory_fraction`."
        raise ConfigError("replica_gpus", gpus, f"at least {engine.memory_fraction:g}", remedy)
    if bool(gpus) != on_gpu:
        bound = "more than 0 with a GPU as `device`, and else left out or 0"
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
    """Bytes of the target's and the drafts' weights on the host; 0 for files not downloaded yet.

    Weights for a GPU pass through a small buffer on the host, so they count 0.
    """
    if on_gpu or config.load_format != "auto":
        return 0
    size = _DTYPE_BYTES[config.dtype if config.dtype != "auto" else "float32"]
    total = 0
    for name, revision in [(config.model, config.revision), *_draft_checkpoints(config)]:
        with suppress(CheckpointError, OSError):  # not here: replicas download it
            folder = folder_of(config, name, revision, weights=False)
            total += (
                _stored_bytes(folder)
                or size * stored_sizes(check_weights(folder, plain=False).values()).numbers
            )
    return total


def _stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint that is kept in its file's format, for native kernels; else 0."""
    if is_gguf(folder):
        return read_gguf(folder).nbytes
    config = read_config(folder)
    if not is_compressed(config.get("quantization_config")):
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _draft_checkpoints(config: EngineConfig) -> list[tuple[str, str | None]]:
    """Names and revisions of the drafters' checkpoints, without the small ones of the package."""
    speculation = config.speculative_config
    if speculation is None:
        return []
    drafters = speculation.drafters
    if drafters is None:
        return [(speculation.model, speculation.revision)] if speculation.model else []
    return [
        (drafter["model"], drafter.get("revision")) for drafter in drafters if drafter.get("model")
    ]


def engine_threads(cpus: float) -> int:
    """The number of threads of an engine that has `cpus` cores: at least one."""
    return max(int(cpus), 1)


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
        num_placed = sum(_take_place(replica_needs, free) for _ in range(count))
        if num_placed == count:
            continue
        keys = ("CPU", "GPU", "memory")
        totals = {key: sum(node.get(key, 0.0) for node in nodes) for key in keys}
        total = Needs(totals["CPU"], totals["GPU"], int(totals["memory"]))
        scarce = sorted(
            key for key, value in replica_needs.resources.items()
            if value * count > totals[key] + 1e-9
        )  # fmt: skip
        cause = f"too little {' and '.join(scarce)}" if scarce else "no machine with so much left"
        others = f" beside the other {len(needs) - 1}" if len(needs) > 1 else ""
        bound = f"at most {num_placed}{others}: {cause}"
        remedy = (
            f"A replica of {name} needs {replica_needs.described()}; the cluster's {len(nodes)} "
            f"machines have {total.described()}. Lower `replicas`, or state less by "
            "`replica_cpus`, `replica_gpus` or `replica_memory_gib`."
        )
        raise ConfigError("replicas", count, bound, remedy)


def _take_place(needs: Needs, free: Sequence[dict[str, float]]) -> bool:
    """Take a replica's needs from the first machine that has room; False if no machine has.

    Args:
        free: the free resources of each machine, which this reduces.
    """
    for node in free:
        if all(node.get(key, 0.0) >= value - 1e-9 for key, value in needs.resources.items()):
            for key, value in needs.resources.items():
                node[key] -= value
            return True
    return False


def with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """The engine's options with absolute paths, for a process with another working folder."""
    changed: dict[str, Any] = {"model": _absolute(config.model)}
    if config.tokenizer is not None:
        changed["tokenizer"] = _absolute(config.tokenizer)
    speculation = config.speculative_config
    if speculation is not None:
        drafters = speculation.drafters
        own_options: dict[str, Any] = _with_paths(
            {f.name: getattr(speculation, f.name) for f in fields(speculation)}
        )
        if drafters is not None:
            own_options["drafters"] = [{**drafter, **_with_paths(drafter)} for drafter in drafters]
        changed["speculative_config"] = replace(speculation, **own_options)
    return replace(config, **changed)


def _with_paths(drafter: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of a drafter that name files, with absolute paths."""
    names = ("model", "suffix_corpus")
    return {name: _absolute(drafter[name]) for name in names if drafter.get(name) is not None}


def _absolute(name: str) -> str:
    """The absolute path of a file that exists; other names, as those of the hub, are unchanged."""
    path = Path(name)
    return str(path.resolve()) if name not in {*BUILT_IN, *PACKAGED} and path.exists() else name


def equal_part(cores: float, replicas: int) -> float:
    """The cores of each replica on a machine: a whole number, or less than one."""
    share = cores / replicas
    return float(math.floor(share)) if share >= 1 else math.floor(share * 100) / 100
