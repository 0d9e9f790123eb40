"""A batch verified whole and in pieces: small ones may take another way to the same verdict.

Shapes: B requests, K drafts, N rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foretoken.ops import (
    Backend,
    DraftBlock,
    DraftCache,
    Edits,
    Rule,
    Verdict,
    VerifyBatch,
    draft_cache,
)
from tests.support.oracle import CPU, Case, Tally, drafted, moved, promised

MOST = 4  # requests of a piece


def compare_pieces(case: Case, backend: Backend, device: torch.device = CPU) -> Tally:
    """Raise AssertionError unless pieces of up to `MOST` requests get the verdicts of the batch.
    Requests under the block rule are in pieces of their own, as it closes the short way to others.
    The pieces' drafts are taken for ones made elsewhere: their q comes from `draft_cache`.
    """
    on = moved(case, device)
    token_BK, cache = drafted(backend, on, device)
    token_BK = token_BK.masked_fill(on.hidden_BK, -1).to(case.token_dtype)
    given = draft_cache(backend, on.raw_SKV[on.slot_B], on.params, on.slot_B)

    def verify(part: Case, index_B: Tensor, cache: DraftCache) -> Verdict:
        there, index_B = moved(part, device), index_B.to(device)
        drafts = DraftBlock(token_BK[index_B], there.num_B, cache, there.real_q_B)
        verdict = backend.verify(
            VerifyBatch(
                there.raw_NV, there.params, there.slot_B, there.position_B, drafts,
                edits=there.edits, synthetic_rate_K=there.rate_K, fp64_noise=case.fp64_noise,
            )
        )  # fmt: skip
        return moved(verdict, CPU)

    every_B = torch.arange(len(case.slot_B))
    whole = verify(case, every_B, cache)
    block_B = case.params.rule_S[case.slot_B] == Rule.BLOCK
    groups = [every_B[~block_B], every_B[block_B]]
    for piece in (piece for group in groups for piece in group.split(MOST) if len(piece)):
        part = verify(part_of(case, piece), piece, given)
        about = f"requests {piece.tolist()}"
        assert torch.equal(part.finite_B, whole.finite_B[piece]), about
        assert torch.equal(part.n_accept_B, whole.n_accept_B[piece]), about
        assert torch.equal(part.token_BK1, whole.token_BK1[piece]), about
    return Tally(len(every_B), 0)


def part_of(case: Case, index_B: Tensor) -> Case:
    rows_B = case.num_B + 1
    first_B = rows_B.cumsum(0) - rows_B
    index_N = torch.cat(
        [torch.arange(int(first_B[b]), int(first_B[b] + rows_B[b])) for b in index_B.tolist()]
    )
    slot_B = case.slot_B[index_B]
    width = min(case.raw_NV.shape[1], case.raw_SKV.shape[2])
    return replace(
        case, params=promised(case.params, slot_B, width), slot_B=slot_B,
        position_B=case.position_B[index_B], num_B=case.num_B[index_B], raw_NV=case.raw_NV[index_N],
        edits=None if case.edits is None else _rows_of(case.edits, index_N),
        hidden_BK=case.hidden_BK[index_B], real_q_B=case.real_q_B[index_B],
    )  # fmt: skip


def _rows_of(edits: Edits, index_N: Tensor) -> Edits:
    """The edits of some rows."""
    start, end = edits.start_N1[index_N], edits.start_N1[index_N + 1]
    index_M = torch.cat([torch.arange(int(a), int(b)) for a, b in zip(start, end, strict=True)])
    assert edits.mask_N is not None
    return replace(
        edits, mask_N=edits.mask_N[index_N],
        start_N1=torch.cat([start[:1] * 0, (end - start).cumsum(0)]),
        token_M=edits.token_M[index_M], bias_M=edits.bias_M[index_M],
        repetition_M=edits.repetition_M[index_M], subtract_M=edits.subtract_M[index_M],
    )  # fmt: skip
