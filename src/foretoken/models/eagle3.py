"""An EAGLE-3 head: its weights, in three layouts, as a stack with a feature rule.

Belongs here: the layouts of tensors, which ids a head drafts, and whether a backend's kernels may
run it: they are compared with stock operators on random rows. (Wrong drafts would only cost speed,
since the target verifies them.) Does not: `config.json` (`eagle3_config.py`), when a head runs and
what is kept between passes (`drafting/stacks.py`).

Row i reads the *feature* of position i, made by `fc` from several hidden states of the target, and
the token at position i + 1; its output predicts the token at i + 2. Where the target has not
computed hidden states yet, the head's own output of the row before replaces the feature (Li et al.
2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.checkpoint import check_weights, read_json
from foretoken.models.compressed import CompressedTensors
from foretoken.models.compressed_scheme import is_compressed
from foretoken.models.eagle3_config import Eagle3Config
from foretoken.models.guards import TOLERANCE, check_finite
from foretoken.models.sizes import check_fit, check_room, check_sizes, stored_sizes
from foretoken.models.stored import numbers_of
from foretoken.ops import AttentionBatch, AttentionOptions, Backend
from foretoken.ops.steps import ForwardBatch

from foretoken.ops.stack import (  # isort: skip
    Attention, Dense, FeatureRule, Gated, Grouped, Joined, Layer, Linear, LoadedStack, Rope, Stack,
    UnfitError, Weight, device_of, dtype_of, plain, rounds_rows,
)  # fmt: skip

_log = logging.getLogger(__name__)

_BLOCK = 4  # tokens per cache block of the check
_PASSES = ((70, 1, 5), (1, 1, 1), (5, 5, 5), (1,))
"""New rows per request in each pass: prompts, a draft each, verified rows, a draft of one."""
_LONGEST = sum(map(max, _PASSES))

# Prefixes of tensor names in other layouts, with those used here, which are `speculators`'.
_PREFIXES = {"model.": "", "midlayer.": "layers.0."}
_LAYER = "layers.0."
OUTPUT_LAYER, _EMBEDDING, _MAP = "lm_head.weight", "embed_tokens.weight", "d2t"
_UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_DUMMY_LOGIT_STD = 2.0
_ROUNDED_TOLERANCE = 0.1  # if rows are rounded to eight bits, a last bit may decide between codes


def lacks_head(folder: Path, config: Eagle3Config) -> bool:
    """Whether the head has no output layer and uses the target's; reads only names.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    names = {_our_name(name) for name in CompressedTensors(_headers(folder)).parameters()}
    return OUTPUT_LAYER not in names and config.draft_vocab_size == config.vocab_size


def load_head(
    folder: Path,
    config: Eagle3Config,
    *,
    embedding: Weight,
    backend: Backend,
    positions: int,
    most_rows: int,
    head: Weight | None = None,
    dummy_seed: int | None = None,
) -> LoadedStack:
    """Load a head for the backend's kernels, or for stock operators if those disagree.

    Args:
        positions: longest context, in tokens.
        most_rows: requests that draft at once.
        config, embedding, head, dummy_seed: see `read_head`.

    Raises:
        UnsupportedModelError: it gives NaN or infinity.
        CheckpointError, EngineMemoryError: see `read_head`.
    """
    stack = read_head(folder, config, embedding, head=head, dummy_seed=dummy_seed)
    stock = backend.stock_stack(stack)
    tried = [stock]
    try:
        own = backend.load_stack(stack, max(positions, _LONGEST), most_rows)
        if type(own) is not type(stock):
            tried.append(own)
    except UnfitError as reason:
        _log.info("The EAGLE-3 head runs in stock operators: %s", reason)
    backend.compile_ahead(lambda: [_outputs(one, config) for one in tried])
    expected, *others = (_outputs(one, config) for one in tried)
    if not all(bool((output < torch.inf).all()) for output in expected):  # -inf: never drafted
        raise UnsupportedModelError(
            f"The EAGLE-3 head gives numbers that are not finite in {stack.dtype}: its weights are "
            "damaged, or too large for this dtype (float16 ends at 65504). Try another `dtype`."
        )
    if not others:
        return stock
    error = _difference(expected, *others)
    tolerance = _ROUNDED_TOLERANCE if rounds_rows(stack) else TOLERANCE[stack.dtype]
    if not error <= tolerance:  # NaN too
        _log.warning(
            "The EAGLE-3 head runs in stock operators, slower: that of backend `%s` differs by "
            "%.1e of the largest number (bound %.0e).",
            backend.name,
            error,
            tolerance,
        )
        return stock
    return tried[1]


