"""Speculative sampling as in the papers, in fp64, one request at a time.

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding" (2023),
algorithm 1; Chen et al., "Accelerating large language model decoding with speculative sampling"
(2023), algorithm 2. p is the target's distribution, q the one that the draft was sampled from:

    for i = 1..K:  accept x_i if u_i < p(x_i) / q(x_i), else stop
    after a rejection emit y ~ norm(max(p - q, 0)); if all K were accepted, y ~ p

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.ops.backends.reference.process import Row
from foretoken.ops.backends.reference.sample import Place, draw, log_sum_exp
from foretoken.ops.checks import check_verify
from foretoken.ops.types import DraftBlock, SlotParams, Stream, Verdict

TARGET = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
RESIDUAL = (Stream.RESIDUAL_TOKEN, Stream.RESIDUAL_BLOCK)


def verify(
    logits_NV: Tensor,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    drafts: DraftBlock,
    *,
    rule: str = "standard",
    fp64_noise: bool = False,
) -> Verdict:
    """See `Backend.verify`."""
    check_verify(logits_NV, params, slot_B, position_B, drafts)
    if rule not in RULES:
        raise ConfigError("rule", rule, f"one of {', '.join(RULES)}")
    verify_one = RULES[rule]
    most = drafts.token_BK.shape[1]
    token_BK1 = torch.full((len(slot_B), most + 1), -1, dtype=drafts.token_BK.dtype)
    n_accept_B = torch.zeros(len(slot_B), dtype=torch.int64)
    finite_B = torch.ones(len(slot_B), dtype=torch.bool)
    start = 0
    for b, num in enumerate(drafts.num_B.tolist()):
        rows = logits_NV[start : start + num + 1].detach().double().numpy()
        emitted, finite = verify_one(rows, b, params, slot_B, position_B, drafts, fp64_noise)
        token_BK1[b, : len(emitted)] = torch.tensor(emitted, dtype=token_BK1.dtype)
        n_accept_B[b], finite_B[b] = len(emitted) - 1, finite
        start += num + 1
    return Verdict(token_BK1, n_accept_B, finite_B)


def _standard(
    rows: Row,
    b: int,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    drafts: DraftBlock,
    fp64: bool,
) -> tuple[list[int], bool]:
    """The tokens that request b emits, and whether the rows behind them were finite.

    The algorithm at the head of this file, line by line.
    """
    slot, position = int(slot_B[b]), int(position_B[b])
    key, temperature = int(params.key_S[slot]), float(params.temperature_S[slot])
    top_k = int(params.top_k_S[slot])
    emitted: list[int] = []
    for i, logits in enumerate(rows):
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            return [*emitted, -1], False
        place = Place(key, position + i, 0, fp64)
        x = int(drafts.token_BK[b, i]) if i < len(rows) - 1 else -1
        if temperature == 0:
            best = int(np.argmax(logits))
            emitted.append(best)
            if x != best:
                break
            continue
        q_x, q = _draft_distribution(drafts, b, slot, i, x, len(logits))
        if q_x == 0:  # q = 0: there is nothing to accept, and the residual is p
            emitted.append(draw(logits, temperature, top_k, place, TARGET))
            break
        p = np.exp(logits - log_sum_exp(logits))
        p_x = p[x] if x < len(p) else 0.0
        u = uniform_of(0, key, position + i, i, Stream.ACCEPT, fp64)
        if u < p_x / q_x:
            emitted.append(x)
            continue
        residual = np.maximum(p - q, 0)
        if residual.sum() > 0:
            with np.errstate(divide="ignore"):
                logits = np.log(residual)
        emitted.append(draw(logits, temperature, top_k, place, RESIDUAL))
        break
    return emitted, True


def _draft_distribution(
    drafts: DraftBlock, b: int, slot: int, i: int, x: int, vocabulary: int
) -> tuple[float, Row]:
    """q(x), and q over the target's V ids; all zero without a draft or if its row is not finite."""
    q = np.zeros(vocabulary)
    if x < 0:
        return 0.0, q
    if drafts.logits_SKV is None or not drafts.real_q_B[b]:
        if x < vocabulary:
            q[x] = 1.0
        return 1.0, q
    logits = drafts.logits_SKV[slot, i].detach().double().numpy()
    if np.isnan(logits).any() or not math.isfinite(logits.max()):
        return 0.0, q
    whole = np.exp(logits - log_sum_exp(logits))
    shared = min(vocabulary, len(whole))
    q[:shared] = whole[:shared]
    return (float(whole[x]) if x < len(whole) else 0.0), q


RULES = {"standard": _standard}
"""The oracle's own statement of each rule in `ops/rules.py`, one request at a time."""
