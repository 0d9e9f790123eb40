"""What `foretoken plan` reads: profiles, acceptance in every form, shapes; what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.lab.plan.options import PlanOptions
from foretoken.lab.plan.profile import Acceptance, Profile, Shape, config_of, estimate
from foretoken.lab.plan.simulate import Outlook
from foretoken.lab.results import read
from tests.lab.profiles import PROFILE, SHAPES
from tests.models.gguf_models import Written
from tests.project.source import ROOT

pytestmark = pytest.mark.usefixtures("known_memory")


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    again = Profile.read(path)
    assert asdict(again) == json.loads(json.dumps(asdict(PROFILE)))
    assert np.array_equal(again.table.rest_JK1, PROFILE.table.rest_JK1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rest", 0, 1), -1e-3),
        (("rest", 0, 1), 1e9),
        (("rest", 0), [1.0]),
        (("rest", 0, 0), 0.0),
        (("batches",), [2, 1]),
        (("drafts",), [1, 2, 4]),
        (("context", 0), float("nan")),
        (("missed",), "much"),
        (("origin",), "guessed"),
        (("limits", "block_size"), 0),
        (("prompts", "seconds"), [1.0]),
        (("acceptance",), [0.5, 0.6]),
        (("speed",), 1),
        (("schema",), 2),
        (("limits",), {"max_num_seqs": 1}),
        (("rest",), None),
    ],
)
def test_a_profile_out_of_range_is_named(tmp_path: Path, path: Any, value: Any) -> None:
    file = tmp_path / "profile.json"
    PROFILE.write(file)
    data = json.loads(file.read_text())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"profile|speed|schema"):
        Profile.read(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        Profile.read(file)


def test_acceptance_in_every_way(tmp_path: Path) -> None:
    rate, length = Acceptance.stated(4, rate=0.5), Acceptance.stated(4, length=3.0)
    assert rate.joint(4) == pytest.approx(length.joint(4))
    assert sum(rate.joint(4)) == pytest.approx(2.0)
    assert Acceptance.stated(4, rates=[0.9, 0.5]).joint(1) == (0.9,)
    file = tmp_path / "table.yaml"
    file.write_text(
        "_about: {x: y}\nmodel:\n  thinking_on: {1: 1.8, 3: 2.8}\n  thinking_off: {1: 1.5}\n"
    )
    table = Acceptance.read(file, 4, "model/thinking_on")
    assert 1 + sum(table.joint(3)) == pytest.approx(2.8)
    assert 1 + sum(table.joint(2)) == pytest.approx(2.3)
    with pytest.raises(ConfigError, match="in \\[0, 3\\]"):
        table.joint(4)
    for name in (None, "model/in"):
        with pytest.raises(ConfigError, match="model/thinking_off"):
            Acceptance.read(file, 4, name)
    file.write_text('{"length": 3.0}')
    assert Acceptance.read(file, 4).joint(4) == length.joint(4)
    folder = ROOT / "benchmarks" / "results"
    measured = Acceptance.read(folder / "gpu_eagle3.json", 4)
    assert measured.joint(4) == pytest.approx((1, 1, 0, 0), abs=0.05)
    last = read(folder / "bench.json").rows[-1]
    rates = [last.values[f"unconditional_at_{i}"].median for i in range(1, 5)]  # type: ignore[union-attr]
    assert Acceptance.read(folder / "bench.json", 4).joint(4) == pytest.approx(rates)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {1: 2.5}", "bonus"),
        ("{rate: 0.5, length: 2.0}", "exactly one of"),
        ("{rates: [0.5, 0.6]}", "cannot rise"),
        ("{length: 9}", r"in \[1, 5\]"),
        ("rows: []", "unconditional_at_1"),
        ("rows:", "unconditional_at_1"),
        ("rows: [1]", "unconditional_at_1"),
        ("rows: {x: 1}", "unconditional_at_1"),
        ("rows: [{values: [1]}]", "unconditional_at_1"),
        ("rows: [{values: {unconditional_at_1: 7.0}}]", r"unconditional_at_1` is 7.0.* in \[0, 1"),
        ("rows: [{values: {unconditional_at_1: {median: x}}}]", "unconditional_at_1` is 'x'"),
        ("rows: [{values: {unconditional_at_1: {mean: 1}}}]", "unconditional_at_1` is None"),
        ("- 1", "the file has none"),
        ("a: [", "JSON or YAML"),
    ],
)
def test_acceptance_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Acceptance.read(file, 4)


def test_shapes_read_what_a_gpu_was_measured_to_read(tmp_path: Path) -> None:
    known = read(ROOT / "benchmarks" / "results" / "gpu_eagle3.json").shapes
    target = Shape.read(SHAPES / "llama-3.1-8b")
    head = Shape.read(SHAPES / "llama-3.1-8b-eagle3", is_head=True)
    assert 2 * target.weights / 1e9 == pytest.approx(known["target_weights_gb"], rel=1e-3)
    assert 2 * head.weights / 1e9 == pytest.approx(known["draft_weights_gb"], rel=1e-3)
    assert 2 * target.kv_numbers == known["kv_bytes_per_token"]
    speculation = SpeculativeConfig(
        method="eagle3", model=str(SHAPES / "llama-3.1-8b-eagle3"), num_speculative_tokens=4
    )
    options = EngineConfig(str(SHAPES / "llama-3.1-8b"), speculation, max_num_seqs=64)
    profile = estimate(options, 4.3e12, 790e12, 1280)
    plain = Outlook(profile, Acceptance.stated(4, length=3.0)).seconds(1, 0, 1152)
    assert 1e3 * plain == pytest.approx(3.52, rel=0.02)  # floor_ms of gpu_plain.json
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        Shape.read(tmp_path)
    (tmp_path / "config.json").write_text('{"num_local_experts": 8}')
    with pytest.raises(UnsupportedModelError, match="mixture"):
        Shape.read(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_shape_of_a_gguf_file_is_its_checkpoint_s(tmp_path: Path, family: str) -> None:
    model = Written(tmp_path, family, "Q8_0")
    assert Shape.read(model.file) == Shape.read(model.folder)
    found, wanted = config_of(model.file), config_of(model.folder)
    for name in ("hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size"):
        assert found[name] == wanted[name], name
    options = EngineConfig(str(model.file), None, max_num_seqs=4)
    profile = estimate(options, 1e12, 1e12, 128)
    assert profile.limits.max_model_len == wanted["max_position_embeddings"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"acceptance_rate": 0.5, "acceptance_length": 2.0}, "acceptance_length"),
        ({"acceptance_name": "a"}, "acceptance_name"),
        ({"bandwidth": 1.0}, "tflops"),
        ({"bandwidth": 1.0, "tflops": 1.0, "calibrate": True}, "calibrate"),
        ({"batch_size": "1,1"}, "batch_size"),
        ({"rate": 0.0}, "rate"),
        ({"output": ("a.png",)}, "output"),
    ],
)
def test_options_that_contradict(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlanOptions(**given)
    assert caught.value.field == field
