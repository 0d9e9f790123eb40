"""Options of a fleet, the resources that its replicas need, and whether a cluster has them."""

from __future__ import annotations

import sys
from math import floor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from foretoken import __version__
from foretoken.cli.app import app
from foretoken.config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.models import resolve_checkpoint
from foretoken.serve.fleet.config import (
    IMPORT_PATH,
    PROXY_OPTIONS,
    Fleet,
    FleetModel,
    ReplicaOptions,
    fleet_model,
)
from foretoken.serve.fleet.needs import Needs, check_cluster, compute_needs, cores_per_replica
from foretoken.serve.fleet.replica import Replica, check_version, replica_seed
from foretoken.serve.options import MAX_NUM_WAITING, ServeOptions
from tests.project.source import ROOT
from tests.serve.test_front import SMALL, Local, fronted, replica

GIB = 2**30
TINY = {"engine": {"model": "tiny-python"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SYNTHETIC = {
    **NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.5,
}  # fmt: skip
WRONG = {"method": "ngram", "prompt_lookup_min": 0}
SPECULATION = "engine.speculative_config"


def model(engine: dict[str, Any] | None = None, **scale: Any) -> FleetModel:
    return fleet_model(
        {"model": "tiny-python", **(engine or {})}, (), ReplicaOptions(replicas=1, **scale)
    )


def refused(args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Fleet.parse(args)
    assert str(caught.value).startswith(f"`{caught.value.field}`")
    return caught.value


# A file


def test_all_that_a_file_says_is_in_the_fleet() -> None:
    large = {
        "engine": {
            "model": "org/large", "device": "cuda", "dtype": "bfloat16", "max_num_waiting": 7,
            "speculative_config": NGRAM,
        },
        "served_model_name": ["large", "large-2026"], "replicas": 2, "max_replicas": 6,
        "target_requests": 3.5, "replica_cpus": 4, "replica_gpus": 0.5, "replica_memory_gib": 20,
    }  # fmt: skip
    server = {"api_key": ["k1", "k2"], "drain_timeout": 5, "allowed_origins": ["https://a.org"]}
    fleet = Fleet.parse({
        "models": [large, {**TINY, "served_model_name": "small"}, {"engine": {"model": "a/b:c"}}],
        "server": server, "grows": True,
    })  # fmt: skip
    first, second, third = fleet.models
    assert first.names == ("large", "large-2026")
    assert first.scale == ReplicaOptions(2, 6, 3.5, 4, 0.5, 20)
    assert (first.engine.device, first.engine.dtype) == ("cuda", "bfloat16")
    assert first.engine.max_num_waiting == 7
    assert first.engine.num_drafts == 2
    assert (second.names, second.deployment) == (("small",), "small")
    assert second.scale == ReplicaOptions(replicas=1)
    assert second.engine.max_num_waiting == MAX_NUM_WAITING
    assert (third.names, third.deployment) == (("a/b:c",), "a-b-c")
    assert fleet.grows
    assert fleet.server.keys == ("k1", "k2")
    assert fleet.server.drain_timeout == 5
    assert fleet.server.allowed_origins == ("https://a.org",)
    assert not fleet.server.checks_host, "the host's name is unknown behind proxies"


def test_one_model_is_enough() -> None:
    fleet = Fleet.parse({"models": [TINY]})
    (only,) = fleet.models
    assert (only.names, only.scale.replicas, fleet.grows) == (("tiny-python",), 1, False)
    assert fleet == Fleet.parse({"models": [TINY], "server": {}, "grows": False})


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (None, "args"),
        ([TINY], "args"),
        ({1: 2}, "args"),
        ({"modles": [TINY]}, "args.modles"),
        ({}, "models"),
        ({"models": TINY}, "models"),
        ({"models": []}, "models"),
        ({"models": [None]}, "models[0]"),
        ({"models": [TINY, "tiny-python"]}, "models[1]"),
        ({"models": [TINY], "grows": 1}, "grows"),
        ({"models": [TINY], "grows": "false"}, "grows"),
        ({"models": [TINY, TINY]}, "models[1]"),
        ({"models": [{**TINY, "served_model_name": ["a", "b"]},
                     {**TINY, "served_model_name": ["c", "b"]}]}, "models[1]"),
        ({"models": [{**TINY, "served_model_name": "a/b"},
                     {**TINY, "served_model_name": "a:b"}]}, "models[1]"),
    ],
)  # fmt: skip
def test_what_is_no_fleet_is_refused_by_its_place(args: Any, field: str) -> None:
    assert refused(args).field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"replica": 2}, "replica"),
        ({"engine": None}, "engine"),
        ({"engine": "tiny-python"}, "engine"),
        ({"engine": {}}, "engine.model"),
        ({"engine": {"model": 5}}, "engine.model"),
        ({"engine": {"model": "x", "dtypes": "auto"}}, "engine.dtypes"),
        ({"engine": {"model": "x", "dtype": "int8"}}, "engine.dtype"),
        ({"engine": {"model": "x", "seed": -1}}, "engine.seed"),
        ({"engine": {"model": "x", "device": "tpu"}}, "engine.device"),
        ({"engine": {"model": "x", "max_num_seqs": 0}}, "engine.max_num_seqs"),
        ({"engine": {"model": "x", "enforce_eager": "no"}}, "engine.enforce_eager"),
        ({"engine": {"model": "x", "speculative_config": [1]}}, SPECULATION),
        ({"engine": {"model": "x", "speculative_config": {**NGRAM, "nope": 1}}},
         f"{SPECULATION}.nope"),
        ({"engine": {"model": "x", "speculative_config": {**NGRAM, "num_speculative_tokens": 0}}},
         f"{SPECULATION}.num_speculative_tokens"),
        ({"engine": {"model": "x", "speculative_config": {"drafters": [WRONG]}}},
         f"{SPECULATION}.drafters[0].prompt_lookup_min"),
        ({"engine": {"model": "x", "speculative_config": SYNTHETIC}},
         f"{SPECULATION}.rejection_sample_method"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"served_model_name": ["a", ""]}, "served_model_name"),
        ({"served_model_name": [3]}, "served_model_name"),
        ({"served_model_name": {"a": 1}}, "served_model_name"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1.5}, "replicas"),
        ({"replicas": True}, "replicas"),
        ({"replicas": "2"}, "replicas"),
        ({"replicas": 2, "max_replicas": 1}, "max_replicas"),
        ({"target_requests": 4}, "target_requests"),
        ({"replica_gpus": 2}, "replica_gpus"),
        ({"replica_cpus": -1}, "replica_cpus"),
        ({"replica_memory_gib": 0}, "replica_memory_gib"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_model_is_said_by_its_place(given: Any, field: str) -> None:
    assert refused({"models": [TINY, {**TINY, **given}]}).field == f"models[1].{field}"


def test_a_slip_of_the_pen_is_mended() -> None:
    assert "`replicas`" in refused({"models": [{**TINY, "replica": 2}]}).remedy
    assert "`drain_timeout`" in refused({"models": [TINY], "server": {"drain_time": 2}}).remedy
    theirs = refused({"models": [{"engine": {"model": "x", "gpu_memory_utilization": 0.5}}]})
    assert "`memory_fraction`" in theirs.remedy


@pytest.mark.parametrize(
    ("server", "field"),
    [
        ("x", "server"),
        ([], "server"),
        (False, "server"),
        ({"nope": 1}, "server.nope"),
        ({"served_model_name": ["x"]}, "server.served_model_name"),
        ({"drain_timeout": -1}, "server.drain_timeout"),
        ({"drain_timeout": "20"}, "server.drain_timeout"),
        ({"queue_timeout": 0}, "server.queue_timeout"),
        ({"request_timeout": float("nan")}, "server.request_timeout"),
        ({"max_body_bytes": 0}, "server.max_body_bytes"),
        ({"io_timeout": 0}, "server.io_timeout"),
        ({"max_samples": True}, "server.max_samples"),
        ({"max_samples": 0}, "server.max_samples"),
        ({"log_level": "loud"}, "server.log_level"),
        ({"tool_call_parser": "xml"}, "server.tool_call_parser"),
        ({"chat_template": 5}, "server.chat_template"),
        ({"api_key": ""}, "server.api_key"),
        ({"api_key": ["a", ""]}, "server.api_key"),
        ({"api_key": 5}, "server.api_key"),
        ({"api_key": [5]}, "server.api_key"),
        ({"api_key": []}, "server.api_key"),  # whoever writes it wants a key to be asked for
        ({"allow_synthetic": "no"}, "server.allow_synthetic"),
        ({"trust_request_chat_template": "false"}, "server.trust_request_chat_template"),
        ({"allow_priority": 1}, "server.allow_priority"),
        ({"allowed_origins": "https://a.org"}, "server.allowed_origins"),  # or its letters would be
        ({"allowed_origins": [5]}, "server.allowed_origins"),
    ],
)
def test_what_is_wrong_with_the_server_is_said_by_its_place(server: Any, field: str) -> None:
    assert refused({"models": [TINY], "server": server}).field == field


@pytest.mark.parametrize("name", sorted(PROXY_OPTIONS))
def test_what_proxies_do_is_theirs_to_be_told(name: str) -> None:
    error = refused({"models": [TINY], "server": {name: "x"}})
    assert error.field == f"server.{name}"
    assert "roxies" in str(error)
    assert PROXY_OPTIONS[name] in error.remedy


def test_no_key_is_repeated_in_an_error() -> None:
    told = str(refused({"models": [TINY], "server": {"api_key": "geheim", "drain_timeout": -1}}))
    assert "geheim" not in told


def test_synthetic_texts_are_served_if_that_is_allowed() -> None:
    synthetic = {"engine": {"model": "x", "speculative_config": SYNTHETIC}}
    assert Fleet.parse({"models": [synthetic], "server": {"allow_synthetic": True}}).models


def application(**args: Any) -> dict[str, Any]:
    return {"name": "f", "import_path": IMPORT_PATH, "args": {"models": [TINY], **args}}


def written(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value), encoding="utf-8")
    return path


