"""The bytes that a pass must read at least: every weight once, and the keys and values.

A decode step on few rows is mostly reading. These bytes divided by the memory's bandwidth are a
lower bound (floor) of its time: the distance to it is the time that could still be saved.
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

    All experts of a mixture are counted, also those that no token is sent to.

    Attributes:
        weights: of all layers and the output layer; the embedding's few rows are left out.
        layers: for each layer the bytes of one token's keys and values, and the sliding window or
            None.
    """

    weights: int = 0
    layers: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def of(cls, model: CausalLM) -> Reads:
        if not isinstance(model.network, ModuleNetwork):
            return cls.of_stack(model.network.stack, model.dtype)
        sizes = [KVPool.bytes_per_block([shape], 1, model.dtype) for shape in model.layer_shapes]
        layers = zip(sizes, windows(model.config.get_text_config(), len(sizes)), strict=True)
        return cls(_weight_bytes(model.module), tuple(layers))

    @classmethod
    def of_stack(cls, stack: Stack, dtype: torch.dtype) -> Reads:
        """The reads of a stack; `dtype` is that of its keys and values.

        An EAGLE-3 head makes its features once a step by `fc`, which is left out of `weights`. Its
        pass over the target's rows counts as one of the step's K.
        """
        read = [linear for name, linear in linears(stack) if name != "fc"]
        norms = [norm for layer in stack.layers for norm in (layer.mixer_norm_C, layer.feed_norm_C)]
        others = [stack.norm_C, *norms, *(one.bias for one in read if one.bias is not None)]
        count = sum(one.weight.nbytes for one in read) + sum(tensor.nbytes for tensor in others)
        sizes = [KVPool.bytes_per_block([shape], 1, dtype) for shape in stack.layer_shapes]
        layers = zip(sizes, (layer.mixer.options for layer in stack.layers), strict=True)
        return cls(count, tuple((size, options.sliding_window) for size, options in layers))

    def per_pass(self, batch: float, context: float) -> float:
        """Bytes of a pass over `batch` requests with contexts of `context` tokens each."""
        kept = (size * min(context, window or context) for size, window in self.layers)
        return self.weights + batch * sum(kept)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least reads of target and drafter per pass, and the memory's bandwidth in GB/s."""

    target: Reads
    drafter: Reads
    bandwidth: float

    @classmethod
    def of(cls, engine: Engine, bandwidth: float | None) -> Floor:
        """Of a loaded engine, with or without a drafting model; None: the bandwidth is measured.

        Raises:
            EngineMemoryError: the engine leaves no room for measuring.
        """
        drafter, reads = engine.runner.drafter, Reads()
        if isinstance(model := getattr(drafter, "model", None), CausalLM):
            reads = Reads.of(model)
        elif isinstance(drafter, Eagle3):
            reads = Reads.of_stack(drafter.head.stack, drafter.head.dtype)
        return cls(Reads.of(engine.runner.model), reads, bandwidth or _bandwidth(engine))


def _bandwidth(engine: Engine) -> float:
    """Read bandwidth of the engine's device; on a CPU with the engine's number of threads."""
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
    """Bytes of all weights, including `weight`s that are no longer parameters, but without an
    embedding that is not also the head."""
    found: dict[int, Tensor] = {}
    for part in module.modules():
        own = [*part.parameters(recurse=False), getattr(part, "weight", None)]
        found.update((id(tensor), tensor) for tensor in own if isinstance(tensor, Tensor))
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    if head is None or head.weight is not embedding:
        found.pop(id(embedding))
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())
