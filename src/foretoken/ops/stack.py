"""The model as data: records of weights and switches; the contract of a backend that runs them.

A new weight format is a class like `Dense`, and a product in each backend that supports it; a new
kind of layer is a record like `Attention` or `Gated`.

Shape suffixes: B requests, K drafts, S slots, L tokens of a slot, T packed tokens, N rows with
logits, V vocabulary, C hidden size, D head size, R half of the rotated numbers of a head, P parts
that a feature is made of, A numbers of such a part.
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
    """A backend's kernels do not implement some part of a stack; the message says which."""


class Dense(NamedTuple):
    """A weight as plain numbers: [out, in], contiguous.

    rounds: whether activations are rounded to eight bits before the product
        (`ops.formats.round_rows`), because the values were decoded from blocks or groups
    """

    values: Tensor
    rounds: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Blocks(NamedTuple):
    """A weight in one of GGUF's block formats, as stored in the file.

    kind: key of `ops.formats.BLOCKS`
    rows: uint8 [stored rows, bytes of a row]; may be mapped from a file
    order_N: int64 [out], the stored row of each output; None: rows are stored in order
    """

    kind: str
    rows: Tensor
    order_N: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        block = BLOCKS[self.kind]
        out = len(self.rows) if self.order_N is None else len(self.order_N)
        return out, self.rows.shape[1] // block.nbytes * block.size

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.rows.shape[1]


