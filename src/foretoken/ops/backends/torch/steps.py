"""Bookkeeping of a step over its slots, in stock operators; see `foretoken.ops.steps.Steps`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, Round, SlotState, StepTokens
from foretoken.ops.types import AttentionBatch, Verdict


def count_drafts(state: SlotState, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
    """See `Steps.count_drafts`."""
    length_B = state.length_S[slot_B]
    left_B = state.limit_S[slot_B] - length_B - 1
    return torch.minimum(most_B, left_B).clamp(min=0), length_B


def write_drafts(
    state: SlotState, rows: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
) -> None:
    """See `Steps.write_drafts`."""
    _put(state, rows.slot_B, rows.position_B, num_B, token_BK.clamp(0, last_id))


def pack(state: SlotState, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
    """See `Steps.pack`."""
    want_B = tokens.num_D + 1
    if tokens.of_B is not None:
        want_B = pad(want_B, (0, 1))[tokens.of_B]  # -1 is the 0 behind the last
    count_B = tokens.num_tokens_B + (want_B - 1).clamp(min=0)
    slot_B = _going_on(state, tokens.slot_B)
    start_B = state.computed_S[slot_B]
    return _packed(state, slot_B, start_B, count_B, want_B, sizes, block_size)


def advance(state: SlotState, tokens: StepTokens, verdict: Verdict) -> Tensor:
    """See `Steps.advance`."""
    slot_B, (token_BK1, accepted_B, finite_B) = tokens.slot_B, verdict
    decides_B = torch.ones_like(finite_B)
    if (of_B := tokens.of_B) is not None:
        token_BK1, decides_B = pad(token_BK1, (0, 0, 0, 1))[of_B], of_B >= 0
        accepted_B, finite_B = pad(accepted_B, (0, 1))[of_B], pad(finite_B, (0, 1))[of_B]
    length_B, computed_B, limit_B = (column[slot_B] for column in state[2:])
    goes_on_B = length_B < limit_B
    end_B = length_B + (accepted_B + finite_B) * goes_on_B
    _put(state, slot_B, length_B, end_B - length_B, token_BK1)
    state.computed_S[slot_B] = computed_B + (tokens.num_tokens_B + accepted_B) * goes_on_B
    state.length_S[slot_B] = end_B
    state.limit_S[slot_B] = torch.where(goes_on_B & decides_B & ~finite_B, end_B, limit_B)
    columns = (tokens.num_D, verdict.n_accept_B, verdict.finite_B.to(torch.int64))
    of_D = torch.cat([torch.stack(columns, dim=1), verdict.token_BK1.to(torch.int64)], dim=1)
    return torch.cat([computed_B, of_D.flatten()])


def begin_round(
    state: SlotState, rows: DraftRequests, known: int, max_len: int, block_size: int
) -> Round:
    """See `Steps.begin_round`."""
    slot_B, num_B, position_B, most, _ = rows
    requests, columns = len(slot_B), state.block_SL.shape[1]
    spare, device = len(state.length_S) - 1, slot_B.device
    slot_B = _going_on(state, slot_B)
    fits_B = (position_B <= max_len) & (slot_B < spare)
    slot_B, length_B = torch.where(fits_B, slot_B, spare), torch.where(fits_B, position_B, 1)
    num_B = torch.minimum(num_B, (max_len + 1 - position_B).clamp(min=0))
    count_B = length_B.clamp(max=known)
    # On a host the truth costs nothing, and native decoders insist on it.
    tokens = int(count_B.sum()) if device.type == "cpu" else known * requests
    sizes = PackSizes(tokens, requests, known)
    first = _packed(
        state, slot_B, length_B - count_B, count_B, torch.ones_like(count_B), sizes, block_size
    )
    used_B = (length_B + num_B + block_size - 1) // block_size
    is_own_BL = torch.arange(columns, device=device) < used_B[:, None]
    first.attention.block_BL = torch.where(
        is_own_BL, first.attention.block_BL, state.block_SL[spare, 0]
    )
    index_K1 = torch.arange(most, device=device)[:, None]
    length_KB = (length_B + index_K1).clamp(max=min(max_len, columns * block_size))
    index_KB = index_K1.expand(-1, requests).contiguous()
    index_B1 = torch.arange(requests + 1, device=device)
    return Round(num_B, first, index_B1, length_KB - 1, length_KB, index_KB)


def shift(
    state: SlotState, slot_B: Tensor, batch: AttentionBatch, rows: int
) -> tuple[Tensor, Tensor]:
    """See `Steps.shift`."""
    start_B, end_B, length_B = batch.query_start_B1[:-1], batch.query_start_B1[1:], batch.length_B
    index_T = torch.arange(rows, device=end_B.device)
    owner_T = torch.searchsorted(end_B, index_T, right=True).clamp_(max=len(end_B) - 1)
    next_T = (index_T + (length_B - end_B + 1)[owner_T]).clamp_(max=state.token_SL.shape[1] - 1)
    token_T = state.token_SL[slot_B[owner_T], next_T].long().clamp_(min=0)
    first_B = length_B - (end_B - start_B)
    last_B = torch.minimum(length_B - 1, state.length_S[slot_B] - 2)
    return token_T, start_B + (last_B - first_B).clamp_(min=0)


def join_drafts(drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
    """See `Steps.join_drafts`."""
    index_K = torch.arange(len(drafts), device=num_B.device)
    return torch.stack(list(drafts), dim=1).masked_fill(index_K >= num_B[:, None], -1)


def look_up(
    state: SlotState, rows: DraftRequests, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    """See `Steps.look_up`.

    An occurrence is named by where it ends: `run_BL` is how many tokens up to there are equal to
    the last ones.
    """
    slot_B, num_B, position_B, most, _ = rows
    text_BL, length_B1 = state.token_SL[slot_B], position_B[:, None]
    width = text_BL.shape[1]
    place_L = torch.arange(width, device=text_BL.device)
    run_BL, goes_on_BL = torch.zeros_like(text_BL), torch.ones_like(text_BL, dtype=torch.bool)
    for back in range(longest):
        last_B1 = text_BL.gather(1, (length_B1 - 1 - back).clamp(min=0))
        shifted_BL = text_BL.roll(back, dims=1)
        goes_on_BL = goes_on_BL & (shifted_BL == last_B1) & (place_L >= back)
        run_BL = run_BL + goes_on_BL
    run_BL = torch.where(place_L < length_B1 - 1, run_BL, 0)  # an earlier occurrence
    size_B1 = run_BL.amax(dim=1, keepdim=True)
    ends_BL = (run_BL == size_B1) & (size_B1 >= shortest)
    is_long_BL = ends_BL & (length_B1 - 1 - place_L >= num_B[:, None])
    latest_B = torch.where(is_long_BL, place_L, -1).amax(dim=1)
    earliest_B = torch.where(ends_BL, place_L, width).amin(dim=1)
    end_B = torch.where(latest_B >= 0, latest_B, earliest_B) + 1
    num_B = torch.minimum(num_B, (position_B - end_B).clamp(min=0))
    index_K = torch.arange(most, device=text_BL.device)
    token_BK = text_BL.gather(1, (end_B[:, None] + index_K).clamp(max=width - 1)).to(torch.int64)
    return token_BK.masked_fill(index_K >= num_B[:, None], -1), num_B


def _going_on(state: SlotState, slot_B: Tensor) -> Tensor:
    """The slots, and the spare in the place of those whose requests may have no more tokens: there
    may be no block for the last one, which nobody needs computed."""
    goes_on_B = state.length_S[slot_B] < state.limit_S[slot_B]
    return torch.where(goes_on_B, slot_B, len(state.length_S) - 1)


def _put(
    state: SlotState, slot_B: Tensor, first_B: Tensor, num_B: Tensor, token_BJ: Tensor
) -> None:
    """Write the first `num_B` tokens of each row; the others go to the end of the spare's."""
    spare, end = state.token_SL.shape[0] - 1, state.token_SL.shape[1] - 1
    index_J = torch.arange(token_BJ.shape[1], device=token_BJ.device)
    wanted_BJ = index_J < num_B[:, None]
    row_BJ = torch.where(wanted_BJ, slot_B[:, None], spare)
    at_BJ = torch.where(wanted_BJ, first_B[:, None] + index_J, end)
    state.token_SL[row_BJ, at_BJ] = token_BJ.to(torch.int32)


