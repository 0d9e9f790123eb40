"""A pass of a stack of layers, or a round of drafting, in one native call (`csrc/stack.cpp`).

At batch 1 most of the time of a pass through the modules of the embedded target is the overhead of
some 4 600 operator calls. Shape suffixes: as in `ops/stack.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError
from foretoken.ops.backends.native import library
from foretoken.ops.formats import BLOCKS, GROUP
from foretoken.ops.passes import pass_begins
from foretoken.ops.steps import ForwardBatch

from foretoken.ops.backends.native.arguments import (  # isort: skip
    Struct, address, addresses, native_cache, native_params, struct,
)  # fmt: skip
from foretoken.ops.checks import (  # isort: skip
    INT64, check_attention_batch, check_aux, check_draft_round, check_features, check_hidden,
    check_tensor,
)  # fmt: skip
from foretoken.ops.stack import (  # isort: skip
    KV, Blocks, Dense, DraftRound, Features, ForwardOutput, Grouped, Joined, Layer, Linear, Outcome,
    Stack, UnfitError, Weight, format_of, linears, map_linears, parts_of,
)  # fmt: skip

_KIND_NAMES = ["float32", "bfloat16", "float16", *BLOCKS, "int8", "int4"]
KINDS = {name: number for number, name in enumerate(_KIND_NAMES)}
"""The number of each weight format, as in `foretoken::Kind` of the C++ side."""

FETCHES = ("no hint", "cached")
"""Ways to read weights, by the numbers of `foretoken::Fetch`: without or with prefetching hints."""

_log = logging.getLogger(__name__)

_HEAD_MULTIPLE = 16  # numbers in the widest vector: the values of a head are read in whole vectors

_tunings: dict[str, dict[str, dict[str, float | str]]] = {}


def tunings() -> dict[str, dict[str, dict[str, float | str]]]:
    """The measurements of this process (`describe_fetches`), by size of the weights and by rows."""
    return dict(_tunings)


def describe_fetches(index: int, seconds: Sequence[float]) -> dict[str, float | str]:
    """The chosen one of `FETCHES`, and the milliseconds of a pass over the weights with each."""
    measured = {name: float(f"{1000 * s:.3g}") for name, s in zip(FETCHES, seconds, strict=True)}
    return {"taken": FETCHES[index], **measured}


class NativeStack:
    """The native `RoundStack`. `csrc/stack.h` describes the layout of keys and values.

    Matrices keep their formats; all other numbers are float32. `positions`, `most_rows` and
    `deterministic` are without effect: angles are computed where they are used, memory grows with
    the rows, and a row's bits never depend on other rows.

    Raises:
        UnfitError: native code does not implement some part of the stack.
        CheckpointError: a scale of the weights is not finite.
    """

    multiplies_masked_keys: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(
        self, stack: Stack, positions: int, most_rows: int, *, deterministic: bool = False
    ) -> None:
        _check_fit(stack)
        stack = _with_float32_norms(stack)
        rule, mixer = stack.features, stack.layers[0].mixer
        self._library, self._handle = library.load(), c_void_p()
        self._num_layers, self._size = len(stack.layers), stack.hidden_size
        self._vocab_size, self._has_rule = stack.vocab_size, rule is not None
        self._no_logits = torch.empty(0, stack.vocab_size)
        self._states_size = 0 if rule is None else rule.fc.weight.shape[1]  # inputs of `fc`
        layers = [_native_layer(layer) for layer in stack.layers]
        records = _native_model(stack), _native_rule(stack), struct((), *map(address, layers))
        scales = stack.eps, mixer.options.scale, mixer.rope.scale
        try:
            self._library.foretoken_stack_new(*records, *scales, byref(self._handle))
        except library.NotFiniteError as error:
            raise CheckpointError(
                "A scale of the quantised weights is NaN or infinite: the weights are damaged, "
                "download them again."
            ) from error
        self._model = records[0]  # keeps the embedding alive, which is read in place
        # Do not free at exit: a daemon thread may still be computing.
        weakref.finalize(self, self._library.foretoken_stack_free, self._handle).atexit = False
        self._tune()
        self.stack = self._kept_stack = _without_matrices(stack)  # keeps the norms alive
        # Keys and values of the latest call, and the addresses of both.
        self._latest_kv: tuple[Any, Any, Any] = (None, None, None)
        # Tensors for hidden states, the struct of their addresses, and their layers and tokens.
        self._aux: tuple[Tensor, ...] = ()
        self._aux_addresses: Struct | None = None
        self._aux_sizes: tuple[Sequence[int], int] = ((), 0)
        # The latest hidden states given to `_native_features`, their number of rows, their struct.
        self._latest_states: tuple[Sequence[Tensor], int, Struct] = ((), -1, struct(()))

    def run(
        self, batch: ForwardBatch, kv: KV, aux_layers: Sequence[int] = (),
        features: Features | None = None, *, logits: bool = True,
    ) -> ForwardOutput:  # fmt: skip
        """See `LoadedStack.run`. After the last attention only rows in `logit_row_N` are computed,
        unless `aux_layers` includes the input of the output layer."""
        token_T, row_N = batch.token_T, batch.logit_row_N
        num_tokens, num_rows = len(token_T), len(row_N)
        hidden_NC = torch.empty(num_rows, self._size) if self._has_rule else None
        logits_NV = torch.empty(num_rows, self._vocab_size) if logits else self._no_logits
        if self._aux_sizes != (aux_layers, num_tokens):
            self._allocate_aux(aux_layers, num_tokens)
        native = native_batch(batch, kv), self._native_features(features, num_tokens)
        kv_addresses = self._kv_addresses(kv)
        hidden = None if hidden_NC is None else hidden_NC.data_ptr()
        # An empty tensor's address is null: no logits.
        outputs = logits_NV.data_ptr(), hidden, self._aux_addresses
        pass_begins()
        self._library.foretoken_stack_run(self._handle, *native, *kv_addresses, *outputs)
        return ForwardOutput(logits_NV, self._aux, hidden_NC)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """See `LoadedStack.logits`; the result is a new tensor."""
        check_hidden(hidden_NC := hidden_NC.contiguous(), len(hidden_NC), self._size)
        logits_NV = torch.empty(len(hidden_NC), self._vocab_size)
        numbers = (hidden_NC.data_ptr(), len(hidden_NC), logits_NV.data_ptr())
        self._library.foretoken_stack_logits(self._handle, *numbers)
        return logits_NV

    def draft(self, batch: ForwardBatch, kv: KV, drafting: DraftRound) -> Tensor:
        """See `RoundStack.draft`. With a `FeatureRule` the batch's tokens are not read."""
        attention, hidden_SC = batch.attention, drafting.hidden_SC
        length_B, block_BL = attention.length_B, attention.block_BL
        columns, block_size = block_BL.shape[1], attention.block_size
        room, min_drafts = columns * block_size, 0 if self._has_rule else 1
        num_drafts = check_draft_round(drafting, length_B, room, self._vocab_size, min_drafts)
        if self._has_rule:
            if hidden_SC is None:
                raise ConfigError("drafting.hidden_SC", None, "given with a `FeatureRule`")
            slots = len(drafting.params.key_S)
            check_hidden(hidden_SC, slots, self._size)
            check_tensor("block_SL", block_BL, (slots, columns), INT64, contiguous=True)
            tensors = (None, None, None, length_B, block_BL)
            batch_struct = struct(tensors, len(num_drafts), columns, block_size, 0, 0)
        else:
            last_B = attention.query_start_B1[1:] - 1
            batch_struct = native_batch(batch._replace(logit_row_N=last_B), kv)
        token_BK = torch.empty(len(num_drafts), max(num_drafts), dtype=torch.int64)
        round_struct = _native_round(drafting, token_BK)
        structs = batch_struct, *self._kv_addresses(kv), round_struct
        pass_begins()
        self._library.foretoken_stack_draft(self._handle, *structs)
        return token_BK

    def observe(self, batch: ForwardBatch, kv: KV, features: Features, outcome: Outcome) -> None:
        """See `RoundStack.observe`."""
        token_SL, length_B, slot_B, hidden_SC = outcome
        check_hidden(hidden_SC, len(token_SL), self._size)
        lengths = struct((), *length_B)
        fields = (token_SL.data_ptr(), address(lengths), slot_B.data_ptr(), hidden_SC.data_ptr())
        native, native_outcome = native_batch(batch, kv), struct((), *fields, token_SL.shape[1])
        native_features = self._native_features(features, int(batch.attention.query_start_B1[-1]))
        arguments = native, native_outcome, native_features, *self._kv_addresses(kv)
        self._library.foretoken_stack_observe(self._handle, *arguments)

    def set_fetches(self, one_row: int, few_rows: int) -> None:
        """Set indices of `FETCHES` for one row and for a few rows; logits do not depend on them."""
        self._library.foretoken_stack_set_fetches(self._handle, one_row, few_rows)

    def _tune(self) -> None:
        """Choose the `FETCHES` that are fastest on this machine, and log the measurements."""
        index_R, size = torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        seconds_RF = torch.empty(2, len(FETCHES), dtype=torch.float64)
        self._library.foretoken_stack_measure_fetches(
            self._handle, index_R.data_ptr(), seconds_RF.data_ptr(), size.data_ptr()
        )
        self.set_fetches(*index_R.tolist())
        name = f"{size.item() / 2**20:.1f} MiB"
        descriptions = map(describe_fetches, index_R.tolist(), seconds_RF.tolist())
        _tunings[name] = dict(zip(("1 row", "6 rows"), descriptions, strict=True))
        for rows, measured in _tunings[name].items():
            _log.debug("Weights of %s, %s, ms: %s", name, rows, measured)

    def _kv_addresses(self, kv: KV) -> tuple[Struct, Struct]:
        """The addresses of the keys of all layers, and of the values of all layers."""
        keys, values = kv.keys, kv.values
        latest_keys, latest_values, structs = self._latest_kv
        if keys is not latest_keys or values is not latest_values:
            if not len(keys) == len(values) == self._num_layers:
                raise ConfigError("keys", len(keys), f"tensors of {self._num_layers} layers")
            if keys[0].dtype is not torch.float32:
                raise ConfigError("keys.dtype", keys[0].dtype, "torch.float32")
            structs = struct(keys), struct(values)
            self._latest_kv = (keys, values, structs)
        key_addresses, value_addresses = structs
        return key_addresses, value_addresses

    def _allocate_aux(self, layers: Sequence[int], tokens: int) -> None:
        """Allocate memory for hidden states, which passes with the same number of tokens reuse: new
        tensors in each pass, which the drafting stack would check again, would take 20 us."""
        aux = {i: torch.empty(tokens, self._size) for i in layers}
        states = [aux.get(i) for i in range(self._num_layers + 1)]
        self._aux = tuple(aux[i] for i in layers)
        self._aux_addresses = struct(states) if aux else None
        self._aux_sizes = (layers, tokens)

    def _native_features(self, features: Features | None, tokens: int) -> Struct | None:
        """The C struct `Features`; reused if the hidden states are those of the latest call."""
        check_features(self._has_rule, features)
        if features is None:
            return None
        if isinstance(features, Tensor):
            check_hidden(features := features.contiguous(), tokens, self._size)
            return struct((features,), 0, 0, 0)
        latest, num_rows, native = self._latest_states
        if features is latest and tokens == num_rows:
            return native
        if features[0].dtype is not torch.float32:  # the target runs in stock operators
            features = [states.float() for states in features]
        check_aux(features, tokens, self._states_size)
        states = struct(features)
        native = struct((None,), address(states), 0, len(features), kept=states)
        if isinstance(features, tuple):  # a list could change before the next call
            self._latest_states = (features, tokens, native)
        return native


