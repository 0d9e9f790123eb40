"""Load an EAGLE-3 head: weights in one of three layouts become a stack with a feature rule.

Row i reads the *feature* of position i, which `fc` makes from several hidden states of the target,
and the token at position i + 1. The output predicts the token at i + 2. Where the target has not
computed hidden states yet, the head's output for the row before replaces the feature (Li et al.
2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test").

A backend's kernels are compared with stock operators on random rows before they run a head. (Wrong
drafts would only cost speed, since the target verifies drafts.)
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

_BLOCK = 4  # tokens per cache block when kernels are compared with stock operators
# The passes of this comparison, each with the number of new rows per request: prompts of three
# requests, a draft for each, rows to verify, a draft for only the first request.
_PASSES = ((70, 1, 5), (1, 1, 1), (5, 5, 5), (1,))
_MAX_POSITIONS = sum(map(max, _PASSES))

# All layouts are read under *canonical* tensor names, those of `speculators`. `_PREFIXES` maps the
# prefixes of names in other layouts to canonical prefixes.
_PREFIXES = {"model.": "", "midlayer.": "layers.0."}
_LAYER = "layers.0."
OUTPUT_LAYER, _EMBEDDING, _ID_OFFSETS = "lm_head.weight", "embed_tokens.weight", "d2t"
_UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_DUMMY_LOGIT_STD = 2.0
# The bound if rows are rounded to eight bits: a number halfway between two codes may go to either.
_ROUNDED_TOLERANCE = 0.1


def lacks_output_layer(folder: Path, config: Eagle3Config) -> bool:
    """Whether an EAGLE-3 head has no output layer and uses that of the target, by the headers of
    the weight files; `CheckpointError` if these cannot be read."""
    names = {_canonical_name(name) for name in CompressedTensors(_headers(folder)).parameters()}
    return OUTPUT_LAYER not in names and config.draft_vocab_size == config.vocab_size


def load_head(
    folder: Path,
    config: Eagle3Config,
    *,
    embedding: Weight,
    backend: Backend,
    positions: int,
    most_rows: int,
    output_layer: Weight | None = None,
    dummy_seed: int | None = None,
) -> LoadedStack:
    """Load an EAGLE-3 head into the backend's kernels, or into stock operators if the kernels lack
    something or give other results.

    Args:
        positions: longest context, in tokens.
        most_rows: the most requests, of one row each, that draft in one pass.
        config, embedding, output_layer, dummy_seed: see `read_head`.

    Raises:
        UnsupportedModelError: the outputs of stock operators are NaN or +inf.
        CheckpointError, EngineMemoryError: see `read_head`.
    """
    stack = read_head(folder, config, embedding, output_layer=output_layer, dummy_seed=dummy_seed)
    stock = backend.stock_stack(stack)
    kernels: LoadedStack | None = None
    try:
        kernels = backend.load_stack(stack, max(positions, _MAX_POSITIONS), most_rows)
    except UnfitError as reason:
        _log.info("The EAGLE-3 head runs in stock operators: %s", reason)
    if type(kernels) is type(stock):  # the backend's own stack is in stock operators, too
        kernels = None
    networks = [stock] if kernels is None else [stock, kernels]
    backend.compile_ahead(lambda: [_run_passes(network, config) for network in networks])
    expected = _run_passes(stock, config)
    outputs = None if kernels is None else _run_passes(kernels, config)
    # Logits are -inf for ids that the head never drafts.
    if not all(bool((output < torch.inf).all()) for output in expected):
        raise UnsupportedModelError(
            f"The EAGLE-3 head gives numbers that are not finite in {stack.dtype}: its weights are "
            "damaged, or too large for this dtype (float16 ends at 65504). Try another `dtype`."
        )
    if kernels is None or outputs is None:
        return stock
    error = _difference(expected, outputs)
    tolerance = _ROUNDED_TOLERANCE if rounds_rows(stack) else TOLERANCE[stack.dtype]
    if not error <= tolerance:  # NaN too
        message = (
            "The EAGLE-3 head runs in stock operators, slower: the kernels of backend `%s` differ "
            "from these by %.1e of the largest output (bound %.0e)."
        )
        _log.warning(message, backend.name, error, tolerance)
        return stock
    return kernels


def read_head(
    folder: Path,
    config: Eagle3Config,
    embedding: Weight,
    *,
    output_layer: Weight | None = None,
    dummy_seed: int | None = None,
) -> Stack:
    """Read the weights of an EAGLE-3 head, in any layout, as a stack.

    Args:
        config: what `read_eagle3_config` returns for this folder.
        embedding: the target's embedding, [V, hidden], which also gives the stack's device and
            dtype (float32 if it is stored in blocks). An embedding in the folder takes precedence,
            and must exist if the target's vectors have another size.
        output_layer: the target's output layer, if the EAGLE-3 head lacks an output layer.
        dummy_seed: if not None, weights are random numbers of this seed, the ids that are drafted
            are spread evenly over the target's ids, and the folder needs only a `config.json`.

    Raises:
        CheckpointError: the weights cannot be read, do not fit `config.json`, or are not finite.
        EngineMemoryError: random weights are larger than the device's memory.
    """
    shapes, optional = tensor_shapes(config), _optional_shapes(config)
    dtype, device = dtype_of(embedding), device_of(embedding)
    if embedding.shape[1] != config.hidden_size:
        shapes[_EMBEDDING] = optional[_EMBEDDING]
    num_ids, num_target_ids = config.draft_vocab_size, config.vocab_size
    if dummy_seed is None:
        stored = _read_weights(folder, config)
        offsets = stored.pop(_ID_OFFSETS, None)
        target_ids = _target_ids(folder, offsets if isinstance(offsets, Tensor) else None, config)
        if _EMBEDDING in shapes and _EMBEDDING not in stored:
            raise CheckpointError(
                f"The weights in `{folder}` lack `{_EMBEDDING}`: the head needs "
                f"vectors of {config.hidden_size} numbers, the target's have {embedding.shape[1]}."
            )
        if OUTPUT_LAYER in stored:
            output_layer = None
        _check_tensors(folder, stored, shapes, optional, output_layer)
    else:
        check_room(folder, config.layer, shapes, dtype, device)
        stored, output_layer = {**_random_weights(shapes, dummy_seed, dtype, device)}, None
        target_ids = torch.arange(num_ids) * num_target_ids // num_ids
    tensors = {name: _to_device(weight, dtype, device) for name, weight in stored.items()}
    plain_tensors = {name: w for name, w in tensors.items() if isinstance(w, Tensor)}
    check_finite(folder, plain_tensors.items())
    if (stored_embedding := tensors.pop(_EMBEDDING, None)) is not None:
        vectors = stored_embedding
        if isinstance(vectors, Grouped):
            vectors = numbers_of(vectors)
        if not (isinstance(embedding, Dense) and torch.equal(vectors, embedding.values)):
            embedding = Dense(vectors)
    all_ids = torch.arange(num_target_ids)
    is_identity = num_ids == num_target_ids and bool((target_ids == all_ids).all())
    id_map = None if is_identity else target_ids.to(device)
    return stack_of(tensors, config, embedding, id_map, output_layer)


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that an EAGLE-3 head must have, by canonical names, except the map
    of ids."""
    layer, hidden_size = config.layer, config.hidden_size
    q_size = layer.num_attention_heads * layer.head_dim
    kv_size, feed_size = layer.num_key_value_heads * layer.head_dim, layer.intermediate_size
    states_size = config.num_aux * config.target_hidden_size
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden_size,),
        "hidden_norm.weight": (hidden_size,),
        "self_attn.q_proj.weight": (q_size, 2 * hidden_size),
        "self_attn.k_proj.weight": (kv_size, 2 * hidden_size),
        "self_attn.v_proj.weight": (kv_size, 2 * hidden_size),
        "self_attn.o_proj.weight": (hidden_size, q_size),
        "post_attention_layernorm.weight": (hidden_size,),
        "mlp.gate_proj.weight": (feed_size, hidden_size),
        "mlp.up_proj.weight": (feed_size, hidden_size),
        "mlp.down_proj.weight": (hidden_size, feed_size),
    }
    if config.attention_bias:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        in_layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.qk_norm:
        in_layer |= {f"self_attn.{name}_norm.weight": (layer.head_dim,) for name in "qk"}
    norms = _fc_norms(config)
    return {
        **{name: (states_size // len(norms),) for name in norms},
        "fc.weight": (hidden_size, states_size),
        **{_LAYER + name: shape for name, shape in in_layer.items()},
        "norm.weight": (hidden_size,),
        OUTPUT_LAYER: (config.draft_vocab_size, hidden_size),
    }


def _optional_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors that a head may have in addition to `tensor_shapes`."""
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    if config.attention_bias:
        shapes[_LAYER + "self_attn.o_proj.bias"] = (config.hidden_size,)
    return shapes


def _fc_norms(config: Eagle3Config) -> list[str]:
    """The names of the norms before `fc`. Each norms an equal part of the input of `fc`."""
    if config.norm_before_fc:
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(config.num_aux) if config.fc_norm]


def stack_of(
    tensors: Mapping[str, Tensor | Grouped],
    config: Eagle3Config,
    embedding: Weight,
    target_ids: Tensor | None,
    output_layer: Weight | None = None,
) -> Stack:
    """The stack of an EAGLE-3 head.

    Args:
        tensors: by canonical names; see `tensor_shapes`.
        target_ids: the target's id for each id of the EAGLE-3 head. Logits have a column for each
            id of the target; if None, for each id of the head.
        output_layer: the target's output layer, if `tensors` lacks an output layer.
    """
    layer_config, device = config.layer, device_of(embedding)

    def linear(*names: str) -> Linear:
        weights = [tensors[f"{_LAYER}{name}.weight"] for name in names]
        biases = [vector(f"{name}.bias") for name in names if f"{_LAYER}{name}.bias" in tensors]
        split = tuple(weight.shape[0] for weight in weights)
        return Linear(_join(weights), torch.cat(biases) if biases else None, split)

    def vector(name: str, prefix: str = _LAYER) -> Tensor:
        return plain(_join([tensors[prefix + name]]))

    norms = [f"self_attn.{name}_norm.weight" for name in "qk" if config.qk_norm]
    mixer = Attention(
        linear(*(f"self_attn.{name}_proj" for name in "qkv")), linear("self_attn.o_proj"),
        layer_config.num_attention_heads, layer_config.num_key_value_heads, layer_config.head_dim,
        Rope(config.frequency_R.to(device), config.rotary_scale),
        AttentionOptions(layer_config.head_dim**-0.5, config.sliding_window), *map(vector, norms),
    )  # fmt: skip
    feed = Gated(linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj"))
    feed_norm = vector("post_attention_layernorm.weight")
    layer = Layer(vector("input_layernorm.weight"), mixer, feed_norm, feed)
    fc_norms = [vector(name, "") for name in _fc_norms(config)]
    rule = FeatureRule(
        Linear(_join([tensors["fc.weight"]])), torch.stack(fc_norms) if fc_norms else None,
        vector("hidden_norm.weight"), config.norm_before_residual, config.norm_output,
    )  # fmt: skip
    if output_layer is None:
        output_layer = _join([tensors[OUTPUT_LAYER]])
    num_logits = config.draft_vocab_size if target_ids is None else config.vocab_size
    return Stack(
        embedding, (layer,), vector("norm.weight", ""), Linear(output_layer),
        layer_config.rms_norm_eps, num_logits, target_ids, rule,
    )  # fmt: skip


def _join(weights: Sequence[Tensor | Grouped]) -> Weight:
    """One weight for layers that read the same input."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) == len(weights):
        return Dense(torch.cat(tensors) if len(tensors) > 1 else tensors[0])
    parts = tuple(Dense(w) if isinstance(w, Tensor) else w for w in weights)
    return Joined(parts) if len(parts) > 1 else parts[0]


def _canonical_name(name: str) -> str:
    for prefix, canonical_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            name = canonical_prefix + name.removeprefix(prefix)
    return name


def _read_weights(folder: Path, config: Eagle3Config) -> dict[str, Tensor | Grouped]:
    """All weights of a head's folder by canonical names. Matrices of compressed-tensors keep their
    stored format."""
    headers = _headers(folder)
    stored = CompressedTensors(headers)
    check_sizes(folder, config.layer.to_dict(), stored_sizes(headers.values()))
    weights: dict[str, Tensor | Grouped] = {}
    for stored_name in sorted(stored.parameters()):
        if (name := _canonical_name(stored_name)) not in _UNUSED:
            weight = stored.weight(stored_name)
            weights[name] = weight.values if isinstance(weight, Dense) else weight
    return weights


def _headers(folder: Path) -> dict[Path, dict[str, Any]]:
    """The headers of the weight files by path, checked: weights that are not plain numbers must be
    compressed-tensors."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    return check_weights(folder, plain=not is_compressed(quantization))


def _to_device(
    weight: Tensor | Grouped, dtype: torch.dtype, device: torch.device
) -> Tensor | Grouped:
    """A weight on the device, decoded on a GPU, because kernels there read only plain numbers."""
    if isinstance(weight, Grouped) and device.type == "cpu":
        return weight
    return (numbers_of(weight) if isinstance(weight, Grouped) else weight).to(device, dtype)


def _check_tensors(
    folder: Path,
    stored: Mapping[str, Tensor | Grouped],
    shapes: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
    output_layer: Weight | None,
) -> None:
    """Raise `CheckpointError` for missing or unknown tensors and for wrong shapes.

    Args:
        shapes, optional: the shapes of tensors that must exist, and of other allowed tensors.
        output_layer: the target's output layer, if the EAGLE-3 head uses it.
    """
    allowed = {**optional, **shapes}
    stored_shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if output_layer is not None:
        stored_shapes[OUTPUT_LAYER] = output_layer.shape
    common = [(name, shape) for name, shape in stored_shapes.items() if name in allowed]
    problems = {
        "missing": [name for name in shapes if name not in stored_shapes],
        "unexpected": [name for name in stored_shapes if name not in allowed],
        "mismatched": [
            f"{name} {[*shape]} in place of {[*allowed[name]]}"
            for name, shape in common if shape != allowed[name]
        ],
    }  # fmt: skip
    check_fit(folder, problems)


def _target_ids(folder: Path, offsets: Tensor | None, config: Eagle3Config) -> Tensor:
    """The target's id for each id of the head, int64. `CheckpointError` if `offsets` (stored: the
    target's id minus the head's id) are not valid, or are missing although the head needs them."""
    num_ids, num_target_ids = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if num_ids != num_target_ids:
            raise CheckpointError(
                f"The weights in `{folder}` lack `{_ID_OFFSETS}`, which maps the {num_ids} ids of "
                f"the head to some of the {num_target_ids} ids of the target."
            )
        return torch.arange(num_target_ids)
    if offsets.shape != (num_ids,) or offsets.is_floating_point():
        raise CheckpointError(
            f"`{_ID_OFFSETS}` in `{folder}` is {offsets.dtype} {[*offsets.shape]}: must be one "
            f"integer for each of {num_ids} ids."
        )
    target_ids = torch.arange(num_ids) + offsets.long()
    low, high, distinct = int(target_ids.min()), int(target_ids.max()), {*target_ids.tolist()}
    if low < 0 or high >= num_target_ids or len(distinct) < num_ids:
        raise CheckpointError(
            f"`{_ID_OFFSETS}` in `{folder}` maps {num_ids} ids to {len(distinct)} different ids "
            f"in {low}..{high}: must be {num_ids} different ids in 0..{num_target_ids - 1}."
        )
    return target_ids


def _random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Random weights by name. Norms and biases are 1. Linear layers have outputs about as large as
    their inputs; only logits are larger, so that near-ties are rare."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 2:
            scale = (_DUMMY_LOGIT_STD if name == OUTPUT_LAYER else 1.0) * shape[1] ** -0.5
            tensors[name].normal_(std=scale, generator=generator)
    return tensors


@torch.no_grad()
def _run_passes(network: LoadedStack, config: Eagle3Config) -> list[Tensor]:
    """Run `_PASSES` on random tokens and random hidden states of a target. Returns two tensors per
    pass, both for each request's last row: the head's hidden states, and the logits."""
    stack, device = network.stack, network.stack.device
    generator = torch.Generator().manual_seed(0)
    columns = -(-_MAX_POSITIONS // _BLOCK)
    blocks_BL = torch.randperm(3 * columns, generator=generator).view(3, columns).to(device)
    kv = KVPool(stack.layer_shapes, 3 * columns + 1, _BLOCK, dtype=network.dtype, device=device)
    length_B, outputs = torch.zeros(3, dtype=torch.int64), list[Tensor]()
    hidden_NC: Any = None  # the hidden states of the head
    for counts in _PASSES:
        count_B = torch.tensor(counts)
        length_B = length_B[: len(counts)] + count_B
        start_B1 = torch.nn.functional.pad(count_B.cumsum(0), (1, 0))
        requests = zip(length_B.tolist(), counts, strict=True)
        position_T = torch.cat([torch.arange(end - count, end) for end, count in requests])
        attention = AttentionBatch(
            start_B1.to(device), length_B.to(device), blocks_BL[: len(counts)], _BLOCK,
            most_queries=max(counts), values_fit=True,
        )  # fmt: skip
        total = len(position_T)
        token_T = torch.randint(config.vocab_size, (total,), generator=generator).to(device)
        last_B, is_draft = (start_B1[1:] - 1).to(device), max(counts) == 1
        batch = ForwardBatch(token_T, position_T.to(device), last_B, attention)
        aux = torch.randn(config.num_aux, total, config.target_hidden_size, generator=generator)
        target_states = aux.to(device, network.dtype).unbind()
        # Rows of drafts read the head's hidden state of the row before, other rows the target's.
        features = hidden_NC[: len(counts)] if is_draft else target_states
        output = network.run(batch, kv, features=features, logits=is_draft)
        hidden_NC = output.hidden_NC
        logits_NV = output.logits_NV if is_draft else network.logits(hidden_NC)
        outputs += [hidden_NC, logits_NV.clone()]
    return outputs


def _difference(expected: list[Tensor], outputs: list[Tensor]) -> float:
    """The largest difference, relative to each expected tensor's largest finite number; NaN if the
    tensors are not finite in the same places."""
    largest = 0.0
    for expected_tensor, tensor in zip(expected, outputs, strict=True):
        is_finite = expected_tensor.isfinite()
        if not torch.equal(is_finite, tensor.isfinite()):
            return float("nan")
        error = (tensor.float() - expected_tensor.float())[is_finite].abs().max()
        scale = expected_tensor[is_finite].abs().max()
        largest = max(largest, (error / scale).item())
    return largest
