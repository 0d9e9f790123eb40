"""`foretoken bench`: its load, turns of its cases, and its results after an early end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.bench.command import results, tables
from foretoken.lab.bench.figures import UNITS, figures
from foretoken.lab.bench.load import (
    MOST_FAILURES,
    BenchRequest,
    Client,
    Record,
    RequestFailedError,
    Run,
    ServerGoneError,
    drive,
)
from foretoken.lab.bench.options import BenchCase, BenchOptions, Load, engine_cases
from foretoken.lab.bench.run import Bench
from foretoken.lab.reporter import as_text
from foretoken.lab.results import Spread, validate
from tests.lab.runs import NGRAM, SMALL

pytestmark = pytest.mark.usefixtures("known_memory")


class Scripted(Client):
    """A client and its system; every request takes a turn of the loop and brings two pieces."""

    keeps_prefixes = False

    def __init__(self, act: Callable[[int, BenchCase], None] = lambda number, case: None) -> None:
        self.act, self.number, self.under_way, self.most = act, 0, 0, 0
        self.asked: list[tuple[str, BenchRequest]] = []
        self.notes = ["scripted"]

    async def send(self, asked: BenchRequest, case: BenchCase, record: Record) -> None:
        self.asked.append((case.name, asked))
        self.number, self.under_way = self.number + 1, self.under_way + 1
        self.most = max(self.most, self.under_way)
        try:
            self.act(self.number, case)
            await asyncio.sleep(0.002)
        finally:
            self.under_way -= 1
        speed = 1 if case.plain else 4
        record.arrivals = [record.due + 0.5 / speed, record.due + 1 / speed]
        record.num_input, record.num_output = 7, 3

    async def counts(self) -> None:
        return None

    def shapes(self) -> dict[str, Any]:
        return {"model": "none"}

    async def tokens(self, text: str) -> list[int]:
        return [*range(50)]


def test_concurrency_is_kept_and_a_rate_is_random_but_the_same() -> None:
    start = time.perf_counter()

    def load(load: Load, gaps: Sequence[float]) -> tuple[Scripted, Run]:
        client, run = Scripted(), Run()
        asked = [(gap, BenchRequest("x", 1, i)) for i, gap in enumerate(gaps)]
        case = engine_cases({}, 0.0, None, compare=True)[0][0]
        asyncio.run(drive(client, case, load, asked, run))
        assert [a.seed for _, a in client.asked] == [*range(len(gaps))]
        return client, run

    client, run = load(Load(3), [5.0] * 10)  # a gap is of no consequence
    assert (client.most, len(run.done), run.failed) == (3, 10, [])
    client, run = load(Load(0, 100.0), [0.01, 0.0, 0.0, 0.05])
    assert client.most >= 2
    assert run.records[3].due - start >= 0.06


def test_who_is_late_under_a_rate_makes_its_requests_wait() -> None:
    """A request is due every 10 ms, and the client takes 20 ms for each: lateness adds up."""

    def busy(number: int, case: BenchCase) -> None:
        time.sleep(0.02)

    (plain, _), *_ = engine_cases({}, 0.0, NGRAM, compare=True)
    system, bench = scripted(busy, request_rate="100", concurrency=None, warmup=0, repeats=1)
    asked = [(0.01, BenchRequest([1], 1, i)) for i in range(20)]
    run = Run()
    asyncio.run(drive(system, plain, Load(0, 100.0), asked, run))
    dues = [record.due - run.records[0].due for record in run.records]
    assert dues == pytest.approx([0.01 * i for i in range(20)])
    found = figures(run, None, {})
    assert found["send_lag_ms"] >= 90  # the i-th, from 0 on, by 10 i ms
    assert found["sent_requests_per_second"] <= 50
    assert found["offered_requests_per_second"] == pytest.approx(100)
    asyncio.run(bench.run())
    made = results(bench, "foretoken bench")
    assert made is not None
    assert any("100 requests/s, plain: this client was" in note for note in made.notes)


def test_a_run_ends_without_answers() -> None:
    def gone(number: int, case: BenchCase) -> None:
        if number == 3:
            raise ServerGoneError("gone")

    def refuse(number: int, case: BenchCase) -> None:
        if number > 2:
            raise RequestFailedError("no")

    asked = [(0.0, BenchRequest("x", 1, i)) for i in range(50)]
    case = engine_cases({}, 0.0, None, compare=True)[0][0]
    for act, failed, why in ((refuse, MOST_FAILURES, "the last because: no"), (gone, 1, "gone")):
        run = Run()
        asyncio.run(drive(Scripted(act), case, Load(1), asked, run))
        assert (len(run.done), len(run.failed)) == (2, failed)
        assert why in run.stopped
    with pytest.raises(ZeroDivisionError):
        asyncio.run(drive(Scripted(lambda *_: 1 / 0), case, Load(2), asked, Run()))  # type: ignore[arg-type, return-value]


def scripted(act: Any = lambda number, case: None, **given: Any) -> tuple[Scripted, Bench]:
    options = BenchOptions(**{**SMALL, "concurrency": "1,2", **given})
    system = Scripted(act)
    return system, Bench(options, system, engine_cases({}, 0.0, NGRAM, compare=True))


def test_cases_take_turns_and_who_is_first_changes() -> None:
    system, bench = scripted(repeats=2)
    told: list[str] = []
    asyncio.run(bench.run(lambda done, what: told.append(f"{done}: {what}")))
    names = [name for name, _ in system.asked[::4]]
    plain, drafted = "plain", "ngram, K=4"
    assert names == [plain, drafted, drafted, plain, plain, drafted] * 2  # one round warms up
    prompts = [tuple(asked.prompt) for _, asked in system.asked]
    seeds = [asked.seed for name, asked in system.asked if name == plain]
    assert seeds == [*range(4 * 6)]  # none comes twice, under no load
    assert prompts[:4] == prompts[4:8] == [tuple(p) for p in prompts[:4]]  # the pair has the same
    assert len(set(prompts)) > len(prompts) // 4
    assert told[1] == "0: concurrency 1, plain, warm-up"
    assert told[-1] == f"{bench.num_requests}: concurrency 2, ngram, K=4, repeat 2"
    found = results(bench, "foretoken bench")
    assert found is not None
    speedups = [row.values.get("e2e_speedup") for row in found.rows]
    assert [getattr(s, "median", None) for s in speedups] == [None, pytest.approx(4.0)] * 2
    assert any("Fewer than 3 repeats" in note for note in found.notes)


@pytest.mark.parametrize("last", [8 * 2 + 1, 8 * 2 + 3, 8 * 3 + 2])
def test_what_was_measured_is_kept_and_marked(last: int) -> None:
    """A run that was cut is kept where there is no whole one, and is not counted as a repeat."""

    def act(number: int, case: BenchCase) -> None:
        if number == last:
            raise KeyboardInterrupt

    _, bench = scripted(act, warmup=1, concurrency="1")
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(bench.run())
    found = results(bench, "foretoken bench", ["early"])
    measured = [(row.case, row.labels.get("partial"), row.values["wall_s"].repeats)  # type: ignore[union-attr]
                for row in (found.rows if found else [])]  # fmt: skip
    drafted, plain = "concurrency 1, ngram, K=4", "concurrency 1, plain"
    assert (
        measured
        == {
            8 * 2 + 1: [(plain, None, 1), (drafted, None, 1)],  # the run had nothing yet
            8 * 2 + 3: [(plain, None, 1), (drafted, None, 1)],
            8 * 3 + 2: [(plain, None, 2), (drafted, None, 2)],
        }[last][: len(measured)]
    )
    assert found is not None
    validate(asdict(found))


def test_a_first_run_that_was_cut_is_partial() -> None:
    def act(number: int, case: BenchCase) -> None:
        if number == 3:
            raise ServerGoneError("no connection")

    _, bench = scripted(act, warmup=0, url="http://x", bandwidth=None)
    with pytest.raises(ConfigError, match=r"`url` is 'http://x': .*no connection"):
        asyncio.run(bench.run())
    found = results(bench, "foretoken bench")
    assert found is not None
    (row,) = found.rows
    assert (row.labels["partial"], row.values["requests"].median) == (True, 2)  # type: ignore[union-attr]
    assert "(partial)" in as_text(tables(found.rows)["Speed"])
    assert any(note.startswith("Partial figures, of a run") for note in found.notes)
    assert "Failed requests: 1: no connection" in found.notes


def test_turns_stay_together_where_a_run_has_no_answer() -> None:
    """Plain's second repeat fails whole: its turn has no speed-up, the others keep theirs."""

    def act(number: int, case: BenchCase) -> None:
        if case.plain and 8 < number <= 16:
            raise RequestFailedError("status 500")

    _, bench = scripted(act, warmup=0, concurrency="1")
    with pytest.raises(ConfigError, match="4 requests failed"):
        asyncio.run(bench.run())
    plain, drafted = (measured.repeats for measured in bench.measured.values())
    assert [bool(repeat) for repeat in plain] == [True, False, True]
    found = results(bench, "foretoken bench")
    assert found is not None
    ratios = [plain[i]["e2e_ms"] / drafted[i]["e2e_ms"] for i in (0, 2)]
    assert found.rows[1].values["e2e_speedup"] == Spread.of(ratios, UNITS["e2e_speedup"])


def test_failed_requests_are_counted_and_end_with_an_error() -> None:
    def act(number: int, case: BenchCase) -> None:
        if number % 5 == 0:
            raise RequestFailedError("status 500")

    _, bench = scripted(act, url="http://x", bandwidth=None)
    with pytest.raises(ConfigError, match="12 requests failed, most because: status 500"):
        asyncio.run(bench.run())
    found = results(bench, "foretoken bench")
    assert found is not None
    assert {row.values["wall_s"].repeats for row in found.rows} == {3}  # type: ignore[union-attr]
    assert tables(found.rows)["Speed"].header[-1] == "failed"
