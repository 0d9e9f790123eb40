"""The rules as functions: their distribution and mean by enumeration, and both statements agree.

Enumeration: a small chain p(x | prefix), q(x | prefix); every draft path has the probability
prod q, and given it each tau has a probability that follows from h_i alone, since the uniforms are
independent: P(tau = i) = h_i prod_{j > i} (1 - h_j) for `block`.

Shapes: B requests, K drafts, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.ops import Rule, rules
from foretoken.ops.backends.reference import _rules as papers
from foretoken.ops.rules import RuleInputs

INF = math.inf
Row = npt.NDArray[np.float64]
Path = tuple[int, ...]


class Chain:
    """Random p and q of the next token given every prefix of up to `length` tokens."""

    def __init__(self, vocabulary: int, length: int, seed: int, one_hot: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.vocabulary, self.length = vocabulary, length
        self.p: dict[Path, Row] = {}
        self.q: dict[Path, Row] = {}
        for size in range(length + 1):
            for prefix in itertools.product(range(vocabulary), repeat=size):
                self.p[prefix] = random.dirichlet(np.full(vocabulary, 0.8))
                self.q[prefix] = random.dirichlet(np.full(vocabulary, 0.8))
                if one_hot:
                    self.q[prefix] = np.eye(vocabulary)[random.integers(vocabulary)]

    def paths(self) -> Iterator[tuple[Path, float]]:
        for path in itertools.product(range(self.vocabulary), repeat=self.length):
            chance = math.prod(self.q[path[:i]][x] for i, x in enumerate(path))
            if chance > 0:
                yield path, chance

    def decide(self, rule: Rule, path: Path, u: list[float]) -> papers.Outcome:
        p = [self.p[path[:i]] for i in range(len(path) + 1)]
        drafts = [
            papers.Draft(x, float(self.q[path[:i]][x]), self.q[path[:i]])
            for i, x in enumerate(path)
        ]
        return papers.RULES[rule](p, drafts, u, [])

    def taus(self, rule: Rule, path: Path) -> list[tuple[int, float, float]]:
        """(tau, P(tau | path), w), by where the uniforms change the decision.
        h_i is found by bisection: x_i is accepted for u_i below it, whatever the other uniforms
        are. `standard` stops at the first failure, `block` takes the last success.
        """
        K = len(path)
        h = [self._threshold(rule, path, i) for i in range(K)]
        out = []
        for passed in itertools.product([False, True], repeat=K):
            chance = math.prod(a if ok else 1 - a for a, ok in zip(h, passed, strict=True))
            if chance > 0:
                # just inside: u = 0 is not drawn, but decides as any u below h_i does
                u = [0.0 if ok else 1.0 for ok in passed]
                tau, w = self.decide(rule, path, u)
                out.append((tau, chance, w))
        return out

    def _threshold(self, rule: Rule, path: Path, i: int) -> float:
        """sup of u_i that counts as a success at i, those before it (`standard`) succeeding."""
        rest = [0.0] * i, [1.0] * (len(path) - i - 1)
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            tau, _ = self.decide(rule, path, [*rest[0], middle, *rest[1]])
            low, high = (middle, high) if tau > i else (low, middle)
        return low if low > 1e-15 else 0.0

    def mean_accepted(self, rule: Rule) -> float:
        return sum(
            chance * share * tau
            for path, chance in self.paths()
            for tau, share, _ in self.taus(rule, path)
        )

    def joint(self, rule: Rule) -> dict[Path, float]:
        """P(first K + 1 tokens): the emitted tokens, completed by draws from the target."""
        joint: dict[Path, float] = dict.fromkeys(
            itertools.product(range(self.vocabulary), repeat=self.length + 1), 0.0
        )
        for path, chance in self.paths():
            for tau, share, w in self.taus(rule, path):
                prefix = path[:tau]
                y = self.p[prefix]
                if tau < self.length:
                    y = papers.residual(w, self.p[prefix], self.q[prefix])
                    if y.sum() < 1e-13:
                        continue  # reached with probability 0, but for rounding
                    y = y / y.sum()
                for x in range(self.vocabulary):
                    self._spread(joint, (*prefix, x), chance * share * float(y[x]))
        return joint

    def _spread(self, joint: dict[Path, float], prefix: Path, chance: float) -> None:
        if len(prefix) == self.length + 1:
            joint[prefix] += chance
            return
        for x in range(self.vocabulary):
            self._spread(joint, (*prefix, x), chance * float(self.p[prefix][x]))

    def target(self, path: Path) -> float:
        return math.prod(float(self.p[path[:i]][x]) for i, x in enumerate(path))


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
@pytest.mark.parametrize(("vocabulary", "length"), [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("one_hot", [False, True])
def test_the_joint_distribution_is_the_targets(
    rule: Rule, vocabulary: int, length: int, one_hot: bool
) -> None:
    for seed in range(3):
        chain = Chain(vocabulary, length, seed, one_hot)
        for path, chance in chain.joint(rule).items():
            assert chance == pytest.approx(chain.target(path), abs=1e-9)


@pytest.mark.parametrize("break_it", ["weight", "threshold"])
def test_a_wrong_block_rule_changes_the_distribution(
    break_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w = 1 instead of p_tau, or an early stop: the enumeration sees either."""

    def mutant(
        p: list[Row], drafts: list[papers.Draft], u: list[float], rates: list[float]
    ) -> papers.Outcome:
        if break_it == "weight":
            return papers.block(p, drafts, u, rates)[0], 1.0
        first = next((i for i in range(len(u)) if u[i] >= 0.5), len(u))
        return papers.block(p[: first + 1], drafts[:first], u[:first], rates)

    monkeypatch.setitem(papers.RULES, Rule.BLOCK, mutant)
    chain = Chain(3, 2, seed=1)
    error = max(
        abs(chance - chain.target(path)) for path, chance in chain.joint(Rule.BLOCK).items()
    )
    assert error > 1e-3


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_block_accepts_more_than_standard(vocabulary: int, length: int) -> None:
    gains = []
    for seed in range(5):
        chain = Chain(vocabulary, length, seed)
        block, standard = chain.mean_accepted(Rule.BLOCK), chain.mean_accepted(Rule.STANDARD)
        gains.append(block - standard)
    assert min(gains) > -1e-9
    assert max(gains) > 0.01


