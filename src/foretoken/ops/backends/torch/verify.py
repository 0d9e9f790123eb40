"""Verification on the CPU in three stages: reductions per row -> a rule -> one residual sampler.

Belongs here: stages (i) and (iii) of a batch. Does not: the rules (`ops/rules.py`), max(w p - q, 0)
of a row (`_residual`), how a row is drawn (`sample`).

Only the rows that are needed are read: a row's LSE for its draft's p(x), then one row per request
to draw from. q(x) is one number of the cache. The block rule reads p and q of every draft but the
first for its residual masses. Where p is the target's own draw (COUPLED), rows behind the first
draft that differs are not read.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots, M drafts in flat order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops.backends.torch._reduce import measure
from foretoken.ops.backends.torch._residual import Batch, Reduced, draw_residual, residual_mass
from foretoken.ops.backends.torch.noise import Array, address, uniform_at
from foretoken.ops.backends.torch.process import chunks, load, rows_of
from foretoken.ops.backends.torch.sample import Noise, draw
from foretoken.ops.rules import RuleInputs, accept, rules_of, weights
from foretoken.ops.types import Rule, Stream, Verdict, VerifyBatch


def verify(given: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    Each request by the rule of its slot. A request whose deciding rows are not all finite gets -1
    in place of the last token.
    """
    batch = _read(given)
    num_requests, most = batch.token_BK.shape
    out = Reduced.empty(num_requests, most)
    n_accept_B, log_w_B = np.zeros(num_requests, np.int64), np.zeros(num_requests)
    with np.errstate(all="ignore"):
        _draw_own(batch, out)
        if batch.known_BK.any():  # else plain decoding: nothing to decide
            _reduce_q(batch, out)
            _reduce_p(batch, out)
            n_accept_B, log_w_B = _decide(batch, out, given.synthetic_rate_K)
        drawn_B = _emit(batch, out, n_accept_B, log_w_B)
    # A draft is accepted at a row that is not finite only by SYNTHETIC.
    decided_BK1 = np.arange(most + 1) <= n_accept_B[:, None]
    finite_B = (out.finite_BK1 | ~decided_BK1).all(axis=1)
    token_BK1 = np.full((num_requests, most + 1), -1, batch.token_BK.dtype)
    np.copyto(token_BK1[:, :most], batch.token_BK, where=decided_BK1[:, 1:])
    token_BK1[np.arange(num_requests), n_accept_B] = np.where(finite_B, drawn_B, -1)
    return Verdict(from_numpy(token_BK1), from_numpy(n_accept_B), from_numpy(finite_B))


def _read(given: VerifyBatch) -> Batch:
    """Turn the arguments into arrays, with the parameters of every row."""
    logits_NV, params, slot_B, position_B, drafts, edits, _, fp64_noise = given
    num_B, slot, token_BK = drafts.num_B.numpy(), slot_B.numpy(), drafts.token_BK.numpy()
    rows = rows_of(logits_NV, params, slot.repeat(num_B + 1), edits)
    first_row_B = (num_B + 1).cumsum() - (num_B + 1)
    rule_B = params.rule_S.numpy()[slot]
    known_BK = (np.arange(token_BK.shape[1]) < num_B[:, None]) & (token_BK >= 0)
    if Rule.SYNTHETIC in rules_of(rule_B.tolist()):
        # A rate does not make a token out of an id that the target lacks.
        known_BK &= (token_BK < logits_NV.shape[1]) | (rule_B != Rule.SYNTHETIC)[:, None]
    greedy_B = params.temperature_S.numpy()[slot] == 0
    return Batch(
        rows=rows,
        slot_B=slot,
        key_B=params.key_S.numpy()[slot],
        position_B=position_B.numpy(),
        rule_B=rule_B,
        greedy_B=greedy_B,
        own_B=greedy_B | (rule_B == Rule.COUPLED),
        first_row_B=first_row_B,
        num_B=num_B,
        token_BK=token_BK,
        known_BK=np.logical_and.accumulate(known_BK, axis=1),
        real_q_B=drafts.real_q_B.numpy() & ~greedy_B & (rule_B != Rule.COUPLED),
        cache=drafts.cache,
        fp64_noise=fp64_noise,
    )


