"""The times of steps on this machine, measured at start with made-up requests.

Charter: only for K = `auto` and for `max_step_seconds`. A real runner computes the steps. On a host
it is a temporary runner with own slots; on a device it is the engine's own runner, which captures
and later replays the same graphs. The choice of K refines the measured times by the times of later
steps (`StepCosts`); the sizes of prompt chunks do not change with them (`Pace`).
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
"""Limit of measuring, by type of device. Batch sizes that were not measured in time are
interpolated, or extrapolated in proportion. On a GPU, captures take most of the time."""

_LEAST_REPEATS, _MOST_REPEATS = 2, 12  # the quickest counts: disturbances make steps slower
_SHARE = 0.2  # share of the limit for each batch size
_SHORT, _LONG = 32, 512  # tokens of a request's context
_LONG_ON_DEVICE = 4096  # 512 tokens of 16 requests take a GPU 0.2 ms of a step of 4
_MIDDLE = 16  # requests with which a long context is measured
BLOCK_TOKENS = _MIDDLE * (_LONG + 64)  # tokens of the cache in which a host measures steps
_ROOM = 256  # tokens that the steps after one admission may add
_EVERY_K = 4  # with up to so many requests all K are measured, with more only powers of two
_ROUGHLY = 0.3  # share of the limit if K does not depend on the measurement
_CHUNKS = (1, *(2**i for i in range(4, 16)))  # tokens of measured prompt chunks
_ENOUGH = 0.5  # share of `max_step_seconds`: after a chunk that takes it, no larger one is timed
_CHUNK_REPEATS = 3
_LONG_PROMPT = 1024  # tokens before the chunk that is measured in a long prompt
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
        num_slots, num_drafts: most requests, and most drafts of a request.
        widths: numbers of drafts that a captured step may have; () if nothing is captured.
        rule: the verification rule. Steps that are captured for it here are replayed later.
        adapts: True: K will be chosen by these times. False: only steps without drafts and with all
            drafts are timed, in less time.
    """
    limit = SECONDS[runner.device.type] * (1.0 if adapts else _ROUGHLY)
    steps = _Steps(runner, num_drafts, rule)
    sizes = [*(4**i for i in range(16) if 4**i < num_slots), num_slots]
    if widths:
        steps.compile_ahead(sizes, widths)
        sizes.insert(1, sizes.pop())  # the smallest and the largest are always measured
    powers = (1, 2, 4, 8, 16, 32) if adapts else ()
    some_k = sorted({0, num_drafts, *(k for k in powers if k < num_drafts)})
    seconds_2K1 = dict[int, Array]()  # by batch size: rows as of `_Steps.table`, for all K
    missed, end = 0.0, time.perf_counter() + limit
    for i, batch in enumerate(sizes):
        if time.perf_counter() > end and i > bool(widths):
            break
        drafts = widths or (range(num_drafts + 1) if batch <= _EVERY_K and adapts else some_k)
        measured_2N, missed = steps.table(batch, list(drafts), _SHARE * limit)
        seconds_2K1[batch] = np.stack(
            [np.interp(range(num_drafts + 1), drafts, measured_N) for measured_N in measured_2N]
        )
    drafts = sorted(widths or {0, num_drafts})
    context_N = steps.seconds_per_context(min(num_slots, _MIDDLE), drafts)
    context_K1 = np.interp(range(num_drafts + 1), drafts, context_N)
    steps.clear()
    batches = np.array(sorted(seconds_2K1))
    rest_JK1, draft_JK1 = np.stack([seconds_2K1[batch] for batch in batches.tolist()], axis=1)
    rest_JK1 = _undisturbed(batches, rest_JK1)
    return StepTable(batches, rest_JK1, draft_JK1, context_K1, missed)


