"""A whole forward pass of a Llama-like model in one native call.

Belongs here: which modules the native decoder can stand in for, and handing it weights and
batches. Does not: the arithmetic (`csrc/decoder.cpp`), deciding whether it is right (the self-check
in `models/guards.py` compares it with the module's own eager attention, like every model).

Why: at batch 1 a forward through the modules of the embedded target is mostly the overhead of some
4 600 operator calls.

Shape suffixes: as in `ops/types.py`.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_cache, native_params
from foretoken.ops.decoder import AttentionCall, DraftRound, ForwardOutput, UnfitError
from foretoken.ops.pass_checks import check_attention_batch, check_draft_round
from foretoken.ops.types import AttentionBatch

__all__ = ["FAMILIES", "FusedDecoder", "decoder"]

FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss")
"""Model types built of RMSNorm, rotary attention and a gated SiLU layer, in that order."""

_log = logging.getLogger(__name__)

_HEAD_MULTIPLE = 16  # the widest vector: values are read by whole vectors
# Frequencies that do not depend on what is computed; the others move with the longest position.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def decoder(module: Any, calls: Sequence[AttentionCall]) -> FusedDecoder:
    """See `Backend.decoder`."""
    return FusedDecoder(module, calls)


class FusedDecoder:
    """The native `Decoder`. Keeps its own copy of all weights but the embedding.

    Keys and values are laid out as `csrc/attention.h` says.

    Raises:
        UnfitError: the module has something that the native decoder does not implement.
    """

    def __init__(self, module: Any, calls: Sequence[AttentionCall]) -> None:
        _check_fit(module, calls)
        self._library = library.load()
        self._module = module
        self._vocab_size: int = module.lm_head.out_features
        self._hidden_size: int = module.config.hidden_size
        self._num_layers = len(calls)
        shape, layers = _shape(module), (library.LayerWeights * len(calls))()
        for weights, layer, call in zip(layers, module.model.layers, calls, strict=True):
            _fill_layer(weights, layer, call)
        self._handle = c_void_p()
        self._library.foretoken_decoder_new(
            byref(shape),
            layers,
            _address(module.model.embed_tokens.weight),
            _address(module.model.norm.weight),
            _address(module.lm_head.weight),
            _address(module.model.rotary_emb.inv_freq),
            byref(self._handle),
        )
        # Not at exit: a daemon thread may still compute then.
        weakref.finalize(self, self._library.foretoken_decoder_free, self._handle).atexit = False
        self._tune()
        self._cache: tuple[Any, ...] = (None,) * 4  # keys, values, their addresses

    def _tune(self) -> None:
        """Measure how weights are fetched fastest on this machine, and say what was taken."""
        tuning = library.Tuning()
        self._library.foretoken_decoder_tune(self._handle, byref(tuning))
        linears = [m for m in self._module.modules() if isinstance(m, nn.Linear)]
        size = sum(linear.weight.nbytes for linear in linears) / 2**20
        library.record_tuning(f"{size:.1f} MiB", tuning)
        for rows, measured in tuning.describe().items():
            _log.info("Weights of %.1f MiB, %s, ms: %s", size, rows, measured)

    def set_fetches(self, one_row: int, few_rows: int) -> None:
        """Fetch weights so (`library.FETCHES`), whatever was measured; no logit changes."""
        self._library.foretoken_decoder_set_fetches(self._handle, one_row, few_rows)

    def drop_module_weights(self) -> None:
        """See `Decoder.drop_module_weights`: all but the embedding's."""
        for child in self._module.modules():
            if isinstance(child, nn.Linear):
                meta = torch.empty_like(child.weight, device="meta")
                child.weight = nn.Parameter(meta, requires_grad=False)

    def forward(
        self,
        token_T: Tensor,
        logit_row_N: Tensor,
        batch: AttentionBatch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        aux_layers: Sequence[int] = (),
    ) -> ForwardOutput:
        """See `Decoder.forward`: float32."""
        logits_NV = torch.empty(len(logit_row_N), self._vocab_size)
        aux = {i: torch.empty(len(token_T), self._hidden_size) for i in aux_layers}
        wanted = None
        if aux:
            wanted = (c_void_p * (self._num_layers + 1))()
            for i, hidden in aux.items():
                wanted[i] = hidden.data_ptr()
        key_addresses, value_addresses = self._addresses(keys, values)
        self._library.foretoken_decoder_forward(
            self._handle,
            byref(_native_batch(token_T, logit_row_N, batch, keys[0])),
            key_addresses,
            value_addresses,
            logits_NV.data_ptr(),
            wanted,
        )
        return ForwardOutput(logits_NV, tuple(aux[i] for i in aux_layers))

    def draft(
        self,
        token_T: Tensor,
        batch: AttentionBatch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        drafting: DraftRound,
    ) -> Tensor:
        """See `Decoder.draft`."""
        nums = check_draft_round(drafting, batch, self._vocab_size)
        token_BK = torch.full((len(nums), max(nums)), -1, dtype=torch.int64)
        drawn = library.DraftRound(
            drafting.slot_B.data_ptr(),
            drafting.num_B.data_ptr(),
            max(nums),
            native_cache(drafting.cache),
            drafting.fp64_noise,
            token_BK.data_ptr(),
        )
        key_addresses, value_addresses = self._addresses(keys, values)
        last_B = batch.query_start_B1[1:] - 1
        self._library.foretoken_decoder_draft(
            self._handle,
            byref(_native_batch(token_T, last_B, batch, keys[0])),
            key_addresses,
            value_addresses,
            byref(native_params(drafting.params)),
            byref(drawn),
        )
        return token_BK

    def _addresses(
        self, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]]:
        """Where the tensors are; looked up once for a pool that is used again and again."""
        known_keys, known_values, *addresses = self._cache
        if keys is not known_keys or values is not known_values:
            if not len(keys) == len(values) == self._num_layers:
                raise ConfigError("keys", len(keys), f"tensors of {self._num_layers} layers")
            if keys[0].dtype is not torch.float32:
                raise ConfigError("keys.dtype", keys[0].dtype, "torch.float32")
            layers = c_void_p * len(keys)
            addresses = [layers(*[t.data_ptr() for t in side]) for side in (keys, values)]
            self._cache = (keys, values, *addresses)
        key_addresses, value_addresses = addresses
        return key_addresses, value_addresses


