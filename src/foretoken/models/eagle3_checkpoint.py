"""Reading the weights of an EAGLE-3 head from its folder, and which ids it drafts.

Belongs here: the layouts of tensors. Does not: `config.json` (`eagle3_config.py`), what the head
computes (`eagle3.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.models.checkpoint import check_weights, reading
from foretoken.models.eagle3 import Eagle3Head
from foretoken.models.eagle3_config import Eagle3Config
from foretoken.models.guards import check_finite
from foretoken.models.sizes import check_fit, check_room, check_sizes, stored_sizes
from foretoken.ops import Backend
from foretoken.ops.decoder import HeadExtras, HeadWeights

# What names of tensors begin with in one layout or another, and here: as in `speculators`.
_PREFIXES = {"model.": "", "midlayer.": "layers.0."}
_LAYER = "layers.0."
OUTPUT_LAYER, _EMBEDDING, _MAP = "lm_head.weight", "embed_tokens.weight", "d2t"
_UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_DUMMY_LOGIT_STD = 2.0


def lacks_head(folder: Path, config: Eagle3Config) -> bool:
    """Whether the weights leave the output layer to the target; reads names alone.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    from safetensors import safe_open

    names = set[str]()
    for path in check_weights(folder):
        with reading(path), safe_open(path, "pt") as file:
            names |= {_our_name(name) for name in file.keys()}  # noqa: SIM118 (not iterable)
    return OUTPUT_LAYER not in names and config.draft_vocab_size == config.vocab_size


def load_eagle3(
    folder: Path,
    config: Eagle3Config,
    *,
    embedding: Tensor,
    backend: Backend,
    head: Tensor | None = None,
    dummy_seed: int | None = None,
) -> Eagle3Head:
    """Load the weights of a head, in any of the layouts.

    Args:
        config: of this folder.
        embedding: the target's, [V, hidden]; the head takes its dtype and its device, too. One of
            the head's own is used in its stead, and has to be there if its vectors have another
            size.
        head: the target's output layer, if the head has none; see `lacks_head`.
        dummy_seed: if given, weights are random numbers of this seed, the ids that it drafts are
            spread evenly over the target's, and `config.json` is all that the folder must have.

    Raises:
        CheckpointError: the weights cannot be read, are not those of `config.json`, or not finite.
        EngineMemoryError: random weights of its sizes are beyond the device.
    """
    shapes, optional = tensor_shapes(config), _optional_shapes(config)
    if embedding.shape[1] != config.hidden_size:
        shapes[_EMBEDDING] = optional[_EMBEDDING]
    drafted, known = config.draft_vocab_size, config.vocab_size
    if dummy_seed is None:
        stored = _read_weights(folder, config)
        target_ids = _target_ids(folder, stored.pop(_MAP, None), config)
        if head is not None:
            stored.setdefault(OUTPUT_LAYER, head)
        if _EMBEDDING in shapes and _EMBEDDING not in stored:
            raise CheckpointError(
                f"The weights in `{folder}` lack `{_EMBEDDING}`: the head takes "
                f"{config.hidden_size} numbers of a token, its target has {embedding.shape[1]}."
            )
        _check_names(folder, stored, shapes, optional)
    else:
        check_room(folder, config.layer, shapes, embedding.dtype, embedding.device)
        stored = _random_weights(shapes, dummy_seed, embedding)
        target_ids = torch.arange(drafted) * known // drafted
    tensors = {name: w.to(embedding.device, embedding.dtype) for name, w in stored.items()}
    check_finite(folder, tensors.items())
    own = tensors.pop(_EMBEDDING, embedding)
    if torch.equal(own, embedding):  # a copy of the target's
        own = embedding
    is_identity = drafted == known and bool((target_ids == torch.arange(known)).all())
    to_target = None if is_identity else target_ids.to(embedding.device)
    return Eagle3Head(config, *join_weights(tensors, config), to_target, own, backend)


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
    """What a head may have beside `tensor_shapes`; not every output layer has its bias."""
    bias = {_LAYER + "self_attn.o_proj.bias": (config.hidden_size,)}
    return {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        **(bias if config.attention_bias else {}),
    }


