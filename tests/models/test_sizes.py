"""Absurd sizes in `config.json`: refused before allocation, with the field and both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.heads import save_head
from foretoken import LLM
from foretoken.config.checks import machine_bytes
from foretoken.errors import CheckpointError, ConfigError, EngineMemoryError, ForetokenError
from foretoken.models import load_model, load_tokenizer
from foretoken.models.eagle3 import load_head
from foretoken.models.eagle3_config import read_eagle3_config
from foretoken.ops import get_backend
from foretoken.ops.stack import Dense
from tests.models import families
from tests.models.families import change_config
from tests.support.checkpoints import save_checkpoint

FIELDS = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size",
)  # fmt: skip
HUGE = (10**7, 10**9, 10**12, 2**63, 10**30)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), layers=3)


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, device="cpu", backend="torch", **options)


@pytest.mark.parametrize("field", FIELDS)
def test_sizes_beyond_the_weights(tmp_path: Path, field: str) -> None:
    save_checkpoint(tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())[field]
    for value in (*HUGE, -1, 0):
        if value == 0 and field == "intermediate_size":
            continue  # a mismatch of some tensors
        change_config(tmp_path, **{field: value})
        with pytest.raises(CheckpointError, match=f"gives `{field}` as {value}: ") as caught:
            load(tmp_path)
        if value > 0:
            held = "2 layers" if field == "num_hidden_layers" else r"hold \d+ numbers in all"
            assert caught.match(f"the weights (have )?{held}")
    change_config(tmp_path, **{field: original})
    load(tmp_path)


@pytest.mark.parametrize(
    ("field", "tensor", "shapes"),
    [
        ("hidden_size", "model.embed_tokens.weight", r"\[260, 100000\], but is \[260, 32\]"),
        ("vocab_size", "model.embed_tokens.weight", r"\[100000, 32\], but is \[260, 32\]"),
        ("num_key_value_heads", ".*k_proj.weight", r"\[1600000, 32\], but is \[32, 32\]"),
        ("head_dim", ".*q_proj.weight", r"\[400000, 32\], but is \[64, 32\]"),
        ("intermediate_size", ".*gate_proj.weight", r"\[100000, 32\], but is \[64, 32\]"),
    ],
)
def test_sizes_of_a_model_that_the_weights_cannot_fill(
    tmp_path: Path, field: str, tensor: str, shapes: str
) -> None:
    """Too small to be absurd, too large to be allocated before a mismatch is found."""
    save_checkpoint(tmp_path)
    change_config(tmp_path, **{field: 100_000})
    message = f"gives `{field}` as 100000, which .* hold 41376: `{tensor}` would be {shapes}"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_old_names_of_sizes(tmp_path: Path) -> None:
    families.save_model(tmp_path, "gpt2", families.SUPPORTED["gpt2"])
    original = json.loads((tmp_path / "config.json").read_text())
    for field, value, message in (
        ("n_layer", 10**7, "as 10000000: the weights have 2 layers"),
        ("n_embd", 10**9, "as 1000000000: the weights hold"),
        ("n_head", 0, "as 0: must be at least 1"),
        ("n_positions", 10**9, r"as 1000000000, which .*`transformer.wpe.weight` would be \[1000"),
        ("n_positions", 2**63, "as 9223372036854775808: at most"),
        ("n_positions", -1, "as -1: must be at least 0"),
    ):
        change_config(tmp_path, **{**original, field: value})
        with pytest.raises(CheckpointError, match=f"gives `{field}` {message}"):
            load(tmp_path)


def test_sizes_inside_a_multimodal_configuration(tmp_path: Path) -> None:
    families.save_model(tmp_path, "llava", families.MULTIMODAL["llava"])
    stated = json.loads((tmp_path / "config.json").read_text())
    for part, field in (("text_config", "num_hidden_layers"), ("vision_config", "hidden_size")):
        change_config(tmp_path, **{part: stated[part] | {field: 10**9}})
        with pytest.raises(CheckpointError, match=f"gives `{field}` as 1000000000: the weights"):
            load(tmp_path)
        change_config(tmp_path, **{part: stated[part]})
    load(tmp_path)


def test_sizes_that_nothing_is_made_of(tmp_path: Path) -> None:
    """Positions of RoPE are bounded by memory alone; `n_experts` of a model without experts."""
    save_checkpoint(tmp_path)
    change_config(
        tmp_path, max_position_embeddings=10**12, num_experts=10**6, vision_config={"depth": 99}
    )
    assert load(tmp_path).max_model_len == 10**12


def test_long_lists(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    change_config(tmp_path, layer_types=["full_attention"] * 10**5)
    with pytest.raises(CheckpointError, match=r"`num_hidden_layers` \(2\).*\(100000\)"):
        load(tmp_path)
    change_config(tmp_path, layer_types=["full_attention"] * 10**6)
    for read in (load, load_tokenizer):
        with pytest.raises(
            CheckpointError, match=r"config.json` has 18\d+ bytes: at most 16777216"
        ):
            read(tmp_path)


def test_a_layer_whose_type_makes_lists_of_layers(tmp_path: Path) -> None:
    """Transformers would make a list of 10**9 types when it reads this configuration."""
    families.save_model(tmp_path, "qwen2", families.SUPPORTED["qwen2"])
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    del stated["layer_types"]
    path.write_text(json.dumps({**stated, "num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="as 1000000000: the weights have 2 layers"):
        load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"as 1000000000: at most .* of this machine's memory"
    ):
        load(tmp_path, dummy_seed=1)


@pytest.mark.parametrize("field", FIELDS)
def test_random_weights_beyond_the_machine(tmp_path: Path, field: str) -> None:
    save_checkpoint(tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())
    room = (machine_bytes() or 2**40) // 4
    most = {"num_hidden_layers": 10**9, "num_attention_heads": 10**7}.get(field, 2**31 - 4)
    for value in (min(room, most) // 4 * 4, 2**63, -1, 0):
        if value == 0 and field == "intermediate_size":
            continue  # it runs
        # Transformers itself refuses heads that do not divide the hidden size.
        wide = {"hidden_size": value} if field == "num_attention_heads" and value > 0 else {}
        change_config(tmp_path, **{**original, **wide, field: value})
        with pytest.raises((CheckpointError, EngineMemoryError)) as caught:
            load(tmp_path, dummy_seed=1)
        assert caught.match(f"gives `({field}|{next(iter(wide), field)})` as {value}")


def test_sizes_of_a_draft_model(tmp_path: Path, target: Path) -> None:
    draft = save_checkpoint(tmp_path)
    for field, value, message in (
        ("num_hidden_layers", 10**7, "at most"),
        ("num_hidden_layers", 5, "the weights have 2 layers"),
        ("vocab_size", 10**9, "the weights hold"),
    ):
        original = json.loads((draft / "config.json").read_text())
        change_config(draft, **{field: value})
        with pytest.raises(CheckpointError, match=f"gives `{field}` as {value}: {message}"):
            LLM(str(target), {"model": str(draft)}, num_blocks=64)
        change_config(draft, **original)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("dummy_seed", [None, 1])
def test_sizes_of_a_head(tmp_path: Path, field: str, dummy_seed: int | None) -> None:
    save_head(tmp_path, hidden=32, vocabulary=60)
    original = json.loads((tmp_path / "config.json").read_text())
    for value in (*(HUGE[2:] if dummy_seed else HUGE), -1, 0):  # random ones of 10**7 may fit
        change_config(tmp_path, **{**original, field: value})
        with pytest.raises(ForetokenError, match=rf"{field}|of attention heads") as caught:
            load_head(
                tmp_path, read_eagle3_config(tmp_path), embedding=Dense(torch.randn(60, 32)),
                backend=get_backend("torch"), positions=40, most_rows=1, dummy_seed=dummy_seed,
            )  # fmt: skip
        assert str(value) in str(caught.value)


def test_a_head_for_a_target_of_absurd_sizes(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", layers=3)
    head = save_head(tmp_path / "head", hidden=32, vocabulary=260)
    change_config(target, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="`num_hidden_layers` as 1000000000: at most"):
        LLM(str(target), {"method": "eagle3", "model": str(head)}, num_blocks=64)
    change_config(target, num_hidden_layers=3)
    change_config(head, vocab_size=10**9)
    with pytest.raises(ConfigError, match="trained for 1000000000 logits; the target has 260"):
        LLM(str(target), {"method": "eagle3", "model": str(head)}, num_blocks=64)
