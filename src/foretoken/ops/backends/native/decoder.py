"""A whole forward pass of a Llama-like model, or an EAGLE-3 head's rows, or a round of drafting of
either, in one native call.

Belongs here: which modules and heads native code can stand in for, and handing it weights and
batches. Does not: the arithmetic (`csrc/decoder.cpp`), deciding whether it is right (the self-check
in `models/guards.py` compares a model with the module's own eager attention, like every model;
`models/eagle3_fused.py` a head).

Why: at batch 1 a forward through the modules of the embedded target is mostly the overhead of some
4 600 operator calls.

Shape suffixes: as in `ops/decoder.py`; S slots, B requests, K drafts.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.ops.backends.native import library

from foretoken.ops.backends.native.arguments import (  # isort: skip
    Struct, address, native_cache, native_params, struct,
)  # fmt: skip
from foretoken.ops.checks import (  # isort: skip
    INT64, check_attention_batch, check_aux, check_draft_round, check_hidden, check_tensor,
)  # fmt: skip
from foretoken.ops.decoder import (  # isort: skip
    AttentionCall, DraftRound, ForwardOutput, HeadModel, LayerKV, ModelKV, UnfitError,
    check_common_block,
)  # fmt: skip
from foretoken.ops.passes import pass_begins
from foretoken.ops.types import AttentionBatch

FETCHES = ("no hint", "cached")
"""`foretoken::Fetch` by number: how weights are fetched ahead of their use."""

_log = logging.getLogger(__name__)

HEAD_MULTIPLE = 16  # the widest vector: values are read by whole vectors

_tunings: dict[str, dict[str, dict[str, float | str]]] = {}


def tunings() -> dict[str, dict[str, dict[str, float | str]]]:
    """What this process measured and took: by size of the weights, by rows (`describe_fetches`)."""
    return dict(_tunings)


def describe_fetches(taken: int, seconds: Sequence[float]) -> dict[str, float | str]:
    """What was taken, and milliseconds of a pass over the weights with each of `FETCHES`."""
    measured = {name: float(f"{1000 * s:.3g}") for name, s in zip(FETCHES, seconds, strict=True)}
    return {"taken": FETCHES[taken], **measured}


class NativeModel:
    """Matrices packed for the kernels, and the fastest way to fetch them.

    Args:
        model, layers: `Model` and `LayerWeights`; what they point to besides matrices and biases
            must outlive it.
        scales: epsilon of the norms, factors of attention's scores and of rotary embedding.
        eagle: `Eagle`, of a head.
    """

    def __init__(
        self,
        model: Struct,
        layers: Sequence[Struct],
        scales: tuple[float, float, float],
        eagle: Struct | None = None,
    ) -> None:
        self._library, self._handle, self._num_layers = library.load(), c_void_p(), len(layers)
        addresses = struct((), *map(address, layers))
        self._library.foretoken_decoder_new(model, eagle, addresses, *scales, byref(self._handle))
        # Not at exit: a daemon thread may still compute then.
        weakref.finalize(self, self._library.foretoken_decoder_free, self._handle).atexit = False
        self._tune()
        self._cache: tuple[Any, ...] = (None,) * 4  # keys, values, their addresses

    def _tune(self) -> None:
        """Measure how weights are fetched fastest on this machine, take it and say so."""
        taken_R, size = torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        seconds_RF = torch.empty(2, len(FETCHES), dtype=torch.float64)
        self._library.foretoken_decoder_measure_fetches(
            self._handle, taken_R.data_ptr(), seconds_RF.data_ptr(), size.data_ptr()
        )
        self.set_fetches(*taken_R.tolist())
        name = f"{size.item() / 2**20:.1f} MiB"
        found = map(describe_fetches, taken_R.tolist(), seconds_RF.tolist())
        _tunings[name] = dict(zip(("1 row", "6 rows"), found, strict=True))
        for rows, measured in _tunings[name].items():
            _log.debug("Weights of %s, %s, ms: %s", name, rows, measured)

    def set_fetches(self, one_row: int, few_rows: int) -> None:
        """Fetch weights so (`FETCHES`) for one row and for a few; no logit changes."""
        self._library.foretoken_decoder_set_fetches(self._handle, one_row, few_rows)

    def _addresses(self, kv: ModelKV | LayerKV) -> tuple[Struct, Struct]:
        """Where the tensors are; looked up once for a pool that is used again and again."""
        (_, keys, values), (known_keys, known_values, *addresses) = kv, self._cache
        if keys is not known_keys or values is not known_values:
            all_keys, all_values = (
                [pool] if isinstance(pool, Tensor) else pool for pool in (keys, values)
            )
            if not len(all_keys) == len(all_values) == self._num_layers:
                raise ConfigError("keys", len(all_keys), f"tensors of {self._num_layers} layers")
            if all_keys[0].dtype is not torch.float32:
                raise ConfigError("keys.dtype", all_keys[0].dtype, "torch.float32")
            addresses = [struct(all_keys), struct(all_values)]
            self._cache = (keys, values, *addresses)
        key_addresses, value_addresses = addresses
        return key_addresses, value_addresses


class FusedDecoder(NativeModel):
    """The native `Decoder`. Keeps its own copy of all matrices but the embedding.

    Keys and values are laid out as `csrc/attention.h` says.

    Raises:
        UnfitError: the module has something that the native decoder does not implement.
    """

    def __init__(
        self,
        module: Any,
        calls: Sequence[AttentionCall],
        positions: int = 0,
        *,
        deterministic: bool = False,
    ) -> None:
        """Without effect are `positions`, as angles are computed where they are used, and
        `deterministic`, as a row's bits never depend on the rows next to it."""
        _check_fit(module, calls)
        self._module = module  # whose embedding and norms are read
        self._vocab_size: int = module.lm_head.out_features
        self._hidden_size: int = module.config.hidden_size
        self._aux: tuple[Tensor, ...] = ()
        self._aux_fields: Struct | None = None  # of those, and what they are for
        self._aux_for: tuple[Sequence[int], int] = ((), 0)
        pairs = zip(module.model.layers, calls, strict=True)
        layers = [_native_layer(layer, call.sliding_window) for layer, call in pairs]
        model, attention = module.model, module.model.layers[0].self_attn
        scales = model.norm.variance_epsilon, attention.scaling, model.rotary_emb.attention_scaling
        super().__init__(_native_model(module), layers, scales)

    def drop_module_weights(self) -> None:
        """See `Decoder.drop_module_weights`: all but the embedding's."""
        for child in self._module.modules():
            if isinstance(child, nn.Linear):
                meta = torch.empty_like(child.weight, device="meta")
                child.weight = nn.Parameter(meta, requires_grad=False)

    def forward(
        self, token_T: Tensor, logit_row_N: Tensor, kv: ModelKV, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """See `Decoder.forward`: float32."""
        logits_NV = torch.empty(len(logit_row_N), self._vocab_size)
        if self._aux_for != (aux_layers, len(token_T)):
            self._allocate_aux(aux_layers, len(token_T))
        batch = native_batch(token_T, logit_row_N, kv.batch, kv.keys[0])
        addresses = *self._addresses(kv), logits_NV.data_ptr(), self._aux_fields
        pass_begins()
        self._library.foretoken_decoder_forward(self._handle, batch, *addresses)
        return ForwardOutput(logits_NV, self._aux)

    def _allocate_aux(self, layers: Sequence[int], tokens: int) -> None:
        """Memory for hidden states, which passes of as many tokens share: new tensors, and a look
        at them by who reads them, would take some 20 us of a step."""
        aux = {i: torch.empty(tokens, self._hidden_size) for i in layers}
        every = [aux.get(i) for i in range(self._num_layers + 1)]
        self._aux, self._aux_fields = tuple(aux[i] for i in layers), struct(every) if aux else None
        self._aux_for = (layers, tokens)

    def draft(self, token_T: Tensor, kv: ModelKV, drafting: DraftRound) -> Tensor:
        """See `RoundDecoder.draft`."""
        batch = kv.batch
        room = batch.block_BL.shape[1] * batch.block_size
        nums = check_draft_round(drafting, batch.length_B, room, self._vocab_size)
        token_BK, native = native_round(drafting, max(nums))
        first = native_batch(token_T, batch.query_start_B1[1:] - 1, batch, kv.keys[0])
        pass_begins()
        self._library.foretoken_decoder_draft(self._handle, first, *self._addresses(kv), native)
        return token_BK


class FusedHead(NativeModel):
    """The native `RoundHead`. Keeps its own copy of all matrices but the embedding.

    Without effect are `most_rows` and `deterministic`, as for `FusedDecoder`.

    Raises:
        UnfitError: the head has something that native code does not implement.
    """

    def __init__(self, model: HeadModel, most_rows: int, *, deterministic: bool = False) -> None:
        weights, extras = model.weights, model.extras
        check_kernels(model.embedding_VC)
        if model.head_size % HEAD_MULTIPLE:
            raise UnfitError(f"heads of size {model.head_size}: no multiple of {HEAD_MULTIPLE}")
        self._size, self._vocab_size = len(weights.hidden_norm), model.vocab_size
        self._read_numbers = weights.fc.shape[1]
        # What is read where it is.
        norms = [weight for weight in weights if weight.dim() == 1]
        others = (model.embedding_VC, model.frequency_R, model.target_ids)
        self._read = (*norms, extras.fc_norm, extras.qk_norm, *others)
        self._latest_aux: tuple[Sequence[Tensor], int, Struct] = ((), -1, struct(()))
        scales = (model.eps, model.head_size**-0.5, model.rotary_scale)
        layer, eagle = _head_layer(model), _head_eagle(model)
        super().__init__(_head_model(model), [layer], scales, eagle)

    def forward(
        self, token_T: Tensor, aux: Sequence[Tensor], kv: LayerKV, row_N: Tensor | None = None
    ) -> Tensor:
        """See `DraftHead.forward`. After attention only wanted rows are computed."""
        return self._rows(token_T, self._features(aux, len(token_T)), kv, row_N)

    def observe(
        self,
        hidden_SC: Tensor,
        token_SL: Tensor,
        length_B: Sequence[int],
        slot_B: Tensor,
        aux: Sequence[Tensor],
        kv: LayerKV,
    ) -> None:
        """See `RoundHead.observe`."""
        check_hidden(hidden_SC, len(token_SL), self._size)
        known = struct((), *length_B)
        outcome = (token_SL.data_ptr(), address(known), slot_B.data_ptr(), hidden_SC.data_ptr())
        self._library.foretoken_head_observe(
            self._handle,
            native_batch(slot_B, slot_B, kv.batch, kv.keys),
            struct((), *outcome, token_SL.shape[1]),
            self._features(aux, kv.batch.query_start_B1.tolist()[-1]),
            *self._addresses(kv),
        )

    def draft(self, token_T: Tensor, feature_TC: Tensor, kv: LayerKV) -> tuple[Tensor, Tensor]:
        """See `DraftHead.draft`."""
        hidden_TC = self._rows(token_T, struct((feature_TC,), 0, 0, 0), kv)
        return hidden_TC, self.logits(hidden_TC)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        hidden_NC = hidden_NC.contiguous()
        logits_NV = torch.empty(len(hidden_NC), self._vocab_size)
        numbers = (hidden_NC.data_ptr(), len(hidden_NC), logits_NV.data_ptr())
        self._library.foretoken_head_logits(self._handle, *numbers)
        return logits_NV

    def draft_round(self, hidden_SC: Tensor, kv: LayerKV, drafting: DraftRound) -> Tensor:
        """See `RoundHead.draft_round`."""
        length_B, block_SL, slots = kv.batch.length_B, kv.batch.block_BL, len(drafting.params.key_S)
        columns, block_size = block_SL.shape[1], kv.keys.shape[1]
        room = columns * block_size
        nums = check_draft_round(drafting, length_B, room, self._vocab_size, least=0)
        check_hidden(hidden_SC, slots, self._size)
        check_tensor("block_SL", block_SL, (slots, columns), INT64, contiguous=True)
        token_BK, native = native_round(drafting, max(nums), hidden_SC)
        tensors = (None, None, None, length_B, block_SL)
        known = struct(tensors, len(nums), columns, block_size, 0, 0)
        pass_begins()
        self._library.foretoken_decoder_draft(self._handle, known, *self._addresses(kv), native)
        return token_BK

    def _features(self, aux: Sequence[Tensor], tokens: int) -> Struct:
        """`Features`; of the same tensors as the last time the same."""
        known, num_rows, features = self._latest_aux
        if aux is known and tokens == num_rows:
            return features
        check_aux(aux, tokens, self._read_numbers)
        states = struct(aux)
        features = struct((None,), address(states), 0, len(aux), kept=states)
        if isinstance(aux, tuple):  # a list may hold others by then
            self._latest_aux = (aux, tokens, features)
        return features

    def _rows(
        self, token_T: Tensor, features: Struct, kv: LayerKV, row_N: Tensor | None = None
    ) -> Tensor:
        row_N = token_T if row_N is None else row_N  # as many as there are: they are not read
        hidden_NC = torch.empty(len(row_N), self._size)
        self._library.foretoken_head_forward(
            self._handle, native_batch(token_T, row_N, kv.batch, kv.keys), features,
            *self._addresses(kv), hidden_NC.data_ptr(),
        )  # fmt: skip
        return hidden_NC


def native_round(
    drafting: DraftRound, most: int, hidden_SC: Tensor | None = None
) -> tuple[Tensor, Struct]:
    """`DraftRound`, and the drafts [B, most] that it gives."""
    token_BK = torch.empty(len(drafting.num_B), most, dtype=torch.int64)
    kept = native_params(drafting.params), native_cache(drafting.cache), hidden_SC
    tensors = (drafting.slot_B, drafting.num_B, token_BK)
    hidden = 0 if hidden_SC is None else hidden_SC.data_ptr()
    numbers = (*map(address, kept[:2]), hidden, most, drafting.fp64_noise)
    return token_BK, struct(tensors, *numbers, kept=kept)


def native_batch(
    token_T: Tensor, row_N: Tensor, batch: AttentionBatch, key_cache: Tensor
) -> Struct:
    """`Batch`."""
    check_attention_batch(batch, len(token_T), key_cache)
    tensors = (token_T, row_N, batch.query_start_B1, batch.length_B, batch.block_BL)
    return struct(tensors, *batch.block_BL.shape, batch.block_size, len(token_T), len(row_N))


def _check_fit(module: Any, calls: Sequence[AttentionCall]) -> None:
    check_common_block(module)
    check_kernels(module.lm_head.weight)
    if module.lm_head.bias is not None:
        raise UnfitError("the output layer has a bias")
    sizes = {call.shape for call in calls}
    _, key_size, value_size = calls[0].shape
    if len(sizes) > 1 or key_size != value_size or key_size % HEAD_MULTIPLE:
        raise UnfitError(f"heads of sizes {sorted(sizes)}: not one multiple of {HEAD_MULTIPLE}")


def check_kernels(weight: Tensor) -> None:
    """Raise `UnfitError` unless there are kernels for such weights."""
    if library.missing() is not None:
        raise UnfitError(f"there are no native kernels: {library.missing()}")
    if weight.dtype is not torch.float32 or weight.device.type != "cpu":
        raise UnfitError(f"weights are {weight.dtype}, not float32 on the CPU")


def _native_model(module: Any) -> Struct:
    """`Model`."""
    model, config = module.model, module.config
    tensors = (
        model.embed_tokens.weight,
        model.norm.weight,
        module.lm_head.weight,
        model.rotary_emb.inv_freq,
    )
    return struct(
        checked(*tensors), len(model.layers), config.hidden_size,
        model.layers[0].mlp.gate_proj.out_features, config.num_attention_heads,
        config.num_key_value_heads,
        model.layers[0].self_attn.q_proj.out_features // config.num_attention_heads,
        module.lm_head.out_features, 2 * len(model.rotary_emb.inv_freq),
    )  # fmt: skip


def _native_layer(layer: Any, window: int | None) -> Struct:
    """`LayerWeights`."""
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    norms = (layer.input_layernorm, layer.post_attention_layernorm, *head_norms)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    linears = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    weights = [None if part is None else part.weight for part in (*norms, *linears)]
    return struct(checked(*weights, *(linear.bias for linear in linears)), window or 0)


def checked(*weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """The weights, if kernels can read them where they are."""
    for weight in weights:
        if weight is not None and not (weight.is_contiguous() and weight.dtype is torch.float32):
            raise UnfitError("a weight is not contiguous float32")
    return weights


def _head_model(model: HeadModel) -> Struct:
    """`Model`."""
    weights = model.weights
    tensors = (model.embedding_VC, weights.norm, weights.head, model.frequency_R)
    return struct(
        checked(*tensors), 1, len(weights.norm), weights.down.shape[1], model.heads, model.kv_heads,
        model.head_size, len(weights.head), 2 * len(model.frequency_R),
    )  # fmt: skip


def _head_layer(model: HeadModel) -> Struct:
    """`LayerWeights`."""
    weights, extras = model.weights, model.extras
    sizes = [count * model.head_size for count in (model.heads, *2 * [model.kv_heads])]
    no_biases, qk_norm = (None,) * 3, extras.qk_norm
    return struct(
        checked(
            weights.input_norm,
            weights.post_norm,
            *((None, None) if qk_norm is None else (qk_norm[0], qk_norm[-1])),
            *torch.split(weights.qkv, sizes),
            weights.o,
            *weights.gate_up.chunk(2),
            weights.down,
            *(no_biases if extras.qkv_bias is None else torch.split(extras.qkv_bias, sizes)),
            extras.o_bias,
            *no_biases,
        ),
        model.sliding_window or 0,
    )


def _head_eagle(model: HeadModel) -> Struct:
    """`Eagle`."""
    weights, fc_norm = model.weights, model.extras.fc_norm
    tensors = checked(weights.fc, fc_norm, weights.hidden_norm)
    return struct(
        (*tensors, model.target_ids), weights.fc.shape[1], 1 if fc_norm is None else len(fc_norm),
        model.vocab_size, model.norm_before_residual, model.norm_output,
    )  # fmt: skip
