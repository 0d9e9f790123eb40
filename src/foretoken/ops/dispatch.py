"""The contract of a backend: what every op promises, after its arguments have been checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops import checks
from foretoken.ops.stack import Linear, LoadedStack, Stack
from foretoken.ops.steps import SlotState, Steps

from foretoken.ops.types import (  # isort: skip
    DRAFT, AttentionBatch, AttentionOptions, DraftCache, Evidence, Logprobs, Noise, Rows,
    SlotParams, Verdict, VerifyBatch,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions that a backend's folder provides: those of `Backend` without its checks."""

    process_logits: Callable[[Rows], Tensor]
    sample: Callable[[Rows, Noise], Tensor]
    draft: Callable[[Rows, Noise, DraftCache | None], Tensor]
    verify: Callable[[VerifyBatch], Verdict]
    evidence: Callable[[VerifyBatch, Verdict, Tensor], Evidence]
    logprobs: Callable[[Rows | Tensor, Tensor, int], Logprobs]
    attention: Callable[[Tensor, Tensor, Tensor, AttentionBatch, AttentionOptions], Tensor]
    steps: Callable[[SlotState], Steps]
    load_stack: Callable[..., LoadedStack] | None = None
    set_num_threads: Callable[[int], None] = lambda count: None
    tunings: Callable[[], dict[str, Any]] = dict
    compile_ahead: Callable[[Callable[[], object]], None] = lambda run: None


