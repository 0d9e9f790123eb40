"""The fast backends give the oracle's tokens and counts for equal logits and noise.

What is compared, and which decisions are excluded as near-ties, is in `tests/support/oracle.py`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.ops import Backend, Rule, get_backend
from foretoken.ops.backends import reference
from tests.support.cases import fast_backends
from tests.support.oracle import Case, Expected, Tally, compare_batch, expect, outcome, random_case

MOST_EXCLUDED = 0.01
VOCABULARIES = [1, 5, 999, 1024, 1025, 4097, 8193]
PAIRWISE: list[dict[str, float]] = [
    {"top_k": 3, "top_p": 0.9, "temperature": 0.7},
    {"top_k": 50, "min_p": 0.1, "temperature": 1.0},
    {"top_k": 0, "top_p": 0.5, "min_p": 0.1, "temperature": 1.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7},
    {},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=fast_backends())
def fast(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@functools.cache
def batches(vocabulary: int) -> list[tuple[Case, Expected]]:
    """All rules mixed in each batch; filters, dtypes, widths, noise and junk pairwise."""
    repeats = 3 if vocabulary < 999 else 1
    widths = itertools.cycle([None, vocabulary + 7, max(1, vocabulary - 3)])
    out = []
    for seed, fixed in enumerate(PAIRWISE * repeats):
        dtypes = {"dtype": DTYPES[seed % 3], "draft_dtype": DTYPES[(seed + vocabulary) % 3]}
        kinds = {"edited": seed % 5 != 2, "junk": seed % 4 == 3, "fp64_noise": seed % 2 == 1}
        given: Any = {**dtypes, **kinds, "draft_vocabulary": next(widths), "fixed": fixed}
        case = random_case(vocabulary, seed, **given)
        out.append((case, expect(case)))
    return out


@functools.cache
def batches_of(rule: Rule, temperature: float) -> list[tuple[Case, Expected]]:
    fixed = {"rule": int(rule), "temperature": temperature}
    cases = [
        random_case(
            40, 100 + seed, num_requests=9, num_slots=9, most=4, edited=seed % 2 == 0, fixed=fixed
        )
        for seed in range(5)
    ]
    return [(case, expect(case)) for case in cases]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_and_counts_are_the_oracles(fast: Backend, vocabulary: int) -> None:
    tally = Tally()
    for case, expected in batches(vocabulary):
        tally = tally.plus(compare_batch(fast, case, expected))
    assert tally.decisions > 100
    assert tally.near_ties <= MOST_EXCLUDED * tally.decisions


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_rule_alone(fast: Backend, rule: Rule, temperature: float) -> None:
    """A batch of one rule may take another path than a mixture."""
    tally = Tally()
    for case, expected in batches_of(rule, temperature):
        tally = tally.plus(compare_batch(fast, case, expected))
    assert tally.near_ties <= MOST_EXCLUDED * tally.decisions


@pytest.mark.parametrize("others", [Rule.STANDARD, Rule.SYNTHETIC])
def test_one_block_request_among_many(fast: Backend, others: Rule) -> None:
    """It may take another path than the others; drafts, rows and temperatures of every kind."""
    fixed = {"top_k": 0, "rule": int(others)}
    shape = {"num_requests": 64, "num_slots": 64, "most": 4}
    case = random_case(1500, 5, junk=True, fixed=fixed, **shape)  # type: ignore[arg-type]
    params = replace(case.params, rules=frozenset(Rule))
    waits_B = (case.num_B > 1) & (params.temperature_S[case.slot_B] > 0)
    params.rule_S[case.slot_B[waits_B.nonzero()[9]]] = int(Rule.BLOCK)
    tally = compare_batch(fast, replace(case, params=params))
    assert tally.near_ties <= MOST_EXCLUDED * tally.decisions


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_small_vocabularies_at_random(width: int, draft: int, seed: int, fp64: bool) -> None:
    case = random_case(
        width, seed, draft_vocabulary=draft, junk=seed % 5 == 0, fp64_noise=fp64, most=4
    )
    expected = expect(case)
    for name in fast_backends():
        tally = compare_batch(get_backend(name), case, expected)
        assert tally.near_ties <= 0.2 * tally.decisions  # of one batch: a single one weighs much


@pytest.mark.law
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_many_batches(fast: Backend, vocabulary: int) -> None:
    tally = Tally()
    for seed in range(200 if vocabulary < 999 else 40):
        dtypes = {"dtype": DTYPES[seed % 3], "draft_dtype": DTYPES[seed % 2]}
        case = random_case(vocabulary, 1000 + seed, fp64_noise=seed % 2 == 1, **dtypes)
        tally = tally.plus(compare_batch(fast, case))
    assert tally.near_ties <= MOST_EXCLUDED * tally.decisions


def test_the_comparison_is_not_empty() -> None:
    """Over the batches: every count of accepted drafts, each rule, few near-ties by themselves."""
    accepted, rules, near, total = set(), set(), 0, 0
    for case, expected in batches(999):
        accepted |= set(expected.oracle.decisions["verdict"][:, 0].tolist())
        rules |= set(case.params.rule_S[case.slot_B].tolist())
        near += sum(int((expected.near[n] & expected.counts[n]).sum()) for n in expected.near)
        total += sum(int(counts.sum()) for counts in expected.counts.values())
    assert accepted == {0, 1, 2, 3}
    assert rules == {int(rule) for rule in Rule}
    assert near <= MOST_EXCLUDED * total


def test_a_wrong_backend_is_noticed() -> None:
    """The oracle itself passes; with FP64 noise where FP32 is asked for it does not."""
    case = random_case(40, 3, num_requests=7)
    expected, oracle = expect(case), get_backend("reference")
    compare_batch(oracle, case, expected)
    other = random_case(40, 3, num_requests=7, fp64_noise=True)
    ours = outcome(oracle, other, expected.oracle)
    assert not torch.equal(ours.decisions["drawn"], expected.oracle.decisions["drawn"])
    with pytest.raises(AssertionError, match="of slot"):
        compare_batch(oracle, other, expected)


def test_the_oracle_is_independent() -> None:
    """It imports neither the shared rules nor another backend."""
    for name in ("noise", "process", "_rules", "sample", "verify"):
        module = __import__(f"{reference.__name__}.{name}", fromlist=["_"])
        imported = {
            node.module or ""
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.ImportFrom)
        }
        ours = {m for m in imported if m.startswith("foretoken")}
        own = {m for m in ours if m.startswith(f"{reference.__name__}.")}
        assert ours - own <= {"foretoken.ops.checks", "foretoken.ops.types"}