def _fc_norms(config: Eagle3Config) -> list[str]:
    """The norms in front of `fc`, each of an equal part of what it reads."""
    if config.norm_before_fc:
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(config.num_aux) if config.fc_norm]


def join_weights(
    tensors: dict[str, Tensor], config: Eagle3Config
) -> tuple[HeadWeights, HeadExtras]:
    """Tensors by our names as the head reads them."""

    def of(name: str) -> Tensor:
        return tensors[_LAYER + name]

    def projected(kind: str) -> Tensor:
        return torch.cat([of(f"self_attn.{name}_proj.{kind}") for name in "qkv"])

    weights = HeadWeights(
        fc=tensors["fc.weight"],
        input_norm=of("input_layernorm.weight"),
        hidden_norm=of("hidden_norm.weight"),
        qkv=projected("weight"),
        o=of("self_attn.o_proj.weight"),
        post_norm=of("post_attention_layernorm.weight"),
        gate_up=torch.cat([of("mlp.gate_proj.weight"), of("mlp.up_proj.weight")]),
        down=of("mlp.down_proj.weight"),
        norm=tensors["norm.weight"],
        head=tensors[OUTPUT_LAYER],
    )
    extras, heads = HeadExtras(o_bias=tensors.get(_LAYER + "self_attn.o_proj.bias")), config.layer
    if config.attention_bias:
        extras = extras._replace(qkv_bias=projected("bias"))
    if config.qk_norm:
        counts = {"q": heads.num_attention_heads, "k": heads.num_key_value_heads}
        gains = [of(f"self_attn.{name}_norm.weight").expand(n, -1) for name, n in counts.items()]
        extras = extras._replace(qk_norm=torch.cat(gains))
    if names := _fc_norms(config):
        extras = extras._replace(fc_norm=torch.stack([tensors[name] for name in names]))
    return weights, extras


def _our_name(name: str) -> str:
    """That of `speculators`, whatever the layout."""
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
    return name


def _read_weights(folder: Path, config: Eagle3Config) -> dict[str, Tensor]:
    """By our names."""
    from safetensors.torch import load_file

    tensors, headers = dict[str, Tensor](), check_weights(folder)
    check_sizes(folder, config.layer.to_dict(), stored_sizes(headers.values()))
    for path in headers:
        with reading(path):
            stored = load_file(path)
        tensors |= {_our_name(name): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in tensors.items() if name not in _UNUSED}


def _check_names(
    folder: Path,
    stored: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
) -> None:
    """Raise `CheckpointError` unless all of `shapes` are there and nothing unknown, each so."""
    known = {**optional, **shapes}
    problems = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": [name for name in stored if name not in known],
        "mismatched": [
            f"{name} {[*tensor.shape]} in place of {[*known[name]]}"
            for name, tensor in stored.items()
            if name in known and tensor.shape != known[name]
        ],
    }
    check_fit(folder, problems)


def _target_ids(folder: Path, offset: Tensor | None, config: Eagle3Config) -> Tensor:
    """The target's id of each id of the head's: stored as what is to be added."""
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
    shapes: dict[str, tuple[int, ...]], seed: int, like: Tensor
) -> dict[str, Tensor]:
    """Norms of one, products that keep the size of what they read, logits that are no near-ties."""
    generator = torch.Generator(like.device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.ones(shape, dtype=like.dtype, device=like.device)
        if len(shape) == 2:
            scale = (_DUMMY_LOGIT_STD if name == OUTPUT_LAYER else 1.0) * shape[1] ** -0.5
            tensors[name].normal_(std=scale, generator=generator)
    return tensors
