"""The native decoder on weights in every format: against stock operators and against float64.

Each test runs in every library that this processor can run. That whole models in these formats give
the right texts is shown in `models/test_gguf_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import CheckpointError
from foretoken.ops import Stack, UnfitError, get_backend
from foretoken.ops.backends.native import build, library
from foretoken.ops.backends.native.stack import NativeStack
from foretoken.ops.backends.torch.stack import StockStack
from foretoken.ops.formats import BLOCKS, decode_blocks, round_rows
from foretoken.ops.stack import (
    Attention,
    Blocks,
    Dense,
    Gated,
    Grouped,
    Joined,
    Layer,
    Linear,
    Rope,
    Weight,
    map_linears,
)
from foretoken.ops.types import AttentionOptions
from tests.models.batches import Span, build_batch
from tests.native.libraries import VARIANTS, built_variants, use_library
from tests.ops.weights import (
    FORMATS,
    GROUPS,
    MINIMUM_AT,
    PLAIN,
    SCALE_AT,
    multiple_of,
    numbers_of,
    put_half,
    random_weight,
)
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

CPU, BLOCK, VOCABULARY, HEAD_SIZE = torch.device("cpu"), 16, 101, 16
QUANTISED = (*BLOCKS, *GROUPS)


class Sizes(NamedTuple):
    """hidden, heads and intermediate. The last panel of a matrix is not full where that is
    possible: with rows of 96 and 352 numbers."""

    hidden: int
    heads: int
    inner: int


SIZES = {32: Sizes(96, 4, 352), 64: Sizes(192, 4, 320), 128: Sizes(128, 8, 384),
         256: Sizes(256, 16, 512)}  # fmt: skip


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    if not build.library_path(request.param).exists():
        pytest.skip(f"`{request.param}` was not built")
    with use_library(request.param):
        yield request.param


def made_stack(name: str, num_layers: int = 2, *, biases: bool = True) -> Stack:
    random, sizes = torch.Generator().manual_seed(5), SIZES[multiple_of(name)]
    queries, keys = sizes.heads * HEAD_SIZE, 2 * HEAD_SIZE

    def linear(*outputs: int, reads: int) -> Linear:
        parts = tuple(random_weight(name, count, reads, random) for count in outputs)
        joined: Weight = Joined(parts) if len(parts) > 1 else parts[0]
        if name in PLAIN and len(parts) > 1:
            joined = Dense(torch.cat([part.values for part in parts]))
        bias = torch.randn(sum(outputs), generator=random) / 4 if biases else None
        return Linear(joined, bias, outputs if len(outputs) > 1 else ())

    rope = Rope(1 / 100 ** (torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE), 1.0)
    layers = [
        Layer(
            gains(sizes.hidden, random),
            Attention(
                linear(queries, keys, keys, reads=sizes.hidden),
                linear(sizes.hidden, reads=queries), sizes.heads, 2, HEAD_SIZE, rope,
                AttentionOptions(HEAD_SIZE**-0.5),
            ),
            gains(sizes.hidden, random),
            Gated(
                linear(sizes.inner, sizes.inner, reads=sizes.hidden),
                linear(sizes.hidden, reads=sizes.inner),
            ),
        )
        for _ in range(num_layers)
    ]  # fmt: skip
    embedding = Dense(torch.randn(VOCABULARY, sizes.hidden, generator=random))
    head = Linear(random_weight(name, VOCABULARY, sizes.hidden, random))
    norm_C = gains(sizes.hidden, random)
    return Stack(embedding, tuple(layers), norm_C, head, 1e-5, VOCABULARY)


def gains(size: int, random: torch.Generator) -> Tensor:
    return torch.rand(size, generator=random) + 0.5


def one_product(weight: Weight, gain_C: Tensor) -> Stack:
    """A stack that computes one product, of rows without rounding errors: signs times `gain_C`.
    Vectors of tokens are signs, so that the norm divides by exactly one; the layer adds zeros.
    """
    random, size = torch.Generator().manual_seed(6), len(gain_C)
    sign_VC = torch.randint(2, (VOCABULARY, size), generator=random).float() * 2 - 1
    made = made_stack("float32", 1, biases=False)
    (layer,) = made.layers
    mixer = layer.mixer._replace(
        qkv=Linear(Dense(torch.zeros(64 + 64, size)), None, (64, 32, 32)),
        o=Linear(Dense(torch.zeros(size, 64))),
    )
    feed = Gated(
        Linear(Dense(torch.zeros(64, size)), None, (32, 32)), Linear(Dense(torch.zeros(size, 32)))
    )
    layer = Layer(torch.ones(size), mixer, torch.ones(size), feed)
    return Stack(
        Dense(sign_VC), (layer,), gain_C, Linear(weight), 1e-30, weight.shape[0],
    )  # fmt: skip


def native(stack: Stack) -> NativeStack:
    return NativeStack(stack, 256, 0)


def stock(stack: Stack) -> StockStack:
    loaded = get_backend("torch").stock_stack(stack)
    assert isinstance(loaded, StockStack)
    return loaded


def run(loaded: Any, text: list[int], chunks: list[int], aux_layers: tuple[int, ...] = ()) -> Any:
    """Logits [n, V] of one request, in chunks; or its hidden states of `aux_layers`."""
    assert sum(chunks) == len(text)
    table = list(range(-(-len(text) // BLOCK)))
    kv = KVPool(loaded.stack.layer_shapes, len(table), BLOCK, dtype=torch.float32, device=CPU)
    rows, states, done = [], [], 0
    for size in chunks:
        batch = build_batch([Span(table, done, text[done : done + size], size)], BLOCK, CPU)
        output = loaded.run(batch, kv, aux_layers)
        rows.append(output.logits_NV.clone())
        states.append([state.clone() for state in output.aux])
        done += size
    if not aux_layers:
        return torch.cat(rows)
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def run_alone(loaded: Any, tokens: list[int]) -> Tensor:
    """Logits of requests of one token each, all in one pass."""
    spans = [Span([i], 0, [token], 1) for i, token in enumerate(tokens)]
    shapes, count = loaded.stack.layer_shapes, len(tokens)
    kv = KVPool(shapes, count, BLOCK, dtype=torch.float32, device=CPU)
    logits: Tensor = loaded.run(build_batch(spans, BLOCK, CPU), kv).logits_NV
    return logits


def as_floats(linear: Linear) -> Linear:
    return linear._replace(weight=Dense(linear.weight.values.float()))


def error_of(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert found.shape == wanted.shape
    largest = wanted.abs().max().item() or 1.0
    return (found.double() - wanted.double()).abs().max().item() / largest


def text_of(length: int, seed: int = 3) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=random).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_a_stack_is_that_of_stock_operators(variant: str, name: str) -> None:
    """Sums in another order differ by an ulp, which may round an activation to the next code, a
    127th of its group away. Where rows do not read each other, few rows differ.
    """
    made = made_stack(name)
    wide = map_linears(made, as_floats) if name in PLAIN else made  # kernels compute in float32
    wanted = run(stock(wide), text_of(40), [40])
    found = run(native(made), text_of(40), [29, 1, 1, 9])
    assert error_of(found, wanted) <= (2e-5 if name in PLAIN else 1.5e-2)
    tokens = [*range(VOCABULARY)]
    found, wanted = run_alone(native(made), tokens), run_alone(stock(wide), tokens)
    error_N = (found - wanted).abs().amax(-1) / wanted.abs().max()
    assert error_N.quantile(0.75).item() <= 2e-6


def signed_gains(size: int) -> Tensor:
    """Numbers of every magnitude: groups of small numbers, of zeros, with one far larger number."""
    random = torch.Generator().manual_seed(7)
    gain_C = torch.randn(size, generator=random)
    gain_C[32:64] = 0
    gain_C[40] = 127.0
    gain_C[41:44] = torch.tensor([0.5, 1.5, 2.5])  # halfway between two codes
    gain_C[0:32] *= 1e-3
    gain_C[-1] = 2.0  # no code of zero
    return gain_C


def product_error(
    name: str,
    rounded: Callable[[Tensor], Tensor] = round_rows,
    read: Callable[..., Any] = numbers_of,
) -> float:
    """The error of a product, as seen by a comparison that rounds rows and reads weights so."""
    random, size = torch.Generator().manual_seed(8), SIZES[multiple_of(name)].hidden
    weight, gain_C = random_weight(name, 150, size, random), signed_gains(size)
    made = one_product(weight, gain_C)
    tokens = list(range(VOCABULARY))
    x = made.embedding.values * gain_C
    rows = rounded(x) if name in QUANTISED else x
    wanted = rows.double() @ torch.from_numpy(read(weight)).T
    return error_of(run_alone(native(made), tokens), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_one_product_is_that_of_float64(variant: str, name: str) -> None:
    """A product of rounded rows and of the weights as the format's own package reads them."""
    assert product_error(name) <= 1e-6


