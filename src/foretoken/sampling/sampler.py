"""The sampler: raw target logits and drafts in, verdicts and log-probabilities out.

Charter: composes `ops` in the order of the design (edits, temperature, filters, verification) and
owns the slot table. It knows nothing of scheduling, cache or models.

Shape suffixes: B requests, K drafts, N rows (= sum of K_b + 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import Backend, DraftBlock, Verdict
from foretoken.outputs import Logprob
from foretoken.sampling.edits import build_edits
from foretoken.sampling.slots import SlotHistory, SlotTable


class SampleRequest(NamedTuple):
    """One request's rows: K_b + 1 of them, the first deciding the token at `position`."""

    slot: int
    position: int
    drafts: Sequence[int]


class Sampler:
    """Applies every request's parameters to its rows and verifies its drafts."""

    def __init__(
        self, backend: Backend, slots: SlotTable, *, rule: str = "standard", fp64_noise: bool
    ) -> None:
        self.backend = backend
        self.slots = slots
        self.rule = rule
        self.fp64_noise = fp64_noise

    def verify(
        self, logits_NV: Tensor, requests: Sequence[SampleRequest], drafts: DraftBlock
    ) -> Verdict:
        """Process K_b + 1 raw rows per request and verify its drafts; see `Backend.verify`."""
        device = logits_NV.device
        params = self.slots.params
        slots = [r.slot for r in requests]
        numbers = np.array([slots, [r.position for r in requests]], dtype=np.int64)
        slot_B, position_B = torch.from_numpy(numbers).to(device)
        slot_N = slot_B
        if len(logits_NV) != len(requests):
            slot_N = torch.repeat_interleave(slot_B, drafts.num_B + 1, output_size=len(logits_NV))
        edits = None
        if any(slot in self.slots.histories for slot in slots):
            edits = build_edits(self._history_rows(requests), logits_NV.shape[1], device)
        processed_NV = self.backend.process_logits(logits_NV, params, slot_N, edits)
        return self.backend.verify(
            processed_NV,
            params,
            slot_B,
            position_B,
            drafts,
            rule=self.rule,
            fp64_noise=self.fp64_noise,
        )

    def _history_rows(
        self, requests: Sequence[SampleRequest]
    ) -> Iterator[tuple[int, SlotHistory | None, Sequence[int]]]:
        row = 0
        for request in requests:
            yield row, self.slots.histories.get(request.slot), request.drafts
            row += len(request.drafts) + 1


def top_logprobs(
    logits_NV: Tensor, token_ids: Sequence[int], num_top: int
) -> list[dict[int, Logprob]]:
    """Log-probabilities of one given token per row and of the `num_top` likeliest.

    Args:
        logits_NV: raw logits.
        token_ids: the token each row is about, length N.
        num_top: 0..20.

    Returns:
        Per row, token id -> Logprob: the given token first, then the likeliest by rank.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    given_N1 = torch.tensor(token_ids, device=logits_NV.device)[:, None]
    given_logprob_N1 = logprobs_NV.gather(1, given_N1)
    rank_N = (logprobs_NV > given_logprob_N1).sum(dim=1) + 1
    top = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=-1)
    rows = []
    for token, logprob, rank, top_values, top_ids in zip(
        token_ids,
        given_logprob_N1[:, 0].tolist(),
        rank_N.tolist(),
        top.values.tolist(),
        top.indices.tolist(),
        strict=True,
    ):
        row = {token: Logprob(logprob, rank)}
        for k, (top_id, value) in enumerate(zip(top_ids, top_values, strict=True)):
            row.setdefault(top_id, Logprob(value, k + 1))
        rows.append(row)
    return rows
