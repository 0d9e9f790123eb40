"""The bytes that a pass must read at least: every weight once, and the keys and values.

A decode step on few rows mostly reads: these bytes over the memory's bandwidth are a lower bound
(floor) of its time. What a step takes above its floor could still be saved.
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
    """The bytes that a pass of a model must read. All experts of a mixture count.

    Attributes:
        weights: bytes of all layers and of the output layer; the embedding's few rows are left out.
        layers: for each layer the bytes of one token's keys and values, and its sliding window.
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
        """The reads of a stack with keys and values of this dtype.

        `weights` leaves out `fc` of an EAGLE-3 head, which runs only once per step. The head's pass
        over the target's rows counts as one of the step's K passes.
        """
        layers_read = [linear for name, linear in linears(stack) if name != "fc"]
        biases = [linear.bias for linear in layers_read if linear.bias is not None]
        norms = [norm for layer in stack.layers for norm in (layer.mixer_norm_C, layer.feed_norm_C)]
        weights = sum(linear.weight.nbytes for linear in layers_read)
        weights += sum(tensor.nbytes for tensor in (stack.norm_C, *norms, *biases))
        sizes = [KVPool.bytes_per_block([shape], 1, dtype) for shape in stack.layer_shapes]
        layers = zip(sizes, (layer.mixer.options for layer in stack.layers), strict=True)
        return cls(weights, tuple((size, options.sliding_window) for size, options in layers))

    def per_pass(self, batch: float, context: float) -> float:
        """Bytes of a pass over `batch` requests with contexts of `context` tokens each."""
        kv_bytes = (size * min(context, window or context) for size, window in self.layers)
        return self.weights + batch * sum(kv_bytes)


@dataclass(frozen=True, slots=True)
class Floor:
    """What passes of target and drafter must read, and the memory's bandwidth in GB/s."""

    target: Reads
    drafter: Reads
    bandwidth: float

    @classmethod
    def of(cls, engine: Engine, bandwidth: float | None) -> Floor:
        """The floor of a loaded engine, with or without a drafting model.

        bandwidth: GB/s; None: measured, with `EngineMemoryError` if the engine leaves no room
        """
        drafter, draft_reads = engine.runner.drafter, Reads()
        if isinstance(model := getattr(drafter, "model", None), CausalLM):
            draft_reads = Reads.of(model)
        elif isinstance(drafter, Eagle3):
            draft_reads = Reads.of_stack(drafter.head.stack, drafter.head.dtype)
        return cls(Reads.of(engine.runner.model), draft_reads, bandwidth or _bandwidth(engine))


def _bandwidth(engine: Engine) -> float:
    device, threads = engine.runner.model.device, torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(engine.threads.max_threads)
    try:
        return read_bandwidth(device)
    except torch.OutOfMemoryError as error:
        why = f"No room to measure how fast memory is read: {error}. Give the bandwidth with "
        raise EngineMemoryError(f"{why}--bandwidth, or leave the engine less memory.") from error
    finally:
        torch.set_num_threads(threads)


def _weight_bytes(module: Any) -> int:
    """The bytes of all weights that a pass reads.

    Tensors named `weight` count even if they are no longer parameters, the embedding only if it is
    also the output layer.
    """
    weights: dict[int, Tensor] = {}
    for part in module.modules():
        tensors = [*part.parameters(recurse=False), getattr(part, "weight", None)]
        weights.update((id(tensor), tensor) for tensor in tensors if isinstance(tensor, Tensor))
    embedding, output_layer = module.get_input_embeddings().weight, module.get_output_embeddings()
    if output_layer is None or output_layer.weight is not embedding:
        weights.pop(id(embedding))
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
