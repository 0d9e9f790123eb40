"""What the commands do once their options are read: one method each, which loads what it needs.

A program around the commands may do something else: it calls `app` with a subclass of `Actions` as
`obj`, the object of Click's context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foretoken.cli.terminal import Note, console

if TYPE_CHECKING:
    from foretoken.lab.audit.options import AuditOptions
    from foretoken.lab.bench.options import BenchOptions
    from foretoken.lab.demo import Demo
    from foretoken.lab.plan.options import PlanOptions
    from foretoken.lab.reporter import Reporter
    from foretoken.lab.train_eagle3.options import TrainOptions
    from foretoken.llm import LLM
    from foretoken.sampling.params import SamplingParams
    from foretoken.serve.fleet.config import ReplicaOptions
    from foretoken.serve.options import ServeOptions

Say = Callable[[str], None]
Options = dict[str, Any]  # of an engine


class Actions:
    """The default actions of the commands."""

    def load(self, model: str, speculative_config: Any, **options: Any) -> LLM:
        with console(stderr=True).status(f"Loading {model}"):
            from foretoken.llm import LLM

            return LLM(model, speculative_config, **options)

    def demo(self, llm: LLM, note: Note) -> Demo:
        from foretoken.lab.demo import Demo

        return Demo(llm, console(highlight=False), note)

    def bench(
        self, reporter: Reporter, options: BenchOptions, params: SamplingParams, engine: Options
    ) -> None:
        with reporter.status("Starting"):
            import asyncio

            from foretoken.lab.bench.command import run
        asyncio.run(run(reporter, options, params, engine))

    def audit(
        self,
        reporter: Reporter,
        parts: tuple[str, ...],
        options: AuditOptions,
        engine: Options,
        params: SamplingParams,
    ) -> int:
        """Audit these parts, see `AuditOptions.parts`; returns the exit code."""
        with reporter.status("Starting"):
            from foretoken.lab.audit.command import AuditScope, Command
        return Command(reporter).run(AuditScope(parts, options, engine, params))

    def plan(
        self, reporter: Reporter, engine: Options, options: PlanOptions, params: SamplingParams
    ) -> None:
        with reporter.status("Starting"):
            from foretoken.lab.plan.command import Command
        Command(reporter).run(engine, options, params)

    def serve(self, engine: Options, options: ServeOptions, say: Say) -> None:
        from foretoken.serve.command import start

        start(engine, options, say)

    def serve_replicas(
        self,
        engine: Options,
        scale: ReplicaOptions,
        options: ServeOptions,
        ray_address: str | None,
        say: Say,
    ) -> None:
        from foretoken.serve.command import start_replicas

        start_replicas(engine, scale, options, ray_address, say)

    def train(self, options: TrainOptions, say: Say, note: Note) -> None:
        from foretoken.lab.train_eagle3.command import Training

        Training(options, say, note).run()
