"""Tables of docs/server.md and docs/scale.md: what the server costs and bore, and its replicas."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.driver import (
    Table,
    case,
    find,
    markdown,
    number,
    of,
    percent,
    spread,
    where,
)
from foretoken.lab.results import Label, Results, Row, read

ROUTERS = {
    "prefix": "by prefix (`PrefixRouter`)",
    "ray_prefix": "by prefix (Ray's `PrefixCacheAffinityRouter`)",
    "shorter_queue": "the shorter queue of two (Ray's default)",
}
WAYS = {"grpc": "gRPC, as here", "store": "Ray's object store, its default"}


def _least_costs(results: Results) -> str:
    """The line through the lengths of answers, and what no server goes below."""
    line = next(row for row in results.rows if "fixed_us_per_request" in row.values)
    fixed, each = (number(line, name, 0) for name in line.values)
    least = next(row for row in results.rows if "least_us_per_chunk" in row.values)
    pace, bare = number(least, "ms_between_chunks", 1), spread(least, "least_us_per_chunk", 0)
    return (
        f"\nThe goal is 150 µs a chunk. At one stream a line through the lengths: {fixed} µs a "
        f"request, {each} µs a chunk. At its pace, a chunk each {pace} ms, a thread that wakes the "
        f"loop, which writes a chunk and does nothing else, takes {bare} µs.\n"
    )


server_costs = Table(
    "serve",
    {
        "at once": case,
        "server's CPU per chunk, µs": of(spread, "server_cpu_us_per_chunk", 0),
        "of a reader without HTTP, µs": of(spread, "direct_cpu_us_per_delta", 0),
        "per request, µs": of(number, "server_cpu_us_per_request", 0),
        "chunks per stream": of(number, "chunks_per_stream", 1),
        "added to the first token, ms": of(spread, "added_ttft_ms", 1),
        "share of the throughput": of(percent, "share_of_throughput"),
    },
    shown=lambda row: "added_ttft_ms" in row.values,
    after=_least_costs,
)
server_stalls = Table(
    "stalls",
    {
        "seconds": case,
        "usual gap": of(spread, "usual_gap", 3),
        "longest until its first token": of(spread, "longest_gap", 3),
        "longest behind it": of(spread, "longest_gap_behind", 3),
        "its first token": of(spread, "first_token", 3),
        "without streams": of(spread, "first_token_alone", 3),
    },
)
replicas_messages = Table(
    "replicas",
    {
        "a message from a replica to the front": lambda row: WAYS[str(row.labels["way"])],
        "ms on its way": of(number, "delay_ms"),
        "ms of CPU time, both ends": of(number, "cpu_ms"),
    },
    shown=lambda row: row.labels["kind"] == "messages",
)
replicas_prefixes = Table(
    "replicas",
    {
        "router": lambda row: ROUTERS[str(row.labels["router"])],
        "prompt tokens found in a cache": of(percent, "hit_rate"),
        "seconds in all": of(number, "seconds", 1),
    },
    shown=lambda row: row.labels["kind"] == "sharing",
)
fleet_plan = Table(
    "fleet_plan",
    {
        "": case,
        "requests/s: predicted": of(number, "predicted", 1),
        "measured": of(number, "measured", 1),
        "error": lambda row: f"{row.values['error']:+.0%}",
    },
)


def replicas_death(folder: Path) -> str:
    """One line for each thing that must hold when a replica is killed."""
    results = read(folder / "replicas.json")
    (row,) = find(results, kind="death")
    refused, broken = (number(row, name, 0) for name in ("refused", "broken"))
    failed = "failed: by 503 with a reason, by an error at the end of their stream"
    told = [
        ["requests of four kinds, 16 at a time", number(row, "requests", 0)],
        ["answered", number(row, "answered", 0)],
        [failed, f"{refused}, {broken}"],
        ["lost, computed twice", f"{number(row, 'lost', 0)}, {number(row, 'computed_twice', 0)}"],
        ["seconds until the last of them had failed", number(row, "seconds_to_fail")],
        ["seconds until the replica was back", number(row, "seconds_until_back", 1)],
    ]
    return markdown(["one of two replicas is killed", ""], told) + where(results)


def replicas_hop(folder: Path) -> str:
    """What a front and its messages add to one stream."""
    results = read(folder / "replicas.json")
    (row,) = find(results, kind="hop")
    told = {
        "first token": "first_token_ms",
        "a chunk": "chunk_ms",
        "last of 64 tokens": "last_token_ms",
        "the last of 64 tokens, one engine alone": "alone_last_ms",
    }
    lines = [[what, spread(row, name, 1)] for what, name in told.items()]
    return markdown(["later than from one engine alone", "ms"], lines) + where(results)


def server_bears(folder: Path) -> str:
    """One line for each thing that must not go wrong."""
    serve, life = read(folder / "serve.json"), read(folder / "serve_life.json")
    rows = [*_crowd(serve), *_life(life)]
    for name, told in (("soak_serve", _soak), ("hostile", _hostile)):
        (row,) = read(folder / f"{name}.json").rows
        rows.append([*told(row), f"`{name}`"])
    rows.append([*_heavy(read(folder / "heavy.json")), "`heavy`"])
    return markdown(["what", "what came of it", "results file"], rows)


def server_clients(folder: Path) -> str:
    """How many checks of each client pass, and which; the load generators' figures."""
    rows: dict[tuple[Label, Label], list[Row]] = {}
    for row in read(folder / "clients.json").rows:
        rows.setdefault((row.labels["client"], row.labels["version"]), []).append(row)
    told = []
    for (client, version), checks in rows.items():
        passed = [row for row in checks if row.values["passes"]]
        names = "; ".join(_check(row) for row in checks)
        told.append([f"{client} {version}", f"{len(passed)} of {len(checks)}", names])
    return markdown(["client", "pass", "checks"], told)