@pytest.mark.parametrize(("length", "one_hot"), [(1, False), (1, True), (2, True), (3, True)])
def test_block_equals_standard_for_one_draft_and_for_one_hot_q(length: int, one_hot: bool) -> None:
    for seed in range(5):
        chain = Chain(2 if length > 2 else 3, length, seed, one_hot)
        block, standard = chain.mean_accepted(Rule.BLOCK), chain.mean_accepted(Rule.STANDARD)
        assert block == pytest.approx(standard, abs=1e-9)


def test_standard_accepts_the_overlap() -> None:
    """P(x_1 accepted) = sum min(p, q)."""
    chain = Chain(4, 1, seed=5)
    overlap = float(np.minimum(chain.p[()], chain.q[()]).sum())
    assert chain.mean_accepted(Rule.STANDARD) == pytest.approx(overlap, abs=1e-9)


def random_request(
    random: np.random.Generator, vocabulary: int, K: int
) -> tuple[list[Row], list[papers.Draft], list[float]]:
    """p and q with zeros and certainties in them; drafts that q can give, one-hot or real."""

    def distribution() -> Row:
        mass = random.dirichlet(np.full(vocabulary, 0.7))
        mass[random.random(vocabulary) < 0.3] = 0.0
        return mass / mass.sum() if mass.sum() else np.eye(vocabulary)[0]

    p = [distribution() for _ in range(K + 1)]
    drafts = []
    for i in range(K):
        kind = random.integers(5)
        q = p[i].copy() if kind == 0 else distribution()
        if kind == 1:
            q = np.eye(vocabulary)[random.integers(vocabulary)]
        x = int(random.choice(vocabulary, p=q / q.sum()))
        drafts.append(papers.Draft(x, float(q[x]), q))
    if random.random() < 0.1:
        p[random.integers(K + 1)][:] = 0.0  # a row that is not finite
    return p, drafts, random.random(K).tolist()