def test_a_file_is_read_like_its_arguments(tmp_path: Path) -> None:
    second = {"engine": {"model": "ö/x", "speculative_config": NGRAM}, "replicas": 2}
    args = {"models": [TINY, second], "server": {"api_key": "k"}, "grows": True}
    others = [{"import_path": "other:app", "args": {"models": 5}}, "nonsense"]
    file = {"http_options": {"port": 1}, "applications": [*others, application(**args)]}
    assert Fleet.read(written(tmp_path, file)) == Fleet.parse(args)


@pytest.mark.parametrize(
    "text",
    [
        "applications: [",
        "applications:\n\t- x",
        "!!python/object/apply:os.system ['true']",
        "\x00",
        "",
        "5",
        "- a",
        "applications:",
        "applications: 5",
        "applications: text",
        "applications: {a: 1}",
        yaml.safe_dump({"applications": [{"import_path": "other:app"}]}),
        yaml.safe_dump({"applications": [application(), application()]}),
        yaml.safe_dump(application()),
    ],
)
def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=r"import_path|a YAML file") as caught:
        Fleet.read(path)
    assert (caught.value.field, caught.value.value) == ("fleet", str(path))


def test_how_many_applications_there_are_is_said(tmp_path: Path) -> None:
    for count in (0, 2):
        path = written(tmp_path, {"applications": [application()] * count})
        with pytest.raises(ConfigError, match=f"It has {count}"):
            Fleet.read(path)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.yaml", ".", "bytes"):
        with pytest.raises(ConfigError, match="a YAML file"):
            Fleet.read(tmp_path / name)