def _native_batch(
    token_T: Tensor, row_N: Tensor, batch: AttentionBatch, key_cache: Tensor
) -> library.Batch:
    """Addresses within the tensors, which the caller keeps alive."""
    check_attention_batch(batch, len(token_T), key_cache)
    requests, columns = batch.block_BL.shape
    return library.Batch(
        token_T.data_ptr(),
        row_N.data_ptr(),
        len(token_T),
        len(row_N),
        library.AttentionBatch(
            batch.query_start_B1.data_ptr(),
            batch.length_B.data_ptr(),
            batch.block_BL.data_ptr(),
            requests,
            columns,
            batch.block_size,
        ),
    )


def _check_fit(module: Any, calls: Sequence[AttentionCall]) -> None:
    config = module.config
    if config.model_type not in FAMILIES:
        raise UnfitError(f"models of type `{config.model_type}` run through their own modules")
    if library.missing() is not None:
        raise UnfitError(f"there are no native kernels: {library.missing()}")
    dtype = module.lm_head.weight.dtype
    if dtype is not torch.float32 or module.lm_head.weight.device.type != "cpu":
        raise UnfitError(f"weights are {dtype}, not float32 on the CPU")
    rope = getattr(module.model.rotary_emb, "rope_type", None)
    if rope not in _FIXED_ROPE:
        raise UnfitError(f"RoPE of type `{rope}` changes its frequencies while running")
    if config.hidden_act not in ("silu", "swish"):
        raise UnfitError(f"the gated layer's activation is `{config.hidden_act}`, not SiLU")
    if module.lm_head.bias is not None:
        raise UnfitError("the output layer has a bias")
    sizes = {call.shape for call in calls}
    _, key_size, value_size = calls[0].shape
    if len(sizes) > 1 or key_size != value_size or key_size % _HEAD_MULTIPLE:
        raise UnfitError(f"heads of sizes {sorted(sizes)}: not one multiple of {_HEAD_MULTIPLE}")


def _shape(module: Any) -> library.DecoderShape:
    config, rotary = module.config, module.model.rotary_emb
    attention = module.model.layers[0].self_attn
    return library.DecoderShape(
        layers=len(module.model.layers),
        hidden=config.hidden_size,
        intermediate=module.model.layers[0].mlp.gate_proj.out_features,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=attention.q_proj.out_features // config.num_attention_heads,
        vocabulary=module.lm_head.out_features,
        rotary_size=2 * len(rotary.inv_freq),
        norm_epsilon=module.model.norm.variance_epsilon,
        attention_scale=attention.scaling,
        rotary_scale=rotary.attention_scaling,
    )


def _fill_layer(weights: library.LayerWeights, layer: Any, call: AttentionCall) -> None:
    """Addresses of one layer's tensors; the native decoder copies what they hold."""
    weights.input_norm = _address(layer.input_layernorm.weight)
    weights.post_attention_norm = _address(layer.post_attention_layernorm.weight)
    linears = {name: getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"}
    linears |= {name: getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    for name, linear in linears.items():
        setattr(weights, name, _address(linear.weight))
        setattr(weights, f"{name}_bias", _address(linear.bias))
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer.self_attn, name, None)
        setattr(weights, name, None if norm is None else _address(norm.weight))
    weights.window = call.sliding_window or 0


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.dtype is not torch.float32:
        raise UnfitError("a weight is not contiguous float32")
    return tensor.data_ptr()
