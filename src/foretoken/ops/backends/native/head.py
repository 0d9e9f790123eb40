"""An EAGLE-3 head in native code: a row in one call, a round of drafting in one call.

Belongs here: which heads the native decoder can compute, and handing it weights and batches. Does
not: the arithmetic (`csrc/decoder.cpp`), whether it is right (`models/eagle3_fused.py`).

Shape suffixes: as in `ops/decoder.py`; S slots, B requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.ops.backends.native.arguments import Struct, address, struct
from foretoken.ops.backends.native.decoder import (
    HEAD_MULTIPLE,
    NativeModel,
    check_kernels,
    checked,
    native_batch,
    native_round,
)
from foretoken.ops.checks import check_aux, check_block_table, check_draft_round, check_hidden
from foretoken.ops.decoder import DraftRound, HeadModel, LayerKV, UnfitError
from foretoken.ops.passes import pass_begins


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
        layer, eagle = _native_layer(model), _native_eagle(model)
        super().__init__(_native_model(model), [layer], scales, eagle)

    def forward(
        self, token_T: Tensor, aux: Sequence[Tensor], kv: LayerKV, row_N: Tensor | None = None
    ) -> Tensor:
        """See `DraftHead.forward`. Behind attention only wanted rows are computed."""
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
        check_block_table(block_SL, slots)
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


def _native_model(model: HeadModel) -> Struct:
    """`Model`."""
    weights = model.weights
    tensors = (model.embedding_VC, weights.norm, weights.head, model.frequency_R)
    return struct(
        checked(*tensors), 1, len(weights.norm), weights.down.shape[1], model.heads, model.kv_heads,
        model.head_size, len(weights.head), 2 * len(model.frequency_R),
    )  # fmt: skip


def _native_layer(model: HeadModel) -> Struct:
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


def _native_eagle(model: HeadModel) -> Struct:
    """`Eagle`."""
    weights, fc_norm = model.weights, model.extras.fc_norm
    tensors = checked(weights.fc, fc_norm, weights.hidden_norm)
    return struct(
        (*tensors, model.target_ids), weights.fc.shape[1], 1 if fc_norm is None else len(fc_norm),
        model.vocab_size, model.norm_before_residual, model.norm_output,
    )  # fmt: skip