def _draw_own(batch: Batch, out: Reduced) -> None:
    """The target's own draws, where they are p: argmax at T=0, flat TARGET noise under COUPLED.

    log p(x_i) is 0 where x_i is the draw, else -inf. At T=0 all rows are read at once; a coupled
    request's rows one by one, since its draws cost V noises each, until a draft differs.
    """
    greedy = np.flatnonzero(batch.greedy_B)
    if len(greedy):
        b_M = greedy.repeat(batch.num_B[greedy] + 1)
        _own_of(batch, out, b_M, np.arange(len(b_M)) - _starts(batch.num_B[greedy] + 1))
    b_M = np.flatnonzero(batch.own_B & ~batch.greedy_B)
    i = 0
    while len(b_M):
        _own_of(batch, out, b_M, np.full(len(b_M), i))
        if i == batch.token_BK.shape[1]:
            return
        b_M = b_M[out.log_p_BK[b_M, i] == 0]
        i += 1


def _starts(count_B: Array) -> Array:
    """Where the group of each entry begins, when groups of these sizes follow each other."""
    starts: Array = (count_B.cumsum() - count_B).repeat(count_B)
    return starts


def _own_of(batch: Batch, out: Reduced, b_M: Array, i_M: Array) -> None:
    """Draw rows i_M of requests b_M, and compare them with their drafts."""
    noise = _noise(batch, b_M, i_M, np.zeros(len(b_M), bool))
    drawn = draw(batch.rows, batch.first_row_B[b_M] + i_M, noise)
    out.own_BK1[b_M, i_M] = drawn.token_M
    out.finite_BK1[b_M, i_M] = finite = np.isfinite(drawn.max_M)
    drafted = np.flatnonzero(i_M < batch.num_B[b_M])
    b, i = b_M[drafted], i_M[drafted]
    same = batch.known_BK[b, i] & (drawn.token_M[drafted] == batch.token_BK[b, i]) & finite[drafted]
    out.log_p_BK[b, i] = np.where(same, 0.0, -np.inf)


def _noise(batch: Batch, b_M: Array, i_M: Array, residual_M: Array) -> Noise:
    """TARGET or RESIDUAL noise of position i_M of requests b_M."""
    return Noise(
        address(batch.key_B[b_M], batch.position_B[b_M] + i_M, 0),
        np.where(residual_M, Stream.RESIDUAL_TOKEN, Stream.TARGET_TOKEN).astype(np.uint32),
        np.where(residual_M, Stream.RESIDUAL_BLOCK, Stream.TARGET_BLOCK).astype(np.uint32),
        batch.fp64_noise,
    )


def _reduce_q(batch: Batch, out: Reduced) -> None:
    """log q(x_i): 0 if one-hot; of real q from the cache, as raw / T - LSE.

    -inf (q = 0) without a draft, where the draft row is not finite, or where it cannot give x_i:
    below its threshold, or beyond its vocabulary.
    """
    np.copyto(out.log_q_BK, 0.0, where=batch.known_BK)
    b_M, i_M = np.nonzero(batch.known_BK & batch.real_q_B[:, None])
    if batch.cache is None or not len(b_M):
        return
    slot_M, token_M = batch.slot_B[b_M], batch.token_BK[b_M, i_M].astype(np.int64)
    width = batch.cache.logits_SKV.shape[2]
    inside = np.minimum(token_M, width - 1)
    where = from_numpy(slot_M), from_numpy(i_M)
    raw_M = batch.cache.logits_SKV[(*where, from_numpy(inside))].float().numpy()
    lse_M = batch.cache.lse_SK.numpy()[slot_M, i_M]
    temperature_M = batch.rows.temperature_N[batch.first_row_B[b_M]]
    log_q_M = raw_M.astype(np.float64) / temperature_M - lse_M
    kept = (token_M < width) & (raw_M >= batch.cache.threshold_SK.numpy()[slot_M, i_M])
    out.log_q_BK[b_M, i_M] = np.where(kept & np.isfinite(log_q_M), log_q_M, -np.inf)


