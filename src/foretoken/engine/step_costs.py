"""The times of steps on this machine, measured at start with made-up requests.

Charter: only for K = `auto` and for `max_step_seconds`. The steps go through the real runner: on a
host over slots of their own, before the engine's are made; on a device in the engine's slots,
through the graphs that it will replay. For K, the engine's own steps refine the measured times
(`StepCosts`); for chunks of prompts they do not (`Pace`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from foretoken.drafting.control import Array, StepTable
from foretoken.engine.pace import PromptCosts
from foretoken.engine.runner import Runner
from foretoken.engine.trace import device_phases
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import NONE, Admission, StepInput, StepPlan

SECONDS = {"cpu": 1.5, "cuda": 30.0}
"""Limit of measuring. Batch sizes that were not reached are extrapolated in proportion, or
interpolated. On a GPU, captures take most of the time."""

_LEAST_REPEATS, _MOST_REPEATS = 2, 12  # the quickest counts: disturbances make steps slower
_SHARE = 0.2  # of the limit, for each batch size
_SHORT, _LONG = 32, 512  # tokens of context
_LONG_ON_DEVICE = 4096  # 512 tokens of 16 requests take a GPU 0.2 ms of a step of 4
_MIDDLE = 16  # requests with which a long context is measured
BLOCK_TOKENS = _MIDDLE * (_LONG + 64)  # of the cache in which steps are measured on a host
_ROOM = 256  # tokens that the steps after one admission may add
_EVERY_K = 4  # up to so many requests all K are measured, then powers of two alone
_ROUGHLY = 0.3  # share of the limit if K does not depend on the measurement
_CHUNKS = (1, *(2**i for i in range(4, 16)))  # tokens of a prompt
_ENOUGH = 0.5  # share of `max_step_seconds`: after such a chunk, no larger one is timed
_CHUNK_REPEATS = 3
_LONG_PROMPT = 1024  # tokens before a chunk
_PARAMS = SamplingParams(temperature=1.0)


def measure(
    runner: Runner,
    num_slots: int,
    num_drafts: int,
    widths: Sequence[int],
    rule: Rule,
    *,
    adapts: bool = True,
) -> StepTable:
    """Time steps of few and many requests, with few and many drafts.

    Args:
        num_slots, num_drafts: most requests, most drafts of each.
        widths: numbers of drafts that a captured step may have; () if nothing is captured.
        rule: the verification rule; serving replays the steps that are captured for it here.
        adapts: K will be chosen by these times; else only steps without and with all drafts are
            timed, in less time.
    """
    limit = SECONDS[runner.device.type] * (1.0 if adapts else _ROUGHLY)
    steps = _Steps(runner, num_drafts, rule)
    sizes = [*(4**i for i in range(16) if 4**i < num_slots), num_slots]
    if widths:
        steps.compile_ahead(sizes, widths)
        sizes.insert(1, sizes.pop())  # the smallest and the largest are always measured
    some = (1, 2, 4, 8, 16, 32) if adapts else ()
    coarse = sorted({0, num_drafts, *(k for k in some if k < num_drafts)})
    found, missed, end = dict[int, Array](), 0.0, time.perf_counter() + limit
    for place, batch in enumerate(sizes):
        if time.perf_counter() > end and place > bool(widths):
            break
        every = widths or (range(num_drafts + 1) if batch <= _EVERY_K and adapts else coarse)
        found_2K, missed = steps.table(batch, list(every), _SHARE * limit)
        found[batch] = np.stack([np.interp(range(num_drafts + 1), every, x) for x in found_2K])
    few = sorted(widths or {0, num_drafts})
    found_K = steps.of_context(min(num_slots, _MIDDLE), few)
    context_K1 = np.interp(range(num_drafts + 1), few, found_K)
    steps.clear()
    batches = np.array(sorted(found))
    rest_JK1, draft_JK1 = np.stack([found[batch] for batch in batches.tolist()], axis=1)
    rest_JK1 = _undisturbed(batches, rest_JK1)
    return StepTable(batches, rest_JK1, draft_JK1, context_K1, missed)


def measure_prompts(runner: Runner, rule: Rule, max_seconds: float, most: int) -> PromptCosts:
    """Time chunks of a prompt, up to one that takes half of `max_seconds`, and one further on.

    Args:
        rule: as in `measure`.
        max_seconds: longest time of a step.
        most: most tokens of a step.
    """
    steps = _Steps(runner, 0, rule)
    sizes = [size for size in _CHUNKS if size <= min(steps.most_chunk, most)]
    steps.chunk(0, sizes[0])  # work that is done once
    first = list[float]()
    for size in sizes:
        first.append(steps.chunk(0, size))
        if len(first) > 1 and first[-1] > _ENOUGH * max_seconds:
            break
    sizes = sizes[: len(first)]
    start = min(_LONG_PROMPT, steps.most_chunk - (count := sizes[len(sizes) // 2]))
    repeats = [[*first, steps.chunk(start, count)]]
    repeats += [
        [*(steps.chunk(0, size) for size in sizes), steps.chunk(start, count)]
        for _ in range(_CHUNK_REPEATS - 1)
    ]
    steps.clear()
    *quickest, later = np.min(repeats, axis=0).tolist()
    quickest = np.minimum.accumulate(quickest[::-1])[::-1]  # larger chunks are no quicker
    pair = max(later - quickest[sizes.index(count)], 0.0) / (count * start) if start else 0.0
    own = np.maximum.accumulate(quickest - pair * np.square(sizes) / 2)
    if len(sizes) == 1:  # prompts can be no longer; `PromptCosts` takes two sizes
        sizes, own = [*sizes, 2 * sizes[0]], np.append(own, 2 * own)
    return PromptCosts(sizes, own.tolist(), float(pair))


def _undisturbed(batches: Array, rest_JK1: Array) -> Array:
    """The times without disturbances: no step is slower than one of more requests and rows."""
    rows_JK1 = batches[:, None] * np.arange(1, rest_JK1.shape[1] + 1)
    least_JK1 = rest_JK1.copy()
    for j, k in np.ndindex(rest_JK1.shape):
        least_JK1[j, k] = rest_JK1[j:][rows_JK1[j:] >= rows_JK1[j, k]].min()
    return least_JK1


class _Steps:
    """Made-up requests, and timed steps of them."""

    def __init__(self, runner: Runner, num_drafts: int, rule: Rule) -> None:
        self._runner, self._num_drafts = runner, num_drafts
        self._rule, self._on_device = rule, not runner.on_host
        state = runner.slots.state
        self._most = min(state.token_SL.shape[1] - num_drafts - 1, runner.model.max_model_len)
        self._columns, self._num_blocks = state.block_SL.shape[1], runner.kv.num_blocks
        self._batch = 0

    def compile_ahead(self, sizes: Sequence[int], widths: Sequence[int]) -> None:
        """Compile the kernels of all steps to capture at once: one by one takes too long."""
        self._admit(max(sizes), _SHORT)
        self._runner.compile_ahead([_step(size, width) for size in sizes for width in widths])

    def table(self, batch: int, every: Sequence[int], limit: float) -> tuple[Array, float]:
        """Seconds [2, K] of all but drafting, and of drafting; seconds to catch up with a token.

        A step with fewer drafts is made no slower than one with more, against disturbances.
        """
        repeats, first, start = list[list[tuple[float, float]]](), 0.0, time.perf_counter()
        self._admit(batch, _SHORT)
        self._run(1)  # work that is done once
        while len(repeats) < _MOST_REPEATS:
            self._admit(batch, _SHORT)
            first = self._run(1)[1]
            repeats.append([self._run_at(_SHORT, count) for count in every])
            if len(repeats) >= _LEAST_REPEATS and time.perf_counter() > start + limit:
                break
        found_2K = np.maximum(np.array(repeats).min(axis=0).T, 1e-7)  # 0: no room for any step
        found_2K = np.minimum.accumulate(found_2K[:, ::-1], axis=1)[:, ::-1]
        drafted = float(np.interp(1, every, found_2K[1]))
        tokens = batch * max(min(_SHORT, self._most // 2), 1)
        return found_2K, max(first - drafted, 0.0) / tokens

    def of_context(self, batch: int, every: Sequence[int]) -> Array:
        """Seconds per token of context, of a step with each of these numbers of drafts.

        Measured with several requests: with one, two times would hardly differ.
        """
        if self._most < 2 * _SHORT:
            return np.zeros(len(every))
        quickest = []
        for length in (_SHORT, _LONG_ON_DEVICE if self._on_device else _LONG):
            self._admit(batch, length)
            admitted = self._length  # what room allows
            self._run(1)
            repeats = [[sum(self._run_at(length, count)) for count in every] for _ in range(4)]
            quickest.append((admitted, *np.min(repeats, axis=0)))
        tokens, *more = np.maximum(np.subtract(*quickest[::-1]), 0).tolist()
        return np.array([seconds / tokens / batch if tokens else 0.0 for seconds in more])

    def _run_at(self, length: int, count: int) -> tuple[float, float]:
        """`_run`, with new requests of about this length if the present ones have no room left."""
        if self._length + count + 2 > self._most:
            self._admit(self._batch, length)
            self._run(1)
        return self._run(count)

    @property
    def most_chunk(self) -> int:
        """Tokens of the longest chunk: all but the last that there is room for."""
        return max(self._most - 1, 1)

    def chunk(self, start: int, count: int) -> float:
        """Seconds of a step that computes `count` tokens of a prompt, after `start` others."""
        self._new_cache()
        end = start + count
        admission = self._admission(0, end + 1, start)
        self._runner.run(StepPlan([], [admission], [self._blocks(0, 0, end)]))
        self._batch = 1
        none = [NONE]
        return sum(self._time(StepInput([0], [count], [0], [False], none, none, [False])))

    def clear(self) -> None:
        """Forget these requests."""
        self._runner.run(StepPlan(range(self._batch)))
        self._batch = 0

    def _admit(self, batch: int, length: int) -> None:
        """New requests of about `length` tokens, of which all but the last are computed.

        Each has blocks of its own, as far as there are enough: shared blocks would stay in a
        processor's cache.
        """
        self._new_cache()
        self._length = length = max(min(length, self._most // 2), 2)
        stride = -(-2 * length // self._runner.kv.block_size)
        admissions = [self._admission(slot, length, length - 1) for slot in range(batch)]
        new_blocks = [self._blocks(slot, slot * stride, length + _ROOM) for slot in range(batch)]
        self._runner.run(StepPlan([], admissions, new_blocks))
        self._batch = batch

    def _new_cache(self) -> None:
        self.clear()
        if not self._on_device:
            self._runner.clear(range(self._num_blocks))  # else the drafter reuses what they hold

    def _admission(self, slot: int, length: int, computed: int) -> Admission:
        """A request of `length` tokens, of which `computed` are computed."""
        drafter = self._runner.drafter.measured if self._runner.drafter else 0
        return Admission(
            slot, slot, _PARAMS, self._rule, [0] * length, length, self._most, computed, drafter
        )

    def _blocks(self, slot: int, first: int, num_tokens: int) -> tuple[int, int, list[int]]:
        """A slot's blocks for `num_tokens`, beginning with block `first`."""
        count = min(-(-num_tokens // self._runner.kv.block_size), self._columns)
        return slot, 0, [i % self._num_blocks for i in range(first, first + count)]

    def _run(self, count: int) -> tuple[float, float]:
        """Seconds of a decode step with `count` drafts each: of all but drafting, of drafting."""
        taken = self._time(_step(self._batch, count))
        self._length += count + 1
        return taken

    def _time(self, step: StepInput) -> tuple[float, float]:
        """Seconds of a step: of all but drafting, and of drafting."""
        begin = time.perf_counter()
        result = self._runner.run(StepPlan(step=step, timed=True))
        result.read()
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        seconds = time.perf_counter() - begin
        phases = device_phases(result) if result.events else result.phases
        drafting = phases.get("draft", 0.0)
        if result.events:  # without the gap, in which the GPU waited for the host
            seconds = sum(phases.values()) - phases.get("gap", 0.0)
        return seconds - drafting, drafting


def _step(batch: int, num_drafts: int) -> StepInput:
    none, all_of, no = [NONE] * batch, [True] * batch, [False] * batch
    return StepInput(range(batch), [1] * batch, [num_drafts] * batch, all_of, none, none, no)
