"""Tensor functions of sampling, verification and attention: one contract, several backends.

A backend is a folder under `ops/backends/` plus one line in `BACKENDS`. Every backend implements
the functions of `Backend` below with equal results: for equal logits and noise, equal tokens and
counts. `reference` is the fp64 oracle in the papers' notation; the others are fast.

Noise is addressed by name, never by generator state: key = the sample's 64 bits, counter =
(group, position, draft index, stream); see `ops/types.py: Stream` and `docs/`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.checks import INT64, check_logits, check_params, check_tensor
from foretoken.ops.decoder import (
    AttentionCall,
    Decoder,
    DraftRound,
    ForwardOutput,
    UnfitError,
)
from foretoken.ops.types import (
    AttentionBatch,
    AttentionOptions,
    DraftBlock,
    DraftCache,
    Edits,
    Logprobs,
    Rule,
    SlotParams,
    Stream,
    Verdict,
)

__all__ = [
    "BACKENDS",
    "AttentionBatch",
    "AttentionCall",
    "AttentionOptions",
    "Backend",
    "Decoder",
    "DraftBlock",
    "DraftCache",
    "DraftRound",
    "Edits",
    "ForwardOutput",
    "Logprobs",
    "Rule",
    "SlotParams",
    "Stream",
    "UnfitError",
    "Verdict",
    "draft_cache",
    "get_backend",
    "unavailable",
]


class Backend(Protocol):
    """The contract. Shapes as in `ops/types.py`; no input is changed except `draft`'s cache.

    Logits have unit stride along V; rows may lie apart. All but the reference read float64 logits
    rounded to float32. A row is *finite* if, its edits applied, it holds no NaN or +inf and its
    maximum is finite: -inf is a token that was dropped. An argument that does not fit raises
    `ConfigError` before any work; of tensors on a device shapes, dtypes, devices and strides are
    checked, of those on the host also what they hold.
    """

    def process_logits(
        self, logits_NV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None
    ) -> Tensor:
        """Apply a row's parameters, as the other functions do on load.

        In this order: edits, temperature, min_p, top_k, top_p.

        Args:
            logits_NV: raw logits, any float dtype. Of rows that are not finite nothing is promised
                but that they neither crash nor pass for finite (see `verify`).
            slot_N: int64, the slot whose parameters each row uses.
            edits: sparse changes made before temperature, or None.

        Returns:
            New [N, V] logits (float32; float64 in the reference): divided by the temperature,
            dropped tokens at -inf. Rows at T=0 are edited but neither scaled nor filtered.
            Ties are kept: top-k keeps every logit >= the k-th largest; top-p keeps every logit >=
            the largest threshold whose mass inside the top-k set reaches p; min-p keeps
            p >= min_p * p_max.
        """
        ...

    def sample(
        self,
        logits_NV: Tensor,
        params: SlotParams,
        slot_N: Tensor,
        position_N: Tensor,
        draft_index_N: Tensor,
        streams: tuple[Stream, Stream],
        *,
        edits: Edits | None = None,
        fp64_noise: bool = False,
    ) -> Tensor:
        """Draw one token per row of raw logits, processed on load; exact (Gumbel-max).

        Rows at T=0 take the argmax, lowest index on ties. Rows with top-k active (0 < k < V), and
        rows of slots under `Rule.COUPLED`, use flat Gumbel noise by token id over the survivors;
        others are hierarchical over blocks of 1024 ids: block = argmax(log-mass + G_block), token =
        argmax(logit + G_token) within it.

        Args:
            logits_NV: raw logits as for `process_logits`. A row that is not finite gives an id in
                [0, V) that means nothing and that nothing marks: `verify` without drafts draws what
                this does with TARGET streams, and marks such rows.
            position_N: int64, sequence position of the token that is drawn.
            draft_index_N: int64, 0 for target and residual streams.
            streams: (token stream, block stream), for example (TARGET_TOKEN, TARGET_BLOCK).

        Returns:
            int64 [N] token ids.
        """
        ...

    def draft(
        self,
        logits_BV: Tensor,
        params: SlotParams,
        slot_B: Tensor,
        position_B: Tensor,
        draft_index_B: Tensor,
        cache: DraftCache | None,
        *,
        fp64_noise: bool = False,
    ) -> Tensor:
        """Draw a draft per row of raw draft logits and keep the q it came from.

        As `sample` with DRAFT noise at (position, draft index); slots under `Rule.COUPLED` draw
        with TARGET noise at draft index 0, as the target itself will.

        Args:
            logits_BV: raw logits of the draft model, V' tokens. No two rows are of the same
                (slot, draft index). A row that is not finite gives some id in [0, V'), as `sample`
                does, and at T > 0 an lse that is not finite: `verify` then takes it for no draft.
            cache: written at [slot, draft index]; its dtype and width are those of the logits. A
                row at T=0 leaves a threshold of -inf and an lse of 0. None if no q will be asked
                for; tokens are then drawn all the same (`Decoder.draft` takes None for
                greedy drafts, the argmax).

        Returns:
            int64 [B] token ids.
        """
        ...

    def verify(
        self,
        logits_NV: Tensor,
        params: SlotParams,
        slot_B: Tensor,
        position_B: Tensor,
        drafts: DraftBlock,
        *,
        edits: Edits | None = None,
        synthetic_rate_K: Tensor | None = None,
        fp64_noise: bool = False,
    ) -> Verdict:
        """Accept a prefix of each request's drafts and emit one more token (K_b = 0: just draw).

        Args:
            logits_NV: raw target logits, K_b + 1 rows per request, requests in batch order.
            position_B: int64, sequence position of the token that the first row decides.
            edits: of the N rows; row i of a request has those that hold if drafts before it were
                accepted.
            synthetic_rate_K: float64 in [0, 1], the probability that draft i is accepted once those
                before it are; at least as long as `token_BK` is wide. Needed iff a slot of the
                batch is under `Rule.SYNTHETIC`.

        Each request is decided by the rule of its slot (`ops/rules.py`). T=0 rows accept iff the
        draft is the argmax, except under SYNTHETIC.

        - No draft: -1; a draft whose q row is not finite; one with q(x) = 0 in a finite row, which
          no drafter sampled; under SYNTHETIC an id >= V, since a rate cannot make it a token of the
          target. It is never accepted, nor is anything after it, and its slot is drawn from p with
          TARGET noise, as the bonus slot is.
        - A rejected draft: its slot is drawn from norm(max(w p - q, 0)) with RESIDUAL noise; if
          that has zero mass, from p with RESIDUAL noise. From which mass below 1e-40 on it counts
          as zero is the backend's; only SYNTHETIC rejects there.
        - Under COUPLED every slot is the target's own draw with TARGET noise; there, and at T=0,
          nothing of q is read.
        - A target row that is not finite has p = 0 everywhere (and S_i = 0 under BLOCK): its draft
          is rejected, or accepted by SYNTHETIC. If such a row is among those that decided the
          request, rows 0..n_accept, its `finite_B` is False and its last token, that after the
          accepted drafts, is -1. It is then row n_accept itself; under SYNTHETIC an earlier one,
          too. The accepted drafts stand, but the request cannot go on.
        """
        ...

    def logprobs(
        self,
        logits_NV: Tensor,
        token_N: Tensor,
        num_top: int,
        *,
        params: SlotParams | None = None,
        slot_N: Tensor | None = None,
        edits: Edits | None = None,
    ) -> Logprobs:
        """Log-probabilities of a given token and of the `num_top` likeliest of every row.

        Of the raw logits, or, if `params` and `slot_N` are given, of the processed ones (T=0: only
        edited). Tokens that were dropped have -inf; of rows that are not finite nothing is
        promised.

        Args:
            token_N: int64 or int32, in [0, V).
            num_top: 0 <= num_top <= 64, and <= V.
            params, slot_N: both or neither.
            edits: only with `params`.
        """
        ...

    def attention(
        self,
        query_THD: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Causal attention of ragged queries over paged K/V (the new tokens already written).

        Args:
            query_THD: [T, H, D].
            key_cache, value_cache: [num_blocks, block_size, H_kv, D] and [..., D_v], contiguous,
                in the dtype of the query; H % H_kv == 0.
            batch: which queries are whose. Backends keep what they derive from it for the next
                layer: it must not be written to afterwards.

        Returns:
            [T, H, D_v].
        """
        ...

    def decoder(self, module: Any, calls: Sequence[AttentionCall]) -> Decoder | None:
        """An implementation of a whole model, or None if this backend has none of any model.

        Args:
            module: a Transformers causal language model in eval mode.
            calls: what each of its layers asks of attention, in order.

        Raises:
            UnfitError: this module has something that the decoder does not implement; it says what.
        """
        ...


def draft_cache(
    backend: Backend, logits_BKV: Tensor, params: SlotParams, slot_B: Tensor
) -> DraftCache:
    """The q of drafts that were made elsewhere, from the logits that they were drawn from.

    With it, `verify` takes them as if `Backend.draft` had drawn them. They must be draws from q as
    the slots' parameters make it: softmax of logits / temperature, filtered by min_p, top_k, top_p.

    Args:
        backend: the one that will verify; thresholds and LSEs are to the bit those of its `draft`.
        logits_BKV: raw draft logits [B, K, V'], any float dtype, adjacent along V'; row (b, i) is
            what draft i of request b was drawn from. Rows behind a request's last draft may hold
            anything, and a row that is not finite counts as no draft.
        params: the parameters of all slots; the cache has a row for each.
        slot_B: int64, the slot of each request, no two alike.

    Returns:
        A new cache [S, K, V'] in the dtype of the logits. Slots that are not in `slot_B` have no q:
        drafts of theirs that claim one count as none.

    Raises:
        ConfigError: names the argument that does not fit.

    Two drafts in slot 0: p = q of the first, which is accepted; the second has no mass in p:

        >>> import torch
        >>> from foretoken.ops import DraftBlock, Rule, SlotParams, draft_cache, get_backend
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
        >>> no = -torch.inf
        >>> p_logits_NV = torch.tensor([[1.0, 2.0, 0.0], [no, no, 0.0], [0.0, 0.0, 0.0]])
        >>> at = torch.tensor([0])
        >>> verdict = ops.verify(p_logits_NV, params, at, position_B=at, drafts=drafts)
        >>> verdict.token_BK1.tolist(), verdict.n_accept_B.tolist()
        ([[0, 2, -1]], [1])
    """
    if not hasattr(backend, "draft"):
        raise ConfigError("backend", backend, "what `get_backend` returns")
    check_logits("logits_BKV", logits_BKV, 3)
    num_requests, most, vocabulary = logits_BKV.shape
    check_tensor("slot_B", slot_B, (num_requests,), INT64, logits_BKV.device)
    check_params(params, logits_BKV.device)
    sizes = (params.key_S.shape[0], most, vocabulary)
    cache = DraftCache.empty(*sizes, logits_BKV.dtype, logits_BKV.device)
    cache.threshold_SK.fill_(-torch.inf)
    cache.lse_SK.fill_(torch.nan)  # no q
    nowhere_B = torch.zeros_like(slot_B)  # the draws, and so their noise, are not used
    for i in range(most):
        backend.draft(logits_BKV[:, i], params, slot_B, nowhere_B, nowhere_B + i, cache)
    return cache


BACKENDS = {
    "reference": "foretoken.ops.backends.reference",
    "torch": "foretoken.ops.backends.torch",
    "native": "foretoken.ops.backends.native",
    "triton": "foretoken.ops.backends.triton",
}


def unavailable(name: str) -> str | None:
    """Why the backend of this name cannot run on this machine, or None if it can."""
    if name == "native":
        from foretoken.ops.backends.native import library

        return library.missing()
    if name == "triton":
        return _triton_missing()
    return None


def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package `triton` is not installed"
    if torch.cuda.is_available():
        return None
    from triton import knobs  # half a second

    return None if knobs.runtime.interpret else "no GPU is here, nor is TRITON_INTERPRET=1 set"


def get_backend(name: str) -> Backend:
    """Import a backend by name; `ConfigError` if there is none, or if it cannot run here."""
    if name not in BACKENDS:
        raise ConfigError("backend", name, f"one of {', '.join(BACKENDS)}")
    reason = unavailable(name)
    if reason is not None:
        raise ConfigError("backend", name, "one that runs here", f"This one cannot: {reason}.")
    return cast(Backend, importlib.import_module(BACKENDS[name]))