def _check(row: Row) -> str:
    name = str(row.labels["check"])
    if not row.values["passes"]:
        return f"**{name} fails**"
    if "total_spec_decode_steps" not in row.values:
        return name
    return (
        f"{name} (acceptance length {number(row, 'spec_decode_token_weighted_acceptance_length')} "
        f"of {number(row, 'total_spec_decode_steps', 0)} verifications, at `/metrics` the same)"
    )


def _crowd(serve: Results) -> list[list[str]]:
    row = next(row for row in serve.rows if "own_marker" in row.values)
    complete, own, foreign = (number(row, name, 0) for name in
                              ("complete", "own_marker", "foreign_marker"))  # fmt: skip
    told = f"{complete} complete, {own} with their own marker, {foreign} with another's"
    return [[row.case, told, "`serve`"]]


def _life(life: Results) -> list[list[str]]:
    left, ended, killed = life.rows
    counts = {name: number(ended, name, 0) for name in ended.values}
    lost = sum(int(counts[name]) for name in ("refused", "broken_off", "lost"))
    told = {
        left.case: f"{number(left, 'held_afterwards', 0)} requests and blocks held "
        f"{number(left, 'seconds_to_free')} s later",
        ended.case: f"{counts['complete']} complete, {counts['marked_partial']} marked as partial, "
        f"{counts['marked_empty']} marked that were not begun, {lost} lost; "
        f"exit code {counts['exit_code']}",
        killed.case: f"ready after {spread(killed, 'seconds_to_be_ready', 1)} s",
    }
    return [[what, text, "`serve_life`"] for what, text in told.items()]


def _soak(row: Row) -> list[str]:
    minutes = int(number(row, "seconds", 0)) // 60
    told = (
        f"{number(row, 'requests', 0)} requests, {number(row, 'left', 0)} of them left; "
        f"{number(row, 'different', 0)} answers differ from the first round's, acceptance "
        f"{spread(row, 'acceptance', 3)}; {number(row, 'resident_mib_grown', 1)} MiB more memory, "
        f"{number(row, 'held_afterwards', 0)} blocks held"
    )
    return [f"{minutes} minutes of the same requests", told]


def _hostile(row: Row) -> list[str]:
    told = (
        f"{number(row, 'status_5xx', 0)} of 5xx, {number(row, 'held_afterwards', 0)} held; "
        f"{number(row, 'resident_mib_grown', 0)} MiB more memory, in the last third "
        f"{number(row, 'resident_mib_grown_at_last', 0)}"
    )
    return [f"{number(row, 'requests', 0)} hostile requests, by hand and from `schemathesis`", told]


def _heavy(results: Results) -> list[str]:
    *asked, worst = results.rows
    grown = max(row.values["resident_mib_grown"] for row in asked)
    told = (
        f"`/health` answers within {number(worst, 'seconds_health', 2)} s; between chunks of a "
        f"stream at most {number(worst, 'seconds_gap_beyond', 2)} s more than the same steps alone "
        f"take; at most {grown:.0f} MiB more memory after one"
    )
    return [f"{len(asked)} of the heaviest requests that are admitted", told]
