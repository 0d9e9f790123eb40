"""Small models of which everything is known: 16 outcomes, their probabilities, every verdict.

A toy is a pair of chains (`laws/chain.py`) on few tokens. An *outcome* is its first `length`
tokens, emitted by as many rounds as it takes; it has the target's distribution if and only if the
subject is lossless there. Between them the toys tell the gallery's bugs from each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from foretoken.lab.audit.enumeration import enumerate_runs
from foretoken.lab.audit.evidence import Shown
from foretoken.lab.audit.gallery import block, standard
from foretoken.lab.laws.chain import Chain, Setting

Prefix = tuple[int, ...]


class Round(NamedTuple):
    """What a verifier gets: p [K + 1, V], q [K, V], K drafts; p before its filters."""

    p: Any
    q: Any
    drafts: list[int]
    unfiltered: Any


class Law(NamedTuple):
    """What a verifier does on a toy: P(outcome) [cells], and P(i drafts accepted) of round one."""

    outcome: Any
    accepted: Any

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted per round."""
        return float(self.accepted @ np.arange(len(self.accepted)))


@dataclass(frozen=True)
class Toy:
    """A target and a draft on `vocabulary` tokens.

    Attributes:
        length: tokens of an outcome; `num_drafts` of every round.
        spread: standard deviation of the logits.
        filters: of target and draft, as `Setting` names them.
        drafted: so many tokens the draft knows, the first ones; 0: all.
    """

    name: str
    vocabulary: int
    length: int
    num_drafts: int
    seed: int
    spread: float = 1.0
    filters: dict[str, Any] = field(default_factory=dict)
    drafted: int = 0

    @property
    def cells(self) -> int:
        """How many outcomes there are."""
        return int(self.vocabulary**self.length)

    @property
    def shown(self) -> Shown:
        """What a plot says of it."""
        known = " and ".join(f"{name} {value}" for name, value in self.filters.items())
        about = (
            f"A toy of {self.vocabulary} tokens, {self.num_drafts} drafted per round"
            f"{', ' * bool(known)}{known}. An outcome is a text of {self.length}; the target's "
            "share of it is computed from the toy's own tables."
        )
        texts = itertools.product(map(str, range(self.vocabulary)), repeat=self.length)
        axis = "tokens of the text" if self.length > 1 else "token"
        return Shown(axis, about, ["".join(text) for text in texts])

    @cached_property
    def chains(self) -> tuple[Chain, Chain]:
        """Target and draft, whose logits are independent."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, (self.vocabulary + 1) ** 2, self.vocabulary)
        target, draft = torch.randn(shape, generator=generator) * self.spread
        draft[:, self.drafted or self.vocabulary :] = -math.inf
        return Chain(target), Chain(draft)

    @cached_property
    def tables(self) -> tuple[Any, Any, Any]:
        """p, q and p before its filters, by context: float64 [C, V] of numpy."""
        target, draft = self.chains
        settings = (target, Setting(**self.filters)), (draft, Setting(**self.filters))
        p, q = (setting.next_token(chain).numpy() for chain, setting in settings)
        return p, q, Setting().next_token(target).numpy()

    def context(self, prefix: Prefix) -> int:
        """The row of the tables after these tokens; see `Chain`."""
        none = self.vocabulary
        last = (none, none, *prefix)[-2:]
        return last[0] * (none + 1) + last[1]

    def round(self, prefix: Prefix, drafts: list[int]) -> Round:
        """What is verified when these drafts were drawn after that prefix."""
        p, q, unfiltered = self.tables
        rows = [self.context((*prefix, *drafts[:i])) for i in range(len(drafts) + 1)]
        return Round(p[rows], q[rows[:-1]], drafts, unfiltered[rows])

    @cached_property
    def null(self) -> Any:
        """P(outcome) of the target alone, float64 [cells]."""
        p = self.tables[0]
        prefixes = itertools.product(range(self.vocabulary), repeat=self.length)
        return np.array(
            [math.prod(p[self.context(y[:i]), y[i]] for i in range(self.length)) for y in prefixes]
        )

    def cell(self, tokens: Prefix) -> int:
        """The number of an outcome."""
        number = 0
        for token in tokens[: self.length]:
            number = number * self.vocabulary + token
        return number

    def law_of(self, begin: Callable[[], Any], whole: bool = False, once: bool = False) -> Law:
        """By enumeration of every draft and every branch; the sums of less than 10 000 products of
        floats are right to 1e-11. Raises `NotEnumerableError`.

        Args:
            begin: gives the verifier of a sample, as `subjects.Bound` does.
            whole: it remembers its rounds, so that each run is of a sample and not of a round.
            once: the target itself goes on after the first round, which tells whether that round
                is lossless at a fraction of the runs.
        """
        p = self.tables[0]
        mass: dict[Prefix, float] = {(): 1.0}
        outcome, accepted = np.zeros(self.cells), np.zeros(self.num_drafts + 1)
        for length in range(self.length):
            for prefix in [given for given in mass if len(given) == length]:
                weight = mass.pop(prefix)
                runs = (
                    {((x,),): p[self.context(prefix), x] for x in range(self.vocabulary)}
                    if once and prefix
                    else self._runs(begin, prefix, whole and not once)
                )
                for rounds, chance in runs.items():
                    if not prefix:
                        accepted[len(rounds[0]) - 1] += chance
                    tokens = sum(rounds, prefix)
                    if len(tokens) >= self.length:
                        outcome[self.cell(tokens)] += weight * chance
                    else:
                        mass[tokens] = mass.get(tokens, 0.0) + weight * chance
        return Law(outcome, accepted)

    def _runs(
        self, begin: Callable[[], Any], prefix: Prefix, whole: bool
    ) -> dict[tuple[Prefix, ...], Any]:
        """P(what each round emits) of the next round, or of all up to the end."""
        q = self.tables[1]

        def run(rng: Any) -> tuple[Prefix, ...]:
            verify, tokens, rounds = begin(), prefix, list[Prefix]()
            while not rounds or (whole and len(tokens) < self.length):
                drafts: list[int] = []
                for _ in range(self.num_drafts):
                    drafts.append(rng.fork(q[self.context((*tokens, *drafts))]))
                rounds.append(verify(self, self.round(tokens, drafts), rng))
                tokens += rounds[-1]
            return tuple(rounds)

        return enumerate_runs(run)

    @cached_property
    def optimum(self) -> tuple[float, float]:
        """Drafts accepted per round by `standard`, and by `block`: nothing lossless accepts more.

        For one draft both are sum_x min(p(x), q(x)).
        """
        first, second = (
            self.law_of(partial(_unbound, rule)).mean_accepted for rule in (standard, block)
        )
        return first, second


def _unbound(rule: Any) -> Any:
    return lambda toy, given, rng: tuple(rule(given.p, given.q, given.drafts, rng))


# Seeds by which every bug of the gallery stands out: 0.0029 nats per outcome or more.
TOYS = (
    Toy("pairs", 4, 2, 2, seed=3),
    Toy("binary", 2, 4, 3, seed=1),
    Toy("filtered", 4, 2, 2, seed=2, spread=0.7, filters={"top_k": 3}),
    Toy("heated", 16, 1, 1, seed=4, spread=0.7, filters={"temperature": 0.6}),
)
# Enumerated alone, and one round of them: some verifiers are right for few tokens only. Few drafts
# keep that at 2,000 runs.
WIDE = (Toy("wide", 64, 2, 1, seed=5, drafted=16), Toy("wide pairs", 16, 3, 2, seed=6, drafted=4))


def up_to(toys: Sequence[Toy]) -> str:
    """The size of the largest, as part of a sentence."""
    return f" of up to {max(toy.vocabulary for toy in toys)} tokens"
