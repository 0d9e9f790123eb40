"""Stages of a step that are captured once and replayed: CUDA graphs.

A step in which all requests decode has a shape: the number of requests (padded to the next size),
the most drafts, and the kernels that the parameters of its slots need. The stages of a shape are
recorded once, in a step where every request has the spare slot; each replay reads and writes the
same tensors. Other steps (with prompts or their log-probabilities) run operator by operator, and so
does the last stage of steps with edits. Without a GPU nothing is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from foretoken.ops import Rule, SlotParams
from foretoken.slots.step import NONE, StepInput, StepRequests, StepShape

_RARE_RULES = frozenset({Rule.BLOCK, Rule.COUPLED})
_LOSSLESS_RULES = frozenset({Rule.STANDARD, *_RARE_RULES})

_log = logging.getLogger(__name__)

Out = TypeVar("Out")

_Captured = tuple[torch.cuda.CUDAGraph, Any]


class Graphs:
    """Captured stages by shape and name.

    Args:
        sizes: numbers of requests to which steps are padded, rising; (): nothing is captured.
        widths: numbers of drafts to which steps are padded, rising, 0 first.
    """

    def __init__(self, sizes: tuple[int, ...] = (), widths: tuple[int, ...] = (0,)) -> None:
        self.sizes, self.widths = sizes, widths
        self._captured: dict[StepShape, dict[str, _Captured]] = {}
        self._left_out: set[StepShape] = set()
        self._pool: Any = None  # shared memory of all graphs: no two run at the same time
        self._recording: dict[str, _Captured] | None = None
        self._is_warming_up = False

    def __contains__(self, shape: StepShape | None) -> bool:
        return shape in self._captured

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory pool of captured steps."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        in_pool = (s for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))
        return sum(int(segment["total_size"]) for segment in in_pool)

    def shape_of(
        self, step: StepInput, params: SlotParams, drafters: frozenset[int], *, samples: bool
    ) -> StepShape | None:
        """The shape under which this step can be captured; None: it cannot be captured.

        Args:
            drafters: indices of the drafters of all slots in use.
            samples: whether a request of the step draws at random, so that the drafts' q is kept.
        """
        count = len(step.slot_B)
        if not self.sizes or count > self.sizes[-1]:
            return None
        decodes = all(step.decides_B) and max(step.num_tokens_B) == 1
        if not decodes or max(step.num_prompt_logprobs_B) != NONE:
            return None
        size = next(size for size in self.sizes if size >= count)
        most_drafts = max(step.max_drafts_B)
        width = next(width for width in self.widths if width >= most_drafts)
        shape = StepShape(size, width, params.has_filters, params.rules, samples, drafters)
        if len(params.rules) > 1 or params.rules & _RARE_RULES:
            # Steps with several rules or a rare rule share one shape, with kernels for all lossless
            # rules. Otherwise there would be 30 shapes, and a capture takes as long as 100 steps.
            shape = StepShape(size, width, True, params.rules | _LOSSLESS_RULES, True, drafters)
        return None if shape in self._left_out else shape

    def leave_out(self, shape: StepShape) -> None:
        """Never capture this shape, because memory ran out: its steps run operator by operator."""
        self._left_out.add(shape)
        _log.warning(
            "Steps of %d requests run without a CUDA graph, which is slower: the graph would not "
            "fit into memory. Lower `memory_fraction`.",
            shape.size,
        )

    def stage(self, name: str, run: Callable[..., Out], requests: StepRequests, *args: Any) -> Out:
        """Run, record or replay a stage. A replay overwrites the recorded stage's last outputs."""
        if requests.shape is None or self._is_warming_up:
            return run(requests, *args)
        if self._recording is not None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                out = run(requests, *args)
            self._recording[name] = graph, out
            return out
        graph, out = self._captured[requests.shape][name]
        graph.replay()
        return out

    def give_up(self, reason: Exception) -> None:
        """Capture no more shapes, and log the reason."""
        self.sizes = ()
        first_line = (str(reason).splitlines() or [type(reason).__name__])[0]
        _log.warning("Steps run without CUDA graphs, which is slower: %s", first_line)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, stages run operator by operator, so that their kernels are compiled."""
        self._is_warming_up = True
        try:
            yield
        finally:
            self._is_warming_up = False

    @contextmanager
    def recording(self, shape: StepShape) -> Iterator[None]:
        """Inside, the stages of this shape are captured."""
        self._recording = {}
        try:
            yield
            self._captured[shape] = self._recording
        finally:
            self._recording = None
