"""Metrics for Prometheus: plain counts, from which a scrape makes metric families.

Names that existing dashboards read begin with `vllm:`, ours with `foretoken:`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from foretoken.async_engine import AsyncEngine
from foretoken.outputs import RequestMetrics, SpeculationMetrics
from foretoken.serve.running import PromptDelta

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(m * 10**n for n in range(6) for m in (1, 2, 5))
_PROCESS = ProcessCollector(registry=None)
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From request to first token.",
    "inter_token_latency_seconds": "Time of a step, divided by its number of tokens.",
    "e2e_request_latency_seconds": "From request to last token.",
    "request_queue_time_seconds": "Until a request has a slot.",
    "request_prefill_time_seconds": "From getting a slot to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "Prefill and decode time together.",
    "request_time_per_output_token_seconds": "Mean time per token after the first, per request.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of a sample.",
}


class Histogram:
    """Counts of values by upper bound, and the sum of the values."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Pairs for Prometheus: an upper bound, and the number of values up to this bound."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return [*zip(bounds, map(float, accumulate(self.counts)), strict=True)]


class Counts:
    """Sums over all requests since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = self.preemptions = 0
        self.finished: Counter[str] = Counter()
        self.histograms = {
            name: Histogram(_SECONDS if name.endswith("_seconds") else _TOKENS)
            for name in _HISTOGRAMS
        }

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)


class RequestRecord:
    """Adds one request over HTTP to the counts, delta by delta."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._start = time.perf_counter()
        self._last_time: dict[int, float] = {}  # by prompt: when the last delta came
        # By prompt: the number of tokens of each sample.
        self._token_counts: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def observe(self, item: PromptDelta) -> None:
        """Count a delta, as if its tokens were evenly spread over the time since the last delta."""
        prompt, delta = item
        counts, now = self._counts, time.perf_counter()
        if delta.prompt_token_ids is not None:
            counts.prompt_tokens += len(delta.prompt_token_ids)
            counts.observe("request_prompt_tokens", len(delta.prompt_token_ids))
        last_time = self._last_time.get(prompt)
        for sample in delta.outputs:
            num_tokens = len(sample.token_ids)
            counts.generation_tokens += num_tokens
            self._token_counts[prompt][sample.index] += num_tokens
            if num_tokens and last_time is not None:
                seconds = (now - last_time) / num_tokens
                counts.observe("inter_token_latency_seconds", seconds, num_tokens)
            if sample.finish_reason is not None:
                counts.finished[sample.finish_reason] += 1
        if last_time is None and delta.outputs and delta.outputs[0].token_ids:
            counts.observe("time_to_first_token_seconds", now - self._start)
        self._last_time[prompt] = now
        if delta.metrics is not None:
            counts.cached_tokens += delta.metrics.num_cached_tokens
            counts.preemptions += delta.metrics.num_preemptions
            counts.observe("e2e_request_latency_seconds", now - self._start)
            self._observe_phases(delta.metrics, [*self._token_counts.pop(prompt, {}).values()])

    def _observe_phases(self, metrics: RequestMetrics, token_counts: Sequence[int]) -> None:
        """Count the phases of a prompt that has ended; `token_counts` are those of its samples."""
        counts, wait, first_token = self._counts, metrics.queue_time, metrics.time_to_first_token
        for num_tokens in token_counts:
            counts.observe("request_generation_tokens", num_tokens)
        if wait is None:
            return  # no sample got a slot
        counts.observe("request_queue_time_seconds", wait)
        if first_token is None or not metrics.tokens_per_second:
            return
        end = max(sum(token_counts) / metrics.tokens_per_second, first_token)
        counts.observe("request_prefill_time_seconds", first_token - wait)
        counts.observe("request_decode_time_seconds", end - first_token)
        counts.observe("request_inference_time_seconds", end - wait)
        if max(token_counts) > 1:
            mean = (end - first_token) / (max(token_counts) - 1)
            counts.observe("request_time_per_output_token_seconds", mean)