def read_head(
    folder: Path,
    config: Eagle3Config,
    embedding: Weight,
    *,
    head: Weight | None = None,
    dummy_seed: int | None = None,
) -> Stack:
    """The weights of a head, in any of the layouts.

    Args:
        config: of this folder.
        embedding: the target's, [V, hidden]; also gives the head its dtype (float32 for blocks) and
            device. The head's own embedding is used instead if it has one; it must have one if its
            vectors have another size.
        head: the target's output layer, if the head has none; see `lacks_head`.
        dummy_seed: if given, weights are random numbers of this seed, the ids that it drafts are
            spread evenly over the target's, and the folder needs only a `config.json`.

    Raises:
        CheckpointError: the weights cannot be read, do not fit `config.json`, or are not finite.
        EngineMemoryError: random weights are larger than the device's memory.
    """
    shapes, optional = tensor_shapes(config), _optional_shapes(config)
    dtype, device, output = dtype_of(embedding), device_of(embedding), None
    if embedding.shape[1] != config.hidden_size:
        shapes[_EMBEDDING] = optional[_EMBEDDING]
    drafted, known = config.draft_vocab_size, config.vocab_size
    if dummy_seed is None:
        stored = _read_weights(folder, config)
        offset = stored.pop(_MAP, None)
        target_ids = _target_ids(folder, offset if isinstance(offset, Tensor) else None, config)
        if _EMBEDDING in shapes and _EMBEDDING not in stored:
            raise CheckpointError(
                f"The weights in `{folder}` lack `{_EMBEDDING}`: the head takes "
                f"{config.hidden_size} numbers of a token, its target has {embedding.shape[1]}."
            )
        if head is not None and OUTPUT_LAYER not in stored:
            output = head
        _check_names(folder, stored, shapes, optional, output)
    else:
        check_room(folder, config.layer, shapes, dtype, device)
        stored = {**_random_weights(shapes, dummy_seed, dtype, device)}
        target_ids = torch.arange(drafted) * known // drafted
    tensors = {name: _placed(w, dtype, device) for name, w in stored.items()}
    check_finite(folder, ((n, w) for n, w in tensors.items() if isinstance(w, Tensor)))
    own = tensors.pop(_EMBEDDING, None)
    if isinstance(own, Grouped):
        own = numbers_of(own)
    is_copy = (
        isinstance(embedding, Dense) and own is not None and torch.equal(own, embedding.values)
    )
    vectors = embedding if own is None or is_copy else Dense(own)
    is_identity = drafted == known and bool((target_ids == torch.arange(known)).all())
    to_target = None if is_identity else target_ids.to(device)
    return stack_of(tensors, config, vectors, to_target, output)


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have, by our names, except the map of ids."""
    layer, width = config.layer, config.hidden_size
    queries = layer.num_attention_heads * layer.head_dim
    keys, inner = layer.num_key_value_heads * layer.head_dim, layer.intermediate_size
    states = config.num_aux * config.target_hidden_size
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "hidden_norm.weight": (width,),
        "self_attn.q_proj.weight": (queries, 2 * width),
        "self_attn.k_proj.weight": (keys, 2 * width),
        "self_attn.v_proj.weight": (keys, 2 * width),
        "self_attn.o_proj.weight": (width, queries),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if config.attention_bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        in_layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.qk_norm:
        in_layer |= {f"self_attn.{name}_norm.weight": (layer.head_dim,) for name in "qk"}
    norms = _fc_norms(config)
    return {
        **{name: (states // len(norms),) for name in norms},
        "fc.weight": (width, states),
        **{_LAYER + name: shape for name, shape in in_layer.items()},
        "norm.weight": (width,),
        OUTPUT_LAYER: (config.draft_vocab_size, width),
    }


def _optional_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Tensors that a head may have besides `tensor_shapes`."""
    bias = {_LAYER + "self_attn.o_proj.bias": (config.hidden_size,)}
    return {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        **(bias if config.attention_bias else {}),
    }