def native_batch(batch: ForwardBatch, kv: KV) -> Struct:
    """Check a batch and make its C struct `Batch`."""
    token_T, row_N, attention = batch.token_T, batch.logit_row_N, batch.attention
    check_attention_batch(attention, len(token_T), kv.keys[0])
    block_BL = attention.block_BL
    tensors = (token_T, row_N, attention.query_start_B1, attention.length_B, block_BL)
    return struct(tensors, *block_BL.shape, attention.block_size, len(token_T), len(row_N))


def _native_round(drafting: DraftRound, token_BK: Tensor) -> Struct:
    """The C struct `DraftRound`; native code will write the drafts to `token_BK`."""
    hidden_SC = drafting.hidden_SC
    params, cache = native_params(drafting.params), native_cache(drafting.cache)
    tensors = (drafting.slot_B, drafting.num_B, token_BK)
    hidden = 0 if hidden_SC is None else hidden_SC.data_ptr()
    numbers = (address(params), address(cache), hidden, token_BK.shape[1], drafting.fp64_noise)
    return struct(tensors, *numbers, kept=(params, cache, hidden_SC))


def _check_fit(stack: Stack) -> None:
    """Raise `UnfitError` unless the kernels implement the stack."""
    if stack.device.type != "cpu":
        raise UnfitError(f"weights are on {stack.device}")
    if isinstance(stack.embedding, Grouped):
        raise UnfitError(f"the embedding is stored as {format_of(stack.embedding)}")
    for name, linear in [*linears(stack), ("embedding", Linear(stack.embedding))]:
        _check_weight(name, linear.weight)
    for layer in stack.layers:
        parts = parts_of(layer.feed.gate_up.weight)
        if len({(format_of(p), isinstance(p, Grouped) and _group_size(p)) for p in parts}) > 1:
            names = format_of(layer.feed.gate_up.weight)
            raise UnfitError(f"parts of `gate_up` differ in format or group size: {names}")
    if stack.target_ids is not None and not stack.target_ids.is_contiguous():
        raise UnfitError("`target_ids` of the output layer are not contiguous")
    if stack.head.bias is not None:
        raise UnfitError("the output layer has a bias")
    if stack.features is not None and (len(stack.layers) > 1 or stack.features.fc.bias is not None):
        raise UnfitError("`fc` has a bias, or the drafting stack has several layers")
    mixers = [layer.mixer for layer in stack.layers]
    if any(m.options.softcap is not None or m.options.sinks_H is not None for m in mixers):
        raise UnfitError("attention has a soft cap or sinks")
    sizes = sorted({m.head_size for m in mixers})
    if len(sizes) > 1 or sizes[0] % _HEAD_MULTIPLE:
        raise UnfitError(f"head sizes are {sizes}: must be one multiple of {_HEAD_MULTIPLE}")
    shapes = {(m.heads, m.kv_heads, m.options.scale, m.rope.scale) for m in mixers}
    ropes = [m.rope.frequency_R for m in mixers]
    widths = {layer.feed.down.weight.shape[1] for layer in stack.layers}
    if len(shapes) > 1 or len(widths) > 1 or not all(torch.equal(ropes[0], r) for r in ropes):
        raise UnfitError("layers differ in their sizes, scale of attention or RoPE")


