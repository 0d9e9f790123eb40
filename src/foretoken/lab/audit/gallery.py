"""The rules as plain functions, and published bugs: each bug is a rule with one step wrong.

All functions are verifiers (`subjects.Verifier`): from p [K + 1, V], q [K, V], K drafts, and a
generator or K + 1 uniforms they return the emitted tokens. The bugs' enumerated distributions are
the alternatives that an audit compares with the target's distribution (`evidence.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from foretoken.errors import ConfigError

Tokens = list[int]
Params = Mapping[str, Any]  # sampling parameters, by name
LOW_Q = 0.3  # the bug `own_token_truncation` drops drafts with lower q


def pick(weights: Any, u: Any) -> int:
    """The first token at which the cumulative share of weights exceeds u."""
    total, cumulative = sum(weights), 0
    for token, weight in enumerate(weights[:-1]):
        cumulative = cumulative + weight
        if u < cumulative / total:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def residual(p: Any, q: Any, weight: Any = 1) -> Any:
    """The residual max(weight p - q, 0), not normalised; p if it is 0 everywhere."""
    rest = np.maximum(weight * p - q, 0)
    return rest if sum(rest) > 0 else p


def separate_uniforms(u: Any) -> tuple[Any, Any]:
    """The correct use of uniforms: one for each test, and the last one for a draw at any index."""
    return u[:-1], [u[-1]] * len(u)


class Steps(NamedTuple):
    """The steps of `standard` as functions of p, q and a draft; a bug replaces one of them."""

    # The probability to accept a draft.
    chance: Callable[[Any, Any, int], Any] = lambda p, q, x: p[x] / q[x]
    # The weights of tokens that may replace a rejected draft.
    replace: Callable[[Any, Any, int], Any] = lambda p, q, x: residual(p, q)
    # Splits K + 1 uniforms into uniforms for tests and uniforms for draws.
    split: Callable[[Any], tuple[Any, Any]] = separate_uniforms
    # Whether a uniform accepts a draft with this chance.
    below: Callable[[Any, Any], Any] = operator.lt
    drops: Callable[[Any, int], bool] = lambda q, x: False  # whether the round ends before a draft
    # The weights of the token after the last draft, from p there and the last draft's q.
    bonus: Callable[[Any, Any], Any] = lambda p, q: p


CORRECT = Steps()


def standard(
    p: Any, q: Any, drafts: Tokens, rng: Any, uniforms: Any = None, *, steps: Steps = CORRECT
) -> Tokens:
    """Leviathan et al. 2023: accept draft i while u_i < p(x_i) / q(x_i); returns emitted tokens."""
    end = next((i for i, x in enumerate(drafts) if steps.drops(q[i], x)), len(drafts))
    tests, draws = steps.split(uniforms if uniforms is not None else rng.random(len(drafts) + 1))
    for i, x in enumerate(drafts[:end]):
        if not steps.below(tests[i], steps.chance(p[i], q[i], x)):
            return [*drafts[:i], pick(steps.replace(p[i], q[i], x), draws[i])]
    weights = steps.bonus(p[end], q[-1]) if end == len(drafts) else p[end]
    return [*drafts[:end], pick(steps.replace(weights, 0 * weights, -1), draws[-1])]


def thresholds(p: Any, q: Any, drafts: Tokens, flaw: str = "") -> tuple[list[Any], list[Any]]:
    """The thresholds h_1, .. of `block` and its weights w_0, w_1, ..

    If u_i < h_i, at least i drafts are accepted. `flaw` names a step to break.
    """
    w, h, joint = [1], [], 1
    for i, x in enumerate(drafts, 1):
        ratio = p[i - 1][x] / q[i - 1][x]
        w.append(min(1, w[-1] * ratio))
        joint = joint * ratio
        if i == len(drafts):
            h.append(joint if flaw == "uncapped" else w[-1])
            break
        mass = sum(np.maximum(w[-1] * p[i] - q[i], 0))
        h.append(mass / (mass + 1 - w[-1]) if mass + 1 - w[-1] > 0 else 1)
    return h, w


def block(
    p: Any, q: Any, drafts: Tokens, rng: Any, uniforms: Any = None, *, flaw: str = ""
) -> Tokens:
    """Sun et al. 2024, algorithm 2; returns the emitted tokens. `flaw` names a step to break."""
    tau, (h, w) = 0, thresholds(p, q, drafts, flaw)
    u = uniforms if uniforms is not None else rng.random(len(drafts) + 1)
    for i in range(len(drafts)):
        if u[0 if flaw == "one_uniform" else i] < h[i]:
            tau = i + 1
        elif flaw == "early_stop":
            break
    if tau == len(drafts):
        return [*drafts, pick(p[-1], u[-1])]
    weight = 1 if flaw == "unweighted" else w[tau]
    return [*drafts[:tau], pick(residual(p[tau], q[tau], weight), u[-1])]


def mean_accepted_by_block(p: Any, q: Any, drafts: Tokens) -> float:
    """The mean number of these drafts that `block` accepts, over all uniforms.

    Over drafts from q, no lossless rule with unchanged later rounds accepts more on average.
    """
    chance_to_fail = 1 - np.array(thresholds(p, q, drafts)[0], dtype=float)
    return float((1 - chance_to_fail[::-1].cumprod()).sum())


def after_the_same_race(p: Any, q: Any, x: int = -1) -> Any:
    """The distribution of a token drawn from the residual r with the noise E that drew the draft x.

    It is P(argmin E_v / r_v | argmin E_v / q_v = x), for a race of exponential times E_v. Given
    that x wins the race of q with time m ~ Exp(1), other tokens have E_v = m q_v + a new Exp(1).
    Let c_v = q_v / r_v, and s the winning time in units of m. The integral over m is P(y) = r_y *
    integral over s > c_y of (1 + sum_v r_v (s - c_v)^+)^-2. This integral does not depend
    on x, and is elementary between one c_v and the next.
    """
    weights = residual(p, q)
    r = weights / sum(weights)
    v = np.flatnonzero(r > 0)
    v = v[np.argsort(q[v] / r[v], kind="stable")]
    c, slope = q[v] / r[v], r[v].cumsum()
    base = 1 + np.append(0, (slope[:-1] * np.diff(c)).cumsum())  # 1 + sum_v .. at each c
    area = (1 / base - np.append(1 / base[1:], 0)) / slope  # integral from each c to the next
    chance = np.zeros(len(r))
    chance[v] = r[v] * area[::-1].cumsum()[::-1]
    return chance


def sampled_from(p: Any, params: Params) -> Any:
    """Rows of p after temperature and top-k; tokens that tie with the k-th token are kept."""
    heated = p ** (1 / params["temperature"])
    if params["top_k"]:
        heated = heated * (heated >= np.sort(heated)[..., -params["top_k"], None])
    return heated / heated.sum(axis=-1, keepdims=True)


def filtered_after_test(
    p: Any, q: Any, drafts: Tokens, rng: Any, params: Params, uniforms: Any = None, *, late: Params
) -> Tokens:
    """`standard`, but drafts are tested with the `late` parameters in place of those in `params`.

    Tokens in place of rejected drafts, and bonus tokens, are drawn with `params`.
    """
    test_rows = iter(sampled_from(p, {**params, **late}))
    steps = Steps(chance=lambda row, q, x: next(test_rows)[x] / q[x])
    return standard(sampled_from(p, params), q, drafts, rng, uniforms, steps=steps)


def with_24_bits(u: Any) -> tuple[Any, Any]:
    """Uniforms rounded to float32, in [2^-24, 1 - 2^-24]; uniforms of an enumeration stay exact."""
    if all(isinstance(x, float) for x in u):
        u = [min(max(float(np.float32(x)), 2.0**-24), 1 - 2.0**-24) for x in u]
    return separate_uniforms(u)


class ReusedAcrossRounds:
    """`standard`, but the uniform that rejects a draft also tests the next round's first draft.

    This happens if a noise counter advances by the number of accepted drafts, not of tested drafts.
    """

    def __init__(self) -> None:
        self.reused: Any = None

    def __call__(self, p: Any, q: Any, drafts: Tokens, rng: Any, uniforms: Any = None) -> Tokens:
        u = [*(uniforms if uniforms is not None else rng.random(len(drafts) + 1))]
        if self.reused is not None:
            u[0] = self.reused
        tokens = standard(p, q, drafts, rng, u)
        num = len(tokens) - 1
        self.reused = u[num] if num < len(drafts) else None
        return tokens


class Bug(NamedTuple):
    """A way to break losslessness."""

    key: str  # its name in results and in tables
    flaw: str  # what is wrong, as part of a sentence
    verify: Any  # the function, or a class with an instance per sample
    by_uniforms: bool = False  # whether the bug shows only with injected uniforms


def _replace_from_p(p: Any, q: Any, x: int) -> Any:
    return p


def _standard(**steps: Callable[..., Any]) -> Any:
    return partial(standard, steps=Steps(**steps))


BUGS = (
    Bug("shared_noise", "draft and residual are drawn with the same noise",
        _standard(replace=after_the_same_race)),
    Bug("block_early_stop", "the block rule stops at its first failure",
        partial(block, flaw="early_stop")),
    Bug("block_residual", "the block rule's residual lacks its weight",
        partial(block, flaw="unweighted")),
    Bug("uncapped_ratio", "the last draft is tested against the uncapped joint ratio",
        partial(block, flaw="uncapped")),
    Bug("one_uniform", "one uniform decides every draft of a round",
        _standard(split=lambda u: ([u[0]] * len(u), [u[-1]] * len(u)))),
    Bug("one_uniform_block", "one uniform decides every draft of a block",
        partial(block, flaw="one_uniform")),
    Bug("reused_uniform", "the uniform that rejects a draft also draws its replacement",
        _standard(split=lambda u: (u[:-1], u))),
    Bug("reused_across_rounds",
        "the uniform that rejects a draft also tests the next round's first draft",
        ReusedAcrossRounds),
    Bug("own_token_truncation", "the drafts of a round end before a token that q finds unlikely",
        _standard(drops=lambda q, x: q[x] < LOW_Q)),
    Bug("placeholders", "sampled drafts of some tokens become placeholders",
        _standard(drops=lambda q, x: x == len(q) - 1)),  # here the last token
    Bug("nucleus_after_test", "drafts are tested before top-k and top-p are applied",
        partial(filtered_after_test, late={"top_k": 0})),
    Bug("temperature_after_test", "drafts are tested before temperature is applied",
        partial(filtered_after_test, late={"temperature": 1.0})),
    Bug("residual_is_p", "a rejected draft is replaced by a token of p, not of the residual",
        _standard(replace=_replace_from_p)),
    Bug("bonus_from_draft", "the token after the last draft is drawn from q, not from p",
        _standard(bonus=lambda p, q: q)),
    # A rule that is lossy by design:
    Bug("lossy_threshold", "drafts are accepted whenever the target finds them likely",
        _standard(chance=lambda p, q, x: p[x] > 0.15, replace=_replace_from_p)),
    Bug("accept_at_zero", "u = 0 accepts a draft of probability 0",
        _standard(below=operator.le), True),
    Bug("float32_tail", "uniforms of 24 bits can never draw a token of probability 2^-27",
        _standard(split=with_24_bits), True),
)  # fmt: skip
LOSSLESS = {
    "standard": standard,
    "block": block,
    # Sampled drafts verified as one-hot, accepted with probability p(x).
    "dropped_q": _standard(
        chance=lambda p, q, x: p[x], replace=lambda p, q, x: p * (np.arange(len(p)) != x)
    ),
}


def member(name: str) -> Any:
    """A rule or a bug by its name."""
    functions = LOSSLESS | {bug.key: bug.verify for bug in BUGS}
    if name not in functions:
        raise ConfigError("gallery", name, f"one of {', '.join(functions)}")
    return functions[name]
