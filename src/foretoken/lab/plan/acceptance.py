"""How many drafts are accepted, however that is stated. No torch.

One of: a rate or a length at the largest K, from which others follow by the decay that synthetic
acceptance has; a rate for each position; or a file. A file is JSON or YAML: `foretoken bench`'s
results, `{"rate": r}`, `{"rates": [..]}`, `{"length": L}`, or mean lengths by K, as public tables
of acceptance lengths have them, maybe under names: `{"a-model": {"thinking_on": {1: 1.78, ..}}}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import numpy as np

from foretoken.config import check_int, check_number
from foretoken.errors import ConfigError
from foretoken.sampling.synthetic import conditional_rates, joint_rates

_KINDS = ("rate", "rates", "length")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chances that the first 1, 2, .. drafts are all accepted, by K.

    Attributes:
        rates: the chances, of as many drafts as they are known for.
        lengths: K -> mean tokens of a round, bonus included; in the place of rates.
        source: where it is from, for a report.
    """

    rates: Sequence[float] = ()
    lengths: Mapping[int, float] = field(default_factory=dict)
    source: str = "stated"

    @property
    def most(self) -> int:
        """The largest K that it tells of."""
        return max(self.lengths, default=len(self.rates))

    def joint(self, drafts: int) -> tuple[float, ...]:
        """Of K drafts. Between two K whose lengths are known, the length is on a line.

        Raises:
            ConfigError: K is larger than `most`.
        """
        check_int("drafts", drafts, 0, self.most, "Nothing is known of the acceptance beyond.")
        if not self.lengths or not drafts:
            return tuple(self.rates[:drafts])
        known = sorted({0: 1.0, **self.lengths}.items())
        at, lengths = zip(*known, strict=True)
        length = float(np.interp(drafts, at, lengths))
        rate = (length - 1) / drafts
        return joint_rates(conditional_rates(drafts, synthetic_acceptance_rate=rate))

    @classmethod
    def stated(cls, drafts: int, **given: Any) -> Self:
        """From exactly one of `rate`, `rates` and `length`, of K = `drafts` or as many as rates."""
        names = [name for name in _KINDS if given.get(name) is not None]
        if len(names) != 1:
            bound = f"one of {', '.join(_KINDS)}, and no other beside it"
            raise ConfigError("acceptance", names, bound)
        count = drafts
        if names == ["rates"]:
            count = len(given["rates"]) if isinstance(given["rates"], Sequence) else 0
        options = {f"synthetic_acceptance_{names[0]}": given[names[0]]}
        try:
            check_int("drafts", count, 1)
            conditional = conditional_rates(count, **_decayed(options, count))
        except ConfigError as error:
            name = error.field.replace("synthetic_acceptance_", "acceptance_")
            raise ConfigError(name, error.value, error.bound, error.remedy) from None
        return cls(joint_rates(conditional), source=f"stated: {names[0]} {given[names[0]]}")

    @classmethod
    def read(cls, path: Path, drafts: int, name: str | None = None) -> Self:
        """From a file.

        Args:
            drafts: K of a rate or length without one.
            name: which of the file's tables, its names joined by `/`; None: it has one.
        """
        data = _parsed(path)
        source = f"{path.name}{f', {name}' if name else ''}"
        if isinstance(data, Mapping) and "rows" in data:
            return cls(_of_results(path, data["rows"]), source=source)
        if isinstance(data, Mapping) and (set(data) & {*_KINDS}):
            found = cls.stated(drafts, **{kind: data.get(kind) for kind in _KINDS})
            return cls(found.rates, source=source)
        tables = dict(_tables(data, ""))
        if name is None and len(tables) == 1:
            name = next(iter(tables))
        if name not in tables:
            bound = f"one of {', '.join(tables)}" if tables else "left out: the file has no table"
            raise ConfigError("acceptance_name", name, bound, f"It is about {path.name}.")
        lengths = tables[str(name)]
        for k, length in lengths.items():
            check_int(f"{path.name}: {name}", k, 1)
            check_number(f"{path.name}: {name}.{k}", length, 1, k + 1, "It counts the bonus token.")
        return cls((), lengths, f"{path.name}, {name}")


def _decayed(options: dict[str, Any], count: int) -> dict[str, Any]:
    """A length as the rate with the same mean: real drafts decay, and are not all or none."""
    length = options.get("synthetic_acceptance_length")
    if length is None:
        return options
    check_number("acceptance_length", length, 1, count + 1, f"With K={count}, bonus included.")
    return {"synthetic_acceptance_rate": (length - 1) / count}


def _parsed(path: Path) -> Any:
    import yaml  # type: ignore[import-untyped]  # reads JSON, too

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        bound = "a file of JSON or YAML"
        raise ConfigError("acceptance_file", str(path), bound, f"{error}.") from None


def _of_results(path: Path, rows: Any) -> tuple[float, ...]:
    """Of the last row with the largest K: batch sizes do not matter to acceptance."""
    found = list[list[Any]]()
    for row in rows if isinstance(rows, list) else ():
        values = row.get("values") if isinstance(row, Mapping) else None
        names = (f"unconditional_at_{i}" for i in count(1))
        known = values if isinstance(values, Mapping) else {}
        found.append([known[name] for name in takewhile(known.__contains__, names)])
    if not any(found):
        bound = "results with `unconditional_at_1`: those of a run with drafts"
        raise ConfigError("acceptance_file", str(path), bound)
    rates = list[float]()
    longest: list[Any] = max(found[::-1], key=len)
    for i, value in enumerate(longest, start=1):
        rate: Any = value.get("median") if isinstance(value, Mapping) else value
        check_number(f"{path.name}: unconditional_at_{i}", rate, 0, 1)
        rates.append(min([rate, *rates]))
    return tuple(rates)


def _tables(data: Any, name: str) -> Iterator[tuple[str, dict[int, Any]]]:
    """Mappings of numbers to numbers anywhere in nested ones, by their names."""
    if not isinstance(data, Mapping) or not data:
        return
    keys = [int(k) if str(k).isdecimal() else None for k in data]
    if None not in keys:
        yield name, {int(k): v for k, v in data.items()}
        return
    for key, value in data.items():
        yield from _tables(value, f"{name}/{key}".lstrip("/"))
