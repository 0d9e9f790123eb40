"""`foretoken plan --fleet`: what several replicas serve, and how many a rate takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.plan.fleet import Replicas, read_model, replicas_of, sized_for
from foretoken.lab.plan.options import PlanOptions
from foretoken.serve.fleet.config import IMPORT_PATH
from tests.lab.profiles import PROFILE

STEPS = 64.0


def fleet_of(tmp_path: Path, *models: dict[str, Any]) -> Path:
    apps = [{"import_path": IMPORT_PATH, "args": {"models": [*models]}}]
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"applications": apps}), encoding="utf-8")
    return path


def replicas(cores: int | None, stream_s: float = 1e-4, threads: int = 1) -> Replicas:
    return Replicas("m", 2, 4, 0, threads, cores, stream_s)


def test_replicas_with_cores_of_their_own_add_up() -> None:
    assert [replicas(None).capacity(12.5, STEPS, n) for n in (1, 2, 7)] == [12.5, 25, 87.5]
    assert replicas(None).needed(12.5, STEPS, 26) == 3


def test_a_step_of_a_stream_is_waited_for_in_the_replica_and_paid_again_in_front() -> None:
    # 20 ms in the engine, 10 ms of messages there, 10 ms in front: 40 ms of two cores.
    shared = replicas(2, stream_s=10e-3 / STEPS)
    assert shared.capacity(50, STEPS, 1) == pytest.approx(1 / 30e-3)
    assert shared.capacity(50, STEPS, 2) == pytest.approx(2 / 40e-3)
    assert shared.capacity(50, STEPS, 3) == pytest.approx(2 / 40e-3)


def test_cores_bound_what_any_number_serves() -> None:
    assert replicas(2).needed(50, STEPS, 1e3) is None
    assert replicas(None).needed(0, STEPS, 1) is None
    told = replicas(2).sentence(None, PlanOptions(rate=1e3, fleet="f"), 0.0)
    assert told.startswith("No number of replicas of m serves 1000 requests/s")
    assert "on 2 cores" in told


@given(
    one=st.floats(0.1, 1e3), rate=st.floats(0.1, 1e4), cores=st.none() | st.integers(1, 64),
    stream=st.floats(0, 1e-3), threads=st.integers(1, 4),
)  # fmt: skip
def test_the_number_that_is_needed_is_the_fewest_that_serve(
    one: float, rate: float, cores: int | None, stream: float, threads: int
) -> None:
    asked = replicas(cores, stream, threads)
    found = asked.needed(one, STEPS, rate)
    if found is None:
        assert asked.capacity(one, STEPS, 10_000) < rate
    else:
        assert asked.capacity(one, STEPS, found) >= rate * (1 - 1e-9)
        assert found == 1 or asked.capacity(one, STEPS, found - 1) < rate


def test_what_a_file_says_of_its_models(tmp_path: Path) -> None:
    auto = {"method": "draft_model", "num_speculative_tokens": "auto"}
    path = fleet_of(
        tmp_path,
        {"engine": {"model": "tiny-python", "max_num_seqs": 24}, "replicas": 2, "replica_cpus": 3},
        {
            "engine": {"model": "tiny-python", "threads": 2, "speculative_config": auto},
            "served_model_name": ["a", "b"], "replicas": 1, "max_replicas": 5,
        },
    )  # fmt: skip
    options = PlanOptions(fleet=str(path), rate=1.0, cores=8, stream_ms=0.5)
    first = read_model(options)
    assert replicas_of(first, options) == Replicas("tiny-python", 2, 2, 0, 3, 8, 0.5e-3)
    assert sized_for(first, options).batch_sizes == (1, 4, 16, 24)
    second = read_model(PlanOptions(fleet=str(path), rate=1.0, fleet_model="b"))
    assert replicas_of(second, options) == Replicas("a", 1, 5, None, 2, 8, 0.5e-3)
    asked = PlanOptions(fleet=str(path), rate=1.0, batch_size="2")
    assert sized_for(first, asked).batch_sizes == (2,)
    with pytest.raises(ConfigError, match="one of tiny-python, a, b"):
        read_model(PlanOptions(fleet=str(path), rate=1.0, fleet_model="c"))


def plan(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_the_command_says_whether_the_replicas_of_a_file_are_enough(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    speculation = {"model": "a-draft", "num_speculative_tokens": 4}
    engine = {"model": PROFILE.model, "max_num_seqs": 8, "speculative_config": speculation}
    path = fleet_of(tmp_path, {"engine": engine, "replicas": 3})
    words = ["--fleet", path, "--profile", tmp_path / "p.json", "--json", "--input-len", 64]
    found = json.loads(plan(*words, "--rate", 1).stdout)
    (one,) = (row for row in found["rows"] if row["case"] == "capacity, K=4")
    served = [row for row in found["rows"] if row["labels"]["kind"] == "replicas"]
    expected = [n * one["values"]["capacity"] for n in (1, 2, 3)]
    assert [row["values"]["capacity"] for row in served] == pytest.approx(expected)
    assert "take 1 replica of a-target" in found["notes"][0]
    many = json.loads(plan(*words, "--rate", 4 * expected[0]).stdout)
    assert "take 4 replicas" in many["notes"][0]
    assert "3, which is too few" in many["notes"][0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fleet", "f.yaml"], "`rate` is None"),
        (["--cores", "2"], "given with `fleet`"),
        (["--fleet-model", "a"], "given with `fleet`"),
        (["--fleet", "f.yaml", "--rate", "1", "--stream-ms", "1"], "given with `cores`"),
        (["--fleet", "f.yaml", "--rate", "1", "--max-num-seqs", "4"], "the file has it"),
        (["tiny-python", "--fleet", "f.yaml", "--rate", "1"], "the file has it"),
        (["--fleet", "f.yaml", "--rate", "1"], "a YAML file"),
    ],
)
def test_what_contradicts_a_fleet_is_refused(words: list[str], told: str) -> None:
    result = plan(*words)
    assert result.exit_code == 2
    assert told in result.stderr
