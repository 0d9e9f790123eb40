"""A backend's own implementation of a whole model, or of a draft head: its contract.

Belongs here: what models and drafters may ask of a decoder or a head, and the data of it. Does not:
how one computes (`backends/native/decoder.py`), when one is used (`models/loader.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from foretoken.ops.types import DraftCache, PagedKV, SlotParams

ModelKV = PagedKV[Sequence[Tensor]]
LayerKV = PagedKV[Tensor]


class UnfitError(Exception):
    """A decoder cannot stand in for a module; the message says why."""


FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss")
"""Model types built of RMSNorm, rotary attention and a gated SiLU layer, in that order."""

# Frequencies that do not depend on what is computed; the others move with the longest position.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def check_common_block(module: Any) -> None:
    """Raise `UnfitError` unless a causal language model is built of the commonest block."""
    config = module.config
    if config.model_type not in FAMILIES:
        raise UnfitError(f"models of type `{config.model_type}` run through their own modules")
    rope = getattr(module.model.rotary_emb, "rope_type", None)
    if rope not in _FIXED_ROPE:
        raise UnfitError(f"RoPE of type `{rope}` changes its frequencies while running")
    if config.hidden_act not in ("silu", "swish"):
        raise UnfitError(f"the gated layer's activation is `{config.hidden_act}`, not SiLU")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer of a module asked of attention: heads of K/V, sizes of a key, of a value."""

    layer: int
    shape: tuple[int, int, int]
    sliding_window: int | None


class ForwardOutput(NamedTuple):
    """What one forward pass gives.

    logits_NV: raw logits, one row per wanted token, in the order in which they were named
    aux:       [T, hidden], the hidden states of all tokens that were asked for, numbered as in
               Transformers' `hidden_states`: i is the input of layer i, and after the last layer
               follows the input of the output layer, normed. They may lie in memory that the next
               pass overwrites
    """

    logits_NV: Tensor
    aux: tuple[Tensor, ...] = ()


class DraftRound(NamedTuple):
    """Which requests a round drafts for, and how drafts are drawn.

    params:     the parameters of all slots
    slot_B:     int64, no two alike
    num_B:      int64, numbers of drafts >= 1
    cache:      float32; gets the q that each draft is drawn from. None: each draft is the argmax of
                the logits, whatever the temperature
    fp64_noise: as in `Backend.draft`
    """

    params: SlotParams
    slot_B: Tensor
    num_B: Tensor
    cache: DraftCache | None
    fp64_noise: bool = False


