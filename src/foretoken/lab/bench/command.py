"""`foretoken bench`: measure, show progress, print tables and write the files."""

from __future__ import annotations

import asyncio
from typing import Any

from foretoken.lab.bench.offline import Engines
from foretoken.lab.bench.options import BenchOptions, engine_cases, parse_sweep, server_cases
from foretoken.lab.bench.report import charts, remarks, results, tables
from foretoken.lab.bench.run import Bench
from foretoken.lab.bench.server import Server
from foretoken.lab.reporter import Reporter, Section
from foretoken.sampling.params import SamplingParams


async def make_bench(
    options: BenchOptions, params: SamplingParams, engine: dict[str, Any]
) -> Bench:
    """Make the benchmark for these options; a server is first asked which fields it takes.

    Args:
        engine: options of an engine in this process, as returned by `BenchOptions.sized`.
    """
    sweep, temperature = parse_sweep(options.sweep), params.temperature
    if options.url is None:
        speculation = engine["speculative_config"]
        groups = engine_cases(sweep, temperature, speculation, compare=options.compare)
        return Bench(options, Engines(engine, params, options.bandwidth), groups)
    names = {"model": options.served_model, "api_key": options.api_key}
    server = Server(options.url, params, timeout=options.timeout, **names)
    await server.prepare()
    switches = {"speculates": server.speculates, "compare": options.compare}
    return Bench(options, server, server_cases(sweep, temperature, **switches))


def run(
    reporter: Reporter, options: BenchOptions, params: SamplingParams, engine: dict[str, Any]
) -> None:
    """Measure and report. After an exception, the finished runs are reported, too."""
    asyncio.run(_run(reporter, options, params, engine))


async def _run(
    reporter: Reporter, options: BenchOptions, params: SamplingParams, engine: dict[str, Any]
) -> None:
    """See `run`."""
    bench, notes, done = await make_bench(options, params, engine), list[str](), 0

    def count(ended: int, work: str) -> None:
        nonlocal done
        done = ended
        report(ended, work)

    try:
        with reporter.progress(bench.num_requests, "requests") as report:
            await bench.run(count)
    except BaseException as error:
        runs = sum(len(measured.repeats) for measured in bench.measured.values())
        if done < bench.num_requests:
            why = type(error).__name__ if isinstance(error, Exception) else "a signal"
            notes.append(f"Ended early by {why}, after {runs} measured runs.")
        raise
    finally:
        if (file := results(bench, reporter.command_line, notes)) is not None:
            lines, shown = remarks(file), tables(file.rows)
            if bandwidth := file.shapes.get("bandwidth_gb_per_s"):
                origin = "given" if file.shapes["bandwidth_given"] else "measured"
                floor = f"The floor is for memory that reads {bandwidth:.1f} GB/s ({origin})."
                lines.insert(0, floor)
            reporter.show(shown, lines)
            reporter.write(file, options.output, shown, [Section(charts=charts(file.rows))])
