"""One step on the device: draft, one pass of the target, verify; the only place where models run.

A step reads the state of requests from the slots and writes the outcome there, so that the next
step can begin before the host knows the step's tokens. Drafts are proposed at the beginning of the
step that verifies them: no part of a proposal outlives a step, and no block is reserved for drafts
that are not verified (decision 016). On a GPU, stages of a step may be replayed from a CUDA graph
instead of being launched operator by operator (`graphs.py`).

Shape suffixes: B requests of the step, D requests that decide (the step draws tokens for them), K
drafts, N rows of logits (= sum of K_b + 1), R rows that need log-probabilities, P rows of prompts
among the R, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, no_drafts
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory_plan import MemoryPlan, is_out_of_memory
from foretoken.engine.trace import PhaseClock
from foretoken.models import CausalLM
from foretoken.ops import Backend, DraftBlock, Edits, ForwardOutput, Verdict, VerifyBatch
from foretoken.ops.pinned import ToHost, to_device
from foretoken.ops.steps import DraftRequests, ForwardBatch, StepTokens
from foretoken.sampling.edits import PackedEdits
from foretoken.slots.step import OpenStep, StepInput, StepPlan, StepRequests, StepResult, StepShape
from foretoken.slots.table import SlotTable


class Runner:
    """Owns the target, its K/V pool, the drafter and the sampler; all of them share the slots.

    Between steps `model`, `drafter` and `sampler` may be replaced by objects with the same methods,
    for example to watch calls. Captured steps keep the old objects.

    Attributes:
        device: the device of the slots, which computes the steps.
        on_host: whether results are known as soon as a step was launched: then reading them never
            blocks.
    """

    def __init__(
        self, model: CausalLM, kv: KVPool, sampler: Sampler, drafter: Drafter | None,
        graphs: Graphs | None = None,
    ) -> None:  # fmt: skip
        self.model, self.kv, self.sampler, self.drafter = model, kv, sampler, drafter
        self.slots = sampler.slots
        self.device, self.on_host = self.slots.device, self.slots.on_host
        self.graphs = graphs or Graphs()
        self.planned: MemoryPlan | None = None
        self._clock = PhaseClock(self.device)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The memory plan, with measured bytes of captured CUDA graphs instead of the estimate."""
        return self.planned and self.planned.with_measured("CUDA graphs", self.graphs.num_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a whole step, without edits of logits by the host."""
        step = self.begin(plan)
        return StepResult() if step is None else self.finish(step)

    def begin(self, plan: StepPlan) -> OpenStep | None:
        """Apply a plan, and launch drafting and the target's pass; returns the step for `finish`,
        None if the plan has no requests, or only requests that have surely ended."""
        start = time.perf_counter()
        self._clock.start(timed=plan.timed)
        self.slots.apply(plan)
        if plan.fresh_blocks:
            self.clear(plan.fresh_blocks)
        self._clock.mark("admit")
        if not plan.step.slot_B or self.slots.have_ended(plan.step.slot_B):
            return None
        step = self._begin(plan.step, self._captured_shape(plan.step))
        step.seconds = time.perf_counter() - start
        return step

    def finish(self, step: OpenStep, edits: PackedEdits | None = None) -> StepResult:
        """Verify, write the outcome to the slots, and begin to copy the result to the host.

        Args:
            edits: the host's edits of logits, made from the drafts (`OpenStep.read_drafts`).
        """
        start = time.perf_counter()
        result = self._finish(step, edits)
        result.seconds = step.seconds + time.perf_counter() - start
        result.phases, result.events = self._clock.take()
        return result

    def clear(self, block_ids: Sequence[int]) -> None:
        """Forget the content of blocks that get a new owner."""
        if self.model.multiplies_masked_keys:  # a NaN would spread to the new owner
            self.kv.clear(block_ids)
        if self.drafter is not None:
            self.drafter.clear(block_ids)

    def _begin(self, step: StepInput, shape: StepShape | None) -> OpenStep:
        requests = self.slots.begin(step, shape)
        self._clock.mark("batch")
        stage, mark = self.graphs.stage, self._clock.mark_stage
        self._clock.begin_stages()
        draft_requests, drafts = stage("draft", self._propose, requests)
        mark("draft", "draft")
        tokens, batch, output = stage("target", self._forward, requests, drafts)
        mark("forward", "forward")
        return OpenStep(requests, draft_requests, drafts, tokens, batch, output)

    def _finish(self, step: OpenStep, packed: PackedEdits | None) -> StepResult:
        """Launch the last stages of a step: verification, then observation by the drafter."""
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
        """Before serving, compile the kernels of steps that will be captured: see
        `Backend.compile_ahead`."""
        shapes = {shape for step in steps if (shape := self._shape_of(step)) is not None}

        def run() -> None:
            for shape in shapes:
                self._warm_up(shape)

        if shapes:
            self.model.backend.compile_ahead(run)

    def _shape_of(self, step: StepInput) -> StepShape | None:
        """The shape under which a step can be captured and replayed; None: it cannot."""
        if not self.graphs.sizes:
            return None
        slots, samples = self.slots, self.slots.draws_at_random(step.slot_B)
        return self.graphs.shape_of(step, slots.params, slots.drafters, samples=samples)

    def _captured_shape(self, step: StepInput) -> StepShape | None:
        """As `_shape_of`, and a new shape is captured; None also if the capture fails."""
        shape = self._shape_of(step)
        if shape is not None and shape not in self.graphs:
            try:
                self.capture(shape)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.graphs.leave_out(shape)
        return shape if shape in self.graphs else None

    def capture(self, shape: StepShape) -> None:
        """Record the stages of a shape in a step of padding only: no request is touched.

        Only running out of memory is raised. After another RuntimeError, for example because the
        model reads results of the device during a pass, every step runs operator by operator.
        """
        self._warm_up(shape)
        try:
            with self.graphs.recording(shape):
                self._finish(self._begin(StepInput(), shape), None)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.graphs.give_up(error)

    def _warm_up(self, shape: StepShape) -> None:
        """Run a step of padding only, operator by operator, which compiles the shape's kernels."""
        with self.graphs.warming_up():
            self._finish(self._begin(StepInput(), shape), None)

    def _propose(self, requests: StepRequests) -> tuple[DraftRequests, DraftBlock]:
        """Draft for the deciding requests, and write drafts to the slots, after known tokens."""
        draft_requests = self.slots.count_drafts(requests)
        if self.drafter is None or not draft_requests.most:
            return draft_requests, no_drafts(len(draft_requests.slot_B), self.device)
        drafts = self.drafter.propose(draft_requests)
        # Verification rejects ids that the target lacks; the target computes its last id instead.
        self.slots.write_drafts(draft_requests, drafts, self.model.vocab_size - 1)
        return draft_requests, drafts

    def _forward(
        self, requests: StepRequests, drafts: DraftBlock
    ) -> tuple[StepTokens, ForwardBatch, ForwardOutput]:
        decider_B = requests.decider_B
        tokens = StepTokens(requests.slot_B, requests.num_tokens_B, decider_B, drafts.num_B)
        most_drafts = drafts.token_BK.shape[1]
        batch = self.slots.pack(requests, tokens, most_drafts, self.kv.block_size)
        self._clock.mark("batch")
        return tokens, batch, self.model.forward(batch, self.kv)

    def _verify(
        self, _: StepRequests, step: OpenStep, edits: Edits | None = None
    ) -> tuple[Verdict, Tensor]:
        """Verify, and write the outcome to the slots; returns the verdict, and the numbers that the
        host will read, as one tensor."""
        verdict = self.sampler.verify(step, edits)
        self._clock.mark("verify")
        return verdict, self.slots.advance(step.tokens, verdict)


class Sampler:
    """Raw target logits and drafts in, verdicts and log-probabilities out.

    Args:
        synthetic_rates: conditional acceptance rates of the rule `synthetic`, one per draft; () if
            that rule is not allowed.
    """

    def __init__(
        self, backend: Backend, slots: SlotTable, *, synthetic_rates: Sequence[float] = (),
        fp64_noise: bool = False,
    ) -> None:  # fmt: skip
        self.backend, self.slots, self.fp64_noise = backend, slots, fp64_noise
        rate_K = torch.tensor(synthetic_rates, dtype=torch.float64, device=slots.device)
        self.synthetic_rate_K = rate_K if synthetic_rates else None

    def verify(self, step: OpenStep, edits: Edits | None) -> Verdict:
        """Verify a step's drafts against K_b + 1 raw rows per request; see `Backend.verify`."""
        batch = self._verify_batch(step, edits)
        # The values of drafts are checked. A step without drafts skips the check, which would cost
        # 26 us, 2 % of the step.
        return self.backend.verify(batch._replace(values_fit=step.drafts.token_BK.shape[1] == 0))

    def _verify_batch(self, step: OpenStep, edits: Edits | None) -> VerifyBatch:
        requests = step.draft_requests
        return VerifyBatch(
            step.logits_NV, requests.params, requests.slot_B, requests.position_B, step.drafts,
            edits, self.synthetic_rate_K, self.fp64_noise, values_fit=True,
        )  # fmt: skip

    def report(
        self, result: StepResult, step: OpenStep, verdict: Verdict, edits: Edits | None
    ) -> None:
        """Begin to copy evidence and log-probabilities to the host, without waiting."""
        step_input = step.requests.step
        if step_input.traced_D:
            request_R = to_device(np.array(step_input.traced_D, dtype=np.int64), self.slots.device)
            evidence = self.backend.evidence(self._verify_batch(step, edits), verdict, request_R)
            result.evidence = ToHost(evidence)
        # A verdict is not finite if edits ban every token or the model computes a NaN: a check of
        # the raw rows shows which. (A host skips the check if all verdicts are finite.)
        if edits is not None and not (self.slots.on_host and bool(verdict.finite_B.all())):
            result.is_finite_N = ToHost([step.logits_NV.amax(dim=1).isfinite()])
        if step_input.most_logprobs >= 0:  # not `NONE`, which is -1
            row_R, token_R = self._logprob_rows(step, verdict)
            if len(row_R):
                logits_NV = step.output.logits_NV
                num_top = min(step_input.most_logprobs, logits_NV.shape[1])
                result.logprobs = ToHost(self.backend.logprobs(logits_NV[row_R], token_R, num_top))

    def _logprob_rows(self, opened: OpenStep, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """The rows of logits that need log-probabilities, [R], and the token after each row.

        First come K + 1 rows, padding included, for each deciding request that wants
        log-probabilities; then rows of prompts. The last row of a prompt gets an arbitrary token.
        """
        requests, batch, num_D = opened.requests, opened.batch, opened.drafts.num_B
        step, device = requests.step, self.slots.device
        row_R, token_R = [num_D[:0]], [num_D[:0]]
        if step.reported_D:
            d_R = to_device(np.array(step.reported_D, dtype=np.int64), device)
            token_RK1, count_D = verdict.token_BK1[d_R], num_D + 1
            index_K1 = torch.arange(token_RK1.shape[1], device=device)
            last = len(batch.deciding(batch.logit_row_N)) - 1
            first_R = (count_D.cumsum(0) - count_D)[d_R]
            row_R.append((first_R[:, None] + index_K1).clamp(max=last).flatten())
            token_R.append(token_RK1.flatten().to(torch.int64))
        if step.reported_prompts_B:
            first = batch.num_deciding or 0
            count = sum(step.num_tokens_B[b] for b in step.reported_prompts_B)
            at_P = batch.logit_row_N[first : first + count]
            end_B = batch.attention.query_start_B1[1:]
            # While kernels are compiled ahead, all rows are 0, and `searchsorted` finds no request:
            # the clamp keeps the index valid.
            b_P = torch.searchsorted(end_B, at_P, right=True).clamp(max=len(end_B) - 1)
            after_P = batch.position_T[at_P] + 1
            token_R.append(self.slots.state.token_SL[requests.slot_B[b_P], after_P].to(torch.int64))
            row_R.append(torch.arange(first, first + count, device=device))
        return torch.cat(row_R), torch.cat(token_R).clamp(min=0)
