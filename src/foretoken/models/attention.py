"""The bridge between Transformers' modules and our attention.

Modules call `paged_attention` once per layer. The batch, the cache and the backend come from a
context variable, because some families drop unknown keyword arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from foretoken.errors import UnsupportedModelError
from foretoken.ops import AttentionOptions, Backend
from foretoken.ops.passes import write_index, write_kv
from foretoken.ops.stack import KV
from foretoken.ops.steps import ForwardBatch

ATTENTION_NAME = "foretoken_paged"

# Keyword arguments that do not change our attention. Dropout is 0 in eval mode. Positions and
# causality come from the batch. `logits_to_keep` concerns only the output layer.
_IGNORED_ARGUMENTS = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "cache_position", "logits_to_keep"}
)


class AttentionCall(NamedTuple):
    """One layer's call of attention. `shape` is (K/V heads, size of a key, size of a value)."""

    layer: int
    shape: tuple[int, int, int]
    sliding_window: int | None


class AttentionPass:
    """One forward pass: the batch, the K/V, and the backend that computes attention.

    Args:
        kv, backend: None for a pass that only shows the calls and shapes, without attention.
        calls: a list to which each layer's call is appended in order. With a list, calls with
            arguments or shapes that we do not implement raise `UnsupportedModelError`.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        kv: KV | None = None,
        backend: Backend | None = None,
        calls: list[AttentionCall] | None = None,
    ) -> None:
        self.batch, self.kv, self.backend, self.calls = batch.attention, kv, backend, calls
        if kv is not None:
            self.write_index_T = write_index(batch.attention, len(batch.token_T), len(kv.keys[0]))


_current: ContextVar[AttentionPass | None] = ContextVar("foretoken_attention", default=None)


@contextmanager
def attention_context(run: AttentionPass) -> Iterator[None]:
    """Let attention calls in the body of the `with` use this pass."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the current pass: queries [1, H, T, D] to outputs [1, T, H, D_v].

    The keys and values are written to the pass's cache first. Each token attends to the tokens of
    the same request up to its position. Without a cache the outputs are 0. `attention_mask` is
    always None, because no mask function is registered for `ATTENTION_NAME`.
    """
    run = _current.get()
    if run is None:
        raise RuntimeError("attention was called outside of `CausalLM.forward`")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if run.calls is not None:
        _check_call(layer, query, key, value, {**kwargs, "attention_mask": attention_mask})
        shape = (key.shape[1], key.shape[3], value.shape[3])
        run.calls.append(AttentionCall(layer, shape, sliding_window))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if run.kv is None or run.backend is None:  # the pass only shows calls and shapes
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    keys, values = run.kv.keys[layer], run.kv.values[layer]
    new_kv = (x.squeeze(0).transpose(0, 1) for x in (key, value))
    write_kv((keys, values), run.write_index_T, *new_kv)
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    query_THD = query.squeeze(0).transpose(0, 1)
    out_THD = run.backend.attention(query_THD, keys, values, run.batch, options)
    return out_THD.unsqueeze(0), None


def _check_call(
    layer: int, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> None:
    """Raise `UnsupportedModelError` for shapes or arguments that we do not implement."""
    # An argument of None or False has no effect, for example `output_router_logits=False`.
    used = {name for name, arg in arguments.items() if arg is not None and arg is not False}
    if unknown := sorted(used - _IGNORED_ARGUMENTS):
        raise UnsupportedModelError(
            f"Attention of layer {layer} asks for {', '.join(f'`{name}`' for name in unknown)}, "
            "which paged attention does not implement."
        )
    if query.shape[0] != 1 or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise UnsupportedModelError(
            f"Attention of layer {layer} has shapes {tuple(query.shape)}, {tuple(key.shape)}, "
            f"{tuple(value.shape)} that paged attention does not implement."
        )


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to Transformers; safe to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