def _check_weight(name: str, weight: Weight) -> None:
    for part in parts_of(weight):
        kind = format_of(part)
        if kind not in KINDS:
            raise UnfitError(f"`{name}` is stored as {kind}")
        stored: Tensor = part.rows if isinstance(part, Blocks) else part[0]
        if not stored.is_contiguous():
            raise UnfitError(f"`{name}` is not contiguous")
        if isinstance(part, Grouped) and _group_size(part) % GROUP:
            raise UnfitError(f"`{name}` has groups of {_group_size(part)}: no multiple of {GROUP}")
        if isinstance(part, Blocks) and part.shape[1] % GROUP:
            raise UnfitError(f"`{name}` has rows of {part.shape[1]}: no multiple of {GROUP}")


def _group_size(weight: Grouped) -> int:
    return weight.shape[1] // weight.scale_NG.shape[1]


def _native_part(weight: Dense | Blocks | Grouped) -> Struct:
    """The C struct `Part`."""
    scale_NG = order_N = None
    if isinstance(weight, Blocks):
        stored, order_N, group = weight.rows, weight.order_N, 0
    elif isinstance(weight, Grouped):
        stored, scale_NG, group = weight.codes, weight.scale_NG, _group_size(weight)
    else:
        stored, group = weight.values, 0
    tensors, kind = (stored, scale_NG, order_N), KINDS[format_of(weight)]
    sizes = weight.shape[0], stored.shape[1] * stored.itemsize, group
    return struct((), kind, *addresses(tensors), *sizes, kept=tensors)