def test_the_comparison_sees_rows_that_are_not_rounded() -> None:
    """Wrong readings of blocks are in `ops/test_formats.py`."""
    assert product_error("Q8_0", rounded=lambda x: x) > 1e-4


@pytest.mark.parametrize("name", FORMATS)
def test_the_comparison_sees_one_wrong_code(name: str) -> None:
    """The last number of a row is read as its neighbour."""

    def wrong(weight: Any) -> Any:
        numbers = numbers_of(weight)
        numbers[..., -1] = numbers[..., -2]
        return numbers

    assert product_error(name, read=wrong) > 1e-4


def extreme(name: str, code: int, size: int) -> Weight:
    """A weight with all codes and small scales from one byte; scales and minima of one sign."""
    random = torch.Generator().manual_seed(9)
    weight = random_weight(name, 3, size, random)
    if isinstance(weight, Grouped):
        filled = torch.full_like(weight.codes, code - 256 if code > 127 and "8" in name else code)
        return weight._replace(codes=filled)
    assert isinstance(weight, Blocks)
    blocks = torch.full_like(weight.rows, code).view(3, -1, BLOCKS[name].nbytes)
    put_half(blocks, SCALE_AT[name], torch.full(blocks.shape[:2], 0.01))
    if name in MINIMUM_AT:
        put_half(blocks, MINIMUM_AT[name], torch.full(blocks.shape[:2], 0.02))
    return weight._replace(rows=blocks.flatten(1))


