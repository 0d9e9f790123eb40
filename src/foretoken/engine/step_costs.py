"""What steps cost on this machine, in bytes and in seconds, measured before the first request.

The memory of a GPU is measured to plan the cache, times only for K = `auto` and `max_step_seconds`.
A real runner computes made-up requests. To take times, a host has a temporary runner with separate
slots; a device uses the engine's runner, which captures and later replays the same graphs. The
choice of K refines these times by the times of later steps (`StepCosts`); the sizes of prompt
chunks do not (`Pace`).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from foretoken.drafting.control import Array, StepTable
from foretoken.engine import memory_plan
from foretoken.engine.memory_plan import Budget, Sizes, StepBytes, StepPeak
from foretoken.engine.pace import PromptCosts
from foretoken.engine.runner import Runner
from foretoken.engine.trace import device_phases
from foretoken.errors import EngineMemoryError
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import NONE, Admission, StepInput, StepPlan

# The steps that take most memory have nucleus sampling and log-probabilities.
_COSTLY_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20)
_TIMED_PARAMS = SamplingParams(temperature=1.0)

# Seconds that measuring may take, by type of device. Batch sizes that were not measured in time are
# interpolated, or extrapolated in proportion. On a GPU, captures take most of the time.
SECONDS = {"cpu": 1.5, "cuda": 30.0}
_LIMIT_SHARE_FIXED_K = 0.3  # share of the limit if K does not depend on the measurement
_LIMIT_SHARE_PER_BATCH = 0.2  # share of the limit for each batch size
_MIN_REPEATS, _MAX_REPEATS = 2, 12  # the quickest repeat is used: disturbances make steps slower
_ALL_K_BATCH = 4  # with up to so many requests all K are measured, with more only powers of two
_SHORT, _LONG = 32, 512  # tokens of a request's context
_LONG_ON_DEVICE = 4096  # 512 tokens of 16 requests add only 0.2 ms to a GPU's step of 4 ms
_LONG_CONTEXT_BATCH = 16  # requests with which a long context is measured
BLOCK_TOKENS = _LONG_CONTEXT_BATCH * (_LONG + 64)  # tokens of the cache in which a host measures
_GROWTH = 256  # tokens that the steps after one admission may add
_CHUNKS = (1, *(2**i for i in range(4, 16)))  # tokens of measured prompt chunks
_LARGEST_CHUNK_SHARE = 0.5  # of `max_step_seconds`: a chunk that takes longer is the last timed
_CHUNK_REPEATS = 3
_LONG_PROMPT = 1024  # tokens before the chunk that is measured in a long prompt


class Gauge:
    """Measures the memory of a GPU that was taken since this gauge was made.

    What counts is memory that PyTorch has reserved, not the sizes of tensors, because no other
    process can use reserved memory.

    Args:
        cuda: an object with the functions of `torch.cuda` that report or free memory.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        cuda.empty_cache()
        free_and_total: tuple[int, int] = cuda.mem_get_info(device)
        self._free_before, self._total = free_and_total
        self._reserved_before: int = cuda.memory_reserved(device)

    def budget(self, fraction: float) -> Budget:
        return Budget(self._total, self._free_before, fraction)

    def taken(self) -> int:
        """Bytes that PyTorch has taken, without its cache of free memory."""
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        reserved: int = self._cuda.memory_reserved(self._device)
        return reserved - self._reserved_before

    def libraries(self) -> int:
        """Bytes taken outside PyTorch's allocator, also by other processes."""
        taken = self.taken()
        free: int = self._cuda.mem_get_info(self._device)[0]
        return max(self._free_before - free - taken, 0)

    def peak(self, run: Callable[[], object], base: int) -> int | None:
        """The most bytes taken during `run()`, less `base`; None if memory ran out."""
        try:
            self.taken()
            self._cuda.reset_peak_memory_stats(self._device)
            run()
            self._cuda.synchronize(self._device)
        except RuntimeError as error:
            if not memory_plan.is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # frees the tensors in the frames
            return None
        most: int = self._cuda.max_memory_reserved(self._device)
        return max(most - self._reserved_before - base, 0)


def gauge_of(device: torch.device) -> Gauge | None:
    """A gauge of this GPU; None on a CPU, where no memory is measured."""
    return Gauge(device) if device.type == "cuda" else None


