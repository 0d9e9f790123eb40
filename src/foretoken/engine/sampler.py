"""The sampler: raw target logits and drafts in, verdicts and log-probabilities out.

Charter: passes the parameters of a step's slots to `ops`, and copies from the logits what the host
will read, before the next pass overwrites them. It knows nothing of scheduling, cache or models.

Shape suffixes: B requests, D those that decide, K drafts, N rows (= sum of K_b + 1), R rows of
which log-probabilities are wanted, P those of prompts among them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import Backend, Edits, Verdict, VerifyBatch
from foretoken.ops.pinned import ToHost, to_device
from foretoken.slots.step import NONE, OpenStep, StepResult
from foretoken.slots.table import SlotTable


class Sampler:
    """Applies every request's parameters to its rows and verifies its drafts.

    Args:
        synthetic_rates: c_i of the rule `synthetic`, one per draft; () where it is not allowed.
    """

    def __init__(
        self,
        backend: Backend,
        slots: SlotTable,
        *,
        synthetic_rates: Sequence[float] = (),
        fp64_noise: bool = False,
    ) -> None:
        self.backend = backend
        self.slots = slots
        self.fp64_noise = fp64_noise
        rate_K = torch.tensor(synthetic_rates, dtype=torch.float64, device=slots.device)
        self.synthetic_rate_K = rate_K if synthetic_rates else None

    def verify(self, step: OpenStep, edits: Edits | None) -> Verdict:
        """Verify a step's drafts against K_b + 1 raw rows per request; see `Backend.verify`."""
        batch = self._batch(step, edits)
        # Values of drafts are checked; in a step without drafts that would cost 26 us, 2 % of it.
        return self.backend.verify(batch._replace(values_fit=step.drafts.token_BK.shape[1] == 0))

    def _batch(self, step: OpenStep, edits: Edits | None) -> VerifyBatch:
        requests = step.draft_requests
        return VerifyBatch(
            step.logits_NV, requests.params, requests.slot_B, requests.position_B, step.drafts,
            edits, self.synthetic_rate_K, self.fp64_noise, values_fit=True,
        )  # fmt: skip

    def report(
        self, result: StepResult, step: OpenStep, verdict: Verdict, edits: Edits | None
    ) -> None:
        """Begin to copy evidence and log-probabilities to the host, which does not wait."""
        wanted = step.requests.step
        if wanted.traced_D:
            request_R = to_device(np.array(wanted.traced_D, dtype=np.int64), self.slots.device)
            evidence = self.backend.evidence(self._batch(step, edits), verdict, request_R)
            result.evidence = ToHost(evidence)
        # Which rows were finite matters only if a verdict is not; on a host that is known at once.
        if edits is not None and not (self.slots.on_host and bool(verdict.finite_B.all())):
            result.is_finite_N = ToHost([step.logits_NV.amax(dim=1).isfinite()])
        if wanted.most_logprobs != NONE:
            row_R, token_R = self._reported(step, verdict)
            if len(row_R):
                logits_NV = step.output.logits_NV
                num_top = min(wanted.most_logprobs, logits_NV.shape[1])
                result.logprobs = ToHost(self.backend.logprobs(logits_NV[row_R], token_R, num_top))

    def _reported(self, opened: OpenStep, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Rows of which log-probabilities are wanted, and the token after each.

        First rows of decisions, for each as many as the request with most drafts may have; then
        rows of prompts. The row at the end of a prompt gets an arbitrary token.
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
            # While kernels are compiled ahead, they return zeros: all requests begin at 0.
            b_P = torch.searchsorted(end_B, at_P, right=True).clamp(max=len(end_B) - 1)
            after_P = batch.position_T[at_P] + 1
            token_R.append(self.slots.state.token_SL[requests.slot_B[b_P], after_P].to(torch.int64))
            row_R.append(torch.arange(first, first + count, device=device))
        return torch.cat(row_R), torch.cat(token_R).clamp(min=0)
