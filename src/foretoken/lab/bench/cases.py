"""What is compared with what: cases of decoding, the sweeps that make them, and loads. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError

SYNTHETIC = {"length": "synthetic_acceptance_length", "rate": "synthetic_acceptance_rate"}
SWEPT: dict[str, type] = {
    "k": int, "drafter": str, "rule": str, "temperature": float, "length": float, "rate": float,
}  # fmt: skip
"""What can be swept, and what its values are."""


class Load(NamedTuple):
    """How requests come: so many at a time, or so many in a second, at random (Poisson)."""

    concurrency: int
    rate: float | None = None

    @property
    def name(self) -> str:
        """As rows of a results file have it."""
        if self.rate is None:
            return f"concurrency {self.concurrency}"
        return f"{self.rate:g} requests/s"


@dataclass(frozen=True, eq=False)
class Case:
    """A way to decode; equal to itself alone.

    Attributes:
        name: as rows have it; without what all cases share.
        labels: `method`, `k`, `rule`, `temperature`, and what else was swept.
        fields: of `SamplingParams`, that all requests of the case have.
        speculation: options of the engine, where they cannot be a request's.
    """

    name: str
    labels: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether nothing is drafted, so that others are compared with it."""
        return bool(self.labels["method"] == "plain")


def parse_sweep(given: Sequence[str]) -> dict[str, list[Any]]:
    """`k=2,4` and so on as values by name; `ConfigError` names what is none."""
    found: dict[str, list[Any]] = {}
    for text in given:
        name, _, values = text.partition("=")
        bound = f"NAME=VALUE,VALUE with NAME one of {', '.join(SWEPT)}, each of them once"
        if name not in SWEPT or name in found:
            raise ConfigError("sweep", text, bound)
        try:
            found[name] = [SWEPT[name](value.strip()) for value in values.split(",")]
        except ValueError:
            raise ConfigError("sweep", text, f"{SWEPT[name].__name__} values of `{name}`") from None
        if len(set(found[name])) < len(found[name]) or "" in found[name]:
            raise ConfigError("sweep", text, "values that all differ, and are not empty")
    return found


def engine_cases(
    sweep: Mapping[str, list[Any]],
    temperature: float,
    speculation: SpeculativeConfig | None,
    *,
    compare: bool,
) -> list[list[Case]]:
    """Cases that take turns, in one list for each engine that has to be made.

    A request sets its own K, drafter, rule and temperature. The rates of synthetic acceptance are
    the engine's, and are those of its K: every combination of the two is an engine of its own.
    """
    if speculation is None:
        if others := [name for name in sweep if name != "temperature"]:
            bound = "left out where nothing is drafted"
            remedy = "Say how to draft with --speculative-config."
            raise ConfigError("sweep", f"{others[0]}=...", bound, remedy)
        return [_plain(sweep, temperature)]
    swept = [name for name in SYNTHETIC if name in sweep]
    if len(swept) > 1:
        raise ConfigError("sweep", "length=..., rate=...", "one of the two")
    rule = "synthetic" if swept else speculation.rejection_sample_method
    ks = sweep.get("k", [speculation.num_speculative_tokens])
    engines: dict[tuple[Any, ...], list[Case]] = {}
    for k, value in product(ks, sweep[swept[0]] if swept else [None]):
        options = {"num_speculative_tokens": k}
        if rule != "synthetic" and len(ks) > 1:
            options["num_speculative_tokens"] = max(ks)  # of which a request may have fewer
        mark = ""
        if swept:
            options |= {**dict.fromkeys(SYNTHETIC.values()), SYNTHETIC[swept[0]]: value}
            options |= {"synthetic_acceptance_rates": None, "rejection_sample_method": "synthetic"}
            mark = f", {swept[0]} {value:g}"
        cases = engines.setdefault(tuple(options.values()), [])
        if compare and not cases:
            apart = f" (K={k}{mark})" if rule == "synthetic" and (swept or len(ks) > 1) else ""
            cases += _plain(sweep, temperature, apart, options)
        for made in _drafting(sweep, temperature, str(speculation.method), [k], rule):
            labels = {**made.labels, swept[0]: value} if swept else made.labels
            cases.append(replace(made, name=made.name + mark, labels=labels, speculation=options))
    return [*engines.values()]


def server_cases(
    sweep: Mapping[str, list[Any]], temperature: float, *, speculates: bool, compare: bool
) -> list[list[Case]]:
    """Cases of a server; only one whose requests choose how they are drafted for has several."""
    known = {"k", "drafter", "rule", "temperature"} if speculates else {"temperature"}
    if others := [name for name in sweep if name not in known]:
        bound = f"of {', '.join(sorted(known))}: no more can be set by requests to this server"
        raise ConfigError("sweep", f"{others[0]}=...", bound)
    plain = _plain(sweep, temperature) if speculates and compare else []
    method = "speculative" if speculates else "server"
    return [[*plain, *_drafting(sweep, temperature, method, sweep.get("k", [None]), None)]]


def speculation_of(given: SpeculativeConfig | None, case: Case) -> SpeculativeConfig | None:
    """The engine's options with those that a case sets."""
    if given is None:
        return None
    kept = {field.name: getattr(given, field.name) for field in fields(given)}
    return SpeculativeConfig(**{**kept, **case.speculation})


def _plain(
    sweep: Mapping[str, list[Any]],
    temperature: float,
    apart: str = "",
    speculation: Mapping[str, Any] | None = None,
) -> list[Case]:
    """Without drafts, once for each temperature; `apart` ends the name where engines differ."""
    made = []
    for t in sweep.get("temperature", [temperature]):
        name = "plain" + (f", T={t:g}" if "temperature" in sweep else "") + apart
        labels = {"method": "plain", "k": 0, "rule": None, "temperature": t}
        fields = {"temperature": t, "num_speculative_tokens": 0}
        made.append(Case(name, labels, fields, speculation or {}))
    return made


def _drafting(
    sweep: Mapping[str, list[Any]],
    temperature: float,
    method: str,
    ks: Sequence[int | str | None],
    own_rule: str | None,
) -> list[Case]:
    """Every combination of what requests set; None is left to the engine or server."""
    made = []
    for k, t, drafter, rule in product(
        ks,
        sweep.get("temperature", [temperature]),
        sweep.get("drafter", [None]),
        sweep.get("rule", [own_rule]),
    ):
        name = f"{drafter or method}" + (f", K={k}" if k is not None else "")
        name += f", {rule}" if "rule" in sweep else ""
        name += f", T={t:g}" if "temperature" in sweep else ""
        labels = {"method": drafter or method, "k": k, "rule": rule, "temperature": t}
        asked = {"num_speculative_tokens": k, "drafter": drafter, "rejection_sample_method": rule}
        set_here = {field: value for field, value in asked.items() if value is not None}
        made.append(Case(name, labels, {"temperature": t, **set_here}))
    return made
