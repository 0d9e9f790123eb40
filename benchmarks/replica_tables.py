"""Tables of docs/scale.md: a replica that dies, the hop, prefixes, plans."""

from __future__ import annotations

from pathlib import Path

from benchmarks.markup import markdown, number, percent, spread, where
from foretoken.lab.results import Results, Row, read


def death(folder: Path) -> str:
    """One line for each thing that must hold when a replica is killed."""
    results = read(folder / "replicas.json")
    row = _row(results, "death")
    refused, broken = (number(row, name, 0) for name in ("refused", "broken"))
    told = [
        ["requests of four kinds, 16 at a time", number(row, "requests", 0)],
        ["answered", number(row, "answered", 0)],
        [
            "failed: by 503 with a reason, by an error at the end of their stream",
            f"{refused}, {broken}",
        ],
        ["lost, computed twice", f"{number(row, 'lost', 0)}, {number(row, 'computed_twice', 0)}"],
        ["seconds until the last of them had failed", number(row, "seconds_to_fail", 2)],
        ["seconds until the replica was back", number(row, "seconds_until_back", 1)],
    ]
    return markdown(["one of two replicas is killed", ""], told) + where(results)


def hop(folder: Path) -> str:
    """What a front and its messages add to one stream."""
    results = read(folder / "replicas.json")
    row = _row(results, "hop")
    names = {
        "first token": "first_token_ms", "a chunk": "chunk_ms",
        "last of 64 tokens": "last_token_ms",
    }  # fmt: skip
    told = [[what, spread(row, name, 1)] for what, name in names.items()]
    told.append(["the last of 64 tokens, one engine alone", spread(row, "alone_last_ms", 1)])
    return markdown(["later than from one engine alone", "ms"], told) + where(results)


def messages(folder: Path) -> str:
    """Delay and CPU time of a message, by way."""
    results = read(folder / "replicas.json")
    ways = {"grpc": "gRPC, as here", "store": "Ray's object store, its default"}
    told = [
        [ways[str(row.labels["way"])], number(row, "delay_ms", 2), number(row, "cpu_ms", 2)]
        for row in results.rows
        if row.labels["kind"] == "messages"
    ]
    header = ["a message from a replica to the front", "ms on its way", "ms of CPU time, both ends"]
    return markdown(header, told) + where(results)


def prefixes(folder: Path) -> str:
    """Hit rates by router."""
    results = read(folder / "replicas.json")
    told = [
        [_ROUTERS[str(row.labels["router"])], percent(row, "hit_rate"), number(row, "seconds", 1)]
        for row in results.rows
        if row.labels["kind"] == "sharing"
    ]
    return markdown(["router", "prompt tokens found in a cache", "seconds in all"], told) + where(
        results
    )


def plans(folder: Path) -> str:
    """Predicted and measured requests per second."""
    results = read(folder / "fleet_plan.json")
    told = [
        [row.case, number(row, "predicted", 1), number(row, "measured", 1), _error(row)]
        for row in results.rows
    ]
    header = ["", "requests/s: predicted", "measured", "error"]
    return markdown(header, told) + where(results)


_ROUTERS = {
    "prefix": "by prefix (`PrefixRouter`)",
    "ray_prefix": "by prefix (Ray's `PrefixCacheAffinityRouter`)",
    "shorter_queue": "the shorter queue of two (Ray's default)",
}


def _row(results: Results, kind: str) -> Row:
    return next(row for row in results.rows if row.labels["kind"] == kind)


def _error(row: Row) -> str:
    return f"{float(row.values['error']):+.0%}"  # type: ignore[arg-type]
