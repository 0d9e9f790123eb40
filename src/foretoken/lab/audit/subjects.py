"""The audits of callables and backends, on toys: small models with known distributions.

A toy is a pair of chains (`laws/chain.py`) on few tokens. An *outcome* is the first `length` tokens
of a sample, emitted by as many rounds as are needed. Together, the toys distinguish the gallery's
bugs.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import operator
import sys
import traceback
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from foretoken.errors import ConfigError, RequestError
from foretoken.lab.audit.enumeration import NotEnumerableError, enumerate_runs
from foretoken.lab.audit.evidence import ALPHA, PlotText, Source
from foretoken.lab.audit.gallery import BUGS, block, standard
from foretoken.lab.laws.acceptance import ends_of_u
from foretoken.lab.laws.chain import Chain, Propose, Setting, TableDrafter, emit
from foretoken.lab.laws.drawing import sampler, tail_counts
from foretoken.lab.laws.findings import poisson
from foretoken.ops import Backend, Rule

Prefix = tuple[int, ...]


class VerifierInputs(NamedTuple):
    """The inputs of one round: p [K + 1, V], q [K, V], K drafts, and p without filters."""

    p: Any
    q: Any
    drafts: list[int]
    unfiltered: Any


class ToyOutcomes(NamedTuple):
    """P(outcome) of a verifier on a toy, [cells], and the mean of drafts that round 1 accepts."""

    probabilities: Any
    mean_accepted: float


@dataclass(frozen=True)
class Toy:
    """A target and a draft on `vocabulary` tokens."""

    name: str
    vocabulary: int
    length: int  # number of tokens of an outcome
    num_drafts: int  # number of drafts of every round
    seed: int
    spread: float = 1.0  # standard deviation of the logits
    filters: dict[str, Any] = field(default_factory=dict)  # of target and draft, as in `Setting`
    draft_ids: int = 0  # the draft proposes only tokens with ids below this; 0: all tokens

    @property
    def cells(self) -> int:
        return int(self.vocabulary**self.length)

    @property
    def plot(self) -> PlotText:
        filters = " and ".join(f"{name} {value}" for name, value in self.filters.items())
        about = (
            f"A toy of {self.vocabulary} tokens, {self.num_drafts} drafted per round"
            f"{', ' * bool(filters)}{filters}. An outcome is a text of {self.length}; the target's "
            "share of it is computed from the toy's own tables."
        )
        texts = itertools.product(map(str, range(self.vocabulary)), repeat=self.length)
        axis = "tokens of the text" if self.length > 1 else "token"
        return PlotText(axis, about, ["".join(text) for text in texts])

    @cached_property
    def chains(self) -> tuple[Chain, Chain]:
        """Target and draft, with independent random logits."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, (self.vocabulary + 1) ** 2, self.vocabulary)
        target, draft = torch.randn(shape, generator=generator) * self.spread
        draft[:, self.draft_ids or self.vocabulary :] = -math.inf
        return Chain(target), Chain(draft)

    @cached_property
    def tables(self) -> tuple[Any, Any, Any]:
        """p, q, and p without filters, by context: numpy float64 [C, V]."""
        target, draft = self.chains
        setting = Setting(**self.filters)
        p, q = (setting.next_token(chain).numpy() for chain in (target, draft))
        return p, q, Setting().next_token(target).numpy()

    def context(self, prefix: Prefix) -> int:
        """Index of the row of `tables` after these tokens; see `Chain`."""
        no_token = self.vocabulary
        previous, last = (no_token, no_token, *prefix)[-2:]
        return previous * (no_token + 1) + last

    def inputs(self, prefix: Prefix, drafts: list[int]) -> VerifierInputs:
        p, q, unfiltered = self.tables
        rows = [self.context((*prefix, *drafts[:i])) for i in range(len(drafts) + 1)]
        return VerifierInputs(p[rows], q[rows[:-1]], drafts, unfiltered[rows])

    @cached_property
    def null(self) -> Any:
        """P(outcome) of the target without speculation, float64 [cells]."""
        p = self.tables[0]
        prefixes = itertools.product(range(self.vocabulary), repeat=self.length)
        return np.array(
            [math.prod(p[self.context(y[:i]), y[i]] for i in range(self.length)) for y in prefixes]
        )

    def cell(self, tokens: Prefix) -> int:
        """The index of the outcome with these tokens."""
        index = 0
        for token in tokens[: self.length]:
            index = index * self.vocabulary + token
        return index

    def outcomes_of(
        self, begin: Callable[[], Any], whole: bool = False, once: bool = False
    ) -> ToyOutcomes:
        """Enumerate every draft and every branch of a verifier; rounding errors are below 1e-11.

        Args:
            begin: makes the verifier of a sample, as `BoundVerifier.begin` does.
            whole: enumerate whole samples, for a verifier that remembers earlier rounds.
            once: tokens after the first round are drawn from the target, which saves runs.

        Raises:
            NotEnumerableError: see `enumerate_runs`.
        """
        p = self.tables[0]
        mass: dict[Prefix, float] = {(): 1.0}
        outcome, accepted = np.zeros(self.cells), np.zeros(self.num_drafts + 1)
        for length in range(self.length):
            for prefix in [known for known in mass if len(known) == length]:
                weight = mass.pop(prefix)
                if once and prefix:
                    next_token = enumerate(p[self.context(prefix)])
                    runs: dict[tuple[Prefix, ...], Any] = {((x,),): y for x, y in next_token}
                else:
                    runs = self._runs(begin, prefix, whole and not once)
                for rounds, chance in runs.items():
                    if not prefix:
                        accepted[len(rounds[0]) - 1] += chance
                    tokens = sum(rounds, prefix)
                    if len(tokens) >= self.length:
                        outcome[self.cell(tokens)] += weight * chance
                    else:
                        mass[tokens] = mass.get(tokens, 0.0) + weight * chance
        return ToyOutcomes(outcome, float(accepted @ np.arange(len(accepted))))

    def _runs(
        self, begin: Callable[[], Any], prefix: Prefix, whole: bool
    ) -> dict[tuple[Prefix, ...], Any]:
        """P(emitted tokens, one tuple per round) after a prefix; `whole`: of all later rounds."""
        q = self.tables[1]

        def run(rng: Any) -> tuple[Prefix, ...]:
            verify, tokens, rounds = begin(), prefix, list[Prefix]()
            while not rounds or (whole and len(tokens) < self.length):
                drafts: list[int] = []
                for _ in range(self.num_drafts):
                    drafts.append(rng.fork(q[self.context((*tokens, *drafts))]))
                rounds.append(verify(self, self.inputs(tokens, drafts), rng))
                tokens += rounds[-1]
            return tuple(rounds)

        return enumerate_runs(run)

    @cached_property
    def optimum(self) -> tuple[float, float]:
        """The mean number of accepted drafts per round: of `standard`, of `block` (the optimum)."""
        of_standard = self.outcomes_of(bind(standard).begin).mean_accepted
        of_block = self.outcomes_of(bind(block).begin).mean_accepted
        return of_standard, of_block