def test_an_application_without_arguments_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"applications": [{"import_path": IMPORT_PATH}]})
    with pytest.raises(ConfigError, match="`args`"):
        Fleet.read(path)


# Options of replicas


@pytest.mark.parametrize(
    ("field", "least", "most", "wrong"),
    [
        ("replicas", 1, 10_000, [0, -1, 10_001, 1.0, True, "2"]),
        ("max_replicas", 2, 10_000, [0, 1, 10_001, 2.5, True, "3"]),
        ("target_requests", 0.01, 1e6, [0, 0.009, 1.1e6, float("nan"), float("inf"), True, "4"]),
        ("replica_cpus", 0, 4096, [-0.1, 4096.5, float("nan"), True, "1"]),
        ("replica_gpus", 0, 1, [-0.1, 1.01, 2, 65, float("nan"), True, "1"]),
        ("replica_memory_gib", 0.001, 2**20, [0, 0.0009, 2**20 + 1, float("nan"), False, "1"]),
    ],
)
def test_bounds_of_replicas(field: str, least: float, most: float, wrong: list[Any]) -> None:
    base: dict[str, Any] = {"replicas": 2}
    if field == "target_requests":
        base["max_replicas"] = 4
    for value in (least, most):
        assert getattr(ReplicaOptions(**{**base, field: value}), field) == value
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            ReplicaOptions(**{**base, field: value})
        assert caught.value.field == field, value


