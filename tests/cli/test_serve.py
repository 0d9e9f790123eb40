"""`foretoken serve` takes command lines of `vllm serve`: honoured, inert, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from foretoken.cli.actions import Actions
from foretoken.cli.app import app
from foretoken.cli.foreign import foreign_options
from foretoken.config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.foreign import SERVER_OPTIONS, Foreign
from foretoken.serve.options import ServeOptions

THEIRS = Path(__file__).with_name("vllm_serve.txt").read_text(encoding="utf-8").split()
"""Options of `vllm serve`, of its present version and of earlier ones."""
SERVE: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
ENGINE = EngineConfig.__dataclass_fields__


@pytest.fixture
def served() -> Any:
    """Runs the command up to the load of a model: returns its options and output, or its error."""
    found: list[tuple[EngineConfig, ServeOptions]] = []

    class Reads(Actions):
        def serve(self, engine: Mapping[str, Any], options: ServeOptions, say: Any) -> None:
            found.append((EngineConfig.parse(**engine), options))

    def serve(line: str) -> Any:
        done = CliRunner().invoke(app, ["serve", *line.split()], obj=Reads())
        assert done.exit_code == (0 if found else 2), done.output
        return (*found.pop(), done.output) if found else done.output

    return serve


def test_no_option_of_theirs_is_unknown() -> None:
    said = {}
    for name in THEIRS:
        try:
            SERVE.make_context("serve", [f"--{name.replace('-', '_')}=1"])
        except Exception as error:  # a value of another type, or of a flag
            said[name] = str(error)
    assert not [name for name in said if "No such option" in said[name]]


def words(name: str, value: Any) -> list[str]:
    """An option and a value as a command line has them."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    return [f"{option}={value if isinstance(value, str) else json.dumps(value)}"]


@pytest.mark.parametrize(("name", "foreign"), SERVER_OPTIONS.items())
def test_an_option_of_a_server_is_taken_where_it_changes_nothing(
    name: str, foreign: Foreign
) -> None:
    def taken(*line: str) -> tuple[dict[str, Any], list[str]]:
        return foreign_options(SERVE.make_context("serve", ["m", *line]))

    inert = [name] if ... in foreign.harmless else []
    assert taken(f"--{name}=None") == ({}, inert)
    for value in foreign.harmless:
        assert taken(*words(name, "?" if value is ... else value)) == ({}, inert)
    if not inert:
        told = re.escape(f"`{name}` is ['?']: must be left out")
        with pytest.raises(ConfigError, match=told) as caught:
            taken(f'--{name}=["?"]')
        assert caught.value.remedy == foreign.instead


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("m --served-model-name a b --port 9", {"served_model_name": ["a", "b"], "port": 9}),
        ("--model m --served_model_name a b", {"served_model_name": ["a", "b"]}),
        ("--served-model-name a m", {"served_model_name": ["a"]}),
        ("m --api-key k1 k2", {"keys": ("k1", "k2")}),
        ("--model m --api-key k1 k2", {"keys": ("k1", "k2")}),
        ("--api-key k1 --port 9 m --api_key=k2", {"keys": ("k1", "k2"), "port": 9}),
        ("--api-key=k1 m", {"keys": ("k1",)}),
        ("--allow-priority m --no-allow-priority", {"allow_priority": False}),
        ("--no-allow-priority m --allow-priority", {"allow_priority": True}),
        ("--scheduling-policy priority -- m", {"allow_priority": True}),
        ("--served-model-name a b -- m", {"served_model_name": ["a", "b"]}),
        ("--ignore-patterns *.bin m", {"served_model_name": ()}),
        ("--ignore-patterns=*.bin m", {"served_model_name": ()}),
        ("m --root-path /llm", {"root_path": "/llm"}),
        ("m --ssl-keyfile=k --ssl_certfile=c", {"ssl_keyfile": "k", "ssl_certfile": "c"}),
        ("m --uvicorn-log-level warning", {"log_level": "warning"}),
        ("m --disable-uvicorn-access-log --log-level info", {"log_level": "warning"}),
        ("m --scheduling-policy priority", {"allow_priority": True}),
        ("m --shutdown-timeout 5", {"drain_timeout": 5.0}),
        ('m --allowed-origins ["*"] --allowed-methods ["*"]', {"allowed_origins": ["*"]}),
        ("m --gpu-memory-utilization 0.5", {"memory_fraction": 0.5}),
        (
            "m --max-model-len 8k --max-num-batched-tokens=2K",
            {"max_model_len": 8000, "max_num_batched_tokens": 2048},
        ),
        ("m --max-model-len auto --max_num_seqs=-1", {"max_model_len": None}),
        ("m --no-trust-request-chat-template", {"trust_request_chat_template": False}),
    ],
)
def test_what_is_ours_is_honoured(served: Any, line: str, fields: dict[str, Any]) -> None:
    engine, options, said = served(line)
    assert engine.model == "m"
    found = {name: getattr(engine if name in ENGINE else options, name) for name in fields}
    assert found == fields
    assert said in ("", "Without effect here: ignore_patterns.\n")