class Backend:
    """The contract: checks arguments, then calls a backend's kernels. Shapes as in `ops/types.py`.

    Only `draft` changes an argument, the cache. Logits have unit stride along V and any stride
    between rows. All backends except the reference round float64 logits to float32. A row is
    *finite* if, after its edits, it has no NaN or +inf and its maximum is finite: -inf marks a
    dropped token. An argument that does not fit raises `ConfigError` first (`ops/checks.py`).
    """

    def __init__(self, name: str, kernels: Kernels, deterministic: bool = False) -> None:
        self.name, self.deterministic, self._kernels = name, deterministic, kernels

    def process_logits(self, rows: Rows) -> Tensor:
        """Apply each row's edits, temperature, min_p, top_k, top_p, in this order. A row that is
        not finite does not become finite.

        Returns:
            New [N, V] logits (float32; float64 in the reference): divided by the temperature,
            dropped tokens at -inf. Rows at T=0 are edited but neither scaled nor filtered.
            Equal logits are kept or dropped together: top-k keeps every logit >= the k-th largest;
            top-p keeps every logit >= the largest t such that the logits >= t have at least the
            mass top_p within the top-k set; min-p keeps probabilities >= min_p * the largest.
        """
        checks.check_rows(rows)
        return self._kernels.process_logits(rows)

    def sample(self, rows: Rows, noise: Noise) -> Tensor:
        """Draw a token from each row of raw logits, after processing it: int64 [N]; exact
        (Gumbel-max).

        Rows at T=0 take the argmax, lowest index on ties. Rows with top-k active (0 < k < V), and
        rows of slots under `Rule.COUPLED`, are drawn *flat*: argmax(logit + G_token) over all kept
        tokens. All other rows are drawn hierarchically, by blocks of 1024 ids: block =
        argmax(log-mass + G_block), then token = argmax(logit + G_token) within the block.

        A row that is not finite gives a meaningless id in [0, V). `verify` without drafts draws the
        same tokens as `sample` with `TARGET` noise, and reports such rows by `finite_B`.
        """
        checks.check_sample(rows, noise)
        return self._kernels.sample(rows, noise)

    def draft(self, rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
        """Draw a draft from each row of raw draft logits, int64 [N], and keep the row's q.

        Rows are drawn as `sample` draws them with `DRAFT` noise at (position, draft index). Slots
        under `Rule.COUPLED` draw with `TARGET` noise at draft index 0, as the target itself will.

        Args:
            rows: rows of the draft model, V' tokens, without edits. No two rows have the same
                (slot, draft index), except for the last slot, which may pad a batch. A row that is
                not finite gives some id in [0, V'), as in `sample`, and at T > 0 an lse that is
                not finite: `verify` then does not count the id as a draft.
            noise: with `DRAFT` streams.
            cache: written at [slot, draft index]; it has the dtype and the width of the logits.
                None keeps no q and draws the same tokens.
        """
        checks.check_draft(rows, noise, cache)
        return self._kernels.draft(rows, noise, cache)

    def verify(self, batch: VerifyBatch) -> Verdict:
        """Accept the first drafts of each request and draw one more token (K_b = 0: only draw).

        Each request is decided by the rule of its slot (`ops/rules.py`). Rows at T=0 accept a draft
        iff it is the argmax, except under SYNTHETIC.

        - These ids count as no draft: -1; an id with a q row that is not finite; an id with
          q(x) = 0 in a finite row, which no drafter sampled; under SYNTHETIC an id >= V, since a
          rate cannot make it a token of the target. Neither such an id nor any draft after it is
          accepted. The token that replaces it is drawn from p with TARGET noise, as a bonus token.
        - The token that replaces a rejected draft is drawn from norm(max(w p - q, 0)) with RESIDUAL
          noise; if that has zero mass, which happens only under SYNTHETIC, from p with RESIDUAL
          noise. A backend may treat a mass below 1e-40 as zero.
        - Under COUPLED every token is the target's own draw with TARGET noise. Neither COUPLED nor
          T=0 reads q.
        - A target row that is not finite has p = 0 everywhere (and S_i = 0 under BLOCK): only
          SYNTHETIC can accept its draft. If such a row is among rows 0..n_accept, which decided the
          request, `finite_B` is False and -1 follows the accepted drafts. These remain valid, but
          the request cannot go on.
        - A rule that is unknown, or that cannot be applied (SYNTHETIC without rates, BLOCK where
          `params.rules` lacks it), raises `ConfigError` if slots are on the host. On a device the
          request may get no token instead, so that the host need not wait for the device:
          `n_accept_B` is 0, `finite_B` False, and its row of `token_BK1` -1.
        """
        checks.check_verify(batch)
        return self._kernels.verify(batch)

    def evidence(self, batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
        """The numbers that decided some requests of a verification: p, q and u of all their drafts.

        p and q are those of processed rows. At T=0 p is one-hot at the argmax. Under COUPLED, which
        only compares draws, p is still the target's probability. In both cases q is not read and
        counts as one-hot. p is 0 in a target row that is not finite.

        Args:
            batch: the verified batch; the cache must still have its q.
            verdict: the result of `verify` for the batch.
            request_R: int64, indices of requests in 0..B-1.
        """
        checks.check_evidence(batch, verdict, request_R)
        return self._kernels.evidence(batch, verdict, request_R)

    def logprobs(self, rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of token `token_N` and of the `num_top` likeliest tokens in each row.

        Dropped tokens have -inf. Rows that are not finite may give any numbers.

        Args:
            rows: a tensor [N, V] of raw logits, or `Rows`, which are processed (T=0: only edited).
            token_N: int64 or int32, in [0, V).
            num_top: 0 <= num_top <= 64, and <= V.
        """
        checks.check_logprobs(rows, token_N, num_top)
        return self._kernels.logprobs(rows, token_N, num_top)

    def attention(
        self,
        query_THD: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Causal attention of ragged queries over paged K/V, new tokens included: [T, H, D_v].

        Args:
            query_THD: [T, H, D].
            key_cache, value_cache: [num_blocks, block_size, H_kv, D] and [..., D_v], contiguous,
                in the dtype of the query; H % H_kv == 0.
            batch: which queries belong to which request. It must not be changed later, because
                backends keep what they derive from it for the next layer.
        """
        checks.check_attention(query_THD, key_cache, value_cache, batch, options)
        return self._kernels.attention(query_THD, key_cache, value_cache, batch, options)

    def load_stack(self, stack: Stack, positions: int, most_rows: int) -> LoadedStack:
        """Load a stack in this backend's own layout; a backend without one uses stock operators.

        Args:
            positions: length of the longest context.
            most_rows: for a stack with `target_ids`: memory is kept for logits of this many rows;
                more rows work, but are slower.

        Raises:
            UnfitError: the kernels do not implement part of this stack; the message says which.
            ConfigError: the outputs of the head do not match the vocabulary or `target_ids`.
        """
        checks.check_stack(stack)
        load_stack = self._kernels.load_stack
        if load_stack is None:
            return self.stock_stack(stack)
        return load_stack(stack, positions, most_rows, deterministic=self.deterministic)

    def stock_stack(self, stack: Stack) -> LoadedStack:
        """`load_stack` in stock operators, with this backend's `attention`."""
        from foretoken.ops.backends.torch.stack import StockStack

        checks.check_stack(stack)
        return StockStack(stack, self._kernels.attention)

    def multiply(self, x: Tensor, linear: Linear) -> Tensor:
        """The product of x [..., in] with a layer, which may be from `pack`: [..., out]."""
        from foretoken.ops.backends.torch.stack import multiply

        return multiply(x, linear)

    def pack_pays(self, weights: Sequence[Tensor]) -> bool:
        """Whether linear layers with these weights are faster in the layout of `pack`."""
        from foretoken.ops.backends.torch.stack import pays

        return pays(weights)

    def pack(self, linear: Linear) -> Linear:
        """The layer in a layout that `multiply` reads faster if `pack_pays`."""
        from foretoken.ops.backends.torch.stack import packed

        return packed(linear)

    def steps(self, state: SlotState) -> Steps:
        """The functions on an engine's slots, which do not check their arguments."""
        return self._kernels.steps(state)

    def compile_ahead(self, run: Callable[[], object]) -> None:
        """Compile, in parallel processes, the kernels that `run` launches on a GPU, so that the
        first real step takes much less time.

        `run`, a step on scratch memory, is called once. Meanwhile this backend's functions and
        stacks launch no kernel in this thread and return zeros; PyTorch's operators do run.
        Backends without kernels to compile do not call `run`.
        """
        self._kernels.compile_ahead(run)

    def set_num_threads(self, count: int) -> None:
        """Set the number of threads of each call, the calling one included, for the whole process.
        PyTorch's operators use `torch.set_num_threads` instead."""
        self._kernels.set_num_threads(count)

    def tunings(self) -> dict[str, Any]:
        """The measured times by which this process chose between kernels, and the choices."""
        return self._kernels.tunings()


def draft_cache(
    backend: Backend, logits_BKV: Tensor, params: SlotParams, slot_B: Tensor
) -> DraftCache:
    """The q of drafts that were not drawn by `Backend.draft`, from the logits of these drafts.

    With this cache, `verify` treats them as if `Backend.draft` had drawn them. They must be draws
    from the q of their slots' parameters: softmax of logits / temperature, filtered by min_p, top_k
    and top_p.

    Args:
        backend: the one that will verify; the cache is bitwise what its `draft` would write.
        logits_BKV: raw draft logits [B, K, V'], any float dtype, adjacent along V'; draft i of
            request b was drawn from row (b, i). Rows after a request's last draft may have any
            numbers, and a row that is not finite counts as no draft.
        params: the parameters of all slots; the cache has a row for each.
        slot_B: int64, the slot of each request, no two alike.

    Returns:
        A new cache [S, K, V'] in the dtype of the logits. Slots that are not in `slot_B` have no q:
        their drafts count as no drafts where `real_q_B` is True.

    Raises:
        ConfigError: names the argument that does not fit.

    Two drafts in slot 0: the first has p = q and is accepted; the second has no mass in p:

        >>> import torch
        >>> from foretoken.ops import DraftBlock, Rule, SlotParams, VerifyBatch
        >>> from foretoken.ops import draft_cache, get_backend
        >>> ops = get_backend("reference")
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> params = SlotParams(
        ...     key_S=torch.tensor([7]), temperature_S=one, top_k_S=zero.long(), top_p_S=one,
        ...     min_p_S=zero, rule_S=torch.tensor([Rule.STANDARD]),
        ... )
        >>> q_logits_BKV = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 9.0, 0.0]]])
        >>> cache = draft_cache(ops, q_logits_BKV, params, slot_B=torch.tensor([0]))
        >>> drafts = DraftBlock(
        ...     token_BK=torch.tensor([[0, 1]]), num_B=torch.tensor([2]), cache=cache,
        ...     real_q_B=torch.tensor([True]),
        ... )
        >>> inf = torch.inf
        >>> p_logits_NV = torch.tensor([[1.0, 2.0, 0.0], [-inf, -inf, 0.0], [0.0, 0.0, 0.0]])
        >>> slot_B = position_B = torch.tensor([0])
        >>> verdict = ops.verify(VerifyBatch(p_logits_NV, params, slot_B, position_B, drafts))
        >>> verdict.token_BK1.tolist(), verdict.n_accept_B.tolist()
        ([[0, 2, -1]], [1])
    """
    if not hasattr(backend, "draft"):
        raise ConfigError("backend", backend, "a backend from `get_backend`")
    checks.check_draft_cache(logits_BKV, params, slot_B)
    slots, (_, drafts, vocabulary) = params.key_S.shape[0], logits_BKV.shape
    cache = DraftCache.empty(slots, drafts, vocabulary, logits_BKV.dtype, logits_BKV.device)
    cache.threshold_SK.fill_(-torch.inf)
    cache.lse_SK.fill_(torch.nan)  # no q
    position_B = torch.zeros_like(slot_B)  # any position: only the cache is used, not the draws
    for i in range(drafts):
        rows = Rows(logits_BKV[:, i], params, slot_B)
        backend.draft(rows, Noise(position_B, torch.full_like(slot_B, i), DRAFT), cache)
    return cache
