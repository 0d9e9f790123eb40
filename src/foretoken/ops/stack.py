"""The model as data, and what a backend promises that runs it.

Belongs here: records of weights and switches, and the contract `LoadedStack`. Does not: which
checkpoints become which records (`models/families.py`), arithmetic (`ops/backends/`).

A weight format is one more class next to `Dense`, and its product in each backend that has one; a
kind of layer is one more record next to `Attention` or `Gated`.

Shape suffixes: B requests, K drafts, S slots, L tokens of a slot, T packed tokens, N wanted rows,
V vocabulary, C hidden size, D head size, R half of the numbers of a head that are turned, P parts
of what a feature is made of, A numbers of such a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.ops.steps import ForwardBatch
from foretoken.ops.types import AttentionOptions, DraftCache, SlotParams


class UnfitError(Exception):
    """A backend's kernels do not implement all that a stack has; the message says what."""


class Dense(NamedTuple):
    """A weight as plain numbers: [out, in], contiguous."""

    values: Tensor


Weight = Dense
"""How the numbers of a weight lie in memory; a further format is a further class."""


class Linear(NamedTuple):
    """A linear layer, or several that read the same rows, their outputs one after the other.

    bias:  [out]
    split: sizes of the layers that it consists of
    """

    weight: Weight
    bias: Tensor | None = None
    split: tuple[int, ...] = ()


class Rope(NamedTuple):
    """Rotary embedding: number i of a head and number i + R are turned by position * frequency.

    frequency_R: float32; a head's numbers from 2R on stay as they are
    scale:       factor of cosines and sines
    """

    frequency_R: Tensor
    scale: float


class Attention(NamedTuple):
    """A mixer: softmax attention over the cache.

    qkv:     queries, keys, values: `split` has their sizes
    options: how it attends
    q_norm_D, k_norm_D: gains by which each head's query and key are normed before they are turned
    """

    qkv: Linear
    o: Linear
    heads: int
    kv_heads: int
    head_size: int
    rope: Rope
    options: AttentionOptions
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


class Gated(NamedTuple):
    """A feed-forward: down(silu(gate) * up).

    gate_up: `split` has both sizes
    """

    gate_up: Linear
    down: Linear


class Layer(NamedTuple):
    """A mixer, then a feed-forward; each reads the stream through its norm and adds to it."""

    mixer_norm_C: Tensor
    mixer: Attention
    feed_norm_C: Tensor
    feed: Gated


class FeatureRule(NamedTuple):
    """What the rows of a drafting stack (an EAGLE-3 head) begin with.

    A row has a *feature*: several hidden states of the target, one after the other, through `fc`;
    where the target has not been, what the row before put out. The mixer of the first layer reads
    the token's vector, normed, and next to it the feature, normed: 2C numbers. The residual stream
    begins with the feature.

    fc:           [C, states]
    fc_norm_PA:   gains of P equal parts of what `fc` reads, each normed by itself
    feature_norm_C: of the feature
    norm_before_residual: the stream begins with the normed feature
    norm_output:  what a row puts out is normed for the next row, too, not for its logits alone
    """

    fc: Linear
    fc_norm_PA: Tensor | None
    feature_norm_C: Tensor
    norm_before_residual: bool
    norm_output: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """A decoder: all that it computes with. All norms are RMSNorms with one `eps`.

    embedding_VC: of `vocab_size` tokens or more
    norm_C, head: through which logits read the stream
    vocab_size:   V, columns of the logits
    target_ids:   int64 [head's outputs], in 0..V-1, no two alike: the token of each; all other
                  tokens have -inf. None: they are the same
    features:     None: rows begin with their tokens' vectors
    """

    embedding_VC: Tensor
    layers: tuple[Layer, ...]
    norm_C: Tensor
    head: Linear
    eps: float
    vocab_size: int
    target_ids: Tensor | None = None
    features: FeatureRule | None = None

    @property
    def hidden_size(self) -> int:
        """C."""
        return len(self.norm_C)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys, values and logits."""
        return self.embedding_VC.dtype

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.embedding_VC.device

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """What a `KVPool` for it needs: heads of K/V, sizes of a key, of a value."""
        return [(m.kv_heads, m.head_size, m.head_size) for _, m, _, _ in self.layers]


class KV(Protocol):
    """Keys and values of each layer: what a `cache.KVPool` has; always the same tensors."""

    @property
    def keys(self) -> Sequence[Tensor]:
        """[num_blocks, block_size, H_kv, D] each."""

    @property
    def values(self) -> Sequence[Tensor]:
        """The same of values."""


Features = Sequence[Tensor] | Tensor
"""Each row's hidden states of the target, by layers; or what the row before put out."""


