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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.ops.formats import BLOCKS
from foretoken.ops.steps import ForwardBatch
from foretoken.ops.types import AttentionOptions, DraftCache, SlotParams


class UnfitError(Exception):
    """A backend's kernels do not implement all that a stack has; the message says what."""


class Dense(NamedTuple):
    """A weight as plain numbers: [out, in], contiguous.

    rounds: they are those of blocks or groups: what they multiply is rounded to eight bits first
            (`ops.formats.round_rows`)
    """

    values: Tensor
    rounds: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers that a row of the product has, and of what it multiplies."""
        out, numbers = self.values.shape
        return out, numbers

    @property
    def nbytes(self) -> int:
        """What a pass reads."""
        return self.values.nbytes


class Blocks(NamedTuple):
    """A weight in one of GGUF's block formats, as its file has it.

    kind:    one of `ops.formats.BLOCKS`
    rows:    uint8 [stored rows, bytes of a row]; may be mapped from a file
    order_N: int64 [out]: which of them each output is; None: they are in order
    """

    kind: str
    rows: Tensor
    order_N: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """See `Dense.shape`."""
        block = BLOCKS[self.kind]
        out = len(self.rows) if self.order_N is None else len(self.order_N)
        return out, self.rows.shape[1] // block.nbytes * block.size

    @property
    def nbytes(self) -> int:
        """See `Dense.nbytes`."""
        return self.shape[0] * self.rows.shape[1]


class Grouped(NamedTuple):
    """A weight of small integers with a scale for each group of a row, symmetric.

    codes:    int8 [out, in]; or uint8 [out, in / 2], two of four bits a byte, the first in its low
              half, each 8 more than what it stands for
    scale_NG: float32 [out, groups]
    """

    codes: Tensor
    scale_NG: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """See `Dense.shape`."""
        out, stored = self.codes.shape
        return out, stored * (2 if self.codes.dtype is torch.uint8 else 1)

    @property
    def nbytes(self) -> int:
        """See `Dense.nbytes`."""
        return self.codes.nbytes + self.scale_NG.nbytes


class Joined(NamedTuple):
    """Weights that read the same numbers, their outputs one after the other; none is `Joined`."""

    parts: tuple[Dense | Blocks | Grouped, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """See `Dense.shape`."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """See `Dense.nbytes`."""
        return sum(part.nbytes for part in self.parts)


Weight = Dense | Blocks | Grouped | Joined
"""How the numbers of a weight lie in memory; a further format is a further class."""


def plain(weight: Weight) -> Tensor:
    """The numbers of a weight that is stored so.

    Raises:
        UnfitError: it is not.
    """
    if not isinstance(weight, Dense):
        raise UnfitError(f"a weight is stored as {format_of(weight)}")
    return weight.values


def rounds_rows(stack: Stack) -> bool:
    """Whether products round what they multiply to eight bits, since weights are quantised."""
    parts = (part for _, linear in linears(stack) for part in parts_of(linear.weight))
    return any(part.rounds if isinstance(part, Dense) else True for part in parts)


def first_rows(weight: Weight, count: int) -> Weight:
    """A weight with so many of its outputs."""
    if isinstance(weight, Blocks) and weight.order_N is not None:
        return weight._replace(order_N=weight.order_N[:count])
    if isinstance(weight, Blocks):
        return weight._replace(rows=weight.rows[:count])
    if isinstance(weight, Grouped):
        return Grouped(weight.codes[:count], weight.scale_NG[:count])
    return Dense(plain(weight)[:count])


def first_columns(weight: Weight, count: int) -> Weight:
    """A weight with so many of its inputs, a multiple of its blocks or groups, or all there are."""
    if count == weight.shape[1]:
        return weight
    if isinstance(weight, Blocks):
        block = BLOCKS[weight.kind]
        return weight._replace(
            rows=weight.rows[:, : count // block.size * block.nbytes].contiguous()
        )
    if isinstance(weight, Grouped):
        groups = weight.scale_NG.shape[1]
        kept = weight.codes.shape[1] * count // weight.shape[1]
        scale_NG = weight.scale_NG[:, : max(groups * count // weight.shape[1], 1)]
        return Grouped(weight.codes[:, :kept].contiguous(), scale_NG.contiguous())
    return Dense(plain(weight)[:, :count].contiguous())


def tensors_of(weight: Weight) -> Iterator[Tensor]:
    """The tensors that a weight is made of."""
    for part in parts_of(weight):
        yield from (field for field in part if isinstance(field, Tensor))


def dtype_of(weight: Weight) -> torch.dtype:
    """What its numbers are where they are computed with: blocks and groups are float32."""
    return weight.values.dtype if isinstance(weight, Dense) else torch.float32


def device_of(weight: Weight) -> torch.device:
    """Where it is."""
    return next(tensors_of(weight)).device


def parts_of(weight: Weight) -> tuple[Dense | Blocks | Grouped, ...]:
    """What a weight is joined of, or itself."""
    return weight.parts if isinstance(weight, Joined) else (weight,)


class Linear(NamedTuple):
    """A linear layer, or several that read the same rows, their outputs one after the other.

    bias:  [out]
    split: outputs of each, if it is several
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

    Each row has a *feature* of C numbers. At positions that the target has computed, it is several
    of the target's hidden states, one after the other, through `fc`; past them it is the output of
    the row before. The mixer of the first layer reads 2C numbers: the token's vector, normed, and
    the feature, normed. The residual stream begins with the feature.

    fc:           [C, states]
    fc_norm_PA:   gains of P equal parts of what `fc` reads, each normed by itself
    feature_norm_C: of the feature
    norm_before_residual: the stream begins with the normed feature
    norm_output:  a row's output is normed for the next row, too, not for its logits alone
    """

    fc: Linear
    fc_norm_PA: Tensor | None
    feature_norm_C: Tensor
    norm_before_residual: bool
    norm_output: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """A decoder: all that it computes with. All norms are RMSNorms with one `eps`.

    embedding: vectors of `vocab_size` tokens or more, [V, C]
    norm_C, head: through which logits read the stream
    vocab_size:   V, columns of the logits
    target_ids:   int64 [head's outputs], in 0..V-1, no two alike: the token of each; all other
                  tokens have -inf. None: they are the same
    features:     None: rows begin with their tokens' vectors
    """

    embedding: Weight
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
        """Of norms, and of weights that are plain numbers."""
        return self.norm_C.dtype

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.norm_C.device

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """What a `KVPool` for it needs: heads of K/V, sizes of a key, of a value."""
        return [(m.kv_heads, m.head_size, m.head_size) for _, m, _, _ in self.layers]


def linears(stack: Stack) -> Iterator[tuple[str, Linear]]:
    """All linear layers, each with its name in the record that has it."""
    for _, mixer, _, feed in stack.layers:
        yield from (("qkv", mixer.qkv), ("o", mixer.o))
        yield from (("gate_up", feed.gate_up), ("down", feed.down))
    yield "head", stack.head
    if stack.features is not None:
        yield "fc", stack.features.fc


def map_linears(stack: Stack, change: Callable[[Linear], Linear]) -> Stack:
    """The stack with every linear layer changed."""
    layers = [
        layer._replace(
            mixer=layer.mixer._replace(qkv=change(layer.mixer.qkv), o=change(layer.mixer.o)),
            feed=Gated(change(layer.feed.gate_up), change(layer.feed.down)),
        )
        for layer in stack.layers
    ]
    rule = stack.features and stack.features._replace(fc=change(stack.features.fc))
    return replace(stack, layers=tuple(layers), head=change(stack.head), features=rule)


def check_dense(stack: Stack) -> None:
    """Raise `UnfitError` for a weight that is not plain numbers."""
    for name, linear in [*linears(stack), ("embedding", Linear(stack.embedding))]:
        if not isinstance(linear.weight, Dense):
            raise UnfitError(f"`{name}` is stored as {format_of(linear.weight)}")


def check_known(stack: Stack) -> None:
    """Raise `UnfitError` for a weight in a format of which nothing is known here."""
    for name, linear in linears(stack):
        if not all(isinstance(part, Dense | Blocks | Grouped) for part in parts_of(linear.weight)):
            raise UnfitError(f"`{name}` is stored as {format_of(linear.weight)}")


def format_of(weight: Weight) -> str:
    """A format's name, as people know it."""
    if isinstance(weight, Blocks):
        return weight.kind
    if isinstance(weight, Grouped):
        return "int4" if weight.codes.dtype is torch.uint8 else "int8"
    if isinstance(weight, Joined):
        return ", ".join(dict.fromkeys(map(format_of, weight.parts)))
    if isinstance(weight, Dense):
        return str(weight.values.dtype).removeprefix("torch.")
    return type(weight).__name__


class KV(Protocol):
    """Keys and values of each layer: what a `cache.KVPool` has; always the same tensors."""

    @property
    def keys(self) -> Sequence[Tensor]:
        """[num_blocks, block_size, H_kv, D] each."""

    @property
    def values(self) -> Sequence[Tensor]:
        """[num_blocks, block_size, H_kv, D_v] each."""


Features = Sequence[Tensor] | Tensor
"""Each row's hidden states of the target, [T, C] for each layer; or the outputs of the rows before
them, [T, C]."""


class ForwardOutput(NamedTuple):
    """What one forward pass gives. All may lie in memory that the next pass overwrites.

    logits_NV: raw logits, one row per wanted token, in the order in which they were named; [0, V]
               if they were not wanted
    aux:       [T, hidden], the hidden states of all tokens that were asked for, numbered as in
               Transformers' `hidden_states`: i is the input of layer i, and after the last layer
               follows the input of the output layer, normed
    hidden_NC: with a `FeatureRule`: outputs of the wanted rows; no later pass overwrites them
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
    hidden_SC:  with a `FeatureRule`: by slot, the output of the request's last row
    """

    params: SlotParams
    slot_B: Tensor
    num_B: Tensor
    cache: DraftCache | None
    fp64_noise: bool = False
    hidden_SC: Tensor | None = None


class Outcome(NamedTuple):
    """What became of a pass of the target, for a stack that follows it.

    token_SL:  int32, the tokens of each slot
    length_B:  for each request of the pass, how many tokens of its slot are known
    slot_B:    int64, the slot of each request
    hidden_SC: by slot; gets the output of each request's last row that has a known token after it
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
    dtype: of keys, values, hidden states and logits
    multiplies_masked_keys: whether a NaN in an unused part of a block would spread: such blocks
        must be cleared when they change hands
    """

    multiplies_masked_keys: ClassVar[bool]
    stack: Stack

    @property
    def dtype(self) -> torch.dtype:
        """See above."""

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
        """Raw logits [N, V] of rows' outputs, with a `FeatureRule`.

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