# With these seeds every bug of the gallery differs from p by at least 0.0029 nats per outcome.
TOYS = (
    Toy("pairs", 4, 2, 2, seed=3),
    Toy("binary", 2, 4, 3, seed=1),
    Toy("filtered", 4, 2, 2, seed=2, spread=0.7, filters={"top_k": 3}),
    Toy("heated", 16, 1, 1, seed=4, spread=0.7, filters={"temperature": 0.6}),
)
# Toys that are only enumerated, for one round: some verifiers are correct only for few tokens. With
# few ids of drafts the enumeration takes 2,000 runs.
_TOY_64, _TOY_16 = Toy("wide", 64, 2, 1, seed=5), Toy("wide pairs", 16, 3, 2, seed=6)
WIDE = (replace(_TOY_64, draft_ids=16), replace(_TOY_16, draft_ids=4))


def up_to(toys: Sequence[Toy]) -> str:
    """The vocabulary of the largest toy, as part of a sentence."""
    return f" of up to {max(toy.vocabulary for toy in toys)} tokens"


TAIL_DRAWS = 2**21
UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

Verifier = Callable[..., Sequence[int]]
"""verify(p, q, drafts, rng) -> the emitted tokens: accepted drafts, then one more token.

p [K + 1, V] and q [K, V] are float64 arrays, drafts are K ids drawn from q's rows, rng is a
`numpy.random.Generator`. A parameter named `uniforms` gets K + 1 numbers in [0, 1) to use instead
of rng, which may then be left out; the last number is for the token after the drafts. A parameter
named `params` gets the target's filters; p is then unfiltered. If the verifier is a class, each
sample has an instance, which is called for all rounds of the sample.
"""

Draw = Callable[[int, int, int], tuple[Any, ...]]
"""(index of the source, number of outcomes, index of the batch) -> arguments of `Evidence.add`
after `number`."""

