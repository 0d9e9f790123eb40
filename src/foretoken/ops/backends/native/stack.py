"""A whole pass of a stack, or a round of drafting, in one native call.

Belongs here: which stacks native code can run, and handing it weights and batches. Does not: the
arithmetic (`csrc/decoder.cpp`), deciding whether it is right (the self-check in `models/guards.py`
compares a model with its module's own eager attention, `models/eagle3.py` a head with stock
operators).

Why: at batch 1 a forward through the modules of the embedded target is mostly the overhead of some
4 600 operator calls.

Shape suffixes: as in `ops/stack.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.backends.native import library

from foretoken.ops.backends.native.arguments import (  # isort: skip
    Struct, address, native_cache, native_params, struct,
)  # fmt: skip
from foretoken.ops.checks import (  # isort: skip
    INT64, check_attention_batch, check_aux, check_draft_round, check_hidden, check_tensor,
)  # fmt: skip
from foretoken.ops.passes import pass_begins

from foretoken.ops.stack import (  # isort: skip
    KV, Dense, DraftRound, FeatureRule, Features, ForwardOutput, Layer, Linear, Outcome, Stack,
    UnfitError,
)  # fmt: skip
from foretoken.ops.steps import ForwardBatch

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


class NativeStack:
    """The `RoundStack` of this backend. Keeps its own copy of all matrices but the embedding.

    Keys and values are laid out as `csrc/attention.h` says. Without effect are `positions`, as
    angles are computed where they are used, `most_rows`, as logits are new memory, and
    `deterministic`, as a row's bits never depend on the rows next to it.

    Raises:
        UnfitError: the stack has something that native code does not implement.
    """

    multiplies_masked_keys: ClassVar[bool] = False

    def __init__(
        self, stack: Stack, positions: int, most_rows: int, *, deterministic: bool
    ) -> None:
        _check_fit(stack)
        self._library, self._handle, self._num_layers = (
            library.load(),
            c_void_p(),
            len(stack.layers),
        )
        mixer, rule = stack.layers[0].mixer, stack.features
        layers = [_native_layer(layer) for layer in stack.layers]
        addresses = struct((), *map(address, layers))
        scales = stack.eps, mixer.options.scale, mixer.rope.scale
        self._library.foretoken_decoder_new(
            _native_model(stack), rule and _native_rule(stack, rule), addresses, *scales,
            byref(self._handle),
        )  # fmt: skip
        # Not at exit: a daemon thread may still compute then.
        weakref.finalize(self, self._library.foretoken_decoder_free, self._handle).atexit = False
        self.stack = _without_matrices(stack)  # of which norms and the embedding are read
        self._size, self._vocab_size = stack.hidden_size, stack.vocab_size
        self._states = 0 if rule is None else rule.fc.weight.values.shape[1]
        self._tune()
        self._cache: tuple[Any, ...] = (None,) * 4  # keys, values, their addresses
        self._aux: tuple[Tensor, ...] = ()
        self._aux_fields: Struct | None = None  # of those, and what they are for
        self._aux_for: tuple[Sequence[int], int] = ((), 0)
        self._latest: tuple[Features, int, Struct] = ((), -1, struct(()))

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

    def run(
        self,
        batch: ForwardBatch,
        kv: KV,
        aux_layers: Sequence[int] = (),
        features: Features | None = None,
        *,
        logits: bool = True,
    ) -> ForwardOutput:
        """See `LoadedStack.run`: float32. After attention only wanted rows are computed."""
        if features is not None:
            return self._run_rows(batch, kv, features, logits)
        logits_NV = torch.empty(len(batch.logit_row_N), self._vocab_size)
        if self._aux_for != (aux_layers, len(batch.token_T)):
            self._allocate_aux(aux_layers, len(batch.token_T))
        native = _native_batch(batch, kv)
        addresses = *self._addresses(kv), logits_NV.data_ptr(), self._aux_fields
        pass_begins()
        self._library.foretoken_decoder_forward(self._handle, native, *addresses)
        return ForwardOutput(logits_NV, self._aux)

    def _run_rows(
        self, batch: ForwardBatch, kv: KV, features: Features, logits: bool
    ) -> ForwardOutput:
        """Of a stack with a feature rule."""
        hidden_NC = torch.empty(len(batch.logit_row_N), self._size)
        self._library.foretoken_head_forward(
            self._handle, _native_batch(batch, kv), self._features(features, len(batch.token_T)),
            *self._addresses(kv), hidden_NC.data_ptr(),
        )  # fmt: skip
        return ForwardOutput(self.logits(hidden_NC[: len(hidden_NC) * logits]), (), hidden_NC)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """See `LoadedStack.logits`."""
        hidden_NC = hidden_NC.contiguous()
        logits_NV = torch.empty(len(hidden_NC), self._vocab_size)
        if len(hidden_NC):
            numbers = (hidden_NC.data_ptr(), len(hidden_NC), logits_NV.data_ptr())
            self._library.foretoken_head_logits(self._handle, *numbers)
        return logits_NV

    def draft(self, batch: ForwardBatch, kv: KV, drafting: DraftRound) -> Tensor:
        """See `RoundStack.draft`."""
        known, hidden_SC = batch.attention, drafting.hidden_SC
        is_head, columns = self.stack.features is not None, known.block_BL.shape[1]
        room = columns * known.block_size
        nums = check_draft_round(
            drafting, known.length_B, room, self._vocab_size, least=int(not is_head)
        )
        if is_head:
            slots = len(drafting.params.key_S)
            check_hidden(hidden_SC, slots, self._size)
            check_tensor("block_SL", known.block_BL, (slots, columns), INT64, contiguous=True)
            tensors = (None, None, None, known.length_B, known.block_BL)
            first = struct(tensors, len(nums), columns, known.block_size, 0, 0)
        else:
            last_B = known.query_start_B1[1:] - 1
            first = _native_batch(batch._replace(logit_row_N=last_B), kv)
        token_BK, native = _native_round(drafting, max(nums))
        pass_begins()
        self._library.foretoken_decoder_draft(self._handle, first, *self._addresses(kv), native)
        return token_BK

    def observe(self, batch: ForwardBatch, kv: KV, features: Features, outcome: Outcome) -> None:
        """See `RoundStack.observe`."""
        token_SL, length_B, slot_B, hidden_SC = outcome
        check_hidden(hidden_SC, len(token_SL), self._size)
        known = struct((), *length_B)
        told = (token_SL.data_ptr(), address(known), slot_B.data_ptr(), hidden_SC.data_ptr())
        self._library.foretoken_head_observe(
            self._handle,
            _native_batch(batch, kv),
            struct((), *told, token_SL.shape[1]),
            self._features(features, len(batch.token_T)),
            *self._addresses(kv),
        )

    def _features(self, features: Features, tokens: int) -> Struct:
        """`Features`; of the same tensors as the last time the same."""
        if isinstance(features, Tensor):
            return struct((features,), 0, 0, 0)
        known, num_rows, native = self._latest
        if features is known and tokens == num_rows:
            return native
        check_aux(features, tokens, self._states)
        states = struct(features)
        native = struct((None,), address(states), 0, len(features), kept=states)
        if isinstance(features, tuple):  # a list may hold others by then
            self._latest = (features, tokens, native)
        return native

    def _addresses(self, kv: KV) -> tuple[Struct, Struct]:
        """Where the tensors are; looked up once for a pool that is used again and again."""
        keys, values = kv.keys, kv.values
        known_keys, known_values, *addresses = self._cache
        if keys is not known_keys or values is not known_values:
            if not len(keys) == len(values) == self._num_layers:
                raise ConfigError("keys", len(keys), f"tensors of {self._num_layers} layers")
            if keys[0].dtype is not torch.float32:
                raise ConfigError("keys.dtype", keys[0].dtype, "torch.float32")
            addresses = [struct(keys), struct(values)]
            self._cache = (keys, values, *addresses)
        key_addresses, value_addresses = addresses
        return key_addresses, value_addresses

    def _allocate_aux(self, layers: Sequence[int], tokens: int) -> None:
        """Memory for hidden states, which passes of as many tokens share: new tensors, and a look
        at them by who reads them, would take some 20 us of a step."""
        aux = {i: torch.empty(tokens, self._size) for i in layers}
        every = [aux.get(i) for i in range(self._num_layers + 1)]
        self._aux, self._aux_fields = tuple(aux[i] for i in layers), struct(every) if aux else None
        self._aux_for = (layers, tokens)


def _native_round(drafting: DraftRound, most: int) -> tuple[Tensor, Struct]:
    """`DraftRound`, and the drafts [B, most] that it gives."""
    token_BK, hidden_SC = (
        torch.empty(len(drafting.num_B), most, dtype=torch.int64),
        drafting.hidden_SC,
    )
    kept = native_params(drafting.params), native_cache(drafting.cache), hidden_SC
    tensors = (drafting.slot_B, drafting.num_B, token_BK)
    hidden = 0 if hidden_SC is None else hidden_SC.data_ptr()
    numbers = (*map(address, kept[:2]), hidden, most, drafting.fp64_noise)
    return token_BK, struct(tensors, *numbers, kept=kept)


def _native_batch(batch: ForwardBatch, kv: KV) -> Struct:
    """`Batch`."""
    token_T, _, row_N, where, _ = batch
    check_attention_batch(where, len(token_T), kv.keys[0])
    tensors = (token_T, row_N, where.query_start_B1, where.length_B, where.block_BL)
    return struct(tensors, *where.block_BL.shape, where.block_size, len(token_T), len(row_N))


def check_kernels(weight: Tensor) -> None:
    """Raise `UnfitError` unless there are kernels for such weights."""
    if library.missing() is not None:
        raise UnfitError(f"there are no native kernels: {library.missing()}")
    if weight.dtype is not torch.float32 or weight.device.type != "cpu":
        raise UnfitError(f"weights are {weight.dtype}, not float32 on the CPU")


def _check_fit(stack: Stack) -> None:
    check_kernels(stack.embedding_VC)
    if stack.head.bias is not None:
        raise UnfitError("the output layer has a bias")
    sizes, ropes = {*stack.layer_shapes}, {id(layer.mixer.rope) for layer in stack.layers}
    if len(sizes) > 1 or len(ropes) > 1 or stack.layers[0].mixer.head_size % HEAD_MULTIPLE:
        raise UnfitError(f"heads of sizes {sorted(sizes)}: not one multiple of {HEAD_MULTIPLE}")
    for layer in stack.layers:
        _, _, softcap, sinks_H = layer.mixer.options
        if softcap is not None or sinks_H is not None:
            raise UnfitError("attention has soft caps or sinks")


def checked(*weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """The weights, if kernels can read them where they are."""
    for weight in weights:
        if weight is not None and not (weight.is_contiguous() and weight.dtype is torch.float32):
            raise UnfitError("a weight is not contiguous float32")
    return weights


def _native_model(stack: Stack) -> Struct:
    """`Model`."""
    mixer, feed, rope = stack.layers[0].mixer, stack.layers[0].feed, stack.layers[0].mixer.rope
    head = stack.head.weight.values
    return struct(
        checked(stack.embedding_VC, stack.norm_C, head, rope.frequency_R), len(stack.layers),
        stack.hidden_size, feed.down.weight.values.shape[1], mixer.heads, mixer.kv_heads,
        mixer.head_size, len(head), 2 * len(rope.frequency_R),
    )  # fmt: skip


def _native_layer(layer: Layer) -> Struct:
    """`LayerWeights`."""
    mixer, feed = layer.mixer, layer.feed
    linears = (mixer.qkv, mixer.o, feed.gate_up, feed.down)
    return struct(
        checked(
            layer.mixer_norm_C, layer.feed_norm_C, mixer.q_norm_D, mixer.k_norm_D,
            *(linear.weight.values for linear in linears), *(linear.bias for linear in linears),
        ),
        mixer.options.sliding_window or 0,
    )  # fmt: skip


def _native_rule(stack: Stack, rule: FeatureRule) -> Struct:
    """`Eagle`."""
    fc, parts = rule.fc.weight.values, rule.fc_norm_PA
    return struct(
        (*checked(fc, parts, rule.feature_norm_C), stack.target_ids), fc.shape[1],
        1 if parts is None else len(parts), stack.vocab_size, rule.norm_before_residual,
        rule.norm_output,
    )  # fmt: skip


def _without_matrices(stack: Stack) -> Stack:
    """The shapes of what native code has its own copy of."""

    def empty(linear: Linear) -> Linear:
        return linear._replace(weight=Dense(torch.empty_like(linear.weight.values, device="meta")))

    layers = [
        layer._replace(
            mixer=layer.mixer._replace(qkv=empty(layer.mixer.qkv), o=empty(layer.mixer.o)),
            feed=layer.feed._replace(
                gate_up=empty(layer.feed.gate_up), down=empty(layer.feed.down)
            ),
        )
        for layer in stack.layers
    ]
    rule = stack.features and stack.features._replace(fc=empty(stack.features.fc))
    return replace(stack, layers=tuple(layers), head=empty(stack.head), features=rule)
