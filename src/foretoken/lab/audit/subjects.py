"""Callables and backends as sources of outcomes: thin adapters around somebody's verifier."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import sys
import traceback
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from foretoken.errors import ConfigError, RequestError
from foretoken.lab.audit.enumeration import NotEnumerableError
from foretoken.lab.audit.evidence import ALPHA, Model
from foretoken.lab.audit.gallery import BUGS
from foretoken.lab.audit.toys import TOYS, Prefix, Round, Toy, up_to
from foretoken.lab.laws.acceptance import ends_of_u
from foretoken.lab.laws.chain import Setting
from foretoken.lab.laws.drawing import sampler, tail_counts
from foretoken.lab.laws.emission import Propose, TableDrafter, emit
from foretoken.lab.laws.findings import poisson
from foretoken.ops import Backend, Rule

TAIL_DRAWS = 2**21
UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

Verifier = Callable[..., Sequence[int]]
"""verify(p, q, drafts, rng) -> the tokens emitted: accepted drafts, then one more.

p [K + 1, V] and q [K, V] are float64 arrays, drafts K ids drawn from q's rows, rng a
`numpy.random.Generator`. A parameter named `uniforms` gets K + 1 numbers in [0, 1) to use instead
(rng may then be left out), the last one for the token after the drafts; one named `params` gets the
target's filters, and p is then given before them. Of a class each sample has an instance, which is
called for all its rounds.
"""

Draw = Callable[[int, int, int], tuple[Any, ...]]
"""(number of the model, how many, wave) -> what `Evidence.add` takes after the number."""

Checks = tuple[list[str], list[str]]
"""Bugs that were found without draws, and a line for each check."""


class Subject(NamedTuple):
    """What is audited: its name, the models that it is tried on, and how it draws from them.

    Attributes:
        exact: a verifier to enumerate, or other checks without draws; None: there are none.
        batch: outcomes of a model that are drawn together.
        budget: outcomes in all, unless another number is asked for.
        notes: what to say beside the evidence when all is done.
        drawn: part of alpha that the draws have, where checks without draws have the rest.
        of_tokens: how many tokens its models tell apart, as part of a sentence; "": all.
    """

    name: str
    models: Sequence[Model]
    draw: Draw
    exact: Bound | Callable[[], Checks] | None = None
    batch: int = 1000
    budget: int = 60_000
    notes: Callable[[], list[str]] = list
    drawn: float = 1.0
    of_tokens: str = ""


def checked(*checks: Callable[[], tuple[str | None, str]]) -> Checks:
    """What checks without draws find, each a bug or None, and a line."""
    found = [check() for check in checks]
    return [bug for bug, _ in found if bug], [line for _, line in found]


class StoppedError(Exception):
    """A subject gives no more outcomes: the audit ends with what there is, and says so."""


class Bound(NamedTuple):
    """A verifier, and which parameters it takes beside p, q and drafts."""

    verify: Verifier
    takes_rng: bool = True
    takes_uniforms: bool = False
    takes_params: bool = False

    @property
    def name(self) -> str:
        """The function's own, for errors."""
        return str(getattr(self.verify, "__name__", self.verify))

    @property
    def remembers(self) -> bool:
        """Whether its rounds may depend on those before."""
        return isinstance(self.verify, type)

    def begin(self) -> Bound:
        """What verifies the rounds of one sample."""
        made: Any = self.verify() if self.remembers else self.verify
        return self._replace(verify=made)

    def __call__(
        self, toy: Toy, given: Round, rng: Any, uniforms: Sequence[float] | None = None
    ) -> Prefix:
        """The tokens emitted; `RequestError` if it raises, or they are none of a round."""
        more: dict[str, Any] = {}
        if self.takes_uniforms:
            more["uniforms"] = rng.random(len(given.drafts) + 1) if uniforms is None else uniforms
        if self.takes_params:
            more["params"] = {**UNFILTERED, **toy.filters}
        p = given.unfiltered if self.takes_params else given.p
        known = (p.copy(), given.q.copy(), list(given.drafts), *[rng] * self.takes_rng)
        try:
            out = self.verify(*known, **more)
        except NotEnumerableError:
            raise
        except Exception as error:
            file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
            said = (
                f"With {len(given.drafts)} drafts of {toy.vocabulary} tokens it raised {error!r} "
                f"in {Path(file).name}, line {line}."
            )
            bound = "a function (p, q, drafts, rng) that returns token ids"
            raise RequestError("callable", self.name, bound, said) from error
        try:
            tokens = tuple(operator.index(token) for token in out)
        except TypeError:
            raise RequestError(f"{self.name}()", out, "a sequence of token ids") from None
        num = len(tokens) - 1
        if not 0 <= num <= len(given.drafts) or list(tokens[:num]) != list(given.drafts[:num]):
            bound = f"none, some or all of the drafts {given.drafts}, in order, and one token more"
            raise RequestError(f"{self.name}()", tokens, bound)
        if not 0 <= tokens[-1] < toy.vocabulary:
            raise RequestError(f"{self.name}()", tokens, f"ids in [0, {toy.vocabulary - 1}]")
        return tokens


