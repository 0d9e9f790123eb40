"""One step on the device: draft, one pass of the target, verify; the only place where models run.

Charter: everything between a `StepInput` and its result. What a step needs of a request it
reads from the slots, and what it finds it writes there, so that the next step can begin before the
host has seen this one's tokens. It decides nothing: not who runs (scheduler), not when a request
ends (engine).

Drafts are proposed at the beginning of the step that verifies them: nothing of a proposal outlives
a step, and no block is reserved for drafts that are not verified (decision 016).

A host and a device that nobody waits for run the same lines. What differs is in the slots (numbers,
or tensors), in how a result is read (`pending.py`), and in that stages of a step may be replayed
from a capture instead of being launched operator by operator (`graphs.py`).

Shape suffixes: B requests of the step, D those that decide, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from foretoken.cache.batch import gather_step
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, no_drafts
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory_plan import MemoryPlan, is_out_of_memory
from foretoken.engine.pending import PendingResult
from foretoken.engine.readout import readout
from foretoken.engine.sampler import Sampler
from foretoken.engine.trace import PhaseClock
from foretoken.models import CausalLM
from foretoken.ops import DraftBlock, Edits, ForwardOutput
from foretoken.ops.steps import DraftRows, ForwardBatch
from foretoken.slots.edits import build_edits
from foretoken.slots.step import StepInput, StepResult, StepRows, StepShape


class Runner:
    """Owns the target, its K/V pool, the drafter and the sampler; all of them share the slots."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        sampler: Sampler,
        drafter: Drafter | None,
        graphs: Graphs | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.drafter = drafter
        self.slots = sampler.slots
        self.graphs = graphs or Graphs()
        self.planned: MemoryPlan | None = None
        self.clock = PhaseClock(self.slots.device)
        self.seconds = 0.0  # that the latest step took here

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What takes memory; for CUDA graphs what those captured so far take, not the estimate."""
        return self.planned and self.planned.measured("CUDA graphs", self.graphs.num_bytes)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Forget what is kept for blocks that change hands.

        If the model multiplies masked keys, they are zeroed: a NaN would poison the new owner.
        """
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        if self.drafter is not None:
            self.drafter.clear(block_ids)

    def run(self, step: StepInput) -> StepResult | PendingResult:
        """Compute a step's tokens and draw the next ones."""
        start = time.perf_counter()
        result = self._run(step, self._shape_of(step))
        self.seconds = time.perf_counter() - start
        return result

    def _run(self, step: StepInput, shape: StepShape | None) -> StepResult | PendingResult:
        rows = self.slots.begin(step, shape)
        if rows is None:  # launched before it was known that all have their tokens
            return StepResult.empty()
        self.clock.mark("batch")
        stage, mark = self.graphs.stage, self.clock.mark_stage
        self.clock.begin()
        asked, drafts = stage("draft", self._propose, rows)
        mark("draft", "draft")
        edits, faults = build_edits(
            self.slots.histories,
            rows.step.deciding_slots,
            drafts,
            self.model.vocab_size,
            without_drafts=not self.slots.on_host,
        )
        batch, output = stage("target", self._forward, rows, drafts)
        mark("forward", "forward")
        if edits is None:
            result = stage("verify", self._settle, rows, asked, drafts, batch, output)
        else:
            result = self._settle(rows, asked, drafts, batch, output, edits, faults)
        mark("verify", "advance")
        if self.drafter is not None and self.drafter.observes(rows):
            stage("observe", self._observe, rows, batch, result)
            mark("observe", "observe")
        read = readout(self.sampler, rows, asked, batch, output, result, edits)
        mark("read", "read")
        return read

    def compile_ahead(self, steps: Sequence[StepInput]) -> None:
        """Compile the kernels of such steps, as far as they will be captured, all at once.

        For before anybody is served: see `Backend.compile_ahead`.
        """
        shapes = {shape for step in steps if (shape := self._found_shape(step)) is not None}

        def run() -> None:
            for shape in shapes:
                self._warm(shape)

        if shapes:
            self.model.backend.compile_ahead(run)

    def _found_shape(self, step: StepInput) -> StepShape | None:
        """The shape under which a step can be replayed."""
        if not self.graphs.sizes:
            return None
        slots, requests = self.slots, self.slots.requests
        warm = any(requests[slot].params.temperature > 0 for slot in step.slot_B)
        return self.graphs.shape_of(step, slots.in_use, slots.drafters_in_use, warm=warm)

    def _shape_of(self, step: StepInput) -> StepShape | None:
        """The shape under which a step is replayed; what is new is captured first."""
        shape = self._found_shape(step)
        if shape is not None and shape not in self.graphs:
            try:
                self.capture(shape)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.graphs.leave_out(shape)
        return shape if shape in self.graphs else None

    def capture(self, shape: StepShape) -> None:
        """Record the stages of such steps, on padding alone: nobody's slot is touched.

        A model that looks at the device in the midst of a pass cannot be recorded, whatever the
        shape: every step runs operator by operator then.
        """
        self._warm(shape)
        try:
            with self.graphs.recording(shape):
                self._run(StepInput.padding(), shape)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.graphs.give_up(error)

    def _warm(self, shape: StepShape) -> None:
        with self.graphs.warming():
            self._run(StepInput.padding(), shape)

    def _propose(self, rows: StepRows) -> tuple[DraftRows, DraftBlock]:
        """Drafts of the requests that decide, written behind their known tokens."""
        asked = self.slots.asked(rows)
        if self.drafter is None or not asked.most:
            return asked, no_drafts(len(rows.slot_D), self.slots.device)
        drafts = self.drafter.propose(asked)
        # An id that the target lacks is rejected, but passes through it first: as its last one.
        self.slots.write_drafts(asked, drafts, self.model.vocab_size - 1)
        return asked, drafts

    def _forward(self, rows: StepRows, drafts: DraftBlock) -> tuple[ForwardBatch, ForwardOutput]:
        """One pass of the target over known tokens and drafts."""
        batch = gather_step(self.slots, rows, drafts, self.kv.block_size)
        self.clock.mark("batch")
        return batch, self.model.forward(batch, self.kv)

    def _settle(
        self,
        rows: StepRows,
        asked: DraftRows,
        drafts: DraftBlock,
        batch: ForwardBatch,
        output: ForwardOutput,
        edits: Edits | None = None,
        faults: dict[int, Exception] | None = None,
    ) -> StepResult:
        """Verify, and let the slots have the outcome."""
        logits_NV = batch.deciding(output.logits_NV)
        verdict = self.sampler.verify(logits_NV, asked, drafts, edits)
        self.clock.mark("verify")
        slot_D, faults = rows.step.deciding_slots, self.slots.draft_faults | (faults or {})
        self.slots.draft_faults = {}
        result = StepResult(batch.spans, slot_D, drafts, verdict, faults, aux=output.aux)
        self.slots.advance_step(rows, result)
        return result

    def _observe(self, rows: StepRows, batch: ForwardBatch, result: StepResult) -> None:
        """Let the drafter see what came of it, once the slots hold it."""
        if self.drafter is not None:
            self.drafter.observe(rows, batch, result)