class ForwardOutput(NamedTuple):
    """What one forward pass gives. All may lie in memory that the next pass overwrites.

    logits_NV: raw logits, one row per wanted token, in the order in which they were named; [0, V]
               if they were not wanted
    aux:       [T, hidden], the hidden states of all tokens that were asked for, numbered as in
               Transformers' `hidden_states`: i is the input of layer i, and after the last layer
               follows the input of the output layer, normed
    hidden_NC: with a `FeatureRule`: what the wanted rows put out, which is their own memory
    """

    logits_NV: Tensor
    aux: tuple[Tensor, ...] = ()
    hidden_NC: Tensor | None = None


class DraftRound(NamedTuple):
    """Which requests a round drafts for, and how drafts are drawn.

    params:     the parameters of all slots
    slot_B:     int64, no two alike
    num_B:      int64, numbers of drafts: >= 1, with a `FeatureRule` >= 0
    cache:      float32; gets the q that each draft is drawn from. None: each draft is the argmax of
                the logits, whatever the temperature
    fp64_noise: as in `Backend.draft`
    hidden_SC:  with a `FeatureRule`: by slot, what the request's last row put out
    """

    params: SlotParams
    slot_B: Tensor
    num_B: Tensor
    cache: DraftCache | None
    fp64_noise: bool = False
    hidden_SC: Tensor | None = None


class Outcome(NamedTuple):
    """What became of a pass of the target, for a stack that follows it.

    token_SL:  int32, tokens by slot
    length_B:  of these known ones, of each request of the pass
    slot_B:    int64, its slot
    hidden_SC: by slot; gets what the last row of each request puts out that has a known token after
               it
    """

    token_SL: Tensor
    length_B: Sequence[int]
    slot_B: Tensor
    hidden_SC: Tensor


class LoadedStack(Protocol):
    """A stack in a backend's own layout.

    Keys and values that it wrote may be laid out in its own way within each block: neither
    `attention` nor another backend's stack can read them.

    stack: what it runs; of weights that it keeps in another layout alone, shapes are left: these
        are on the device `meta`
    multiplies_masked_keys: whether a NaN in an unused part of a block would spread: such blocks
        must be cleared when they change hands
    """

    multiplies_masked_keys: ClassVar[bool]
    stack: Stack

    def run(
        self,
        batch: ForwardBatch,
        kv: KV,
        aux_layers: Sequence[int] = (),
        features: Features | None = None,
        *,
        logits: bool = True,
    ) -> ForwardOutput:
        """Run packed tokens and write their K/V.

        Args:
            batch: with a `FeatureRule`, `token_T` is the token *after* each row's position.
            aux_layers: hidden states that are wanted.
            features: what rows begin with, if the stack has a `FeatureRule`.
            logits: False leaves them out.
        """

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Raw logits [N, V] of what rows put out, with a `FeatureRule`.

        They may lie in memory that the next call overwrites.
        """


@runtime_checkable
class RoundStack(LoadedStack, Protocol):
    """A stack on a host that runs whole rounds of drafting in one call."""

    def draft(self, batch: ForwardBatch, kv: KV, drafting: DraftRound) -> Tensor:
        """A whole round of autoregressive drafting; each draft as `Backend.draft` has it.

        Args:
            batch: of each request the tokens that the cache lacks, up to its last known one. The
                first draft is at position `length_B`, draft index 0. A row of the block table also
                reaches over all drafts but the last, whose K/V are not computed. With a
                `FeatureRule` nothing is lacking, and only two parts are read: `length_B`, known
                tokens; and `block_BL`, which has a row for each slot.

        Returns:
            int64 [B, K], -1 after a request's last draft.
        """

    def observe(self, batch: ForwardBatch, kv: KV, features: Features, outcome: Outcome) -> None:
        """With a `FeatureRule`: run those rows of a target's pass that have a known token after
        them, each with it.

        Args:
            batch, features: of the target's pass; its tokens are not read.
        """