def _fc_norms(config: Eagle3Config) -> list[str]:
    """The norms before `fc`, each of an equal part of its input."""
    if config.norm_before_fc:
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(config.num_aux) if config.fc_norm]


def stack_of(
    tensors: Mapping[str, Tensor | Grouped],
    config: Eagle3Config,
    embedding: Weight,
    target_ids: Tensor | None,
    output: Weight | None = None,
) -> Stack:
    """A stack of tensors by our names. Without `target_ids` logits are by the head's own ids.

    Args:
        output: the output layer, if the tensors have none.
    """
    sizes, device = config.layer, device_of(embedding)

    def linear(*names: str) -> Linear:
        weights = [tensors[f"{_LAYER}{name}.weight"] for name in names]
        biases = [vector(f"{n}.bias") for n in names if f"{_LAYER}{n}.bias" in tensors]
        split = tuple(weight.shape[0] for weight in weights)
        return Linear(_joined(weights), torch.cat(biases) if biases else None, split)

    def vector(name: str, at: str = _LAYER) -> Tensor:
        return plain(_joined([tensors[at + name]]))

    norms = [f"self_attn.{name}_norm.weight" for name in "qk" if config.qk_norm]
    mixer = Attention(
        linear(*(f"self_attn.{name}_proj" for name in "qkv")),
        linear("self_attn.o_proj"),
        sizes.num_attention_heads,
        sizes.num_key_value_heads,
        sizes.head_dim,
        Rope(config.frequency_R.to(device), config.rotary_scale),
        AttentionOptions(sizes.head_dim**-0.5, config.sliding_window),
        *map(vector, norms),
    )
    feed = Gated(linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj"))
    layer = Layer(
        vector("input_layernorm.weight"),
        mixer,
        vector("post_attention_layernorm.weight"),
        feed,
    )
    fc_norms = [vector(name, "") for name in _fc_norms(config)]
    rule = FeatureRule(
        Linear(_joined([tensors["fc.weight"]])),
        torch.stack(fc_norms) if fc_norms else None,
        vector("hidden_norm.weight"),
        config.norm_before_residual,
        config.norm_output,
    )
    head = Linear(_joined([tensors[OUTPUT_LAYER]]) if output is None else output)
    own_ids = config.draft_vocab_size if target_ids is None else config.vocab_size
    return Stack(
        embedding, (layer,), vector("norm.weight", ""), head, sizes.rms_norm_eps, own_ids,
        target_ids, rule,
    )  # fmt: skip


def _joined(weights: Sequence[Tensor | Grouped]) -> Weight:
    """Weights with the same input, as one."""
    plains = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plains) == len(weights):
        return Dense(torch.cat(plains) if len(plains) > 1 else plains[0])
    parts = tuple(Dense(w) if isinstance(w, Tensor) else w for w in weights)
    return Joined(parts) if len(parts) > 1 else parts[0]


def _our_name(name: str) -> str:
    """A tensor's name in the layout of `speculators`."""
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
    return name


def _read_weights(folder: Path, config: Eagle3Config) -> dict[str, Tensor | Grouped]:
    """The weights by our names; matrices of compressed-tensors as stored."""
    headers = _headers(folder)
    stored = CompressedTensors(headers)
    check_sizes(folder, config.layer.to_dict(), stored_sizes(headers.values()))
    found: dict[str, Tensor | Grouped] = {}
    for name in sorted(stored.parameters()):
        if (ours := _our_name(name)) not in _UNUSED:
            weight = stored.weight(name)
            found[ours] = weight.values if isinstance(weight, Dense) else weight
    return found


def _headers(folder: Path) -> dict[Path, dict[str, Any]]:
    """Headers of the weights, after checking that these are plain numbers or compressed-tensors."""
    given = read_json(folder / "config.json").get("quantization_config")
    return check_weights(folder, plain=not is_compressed(given))


