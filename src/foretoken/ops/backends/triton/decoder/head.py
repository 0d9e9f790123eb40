"""An EAGLE-3 head in few kernels: one layer, its features and its logits.

A pass of few rows is nine launches: both norms and the embedding; q, k and v; attention and its
merge; the output layer; gate and up; down; logits; and these by the target's ids. See `decoder.py`.

Shape suffixes: T packed rows, N wanted ones, C hidden size, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from foretoken.ops.backends.triton.attention import HeadInputs
from foretoken.ops.backends.triton.attention.attend import prepare
from foretoken.ops.backends.triton.compiled import launch, zero_if_noted
from foretoken.ops.backends.triton.decoder.decoder import Layer, attend, check_weight, rotary_angles
from foretoken.ops.backends.triton.decoder.products import Linear, Products, ResidualStream
from foretoken.ops.backends.triton.decoder.rowwise import join_kernel, spread_kernel
from foretoken.ops.decoder import HeadModel, LayerKV, UnfitError
from foretoken.ops.types import AttentionOptions

_SPREAD_BLOCK = 1024


class FusedDraftHead:
    """The `DraftHead` of this backend, on the head's own weights.

    Everything it does may be captured in a CUDA graph. Logits by the target's ids lie in one buffer
    whose other columns stay -inf: a quarter of a row is written for a head of 32 000 ids.

    Args:
        most_rows: rows of that buffer.
        deterministic: as in `FusedDecoder`.

    Raises:
        UnfitError: the head has something that it does not implement.
    """

    def __init__(self, model: HeadModel, most_rows: int, *, deterministic: bool = False) -> None:
        _check_fit(model)
        w, table_VC = model.weights, model.embedding_VC
        check_weight(table_VC, model.head_size)
        for name, weight in (*w._asdict().items(), ("embedding", table_VC)):
            same = weight.dtype is table_VC.dtype and weight.device == table_VC.device
            if not (same and weight.is_contiguous()):
                raise UnfitError(f"`{name}` is not contiguous {table_VC.dtype}")
        self._model, self._fc, self._head = model, Linear(w.fc), Linear(w.head)
        angles = rotary_angles(model.frequency_R, model.rotary_scale, model.positions)
        self._layer = Layer(
            w.hidden_norm, Linear(w.qkv), HeadInputs(*angles),
            AttentionOptions(model.head_size**-0.5), Linear(w.o), w.post_norm, Linear(w.gate_up),
            Linear(w.down),
        )  # fmt: skip
        self._products = Products(table_VC.device, table_VC.dtype, model.eps, deterministic)
        self._target_ids = None
        if model.target_ids is not None:
            self._target_ids = model.target_ids.to(torch.int32)
            self._wide_NV = self._all_dropped(most_rows)

    @zero_if_noted
    @torch.no_grad()
    def forward(
        self, token_T: Tensor, aux: Sequence[Tensor], kv: LayerKV, row_N: Tensor | None = None
    ) -> Tensor:
        """See `DraftHead.forward`. After attention only wanted rows are computed."""
        feature_TC = self._products.multiply(self._fc, torch.cat(list(aux), dim=-1))
        return self._pass(token_T, feature_TC, kv, row_N).state_TH

    @torch.no_grad()
    def draft(self, token_T: Tensor, feature_TC: Tensor, kv: LayerKV) -> tuple[Tensor, Tensor]:
        """See `DraftHead.draft`: without a kernel for the norm before the logits."""
        hidden_TC, logits_TQ = self._draft(token_T, feature_TC, kv)
        return hidden_TC, self._by_target_ids(logits_TQ)

    @torch.no_grad()
    def logits(self, hidden_NC: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        return self._by_target_ids(self._logits(hidden_NC))

    # What is apart from the buffer of logits, which must not become 0.

    @zero_if_noted
    def _draft(self, *given: Any) -> tuple[Tensor, Tensor]:
        stream = self._pass(*given)
        return stream.state_TH, stream.project(self._head)

    @zero_if_noted
    def _logits(self, hidden_NC: Tensor) -> Tensor:
        stream = ResidualStream(self._products, hidden_NC, self._model.weights.norm)
        return stream.project(self._head)

    def _pass(
        self, token_T: Tensor, feature_TC: Tensor, kv: LayerKV, row_N: Tensor | None = None
    ) -> ResidualStream:
        layer, heads = self._layer, self._model.heads
        prepare(kv.batch, len(token_T), heads, kv.keys, kv.values, layer.options)
        both_T2C, state_TC = self._join(token_T, feature_TC)
        qkv_TW = self._products.multiply(layer.qkv, both_T2C)
        attended_TW = attend(qkv_TW, layer, kv)
        if row_N is not None:
            attended_TW, state_TC = attended_TW[row_N], state_TC[row_N]
        stream = ResidualStream(self._products, state_TC, layer.mlp_gain_H)
        stream.add(layer.o, attended_TW, layer.mlp_gain_H)
        gated_TI = stream.gate(layer.gate_up)
        stream.add(layer.down, gated_TI, self._model.weights.norm, keep=True)
        return stream

    def _join(self, token_T: Tensor, feature_TC: Tensor) -> tuple[Tensor, Tensor]:
        """What q, k and v read, and where the residual stream begins."""
        model, products = self._model, self._products
        (rows, size), vocabulary = feature_TC.shape, len(model.embedding_VC)
        both_T2C = feature_TC.new_empty(rows, 2 * size)
        normed_TC = torch.empty_like(feature_TC) if model.norm_before_residual else None
        launch(
            join_kernel, (rows, 2), token_T, model.embedding_VC, model.weights.input_norm,
            feature_TC, model.weights.hidden_norm, both_T2C, normed_TC, vocabulary, size,
            triton.next_power_of_2(size), model.eps, products.overlap, num_warps=8,
            **products.dependent,
        )  # fmt: skip
        return both_T2C, feature_TC if normed_TC is None else normed_TC

    def _by_target_ids(self, logits_NQ: Tensor) -> Tensor:
        if self._target_ids is None:
            return logits_NQ
        rows, drafted = logits_NQ.shape
        fits = rows <= len(self._wide_NV)
        wide_NV = self._wide_NV[:rows] if fits else self._all_dropped(rows)
        launch(
            spread_kernel, (rows, triton.cdiv(drafted, _SPREAD_BLOCK)), logits_NQ,
            self._target_ids, wide_NV, drafted, wide_NV.shape[1], _SPREAD_BLOCK,
            self._products.overlap, num_warps=4, **self._products.dependent,
        )  # fmt: skip
        return wide_NV

    def _all_dropped(self, rows: int) -> Tensor:
        return self._model.embedding_VC.new_full((rows, self._model.vocab_size), -torch.inf)


def _check_fit(model: HeadModel) -> None:
    """Raise `UnfitError` for what these kernels lack; named as in `config.json`."""
    has = {name: weight is not None for name, weight in model.extras._asdict().items()}
    has["norm_output"] = model.norm_output
    has["sliding_window"] = model.sliding_window is not None
    has["partial_rotary_factor"] = 2 * len(model.frequency_R) < model.head_size
    if names := [f"`{name}`" for name, is_set in has.items() if is_set]:
        raise UnfitError(f"the kernels of a head have no {', '.join(names)}")