@pytest.mark.parametrize(
    "name",
    ["max_replicas", "target_requests", "replica_cpus", "replica_gpus", "replica_memory_gib"],
)
def test_options_of_replicas_want_replicas(name: str) -> None:
    assert ReplicaOptions().replicas is None
    with pytest.raises(ConfigError, match="given with `replicas`") as caught:
        ReplicaOptions(**{name: 1})
    assert caught.value.field == name
    with pytest.raises(ConfigError, match="given with"):
        ReplicaOptions(replicas=2, target_requests=3)


# What a replica needs


def weights(name: str, size: int = 4) -> int:
    file = resolve_checkpoint(name) / "model.safetensors"
    with safe_open(file, "pt") as tensors:
        return sum(size * tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118


def test_memory_is_that_of_weights_and_cache_and_process() -> None:
    tiny = weights("tiny-python")
    assert tiny > 2**20
    needs = compute_needs(model(), has_gpus=False)
    assert needs == Needs(cpus=1, gpus=0, memory=tiny + 2 * GIB)
    assert needs.resources == {"CPU": 1, "memory": tiny + 2 * GIB}
    assert compute_needs(model({"kv_cache_gib": 3}), has_gpus=False).memory == tiny + 4.5 * GIB
    half = compute_needs(model({"dtype": "bfloat16"}), has_gpus=False).memory
    assert half == weights("tiny-python", 2) + 2 * GIB


@pytest.mark.parametrize("among", [False, True])
def test_memory_has_room_for_every_draft_model(among: bool) -> None:
    draft: dict[str, Any] = {"method": "draft_model", "model": "tiny-python-draft"}
    if among:
        draft = {"drafters": [draft, {"method": "prediction"}], "method": "draft_model"}
    needs = compute_needs(model({"speculative_config": draft}), has_gpus=False)
    both = weights("tiny-python") + weights("tiny-python-draft")
    assert needs.memory == both + 2 * GIB


def test_what_is_stated_is_what_is_needed() -> None:
    stated = model({"threads": 3}, replica_memory_gib=0.75, replica_cpus=0.5)
    assert compute_needs(stated, has_gpus=False) == Needs(0.5, 0, int(0.75 * GIB))
    assert compute_needs(model({"threads": 3}), has_gpus=False).cpus == 3


def test_weights_that_are_not_here_yet_are_not_counted() -> None:
    for engine in ({"model": "org/absent"}, {"load_format": "dummy"}):
        assert compute_needs(model(engine), has_gpus=False).memory == 2 * GIB


@pytest.mark.parametrize(
    ("fraction", "part"), [(1, 1), (0.9, 1), (0.51, 1), (0.5, 0.5), (0.45, 0.5), (0.3, 1 / 3)]
)
def test_replicas_share_a_gpu_as_their_memory_does(fraction: float, part: float) -> None:
    engine = {"memory_fraction": fraction}
    needs = compute_needs(model(engine), has_gpus=True)
    assert needs.gpus == pytest.approx(part)
    assert needs.memory == 1.5 * GIB, "weights and cache are the GPU's"
    assert compute_needs(model(engine), has_gpus=False).gpus == 0
    assert compute_needs(model({**engine, "device": "cuda"}), has_gpus=False).gpus == needs.gpus
    assert compute_needs(model({**engine, "device": "cpu"}), has_gpus=True).gpus == 0


@pytest.mark.parametrize("fraction", [0.2, 0.25, 0.26, 0.9])
def test_a_part_of_a_gpu_has_the_memory_that_its_engine_takes(fraction: float) -> None:
    stated = model({"memory_fraction": fraction, "device": "cuda"}, replica_gpus=0.25)
    if fraction <= 0.25:
        assert compute_needs(stated, has_gpus=True).gpus == 0.25
    else:
        with pytest.raises(ConfigError, match="lower `memory_fraction`"):
            compute_needs(stated, has_gpus=True)


def test_which_of_a_machines_gpus_is_not_for_options_to_say() -> None:
    with pytest.raises(ConfigError, match="Ray chooses the GPU of each replica"):
        compute_needs(model({"device": "cuda:1"}), has_gpus=True)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 1), ("cpu", 0.5), ("cuda", 0)])
