"""What an engine takes of a GPU's memory, measured: by loading, and by steps as large as they get.

Charter: the only place that asks PyTorch and the driver how much memory is taken. What PyTorch has
taken of the device is counted (`memory_reserved`), not what its tensors need: the difference is
lost to everybody else, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from foretoken.engine.memory_plan import Budget, Sizes, StepCost, StepPeak, is_out_of_memory, shown
from foretoken.engine.runner import Runner
from foretoken.errors import EngineMemoryError
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.slots.plan import NONE, Admission, StepInput, StepPlan

# What takes most: every request draws at random, from a nucleus, and asks for log-probabilities.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20)


class Gauge:
    """Memory of one GPU, from the moment that this is made: before anything is loaded.

    Args:
        cuda: has the functions of `torch.cuda` for the allocator's and the driver's figures.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        cuda.empty_cache()
        free_and_total: tuple[int, int] = cuda.mem_get_info(device)
        self._free, self._total = free_and_total
        self._reserved: int = cuda.memory_reserved(device)

    def budget(self, fraction: float) -> Budget:
        """What there is to be planned with."""
        return Budget(self._total, self._free, fraction)

    def taken(self) -> int:
        """Bytes that PyTorch has taken since, without what it merely keeps for later."""
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        reserved: int = self._cuda.memory_reserved(self._device)
        return reserved - self._reserved

    def libraries(self) -> int:
        """Bytes taken since outside PyTorch's allocator; other processes' doings are in it, too."""
        taken = self.taken()
        free: int = self._cuda.mem_get_info(self._device)[0]
        return max(self._free - free - taken, 0)

    def peak(self, run: Callable[[], object], base: int) -> int | None:
        """Most bytes taken while it runs, beyond `base` of `taken`; None if memory ran out."""
        try:
            self.taken()
            self._cuda.reset_peak_memory_stats(self._device)
            run()
            self._cuda.synchronize(self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # which hold the tensors that there were
            return None
        most: int = self._cuda.max_memory_reserved(self._device)
        return max(most - self._reserved - base, 0)


def gauge_of(device: torch.device) -> Gauge | None:
    """A gauge of this GPU; None on a CPU, where nothing is measured."""
    return Gauge(device) if device.type == "cuda" else None


def measure_steps(runner: Runner, sizes: Sizes, gauge: Gauge) -> StepCost:
    """Run the steps of `StepCost.of`; where memory runs out, smaller ones, from which it follows.

    Args:
        runner: over slots on a device, with a pool of any size; it may serve no request.

    Raises:
        EngineMemoryError: not even one request can decode.
    """
    state = runner.slots.state
    drafts = min(sizes.num_drafts, sizes.max_model_len - 2)
    longest = sizes.max_model_len - drafts - 1
    requests, width = sizes.max_num_seqs, 1 + drafts
    more = sizes.tokens - requests * width

    def run(chunks: Sequence[int]) -> None:
        """Each request decides; prompts, and the first, end where contexts do."""
        for b, count in enumerate(chunks):
            length = longest if b == 0 or count > 1 else 1
            state.length_S[b] = length
            state.computed_S[b] = length - count
            state.limit_S[b] = length + width
        runner.run(StepPlan(step=_step(chunks, drafts)))

    def run_all() -> None:
        """Without filters and with them; what is too large for memory is left out."""
        for params in (SamplingParams(), _PARAMS):
            _admit(runner, sizes, params)
            for chunks in ([1], [1] * requests, _chunks(requests, max(more, 0), longest)):
                gauge.peak(partial(run, chunks), 0)

    def peak(requests: int, prompt_tokens: int) -> StepPeak | None:
        """Of requests that decode, with so many tokens of prompts shared among them."""
        chunks = _chunks(requests, prompt_tokens, longest)
        once = partial(run, chunks)
        # The first run may choose among kernels.
        if gauge.peak(once, base) is None or (num_bytes := gauge.peak(once, base)) is None:
            return None
        return StepPeak(sum(chunks) + requests * drafts, requests * width, num_bytes)

    runner.model.backend.compile_ahead(run_all)
    _admit(runner, sizes, _PARAMS)
    base = gauge.taken()
    least = peak(1, 0)
    if least is None:
        raise EngineMemoryError(
            f"Out of memory in a step of one request: {shown(gauge.taken())} are taken by weights "
            "and kernels. Take a smaller checkpoint, a smaller `dtype`, or another GPU."
        )
    while (decode := peak(requests, 0)) is None:
        requests = max(requests // 2, 1)
    largest = None
    while largest is None and more > 0:
        largest = peak(requests, more)
        more //= 2
    return StepCost.of(least, decode, largest or decode)


def _admit(runner: Runner, sizes: Sizes, params: SamplingParams) -> None:
    """Into every slot a request; all of its blocks are the spare one."""
    limit, slots = sizes.max_model_len, range(sizes.max_num_seqs)
    admissions = [Admission(s, s, params, Rule.STANDARD, [0], 1, limit) for s in slots]
    runner.run(StepPlan(admissions=admissions))


def _chunks(requests: int, prompt_tokens: int, longest: int) -> list[int]:
    """A last token each, and so many tokens of prompts shared among them."""
    chunks, left = list[int](), prompt_tokens
    for _ in range(requests):
        chunks.append(1 + min(left, longest - 1))
        left -= chunks[-1] - 1
    return chunks


def _step(chunks: Sequence[int], drafts: int) -> StepInput:
    count, top = len(chunks), _PARAMS.logprobs or 0
    prompts = [NONE if chunk == 1 else top for chunk in chunks]
    drafts_B, all_B, top_B = [drafts] * count, [True] * count, [top] * count
    return StepInput(range(count), chunks, drafts_B, all_B, top_B, prompts, traces_B=all_B)
