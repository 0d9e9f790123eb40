"""One pass of the target over a step's shares, verified: the only place where the model runs.

Charter: turns a plan's shares into tensors, runs model and sampler, and turns the verdict back
into plain lists. It decides nothing: not who runs (scheduler), not when a request ends (engine).

Shape suffixes: B deciding requests, N logit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.cache.batch import Span, build_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.state import DraftState
from foretoken.engine.request import Request
from foretoken.engine.scheduler import Share
from foretoken.models import CausalLM
from foretoken.outputs import Logprob
from foretoken.sampling.edits import EditFault
from foretoken.sampling.sampler import Sampler, SampleRequest


class Outcome(NamedTuple):
    """What a step gave one request.

    Attributes:
        token_ids: accepted drafts and the one token after them; empty in the midst of a prefill.
        num_accepted: how many of them were drafts.
        failure: why the tokens must not be used: `target` if its logits were not finite,
            `parameters` if the request's own parameters left no token; None if all is well.
        logprobs: one entry per token, if asked for.
        prompt_logprobs: entries for the prompt tokens after those computed here, if asked for.
    """

    token_ids: list[int]
    num_accepted: int = 0
    failure: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob]] | None = None


class ShareFault(Exception):
    """The part of a pass that is one request's own raised `cause`; the pass gave nothing."""

    def __init__(self, request: Request, cause: Exception) -> None:
        super().__init__(request, cause)
        self.request, self.cause = request, cause


class Runner:
    """Owns the target, its K/V pool and the sampler."""

    def __init__(self, model: CausalLM, kv: KVPool, sampler: Sampler, drafts: DraftState) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.drafts = drafts

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that change hands, if the model would let what stands there spread."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)

    def run(self, shares: Sequence[Share]) -> list[Outcome]:
        """Compute a step's tokens and draw the next ones; outcomes in the plan's order.

        Raises:
            ShareFault: running the shares again without that request's gives the others the same.
        """
        num_logits = [_num_logits(share) for share in shares]
        spans = [_span(share, rows) for share, rows in zip(shares, num_logits, strict=True)]
        batch = build_batch(spans, self.kv.block_size, self.model.device)
        logits_NV = self.model.forward(batch, self.kv).logits_NV
        deciding = [share for share in shares if share.decides]
        decisions = self._decide(_deciding_rows(shares, num_logits, logits_NV), deciding)
        outcomes, first_row = [], 0
        for share, rows in zip(shares, num_logits, strict=True):
            tokens, accepted, finite = next(decisions) if share.decides else ([], 0, True)
            outcome = Outcome(tokens, accepted)
            if not finite or share.request.params.wants_logprobs:
                own_logits = logits_NV[first_row : first_row + rows]
                outcome = self._with_logits(share, own_logits, outcome, finite)
            outcomes.append(outcome)
            first_row += rows
        return outcomes

    def _decide(
        self, logits_NV: Tensor, items: Sequence[Share]
    ) -> Iterator[tuple[list[int], int, bool]]:
        if not items:
            return iter(())
        block = self.drafts.take([i.request.slot for i in items], [i.drafts for i in items])
        requests = [
            SampleRequest(i.request.slot, len(i.request.token_ids), i.drafts) for i in items
        ]
        try:
            verdict = self.sampler.verify(logits_NV, requests, block)
        except EditFault as fault:
            raise ShareFault(items[fault.index].request, fault.cause) from fault.cause
        accepted = verdict.n_accept_B.tolist()
        tokens = [row[: n + 1] for row, n in zip(verdict.token_BK1.tolist(), accepted, strict=True)]
        return zip(tokens, accepted, verdict.finite_B.tolist(), strict=True)

    def _with_logits(
        self, share: Share, logits_NV: Tensor, outcome: Outcome, finite: bool
    ) -> Outcome:
        """The outcome with what only the request's own logits tell."""
        if not finite:
            return Outcome([], failure=_failure(share, logits_NV, outcome.num_accepted))
        try:
            return outcome._replace(
                logprobs=self._token_logprobs(share, logits_NV, outcome.token_ids),
                prompt_logprobs=self._prompt_logprobs(share, logits_NV),
            )
        except Exception as error:
            raise ShareFault(share.request, error) from error

    def _token_logprobs(
        self, share: Share, logits_NV: Tensor, tokens: Sequence[int]
    ) -> list[dict[int, Logprob]] | None:
        num_top = share.request.params.logprobs
        if num_top is None or not tokens:
            return None
        first = len(logits_NV) - 1 - len(share.drafts)
        return self.sampler.logprobs(logits_NV[first : first + len(tokens)], tokens, num_top)

    def _prompt_logprobs(self, share: Share, logits_NV: Tensor) -> list[dict[int, Logprob]] | None:
        """Row j of a prefill chunk is about the prompt token after the one computed there."""
        if not _wants_prompt_logprobs(share):
            return None
        start = share.request.num_computed + 1
        following = share.request.group.prompt_ids[start : start + share.num_tokens]
        num_top = share.request.params.prompt_logprobs or 0
        return self.sampler.logprobs(logits_NV[: len(following)], following, num_top)


def _wants_prompt_logprobs(share: Share) -> bool:
    request = share.request
    return request.needs_prompt_logits and request.num_computed < request.num_prompt


def _num_logits(share: Share) -> int:
    if _wants_prompt_logprobs(share):
        return share.num_tokens + len(share.drafts)
    return 1 + len(share.drafts) if share.decides else 0


def _span(share: Share, num_logits: int) -> Span:
    request = share.request
    start = request.num_computed
    tokens = request.token_ids[start : start + share.num_tokens] + share.drafts
    return Span(request.block_ids, start, tokens, num_logits)


def _failure(share: Share, logits_NV: Tensor, num_accepted: int) -> str:
    """Whose fault it is that the rows up to the one after the accepted drafts give no token."""
    first = len(logits_NV) - 1 - len(share.drafts)
    highest_N = logits_NV[first : first + num_accepted + 1].amax(dim=1)
    return "parameters" if bool(torch.isfinite(highest_N).all()) else "target"


def _deciding_rows(shares: Sequence[Share], num_logits: Sequence[int], logits_NV: Tensor) -> Tensor:
    """The last K_b + 1 rows of every deciding request; the same tensor if those are all."""
    keep: list[int] = []
    first_row = 0
    for share, rows in zip(shares, num_logits, strict=True):
        first_row += rows
        if share.decides:
            keep.extend(range(first_row - 1 - len(share.drafts), first_row))
    if len(keep) == len(logits_NV):
        return logits_NV
    return logits_NV[torch.tensor(keep, dtype=torch.int64, device=logits_NV.device)]
