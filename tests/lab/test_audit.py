"""The audit refutes every published bug by name, passes what is right, and says what it could not
test; and an audit that could not refute would fail here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.errors import RequestError
from foretoken.lab.audit import gallery
from foretoken.lab.audit.enumeration import NotEnumerableError, enumerate_runs
from foretoken.lab.audit.evidence import Evidence, Source, Tally
from foretoken.lab.audit.gallery import BUGS, LOSSLESS, member
from foretoken.lab.audit.subjects import (
    TOYS,
    Subject,
    backend_subject,
    bind,
    callable_subject,
    toy_sources,
)
from foretoken.lab.audit.verdict import ROUNDING, Finding, audit, enumerate_verifier
from foretoken.lab.laws.acceptance import accepted_moments
from foretoken.lab.laws.mutants import (
    RESIDUALS,
    hide_token,
    replaced,
    residual_mutant,
    shared_stream,
)
from foretoken.ops import Rule, get_backend

CPU = torch.device("cpu")
P = [Fraction(n, 12) for n in (5, 4, 3)]
Q = [Fraction(n, 12) for n in (2, 1, 9)]


# Enumeration --------------------------------------------------------------------------------------


def one_draft(verify: Callable[..., Any]) -> dict[int, Any]:
    """The distribution of the first token in fractions, without rounding."""

    def run(rng: Any) -> int:
        return int(verify(np.array([P, P]), np.array([Q]), [rng.fork(Q)], rng)[0])

    return enumerate_runs(run)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_rules_are_lossless_to_the_last_digit(rule: str) -> None:
    assert one_draft(member(rule)) == dict(enumerate(P))


def test_a_wrong_residual_is_wrong_by_a_fraction() -> None:
    assert one_draft(member("residual_is_p"))[0] == Fraction(3, 8) != P[0]


def test_random_numbers_of_ones_own_cannot_be_enumerated() -> None:
    own = np.random.default_rng(0)
    for verify in (
        lambda p, q, drafts, rng: [*drafts, int(own.integers(2))],
        lambda p, q, drafts, rng: [*drafts, int(torch.rand(()) < 0.5)],
        lambda p, q, drafts, rng: [*drafts, int(float(rng.random()) < 0.5)],
        lambda p, q, drafts, rng: [*drafts, int(torch.tensor(rng.random()) < 0.5)],
        lambda p, q, drafts, rng: [*drafts, int(rng.random() < rng.random())],
        lambda p, q, drafts, rng: [*drafts, int(rng.gumbel(size=2).argmax())],
    ):
        error, _, (line,) = enumerate_verifier(bind(verify))
        assert error is None
        assert line.startswith("Not enumerated: the function ")
        assert "draw every random number from `rng`" in line
    with pytest.raises(NotEnumerableError, match="whether a uniform is zero"):
        enumerate_runs(lambda rng: int(bool(rng.random())))


CDF = np.array([0.25, 0.5, 1.0])
TENSOR = torch.from_numpy(CDF)
EVEN = dict.fromkeys(itertools.product((0, 1), repeat=2), 0.25)


@pytest.mark.parametrize(
    ("drawn", "law"),
    [
        (lambda rng: str(rng.choice(["a", "b"], p=[0.25, 0.75])), {"a": 0.25, "b": 0.75}),
        (lambda rng: tuple(rng.choice(2, 2).tolist()), EVEN),
        (lambda rng: int(rng.multinomial(1, [0.25, 0.75]).argmax()), {0: 0.25, 1: 0.75}),
        (lambda rng: int(rng.integers(1, 3)), {1: 0.5, 2: 0.5}),
        (lambda rng: int(rng.binomial(1, 0.25)), {0: 0.75, 1: 0.25}),
        (lambda rng: int(rng.random() * 4), dict.fromkeys(range(4), 0.25)),
        (lambda rng: tuple(int(u > 0.5) for u in rng.random(2)), EVEN),
        (lambda rng: int((CDF[:2] <= rng.random()).sum()), {0: 0.25, 1: 0.25, 2: 0.5}),
        (lambda rng: int(np.searchsorted(CDF, rng.random())), {0: 0.25, 1: 0.25, 2: 0.5}),
        (lambda rng: int((TENSOR[:3] > rng.random()).int().argmax()), {0: 0.25, 1: 0.25, 2: 0.5}),
        (lambda rng: bool((rng.random(2) < CDF[:2]).all()), {True: 0.125, False: 0.875}),
        *[
            (below, {True: 0.25, False: 0.75})
            for below in (
                lambda rng: bool(np.float64(0.25) > rng.random()),
                lambda rng: bool(np.float32(0.25) >= rng.random()),
                lambda rng: bool(TENSOR[0] > rng.random()),
                lambda rng: bool(rng.random() * np.float64(0.5) < np.float64(0.125)),
                lambda rng: bool(TENSOR[0] * rng.random() < TENSOR[0] / 4),
                lambda rng: bool(rng.random() / 2 + 1 <= 1.125),
                lambda rng: bool(-rng.random() > -0.25),
                lambda rng: bool(1 - rng.random() < 0.25),
                lambda rng: bool(rng.uniform(-1, 1) < -0.5),
                lambda rng: bool(np.log(rng.random()) < np.log(0.25)),
                lambda rng: bool(rng.exponential(2.0) < -2 * np.log(0.75)),
                lambda rng: bool(~(rng.random() >= np.float64(0.25))),
                lambda rng: bool(np.less(max(rng.random(), 1e-9), 0.25)),
            )
        ],
    ],
)  # fmt: skip
def test_generators_and_their_numbers_may_be_used_as_numpys(
    drawn: Callable[[Any], Any], law: dict[Any, float]
) -> None:
    assert enumerate_runs(drawn) == pytest.approx(law, rel=1e-9)
    assert drawn(np.random.default_rng(0)) in law


def test_what_is_no_number_is_neither_below_nor_above() -> None:
    nan = float("nan")
    compared = enumerate_runs(lambda rng: ((u := rng.random()) < nan, u > nan, u <= nan))
    assert compared == {(False, False, False): 1}


def test_acceptance_is_that_of_the_laws() -> None:
    for toy in TOYS[:2]:
        p, q = (torch.from_numpy(table) for table in toy.tables[:2])
        for rule, mean in zip((Rule.STANDARD, Rule.BLOCK), toy.optimum, strict=True):
            expected, _ = accepted_moments(p, q, toy.chains[0], toy.num_drafts, rule)
            assert mean == pytest.approx(expected, rel=1e-12)


def test_what_block_keeps_of_a_path_adds_up_to_its_optimum() -> None:
    for toy in TOYS[:2]:
        mean = 0.0
        for drafts in itertools.product(range(toy.vocabulary), repeat=toy.num_drafts):
            given = toy.inputs((), [*drafts])
            chance = np.prod([row[x] for row, x in zip(given.q, drafts, strict=True)])
            mean += chance * gallery.mean_accepted_by_block(given.p[:-1], given.q, [*drafts])
        assert mean == pytest.approx(toy.optimum[1], rel=1e-9)


def test_shared_noise_is_what_a_race_does() -> None:
    q, rest = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.0, 0.3, 0.1, 0.6])
    times = np.random.default_rng(0).exponential(size=(400_000, 4))
    with np.errstate(divide="ignore"):
        drafts, drawn = (times / q).argmin(axis=1), (times / rest).argmin(axis=1)
    found = np.bincount(drawn[drafts == 0], minlength=4) / (drafts == 0).sum()
    assert gallery.after_the_same_race(rest + q, q) == pytest.approx(found, abs=0.005)


# The gallery --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.key)
def test_every_bug_is_refuted_and_named(bug: gallery.Bug) -> None:
    """By its enumerated distribution, and by draws only, as if it could not be enumerated."""
    subject = callable_subject(bug.key, bind(bug.verify))
    found = audit(subject)
    assert found.refuted
    assert found.bug == bug.key
    assert found.same_as == (None if bug.by_uniforms else bug.key)
    assert bug.flaw in found.verdict
    assert (found.error or 0.0) <= ROUNDING or not bug.by_uniforms
    if not bug.by_uniforms:
        assert audit(subject._replace(exact=None)).bug == bug.key


def test_no_bug_is_another() -> None:
    for first, second in itertools.combinations(toy_sources()[0].bugs, 2):
        apart = max(np.abs(m.bugs[first] - m.bugs[second]).sum() / 2 for m in toy_sources())
        assert apart > 0.01, (first, second)


def of_the_best(p: Any, count: int) -> Any:
    kept = np.where(p >= np.sort(p)[..., -min(count, p.shape[-1]), None], p, 0)
    return kept / kept.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("count", "seen_with"), [(4, 16), (50, 64)])
def test_top_k_that_is_wired_in_is_seen_with_more_tokens(count: int, seen_with: int) -> None:
    def verify(p: Any, q: Any, drafts: list[int], rng: Any) -> list[int]:
        return gallery.standard(of_the_best(p, count), q, drafts, rng)

    found = audit(callable_subject("x", bind(verify)), 4000)
    assert found.bug == "unknown"
    assert f"Enumerated with 2, 4, 16{', 64' * (count > 16)} tokens" in found.exact[0]
    assert re.search(rf"DIFFERS from p by 0\.\d+ with {seen_with} ", found.exact[0])
    drawn = audit(callable_subject("x", bind(verify))._replace(exact=None), 4000)
    assert drawn.refuted == (count < 16)
    assert ("of up to 16 tokens" in drawn.verdict) == (count > 16)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_what_is_right_passes(rule: str) -> None:
    found = audit(callable_subject(rule, bind(member(rule)), seed=3), 3000)
    assert not found.refuted
    assert found.error is not None
    assert found.error <= ROUNDING
    assert "every probability equals p by enumeration of up to 64 tokens; " in found.verdict
    assert "over 16 outcomes of up to 16 tokens" in found.verdict
    slow = rule == "dropped_q"
    assert ("lossless, accepts less than it could" in found.verdict) == slow


def test_a_blind_audit_is_noticed() -> None:
    """Without its likelihoods, without its bets, without its counts: none of these refutes."""
    subject = callable_subject("x", bind(member("residual_is_p")))._replace(exact=None)
    assert audit(subject, 900).refuted

    class Blind(Evidence):
        def _mixtures(self, tally: Tally, cells: Any) -> Any:
            return np.zeros((3, len(cells)))

    unnamed = subject._replace(sources=[m._replace(bugs={}, num_drafts=0) for m in subject.sources])
    found = Finding(unnamed, Blind(unnamed.sources))
    assert not audit(unnamed, 900, finding=found).refuted


def test_an_unknown_bug_is_refuted_without_a_name() -> None:
    def verify(p: Any, q: Any, drafts: list[int], rng: Any) -> list[int]:
        tokens = gallery.standard(p, q, drafts, rng)
        return [*tokens[:-1], (tokens[-1] + (rng.random() < 0.2)) % len(p[0])]

    for subject in (given := callable_subject("x", bind(verify)), given._replace(exact=None)):
        found = audit(subject)
        assert found.bug == "unknown"
    assert "no bug of the gallery explains" in found.verdict


def test_accepting_too_much_refutes_by_itself() -> None:
    """Bets on acceptance look at no distribution: here none is wrong."""
    fair = np.full(4, 0.25)
    evidence, rng = Evidence([Source("m", fair, {}, 1, 0.5)]), np.random.default_rng(0)
    evidence.add(0, rng.integers(4, size=4000), rng.random(4000) < 0.5)
    assert evidence.refuted_at is None
    evidence.add(0, rng.integers(4, size=4000), rng.random(4000) < 0.6)
    assert evidence.refuted_at is not None
    assert evidence.name == "accepts_too_much"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([9], "ids in"),
        ([], "one more token"),
        ([0] * 9, "one more token"),
        (None, "sequence"),
        ("x", "sequence"),
        ([0.5], "sequence"),
    ],
)
def test_what_is_no_token_is_an_error(returned: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        audit(callable_subject("x", bind(lambda p, q, drafts, rng: returned)), 10)


def scaled(p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
    """No division, scalars of numpy, tokens by `searchsorted`."""
    for i, x in enumerate(drafts):
        u = rng.random()
        if not u * q[i][x] < p[i][x]:
            rest = np.clip(p[i] - q[i], 0, None)
            return [*drafts[:i], np.searchsorted(np.cumsum(rest), rest.sum() * rng.random())]
    return [*drafts, np.searchsorted(np.cumsum(p[-1]), rng.random(), side="right")]


def capped(p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
    """The probability on the left, in single precision, tokens by `multinomial`."""
    p, q = p.astype(np.float32), q.astype(np.float32)
    for i, x in enumerate(drafts):
        c = np.minimum(np.float32(1), p[i, x] / q[i, x])
        if c > rng.random():
            continue
        rest = np.maximum(p[i] - q[i], 0).astype(np.float64)
        return [*drafts[:i], rng.multinomial(1, rest / rest.sum()).argmax()]
    return [*drafts, (np.cumsum(p[-1]) <= rng.random()).sum().clip(max=p.shape[1] - 1)]


def by_ratio(p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
    """p = 0 where the filters leave a draft out: a ratio without end, which rejects it."""
    for i, x in enumerate(drafts):
        with np.errstate(divide="ignore", invalid="ignore"):
            if not rng.random() * q[i][x] / p[i][x] <= 1:
                rest = np.maximum(p[i] - q[i], 0)
                return [*drafts[:i], rng.choice(len(rest), p=rest / rest.sum())]
    return [*drafts, rng.choice(len(p[-1]), p=p[-1])]


def at_once(p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
    """All drafts of the round in one comparison of arrays, in logarithms."""
    rows = np.arange(len(drafts))
    logs = np.log(np.maximum(p[rows, drafts], 1e-300)) - np.log(q[rows, drafts])
    kept = int(np.cumprod(np.log(rng.random(len(drafts))) <= logs).sum())
    rest = np.maximum(p[kept] - q[kept], 0) if kept < len(drafts) else p[kept]
    return [*drafts[:kept], rng.choice(len(rest), p=rest / rest.sum())]


def by_tensors(p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
    """Everything of torch but the random numbers."""
    p, q = torch.from_numpy(p), torch.from_numpy(q)
    for i, x in enumerate(drafts):
        if (p[i, x] / q[i, x]).clamp(max=1.0) <= rng.random():
            rest = (p[i] - q[i]).clamp(min=0)
            above = (rest / rest.sum()).cumsum(0) > rng.random()
            return torch.tensor([*drafts[:i], int(above.int().argmax())])
    return torch.tensor([*drafts, (p[-1].cumsum(0) > rng.random()).int().argmax()])


def with_uniforms(p: Any, q: Any, drafts: list[int], *, uniforms: Any) -> Any:
    """No generator; numbers that are compared element by element."""
    ratios = np.array([p[i][x] / q[i][x] for i, x in enumerate(drafts)])
    kept = next((i for i, taken in enumerate(uniforms[:-1] < ratios) if not taken), len(drafts))
    rest = np.maximum(p[kept] - q[kept], 0) if kept < len(drafts) else p[kept]
    return [*drafts[:kept], gallery.pick(rest, uniforms[-1])]


class Counting:
    """An object for each sample."""

    def __call__(self, p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
        return scaled(p, q, drafts, rng)


WRITTEN = (scaled, capped, by_ratio, at_once, by_tensors, with_uniforms, Counting)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("verify", WRITTEN, ids=lambda verify: verify.__name__)
def test_verifiers_may_be_written_in_many_ways(verify: Any) -> None:
    found = audit(callable_subject("x", bind(verify)), 400)
    assert not found.refuted, found.verdict
    assert found.error is not None, found.exact
    assert (found.error > 1e-9) == (verify is capped)


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (lambda rng, n: [float(rng.random()) for _ in range(n)], "into a plain float, as `float("),
        (lambda rng, n: rng.random(n).astype(np.float32), "into a plain float, as `float("),
        (lambda rng, n: torch.tensor(rng.random(n)), "when random numbers are intervals (can"),
        (lambda rng, n: rng.beta(1, 1, n), "the function calls `rng.beta`"),
        (lambda rng, n: torch.rand(n, dtype=torch.float64), "from elsewhere than `rng`"),
    ],
)
def test_what_cannot_be_enumerated_is_sampled_and_told_what_to_change(
    convert: Any, said: str
) -> None:
    def verify(p: Any, q: Any, drafts: list[int], rng: Any) -> Any:
        u = [float(x) for x in convert(rng, len(drafts) + 1)]
        return gallery.standard(p, q, drafts, None, u)

    found = audit(callable_subject("x", bind(verify)), 400)
    assert (found.error, found.refuted) == (None, False)
    assert found.verdict.startswith("not refuted: no difference in 400 draws")
    assert said in found.exact[0]
    assert found.exact[0].endswith("or draw by `rng.choice(V, p=...)`.")


def test_a_verifier_that_raises_is_an_error_that_says_so() -> None:
    def raises(p: Any, q: Any, drafts: list[int]) -> list[int]:
        raise KeyError("oops")

    with pytest.raises(
        RequestError, match=r"`callable` is .raises.*KeyError\(.oops.\) in test_audit.py, line"
    ):
        audit(callable_subject("x", bind(raises)), 10)


# The evidence -------------------------------------------------------------------------------------


def false_alarms(runs: int, draws: int, alpha: float, delta: float = 0.0) -> int:
    """How many of `runs` null runs are refuted, with a look after every draw."""
    rng, alarms = np.random.default_rng(1), 0
    given = {"num_drafts": 1, "most_accepted": 0.5, "delta": delta}
    known = [source._replace(**given) for source in toy_sources()]
    for _ in range(runs):
        evidence = Evidence(known, alpha)
        for number, model in enumerate(known):
            cells = rng.choice(len(model.null), p=model.null / model.null.sum(), size=draws)
            evidence.add(number, cells, rng.random(draws) < 0.5)
        alarms += evidence.refuted_at is not None
    return alarms


def test_false_alarms_are_as_rare_as_promised() -> None:
    assert false_alarms(300, 200, 0.05) <= 25  # 15 at most on average; 3 sigma


@pytest.mark.law
def test_false_alarms_of_2000_runs() -> None:
    assert false_alarms(2000, 1000, 0.05) <= 130
    assert false_alarms(2000, 1000, 0.001) <= 8


def test_the_bound_on_total_variation_holds() -> None:
    rng, missed = np.random.default_rng(2), 0
    null = np.full(16, 1 / 16)
    true = null * (1 + 0.08 * (-1.0) ** np.arange(16))  # TV 0.04
    for _ in range(300):
        tally = Tally(Source("m", null, {}), rng.multinomial(2000, true).astype(float), 2000)
        missed += tally.distance_bound(1) < 0.04
    assert missed <= 8  # of 3 on average
    large = Tally(Source("m", null, {}), np.full(16, 75_000.0), 1_200_000)
    assert large.distance_bound(1) < 0.003


def test_a_distance_that_is_allowed_for_refutes_nothing_but_more_does() -> None:
    fair, rng = np.full(16, 1 / 16), np.random.default_rng(0)
    tilted = fair * (1 + 0.1 * (-1.0) ** np.arange(16))  # TV 0.05
    drawn = rng.choice(16, p=tilted, size=(20, 2000))

    def refuted(delta: float) -> bool:
        evidence = Evidence([Source("m", fair, {}, delta=delta)])
        for cells in drawn:
            evidence.add(0, cells)
        return evidence.refuted_at is not None

    assert refuted(0.0)
    assert refuted(0.01)
    assert not refuted(0.05)


def test_what_cannot_be_is_not_allowed_for() -> None:
    """A twentieth of all is where one in a thousand may be; the distance would allow it."""
    null, rng = np.append(np.full(4, 0.24975), 0.001), np.random.default_rng(0)
    known = Source("m", null, {}, delta=0.06, closed=True)
    for share, refuted in ((0.001, False), (0.05, True)):
        for model, alarms in ((known, refuted), (known._replace(closed=False), False)):
            evidence = Evidence([model])
            evidence.add(0, rng.choice(5, p=[*np.full(4, (1 - share) / 4), share], size=1000))
            assert (evidence.refuted_at is not None) == alarms


def given_groups(dependence: float, runs: int, draws: int) -> tuple[int, float]:
    model, rng = Source("m", np.full(16, 0.25), {}, groups=4), np.random.default_rng(3)
    alarms, total = 0, 0.0
    for _ in range(runs):
        group = rng.choice(4, p=[0.7, 0.2, 0.07, 0.03], size=draws)
        fourth = np.where(rng.random(draws) < dependence, group, rng.integers(4, size=draws))
        evidence = Evidence([model], 0.05)
        evidence.add(0, 4 * group + fourth)
        alarms += evidence.refuted_at is not None
        total += 10 ** evidence.path[-1][1]
    return alarms, total / runs


def test_shares_that_are_right_are_within_the_reach_that_a_plot_shows() -> None:
    rng, null = np.random.default_rng(3), np.array([0.5, 0.3, 0.2, 0.1, 0.4, 0.5])
    model, within = Source("m", null, {}, groups=2), []
    for _ in range(2000):
        first, second = rng.multinomial(3000, null[:3]), rng.multinomial(1000, null[3:])
        tally = Tally(model, np.array([*first, *second], dtype=float), 4000)
        within.append(np.abs(tally.counts - tally.expected) / 4000 <= tally.half_widths)
    assert np.mean(within, axis=0) == pytest.approx(np.full(6, 0.99), abs=0.008)
    moved = Tally(model._replace(delta=0.02), tally.counts, 4000)
    assert moved.half_widths == pytest.approx(tally.half_widths + 0.02)


def test_outcomes_given_their_group() -> None:
    alarms, mean = given_groups(0.0, runs=300, draws=100)
    assert alarms <= 25
    assert mean < 1.3  # of 1 at most, in expectation
    assert given_groups(0.2, runs=20, draws=1500)[0] == 20
    tally = Tally(Source("m", np.full(4, 0.5), {}, groups=2), np.array([450.0, 450, 50, 50]), 1000)
    assert (tally.distance, tally.p_value) == (0.0, 1.0)


def test_a_subject_that_draws_nothing_has_a_verdict() -> None:
    """An engine at temperature 0, which has only checks."""
    subject = Subject("x", [], lambda *given: (), lambda: ([], ["All is equal."]))
    assert audit(subject).verdict.startswith("not refuted: every check at temperature 0")
    wrong = subject._replace(exact=lambda: (["greedy_differs"], []))
    assert audit(wrong).bug == "greedy_differs"


def test_tokens_of_a_text_are_read_together() -> None:
    """Of two sources with the same texts, the first refutes nothing before the second has come."""
    fair, drawn = Source("m", np.full(2, 0.5), {}, cluster=2), np.zeros(100, dtype=int)
    evidence = Evidence([fair, fair])
    evidence.add(0, drawn)
    assert (evidence.refuted_at, evidence.path) == (None, [])
    evidence.add(1, drawn[:0])
    assert evidence.refuted_at == 100


# Backends -----------------------------------------------------------------------------------------


def test_operators_pass() -> None:
    for rule in (Rule.STANDARD, Rule.BLOCK, Rule.COUPLED):
        found = audit(
            backend_subject("x", get_backend("native"), CPU, rule)._replace(exact=None), 6000
        )
        assert not found.refuted
        assert "no difference in 6,000 draws" in found.verdict


def test_a_tail_that_never_comes_is_refuted() -> None:
    backend = replaced(
        get_backend("native"), sample=lambda rows, noise: rows.logits_NV.argmax(dim=1)
    )
    broken, (line,) = backend_subject("x", backend, CPU, Rule.STANDARD).exact()
    assert broken == ["float32_tail"], line


@pytest.mark.parametrize(
    ("bug", "breaks"),
    [
        ("shared_noise", {"backend": shared_stream}),
        ("residual_is_p", {"backend": residual_mutant(RESIDUALS["no_subtraction"])}),
        ("unknown", {"backend": residual_mutant(RESIDUALS["other_way_round"])}),
        ("unknown", {"mutate": hide_token}),  # another token than the gallery's placeholders
    ],
)
def test_broken_operators_are_refuted(bug: str, breaks: dict[str, Any]) -> None:
    backend = breaks.get("backend", lambda backend: backend)(get_backend("native"))
    mutate = breaks.get("mutate", lambda propose: propose)
    found = audit(
        backend_subject("x", backend, CPU, Rule.STANDARD, mutate=mutate)._replace(exact=None)
    )
    assert found.bug == bug
