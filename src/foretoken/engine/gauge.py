"""Measures the memory of a GPU that loading takes, and that the largest steps take.

Charter: the only place that asks PyTorch and the driver how much memory is taken. It counts the
memory that PyTorch has reserved (`memory_reserved`), not the sizes of tensors: no other process can
use reserved memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch

from foretoken.engine.memory_plan import (
    Budget,
    Sizes,
    StepBytes,
    StepPeak,
    format_bytes,
    is_out_of_memory,
)
from foretoken.engine.runner import Runner
from foretoken.errors import EngineMemoryError
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import NONE, Admission, StepInput, StepPlan

# Parameters of the steps that take most memory: nucleus sampling and log-probabilities.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20)


class Gauge:
    """The memory of one GPU that was taken since this gauge was made, before anything is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()
        self._free, self._total = torch.cuda.mem_get_info(device)
        self._reserved = torch.cuda.memory_reserved(device)

    def budget(self, fraction: float) -> Budget:
        """The memory that the engine may plan with: at most `fraction` of the GPU's."""
        return Budget(self._total, self._free, fraction)

    def taken(self) -> int:
        """Bytes that PyTorch has taken since the start, without its cache of free memory."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device) - self._reserved

    def libraries(self) -> int:
        """Bytes taken since the start outside PyTorch's allocator; other processes count, too."""
        taken = self.taken()
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(self._free - free - taken, 0)

    def peak(self, run: Callable[[], object], base: int) -> int | None:
        """The most bytes taken during `run()`, less `base`; None if memory ran out."""
        try:
            self.taken()
            torch.cuda.reset_peak_memory_stats(self._device)
            run()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # frees the tensors in them
            return None
        most = torch.cuda.max_memory_reserved(self._device)
        return max(most - self._reserved - base, 0)


def gauge_of(device: torch.device) -> Gauge | None:
    """A gauge of this GPU; None on a CPU, where nothing is measured."""
    return Gauge(device) if device.type == "cuda" else None


def measure_steps(runner: Runner, sizes: Sizes, gauge: Gauge) -> StepBytes:
    """Measure the three steps of `StepBytes.through`; if memory runs out, smaller ones.

    Args:
        runner: a runner on a GPU that serves no request yet, with a cache of any size.

    Raises:
        EngineMemoryError: not even one request can decode.
    """
    state = runner.slots.state
    drafts = min(sizes.num_drafts, sizes.max_model_len - 2)
    longest = sizes.max_model_len - drafts - 1
    requests, width = sizes.max_num_seqs, 1 + drafts
    prompt_tokens = sizes.tokens - requests * width  # that fit into a step in which all decode

    def run(chunks: Sequence[int]) -> None:
        """Run a step in which request b computes `chunks[b]` known tokens, and all decide.

        The contexts of the first request and of all prompts are as long as allowed.
        """
        for b, count in enumerate(chunks):
            length = longest if b == 0 or count > 1 else 1
            state.length_S[b] = length
            state.computed_S[b] = length - count
            state.limit_S[b] = length + width
        runner.run(StepPlan(step=_step(chunks, drafts)))

    def run_all() -> None:
        """Run steps without and with filters; steps that are too large for memory are skipped."""
        for params in (SamplingParams(), _PARAMS):
            _admit(runner, sizes, params)
            for chunks in ([1], [1] * requests, _chunks(requests, max(prompt_tokens, 0), longest)):
                gauge.peak(partial(run, chunks), 0)

    def peak(requests: int, prompt_tokens: int) -> StepPeak | None:
        """The peak of a step in which so many requests share `prompt_tokens`; None: too large."""
        chunks = _chunks(requests, prompt_tokens, longest)
        run_step = partial(run, chunks)
        # The second run counts: the first may try several kernels.
        if gauge.peak(run_step, base) is None or (num_bytes := gauge.peak(run_step, base)) is None:
            return None
        return StepPeak(sum(chunks) + requests * drafts, requests * width, num_bytes)

    runner.model.backend.compile_ahead(run_all)
    _admit(runner, sizes, _PARAMS)
    base = gauge.taken()
    least = peak(1, 0)
    if least is None:
        raise EngineMemoryError(
            f"Out of memory in a step of one request: {format_bytes(gauge.taken())} are taken by "
            "weights and kernels. Take a smaller checkpoint, a smaller `dtype`, or another GPU."
        )
    while (decode := peak(requests, 0)) is None:
        requests = max(requests // 2, 1)
    largest = None
    while largest is None and prompt_tokens > 0:
        largest = peak(requests, prompt_tokens)
        prompt_tokens //= 2
    return StepBytes.through(least, decode, largest or decode)


def _admit(runner: Runner, sizes: Sizes, params: SamplingParams) -> None:
    """Admit a request to every slot, without blocks: block tables name only the spare block."""
    limit, slots = sizes.max_model_len, range(sizes.max_num_seqs)
    admissions = [Admission(s, s, params, Rule.STANDARD, [0], 1, limit) for s in slots]
    runner.run(StepPlan(admissions=admissions))


def _chunks(requests: int, prompt_tokens: int, longest: int) -> list[int]:
    """How many known tokens each request computes: one, and its part of `prompt_tokens`.

    The first requests get as many prompt tokens as fit `longest`, until none is left.
    """
    chunks, left = list[int](), prompt_tokens
    for _ in range(requests):
        chunks.append(1 + min(left, longest - 1))
        left -= chunks[-1] - 1
    return chunks


def _step(chunks: Sequence[int], drafts: int) -> StepInput:
    """A step in which all requests decide and want log-probabilities and evidence."""
    count, num_top = len(chunks), _PARAMS.logprobs or 0
    prompt_top_B = [NONE if chunk == 1 else num_top for chunk in chunks]
    drafts_B, all_B, top_B = [drafts] * count, [True] * count, [num_top] * count
    return StepInput(range(count), chunks, drafts_B, all_B, top_B, prompt_top_B, traces_B=all_B)