class Grouped(NamedTuple):
    """A weight of small integers with a scale for each group of a row, symmetric.

    codes: int8 [out, in]; or uint8 [out, in / 2] with two codes of four bits per byte, the first
        one in the low half, each stored as its value + 8
    scale_NG: float32 [out, groups]
    """

    codes: Tensor
    scale_NG: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        out, stored = self.codes.shape
        return out, stored * (2 if self.codes.dtype is torch.uint8 else 1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale_NG.nbytes


class Joined(NamedTuple):
    """Several weights with the same inputs, read as one: their outputs are concatenated."""

    parts: tuple[Dense | Blocks | Grouped, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Weight = Dense | Blocks | Grouped | Joined


def plain(weight: Weight) -> Tensor:
    """The values of a `Dense` weight; `UnfitError` for any other weight."""
    if not isinstance(weight, Dense):
        raise UnfitError(f"a weight is stored as {format_of(weight)}")
    return weight.values


def rounds_rows(stack: Stack) -> bool:
    """Whether a weight is or was quantised, so that products round activations to eight bits."""
    parts = (part for _, linear in linears(stack) for part in parts_of(linear.weight))
    return any(part.rounds if isinstance(part, Dense) else True for part in parts)


def first_rows(weight: Weight, count: int) -> Weight:
    """The weight of the first `count` outputs; `UnfitError` for a `Joined` weight."""
    if isinstance(weight, Blocks) and weight.order_N is not None:
        return weight._replace(order_N=weight.order_N[:count])
    if isinstance(weight, Blocks):
        return weight._replace(rows=weight.rows[:count])
    if isinstance(weight, Grouped):
        return Grouped(weight.codes[:count], weight.scale_NG[:count])
    return Dense(plain(weight)[:count])


def first_columns(weight: Weight, count: int) -> Weight:
    """The weight of the first `count` inputs, whole blocks or groups; `UnfitError` if `Joined`."""
    if count == weight.shape[1]:
        return weight
    if isinstance(weight, Blocks):
        block = BLOCKS[weight.kind]
        nbytes = count // block.size * block.nbytes
        return weight._replace(rows=weight.rows[:, :nbytes].contiguous())
    if isinstance(weight, Grouped):
        groups = weight.scale_NG.shape[1]
        columns = weight.codes.shape[1] * count // weight.shape[1]  # half of `count` if packed
        scale_NG = weight.scale_NG[:, : max(groups * count // weight.shape[1], 1)]
        return Grouped(weight.codes[:, :columns].contiguous(), scale_NG.contiguous())
    return Dense(plain(weight)[:, :count].contiguous())


def tensors_of(weight: Weight) -> Iterator[Tensor]:
    """The tensors that make up a weight."""
    for part in parts_of(weight):
        yield from (field for field in part if isinstance(field, Tensor))


def dtype_of(weight: Weight) -> torch.dtype:
    """The dtype of products with a weight: float32 unless the weight is `Dense`."""
    return weight.values.dtype if isinstance(weight, Dense) else torch.float32


def device_of(weight: Weight) -> torch.device:
    """The device of a weight."""
    return next(tensors_of(weight)).device


def parts_of(weight: Weight) -> tuple[Dense | Blocks | Grouped, ...]:
    """The parts of a `Joined` weight, or the weight itself."""
    return weight.parts if isinstance(weight, Joined) else (weight,)


class Linear(NamedTuple):
    """A linear layer, or several layers with the same input and concatenated outputs.

    bias: [out]
    split: the number of outputs of each layer, if there are several
    """

    weight: Weight
    bias: Tensor | None = None
    split: tuple[int, ...] = ()


class Rope(NamedTuple):
    """Rotary embedding: elements i and i + R of a head are rotated by position * frequency_R[i].

    frequency_R: float32; elements 2R and higher of a head are not rotated
    scale: factor of cosines and sines
    """

    frequency_R: Tensor
    scale: float


class Attention(NamedTuple):
    """A mixer: softmax attention over the cache.

    qkv: projects to queries, keys and values; `split` has their sizes
    o: output projection
    q_norm_D, k_norm_D: gains of the norms of each head's query and key, before the rotation
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

    gate_up: projects to gate and up; `split` has both sizes
    """

    gate_up: Linear
    down: Linear


class Layer(NamedTuple):
    """A mixer, then a feed-forward. Each reads the normed residual stream and adds its output."""

    mixer_norm_C: Tensor
    mixer: Attention
    feed_norm_C: Tensor
    feed: Gated


class FeatureRule(NamedTuple):
    """The input of a drafting stack (an EAGLE-3 head): a feature next to each token.

    Each row has a *feature* of C numbers. At positions that the target has computed, the feature is
    `fc` applied to several concatenated hidden states of the target. At later positions it is the
    output of the previous row. The mixer of the first layer reads 2C numbers: the token's normed
    embedding and the normed feature. The residual stream begins with the feature.

    fc: [C, states]
    fc_norm_PA: gains of the norms of the P parts of the input of `fc`
    feature_norm_C: gain of the feature's norm
    norm_before_residual: whether the residual stream begins with the normed feature
    norm_output: whether the next row reads the normed output, from which the logits are computed
    """

    fc: Linear
    fc_norm_PA: Tensor | None
    feature_norm_C: Tensor
    norm_before_residual: bool
    norm_output: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """A decoder: weights and switches. All norms are RMSNorms with one `eps`.

    embedding: [V, C]; may have more rows than `vocab_size`
    norm_C, head: final norm and output layer
    vocab_size: V, columns of the logits
    target_ids: int64 [outputs of the head], in 0..V-1, no two alike: the token of each output.
        Logits of all other tokens are -inf. None: output i is token i
    features: None: the input is the tokens' embeddings
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
        return len(self.norm_C)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of norms and of `Dense` weights."""
        return self.norm_C.dtype

    @property
    def device(self) -> torch.device:
        return self.norm_C.device

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """The `cache.kv_pool.LayerShape` of each layer."""
        return [(m.kv_heads, m.head_size, m.head_size) for _, m, _, _ in self.layers]


def linears(stack: Stack) -> Iterator[tuple[str, Linear]]:
    """All linear layers of a stack, as (name of the field, layer)."""
    for _, mixer, _, feed in stack.layers:
        yield from (("qkv", mixer.qkv), ("o", mixer.o))
        yield from (("gate_up", feed.gate_up), ("down", feed.down))
    yield "head", stack.head
    if stack.features is not None:
        yield "fc", stack.features.fc


def map_linears(stack: Stack, change: Callable[[Linear], Linear]) -> Stack:
    """The stack with every linear layer replaced by `change(layer)`."""
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
    """Raise `UnfitError` for a weight that is not `Dense`."""
    for name, linear in [*linears(stack), ("embedding", Linear(stack.embedding))]:
        if not isinstance(linear.weight, Dense):
            raise UnfitError(f"`{name}` is stored as {format_of(linear.weight)}")


def check_known(stack: Stack) -> None:
    """Raise `UnfitError` for a weight in an unknown format."""
    for name, linear in linears(stack):
        if not all(isinstance(part, Dense | Blocks | Grouped) for part in parts_of(linear.weight)):
            raise UnfitError(f"`{name}` is stored as {format_of(linear.weight)}")


def format_of(weight: Weight) -> str:
    """The name of a weight's format, for messages."""
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
    """Keys and values of each layer, as in `cache.KVPool`; always the same tensors."""

    @property
    def keys(self) -> Sequence[Tensor]:
        """[num_blocks, block_size, H_kv, D] each."""

    @property
    def values(self) -> Sequence[Tensor]:
        """[num_blocks, block_size, H_kv, D_v] each."""


Features = Sequence[Tensor] | Tensor
"""Hidden states of the target, one [T, C] per layer; or the stack's outputs of previous rows."""


class ForwardOutput(NamedTuple):
    """The result of one forward pass. The next pass may overwrite it.

    logits_NV: raw logits, one row per entry of `ForwardBatch.logit_row_N`; [0, V] if not asked for
    aux: the requested hidden states of all tokens, [T, hidden] each, numbered as in Transformers'
        `hidden_states`: state i is the input of layer i, and the last one is the normed input of
        the output layer
    hidden_NC: with a `FeatureRule`: the output of each row that has logits; no later pass
        overwrites it
    """

    logits_NV: Tensor
    aux: tuple[Tensor, ...] = ()
    hidden_NC: Tensor | None = None


class DraftRound(NamedTuple):
    """The requests of a round of drafting (`RoundStack.draft`), and how drafts are drawn.

    params: the parameters of all slots
    slot_B: int64, no two alike
    num_B: int64, number of drafts of each request: >= 1, with a `FeatureRule` >= 0
    cache: float32; gets the q of each draft. None: each draft is the argmax of the logits, whatever
        the temperature
    fp64_noise: as `Noise.fp64`
    hidden_SC: with a `FeatureRule`: the output of the last row of each slot's request
    """

    params: SlotParams
    slot_B: Tensor
    num_B: Tensor
    cache: DraftCache | None
    fp64_noise: bool = False
    hidden_SC: Tensor | None = None


class Outcome(NamedTuple):
    """Tokens after a pass of the target, for a stack that reads the target's hidden states.

    token_SL: int32, the tokens of each slot
    length_B: the number of known tokens of each request of the pass
    slot_B: int64, the slot of each request
    hidden_SC: is written to, by slot: the drafting stack's output of each request's last row that
        has a known token after it
    """

    token_SL: Tensor
    length_B: Sequence[int]
    slot_B: Tensor
    hidden_SC: Tensor


class LoadedStack(Protocol):
    """A stack in a backend's own layout of weights. Keys and values may have such a layout, too,
    which neither `attention` nor another backend's stack can read.

    stack: the records. A weight that exists only in the backend's layout is a tensor on the device
        `meta` here: a shape without values
    dtype: the dtype of keys, values, hidden states and logits
    multiplies_masked_keys: whether a NaN in an unused part of a block would spread to results. Then
        blocks must be cleared before another request uses them
    """

    multiplies_masked_keys: ClassVar[bool]
    stack: Stack

    @property
    def dtype(self) -> torch.dtype: ...

    def run(
        self,
        batch: ForwardBatch,
        kv: KV,
        aux_layers: Sequence[int] = (),
        features: Features | None = None,
        *,
        logits: bool = True,
    ) -> ForwardOutput:
        """Run packed tokens and write their K/V; `logits` is whether to compute logits.

        Args:
            batch: with a `FeatureRule`, `token_T` has the token *after* each row's position.
            aux_layers: numbers of the hidden states to return; see `ForwardOutput.aux`.
            features: given iff the stack has a `FeatureRule`.
        """

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """With a `FeatureRule`: raw logits [N, V] of N outputs; the next call overwrites them."""


@runtime_checkable
class RoundStack(LoadedStack, Protocol):
    """A stack on a host that runs a whole round of drafting in one call."""

    def draft(self, batch: ForwardBatch, kv: KV, drafting: DraftRound) -> Tensor:
        """A whole round of drafting: int64 [B, K], -1 after a request's last draft. Drafts are
        drawn as in `Backend.draft`.

        Args:
            batch: the known tokens of each request that are not in the cache yet. The first draft
                is at position `length_B`, draft index 0. The block table also covers all drafts
                except the last one, for which no K/V are computed. With a `FeatureRule` all known
                tokens are in the cache, and only two fields are read: `length_B`, the number of
                known tokens; and `block_BL`, which here has a row for each slot.
        """

    def observe(self, batch: ForwardBatch, kv: KV, features: Features, outcome: Outcome) -> None:
        """With a `FeatureRule`: run the rows of the target's pass that have a known next token,
        which is their input. `batch`, except `token_T`, and `features` are those of that pass."""