def test_a_device_without_its_part_is_refused(device: str, gpus: float) -> None:
    for has_gpus in (False, True):
        with pytest.raises(ConfigError) as caught:
            compute_needs(model({"device": device}, replica_gpus=gpus), has_gpus=has_gpus)
        assert caught.value.field == "replica_gpus"


def test_who_asks_for_no_gpu_gets_none() -> None:
    needs = compute_needs(model(replica_gpus=0), has_gpus=True)
    assert (needs.gpus, "GPU" in needs.resources) == (0, False)
    assert compute_needs(model(replica_gpus=1), has_gpus=False).gpus == 1, "the cluster may grow"


def test_needs_are_described_by_what_they_have() -> None:
    assert Needs(2, 0.5, int(1.25 * GIB)).described() == "2 CPU, 0.5 GPU, 1.2 GiB of memory"
    assert Needs(1, 0, 0).described() == "1 CPU"
    assert [Needs(n, 0, 0).threads for n in (0, 0.5, 1, 3.9)] == [1, 1, 1, 3]


def test_cores_are_shared_equally() -> None:
    found = [cores_per_replica(*each) for each in ((8, 1), (8, 3), (8, 8), (2, 4), (1, 3))]
    assert found == [8, 2, 1, 0.5, 0.33]


@given(st.integers(1, 256), st.integers(1, 64))
def test_equal_parts_fit_together(cores: int, replicas: int) -> None:
    part = cores_per_replica(cores, replicas)
    assert 0 < part * replicas <= cores
    assert part == floor(part) or part < 1


# Whether a cluster has it


def machine(cpus: float, gib: float = 64, gpus: float = 0) -> dict[str, float]:
    return {"CPU": cpus, "memory": gib * GIB, "GPU": gpus, "node:10.0.0.1": 1.0}


def too_much(needs: dict[str, tuple[int, Needs]], *nodes: dict[str, float]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_cluster(needs, nodes)
    assert caught.value.field == "replicas"
    return caught.value


def test_what_fits_exactly_is_taken() -> None:
    nodes = [machine(4, 8, 1), machine(2, 4)]
    before = [dict(node) for node in nodes]
    check_cluster({"a": (3, Needs(2, 0, 4 * GIB))}, nodes)
    check_cluster({"a": (5, Needs(0.6, 0, 0))}, [machine(3)])  # 3 - 4 * 0.6 is less than 0.6
    check_cluster({"a": (3, Needs(1, 1 / 3, 0)), "b": (2, Needs(1, 0, 4 * GIB))}, nodes)
    check_cluster({}, [])
    check_cluster({"a": (9, Needs(0, 0, 0))}, [machine(0, 0)])
    assert nodes == before


@pytest.mark.parametrize(
    ("each", "count", "fit", "short"),
    [
        (Needs(2, 0, 0), 4, 3, "too little CPU"),
        (Needs(0, 0.5, 0), 3, 2, "too little GPU"),
        (Needs(0, 0, 5 * GIB), 3, 1, "too little memory"),
        (Needs(2, 0.5, 0), 4, 2, "too little CPU and GPU"),
        (Needs(5, 0, 0), 1, 0, "no machine has so much left"),
        (Needs(3, 0, 0), 2, 1, "no machine has so much left"),
        (Needs(1, 0, 7 * GIB), 2, 1, "too little memory"),
    ],
)
def test_what_does_not_fit_is_said(each: Needs, count: int, fit: int, short: str) -> None:
    error = too_much({"big": (count, each)}, machine(4, 8, 1), machine(2, 4))
    assert error.bound == f"at most {fit}: {short}"
    assert f"A replica of big needs {each.described()}" in error.remedy
    assert "2 machines have 6 CPU, 1 GPU, 12.0 GiB" in error.remedy
    assert error.value == count


def test_models_share_what_is_left() -> None:
    each = Needs(2, 0, 0)
    check_cluster({"a": (1, each), "b": (1, each)}, [machine(4)])
    error = too_much({"a": (1, each), "b": (2, each)}, machine(4))
    assert error.bound.startswith("at most 1, with 2 models in all: ")
    assert "A replica of b" in error.remedy
    error = too_much({"a": (3, each), "b": (1, each)}, machine(4))
    assert "A replica of a" in error.remedy


AMOUNTS = st.sampled_from([0, 0.1, 0.25, 1 / 3, 0.5, 1, 1.5, 2, 3, 8])
NEEDS = st.builds(Needs, AMOUNTS, st.sampled_from([0, 0.1, 1 / 3, 0.5, 1]), st.integers(0, 9))
NODES = st.lists(
    st.fixed_dictionaries(
        {"CPU": AMOUNTS}, optional={"GPU": st.integers(0, 4), "memory": st.integers(0, 20)}
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.integers(1, 6), NEEDS), max_size=3), NODES)
def test_no_more_is_taken_than_there_is(
    wanted: list[tuple[int, Needs]], nodes: list[dict[str, float]]
) -> None:
    try:
        check_cluster({str(i): each for i, each in enumerate(wanted)}, nodes)
    except ConfigError:
        return
    for name in ("CPU", "GPU", "memory"):
        total = sum(count * each.resources.get(name, 0.0) for count, each in wanted)
        assert total <= sum(node.get(name, 0.0) for node in nodes) + 1e-6