class Decoder(Protocol):
    """A stand-in for one module, on the same weights, with the same logits up to rounding.

    Keys and values that it wrote are laid out in its own way within each block: neither `attention`
    nor another decoder can read them. Keys that a query may not see are not multiplied in, so
    blocks that change hands need not be cleared.
    """

    def forward(
        self, token_T: Tensor, logit_row_N: Tensor, kv: ModelKV, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Run packed tokens and write their K/V.

        Args:
            token_T: int64 ids.
            logit_row_N: int64 indices into T of the tokens whose logits are wanted; N may be 0. T
                of them are all tokens, in order; what they hold need not be read then.
            aux_layers: hidden states that are wanted, see `ForwardOutput`.
        """

    def drop_module_weights(self) -> None:
        """Free the module's copies of weights that the decoder keeps itself; the module cannot be
        run any more."""


@runtime_checkable
class RoundDecoder(Decoder, Protocol):
    """A decoder that runs whole rounds of drafting in one call."""

    def draft(self, token_T: Tensor, kv: ModelKV, drafting: DraftRound) -> Tensor:
        """A whole round of autoregressive drafting; each draft as `Backend.draft` has it.

        Args:
            token_T: int64 ids: of each request what the cache lacks, up to its last known token.
                The first draft is at position `kv.batch.length_B`, draft index 0.
            kv: of these tokens; a row of the block table also reaches over all drafts of the
                request but the last, whose K/V are not computed.

        Returns:
            int64 [B, K], -1 after a request's last draft.
        """


class HeadWeights(NamedTuple):
    """Weights of an EAGLE-3 head, [out, in] each; what reads one input is one matrix. C is the
    head's hidden size, I the width of its gated layer.

    fc:         [C, num_aux * target_hidden_size]
    input_norm, hidden_norm, post_norm, norm: [C]
    qkv:        [(H + 2 H_kv) D, 2C], queries first; reads the token's half, then the feature's
    o:          [C, H D]
    gate_up:    [2 I, C], the gate first
    down:       [C, I]
    head:       [draft_vocab_size, C]
    """

    fc: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    head: Tensor


class HeadExtras(NamedTuple):
    """Weights that some heads have besides `HeadWeights`; None: they are not used.

    fc_norm: [P, num_aux * target_hidden_size / P], gains of P parts of what `fc` reads
    qk_norm: [H + H_kv, D], gains of queries, all alike, and of keys
    qkv_bias: [(H + 2 H_kv) D]
    o_bias: [C]
    """

    fc_norm: Tensor | None = None
    qk_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None


class HeadModel(NamedTuple):
    """An EAGLE-3 head: all that `models/eagle3.py` computes with.

    embedding_VC: the target's, of V tokens or more
    vocab_size: V
    target_ids: int64 [draft_vocab_size], the target's id of each id of the head's, no two alike;
        None if they are the same
    heads, kv_heads, head_size: H, H_kv, D
    eps: of the norms
    norm_before_residual, norm_output: as in `Eagle3Config`
    sliding_window: as in `AttentionOptions`
    frequency_R: of rotary embedding, float32 [R], of the first 2R numbers of each head
    rotary_scale: cosines and sines are multiplied by it
    positions: longest context, in tokens
    """

    weights: HeadWeights
    extras: HeadExtras
    embedding_VC: Tensor
    vocab_size: int
    target_ids: Tensor | None
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    norm_before_residual: bool
    norm_output: bool
    sliding_window: int | None
    frequency_R: Tensor
    rotary_scale: float
    positions: int


class DraftHead(Protocol):
    """A stand-in for an EAGLE-3 head, on the same weights, with the same results up to rounding.

    Of keys and values the same is true as for a `Decoder`.
    """

    def forward(
        self, token_T: Tensor, aux: Sequence[Tensor], kv: LayerKV, row_N: Tensor | None = None
    ) -> Tensor:
        """Run packed rows and write their K/V.

        Args:
            token_T: int64, the token after each row's position.
            aux: the target's hidden states [T, target_hidden_size], in the order of layers.
            row_N: int64, rows that are wanted; None, or T of them: all, in order.

        Returns:
            [N, C].
        """

    def draft(self, token_T: Tensor, feature_TC: Tensor, kv: LayerKV) -> tuple[Tensor, Tensor]:
        """What `forward` returns of all rows, and the `logits` of it.

        Args:
            feature_TC: in the place of hidden states: what the row before put out.
        """

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Raw logits [N, V] by the target's ids; -inf for those that the head never drafts.

        They may lie in memory that the next call overwrites.
        """


@runtime_checkable
class RoundHead(DraftHead, Protocol):
    """A head on a host that runs whole rounds of drafting in one call; it has copies of all weights
    [out, in]."""

    def observe(
        self,
        hidden_SC: Tensor,
        token_SL: Tensor,
        length_B: Sequence[int],
        slot_B: Tensor,
        aux: Sequence[Tensor],
        kv: LayerKV,
    ) -> None:
        """Run those rows of a target's pass that have a known token after them, each with it.

        Args:
            hidden_SC: by slot; gets what `forward` returns of each request's last such row.
            token_SL: int32, tokens by slot; length_B: of these known ones, once the step was taken
                over.
            aux, kv: hidden states and requests of the pass; slot_B: int64, the slots of these.
        """

    def draft_round(self, hidden_SC: Tensor, kv: LayerKV, drafting: DraftRound) -> Tensor:
        """A whole round of drafting; each draft as `Backend.draft` has it.

        Args:
            hidden_SC: as `observe` left it.
            kv: of the batch only two parts are read: `length_B`, known tokens, so where the first
                draft stands; and `block_BL`, with a row for each slot, valid over all drafts but
                the last.
            drafting: a request may have no draft at all.

        Returns:
            int64 [B, K], -1 after a request's last draft.
        """
