"""The sampler: raw target logits and drafts in, verdicts and log-probabilities out.

Charter: hands `ops` what belongs to the requests of a step, by slot. It knows nothing of
scheduling, cache or models.

Shape suffixes: D requests that decide, K drafts, N rows (= sum of K_b + 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.ops import Backend, DraftBlock, Edits, Logprobs, Verdict, VerifyBatch
from foretoken.ops.steps import DraftRows
from foretoken.outputs import Logprob
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.table import SlotTable


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
        self._decode: Callable[[int], str | None] = decode or (lambda token: None)
        rate_K = torch.tensor(synthetic_rates, dtype=torch.float64, device=slots.device)
        self.synthetic_rate_K = rate_K if synthetic_rates else None

    def verify(
        self, logits_NV: Tensor, asked: DraftRows, drafts: DraftBlock, edits: Edits | None
    ) -> Verdict:
        """Verify drafts against K_b + 1 raw rows per request; see `Backend.verify`."""
        batch = VerifyBatch(
            logits_NV,
            self.slots.params,
            asked.slot_B,
            asked.position_B,
            drafts,
            edits=edits,
            synthetic_rate_K=self.synthetic_rate_K,
            fp64_noise=self.fp64_noise,
            # What a drafter made is looked at; in a plain step that would be 26 us, 2 % of it.
            values_fit=drafts.token_BK.shape[1] == 0,
        )
        return self.backend.verify(batch)

    def describe(
        self, found: Logprobs, token_ids: Sequence[int], num_top: int
    ) -> list[dict[int, Logprob]]:
        """Rows for users: token id -> Logprob, the given token first, then the likeliest by rank.

        Args:
            found: a row for each of the tokens.
            num_top: how many of the likeliest were asked for here; there may be more.
        """
        rows = zip(
            token_ids,
            found.logprob_N.tolist(),
            found.rank_N.tolist(),
            found.top_token_NT[:, :num_top].tolist(),
            found.top_logprob_NT[:, :num_top].tolist(),
            strict=True,
        )
        described = []
        for token, logprob, rank, top_ids, top_logprobs in rows:
            row = {token: Logprob(logprob, rank, self._decode(token))}
            for k, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
                row.setdefault(top_id, Logprob(value, k + 1, self._decode(top_id)))
            described.append(row)
        return described