@given(st.integers(1, 12), NEEDS, NODES)
def test_one_model_fits_where_its_replicas_fit_machine_by_machine(
    count: int, each: Needs, nodes: list[dict[str, float]]
) -> None:
    named = each.resources.items()
    rooms = [
        min((floor(node.get(name, 0) / value + 1e-6) for name, value in named), default=count)
        for node in nodes
    ]
    if sum(rooms) >= count:
        check_cluster({"a": (count, each)}, nodes)
    else:
        assert too_much({"a": (count, each)}, *nodes).bound.startswith(f"at most {sum(rooms)}: ")


# What replicas of one fleet do not share, and what they must


def test_a_seed_is_a_replicas_own() -> None:
    seeds = {
        replica_seed(seed, name) for seed in (0, 1, 11, 2**64 - 1) for name in ("a", "b", "1/a")
    }
    assert len(seeds) == 12
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert replica_seed(7, "a") == replica_seed(7, "a")


def test_replicas_of_one_seed_draw_apart(target: Path) -> None:
    def first(name: str, **given: Any) -> str:
        """The text of a new replica's first request."""
        with replica(target, name, SMALL, seed=3) as made, fronted(Local(["small"], made)) as found:
            body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "temperature": 1}
            answer = found.http.post("/v1/completions", json={**body, **given})
            return str(answer.json()["choices"][0]["text"])

    assert first("a") == first("a") != first("b"), "by the name"
    assert first("a", seed=5) == first("b", seed=5)
    assert first("a", temperature=0) == first("b", temperature=0)


def test_a_machine_with_another_version_is_named() -> None:
    check_version(__version__)
    config = EngineConfig.parse(model="no-such-model")
    served = ServeOptions()
    for fails in (lambda: check_version("0.0.1"), lambda: Replica(config, served, "0.0.1", "a")):
        with pytest.raises(ConfigError) as caught:
            fails()
        assert "0.0.1" in str(caught.value)
        assert repr(__version__) in str(caught.value)


@pytest.mark.parametrize(("name", "models"), [("fleet", 2), ("rayservice", 1)])
def test_the_files_of_the_documents_are_read(name: str, models: int, tmp_path: Path) -> None:
    path = ROOT / "docs" / "deploy" / f"{name}.yaml"
    if name == "rayservice":  # its text within the resource's
        inner = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["serveConfigV2"]
        path = tmp_path / "inner.yaml"
        path.write_text(inner, encoding="utf-8")
    fleet = Fleet.read(path)
    assert len(fleet.models) == models
    assert fleet.models[0].scale.max_replicas == 4
    assert fleet.grows == (name == "rayservice")
    assert not fleet.server.keys  # a key is no text of a file that others read


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, loaded)
    for name in ("deployment", "fleet.command", "fleet.router"):
        monkeypatch.delitem(sys.modules, f"foretoken.serve.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["serve", "tiny-python", "--replicas", "2", "--ray-address", "auto"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2
    assert "`foretoken[ray]: ray` is None: must be installed for replicas" in ended.stderr
    assert "pip install 'foretoken[ray]'" in ended.stderr
