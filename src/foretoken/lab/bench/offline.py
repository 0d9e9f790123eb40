"""Engines in this process as the system under test."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from foretoken.async_engine import AsyncEngine
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.trace import StepTrace
from foretoken.errors import RequestError
from foretoken.lab.bench.floor import Floor
from foretoken.lab.bench.load import BenchRequest, Client, Record, RequestFailedError, Step
from foretoken.lab.bench.options import BenchCase, speculation_of
from foretoken.outputs import SpeculationMetrics
from foretoken.sampling.params import SamplingParams


class Engines(Client):
    """Engines of one target in this process, loaded one after another.

    Plain and speculative decoding use the same engine; plain requests have K = 0. Plain figures
    thus include what the drafter costs when it drafts nothing.

    options: options of `AsyncEngine`, with a parsed `speculative_config`
    bandwidth: GB/s at which the device reads its memory; None: it is measured
    """

    def __init__(
        self, options: Mapping[str, Any], params: SamplingParams, bandwidth: float | None
    ) -> None:
        self._options, self._params, self._bandwidth = options, params, bandwidth
        self._shapes: dict[str, Any] = {}
        self._engine: Any = None
        self._last_step_end = 0.0
        self.floor: Floor | None = None
        self.notes: list[str] = []
        self.keeps_prefixes = bool(options.get("enable_prefix_caching", True))

    @asynccontextmanager
    async def opened(self, cases: Sequence[BenchCase]) -> AsyncIterator[None]:
        speculation = speculation_of(self._options["speculative_config"], cases[-1])
        start = time.perf_counter()
        self._engine = AsyncEngine(**{**self._options, "speculative_config": speculation})
        try:
            self.notes.append(f"Loading took {time.perf_counter() - start:.1f} s.")
            self.floor = Floor.of(self._engine.engine, self._bandwidth)
            self._shapes = self._shapes or self._describe(self._engine, self.floor)
            yield
        finally:
            await self._engine.close()

    def shapes(self) -> dict[str, Any]:
        """The settings of the first engine; swept settings are labels of the rows."""
        return self._shapes

    def _describe(self, engine: AsyncEngine, floor: Floor) -> dict[str, Any]:
        config, model = engine.config, engine.engine.runner.model
        speculation = self._options["speculative_config"]
        return {
            "model": _shown(config.model),
            "device": model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "speculation": set_fields(speculation) if speculation else None,
            "sampling": set_fields(self._params, without=("seed",)),
            "engine": set_fields(config, without=("model", "speculative_config")),
            "target_weights_gb": floor.target.weights / 1e9,
            "draft_weights_gb": floor.drafter.weights / 1e9,
            "kv_bytes_per_token": sum(size for size, _ in floor.target.layers),
            "bandwidth_gb_per_s": floor.bandwidth,
            "bandwidth_given": self._bandwidth is not None,
        }

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context without steps: the next step has all requests sent in the context."""
        all_sent = threading.Event()
        self._engine._worker.call(lambda engine: all_sent.wait())
        try:
            yield
        finally:
            all_sent.set()

    async def send(self, request: BenchRequest, case: BenchCase, record: Record) -> None:
        fields: dict[str, Any] = {"max_tokens": request.num_output, "seed": request.seed}
        params = replace(self._params, ignore_eos=True, **fields, **case.fields)
        submit = self._engine.chat if request.is_chat else self._engine.generate
        try:
            await self._read(submit(request.prompt, params, deltas=True), record)
        except RequestError as error:  # the prompt is too long, or there is no chat template
            raise RequestFailedError(str(error)) from error

    async def _read(self, deltas: Any, record: Record) -> None:
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.error is not None:
                    raise delta.error
                if delta.prompt_token_ids is not None:
                    record.num_input = len(delta.prompt_token_ids)
                for sample in delta.outputs:
                    if sample.token_ids:
                        if not record.arrivals:
                            record.num_first = len(sample.token_ids)
                        record.arrivals.append(time.perf_counter())
                    record.num_output += len(sample.token_ids)
                    record.origins += sample.origins

    async def counts(self) -> SpeculationMetrics:
        counts: SpeculationMetrics = self._engine.metrics
        return counts

    def watch(self, steps: list[Step] | None) -> None:
        """See `Client.watch`; called while the engine is idle."""
        self._last_step_end = time.perf_counter()

        def add(trace: StepTrace) -> None:
            now = time.perf_counter()
            if steps is not None:
                steps.append(Step(now - self._last_step_end, trace))
            self._last_step_end = now

        self._engine.engine.on_step = None if steps is None else add

    async def tokens(self, text: str) -> list[int]:
        return await self._engine.encode(text) if self._engine.engine.tokenizer else []

    def vocabulary(self) -> list[int]:
        engine = self._engine.engine
        special = set(getattr(engine.tokenizer, "all_special_ids", ()))
        return [i for i in range(engine.limits.vocab_size) if i not in special]


def set_fields(
    config: SamplingParams | EngineConfig | SpeculativeConfig, without: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields of a configuration that differ from their defaults, except `without`."""
    return {
        field.name: _shown(value)
        for field in fields(config)
        if field.name not in without
        and (value := getattr(config, field.name)) != field.default
        and value is not None
    }


def _shown(value: Any) -> Any:
    """A value for the results file; a path loses its folder, which concerns only this machine."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and value.startswith("/"))
    return Path(value).name if is_path else value