class EngineCollector(Collector):
    """All metric families of a server, with the name of the model as a label."""

    def __init__(self, engine: AsyncEngine, counts: Counts, model: str) -> None:
        self._engine, self._counts, self._model = engine, counts, model
        pool, config = engine.engine.scheduler.pool, engine.config
        self._cache = {  # vLLM's names, which say `gpu` also on a CPU
            "block_size": pool.block_size, "num_gpu_blocks": pool.num_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.memory_fraction, "cache_dtype": "auto",
        }  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        status, counts = self._engine.status, self._counts
        yield self._gauge("num_requests_running", "Samples that compute.", status.num_running)
        yield self._gauge("num_requests_waiting", "Samples that wait.", status.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Blocks held, 0..1.", status.kv_cache_usage)
        metrics = self._engine.metrics
        totals = {
            "prompt_tokens": ("Tokens of prompts.", counts.prompt_tokens),
            "generation_tokens": ("Tokens generated.", counts.generation_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up.", counts.prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the cache.", counts.cached_tokens),
            "num_preemptions": ("Samples computed again.", counts.preemptions),
            "spec_decode_num_drafts": ("Verifications with drafts.", metrics.num_drafts),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", metrics.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafts accepted.", metrics.num_accepted_tokens),
        }
        for name, (text, value) in totals.items():
            yield self._counter(f"vllm:{name}", text, {"": value})
        finished = dict(counts.finished)
        yield self._counter("vllm:request_success", "Samples ended.", finished, "finished_reason")
        for name, text in _HISTOGRAMS.items():
            yield self._histogram(name, text, counts.histograms[name])
        name, newer_name = "time_per_output_token_seconds", "inter_token_latency_seconds"
        yield self._histogram(name, _HISTOGRAMS[newer_name], counts.histograms[newer_name])
        # A gauge of 1 with the cache's options as labels, as vLLM has it.
        labels, text = ["model_name", *self._cache], "Options of the cache."
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=labels)
        family.add_metric([self._model, *map(str, self._cache.values())], 1)
        yield family
        yield from self._speculation(metrics)

    def _speculation(self, metrics: SpeculationMetrics) -> Iterator[Metric]:
        per_position = {
            "vllm:spec_decode_num_accepted_tokens_per_pos": metrics.accepted_per_position,
            "foretoken:spec_decode_num_draft_tokens_per_pos": metrics.drafted_per_position,
        }
        for name, values in per_position.items():
            yield self._counter(name, "Drafts by index.", _numbered(values), "position")
        steps = _numbered(metrics.steps_per_k)
        yield self._counter("foretoken:steps_per_k", "Steps by number of drafts.", steps, "k")
        synthetic = {"": metrics.num_synthetic_drafts}
        yield self._counter("foretoken:synthetic_drafts", "Verified by `synthetic`.", synthetic)
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            by_drafter = {key: getattr(counts, name) for key, counts in metrics.drafters.items()}
            text = "Drafts by drafter."
            yield self._counter(f"foretoken:drafter_{name}", text, by_drafter, "drafter")
        for name in ("estimated", "realised"):
            speedup = getattr(metrics, f"{name}_speedup", None)
            if speedup is not None:  # None: K is fixed, or was not chosen yet
                text = "Speed over that of plain decoding, if K is `auto`."
                yield self._gauge(f"{name}_speedup", text, speedup, prefix="foretoken")

    def _gauge(self, name: str, text: str, value: float, prefix: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, values: dict[str, int], label: str = "") -> Metric:
        """A counter with one value, or with one value for each value of a label."""
        labels = ["model_name", label] if label else ["model_name"]
        family = CounterMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric([self._model, key] if label else [self._model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model], histogram.buckets, histogram.sum)
        return family


def process_metrics() -> list[Metric]:
    """The metric families of this process, with names `process_*`."""
    return list(_PROCESS.collect())


def exposition(collector: Collector) -> bytes:
    """The families of a collector and of this process, as text for Prometheus."""
    registry = CollectorRegistry()
    registry.register(collector)
    registry.register(_PROCESS)
    return generate_latest(registry)


def _numbered(values: Sequence[int]) -> dict[str, int]:
    return {str(i): value for i, value in enumerate(values)}
