"""What a pass must read of memory at least: every weight once, and the keys and values.

A decode step on few rows is mostly reading, so these bytes over the memory's bandwidth are a floor
of its time, and how near a step is to it says how much there is still to gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.stacks import Eagle3
from foretoken.engine.engine import Engine
from foretoken.errors import EngineMemoryError
from foretoken.lab.results import read_bandwidth
from foretoken.models import CausalLM
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.models.families import windows
from foretoken.ops.stack import Stack, linears


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes that one pass of a model reads, whatever its kernels do.

    Of a mixture of experts all are counted, also those that no token is sent to.

    Attributes:
        weights: of all layers and the output layer; the embedding's few rows are left out.
        layers: per layer the bytes of one token's keys and values, and the sliding window or None.
    """

    weights: int = 0
    layers: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def of(cls, model: CausalLM) -> Reads:
        """Those of a loaded model."""
        if not isinstance(model.network, ModuleNetwork):
            return cls.of_stack(model.network.stack, model.dtype)
        sizes = [KVPool.bytes_per_block([shape], 1, model.dtype) for shape in model.layer_shapes]
        layers = zip(sizes, windows(model.config.get_text_config(), len(sizes)), strict=True)
        return cls(_weight_bytes(model.module), tuple(layers))

    @classmethod
    def of_stack(cls, stack: Stack, dtype: torch.dtype) -> Reads:
        """Those of a stack; `dtype` is that of its keys and values.

        An EAGLE-3 head's pass over the target's rows is one of a step's K; `fc`, which makes its
        features once a step, is left out of `weights`.
        """
        read = [linear for name, linear in linears(stack) if name != "fc"]
        norms = [norm for layer in stack.layers for norm in (layer.mixer_norm_C, layer.feed_norm_C)]
        others = [stack.norm_C, *norms, *(one.bias for one in read if one.bias is not None)]
        count = sum(one.weight.nbytes for one in read) + sum(tensor.nbytes for tensor in others)
        sizes = [KVPool.bytes_per_block([shape], 1, dtype) for shape in stack.layer_shapes]
        layers = zip(sizes, (layer.mixer.options for layer in stack.layers), strict=True)
        return cls(count, tuple((size, options.sliding_window) for size, options in layers))

    def per_pass(self, batch: float, context: float) -> float:
        """Bytes of a pass over `batch` requests whose contexts have `context` tokens each."""
        kept = (size * min(context, window or context) for size, window in self.layers)
        return self.weights + batch * sum(kept)


@dataclass(frozen=True, slots=True)
class Floor:
    """What passes of target and drafter read at least, and how fast the memory is in GB/s."""

    target: Reads
    drafter: Reads
    bandwidth: float

    @classmethod
    def of(cls, engine: Engine, bandwidth: float | None) -> Floor:
        """Of a loaded engine; None: the bandwidth is measured. A drafter may have no model.

        Raises:
            EngineMemoryError: no room is left beside the engine for what is read.
        """
        drafter, reads = engine.runner.drafter, Reads()
        if isinstance(model := getattr(drafter, "model", None), CausalLM):
            reads = Reads.of(model)
        elif isinstance(drafter, Eagle3):
            reads = Reads.of_stack(drafter.head.stack, drafter.head.dtype)
        return cls(Reads.of(engine.runner.model), reads, bandwidth or _bandwidth(engine))


def _bandwidth(engine: Engine) -> float:
    """Of the engine's device, on a CPU with as many threads as it has."""
    device, threads = engine.runner.model.device, torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(engine.threads.most)
    try:
        return read_bandwidth(device)
    except torch.OutOfMemoryError as error:
        said = f"No room to measure how fast memory is read: {error}. Give the bandwidth with "
        raise EngineMemoryError(f"{said}--bandwidth, or leave the engine less memory.") from error
    finally:
        torch.set_num_threads(threads)


def _weight_bytes(module: Any) -> int:
    """Also of weights that were moved into another layout, of which the shape is left behind."""
    found: dict[int, Tensor] = {}
    for part in module.modules():
        own = [*part.parameters(recurse=False), getattr(part, "weight", None)]
        found.update((id(tensor), tensor) for tensor in own if isinstance(tensor, Tensor))
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    if head is None or head.weight is not embedding:
        found.pop(id(embedding))
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())