def bind(verify: Verifier) -> Bound:
    """Looks up which parameters it takes."""
    try:
        called = verify.__call__ if isinstance(verify, type) else verify
        listed = [*inspect.signature(called).parameters.values()][isinstance(verify, type) :]
    except (TypeError, ValueError):  # some extension modules do not say
        return Bound(verify)
    names = [p.name for p in listed]
    plain = [p for p in listed if p.name not in ("uniforms", "params") and p.kind != p.KEYWORD_ONLY]
    rng = len(plain) > 3 or any(p.kind == p.VAR_POSITIONAL for p in plain)
    return Bound(verify, rng, "uniforms" in names, "params" in names)


def load(name: str) -> Bound:
    """The function that `module:function` names, of a module or a file in the working folder."""
    module, _, function = name.partition(":")
    remedy = "For example `my_verifier:verify` for `verify` in my_verifier.py."
    if not module or not function:
        raise ConfigError("callable", name, "module:function", remedy)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = _module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError("callable", name, "what can be imported", f"{error}.") from error
    if not callable(found):
        raise ConfigError("callable", name, f"a function, not {type(found).__name__}", remedy)
    return bind(found)


def _module(name: str) -> Any:
    """By its name, or its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise ImportError(f"There is no file {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def models() -> tuple[Model, ...]:
    """The toys, with what every bug of the gallery does on them."""
    bugs = {bug.key: bind(bug.verify) for bug in BUGS if not bug.by_uniforms}
    return tuple(
        Model(
            toy.name,
            toy.null,
            {key: toy.law_of(bug.begin, bug.remembers).outcome for key, bug in bugs.items()},
            toy.num_drafts,
            max(toy.optimum),
            toy.optimum[0],
            shown=toy.shown,
        )
        for toy in TOYS
    )


def of_callable(name: str, verify: Bound, seed: int = 0) -> Subject:
    """One call at a time; each round's drafts are drawn from q."""

    def draw(number: int, trials: int, wave: int) -> tuple[Any, Any]:
        toy = TOYS[number]
        rng = np.random.default_rng((seed, number, wave))
        below = toy.tables[1].cumsum(axis=1)[:, :-1].tolist()
        cells, accepted = np.empty(trials, np.int64), np.empty(trials, np.int64)
        for n in range(trials):
            tokens, sample = Prefix(), verify.begin()
            while len(tokens) < toy.length:
                drafts: list[int] = []
                for u in rng.random(toy.num_drafts):
                    drafts.append(bisect(below[toy.context((*tokens, *drafts))], u))
                emitted = sample(toy, toy.round(tokens, drafts), rng)
                if not tokens:
                    accepted[n] = len(emitted) - 1
                tokens += emitted
            cells[n] = toy.cell(tokens)
        return cells, accepted

    return Subject(name, models(), draw, verify, of_tokens=up_to(TOYS))


def of_backend(
    name: str,
    backend: Backend,
    device: torch.device,
    rule: Rule,
    seed: int = 0,
    mutate: Callable[[Propose], Propose] = lambda propose: propose,
    alpha: float = ALPHA,
) -> Subject:
    """A backend's own `draft` and `verify`, thousands of slots to a call.

    Of `standard`, half of `alpha` is for a count of tokens from a far tail, the rest for the draws.
    """

    def draw(number: int, trials: int, wave: int) -> tuple[Any, Any]:
        toy = TOYS[number]
        target, drafted = (chain.to(device) for chain in toy.chains)
        make = partial(TableDrafter, backend, drafted, num_drafts=toy.num_drafts)
        emission = emit(
            backend, target, lambda params: mutate(make(params)), Setting(rule=rule, **toy.filters),
            length=toy.length, trials=trials, seed=1 + seed * 1009 + wave,
        )  # fmt: skip
        digits = toy.vocabulary ** torch.arange(toy.length - 1, -1, -1, device=device)
        cells = (emission.token_SL * digits).sum(dim=1)
        return cells.cpu().numpy(), emission.first_S.cpu().numpy()

    def ends() -> Checks:
        broken = [] if all(f.passed for f in ends_of_u(backend, device)) else ["accept_at_zero"]
        if poisson(*tail_counts(sampler(backend), device, 1024, TAIL_DRAWS)) < alpha / 2:
            broken.append("float32_tail")
        worst = ", ".join(broken) or "both ends are right"
        return broken, [f"u at both ends, and a tail in {TAIL_DRAWS:,} draws of 1,024: {worst}."]

    subject = Subject(name, models(), draw, batch=4000, of_tokens=up_to(TOYS))
    return subject._replace(exact=ends, drawn=0.5) if rule is Rule.STANDARD else subject