def _packed(
    state: SlotState,
    slot_B: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    want_B: Tensor,
    sizes: PackSizes,
    block_size: int,
) -> ForwardBatch:
    """Tokens start..start + count - 1 of each slot, with logits of the last `want_B`."""
    ends_B, device = count_B.cumsum(0), slot_B.device
    index_T = torch.arange(sizes.tokens, device=device)
    owner_T = torch.searchsorted(ends_B, index_T, right=True)
    spare = state.length_S.shape[0] - 1
    is_real_T = owner_T < len(slot_B)
    owner_T = owner_T.clamp(max=len(slot_B) - 1)
    slot_T = torch.where(is_real_T, slot_B[owner_T], spare)
    position_T = torch.where(is_real_T, index_T + (start_B + count_B - ends_B)[owner_T], 0)
    token_T = state.token_SL[slot_T, position_T].to(torch.int64)
    wanted_B = want_B.cumsum(0)
    index_N = torch.arange(sizes.rows, device=device)
    of_N = torch.searchsorted(wanted_B, index_N, right=True)
    is_real_N = of_N < len(slot_B)
    of_N = of_N.clamp(max=len(slot_B) - 1)
    row_N = torch.where(is_real_N, index_N + (ends_B - wanted_B)[of_N], 0)
    attention = AttentionBatch(
        pad(ends_B, (1, 0)), start_B + count_B, state.block_SL[slot_B], block_size,
        most_queries=sizes.queries, values_fit=True,
    )  # fmt: skip
    return ForwardBatch(token_T, position_T, row_N, attention)
