"""The sampler: raw target logits and drafts in, verdicts and log-probabilities out.

Charter: hands `ops` what belongs to a batch's requests, and owns the slot table. It knows nothing
of scheduling, cache or models.

Shape suffixes: B requests, K drafts, N rows (= sum of K_b + 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import Backend, DraftBlock, Edits, Verdict, VerifyBatch
from foretoken.outputs import Logprob
from foretoken.sampling.edits import build_edits
from foretoken.sampling.slots import SlotTable


class SampleRequest(NamedTuple):
    """One request's rows: K_b + 1 of them, the first deciding the token at `position`."""

    slot: int
    position: int
    drafts: Sequence[int]


class Sampler:
    """Applies every request's parameters to its rows and verifies its drafts.

    Args:
        synthetic_rates: c_i of the rule `synthetic`, one per draft; () where it is not allowed.
        decode: a token's text, for log-probabilities; None without a tokenizer.
    """

    def __init__(
        self,
        backend: Backend,
        slots: SlotTable,
        *,
        device: torch.device,
        synthetic_rates: Sequence[float] = (),
        fp64_noise: bool = False,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        self.backend = backend
        self.slots = slots
        self.device = device
        self.fp64_noise = fp64_noise
        self._decode: Callable[[int], str | None] = decode or (lambda token: None)
        self.synthetic_rate_K = (
            torch.tensor(synthetic_rates, dtype=torch.float64, device=device)
            if synthetic_rates
            else None
        )

    def verify(
        self, logits_NV: Tensor, requests: Sequence[SampleRequest], drafts: DraftBlock
    ) -> Verdict:
        """Verify drafts against K_b + 1 raw rows per request; see `Backend.verify`."""
        numbers = [[r.slot for r in requests], [r.position for r in requests]]
        numbers_2B = torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self.device)
        batch = VerifyBatch(
            logits_NV,
            self.slots.params,
            numbers_2B[0],
            numbers_2B[1],
            drafts,
            edits=self._edits(requests, logits_NV.shape[1]),
            synthetic_rate_K=self.synthetic_rate_K,
            fp64_noise=self.fp64_noise,
        )
        return self.backend.verify(batch)

    def logprobs(
        self, logits_NV: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[dict[int, Logprob]]:
        """Log-probabilities of one given token per row and of the `num_top` likeliest.

        Args:
            logits_NV: raw logits.
            token_ids: the token each row is about, length N.
            num_top: 0..20.

        Returns:
            Per row, token id -> Logprob: the given token first, then the likeliest by rank.
        """
        token_N = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        found = self.backend.logprobs(logits_NV, token_N, min(num_top, logits_NV.shape[1]))
        rows = []
        for token, logprob, rank, top_ids, top_logprobs in zip(
            token_ids,
            found.logprob_N.tolist(),
            found.rank_N.tolist(),
            found.top_token_NT.tolist(),
            found.top_logprob_NT.tolist(),
            strict=True,
        ):
            row = {token: Logprob(logprob, rank, self._decode(token))}
            for k, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
                row.setdefault(top_id, Logprob(value, k + 1, self._decode(top_id)))
            rows.append(row)
        return rows

    def _edits(self, requests: Sequence[SampleRequest], vocab_size: int) -> Edits | None:
        histories = self.slots.histories
        if not histories:
            return None
        mine = ((histories.get(r.slot), r.drafts) for r in requests)
        return build_edits(mine, vocab_size, self.device)