def measure_prompts(runner: Runner, rule: Rule, max_seconds: float, max_tokens: int) -> PromptCosts:
    """Time chunks at the start of a prompt, and one chunk in a long prompt.

    Chunks grow until one takes half of `max_seconds`.

    Args:
        rule: as in `measure`.
        max_seconds: longest time of a step.
        max_tokens: most tokens of a step.
    """
    steps = _Steps(runner, 0, rule)
    sizes = [size for size in _CHUNKS if size <= min(steps.most_chunk, max_tokens)]
    steps.chunk(0, sizes[0])  # the first step also does work that is done only once
    first = list[float]()
    for size in sizes:
        first.append(steps.chunk(0, size))
        if len(first) > 1 and first[-1] > _ENOUGH * max_seconds:
            break
    sizes = sizes[: len(first)]
    count = sizes[len(sizes) // 2]  # tokens of the chunk in a long prompt
    start = min(_LONG_PROMPT, steps.most_chunk - count)
    repeats = [[*first, steps.chunk(start, count)]]
    repeats += [
        [*(steps.chunk(0, size) for size in sizes), steps.chunk(start, count)]
        for _ in range(_CHUNK_REPEATS - 1)
    ]
    steps.clear()
    *quickest, in_long_prompt = np.min(repeats, axis=0).tolist()
    quickest = np.minimum.accumulate(quickest[::-1])[::-1]  # larger chunks are no quicker
    more = max(in_long_prompt - quickest[sizes.index(count)], 0.0)
    pair = more / (count * start) if start else 0.0
    without_pairs = np.maximum.accumulate(quickest - pair * np.square(sizes) / 2)
    if len(sizes) == 1:  # no longer prompt fits; `PromptCosts` needs two sizes
        sizes, without_pairs = [*sizes, 2 * sizes[0]], np.append(without_pairs, 2 * without_pairs)
    return PromptCosts(sizes, without_pairs.tolist(), float(pair))


def _undisturbed(batches: Array, rest_JK1: Array) -> Array:
    """The times, lowered where a step was disturbed.

    No step may be slower than a step with at least as many requests and at least as many rows.
    """
    rows_JK1 = batches[:, None] * np.arange(1, rest_JK1.shape[1] + 1)
    least_JK1 = rest_JK1.copy()
    for j, k in np.ndindex(rest_JK1.shape):
        least_JK1[j, k] = rest_JK1[j:][rows_JK1[j:] >= rows_JK1[j, k]].min()
    return least_JK1


class _Steps:
    """Makes up requests in a runner, and times steps of them."""

    def __init__(self, runner: Runner, num_drafts: int, rule: Rule) -> None:
        self._runner, self._num_drafts = runner, num_drafts
        self._rule, self._on_device = rule, not runner.on_host
        state = runner.slots.state
        # The most tokens of a request.
        self._most = min(state.token_SL.shape[1] - num_drafts - 1, runner.model.max_model_len)
        self._columns, self._num_blocks = state.block_SL.shape[1], runner.kv.num_blocks
        self._batch = 0  # present requests, in slots 0, 1, ..

    def compile_ahead(self, sizes: Sequence[int], widths: Sequence[int]) -> None:
        """Compile the kernels of all steps that will be captured, many at the same time.

        One after another they would take too long.
        """
        self._admit(max(sizes), _SHORT)
        self._runner.compile_ahead([_step(size, width) for size in sizes for width in widths])

    def table(self, batch: int, drafts: Sequence[int], limit: float) -> tuple[Array, float]:
        """Time steps of `batch` requests with each of the N numbers of drafts in `drafts`.

        If a step with fewer drafts took longer than a step with more, it was disturbed, and the
        shorter time counts for both.

        Returns:
            Seconds [2, N]: row 0 without drafting, row 1 of drafting only. Second, the seconds that
            the drafter takes to catch up with one token that it has not seen.
        """
        repeats, first, start = list[list[tuple[float, float]]](), 0.0, time.perf_counter()
        self._admit(batch, _SHORT)
        self._run(1)  # the first step also does work that is done only once
        while len(repeats) < _MOST_REPEATS:
            self._admit(batch, _SHORT)
            first = self._run(1)[1]  # the drafter also computes the whole context
            repeats.append([self._run_at(_SHORT, count) for count in drafts])
            if len(repeats) >= _LEAST_REPEATS and time.perf_counter() > start + limit:
                break
        # Seconds are 0 if there was no room for any step.
        seconds_2N = np.maximum(np.array(repeats).min(axis=0).T, 1e-7)
        seconds_2N = np.minimum.accumulate(seconds_2N[:, ::-1], axis=1)[:, ::-1]
        one_draft = float(np.interp(1, drafts, seconds_2N[1]))
        tokens = batch * max(min(_SHORT, self._most // 2), 1)
        return seconds_2N, max(first - one_draft, 0.0) / tokens

    def seconds_per_context(self, batch: int, drafts: Sequence[int]) -> Array:
        """Seconds per token of context, [N], of steps with each number of drafts in `drafts`.

        They are the difference between a short and a long context. With only one request the two
        times would hardly differ.
        """
        if self._most < 2 * _SHORT:
            return np.zeros(len(drafts))
        quickest = []
        for length in (_SHORT, _LONG_ON_DEVICE if self._on_device else _LONG):
            self._admit(batch, length)
            admitted = self._length  # may be less than `length`
            self._run(1)
            repeats = [[sum(self._run_at(length, count)) for count in drafts] for _ in range(4)]
            quickest.append((admitted, *np.min(repeats, axis=0)))
        tokens, *differences = np.maximum(np.subtract(*quickest[::-1]), 0).tolist()
        return np.array([seconds / tokens / batch if tokens else 0.0 for seconds in differences])

    def _run_at(self, length: int, count: int) -> tuple[float, float]:
        """As `_run`; if there is no room for the step, first admit new requests of this length."""
        if self._length + count + 2 > self._most:
            self._admit(self._batch, length)
            self._run(1)
        return self._run(count)

    @property
    def most_chunk(self) -> int:
        """Tokens of the longest chunk: one token of a request always follows the chunk."""
        return max(self._most - 1, 1)

    def chunk(self, start: int, count: int) -> float:
        """Seconds of a step that computes `count` tokens of a prompt, after `start` tokens."""
        self._new_cache()
        end = start + count
        admission = self._admission(0, end + 1, start)
        self._runner.run(StepPlan([], [admission], [self._blocks(0, 0, end)]))
        self._batch = 1
        none = [NONE]
        return sum(self._time(StepInput([0], [count], [0], [False], none, none, [False])))

    def clear(self) -> None:
        """Release the present requests."""
        self._runner.run(StepPlan(range(self._batch)))
        self._batch = 0

    def _admit(self, batch: int, length: int) -> None:
        """Replace the requests by `batch` new ones, in which all tokens but the last count as
        computed. They have about `length` tokens, as room allows.

        Each request has blocks of its own, as far as there are enough, because shared blocks would
        stay in a processor's cache.
        """
        self._new_cache()
        self._length = length = max(min(length, self._most // 2), 2)
        stride = -(-2 * length // self._runner.kv.block_size)
        admissions = [self._admission(slot, length, length - 1) for slot in range(batch)]
        new_blocks = [self._blocks(slot, slot * stride, length + _ROOM) for slot in range(batch)]
        self._runner.run(StepPlan([], admissions, new_blocks))
        self._batch = batch

    def _new_cache(self) -> None:
        """Release the requests; on a host also make the drafter forget the content of blocks."""
        self.clear()
        if not self._on_device:
            self._runner.clear(range(self._num_blocks))

    def _admission(self, slot: int, length: int, computed: int) -> Admission:
        """The admission of a request with `length` tokens, of which `computed` are computed."""
        drafter = self._runner.drafter.measured if self._runner.drafter else 0
        return Admission(
            slot, slot, _PARAMS, self._rule, [0] * length, length, self._most, computed, drafter
        )

    def _blocks(self, slot: int, first: int, num_tokens: int) -> tuple[int, int, list[int]]:
        """An entry of `StepPlan.new_blocks`: a slot's blocks for `num_tokens` tokens.

        They begin with block `first`; after the last block of the cache comes block 0.
        """
        count = min(-(-num_tokens // self._runner.kv.block_size), self._columns)
        return slot, 0, [i % self._num_blocks for i in range(first, first + count)]

    def _run(self, count: int) -> tuple[float, float]:
        """Run a decode step with `count` drafts of each request; seconds as in `_time`."""
        seconds = self._time(_step(self._batch, count))
        self._length += count + 1
        return seconds

    def _time(self, step: StepInput) -> tuple[float, float]:
        """Run a step; returns its seconds without drafting, and the seconds of drafting."""
        begin = time.perf_counter()
        result = self._runner.run(StepPlan(step=step, timed=True))
        result.read()
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        seconds = time.perf_counter() - begin
        phases = device_phases(result) if result.events else result.phases
        drafting = phases.get("draft", 0.0)
        if result.events:  # leave out the gap, in which the GPU waited for the host
            seconds = sum(phases.values()) - phases.get("gap", 0.0)
        return seconds - drafting, drafting


def _step(batch: int, num_drafts: int) -> StepInput:
    """A decode step of the requests in slots 0 to batch - 1, without reports."""
    none_B, decides_B, traces_B = [NONE] * batch, [True] * batch, [False] * batch
    num_tokens_B, drafts_B = [1] * batch, [num_drafts] * batch
    return StepInput(range(batch), num_tokens_B, drafts_B, decides_B, none_B, none_B, traces_B)
