"""One step on the device: draft, one pass of the target, verify; the only place where models run.

Charter: everything between a `StepPlan` and its `StepResult`. What a step needs of a request it
reads from the slots, and what it finds it writes there, so that the next step can begin before the
host has seen this one's tokens. It decides nothing: not who runs (scheduler), not when a request
ends (engine).

Drafts are proposed at the beginning of the step that verifies them: nothing of a proposal outlives
a step, and no block is reserved for drafts that are not verified (decision 016).

Every device runs the same lines. On a GPU stages of a step may be replayed from a capture instead
of being launched operator by operator (`graphs.py`).

Shape suffixes: B requests of the step, D those that decide, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, no_drafts
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory_plan import MemoryPlan, is_out_of_memory
from foretoken.engine.sampler import Sampler
from foretoken.engine.trace import PhaseClock
from foretoken.models import CausalLM
from foretoken.ops import DraftBlock, Edits, ForwardOutput, Verdict
from foretoken.ops.pinned import ToHost
from foretoken.ops.steps import DraftRequests, ForwardBatch, StepTokens
from foretoken.sampling.edits import PackedEdits
from foretoken.slots.plan import StepInput, StepPlan
from foretoken.slots.step import OpenStep, StepRequests, StepResult, StepShape


class Runner:
    """Owns the target, its K/V pool, the drafter and the sampler; all of them share the slots.

    Between steps `model`, `drafter` and `sampler` may be replaced by objects with the same methods,
    for example to watch them. Captured steps keep the old ones.

    device, on_host: of the slots: where it computes, and whether results are known as soon as a
    step was launched: reading never blocks then.
    """

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
        self.device, self.on_host = self.slots.device, self.slots.on_host
        self.graphs = graphs or Graphs()
        self.planned: MemoryPlan | None = None
        self._clock = PhaseClock(self.device)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What takes memory; for CUDA graphs what those captured so far take, not the estimate."""
        return self.planned and self.planned.measured("CUDA graphs", self.graphs.num_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step's tokens and draw the next ones."""
        step = self.begin(plan)
        return StepResult() if step is None else self.finish(step)

    def begin(self, plan: StepPlan) -> OpenStep | None:
        """Apply a plan, launch drafts and the target's pass; None if no request takes part."""
        start = time.perf_counter()
        self._clock.start(timed=plan.timed)
        self.slots.apply(plan)
        if plan.fresh_blocks:
            self.clear(plan.fresh_blocks)
        self._clock.mark("admit")
        if not plan.step.slot_B or self.slots.have_ended(plan.step.slot_B):
            return None
        step = self._begin(plan.step, self._shape_of(plan.step))
        step.seconds = time.perf_counter() - start
        return step

    def finish(self, step: OpenStep, edits: PackedEdits | None = None) -> StepResult:
        """Verify, let the slots have the outcome, and send the result on its way.

        Args:
            edits: of rows that the host edits; made from what was drafted (`OpenStep.drafted`).
        """
        start = time.perf_counter()
        result = self._finish(step, edits)
        result.seconds = step.seconds + time.perf_counter() - start
        result.phases, result.events = self._clock.take()
        return result

    def clear(self, block_ids: Sequence[int]) -> None:
        """Forget what is kept for blocks that change hands.

        If the model multiplies masked keys, they are zeroed: a NaN would poison the new owner.
        """
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        if self.drafter is not None:
            self.drafter.clear(block_ids)

    def _begin(self, step: StepInput, shape: StepShape | None) -> OpenStep:
        requests = self.slots.begin(step, shape)
        self._clock.mark("batch")
        stage, mark = self.graphs.stage, self._clock.mark_stage
        self._clock.begin()
        asked, drafts = stage("draft", self._propose, requests)
        mark("draft", "draft")
        tokens, batch, output = stage("target", self._forward, requests, drafts)
        mark("forward", "forward")
        return OpenStep(requests, asked, drafts, tokens, batch, output)

    def _finish(self, step: OpenStep, packed: PackedEdits | None) -> StepResult:
        requests, drafts, edits = step.requests, step.drafts, None
        stage, mark = self.graphs.stage, self._clock.mark_stage
        if packed is None:
            verdict, packet = stage("verify", self._verify, requests, step)
        else:
            edits = packed.unpack(drafts.num_B, drafts.token_BK.shape[1])
            verdict, packet = self._verify(requests, step, edits)
        mark("verify", "advance")
        num_padded = len(requests.slot_B) - len(requests.step.slot_B)
        result = StepResult(
            requests.step, ToHost([packet]), num_padded, drafts.faults, drafts.source_B,
            aux=step.output.aux,
        )  # fmt: skip
        if self.drafter is not None and self.drafter.observes(requests):
            stage("observe", self.drafter.observe, requests, step.batch, result)
            mark("observe", "observe")
        self.sampler.report(result, step, verdict, edits)
        mark("read", "read")
        return result

    def compile_ahead(self, steps: Sequence[StepInput]) -> None:
        """Compile the kernels of such steps, as far as they will be captured, all at once.

        Call before serving: see `Backend.compile_ahead`.
        """
        shapes = {shape for step in steps if (shape := self._found_shape(step)) is not None}

        def run() -> None:
            for shape in shapes:
                self._run_once(shape)

        if shapes:
            self.model.backend.compile_ahead(run)

    def _found_shape(self, step: StepInput) -> StepShape | None:
        """The shape under which a step can be replayed."""
        if not self.graphs.sizes:
            return None
        slots, samples = self.slots, self.slots.draws_at_random(step.slot_B)
        return self.graphs.shape_of(step, slots.params, slots.drafters, samples=samples)

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
        """Record the stages of such steps, on padding alone: no request's slot is touched.

        A model that looks at the device in the midst of a pass cannot be recorded, whatever the
        shape: every step runs operator by operator then.
        """
        self._run_once(shape)
        try:
            with self.graphs.recording(shape):
                self._finish(self._begin(StepInput(), shape), None)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.graphs.give_up(error)

    def _run_once(self, shape: StepShape) -> None:
        with self.graphs.running_once():
            self._finish(self._begin(StepInput(), shape), None)

    def _propose(self, requests: StepRequests) -> tuple[DraftRequests, DraftBlock]:
        """Drafts of the requests that decide, written after their known tokens."""
        asked = self.slots.count_drafts(requests)
        if self.drafter is None or not asked.most:
            return asked, no_drafts(len(asked.slot_B), self.device)
        drafts = self.drafter.propose(asked)
        # An id that the target lacks is rejected, but passes through it first: as its last one.
        self.slots.write_drafts(asked, drafts, self.model.vocab_size - 1)
        return asked, drafts

    def _forward(
        self, requests: StepRequests, drafts: DraftBlock
    ) -> tuple[StepTokens, ForwardBatch, ForwardOutput]:
        """One pass of the target over known tokens and drafts."""
        tokens = StepTokens(requests.slot_B, requests.num_tokens_B, requests.of_B, drafts.num_B)
        most = drafts.token_BK.shape[1]
        batch = self.slots.pack(requests, tokens, most, self.kv.block_size)
        self._clock.mark("batch")
        return tokens, batch, self.model.forward(batch, self.kv)

    def _verify(
        self, _: StepRequests, step: OpenStep, edits: Edits | None = None
    ) -> tuple[Verdict, Tensor]:
        """Verify, and let the slots have the outcome; also what the host will ask for."""
        verdict = self.sampler.verify(step, edits)
        self._clock.mark("verify")
        return verdict, self.slots.advance(step.tokens, verdict)