Checks = tuple[list[str], list[str]]
"""Bugs found without draws, and a line for each check."""


class Subject(NamedTuple):
    """What is audited: its name, its sources of outcomes, and how it draws from them."""

    name: str
    sources: Sequence[Source]
    draw: Draw
    # A verifier to enumerate, or other checks without draws; None: no such checks.
    exact: BoundVerifier | Callable[[], Checks] | None = None
    batch: int = 1000  # number of outcomes of a source that are drawn together
    budget: int = 60_000  # default of the total number of outcomes
    notes: Callable[[], list[str]] = list  # returns further lines to report at the end
    draw_share: float = 1.0  # share of alpha for the draws; checks without draws have the rest
    of_tokens: str = ""  # the largest vocabulary of its toys, as part of a sentence


def run_checks(*checks: Callable[[], tuple[str | None, str]]) -> Checks:
    """Run checks without draws; each check returns a bug or None, and a line."""
    results = [check() for check in checks]
    return [bug for bug, _ in results if bug], [line for _, line in results]


class StoppedError(Exception):
    """A subject gives no more outcomes: the audit ends early, and reports that."""


class BoundVerifier(NamedTuple):
    """A verifier with its optional parameters, those other than p, q and drafts."""

    verify: Verifier
    takes_rng: bool = True
    takes_uniforms: bool = False
    takes_params: bool = False

    @property
    def name(self) -> str:
        return str(getattr(self.verify, "__name__", self.verify))

    @property
    def remembers(self) -> bool:
        """Whether a round may depend on earlier rounds."""
        return isinstance(self.verify, type)

    def begin(self) -> BoundVerifier:
        """The verifier for the rounds of one sample; if it is a class, a new instance."""
        verify: Any = self.verify() if self.remembers else self.verify
        return self._replace(verify=verify)

    def __call__(
        self, toy: Toy, inputs: VerifierInputs, rng: Any, uniforms: Sequence[float] | None = None
    ) -> Prefix:
        """The tokens that the verifier emits in one round.

        Raises:
            RequestError: the verifier raised an error, or returned what no round could emit.
        """
        options: dict[str, Any] = {}
        if self.takes_uniforms:
            drawn = rng.random(len(inputs.drafts) + 1) if uniforms is None else uniforms
            options["uniforms"] = drawn
        if self.takes_params:
            options["params"] = {**UNFILTERED, **toy.filters}
        p = inputs.unfiltered if self.takes_params else inputs.p
        arguments = (p.copy(), inputs.q.copy(), list(inputs.drafts), *[rng] * self.takes_rng)
        try:
            returned = self.verify(*arguments, **options)
        except NotEnumerableError:
            raise
        except Exception as error:
            file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
            remedy = (
                f"With {len(inputs.drafts)} drafts of {toy.vocabulary} tokens the function raised "
                f"{error!r} in {Path(file).name}, line {line}."
            )
            bound = "a function (p, q, drafts, rng) that returns token ids"
            raise RequestError("callable", self.name, bound, remedy) from error
        try:
            tokens = tuple(operator.index(token) for token in returned)
        except TypeError:
            raise RequestError(f"{self.name}()", returned, "a sequence of token ids") from None
        k = len(tokens) - 1  # number of accepted drafts
        if not 0 <= k <= len(inputs.drafts) or list(tokens[:k]) != list(inputs.drafts[:k]):
            bound = f"a prefix of the drafts {inputs.drafts} (maybe empty), then one more token"
            raise RequestError(f"{self.name}()", tokens, bound)
        if not 0 <= tokens[-1] < toy.vocabulary:
            raise RequestError(f"{self.name}()", tokens, f"ids in [0, {toy.vocabulary - 1}]")
        return tokens


def bind(verify: Verifier) -> BoundVerifier:
    """A verifier with its optional parameters, which are read from its signature."""
    try:
        function = verify.__call__ if isinstance(verify, type) else verify
        parameters = [*inspect.signature(function).parameters.values()]
        parameters = parameters[isinstance(verify, type) :]  # without `self`
    except (TypeError, ValueError):  # some extension modules have no signature
        return BoundVerifier(verify)
    names = [p.name for p in parameters]
    positional = [p for p in parameters if p.name not in ("uniforms", "params")]
    positional = [p for p in positional if p.kind != p.KEYWORD_ONLY]
    takes_rng = len(positional) > 3 or any(p.kind == p.VAR_POSITIONAL for p in positional)
    return BoundVerifier(verify, takes_rng, "uniforms" in names, "params" in names)


