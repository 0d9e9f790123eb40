"""A profile from shapes alone: `config.json`, and what the hardware is said to do. No torch.

Charter: an estimate. A pass takes as long as reading its weights at the stated bandwidth, or as its
products at the stated arithmetic rate, whichever is longer; contexts are read on top. Kernels reach
some 75 to 90 % of either, and hosts add their part: state rates that are reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.config import BLOCK_SIZES, EngineConfig, check_int
from foretoken.engine.pace import PromptCosts
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.lab.plan.profile import EngineLimits, Profile

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PASSES = ("draft_model", "eagle3")  # of which a draft is a pass
_CHUNKS = tuple(2**i for i in range(15))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pass of a dense decoder computes with.

    Attributes:
        weights: parameters that every token meets; the embedding's few rows are left out.
        kept: numbers of keys and values of a token, all layers together.
    """

    weights: int
    kept: int

    @classmethod
    def read(cls, folder: Path, *, is_head: bool = False) -> Shape:
        """Of a folder's config.json.

        Args:
            is_head: it is an EAGLE-3 head's, whose features of the target are made once a step, and
                are left out.

        Raises:
            CheckpointError: there is none, or it lacks what is needed.
            UnsupportedModelError: a mixture of experts, of which each token meets a part.
        """
        given = config_of(folder)
        if any(given.get(name) for name in _EXPERTS):
            said = "is a mixture of experts: what a token reads of it does not follow from shapes."
            raise UnsupportedModelError(f"{folder} {said} Measure it: leave out --bandwidth.")
        try:
            width, heads = given["hidden_size"], given["num_attention_heads"]
            layers, middle = given["num_hidden_layers"], given["intermediate_size"]
            vocab = given.get("draft_vocab_size") or given["vocab_size"]
        except KeyError as error:
            raise CheckpointError(f"{folder}/config.json lacks {error}.") from None
        size = given.get("head_dim") or width // heads
        kept = 2 * (given.get("num_key_value_heads") or heads) * size
        taken = 2 * width if is_head else width  # a head's layer reads embedding and state
        layer = taken * (heads * size + kept) + heads * size * width + 3 * width * middle
        return cls(layers * layer + vocab * width, layers * kept)


def config_of(folder: Path) -> Mapping[str, Any]:
    """The text model's part of config.json."""
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return dict(given.get("text_config") or given)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}: config.json cannot be read: {error}.") from None


def estimate(config: EngineConfig, bandwidth: float, flops: float, length: int) -> Profile:
    """The profile of an engine of these options.

    Args:
        bandwidth: bytes per second.
        flops: products and sums per second.
        length: of requests that the cache holds `max_num_seqs` of, where its size is left open.
    """
    from foretoken.models.locate import resolve_checkpoint

    def find(name: str) -> Path:
        local = config.local_files_only
        return resolve_checkpoint(name, local_files_only=local, weights=False)

    folder, speculation = find(config.model), config.speculative_config
    target, draft = Shape.read(folder), Shape(0, 0)
    if speculation is not None and speculation.method in _PASSES:
        if speculation.model is None:
            said = "The draft's shape is not known: name its folder as `model`"
            raise CheckpointError(f"{said} in --speculative-config.")
        draft = Shape.read(find(speculation.model), is_head=speculation.method == "eagle3")

    dtype = config_of(folder).get("dtype") if config.dtype == "auto" else config.dtype
    size = _BYTES.get(str(dtype), 2)

    def seconds(shape: Shape, rows: int) -> float:
        return max(size * shape.weights / bandwidth, 2 * shape.weights * rows / flops)

    most, batches = config.num_drafts, sorted({*_CHUNKS, config.max_num_seqs})
    batches = [b for b in batches if b <= config.max_num_seqs]
    drafts, kept = list(range(most + 1)), size * (target.kept + draft.kept)
    limit = config.max_model_len or config_of(folder).get("max_position_embeddings", 4096)
    check_int("max_model_len", limit, 1)
    block = config.block_size or BLOCK_SIZES["cuda"]
    blocks = config.num_blocks or config.max_num_seqs * (-(-length // block) + 1)
    if config.kv_cache_gib is not None and config.num_blocks is None:
        blocks = int(config.kv_cache_gib * 2**30 / (block * kept))
        check_int("blocks of `kv_cache_gib`", blocks, 1, remedy="Raise it.")
    limits = EngineLimits(
        config.max_num_seqs, config.max_num_batched_tokens, limit, block, blocks,
        config.max_step_seconds,
    )  # fmt: skip
    return Profile(
        model=config.model,
        method=str(speculation.method) if speculation else "plain",
        origin="estimated",
        drafts=drafts,
        batches=batches,
        rest=[[seconds(target, b * (1 + k)) for k in drafts] for b in batches],
        draft=[[k * seconds(draft, b) for k in drafts] for b in batches],
        context=[size * (target.kept + k * draft.kept) / bandwidth for k in drafts],
        missed=2 * draft.weights / flops,
        prompts=PromptCosts(_CHUNKS, [seconds(target, n) for n in _CHUNKS]),
        limits=limits,
        runs_ahead=True,
        lockstep=True,
        block_bytes=block * kept,
        memory={"weights": size * target.weights, "weights of the draft": size * draft.weights},
        made={"hardware": {"bytes_per_s": bandwidth, "flops": flops}},
    )