def _native_matrix(weight: Weight) -> tuple[tuple[int, int], object]:
    """The fields of the C struct `Matrix`, and an object that keeps their memory alive."""
    parts = [_native_part(part) for part in parts_of(weight)]
    pointers = struct((), *map(address, parts), kept=parts)
    return (address(pointers), len(parts)), pointers


def _with_float32_norms(stack: Stack) -> Stack:
    """The stack with norms and biases of 16 bits in float32, as native code reads them."""
    if stack.dtype not in (torch.bfloat16, torch.float16):
        return stack

    def widen(record: Any, *names: str) -> Any:
        tensors = {name: getattr(record, name) for name in names}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return record._replace(**{name: tensor.float() for name, tensor in given.items()})

    mixers = [widen(layer.mixer, "q_norm_D", "k_norm_D") for layer in stack.layers]
    layers = tuple(
        widen(layer, "mixer_norm_C", "feed_norm_C")._replace(mixer=mixer)
        for layer, mixer in zip(stack.layers, mixers, strict=True)
    )
    rule = stack.features and widen(stack.features, "fc_norm_PA", "feature_norm_C")
    stack = replace(stack, layers=layers, norm_C=stack.norm_C.float(), features=rule)
    return map_linears(stack, lambda linear: widen(linear, "bias"))


