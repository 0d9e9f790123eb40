"""The sampler: raw target logits and drafts in, verdicts and log-probabilities out.

Charter: hands `ops` what belongs to the requests of a step, by slot. It knows nothing of
scheduling, cache or models.

Shape suffixes: D requests that decide, K drafts, N rows (= sum of K_b + 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import Backend, DraftBlock, Edits, Evidence, Logprobs, Verdict, VerifyBatch
from foretoken.ops.pinned import to_device
from foretoken.ops.steps import DraftRequests
from foretoken.outputs import Logprob
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import StepResult
from foretoken.slots.table import SlotTable

Decode = Callable[[int], str | None]
"""A token's text, or None where there is none."""


def no_text(token: int) -> None:
    """No token has a text here."""


class Sampler:
    """Applies every request's parameters to its rows and verifies its drafts.

    Args:
        synthetic_rates: c_i of the rule `synthetic`, one per draft; () where it is not allowed.
        decode: a token's text, for log-probabilities; None without a tokenizer.
    """

    def __init__(
        self,
        backend: Backend,
        slots: SlotTable | DeviceSlotTable,
        *,
        synthetic_rates: Sequence[float] = (),
        fp64_noise: bool = False,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        self.backend = backend
        self.slots = slots
        self.fp64_noise = fp64_noise
        self.decode: Decode = decode or no_text
        self.synthetic_rates = synthetic_rates
        rate_K = torch.tensor(synthetic_rates, dtype=torch.float64, device=slots.device)
        self.synthetic_rate_K = rate_K if synthetic_rates else None

    def verify(
        self, logits_NV: Tensor, asked: DraftRequests, drafts: DraftBlock, edits: Edits | None
    ) -> Verdict:
        """Verify drafts against K_b + 1 raw rows per request; see `Backend.verify`."""
        batch = self._batch(logits_NV, asked, drafts, edits)
        # What a drafter made is looked at; in a plain step that would be 26 us, 2 % of it.
        return self.backend.verify(batch._replace(values_fit=drafts.token_BK.shape[1] == 0))

    def evidence(
        self,
        logits_NV: Tensor,
        asked: DraftRequests,
        result: StepResult,
        edits: Edits | None,
        traced_D: Sequence[int],
    ) -> Evidence:
        """What some requests of a step were decided by; see `Backend.evidence`."""
        batch = self._batch(logits_NV, asked, result.drafts, edits)
        request_R = to_device(np.array(traced_D, dtype=np.int64), self.slots.device)
        return self.backend.evidence(batch, result.verdict, request_R)

    def _batch(
        self, logits_NV: Tensor, asked: DraftRequests, drafts: DraftBlock, edits: Edits | None
    ) -> VerifyBatch:
        return VerifyBatch(
            logits_NV, self.slots.params, asked.slot_B, asked.position_B, drafts, edits=edits,
            synthetic_rate_K=self.synthetic_rate_K, fp64_noise=self.fp64_noise, values_fit=True,
        )  # fmt: skip

    def describe(
        self, found: Logprobs, token_ids: Sequence[int], num_top: int, decode: Decode
    ) -> list[dict[int, Logprob]]:
        """Rows for users: token id -> Logprob, the given token first, then the likeliest by rank.

        Args:
            found: a row for each of the tokens.
            num_top: how many of the likeliest were asked for here; there may be more.
            decode: a token's text.
        """
        rows = zip(
            token_ids, found.logprob_N.tolist(), found.rank_N.tolist(),
            found.top_token_NT[:, :num_top].tolist(), found.top_logprob_NT[:, :num_top].tolist(),
            strict=True,
        )  # fmt: skip
        described = []
        for token, logprob, rank, top_ids, top_logprobs in rows:
            row = {token: Logprob(logprob, rank, decode(token))}
            for k, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
                row.setdefault(top_id, Logprob(value, k + 1, decode(top_id)))
            described.append(row)
        return described
