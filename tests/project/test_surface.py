"""Public names are pinned: a change here is a change for users and belongs in CHANGELOG.md."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from dataclasses import fields

import pytest

import foretoken
from tests.project.source import ROOT, modules

PUBLIC = (
    "LLM AbsentError AsyncEngine CapacityError CheckpointError CompletionDelta CompletionOutput "
    "ConfigError EngineBrokenError EngineConfig EngineMemoryError ForetokenError IntegrityError "
    "Logprob NonFiniteLogitsError OverloadedError ProcessingError RequestDelta RequestError "
    "RequestOutput RequestOutputKind SamplingParams SpeculativeConfig StepError "
    "StructuredOutputsParams TextPrompt TokensPrompt UnsupportedModelError UsageError __version__"
).split()
OPS = (
    "BACKENDS DRAFT RESIDUAL TARGET AttentionBatch AttentionOptions Backend "
    "DraftBlock DraftCache DraftRound Edits Evidence ForwardOutput LoadedStack Logprobs Noise "
    "RoundStack Rows Rule SlotParams Stack Stream UnfitError Verdict VerifyBatch draft_cache "
    "get_backend unavailable"
).split()
LLM_METHODS = {
    "get_tokenizer": "", "get_default_sampling_params": "", "reset_prefix_cache": "others",
    "generate": "prompts sampling_params use_tqdm on_error on_interrupt others",
    "chat": "messages sampling_params use_tqdm on_error on_interrupt template",
    "stream": "prompt sampling_params on_interrupt", "close": "",
}  # fmt: skip


def test_public_names() -> None:
    assert sorted(foretoken.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(foretoken, name) is not None


def test_names_for_those_who_bring_drafts_or_rules_of_their_own() -> None:
    from foretoken import ops, sampling

    assert ops.__all__ == OPS
    assert sampling.__all__ == ["conditional_rates", "joint_rates"]


@pytest.mark.parametrize(
    "cls", ["EngineConfig", "SpeculativeConfig", "SamplingParams", "ChatOptions"]
)
def test_fields_that_users_type_are_those_of_the_changelog(cls: str) -> None:
    from foretoken.models.chat import CHAT_OPTIONS

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^- `{cls}`: ([^.]*)\.$", changelog, re.MULTILINE)
    assert found
    names = (
        CHAT_OPTIONS if cls == "ChatOptions" else [f.name for f in fields(getattr(foretoken, cls))]
    )
    assert re.findall(r"`(\w+)`", found[1]) == list(names)


def test_methods_that_users_call() -> None:
    methods = {name: f for name, f in vars(foretoken.LLM).items() if inspect.isfunction(f)}
    public = {name: f for name, f in methods.items() if not name.startswith("_")}
    assert public.keys() == LLM_METHODS.keys()
    for name, function in public.items():
        _, *parameters = inspect.signature(function).parameters
        assert parameters == LLM_METHODS[name].split()


def test_rules_that_users_may_name_are_those_there_are() -> None:
    from foretoken.config import REJECTION_SAMPLE_METHODS
    from foretoken.ops.rules import RULES

    assert tuple(rule.name.lower() for rule in RULES) == REJECTION_SAMPLE_METHODS


def test_errors_share_one_root() -> None:
    from foretoken import errors

    raised = [
        v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__
    ]
    assert all(issubclass(error, foretoken.ForetokenError) for error in raised)
    public = {error.__name__ for error in raised if not error.__name__.startswith("_")}
    assert public <= set(foretoken.__all__)


def test_version_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {foretoken.__version__}" in changelog


def dependencies(extra: str = "") -> list[str]:
    """Names of the declared dependencies of the core, or of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return sorted(re.split(r"[<>=!~\[; ]", d)[0] for d in listed)


@pytest.mark.parametrize("extra", ["", "serve"])
def test_what_is_imported_is_a_declared_dependency(extra: str) -> None:
    """Except `triton`: a CUDA build of torch brings it, and only the backend `triton` needs it."""
    imported = set()
    for module in modules().values():
        if module.name.startswith("foretoken.serve") != bool(extra):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"foretoken", "triton"}
    assert ({"fastapi", "uvicorn"} if extra else {"torch", "huggingface_hub"}) <= foreign
    # fastapi brings those that it is made of, uvicorn[standard] its parser.
    brought = {"starlette", "pydantic", "pydantic_core", "httptools"} if extra else set()
    # The core asks for llguidance when a request has a grammar.
    declared = {*dependencies(), *(dependencies("serve") if extra else ["llguidance"])}
    declared |= {"ray"} if extra else set()  # only for replicas: the extra `ray`
    imported_as = {"yaml": "pyyaml"}
    names = {imported_as.get(name, name).replace("_", "-") for name in foreign - brought}
    assert names <= declared


def test_core_dependencies_are_few() -> None:
    names = dependencies()
    assert (
        names
        == (
            "huggingface-hub jinja2 numpy pyyaml rich safetensors tokenizers torch transformers "
            "typer"
        ).split()
    )
    reasons = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in reasons for name in [*names, *dependencies("serve")])
