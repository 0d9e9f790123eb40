"""An EAGLE-3 head: one decoder layer on top of the target's hidden states and the next token.

Belongs here: what a head is made of, its pass over packed rows, and whether a backend's own
implementation may stand in for its operators: it is compared with them on random rows. (Wrong
drafts would cost no more than speed: the target verifies them.) Does not: reading its folder
(`eagle3_config.py`, `eagle3_checkpoint.py`), when it runs and what is kept between passes
(`drafting/eagle3.py`).

Row i reads the *feature* of position i, which is several hidden states of the target through `fc`,
and the token at position i + 1; what it puts out predicts the token at i + 2. Where the target has
not been yet, its own output of the row before stands in for the feature (Li et al. 2025, "EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test").

Shape suffixes: T packed rows, N rows with wanted logits, C the head's hidden size, V the
target's vocabulary, H heads, D head size, A numbers of a part that is normed by itself, R half of
the numbers of a head that are turned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.cache.kv_pool import KVPool, LayerShape, write_index
from foretoken.errors import UnsupportedModelError
from foretoken.models.eagle3_config import Eagle3Config
from foretoken.models.guards import TOLERANCE
from foretoken.ops import AttentionBatch, AttentionOptions, Backend, UnfitError
from foretoken.ops.decoder import DraftHead, HeadExtras, HeadModel, HeadWeights, RoundHead
from foretoken.ops.steps import ForwardBatch

_log = logging.getLogger(__name__)

_BLOCK = 4  # tokens per cache block of the check
_PASSES = ((70, 1, 5), (1, 1, 1), (5, 5, 5), (1,))
"""New rows of each request in turn: a prompt, drafts of three, what the target verified, of one."""
_LONGEST = sum(map(max, _PASSES))
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Eagle3Head:
    """A loaded head; everything is in the dtype and on the device of its embedding.

    `forward` is one ordinary decoder block with a wider input. Nothing here waits for a device.

    config, weights, extras: as loaded
    layer_shapes: what a `KVPool` for it needs
    target_ids: int64 [draft_vocab_size], the target's id of each id of the head's, rising or not;
        None if they are the same
    fused: the backend's own implementation, which then computes all of it; see `fuse`
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: HeadWeights,
        extras: HeadExtras,
        target_ids: Tensor | None,
        embedding: Tensor,
        backend: Backend,
    ) -> None:
        layer = config.layer
        self.config, self.weights, self.extras = config, weights, extras
        self.target_ids = target_ids
        self.embedding, self.backend = embedding, backend
        self.fused: DraftHead | None = None
        self.dtype, self.device = embedding.dtype, embedding.device
        self._sizes = (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
        _, kv_heads, head_dim = self._sizes
        self.layer_shapes: list[LayerShape] = [(kv_heads, head_dim, head_dim)]
        self._attention = AttentionOptions(head_dim**-0.5, config.sliding_window)
        self._frequency_R = config.frequency_R.to(self.device)
        self._rotary_scale = config.rotary_scale

    def features(self, aux: Sequence[Tensor]) -> Tensor:
        """[T, C] of the target's hidden states [T, target_hidden_size], in the order of layers."""
        states_TA, gain_PA = torch.cat(list(aux), dim=-1), self.extras.fc_norm
        if gain_PA is not None:
            states_TA = self._norm_parts(states_TA.view(-1, *gain_PA.shape), gain_PA).flatten(1)
        return F.linear(states_TA, self.weights.fc)

    def forward(
        self, batch: ForwardBatch, aux: Sequence[Tensor], kv: KVPool, row_N: Tensor | None = None
    ) -> Tensor:
        """Run packed rows and write their K/V.

        Args:
            batch: `token_T` is the token *after* each row's position; `logit_row_N` is not read.
            aux: as for `features`, of each row's position.
            row_N: int64, rows that are wanted; None: all.

        Returns:
            [N, C], for `logits` and for the next row of the same request.
        """
        if self.fused is not None:
            return self.fused.forward(batch.token_T, aux, kv.only_layer(batch.attention), row_N)
        return self._pass(batch, self.features(aux), kv, row_N)

    def _pass(
        self, batch: ForwardBatch, feature_TC: Tensor, kv: KVPool, row_N: Tensor | None = None
    ) -> Tensor:
        def attend(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
            index_T = write_index(batch.attention, len(batch.token_T), kv.num_blocks)
            kv.write(0, index_T, key_THD, value_THD)
            return self.backend.attention(
                query_THD, kv.keys[0], kv.values[0], batch.attention, self._attention
            )

        return self.block(batch.token_T, batch.position_T, feature_TC, attend, row_N)

    def block(
        self,
        token_T: Tensor,
        position_T: Tensor,
        feature_TC: Tensor,
        attend: Attend,
        row_N: Tensor | None = None,
    ) -> Tensor:
        """A pass with any attention: [T, H, D] of queries, keys and values, turned."""
        hidden_TC, projected = self.project(token_T, position_T, feature_TC)
        attended_TD = attend(*projected).flatten(1)
        if row_N is not None:
            hidden_TC, attended_TD = hidden_TC[row_N], attended_TD[row_N]
        return self.finish(hidden_TC, attended_TD)

    def project(
        self, token_T: Tensor, position_T: Tensor, feature_TC: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """What a pass does before its attention: the residual [T, C], and what that takes."""
        w = self.weights
        token_TC = self._norm(self.embedding[token_T], w.input_norm)
        normed_TC = self._norm(feature_TC, w.hidden_norm)
        hidden_TC = normed_TC if self.config.norm_before_residual else feature_TC
        return hidden_TC, self._project(torch.cat([token_TC, normed_TC], dim=-1), position_T)

    def finish(self, hidden_NC: Tensor, attended_ND: Tensor) -> Tensor:
        """What a pass does after its attention, [N, C]."""
        w = self.weights
        hidden_NC = hidden_NC + F.linear(attended_ND, w.o, self.extras.o_bias)
        inner_NC = self._norm(hidden_NC, w.post_norm)
        gate_NI, up_NI = F.linear(inner_NC, w.gate_up).chunk(2, dim=-1)
        hidden_NC = hidden_NC + F.linear(F.silu(gate_NI) * up_NI, w.down)
        return self._norm(hidden_NC, w.norm) if self.config.norm_output else hidden_NC

    def draft(self, batch: ForwardBatch, feature_TC: Tensor, kv: KVPool) -> tuple[Tensor, Tensor]:
        """What `forward` returns of all rows, and the `logits` of it.

        Args:
            feature_TC: where the target has not been: what the row before put out.
        """
        if self.fused is not None:
            return self.fused.draft(batch.token_T, feature_TC, kv.only_layer(batch.attention))
        hidden_TC = self._pass(batch, feature_TC, kv)
        return hidden_TC, self.logits(hidden_TC)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Raw logits [N, V] by the target's ids; -inf for those that the head never drafts.

        By the target's ids noise is the target's own, q is comparable with p, and the rules need no
        map. It costs writing rows of V instead of `draft_vocab_size`. They may lie in memory that
        the next call overwrites.
        """
        if self.fused is not None:
            return self.fused.logits(hidden_NC)
        w = self.weights
        normed_NC = hidden_NC if self.config.norm_output else self._norm(hidden_NC, w.norm)
        logits = F.linear(normed_NC, w.head)
        if self.target_ids is None:
            return logits
        wide_NV = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return wide_NV.index_copy_(1, self.target_ids, logits)

    def model(self, positions: int) -> HeadModel:
        """All that it computes with, for contexts of so many positions."""
        return HeadModel(
            self.weights, self.extras, self.embedding, self.config.vocab_size, self.target_ids,
            *self._sizes, self.config.layer.rms_norm_eps, self.config.norm_before_residual,
            self.config.norm_output, self.config.sliding_window, self._frequency_R,
            self._rotary_scale, positions,
        )  # fmt: skip

    def drop_matrices(self) -> None:
        """Free what `fused` keeps itself; nothing else can compute this head any more."""
        kept = (w if w.dim() == 1 else torch.empty_like(w, device="meta") for w in self.weights)
        self.weights = HeadWeights(*kept)

    def _project(self, both_T2C: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values; [T, H, D]."""
        heads, kv_heads, head_dim = self._sizes
        turned = heads + kv_heads
        qkv_TD = F.linear(both_T2C, self.weights.qkv, self.extras.qkv_bias)
        qkv_THD = qkv_TD.view(len(both_T2C), -1, head_dim)
        straight_THD = qkv_THD[:, :turned]
        if self.extras.qk_norm is not None:
            straight_THD = self._norm_parts(straight_THD, self.extras.qk_norm)
        turned_THD = self._rotate(straight_THD, position_T)
        return turned_THD[:, :heads], turned_THD[:, heads:], qkv_THD[:, turned:]

    def _rotate(self, x_THD: Tensor, position_T: Tensor) -> Tensor:
        """Queries and keys turned by their positions: of the first 2R numbers of each head those
        that are R apart."""
        angle_T1R = position_T.float()[:, None, None] * self._frequency_R
        cos = (angle_T1R.cos() * self._rotary_scale).to(x_THD.dtype)
        sin = (angle_T1R.sin() * self._rotary_scale).to(x_THD.dtype)
        size = cos.shape[-1]
        a, b, rest = torch.split(x_THD, [size, size, x_THD.shape[-1] - 2 * size], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def _norm(self, x_TC: Tensor, gain_C: Tensor) -> Tensor:
        return F.rms_norm(x_TC, gain_C.shape, gain_C, self.config.layer.rms_norm_eps)

    def _norm_parts(self, x_TPA: Tensor, gain_PA: Tensor) -> Tensor:
        eps = self.config.layer.rms_norm_eps
        return F.rms_norm(x_TPA, gain_PA.shape[1:], None, eps) * gain_PA


def fuse(head: Eagle3Head, positions: int, most_rows: int) -> None:
    """Let the backend's own implementation compute the head, if it has one that agrees.

    Args:
        positions: longest context, in tokens.
        most_rows: requests that draft at once.

    Raises:
        UnsupportedModelError: its operators give NaN or infinity.
    """
    try:
        fused = head.backend.draft_head(head.model(max(positions, _LONGEST)), most_rows)
    except UnfitError as reason:
        _log.info("The EAGLE-3 head runs operator by operator: %s", reason)
        fused = None
    tried = (None,) if fused is None else (None, fused)
    head.backend.compile_ahead(lambda: [_outputs(head, one) for one in tried])
    expected, *others = (_outputs(head, one) for one in tried)
    if not all(bool((output < torch.inf).all()) for output in expected):  # -inf: never drafted
        raise UnsupportedModelError(
            f"The EAGLE-3 head gives numbers that are not finite in {head.dtype}: its weights are "
            "damaged, or too large for this dtype (float16 ends at 65504). Try another `dtype`."
        )
    if fused is None:
        return
    error = _difference(expected, *others)
    if not error <= (tolerance := TOLERANCE[head.dtype]):  # NaN too
        head.fused = None
        _log.warning(
            "The EAGLE-3 head runs operator by operator, slower: that of backend `%s` differs by "
            "%.1e of the largest number (bound %.0e).",
            head.backend.name,
            error,
            tolerance,
        )
    elif isinstance(fused, RoundHead):
        head.drop_matrices()


@torch.no_grad()
def _outputs(head: Eagle3Head, fused: DraftHead | None) -> list[Tensor]:
    """Hidden states and logits of `_PASSES`, each from random hidden states of a target."""
    head.fused, device, config = fused, head.device, head.config
    generator = torch.Generator().manual_seed(0)
    columns = -(-_LONGEST // _BLOCK)
    blocks_BL = torch.randperm(3 * columns, generator=generator).view(3, columns).to(device)
    kv = KVPool(head.layer_shapes, 3 * columns + 1, _BLOCK, dtype=head.dtype, device=device)
    length_B, outputs = torch.zeros(3, dtype=torch.int64), list[Tensor]()
    for rows in _PASSES:
        new_B = torch.tensor(rows)
        length_B = length_B[: len(rows)] + new_B
        start_B1 = torch.nn.functional.pad(new_B.cumsum(0), (1, 0))
        position_T = torch.cat(
            [torch.arange(end - n, end) for end, n in zip(length_B.tolist(), rows, strict=True)]
        )
        attention = AttentionBatch(
            start_B1.to(device), length_B.to(device), blocks_BL[: len(rows)], _BLOCK,
            most_queries=max(rows), values_fit=True,
        )  # fmt: skip
        total = len(position_T)
        token_T = torch.randint(config.vocab_size, (total,), generator=generator).to(device)
        batch = ForwardBatch(token_T, position_T.to(device), token_T[:0], attention)
        aux = torch.randn(config.num_aux, total, config.target_hidden_size, generator=generator).to(
            device, head.dtype
        )
        if max(rows) == 1:
            feature_TC = head.features(aux.unbind())
            hidden_NC, logits_NV = head.draft(batch, feature_TC, kv)
        else:
            hidden_NC = head.forward(batch, aux.unbind(), kv, (start_B1[1:] - 1).to(device))
            logits_NV = head.logits(hidden_NC)
        outputs += [hidden_NC, logits_NV.clone()]
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The worst, relative to the largest finite number of each; NaN if other logits are -inf."""
    worst = 0.0
    for want, have in zip(expected, found, strict=True):
        is_finite = want.isfinite()
        if not torch.equal(is_finite, have.isfinite()):
            return float("nan")
        error = (have.float() - want.float())[is_finite].abs().max()
        worst = max(worst, (error / want[is_finite].abs().max()).item())
    return worst