def load_verifier(name: str) -> BoundVerifier:
    """Import the verifier `module:function`, from a module or from a file in the working folder."""
    module, _, function = name.partition(":")
    remedy = "For example `my_verifier:verify` for `verify` in my_verifier.py."
    if not module or not function:
        raise ConfigError("callable", name, "module:function", remedy)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        verifier: Any = _module(module)
        for part in function.split("."):
            verifier = getattr(verifier, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError("callable", name, "an importable function", f"{error}.") from error
    if not callable(verifier):
        raise ConfigError("callable", name, f"a function, not {type(verifier).__name__}", remedy)
    return bind(verifier)


def _module(name: str) -> Any:
    """Import a module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise ImportError(f"There is no file {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def toy_sources() -> tuple[Source, ...]:
    """A source for each of `TOYS`, with the distributions of the gallery's bugs."""
    bugs = {bug.key: bind(bug.verify) for bug in BUGS if not bug.by_uniforms}
    sources = []
    for toy in TOYS:
        outcomes = {k: toy.outcomes_of(b.begin, b.remembers) for k, b in bugs.items()}
        distributions = {k: outcome.probabilities for k, outcome in outcomes.items()}
        source = Source(toy.name, toy.null, distributions, toy.num_drafts, max(toy.optimum))
        sources.append(source._replace(usual_accepted=toy.optimum[0], plot=toy.plot))
    return tuple(sources)


def callable_subject(name: str, verify: BoundVerifier, seed: int = 0) -> Subject:
    """The audit of a Python verifier, on toys."""

    def draw(number: int, trials: int, batch: int) -> tuple[Any, Any]:
        toy = TOYS[number]
        rng = np.random.default_rng((seed, number, batch))
        cumulative_q = toy.tables[1].cumsum(axis=1)[:, :-1].tolist()
        cells, accepted = np.empty(trials, np.int64), np.empty(trials, np.int64)
        for n in range(trials):
            tokens, verify_round = Prefix(), verify.begin()
            while len(tokens) < toy.length:
                drafts: list[int] = []
                for u in rng.random(toy.num_drafts):
                    drafts.append(bisect(cumulative_q[toy.context((*tokens, *drafts))], u))
                emitted = verify_round(toy, toy.inputs(tokens, drafts), rng)
                if not tokens:
                    accepted[n] = len(emitted) - 1
                tokens += emitted
            cells[n] = toy.cell(tokens)
        return cells, accepted

    return Subject(name, toy_sources(), draw, verify, of_tokens=up_to(TOYS))


def backend_subject(
    name: str,
    backend: Backend,
    device: torch.device,
    rule: Rule,
    seed: int = 0,
    mutate: Callable[[Propose], Propose] = lambda propose: propose,
    alpha: float = ALPHA,
) -> Subject:
    """The audit of a backend's `draft` and `verify`, on toys with thousands of slots per call.

    Only `standard` has checks of u's ends and of a far tail, which get half of `alpha`.
    `mutate` changes the drafter.
    """

    def draw(number: int, trials: int, batch: int) -> tuple[Any, Any]:
        toy = TOYS[number]
        target, draft = (chain.to(device) for chain in toy.chains)
        make = partial(TableDrafter, backend, draft, num_drafts=toy.num_drafts)
        emission = emit(
            backend, target, lambda params: mutate(make(params)), Setting(rule=rule, **toy.filters),
            length=toy.length, trials=trials, seed=1 + seed * 1009 + batch,
        )  # fmt: skip
        digits = toy.vocabulary ** torch.arange(toy.length - 1, -1, -1, device=device)
        cells = (emission.token_SL * digits).sum(dim=1)
        return cells.cpu().numpy(), emission.first_accepted_S.cpu().numpy()

    def check_ends() -> Checks:
        broken = [] if all(f.passed for f in ends_of_u(backend, device)) else ["accept_at_zero"]
        if poisson(*tail_counts(sampler(backend), device, 1024, TAIL_DRAWS)) < alpha / 2:
            broken.append("float32_tail")
        result = ", ".join(broken) or "both ends are right"
        return broken, [f"u at both ends, {TAIL_DRAWS:,} draws from 1,024 tokens: {result}."]

    subject = Subject(name, toy_sources(), draw, batch=4000, of_tokens=up_to(TOYS))
    return subject._replace(exact=check_ends, draw_share=0.5) if rule is Rule.STANDARD else subject
