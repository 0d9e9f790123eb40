"""What an engine takes of a GPU's memory, measured: by loading, and by steps as large as they get.

Charter: the only place that asks PyTorch and the driver how much memory is taken. What PyTorch has
taken of the device is counted (`memory_reserved`), not what its tensors need: the difference is
lost to everybody else, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch

from foretoken.engine.memory import is_out_of_memory
from foretoken.engine.memory_plan import Budget, Sizes, StepCost, StepPeak
from foretoken.engine.remedies import shown
from foretoken.engine.runner import Runner
from foretoken.errors import EngineMemoryError, IntegrityError
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.parameters import SlotRequest
from foretoken.slots.step import NONE, StepInput

# What takes most: every request draws at random, from a nucleus, and asks for log-probabilities.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20)


class Gauge:
    """Memory of one GPU, from the moment that this is made: before anything is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()
        self._free, self._total = torch.cuda.mem_get_info(device)
        self._reserved = torch.cuda.memory_reserved(device)

    def budget(self, fraction: float) -> Budget:
        """What there is to be planned with."""
        return Budget(self._total, self._free, fraction)

    def taken(self) -> int:
        """Bytes that PyTorch has taken since, without what it merely keeps for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device) - self._reserved

    def libraries(self) -> int:
        """Bytes taken since beside PyTorch's allocator; other processes' doings are in it, too."""
        taken = self.taken()
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(self._free - free - taken, 0)

    def peak(self, run: Callable[[], object], base: int) -> int | None:
        """Most bytes taken while it runs, beyond `base` of `taken`; None if memory ran out."""
        try:
            self.taken()
            torch.cuda.reset_peak_memory_stats(self._device)
            run()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # which hold the tensors that there were
            return None
        most = torch.cuda.max_memory_reserved(self._device)
        return max(most - self._reserved - base, 0)


def gauge_of(device: torch.device) -> Gauge | None:
    """A gauge of this GPU; None on a CPU, where nothing is measured."""
    return Gauge(device) if device.type == "cuda" else None


class _Crowd:
    """Requests in all slots of a runner that serves nobody; all their blocks are the spare one."""

    def __init__(self, runner: Runner, slots: DeviceSlotTable, sizes: Sizes) -> None:
        self.runner, self.slots = runner, slots
        self.drafts = min(sizes.num_drafts, sizes.max_model_len - 2)
        self._longest = sizes.max_model_len - self.drafts - 1
        for slot in range(sizes.max_num_seqs):
            request = SlotRequest(slot, _PARAMS, Rule.STANDARD, [0], limit=sizes.max_model_len)
            slots.admit(slot, request)
        slots.begin(self._step([1]))  # which writes them

    def chunks(self, tokens: int, requests: int) -> list[int]:
        """Known tokens of each request in a step of so many, drafts included.

        What decoding leaves of them is prompt, in chunks as long as the context lets them be.
        """
        left, chunks = tokens - requests * (1 + self.drafts), []
        for _ in range(requests):
            more = min(left, self._longest - 1)
            chunks.append(1 + more)
            left -= more
        return chunks

    def run(self, chunks: Sequence[int]) -> None:
        """A step in which each request decides; prompts, and the first, end where contexts do."""
        state = self.slots.state
        length_B = [self._longest if b == 0 or n > 1 else 1 for b, n in enumerate(chunks)]
        for b, (length, count) in enumerate(zip(length_B, chunks, strict=True)):
            state.length_S[b] = length
            state.computed_S[b] = length - count
            state.limit_S[b] = length + self.drafts + 1
        self.runner.run(self._step(chunks))

    def _step(self, chunks: Sequence[int]) -> StepInput:
        count, top = len(chunks), _PARAMS.logprobs or 0
        prompts = [NONE if chunk == 1 else top for chunk in chunks]
        decides, drafts = [True] * count, [self.drafts] * count
        return StepInput(range(count), chunks, drafts, decides, [top] * count, prompts)


def measure_steps(runner: Runner, sizes: Sizes, gauge: Gauge) -> StepCost:
    """Run the steps of `StepCost`; where memory runs out, smaller ones, from which it follows.

    Args:
        runner: over slots on a device, with a pool of any size; nobody may be served by it.

    Raises:
        EngineMemoryError: not even one request can decode.
    """
    slots = runner.slots
    if not isinstance(slots, DeviceSlotTable):
        raise IntegrityError("steps are measured on a device")
    crowd, base = _Crowd(runner, slots, sizes), gauge.taken()

    def peak(tokens: int, requests: int) -> StepPeak | None:
        chunks = crowd.chunks(tokens, requests)
        run = partial(crowd.run, chunks)
        if gauge.peak(run, base) is None:  # compiles kernels, and may choose among them
            return None
        num_bytes = gauge.peak(run, base)
        if num_bytes is None:
            return None
        rows = requests * (1 + crowd.drafts)
        return StepPeak(sum(chunks) + requests * crowd.drafts, rows, num_bytes)

    width = 1 + crowd.drafts
    least = peak(width, 1)
    if least is None:
        raise EngineMemoryError(
            f"Out of memory in a step of one request: {shown(gauge.taken())} are taken by weights "
            "and kernels. Take a smaller checkpoint, a smaller `dtype`, or another GPU."
        )
    requests = sizes.max_num_seqs
    while (decode := peak(requests * width, requests)) is None:
        requests = max(requests // 2, 1)
    more, largest = sizes.tokens - sizes.max_num_seqs * width, None
    while largest is None and more:
        largest = peak(decode.tokens + more, requests)
        more //= 2
    rows = sizes.max_num_seqs * width
    tokens = sum(crowd.chunks(sizes.tokens, sizes.max_num_seqs)) + sizes.max_num_seqs * crowd.drafts
    return StepCost(least, decode, largest or decode).extended(tokens, rows)