@pytest.mark.parametrize(
    "line",
    [
        "--enable-auto-tool-choice m",
        "m --tensor-parallel-size 1 -pp=1 --data_parallel_size 1",
        "m --disable-log-requests --enable-log-requests --disable-log-stats",
        "m --max-logprobs 20 --gpu-memory-utilization 0.9 --dtype half --swap-space=4",
        "m --no-enable-prefix-caching --enable-chunked-prefill --no-enforce-eager",
        "m --enable-prefix-caching --enable-chunked-prefill True --no-enable-lora",
        "m --chat-template-content-format auto --no-allow-credentials --middleware []",
        "m --limit-mm-per-prompt {} --quantization None --stream-interval 1",
    ],
)
def test_what_changes_nothing_is_taken(served: Any, line: str) -> None:
    engine, _, said = served(line)
    assert engine.model == "m"
    assert said == ""


def test_what_sets_up_a_feature_that_is_not_here_is_said_to_do_nothing(served: Any) -> None:
    _, _, said = served("--max-lora-rank 64 m -O3 --enable-expert-parallel --ubatch-size 0")
    names = "max_lora_rank, optimization_level, enable_expert_parallel, ubatch_size"
    assert said == f"Without effect here: {names}.\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tensor-parallel-size 2", "`tensor_parallel_size` is 2: must be left out, or 1."),
        ("--enable-sleep-mode", "`enable_sleep_mode` is True: must be left out, or False."),
        ("--enable-lora", "`enable_lora` is True"),
        ("--no-exclude-tools-when-tool-choice-none", "False: must be left out, or True."),
        ("--no-enable-auto-tool-choice", "Write --tool-call-parser none."),
        ("m --lora-modules a=b c=d", "`lora_modules` is ['a=b', 'c=d']"),
        ("--max_num_queued_reqs=9", "Write --max-num-waiting."),
        ("--compilation-config.level 3", "Write --compilation-config and one JSON object."),
        ("--speculative_config.method=ngram", "`speculative_config.method` is 'ngram'"),
        ("--quantization fp8", "`quantization` is 'fp8'"),
        ("--uds /tmp/x", "`uds` is '/tmp/x'"),
        ("--ssl-certfile x", "`ssl_keyfile` is None"),
        ("--ssl-cert-reqs 2 --ssl-certfile x --ssl-keyfile y", "`ssl_ca_certs` is None"),
        ("--root-path llm", "`root_path` is 'llm'"),
        ("--disable-uvicorn-access-log --revision", "'--revision' requires an argument"),
        ("m --no-api-key", "No such option: --no-api-key"),
        ("m --no-port", "No such option: --no-port"),
        ("m --no-max-model-len=5", "No such option: --no-max-model-len"),
        ("m --no-enforce-eager=x", "No such option: --no-enforce-eager"),
        ("m --no-enable-lora=x", "No such option: --no-enable-lora"),
        ("m --no-tensor-parallel-size 2", "No such option: --no-tensor-parallel-size"),
        ("m --api-key=k stray", "(stray)"),
        ("--frobnicate", "No such option: --frobnicate"),
        ("--frob.nicate 3", "No such option: --frob.nicate"),
    ],
)
def test_what_would_change_something_is_refused_by_name(served: Any, line: str, said: str) -> None:
    assert said in " ".join(served(line).split())


@pytest.mark.parametrize("line", ["k1 k2secret", "k1 m --model n", "k1 k2 --port 9 -- m"])
def test_a_key_is_never_taken_for_the_model(served: Any, line: str) -> None:
    said = served(f"--api-key {line}")
    assert "name the model first, or repeat --api-key" in " ".join(said.split())
    assert "k2" not in said


def test_none_of_it_is_in_the_help() -> None:
    said = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "--root-path" in said
    for name in ("tensor-parallel", "enable-auto-tool-choice", "max-lora-rank", "uvicorn"):
        assert name not in said
