"""A whole forward pass of a Llama-like model in one native call.

Belongs here: which modules the native decoder can stand in for, and handing it weights and
batches. Does not: the arithmetic (`native/csrc/decoder.cpp`), deciding whether it is right (the
self-check in `guards.py` compares it with the module's own eager attention, like every model).

Why: at batch 1 a forward through the modules of the embedded target is mostly the overhead of some
4 600 operator calls.

Shape suffixes: T packed tokens, N rows whose logits are wanted, V vocabulary.
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

from foretoken.cache.batch import ForwardBatch
from foretoken.cache.kv_pool import KVPool
from foretoken.errors import IntegrityError
from foretoken.models.attention import AttentionCall
from foretoken.ops import DraftCache, SlotParams
from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_cache, native_params

__all__ = ["FAMILIES", "FusedDecoder", "UnfitError"]

FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss")
"""Model types built of RMSNorm, rotary attention and a gated SiLU layer, in that order."""

_log = logging.getLogger(__name__)

_HEAD_MULTIPLE = 16  # the widest vector: values are read by whole vectors
# Frequencies that do not depend on what is computed; the others move with the longest position.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class UnfitError(Exception):
    """The native decoder cannot stand in for a module; the message says why."""


class FusedDecoder:
    """The native stand-in for one module. Keeps its own copy of all weights but the embedding.

    Keys and values in a `KVPool` that it filled are laid out in its own way within each block
    (`csrc/attention.h`): no other model code can read them.

    Raises:
        UnfitError: the module has something that the native decoder does not implement.
    """

    def __init__(self, module: Any, calls: Sequence[AttentionCall]) -> None:
        _check_fit(module, calls)
        self._library = library.load()
        self._module = module
        self.vocab_size: int = module.lm_head.out_features
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
        self._kv: KVPool | None = None
        self._key_addresses: Any = None
        self._value_addresses: Any = None

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
        """Free the module's copies of the linear weights; it cannot be run any more."""
        for child in self._module.modules():
            if isinstance(child, nn.Linear):
                meta = torch.empty_like(child.weight, device="meta")
                child.weight = nn.Parameter(meta, requires_grad=False)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """See `CausalLM.forward`: float32 [N, V], one row per `batch.logit_row_N`."""
        self._adopt(kv)
        logits_NV = torch.empty(len(batch.logit_row_N), self.vocab_size)
        groups = _native_groups(batch)
        self._library.foretoken_decoder_forward(
            self._handle,
            byref(_native_batch(batch, groups)),
            self._key_addresses,
            self._value_addresses,
            logits_NV.data_ptr(),
        )
        return logits_NV

    def draft(
        self,
        first: ForwardBatch,
        kv: KVPool,
        params: SlotParams,
        block_BL: Tensor,
        numbers_3B: Tensor,
        cache: DraftCache | None,
        fp64_noise: bool = False,
    ) -> Tensor:
        """A whole round of autoregressive drafting; each draft as `Backend.draft` has it.

        Args:
            first: what the cache lacks, with one logit row per request.
            block_BL: int64, each request's blocks up to the last token that is computed.
            numbers_3B: int64, slots, positions of the first drafts, numbers of drafts >= 1.
            cache: float32; gets the q that each draft is drawn from. None: each draft is the argmax
                of the logits, whatever the temperature.

        Returns:
            int64 [B, K], -1 behind a request's last draft.
        """
        self._adopt(kv)
        slot_B, position_B, num_B = numbers_3B
        most = int(num_B.max())
        token_BK = torch.full((len(num_B), most), -1, dtype=torch.int64)
        drafting = library.DraftRound(
            slot_B.data_ptr(),
            position_B.data_ptr(),
            num_B.data_ptr(),
            block_BL.data_ptr(),
            len(num_B),
            block_BL.shape[1],
            most,
            native_cache(cache),
            fp64_noise,
            token_BK.data_ptr(),
        )
        groups = _native_groups(first)
        self._library.foretoken_decoder_draft(
            self._handle,
            byref(_native_batch(first, groups)),
            self._key_addresses,
            self._value_addresses,
            byref(native_params(params)),
            byref(drafting),
        )
        return token_BK

    def _adopt(self, kv: KVPool) -> None:
        """Remember where this pool's tensors are."""
        if kv is self._kv:
            return
        if kv.dtype is not torch.float32:
            raise IntegrityError(f"the native decoder was given a pool of {kv.dtype}, not float32")
        self._kv = kv
        array = c_void_p * len(kv.keys)
        self._key_addresses = array(*[key.data_ptr() for key in kv.keys])
        self._value_addresses = array(*[value.data_ptr() for value in kv.values])


def _native_groups(batch: ForwardBatch) -> ctypes.Array[library.Group]:
    groups = batch.attention.groups
    given = (library.Group * len(groups))()
    for to, group in zip(given, groups, strict=True):
        if isinstance(group.token_index, slice):
            to.first = group.token_index.start
        else:
            to.token_index = group.token_index.data_ptr()
        to.requests, to.queries = group.num_requests, group.num_queries
        to.block_bL, to.columns = group.block_bL.data_ptr(), group.block_bL.shape[1]
        to.length_b = group.length_b.data_ptr()
    return given


def _native_batch(batch: ForwardBatch, groups: ctypes.Array[library.Group]) -> library.Batch:
    """Addresses within `batch` and `groups`, which the caller keeps alive."""
    return library.Batch(
        batch.token_T.data_ptr(),
        batch.position_T.data_ptr(),
        batch.attention.slot_T.data_ptr(),
        batch.logit_row_N.data_ptr(),
        len(batch.token_T),
        len(batch.logit_row_N),
        batch.attention.block_size,
        ctypes.addressof(groups),
        len(groups),
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
