"""RoPE that depends on the whole packed batch: exact up to a length, refused beyond it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.stacks import DraftModel
from foretoken.errors import ConfigError
from foretoken.models import CausalLM, load_model
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.support.checkpoints import save_checkpoint

SHORT = 24  # the longest context at which the frequencies are one set
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [8.0, 9.0, 10.0, 11.0],
    "original_max_position_embeddings": SHORT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PHI3: dict[str, Any] = {"rope_parameters": LONGROPE, "original_max_position_embeddings": SHORT}
BY_LAYER_TYPE: dict[str, Any] = families.SUPPORTED["gemma3_text"] | {
    "rope_parameters": {
        "full_attention": LONGROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
PINNED: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", PHI3),
    "longrope in one layer type": ("gemma3_text", BY_LAYER_TYPE),
    "longrope with scales": (
        "phimoe",
        families.SUPPORTED["phimoe"]
        | {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4}},
    ),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SHORT}),
    "dynamic by name only": (
        "hunyuan_v1_dense",
        families.SUPPORTED["hunyuan_v1_dense"]
        | {"rope_parameters": DYNAMIC | {"alpha": 50.0}, "max_position_embeddings": SHORT},
    ),
}


def load(folder: Path, **options: Any) -> CausalLM:
    return load_model(folder, device="cpu", backend="torch", **options)


def packed_logits(model: CausalLM, texts: list[list[int]]) -> list[torch.Tensor]:
    blocks = [-(-len(text) // 8) for text in texts]
    kv = KVPool(model.layer_shapes, sum(blocks) + 1, 8, dtype=model.dtype, device=model.device)
    spans, first = [], 1
    for text, count in zip(texts, blocks, strict=True):
        spans.append(Span(list(range(first, first + count)), 0, text, len(text)))
        first += count
    logits = model.forward(build_batch(spans, 8, model.device), kv).logits_NV
    return list(logits.split([len(text) for text in texts]))


def make_texts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(families.VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("case", PINNED)
def test_pinned_rope_equals_transformers(tmp_path: Path, case: str) -> None:
    family, overrides = PINNED[case]
    families.save_model(tmp_path, family, overrides)
    model = load(tmp_path, max_model_len=SHORT)
    texts = make_texts(SHORT, 7, SHORT - 1)
    assert sum(map(len, texts)) > 2 * SHORT, "the packed batch is longer than the limit"
    plain = families.plain_model(tmp_path)
    for text, logits in zip(texts, packed_logits(model, texts), strict=True):
        torch.testing.assert_close(logits, families.plain_logits(plain, text), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in PINNED if case.startswith("longrope")])
@pytest.mark.parametrize("wanted", [None, SHORT + 1])
def test_longer_contexts_are_refused(tmp_path: Path, case: str, wanted: int | None) -> None:
    family, overrides = PINNED[case]
    families.save_model(tmp_path, family, overrides)
    with pytest.raises(ConfigError, match=rf"`longrope`.*Set `max_model_len` to at most {SHORT}"):
        load(tmp_path, max_model_len=wanted)


def test_dynamic_is_refused_beyond_the_positions_of_the_checkpoint(tmp_path: Path) -> None:
    family, overrides = PINNED["dynamic"]
    families.save_model(tmp_path, family, overrides)
    assert load(tmp_path).max_model_len == SHORT
    with pytest.raises(ConfigError, match=rf"max_model_len.*1\.\.{SHORT}"):
        load(tmp_path, max_model_len=SHORT + 1)


def test_the_refusal_is_needed(tmp_path: Path) -> None:
    """A request beyond the limit moves the logits of a short one in the same pass."""
    families.save_model(tmp_path, "phi3", PHI3)
    model = load(tmp_path, max_model_len=SHORT)
    short, long = make_texts(7, SHORT + 8)
    alone, together = packed_logits(model, [short])[0], packed_logits(model, [short, long])[0]
    assert (alone - together).abs().max() > 0.1


@pytest.mark.parametrize("length", [None, 2 * SHORT])
def test_a_draft_model_drafts_as_far_as_it_can(tmp_path: Path, length: int | None) -> None:
    """Its context ends where RoPE stops being exact; the target's does not."""
    from transformers import AutoConfig

    target = save_checkpoint(tmp_path / "target", max_len=3 * SHORT)
    draft = save_checkpoint(tmp_path / "draft", max_len=3 * SHORT)
    config = AutoConfig.from_pretrained(draft)
    factors = ("short_factor", "long_factor")  # of heads twice as large as those above
    config.rope_parameters = LONGROPE | {name: LONGROPE[name] * 2 for name in factors}
    config.save_pretrained(draft)
    llm = LLM(str(target), {"model": str(draft)}, max_model_len=length, num_blocks=64)
    assert cast(DraftModel, llm.engine.runner.drafter).model.max_model_len == SHORT
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate("a", params)
    assert len(output.outputs[0].token_ids) == 40
    (plain,) = LLM(str(target), num_blocks=64).generate("a", params)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_draft_that_states_no_length_takes_the_targets(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target")
    draft = save_checkpoint(tmp_path / "draft")
    path = draft / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 0}))
    with pytest.raises(ConfigError, match="states no limit"):
        load(draft)
    llm = LLM(str(target), {"model": str(draft)}, max_model_len=SHORT, num_blocks=64)
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=SHORT - 1))
    assert output.metrics.num_accepted_tokens > 0