@pytest.mark.parametrize("code", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("name", QUANTISED)
def test_sums_of_the_largest_codes_do_not_overflow(variant: str, name: str, code: int) -> None:
    """All activations have a code of 127, with mixed signs or one sign."""
    size = SIZES[multiple_of(name)].hidden
    weight = extreme(name, code, size)
    made = one_product(weight, torch.full((size,), 3.0))
    sign_VC = made.embedding.values
    sign_VC[0], sign_VC[1] = 1, -1
    wanted = (sign_VC * 3).double() @ torch.from_numpy(numbers_of(weight)).T
    assert error_of(run_alone(native(made), [0, 1, 2, 3, 4]), wanted[:5]) <= 1e-6


BATCHES = (
    [100], [64, 36], [16] * 6 + [4], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 10], [7] * 14 + [2],
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_bits_in_any_batch(variant: str, name: str) -> None:
    """One by one; in chunks of 2 to 100 rows; next to other requests; with one and two threads."""
    loaded, text = native(made_stack(name, 1)), text_of(100)
    library.set_num_threads(1)
    wanted = run(loaded, text, [1] * 100)
    alone = torch.cat([run_alone(loaded, [token]) for token in text[:20]])
    assert not torch.equal(wanted[:20], alone), "logits depend on earlier tokens"
    for threads in (1, 2):
        library.set_num_threads(threads)
        for chunks in BATCHES:
            assert torch.equal(run(loaded, text, chunks), wanted), (threads, chunks)
        for count in (2, 3, 4, 5, 6, 7, 20):
            assert torch.equal(run_alone(loaded, text[:count]), alone[:count]), (threads, count)


def test_every_library_gives_the_same_bits() -> None:
    """For one product of exact rows: sums of codes are integers, and they are added in an order
    that does not depend on the width of vectors."""
    found = []
    for variant in built_variants():
        with use_library(variant):
            found.append([])
            for name in FORMATS:
                size = SIZES[multiple_of(name)].hidden
                weight = random_weight(name, 150, size, torch.Generator().manual_seed(8))
                made = one_product(weight, signed_gains(size))
                found[-1].append(run_alone(native(made), [*range(VOCABULARY)]))
    for name, first, *others in zip(FORMATS, *found, strict=True):
        assert all(torch.equal(first, other) for other in others), name


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_in_an_order(variant: str, kind: str) -> None:
    """The order of queries and keys in files of Llama models."""
    made = made_stack(kind, 1)
    (layer,), random = made.layers, torch.Generator().manual_seed(11)
    query, key, value = layer.mixer.qkv.weight.parts
    orders = [torch.randperm(part.shape[0], generator=random) for part in (query, key)]
    turned = [p._replace(order_N=o) for p, o in zip((query, key), orders, strict=True)]
    sorted_ = [p._replace(rows=p.rows[o]) for p, o in zip((query, key), orders, strict=True)]
    found = []
    for parts in (turned, sorted_, (query, key)):
        qkv = layer.mixer.qkv._replace(weight=Joined((*parts, value)))
        changed = layer._replace(mixer=layer.mixer._replace(qkv=qkv))
        found.append(run(native(replace(made, layers=(changed,))), text_of(20), [20]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", [*BLOCKS, *PLAIN])
def test_the_embedding_is_read_in_every_format(variant: str, name: str) -> None:
    made = made_stack("float32", 1, biases=False)
    size, random = SIZES[multiple_of(name)].hidden, torch.Generator().manual_seed(12)
    embedding = random_weight(name, VOCABULARY, size, random)
    product = one_product(random_weight("float32", 9, size, random), gains(size, random))
    made, text = replace(product, embedding=embedding), text_of(30)
    states, last = run(native(made), text, [30], (0, 1))
    wanted = torch.from_numpy(numbers_of(embedding))[text]
    torch.testing.assert_close(states.double(), wanted, atol=1e-7, rtol=1e-6)
    assert bool(last.isfinite().all())
    if isinstance(embedding, Blocks):
        order_N = torch.randperm(VOCABULARY, generator=random)
        (states,) = run(native(replace(made, embedding=embedding._replace(order_N=order_N))), text,
                        [30], (0,))  # fmt: skip
        wanted = decode_blocks(name, embedding.rows[order_N[text]])
        torch.testing.assert_close(states, wanted, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", ["int8 by 32", "int4 by row"])
def test_an_embedding_of_groups_is_unfit(name: str) -> None:
    made = made_stack(name, 1)
    embedding = random_weight(name, VOCABULARY, made.hidden_size, torch.Generator())
    with pytest.raises(UnfitError, match=f"the embedding is stored as {name[:4]}"):
        native(replace(made, embedding=embedding))


def test_formats_are_mixed_among_queries_keys_and_values(variant: str) -> None:
    """With biases, of which each matrix has its own part."""
    made, other = made_stack("Q4_K"), made_stack("Q6_K")
    for kinds in ("446", "464", "644", "466"):
        layers = []
        for one, two in zip(made.layers, other.layers, strict=True):
            both = {"4": one.mixer.qkv.weight.parts, "6": two.mixer.qkv.weight.parts}
            parts = tuple(both[kind][i] for i, kind in enumerate(kinds))
            qkv = one.mixer.qkv._replace(weight=Joined(parts))
            layers.append(one._replace(mixer=one.mixer._replace(qkv=qkv)))
        mixed, text = replace(made, layers=tuple(layers)), text_of(30)
        wanted = run(stock(mixed), text, [30])
        assert error_of(run(native(mixed), text, [30]), wanted) <= 1.5e-2
        assert error_of(run(stock(made), text, [30]), wanted) > 5e-2
    first = run(native(mixed), text, [1] * 30)
    assert torch.equal(run(native(mixed), text, [17, 13]), first)


def with_gate_up(made: Stack, weight: Weight) -> Stack:
    layer, last = made.layers
    feed = last.feed._replace(gate_up=last.feed.gate_up._replace(weight=weight))
    return replace(made, layers=(layer, last._replace(feed=feed)))


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        ("Q4_K", "Q6_K", "parts of `gate_up` differ in format or group size: Q4_K, Q6_K"),
        ("float32", "Q6_K", "parts of `gate_up` differ in format or group size: float32, Q6_K"),
        ("int8 by 64", "int8 by 128", "parts of `gate_up` differ in format or group size: int8"),
    ],
)
def test_gate_and_up_of_two_formats_are_unfit(gate: str, up: str, message: str) -> None:
    random, made = torch.Generator().manual_seed(0), made_stack("Q4_K")
    inner = SIZES[256].inner
    parts = [random_weight(name, inner, made.hidden_size, random) for name in (gate, up)]
    same = [random_weight(gate, inner, made.hidden_size, random) for _ in range(2)]
    native(with_gate_up(made, Joined(tuple(same))))
    with pytest.raises(UnfitError, match=message):
        native(with_gate_up(made, Joined(tuple(parts))))


@pytest.mark.parametrize(("groups", "size"), [(2, 48), (6, 16), (96, 1)])
def test_groups_that_are_no_multiple_of_32_are_unfit(groups: int, size: int) -> None:
    made = made_stack("int8 by 32", 1)
    weight = made.head.weight
    assert isinstance(weight, Grouped)
    odd = weight._replace(scale_NG=torch.ones(VOCABULARY, groups))
    with pytest.raises(UnfitError, match=f"`head` has groups of {size}: no multiple of 32"):
        native(replace(made, head=Linear(odd)))


def test_rows_that_are_no_multiple_of_32_are_unfit() -> None:
    """Eight bits by row, with a hidden size that is allowed for plain numbers."""
    codes = torch.zeros(VOCABULARY, 40, dtype=torch.int8)
    made = one_product(Grouped(codes, torch.ones(VOCABULARY, 1)), torch.ones(40))
    with pytest.raises(UnfitError, match="`head` has groups of 40: no multiple of 32"):
        native(made)


def test_blocks_that_are_not_contiguous_are_unfit() -> None:
    made = made_stack("Q8_0", 1)
    weight = made.head.weight
    assert isinstance(weight, Blocks)
    wide = torch.cat([weight.rows, weight.rows], dim=1)[:, : weight.rows.shape[1]]
    with pytest.raises(UnfitError, match="`head` is not contiguous"):
        native(replace(made, head=Linear(weight._replace(rows=wide))))


BROKEN = [(kind, SCALE_AT[kind]) for kind in BLOCKS] + [*MINIMUM_AT.items()]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("kind", "at"), BROKEN)
def test_a_scale_that_is_not_finite_is_a_damaged_file(
    variant: str, kind: str, at: int, value: float
) -> None:
    """In the last block of the last row of the first or of the last matrix."""
    made = made_stack(kind, 1)
    (layer,), head = made.layers, made.head.weight
    assert isinstance(head, Blocks)
    *others, values = layer.mixer.qkv.weight.parts
    nbytes = BLOCKS[kind].nbytes

    def broken(weight: Blocks) -> Blocks:
        blocks = weight.rows.clone().view(weight.shape[0], -1, nbytes)
        put_half(blocks[-1, -1], at, torch.tensor(value))
        return weight._replace(rows=blocks.flatten(1))

    qkv = layer.mixer.qkv._replace(weight=Joined((*others, broken(values))))
    damaged = layer._replace(mixer=layer.mixer._replace(qkv=qkv))
    for one in (replace(made, head=Linear(broken(head))), replace(made, layers=(damaged,))):
        with pytest.raises(CheckpointError, match="quantised weights is NaN or infinite"):
            native(one)
    native(made)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_is_not_finite_stays_in_its_row(
    variant: str, name: str, value: float
) -> None:
    made, tokens = made_stack(name, 1), [7, 8, 9, 10, 11, 12, 13]
    wanted = run_alone(native(made), tokens)
    made.embedding.values[9, 33] = value
    found = run_alone(native(made), tokens)
    assert not bool(found[2].isfinite().any())
    found[2] = wanted[2]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K", "int4 by 32"])
@pytest.mark.parametrize("largest", [1e-37, 1e-40])
def test_activations_whose_scale_has_no_inverse_count_as_zeros(
    variant: str, name: str, largest: float
) -> None:
    """SiLU of a gate of -80 is so small. The product stays finite."""
    size = SIZES[multiple_of(name)].hidden
    random = torch.Generator().manual_seed(8)
    weight, gain_C = random_weight(name, 30, size, random), torch.ones(size)
    gain_C[:32] = largest
    gain_C[5] = 0
    made = one_product(weight, gain_C)
    wanted = (made.embedding.values * gain_C).double() @ torch.from_numpy(numbers_of(weight)).T
    assert error_of(run_alone(native(made), [1, 2, 3]), wanted[1:4]) <= 1e-6


def test_of_packed_weights_only_the_shapes_are_kept(variant: str) -> None:
    """Rows mapped from a file are not kept, either, except those of the embedding."""
    made = made_stack("Q4_K", 1)
    kept = native(
        replace(made, embedding=random_weight("Q4_K", VOCABULARY, 256, torch.Generator()))
    )
    (layer,) = kept.stack.layers
    for linear in (layer.mixer.qkv, layer.mixer.o, layer.feed.gate_up, layer.feed.down):
        parts = linear.weight.parts if isinstance(linear.weight, Joined) else (linear.weight,)
        assert all(part.rows.is_meta for part in parts)
    assert layer.mixer.qkv.weight.shape == made.layers[0].mixer.qkv.weight.shape
    assert kept.stack.head.weight.shape == (VOCABULARY, 256)
    assert not kept.stack.embedding.rows.is_meta