@settings(max_examples=200)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 6))
def test_both_statements_of_the_rules_agree(seed: int, vocabulary: int, most: int) -> None:
    """`ops/rules.py` on a mixed, ragged batch, against the papers' form one request at a time."""
    random = np.random.default_rng(seed)
    B = 8
    shape = (B, most)
    rule_B = torch.from_numpy(random.integers(len(Rule), size=B))
    rate_K = torch.from_numpy(random.choice([0.0, 0.3, 0.9, 1.0], size=most))
    log_p, log_q = torch.full(shape, -INF).double(), torch.full(shape, -INF).double()
    log_u = torch.from_numpy(np.log(random.random(shape)))
    requests = []
    for b in range(B):
        K = int(random.integers(most + 1))
        p, drafts, _ = random_request(random, vocabulary, K)
        u = log_u[b].exp().tolist()
        requests.append((p, drafts, u))
        for i, draft in enumerate(drafts):
            log_q[b, i] = math.log(draft.q_x)
            log_p[b, i] = math.log(p[i][draft.x]) if p[i][draft.x] > 0 else -INF
    x = RuleInputs(log_p, log_q, log_u, rate_K)
    weight_BK1 = rules.weights(x, rule_B)
    mass = torch.zeros(shape).double()
    for b, (p, drafts, _) in enumerate(requests):
        for i in range(most):
            w = math.exp(weight_BK1[b, i])
            if i < len(drafts):
                mass[b, i] = float(papers.residual(w, p[i], drafts[i].q).sum())
            elif i == len(drafts):
                mass[b, i] = w  # q = 0 there
    accepted = rules.accept(replace(x, residual_mass_BK=mass), rule_B).tolist()
    for b, (p, drafts, u) in enumerate(requests):
        rule = Rule(int(rule_B[b]))
        tau, w = papers.RULES[rule](p, drafts, u, rate_K.tolist())
        assert accepted[b] == tau, (rule, p, drafts, u)
        assert math.exp(weight_BK1[b, tau]) == pytest.approx(w, abs=1e-12)


def inputs(log_p: list[float], log_q: list[float], u: list[float], **rest: object) -> RuleInputs:
    one = [torch.tensor([row]).double() for row in (log_p, log_q)]
    return RuleInputs(*one, torch.tensor([u]).double().log(), **rest)  # type: ignore[arg-type]


ONE_LESS = 1 - 2.0**-24


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.COUPLED])
@pytest.mark.parametrize(
    ("log_p", "log_q", "u", "accepted"),
    [
        ([0.0], [0.0], [ONE_LESS], 1),
        ([-3.0], [-3.0], [ONE_LESS], 1),  # p = q: for every u < 1
        ([-INF], [0.0], [2.0**-33], 0),  # p = 0: for no u > 0
        ([-INF], [-INF], [2.0**-33], 0),  # q = 0: no draft
        ([-1.0, -1.0], [-INF, -1.0], [0.5, 0.5], 0),  # nothing after it
        ([-1.0, -2.0, -1.0], [-1.0, -1.0, -1.0], [0.9, 0.4, 0.9], 1),
        ([-1.0, -2.0, -1.0], [-1.0, -1.0, -1.0], [0.9, 0.3, 0.9], 3),
    ],
)
def test_corners_of_standard(
    rule: Rule, log_p: list[float], log_q: list[float], u: list[float], accepted: int
) -> None:
    x = inputs(log_p, log_q, u)
    assert rules.accept(x, torch.tensor([int(rule)])).tolist() == [accepted]
    assert rules.weights(x, torch.tensor([int(rule)])).tolist() == [[0.0] * (len(u) + 1)]


@pytest.mark.parametrize(
    ("log_p", "log_q", "mass", "u", "accepted"),
    [
        ([0.0], [0.0], [0.0], [ONE_LESS], 1),
        ([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], [ONE_LESS, ONE_LESS], 2),  # 0/0 = 1
        ([-3.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [0.9, 0.3], 2),  # no early stop: p_2 = e^-1
        ([-3.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [0.9, 0.4], 0),
        ([-INF, 0.0], [-1.0, -1.0], [0.9, 0.0], [0.1, 0.1], 0),
        ([-3.0, 0.0], [-1.0, -INF], [0.0, 0.0], [0.1, 0.1], 1),  # h_1 = p_1 = e^-2
        ([-3.0, 0.0], [-1.0, -INF], [0.0, 0.0], [0.2, 0.1], 0),
        ([0.0, 0.0, 0.0], [0.0, -INF, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.5], 1),
    ],
)
def test_corners_of_block(
    log_p: list[float], log_q: list[float], mass: list[float], u: list[float], accepted: int
) -> None:
    x = inputs(log_p, log_q, u, residual_mass_BK=torch.tensor([mass]).double())
    assert rules.accept(x, torch.tensor([int(Rule.BLOCK)])).tolist() == [accepted]


def test_synthetic_reads_neither_p_nor_q() -> None:
    u = [0.4, 0.4, 0.4]
    for rates, accepted in (([1.0, 1.0, 1.0], 3), ([0.5, 0.3, 1.0], 1), ([0.0, 1.0, 1.0], 0)):
        for log_p in (-INF, 0.0):
            x = inputs([log_p] * 3, [-1.0] * 3, u, synthetic_rate_K=torch.tensor(rates).double())
            assert rules.accept(x, torch.tensor([int(Rule.SYNTHETIC)])).tolist() == [accepted]