def _check_float32(*weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """The given tensors; raises `UnfitError` for a tensor that kernels cannot read in place."""
    for weight in weights:
        if weight is not None and not (weight.is_contiguous() and weight.dtype is torch.float32):
            raise UnfitError("a norm, a bias or RoPE is not contiguous float32")
    return weights


def _native_model(stack: Stack) -> Struct:
    """The C struct `Model`."""
    mixer, feed = stack.layers[0].mixer, stack.layers[0].feed
    (embedding,), (head, kept) = parts_of(stack.embedding), _native_matrix(stack.head.weight)
    part, frequency_R = _native_part(embedding), mixer.rope.frequency_R
    tensors = (*_check_float32(stack.norm_C, frequency_R), stack.target_ids)
    return struct(
        (), address(part), *head, *addresses(tensors),
        len(stack.layers), stack.hidden_size, feed.down.weight.shape[1], mixer.heads,
        mixer.kv_heads, mixer.head_size, 2 * len(frequency_R), stack.head.weight.shape[0],
        stack.vocab_size, kept=(part, kept, tensors),
    )  # fmt: skip


def _native_layer(layer: Layer) -> Struct:
    """The C struct `LayerWeights`."""
    mixer, feed = layer.mixer, layer.feed
    norms = (layer.mixer_norm_C, layer.feed_norm_C, mixer.q_norm_D, mixer.k_norm_D)
    linears = (mixer.qkv, mixer.o, feed.gate_up, feed.down)
    matrices, kept = zip(*(_native_matrix(linear.weight) for linear in linears), strict=True)
    biases = _check_float32(*(linear.bias for linear in linears))
    fields = (*addresses(_check_float32(*norms)), *chain(*matrices), *addresses(biases))
    window = mixer.options.sliding_window or 0
    return struct((), *fields, window, kept=(kept, norms, biases))


def _native_rule(stack: Stack) -> Struct | None:
    """The C struct `FeatureRule`; None if the stack has no rule."""
    rule = stack.features
    if rule is None:
        return None
    parts = 1 if rule.fc_norm_PA is None else len(rule.fc_norm_PA)
    fc, kept = _native_matrix(rule.fc.weight)
    tensors = _check_float32(rule.fc_norm_PA, rule.feature_norm_C)
    numbers = (rule.fc.weight.shape[1], parts, rule.norm_before_residual, rule.norm_output)
    return struct((), *fc, *addresses(tensors), *numbers, kept=(kept, tensors))


def _without_matrices(stack: Stack) -> Stack:
    """The stack with shapes (tensors on device `meta`) in place of matrices and biases."""

    def to_meta(tensor: Any) -> Any:
        return torch.empty_like(tensor, device="meta") if isinstance(tensor, Tensor) else tensor

    def layer_to_meta(linear: Linear) -> Linear:
        parts = tuple(type(part)(*map(to_meta, part)) for part in parts_of(linear.weight))
        weight = Joined(parts) if len(parts) > 1 else parts[0]
        return linear._replace(weight=weight, bias=to_meta(linear.bias))

    return map_linears(stack, layer_to_meta)
