"""Bookkeeping of a step over its slots, in stock operators; see `foretoken.ops.steps.Steps`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.errors import IntegrityError
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, Round, SlotState, StepTokens
from foretoken.ops.types import AttentionBatch, Verdict


class Steps:
    """`ops.steps.Steps` on any device; the methods of other backends must give equal results."""

    def __init__(self, state: SlotState) -> None:
        self._state = state

    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        length_B = self._state.length_S[slot_B]
        room_B = self._state.limit_S[slot_B] - length_B - 1
        return torch.minimum(most_B, room_B).clamp(min=0), length_B

    def write_drafts(
        self, requests: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        if num_B.device.type == "cpu":
            fits = num_B.shape == requests.num_B.shape and not (num_B > requests.num_B).any()
            if not fits:
                requested = requests.num_B.tolist()
                raise IntegrityError(f"{num_B.tolist()} drafts, but at most {requested} requested")
        self._store(requests.slot_B, requests.position_B, num_B, token_BK.clamp(0, last_id))

    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        num_rows_B = tokens.num_D + 1
        if tokens.decider_B is not None:
            # Index -1 reads the 0 at the end.
            num_rows_B = pad(num_rows_B, (0, 1))[tokens.decider_B]
        count_B = tokens.num_tokens_B + (num_rows_B - 1).clamp(min=0)
        slot_B = self._spare_if_done(tokens.slot_B)
        start_B = self._state.computed_S[slot_B]
        return self._pack_spans(slot_B, start_B, count_B, num_rows_B, sizes, block_size)

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        slot_B, (token_BK1, accepted_B, finite_B) = tokens.slot_B, verdict
        decides_B = torch.ones_like(finite_B)
        if (decider_B := tokens.decider_B) is not None:
            # Rows of the verdict by request: zeros where the request does not decide (index -1).
            token_BK1, decides_B = pad(token_BK1, (0, 0, 0, 1))[decider_B], decider_B >= 0
            accepted_B = pad(accepted_B, (0, 1))[decider_B]
            finite_B = pad(finite_B, (0, 1))[decider_B]
        state = self._state
        length_B, limit_B = state.length_S[slot_B], state.limit_S[slot_B]
        computed_B, continues_B = state.computed_S[slot_B], length_B < limit_B
        end_B = length_B + (accepted_B + finite_B) * continues_B
        self._store(slot_B, length_B, end_B - length_B, token_BK1)
        state.computed_S[slot_B] = computed_B + (tokens.num_tokens_B + accepted_B) * continues_B
        state.length_S[slot_B] = end_B
        state.limit_S[slot_B] = torch.where(continues_B & decides_B & ~finite_B, end_B, limit_B)
        columns = (tokens.num_D, verdict.n_accept_B, verdict.finite_B.to(torch.int64))
        token_DK1 = verdict.token_BK1.to(torch.int64)
        outcome = torch.cat([torch.stack(columns, dim=1), token_DK1], dim=1)
        return torch.cat([computed_B, outcome.flatten()])

    def begin_round(
        self, requests: DraftRequests, known: int, max_len: int, block_size: int
    ) -> Round:
        state, position_B, most = self._state, requests.position_B, requests.most
        count, columns = len(position_B), state.block_SL.shape[1]
        spare, device = len(state.length_S) - 1, position_B.device
        slot_B = self._spare_if_done(requests.slot_B)
        fits_B = (position_B <= max_len) & (slot_B < spare)
        slot_B, length_B = torch.where(fits_B, slot_B, spare), torch.where(fits_B, position_B, 1)
        num_B = torch.minimum(requests.num_B, (max_len + 1 - position_B).clamp(min=0))
        count_B = length_B.clamp(max=known)
        num_rows_B, sizes = torch.ones_like(count_B), PackSizes(known * count, count, known, most)
        start_B = length_B - count_B
        first = self._pack_spans(slot_B, start_B, count_B, num_rows_B, sizes, block_size)
        block_BL = first.attention.block_BL
        used_B = (length_B + num_B + block_size - 1) // block_size
        is_own_BL = torch.arange(block_BL.shape[1], device=device) < used_B[:, None]
        first.attention.block_BL = torch.where(is_own_BL, block_BL, state.block_SL[spare, 0])
        index_K1 = torch.arange(most, device=device)[:, None]
        length_KB = (length_B + index_K1).clamp(max=min(max_len, columns * block_size))
        index_KB = index_K1.expand(-1, count).contiguous()
        index_B1 = torch.arange(count + 1, device=device)
        return Round(num_B, first, index_B1, length_KB - 1, length_KB, index_KB)

    def shift(
        self, slot_B: Tensor, batch: AttentionBatch, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        token_SL, length_B = self._state.token_SL, batch.length_B
        start_B, end_B = batch.query_start_B1[:-1], batch.query_start_B1[1:]
        index_T = torch.arange(num_tokens, device=end_B.device)
        request_T = torch.searchsorted(end_B, index_T, right=True).clamp_(max=len(end_B) - 1)
        next_T = (index_T + (length_B - end_B + 1)[request_T]).clamp_(max=token_SL.shape[1] - 1)
        token_T = token_SL[slot_B[request_T], next_T].long().clamp_(min=0)
        # Positions: of the first token of the pass, and of its last token with a known next token.
        first_B = length_B - (end_B - start_B)
        last_B = torch.minimum(length_B - 1, self._state.length_S[slot_B] - 2)
        return token_T, start_B + (last_B - first_B).clamp_(min=0)

    def join_drafts(self, drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
        index_K = torch.arange(len(drafts), device=num_B.device)
        return torch.stack(list(drafts), dim=1).masked_fill(index_K >= num_B[:, None], -1)

    def look_up(
        self, requests: DraftRequests, shortest: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        # run_BL: how many tokens that end at each place equal the last tokens of the text.
        num_B, position_B = requests.num_B, requests.position_B
        text_BL, length_B1 = self._state.token_SL[requests.slot_B], position_B[:, None]
        width = text_BL.shape[1]
        place_L = torch.arange(width, device=text_BL.device)
        run_BL, matches_BL = torch.zeros_like(text_BL), torch.ones_like(text_BL, dtype=torch.bool)
        for back in range(longest):
            last_B1 = text_BL.gather(1, (length_B1 - 1 - back).clamp(min=0))
            shifted_BL = text_BL.roll(back, dims=1)
            matches_BL = matches_BL & (shifted_BL == last_B1) & (place_L >= back)
            run_BL = run_BL + matches_BL
        run_BL = torch.where(place_L < length_B1 - 1, run_BL, 0)  # only earlier occurrences
        size_B1 = run_BL.amax(dim=1, keepdim=True)
        is_end_BL = (run_BL == size_B1) & (size_B1 >= shortest)  # the longest match ends here
        # The latest match that enough tokens follow, else the earliest match.
        has_all_BL = is_end_BL & (length_B1 - 1 - place_L >= num_B[:, None])
        latest_B = torch.where(has_all_BL, place_L, -1).amax(dim=1)
        earliest_B = torch.where(is_end_BL, place_L, width).amin(dim=1)
        end_B = torch.where(latest_B >= 0, latest_B, earliest_B) + 1
        num_B = torch.minimum(num_B, (position_B - end_B).clamp(min=0))
        index_K = torch.arange(requests.most, device=text_BL.device)
        token_BK = text_BL.gather(1, (end_B[:, None] + index_K).clamp(max=width - 1)).long()
        return token_BK.masked_fill(index_K >= num_B[:, None], -1), num_B

    def _spare_if_done(self, slot_B: Tensor) -> Tensor:
        """The slots, with the spare slot in place of each that may have no more tokens: the last
        token of such a slot need not be computed, and may have no block."""
        continues_B = self._state.length_S[slot_B] < self._state.limit_S[slot_B]
        return torch.where(continues_B, slot_B, len(self._state.length_S) - 1)

    def _store(self, slot_B: Tensor, first_B: Tensor, num_B: Tensor, token_BJ: Tensor) -> None:
        """Write the first `num_B` tokens of each row to positions first_B, first_B + 1, ... of its
        slot, and the other tokens to a cell that is never read, the last one of the spare slot."""
        spare, end = self._state.token_SL.shape[0] - 1, self._state.token_SL.shape[1] - 1
        index_J = torch.arange(token_BJ.shape[1], device=token_BJ.device)
        is_written_BJ = index_J < num_B[:, None]
        row_BJ = torch.where(is_written_BJ, slot_B[:, None], spare)
        place_BJ = torch.where(is_written_BJ, first_B[:, None] + index_J, end)
        self._state.token_SL[row_BJ, place_BJ] = token_BJ.to(torch.int32)

    def _pack_spans(
        self, slot_B: Tensor, start_B: Tensor, count_B: Tensor, num_rows_B: Tensor,
        sizes: PackSizes, block_size: int,
    ) -> ForwardBatch:  # fmt: skip
        """Pack tokens start..start + count - 1 of slots, with logits of the last `num_rows_B`."""
        (token_SL, block_SL, *_), (tokens, rows, queries, ahead) = self._state, sizes
        ends_B, row_ends_B, device = count_B.cumsum(0), num_rows_B.cumsum(0), slot_B.device
        length_B, columns = start_B + count_B, block_SL.shape[1]
        if device.type == "cpu":
            totals = torch.stack([ends_B[-1], row_ends_B[-1], length_B.max()])
            tokens, rows, longest = totals.tolist()
            room = min(token_SL.shape[1], columns * block_size)
            if longest > room:
                raise IntegrityError(f"{longest} tokens in a slot that has room for {room}")
            columns = min(columns, -(-(longest + ahead) // block_size))
        index_T = torch.arange(tokens, device=device)
        request_T = torch.searchsorted(ends_B, index_T, right=True)
        spare, last = len(token_SL) - 1, len(slot_B) - 1
        is_real_T, request_T = request_T <= last, request_T.clamp(max=last)
        slot_T = torch.where(is_real_T, slot_B[request_T], spare)
        position_T = torch.where(is_real_T, index_T + (length_B - ends_B)[request_T], 0)
        token_T = token_SL[slot_T, position_T].to(torch.int64)
        if device.type == "cpu" and (token_T < 0).any():
            raise IntegrityError("a token to compute was never written")
        index_N = torch.arange(rows, device=device)
        request_N = torch.searchsorted(row_ends_B, index_N, right=True)
        is_real_N, request_N = request_N <= last, request_N.clamp(max=last)
        row_N = torch.where(is_real_N, index_N + (ends_B - row_ends_B)[request_N], 0)
        attention = AttentionBatch(
            pad(ends_B, (1, 0)), length_B, block_SL[slot_B, :columns], block_size,
            most_queries=queries, values_fit=True,
        )  # fmt: skip
        return ForwardBatch(token_T, position_T, row_N, attention)
