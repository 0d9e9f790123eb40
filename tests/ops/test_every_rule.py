"""Every backend states every rule and refuses unknown ones; the recipe names each place.

Triton's kernels are interpreted, in a process of their own: this file as a program.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.config import LOSSLESS_METHODS
from foretoken.lab.laws import joint
from foretoken.ops import BACKENDS, Backend, Rule, VerifyBatch, get_backend, rules
from foretoken.ops.backends.reference import _rules as papers
from tests.support.cases import drafts_of, make_params
from tests.support.interpreted import OFF
from tests.support.interpreter import interpret
from tests.support.kernels import require_kernels
from tests.support.oracle import Case, compare_batch, expect, random_case

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = 9


def case_of(rule: Rule) -> Case:
    """A batch on which all rules decide differently."""
    return random_case(
        5, 22, num_requests=5, num_slots=5, most=3, edited=False,
        fixed={**OFF, "temperature": 1.0, "rule": rule},
    )  # fmt: skip


def states(rule: Rule, backend: Backend) -> None:
    assert compare_batch(backend, case_of(rule)).near_ties == 0


def refuses(tokens: list[list[int]], backend: Backend) -> None:
    """An error, or no token: the kernels are given a rule for the second request that they lack."""
    params = replace(make_params(2, rule=[0, UNKNOWN]), rules=frozenset({0, UNKNOWN}))  # type: ignore[arg-type]
    slot_B, rows_NV = torch.arange(2), torch.zeros(2 + sum(map(len, tokens)), 3)
    batch = VerifyBatch(rows_NV, params, slot_B, slot_B, drafts_of(tokens))
    try:
        verdict = backend._kernels.verify(batch)  # without the checks of `Backend`
    except (NotImplementedError, ValueError):
        return
    assert verdict.finite_B.tolist() == [True, False]
    assert verdict.token_BK1[1].tolist() == [-1] * (1 + max(map(len, tokens)))


STATES: dict[str, Callable[[Backend], None]] = {
    rule.name: functools.partial(states, rule) for rule in Rule
}
REFUSES: dict[str, Callable[[Backend], None]] = {
    str(tokens): functools.partial(refuses, tokens)
    for tokens in ([[], []], [[1], [1]], [[1], []], [[], [1, 2]])
}


def failures(backend: Backend) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, check in {**STATES, **REFUSES}.items():
        try:
            check(backend)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc(limit=-3)
    return found


@functools.cache
def failures_of(name: str) -> dict[str, str | None]:
    if name == "native":
        require_kernels()
    if name != "triton":
        return failures(get_backend(name))
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    found: dict[str, str | None] = json.loads(interpret("tests.ops.test_every_rule"))
    return found


@pytest.mark.parametrize("rule", STATES)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_states_every_rule(name: str, rule: str) -> None:
    failure = failures_of(name)[rule]
    assert failure is None, failure


@pytest.mark.parametrize("tokens", REFUSES)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_refuses_a_rule_that_it_does_not_state(name: str, tokens: str) -> None:
    failure = failures_of(name)[tokens]
    assert failure is None, failure


def test_one_rule_cannot_pass_for_another() -> None:
    verdicts = [expect(case_of(rule)).oracle.decisions["verdict"] for rule in Rule]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(verdicts, 2))


PLACES = {
    "src/foretoken/ops/types.py": "{rule} = {number}",
    "src/foretoken/config/speculative.py": '"{rule}"',
    "src/foretoken/ops/rules.py": "rule.{rule}: ", "src/foretoken/ops/backends/torch/verify.py": "",
    "src/foretoken/ops/backends/reference/_rules.py": "rule.{rule}: ",
    "src/foretoken/ops/backends/native/csrc/sampling.h": "k{rule}",
    "src/foretoken/ops/backends/native/csrc/verify.cpp": "",
    "src/foretoken/ops/backends/triton/rules.py": "",
    "src/foretoken/ops/backends/triton/decide.py": "{rule}", "src/foretoken/lab/laws/joint.py": "",
    "src/foretoken/engine/rounds.py": "", "src/foretoken/outputs.py": '"{rule}": ',
    "docs/verification.md": "| `{rule}`", "tests/ops/test_every_rule.py": "",
}  # fmt: skip
"""The files of the recipe, and how a rule is written there; "" where it need not be."""


@pytest.mark.parametrize("place", PLACES)
def test_every_rule_is_in_every_place(place: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8").lower()
    for rule in Rule:
        assert PLACES[place].format(rule=rule.name.lower(), number=int(rule)) in text, rule.name


def test_the_recipe_names_every_place() -> None:
    document = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    _, recipe = document.split("\n## Adding a rule\n")
    assert set(re.findall(r"`((?:src|docs|tests)/[\w./]+)`", recipe)) == set(PLACES)


def test_both_statements_in_python_are_complete() -> None:
    assert set(rules.RULES) == set(papers.RULES) == set(Rule)
    assert {rule.name.lower() for rule in joint.RULES} == set(LOSSLESS_METHODS)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy's, about infinities that the kernels mask
    print(json.dumps(failures(get_backend("triton"))))