def _reduce_p(batch: Batch, out: Reduced) -> None:
    """log p(x_i) of real p; it stays -inf for ids >= V, dropped ones, and where p is not finite."""
    vocabulary = batch.rows.logits_NV.shape[1]
    known_BK = batch.known_BK & ~batch.own_B[:, None]
    filtered_B = batch.rows.filtered_N[batch.first_row_B]
    for form in (False, True):
        b_M, i_M = np.nonzero(known_BK & (filtered_B == form)[:, None])
        for part in chunks(len(b_M), vocabulary):
            b, i = b_M[part], i_M[part]
            n = batch.first_row_B[b] + i
            x_RV = load(batch.rows, n)
            bound, lse = measure(batch.rows, n, x_RV)
            token = batch.token_BK[b, i]
            raw = x_RV.numpy()[np.arange(len(b)), np.minimum(token, vocabulary - 1)]
            log_p = raw.astype(np.float64) / batch.rows.temperature_N[n] - lse
            kept = (token < vocabulary) & (raw >= bound) & np.isfinite(log_p)
            out.log_p_BK[b, i] = np.where(kept, log_p, -np.inf)
            out.threshold_BK[b, i], out.lse_p_BK[b, i] = bound, lse
            out.finite_BK1[b, i] = np.isfinite(lse)


def _decide(batch: Batch, out: Reduced, synthetic_rate_K: Tensor | None) -> tuple[Array, Array]:
    """Stage (ii): (n_accept_B, log of the residual weight after as many)."""
    rule_B = from_numpy(batch.rule_B)
    x = RuleInputs(
        from_numpy(out.log_p_BK),
        from_numpy(out.log_q_BK),
        from_numpy(_log_u(batch)),
        synthetic_rate_K=synthetic_rate_K,
    )
    if not (batch.rule_B == Rule.BLOCK).any():
        return accept(x, rule_B).numpy(), np.zeros(len(rule_B))
    log_w_BK1 = weights(x, rule_B).numpy()
    x = replace(x, residual_mass_BK=from_numpy(residual_mass(batch, out, log_w_BK1)))
    n_accept_B = accept(x, rule_B).numpy()
    return n_accept_B, log_w_BK1[np.arange(len(n_accept_B)), n_accept_B]


def _log_u(batch: Batch) -> Array:
    """log of the acceptance uniforms, [B, K]. -inf (u = 0), undrawn, if all p are one-hot."""
    num_requests, most = batch.token_BK.shape
    if (batch.own_B & (batch.rule_B != Rule.SYNTHETIC)).all():
        return np.full((num_requests, most), -np.inf)
    index_BK = np.broadcast_to(np.arange(most), (num_requests, most))
    position_BK = batch.position_B[:, None] + index_BK
    at = address(batch.key_B.repeat(most), position_BK.ravel(), index_BK.ravel())
    first = np.zeros(num_requests * most, np.int64)
    u = uniform_at(first, at, int(Stream.ACCEPT), batch.fp64_noise)
    log_u: Array = np.log(u.astype(np.float64)).reshape(num_requests, most)
    return log_u


def _emit(batch: Batch, out: Reduced, n_accept_B: Array, log_w_B: Array) -> Array:
    """Stage (iii): the token after the accepted ones, [B].

    The target's own draw where p is that; from the residual with RESIDUAL noise where a draft with
    a q was rejected; else from p with TARGET noise: the bonus token, a placeholder's slot, and that
    of a draft row that is not finite.
    """
    each, most = np.arange(len(n_accept_B)), batch.token_BK.shape[1]
    token_B = out.own_BK1[each, n_accept_B]
    rejected_B = (n_accept_B < batch.num_B) & ~batch.own_B
    if most:
        rejected_B &= out.log_q_BK[each, np.minimum(n_accept_B, most - 1)] > -np.inf
    b_R = np.flatnonzero(rejected_B & out.finite_BK1[each, n_accept_B])
    empty_R = np.zeros(0, np.int64)
    if len(b_R):
        i_R = n_accept_B[b_R]
        noise = _noise(batch, b_R, i_R, np.ones(len(b_R), bool))
        token_B[b_R], mass_R = draw_residual(batch, out, (b_R, i_R), log_w_B[b_R], noise)
        empty_R = b_R[mass_R <= 0]
    b_M = np.concatenate([np.flatnonzero(~batch.own_B & ~rejected_B), empty_R])
    if len(b_M):
        i_M = n_accept_B[b_M]
        drawn = draw(
            batch.rows, batch.first_row_B[b_M] + i_M, _noise(batch, b_M, i_M, rejected_B[b_M])
        )
        token_B[b_M], out.finite_BK1[b_M, i_M] = drawn.token_M, np.isfinite(drawn.max_M)
    return token_B