def measure_step_bytes(runner: Runner, sizes: Sizes, gauge: Gauge) -> StepBytes:
    """Measure the three steps of `StepBytes.through`; if memory runs out, smaller steps.

    Args:
        runner: a runner on a GPU that serves no request yet, with a cache of any size.

    Raises:
        EngineMemoryError: not even one request can decode.
    """
    state = runner.slots.state
    drafts = min(sizes.num_drafts, sizes.max_model_len - 2)
    longest = sizes.max_model_len - drafts - 1
    requests, rows_each = sizes.max_num_seqs, 1 + drafts
    prompt_tokens = sizes.tokens - requests * rows_each  # that fit into a step in which all decode

    def run(chunks: Sequence[int]) -> None:
        """Run a step in which request b computes `chunks[b]` known tokens, and all decide."""
        for b, count in enumerate(chunks):
            length = longest if b == 0 or count > 1 else 1
            state.length_S[b] = length
            state.computed_S[b] = length - count
            state.limit_S[b] = length + rows_each
        runner.run(StepPlan(step=_costly_step(chunks, drafts)))

    def run_all() -> None:
        """Run steps without and with filters; steps that are too large for memory are skipped."""
        for params in (SamplingParams(), _COSTLY_PARAMS):
            _admit_everywhere(runner, sizes, params)
            for chunks in ([1], [1] * requests, _chunks(requests, max(prompt_tokens, 0), longest)):
                gauge.peak(partial(run, chunks), 0)

    def peak(requests: int, prompt_tokens: int) -> StepPeak | None:
        """The peak of a step of so many requests and prompt tokens; None: memory ran out."""
        chunks = _chunks(requests, prompt_tokens, longest)
        run_step = partial(run, chunks)
        # Only the second run is used: the first may try several kernels.
        if gauge.peak(run_step, base) is None or (num_bytes := gauge.peak(run_step, base)) is None:
            return None
        return StepPeak(sum(chunks) + requests * drafts, requests * rows_each, num_bytes)

    runner.model.backend.compile_ahead(run_all)
    _admit_everywhere(runner, sizes, _COSTLY_PARAMS)
    base = gauge.taken()
    smallest = peak(1, 0)
    if smallest is None:
        taken = memory_plan.format_bytes(gauge.taken())
        raise EngineMemoryError(
            f"Out of memory in a step of one request: weights and kernels take {taken}. Take a "
            "smaller checkpoint, a smaller `dtype`, or another GPU."
        )
    while (decode := peak(requests, 0)) is None:
        requests = max(requests // 2, 1)
    largest = None
    while largest is None and prompt_tokens > 0:
        largest = peak(requests, prompt_tokens)
        prompt_tokens //= 2
    return StepBytes.through(smallest, decode, largest or decode)


def _admit_everywhere(runner: Runner, sizes: Sizes, params: SamplingParams) -> None:
    """Admit a request to every slot, without blocks: block tables name only the spare block."""
    limit, slots = sizes.max_model_len, range(sizes.max_num_seqs)
    admissions = [Admission(s, s, params, Rule.STANDARD, [0], 1, limit) for s in slots]
    runner.run(StepPlan(admissions=admissions))


def _chunks(requests: int, prompt_tokens: int, longest: int) -> list[int]:
    """How many known tokens each request computes: one, and prompt tokens up to `longest`. The
    first requests get the prompt tokens, until all are given out."""
    chunks, remaining = list[int](), prompt_tokens
    for _ in range(requests):
        chunks.append(1 + min(remaining, longest - 1))
        remaining -= chunks[-1] - 1
    return chunks


def _costly_step(chunks: Sequence[int], drafts: int) -> StepInput:
    """A step in which all requests decide and want log-probabilities and evidence."""
    count, num_top = len(chunks), _COSTLY_PARAMS.logprobs or 0
    prompt_top_B = [NONE if chunk == 1 else num_top for chunk in chunks]
    drafts_B, true_B, top_B = [drafts] * count, [True] * count, [num_top] * count
    return StepInput(range(count), chunks, drafts_B, true_B, top_B, prompt_top_B, traces_B=true_B)


def measure_step_seconds(
    runner: Runner, num_slots: int, num_drafts: int, widths: Sequence[int], rule: Rule,
    *, adapts: bool = True,
) -> StepTable:  # fmt: skip
    """Time steps of few and many requests, with few and many drafts.

    Args:
        num_slots, num_drafts: most requests, and most drafts of a request.
        widths: numbers of drafts that a captured step may have; () if nothing is captured.
        rule: the verification rule. Steps that are captured for it here are replayed later.
        adapts: True: K will be chosen by these times. False: only steps without drafts and with all
            drafts are timed, in less time.
    """
    limit = SECONDS[runner.device.type] * (1.0 if adapts else _LIMIT_SHARE_FIXED_K)
    steps = _TimedSteps(runner, num_drafts, rule)
    sizes = [*(4**i for i in range(16) if 4**i < num_slots), num_slots]
    if widths:
        steps.compile_ahead(sizes, widths)
        sizes.insert(1, sizes.pop())  # the smallest and the largest are always measured
    powers = (1, 2, 4, 8, 16, 32) if adapts else ()
    some_k = sorted({0, num_drafts, *(k for k in powers if k < num_drafts)})
    seconds_2K1 = dict[int, Array]()  # by batch size: as in `_TimedSteps.table`, for all K
    missed, end = 0.0, time.perf_counter() + limit
    for i, batch in enumerate(sizes):
        if time.perf_counter() > end and i > bool(widths):
            break
        drafts = widths or (range(num_drafts + 1) if batch <= _ALL_K_BATCH and adapts else some_k)
        measured_2N, missed = steps.table(batch, list(drafts), _LIMIT_SHARE_PER_BATCH * limit)
        seconds_2K1[batch] = np.stack(
            [np.interp(range(num_drafts + 1), drafts, measured_N) for measured_N in measured_2N]
        )
    drafts = sorted(widths or {0, num_drafts})
    context_N = steps.seconds_per_context(min(num_slots, _LONG_CONTEXT_BATCH), drafts)
    context_K1 = np.interp(range(num_drafts + 1), drafts, context_N)
    steps.clear()
    batches = np.array(sorted(seconds_2K1))
    rest_JK1, draft_JK1 = np.stack([seconds_2K1[batch] for batch in batches.tolist()], axis=1)
    rest_JK1 = _undisturbed(batches, rest_JK1)
    return StepTable(batches, rest_JK1, draft_JK1, context_K1, missed)


def measure_prompt_seconds(
    runner: Runner, rule: Rule, max_seconds: float, max_tokens: int
) -> PromptCosts:
    """Time chunks at the start of a prompt, and one chunk in a long prompt.

    Chunks grow until one takes half of `max_seconds`, the most that a step may take.

    Args:
        rule: as in `measure_step_seconds`.
        max_tokens: most tokens of a step.
    """
    steps = _TimedSteps(runner, 0, rule)
    sizes = [size for size in _CHUNKS if size <= min(steps.max_chunk, max_tokens)]
    steps.chunk(0, sizes[0])  # the first step also does work that is done only once
    first_seconds = list[float]()
    for size in sizes:
        first_seconds.append(steps.chunk(0, size))
        if len(first_seconds) > 1 and first_seconds[-1] > _LARGEST_CHUNK_SHARE * max_seconds:
            break
    sizes = sizes[: len(first_seconds)]
    count = sizes[len(sizes) // 2]  # tokens of the chunk in a long prompt
    start = min(_LONG_PROMPT, steps.max_chunk - count)
    repeats = [[*first_seconds, steps.chunk(start, count)]]
    repeats += [
        [*(steps.chunk(0, size) for size in sizes), steps.chunk(start, count)]
        for _ in range(_CHUNK_REPEATS - 1)
    ]
    steps.clear()
    *quickest, in_long_prompt = np.min(repeats, axis=0).tolist()
    quickest = np.minimum.accumulate(quickest[::-1])[::-1]  # larger chunks are no quicker
    more = max(in_long_prompt - quickest[sizes.index(count)], 0.0)
    pair = more / (count * start) if start else 0.0  # see `PromptCosts.pair`
    without_pairs = np.maximum.accumulate(quickest - pair * np.square(sizes) / 2)
    if len(sizes) == 1:  # no larger chunk fits; `PromptCosts` needs two sizes
        sizes, without_pairs = [*sizes, 2 * sizes[0]], np.append(without_pairs, 2 * without_pairs)
    return PromptCosts(sizes, without_pairs.tolist(), float(pair))


def _undisturbed(batches: Array, rest_JK1: Array) -> Array:
    """The times, lowered where a step was disturbed: no step is slower than a step with at least as
    many requests and rows."""
    rows_JK1 = batches[:, None] * np.arange(1, rest_JK1.shape[1] + 1)
    least_JK1 = rest_JK1.copy()
    for j, k in np.ndindex(rest_JK1.shape):
        least_JK1[j, k] = rest_JK1[j:][rows_JK1[j:] >= rows_JK1[j, k]].min()
    return least_JK1


class _TimedSteps:
    """Makes up requests in a runner, and times steps of these requests."""

    def __init__(self, runner: Runner, num_drafts: int, rule: Rule) -> None:
        self._runner, self._rule, self._on_device = runner, rule, not runner.on_host
        state = runner.slots.state
        # The most tokens of a request.
        self._limit = min(state.token_SL.shape[1] - num_drafts - 1, runner.model.max_model_len)
        self._columns, self._num_blocks = state.block_SL.shape[1], runner.kv.num_blocks
        self._batch = 0  # present requests, in slots 0, 1, ..
        self._length = 0  # tokens of each present request

    def compile_ahead(self, sizes: Sequence[int], widths: Sequence[int]) -> None:
        """Compile the kernels of all steps that will be captured, many at the same time."""
        self._admit(max(sizes), _SHORT)
        steps = [_decode_step(size, width) for size in sizes for width in widths]
        self._runner.compile_ahead(steps)

    def table(self, batch: int, drafts: Sequence[int], limit: float) -> tuple[Array, float]:
        """Time steps of `batch` requests with each of the N numbers of drafts in `drafts`.

        Returns:
            Seconds [2, N], row 0 without drafting and row 1 of drafting only; and the seconds that
            the drafter takes to compute one token that it has missed.
        """
        repeats, first_drafting, start = list[list[tuple[float, float]]](), 0.0, time.perf_counter()
        self._admit(batch, _SHORT)
        self._run(1)  # the first step also does work that is done only once
        while len(repeats) < _MAX_REPEATS:
            self._admit(batch, _SHORT)
            first_drafting = self._run(1)[1]  # the drafter also computes the whole context
            repeats.append([self._run_at(_SHORT, count) for count in drafts])
            if len(repeats) >= _MIN_REPEATS and time.perf_counter() > start + limit:
                break
        # Seconds are 0 if there was no room for any step.
        seconds_2N = np.maximum(np.array(repeats).min(axis=0).T, 1e-7)
        # A step with fewer drafts that took longer than a step with more was disturbed.
        seconds_2N = np.minimum.accumulate(seconds_2N[:, ::-1], axis=1)[:, ::-1]
        one_draft = float(np.interp(1, drafts, seconds_2N[1]))
        tokens = batch * max(min(_SHORT, self._limit // 2), 1)
        return seconds_2N, max(first_drafting - one_draft, 0.0) / tokens

    def seconds_per_context(self, batch: int, drafts: Sequence[int]) -> Array:
        """Seconds per token of context, [N], of steps with each number of drafts in `drafts`, by
        the difference between a short and a long context."""
        if self._limit < 2 * _SHORT:
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
        """As `_run`; if the requests are too long for a step, first admit requests of `length`."""
        if self._length + count + 2 > self._limit:
            self._admit(self._batch, length)
            self._run(1)
        return self._run(count)

    @property
    def max_chunk(self) -> int:
        """Tokens of the longest chunk: one token of a request always follows the chunk."""
        return max(self._limit - 1, 1)

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
        self._runner.run(StepPlan(range(self._batch)))
        self._batch = 0

    def _admit(self, batch: int, length: int) -> None:
        """Replace the requests by `batch` new requests of `length` tokens, or as many as fit; all
        tokens but the last count as computed."""
        self._new_cache()
        self._length = length = max(min(length, self._limit // 2), 2)
        # Requests share no blocks if there are enough: shared blocks would stay in a CPU's cache.
        stride = -(-2 * length // self._runner.kv.block_size)
        admissions = [self._admission(slot, length, length - 1) for slot in range(batch)]
        new_blocks = [self._blocks(slot, slot * stride, length + _GROWTH) for slot in range(batch)]
        self._runner.run(StepPlan([], admissions, new_blocks))
        self._batch = batch

    def _new_cache(self) -> None:
        """Release the requests; on a host also make the drafter forget the content of blocks."""
        self.clear()
        if not self._on_device:
            self._runner.clear(range(self._num_blocks))

    def _admission(self, slot: int, length: int, computed: int) -> Admission:
        drafter = self._runner.drafter.measured if self._runner.drafter else 0
        return Admission(
            slot, slot, _TIMED_PARAMS, self._rule, [0] * length, length, self._limit, computed,
            drafter,
        )  # fmt: skip

    def _blocks(self, slot: int, first: int, num_tokens: int) -> tuple[int, int, list[int]]:
        """An entry of `StepPlan.new_blocks`: a slot's blocks for `num_tokens` tokens, from block
        `first`; block 0 follows the last block of the cache."""
        count = min(-(-num_tokens // self._runner.kv.block_size), self._columns)
        return slot, 0, [i % self._num_blocks for i in range(first, first + count)]

    def _run(self, count: int) -> tuple[float, float]:
        """Run a decode step with `count` drafts of each request; seconds as in `_time`."""
        seconds = self._time(_decode_step(self._batch, count))
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
        if result.events:  # without the gap, in which the GPU waited for the host
            seconds = sum(phases.values()) - phases.get("gap", 0.0)
        return seconds - drafting, drafting


def _decode_step(batch: int, num_drafts: int) -> StepInput:
    """A decode step of the requests in slots 0 to batch - 1, without reports."""
    none_B, decides_B, traces_B = [NONE] * batch, [True] * batch, [False] * batch
    num_tokens_B, drafts_B = [1] * batch, [num_drafts] * batch
    return StepInput(range(batch), num_tokens_B, drafts_B, decides_B, none_B, none_B, traces_B)
