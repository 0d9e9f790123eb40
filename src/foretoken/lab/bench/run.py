"""Runs batches through an engine: one, and all that were asked for, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from foretoken.engine.trace import StepTrace
from foretoken.errors import ConfigError
from foretoken.lab.bench.figures import Run, Step, figures, mean_context
from foretoken.lab.bench.floor import Floor
from foretoken.lab.bench.kernels import Recorder, kernel_figures, kind_of
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.workload import Prompts, Workload
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM

Report = Callable[[int, str], None]
"""Gets how many runs are done, warm-up included, and what runs next."""


class Case(NamedTuple):
    """A way to decode: plain (K = 0), or as the engine speculates (None: the engine's K)."""

    name: str
    num_drafts: int | None


class Bench:
    """Measures one engine.

    Plain decoding beside speculative is the same engine, whose requests have K = 0: same weights,
    kernels and caches, and what the drafter costs where nothing is drafted stays in the figure.

    Attributes:
        cases: what takes turns.
        floor: bytes that passes must read, and the memory's bandwidth.
        measured: figures of every measured run so far, by batch size and case.
        kernels: figures of each kind of kernel, by the same; unknown: names of kind `other`.
    """

    def __init__(self, llm: LLM, options: BenchOptions, params: SamplingParams) -> None:
        self.llm, self.options, self.params = llm, options, params
        engine, speculation = llm.engine, llm.config.speculative_config
        self._workload = Workload(options, params, engine)
        self.cases = [Case("plain", 0)]
        if speculation is not None:
            drafted = f"{speculation.method}, K={speculation.num_speculative_tokens}"
            self.cases = [*self.cases * options.compare, Case(drafted, None)]
        self.floor = Floor.of(engine, options.bandwidth)
        self.measured: dict[tuple[int, Case], list[dict[str, float]]] = {}
        self.num_runs = len(options.batch_sizes) * len(self.cases)
        self.num_runs *= options.warmup + options.repeats + options.kernels
        self.kernels: dict[tuple[int, Case], dict[str, dict[str, float]]] = {}
        self.unknown: set[str] = set()

    def run(self, report: Report = lambda done, what: None) -> None:
        """Measure everything; `measured` holds what is done if it is interrupted.

        Raises:
            ForetokenError: a request failed, or no kernels were seen.
        """
        for done, (batch, repeat, case) in enumerate(self._turns()):
            round_ = repeat - self.options.warmup + 1
            records = round_ > self.options.repeats
            which = "kernels" if records else f"repeat {round_}" if round_ > 0 else "warm-up"
            report(done, f"batch {batch}, {case.name}, {which}")
            prompts = self._workload.prompts(batch, repeat)
            params = self._workload.params(batch, repeat, case.num_drafts)
            if records:
                self.kernels[batch, case] = self._record(prompts, params)
                continue
            run = run_batch(self.llm, prompts, params)
            if round_ > 0:
                found = figures(run, self.floor)
                self.measured.setdefault((batch, case), []).append(found)
        report(self.num_runs, "done")

    def _record(
        self, prompts: Prompts, params: Sequence[SamplingParams]
    ) -> dict[str, dict[str, float]]:
        """What each kind of kernel takes of a step; `ConfigError` if the profiler saw none."""
        recorder, runner = Recorder(len(prompts)), self.llm.engine.runner
        run = run_batch(self.llm, prompts, params, recorder)
        if not recorder.kernels:
            bound = "left out where PyTorch's profiler sees no kernels, or a run has few steps"
            raise ConfigError("kernels", True, bound)
        self.unknown |= {k.name for k in recorder.kernels if kind_of(k.name) == "other"}
        drafter = [getattr(runner.drafter, name, None) for name in ("model", "head")]
        fused = all(getattr(one, "fused", True) is not None for one in (runner.model, *drafter))
        layers = len(self.floor.target.layers) if fused else None
        per_call = self.floor.per_call(len(prompts), mean_context(run, recorder.steps))
        return kernel_figures(recorder.kernels, layers, per_call, self.floor.bandwidth)

    def _turns(self) -> Iterator[tuple[int, int, Case]]:
        """Batch size, repeat (warm-up first) and case; who goes first changes with each repeat."""
        for batch in self.options.batch_sizes:
            for repeat in range(self.options.warmup + self.options.repeats):
                for case in self.cases[:: -1 if repeat % 2 else 1]:
                    yield batch, repeat, case
        if self.options.kernels:  # at last: once a profiler has run, launches may cost more
            for batch, case in [*self.measured]:
                yield batch, self.options.warmup + self.options.repeats, case


def run_batch(
    llm: LLM,
    prompts: Prompts,
    params: Sequence[SamplingParams],
    watch: Callable[[Sequence[Step]], None] = lambda steps: None,
) -> Run:
    """Complete a batch of prompts of one length, all submitted at once.

    Args:
        watch: gets the steps so far whenever one is done; its time is not theirs.

    Raises:
        ForetokenError: a request failed.
    """
    steps: list[Step] = []
    engine, start = llm.engine, time.perf_counter()
    before = start

    def keep(trace: StepTrace) -> None:
        nonlocal before
        now = time.perf_counter()
        steps.append(Step(now - before, trace))
        watch(steps)
        before = time.perf_counter()

    engine.on_step = keep
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        engine.on_step = None
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise output.error
    return Run(seconds, len(prompts[0]), outputs, steps)