def _placed(weight: Tensor | Grouped, dtype: torch.dtype, device: torch.device) -> Tensor | Grouped:
    """A weight on its device; on a GPU as plain numbers, because kernels read no others."""
    if isinstance(weight, Grouped) and device.type == "cpu":
        return weight
    return (numbers_of(weight) if isinstance(weight, Grouped) else weight).to(device, dtype)


def _check_names(
    folder: Path,
    stored: Mapping[str, Tensor | Grouped],
    shapes: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
    output: Weight | None,
) -> None:
    """Raise `CheckpointError` for missing, unknown or misshapen tensors.

    Args:
        output: the output layer, if it is not stored.
    """
    known = {**optional, **shapes}
    found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if output is not None:
        found[OUTPUT_LAYER] = output.shape
    problems = {
        "missing": [name for name in shapes if name not in found],
        "unexpected": [name for name in found if name not in known],
        "mismatched": [
            f"{name} {[*shape]} in place of {[*known[name]]}"
            for name, shape in found.items()
            if name in known and shape != known[name]
        ],
    }
    check_fit(folder, problems)


def _target_ids(folder: Path, offset: Tensor | None, config: Eagle3Config) -> Tensor:
    """The target's id for each id of the head, which is stored as the difference `offset`."""
    drafted, known = config.draft_vocab_size, config.vocab_size
    if offset is None:
        if drafted != known:
            raise CheckpointError(
                f"The weights in `{folder}` lack `{_MAP}`, which says what the {drafted} ids of "
                f"the head are among the {known} of the target."
            )
        return torch.arange(known)
    if offset.shape != (drafted,) or offset.is_floating_point():
        raise CheckpointError(
            f"`{_MAP}` in `{folder}` is {offset.dtype} {[*offset.shape]}: must be one integer for "
            f"each of {drafted} ids."
        )
    target_ids = torch.arange(drafted) + offset.long()
    low, high, different = int(target_ids.min()), int(target_ids.max()), {*target_ids.tolist()}
    if low < 0 or high >= known or len(different) < drafted:
        raise CheckpointError(
            f"`{_MAP}` in `{folder}` maps {drafted} ids to {len(different)} in {low}..{high}: must "
            f"be as many, in 0..{known - 1}."
        )
    return target_ids


def _random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Norms of one, products that keep their input's size, logits without near-ties."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 2:
            scale = (_DUMMY_LOGIT_STD if name == OUTPUT_LAYER else 1.0) * shape[1] ** -0.5
            tensors[name].normal_(std=scale, generator=generator)
    return tensors


@torch.no_grad()
def _outputs(head: LoadedStack, config: Eagle3Config) -> list[Tensor]:
    """Hidden states and logits of `_PASSES`, from random hidden states of a target."""
    stack, device = head.stack, head.stack.device
    generator = torch.Generator().manual_seed(0)
    columns = -(-_LONGEST // _BLOCK)
    blocks_BL = torch.randperm(3 * columns, generator=generator).view(3, columns).to(device)
    kv = KVPool(stack.layer_shapes, 3 * columns + 1, _BLOCK, dtype=head.dtype, device=device)
    length_B, outputs = torch.zeros(3, dtype=torch.int64), list[Tensor]()
    hidden_NC: Any = None
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
        last_B, is_draft = (start_B1[1:] - 1).to(device), max(rows) == 1
        batch = ForwardBatch(token_T, position_T.to(device), last_B, attention)
        aux = torch.randn(config.num_aux, total, config.target_hidden_size, generator=generator)
        states = aux.to(device, head.dtype).unbind()
        # Rows of prompts read the target's states, drafts the output of the row before.
        features = hidden_NC[: len(rows)] if is_draft else states
        found = head.run(batch, kv, features=features, logits=is_draft)
        hidden_NC = found.hidden_NC
        logits_NV = found.logits_NV if is_draft else head.logits(hidden_NC)
        outputs += [hidden_NC, logits_NV.clone()]
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to each tensor's largest finite number; NaN if other logits
    are -inf."""
    worst = 0.0
    for want, have in zip(expected, found, strict=True):
        is_finite = want.isfinite()
        if not torch.equal(is_finite, have.isfinite()):
            return float("nan")
        error = (have.float() - want.float())[is_finite].abs().max()
        worst = max(worst, (error / want[is_finite].abs().max()).item())
    return worst
