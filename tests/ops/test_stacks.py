"""The contract of stacks, on every backend, with a stack made by hand.

That passes compute what models compute is shown in `tests/models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import ConfigError
from foretoken.ops import LoadedStack, Stack, get_backend
from foretoken.ops.stack import Dense, FeatureRule, Linear, UnfitError, linears, map_linears
from foretoken.ops.steps import ForwardBatch
from tests.models.batches import Span, build_batch
from tests.native.test_quantised import SIZES, VOCABULARY, made_stack
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

CPU, BLOCK = torch.device("cpu"), 4
SIZE = SIZES[32].hidden
BACKENDS = ["reference", "torch", "native"]


def stack(num_layers: int = 2, rule: FeatureRule | None = None, **changes: Any) -> Stack:
    made = made_stack("float32", num_layers, biases=False)
    if rule is not None:
        (layer,) = made.layers
        wide = Dense(torch.cat([layer.mixer.qkv.weight.values] * 2, dim=1))
        mixer = layer.mixer._replace(qkv=layer.mixer.qkv._replace(weight=wide))
        made = replace(made, layers=(layer._replace(mixer=mixer),), features=rule)
    return replace(made, **changes)


def feature_stack() -> Stack:
    torch.manual_seed(1)
    fc = Linear(Dense(torch.randn(SIZE, 2 * SIZE) / 8))
    return stack(1, FeatureRule(fc, None, torch.rand(SIZE) + 0.5, False, True))


def batch() -> ForwardBatch:
    return build_batch([Span([1], 0, [5, 6, 7], 1), Span([2], 0, [8], 1)], BLOCK, CPU)


def pool(made: Stack) -> KVPool:
    return KVPool(made.layer_shapes, 4, BLOCK, dtype=torch.float32, device=CPU)


def load(name: str, made: Stack) -> LoadedStack:
    return get_backend(name).load_stack(made, 64, 4)


def states() -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.randn(2, 4, SIZE).unbind()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_pass_is_that_of_stock_operators(name: str) -> None:
    made = stack()
    expected = get_backend("torch").stock_stack(made).run(batch(), pool(made)).logits_NV
    found = load(name, made).run(batch(), pool(made)).logits_NV
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("has_rule", [False, True])
def test_logits_that_are_not_wanted_are_left_out(name: str, has_rule: bool) -> None:
    made = feature_stack() if has_rule else stack()
    loaded, features = load(name, made), states() if has_rule else None
    with_logits, without = pool(made), pool(made)
    loaded.run(batch(), with_logits, features=features)
    output = loaded.run(batch(), without, features=features, logits=False)
    assert output.logits_NV.shape == (0, VOCABULARY)
    assert (output.hidden_NC is not None) == has_rule
    for mine, theirs in zip(without.keys, with_logits.keys, strict=True):
        assert torch.equal(mine[1:3], theirs[1:3])


@pytest.mark.parametrize("name", BACKENDS)
def test_only_stacks_with_a_rule_take_features(name: str) -> None:
    plain, drafting = stack(), feature_stack()
    with pytest.raises(ConfigError, match=r"`features` .* None without a `FeatureRule`"):
        load(name, plain).run(batch(), pool(plain), features=states())
    with pytest.raises(ConfigError, match=r"`features` .* hidden states"):
        load(name, drafting).run(batch(), pool(drafting))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_cache_of_other_layers_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="of 2 layers"):
        load(name, stack(2)).run(batch(), pool(stack(1)))


class Halves(NamedTuple):
    """A format that no backend knows."""

    low: Tensor
    high: Tensor
    shape: tuple[int, int]
    nbytes: int = 0


def as_halves(linear: Linear) -> Linear:
    values = linear.weight.values
    weight: Any = Halves(values.half(), values.half(), linear.weight.shape)
    return linear._replace(weight=weight)


def in_one_layer(made: Stack) -> Stack:
    layer = made.layers[1]
    feed = layer.feed._replace(down=as_halves(layer.feed.down))
    return replace(made, layers=(made.layers[0], layer._replace(feed=feed)))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("change", [lambda made: map_linears(made, as_halves), in_one_layer])
def test_another_weight_format_is_unfit(name: str, change: Callable[[Stack], Stack]) -> None:
    with pytest.raises(UnfitError, match=r"`(qkv|down)` is stored as Halves"):
        load(name, change(stack()))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10}, "`stack.vocab_size` is 10: must be 101, the number of outputs"),
        ({"vocab_size": 130, "target_ids": torch.arange(100)}, "`stack.target_ids"),
        ({"vocab_size": 130, "target_ids": torch.arange(30, 131)}, r"in 0\.\.129"),
    ],
)
def test_outputs_are_tokens(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name, stack(**changes))


def test_every_linear_layer_is_listed_and_changed() -> None:
    made = feature_stack()
    names = [name for name, _ in linears(made)]
    assert names == ["qkv", "o", "gate_up", "down", "head", "fc"]
    doubled = map_linears(made, lambda one: one._replace(weight=Dense(2 * one.weight.values)))
    for (_, old), (_, new) in zip(linears(made), linears(doubled), strict=True):
        assert torch.equal(new.weight.values, 2 * old.weight.values)
        assert new.weight.shape == tuple(old.weight.values.shape)
