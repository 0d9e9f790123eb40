"""Processing of raw logits: edits, temperature and filters, a few rows at a time.

Every filter keeps the logits at or above some value, ties included. So all filters of a row can be
combined into one threshold, in units of raw logits.

Shapes: N rows of the call, R rows processed at a time, V vocabulary, W the vocabulary padded to
blocks (to a multiple of 4 if smaller), D values of a digit, M entries, T likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.ops.types import Edits, Logprobs, Rows, Rule, SlotParams

BLOCK = 1024  # ids per block of the vocabulary
_CHUNK = 1 << 19  # logits processed at a time: 4 MB in float64, which fit in caches


class Distribution(NamedTuple):
    """The distributions of R rows.

    logit_RW:    float32, raw logits after edits, -inf for ids >= V
    weight_RW:   float64, exp((logit - max) / T) where no filter drops the token, else 0
    max_R:       float32, the largest logit; finite iff the row is finite
    threshold_R: float32, in units of raw logits; tokens with lower logits are dropped
    lse_R:       float64, log sum exp of logit / T over kept tokens; finite iff the row is finite
    """

    logit_RW: Tensor
    weight_RW: Tensor
    max_R: Tensor
    threshold_R: Tensor
    lse_R: Tensor


def temperatures(params: SlotParams, slot_R: Tensor) -> Tensor:
    """The temperatures of slots as float64, with 1 in place of 0."""
    temperature_R = params.temperature_S[slot_R].double()
    return temperature_R.masked_fill_(temperature_R == 0, 1.0)


def draws_flat(rows: Rows, index_R: Tensor) -> Tensor:
    """Whether rows are drawn flat (`sample.py`): top-k is active or the slot is under COUPLED."""
    slot_R = rows.slot_N[index_R]
    return _top_k_active(rows, slot_R) | (rows.params.rule_S[slot_R] == Rule.COUPLED)


def _top_k_active(rows: Rows, slot_R: Tensor) -> Tensor:
    top_k_R = rows.params.top_k_S[slot_R]
    return (top_k_R > 0) & (top_k_R < rows.logits_NV.shape[1])


def chunks(count: int, width: int) -> Iterator[slice]:
    """Slices that split `count` rows of `width` logits into parts of at most `_CHUNK` logits."""
    # A narrow row counts as 1024 logits, since the filters need a table for each row.
    step = max(1, _CHUNK // max(width, 1024))
    return (slice(start, start + step) for start in range(0, count, step))


def edit_rows(rows: Rows, index_R: Tensor) -> Tensor:
    """A float32 copy [R, W] of the rows' logits after their edits; columns >= V are -inf."""
    vocabulary = rows.logits_NV.shape[1]
    unit = BLOCK if vocabulary > BLOCK else 4  # noise is made for four ids at a time
    x_RV = rows.logits_NV.detach().index_select(0, index_R).float()
    if rows.edits is not None:
        _edit(x_RV, rows.edits, index_R)
    return pad(x_RV, (0, -vocabulary % unit), value=-torch.inf)


def _edit(x_RV: Tensor, edits: Edits, index_R: Tensor) -> None:
    """Apply the masks of rows `index_R`, then their entries, to x_RV in place."""
    if edits.mask_RW is not None and edits.mask_N is not None:
        mask_R = edits.mask_N[index_R]
        bit_32 = torch.arange(32, dtype=torch.int32, device=x_RV.device)
        bits = edits.mask_RW[mask_R.clamp(min=0)][:, :, None] >> bit_32
        kept_RV = (bits & 1).bool().flatten(1)[:, : x_RV.shape[1]] | (mask_R < 0)[:, None]
        x_RV.masked_fill_(~kept_RV, -torch.inf)
    start_R = edits.start_N1[index_R]
    count_R = edits.start_N1[index_R + 1] - start_R
    row_M = torch.arange(len(index_R), device=x_RV.device).repeat_interleave(count_R)
    # The index of each entry in `edits`: the first entry of its row, plus its place in the row.
    entry_M = torch.arange(len(row_M), device=x_RV.device)
    entry_M += (start_R - (count_R.cumsum(0) - count_R))[row_M]
    cell, repetition_M = (row_M, edits.token_M[entry_M]), edits.repetition_M[entry_M]
    value_M = x_RV[cell].double() + edits.bias_M[entry_M]
    value_M = torch.where(value_M > 0, value_M / repetition_M, value_M * repetition_M)
    x_RV[cell] = (value_M - edits.subtract_M[entry_M]).float()


def distribution(rows: Rows, index_R: Tensor) -> Distribution:
    """The distributions of a few rows: edits -> temperature -> min_p -> top_k -> top_p.

    Weights are float64: an operator may round a row differently in another batch, but an error of
    1e-16 changes no draw, and p / q of equal logits is nearer to 1 than any uniform.
    """
    x_RW, slot_R = edit_rows(rows, index_R), rows.slot_N[index_R]
    temperature_R, max_R = temperatures(rows.params, slot_R), x_RW.amax(dim=1)
    scale_R = math.log2(math.e) / temperature_R  # exp2 takes a third of the time of exp
    weight_RW = x_RW.double().sub_(max_R[:, None]).mul_(scale_R[:, None]).exp2_()
    threshold_R = torch.full_like(max_R, -torch.inf)
    if rows.params.has_filters:
        threshold_R = _filter(x_RW, weight_RW, rows, slot_R)
    lse_R = max_R / temperature_R + weight_RW.sum(dim=1).log_()
    return Distribution(x_RW, weight_RW, max_R, threshold_R, lse_R)


def _filter(x_RW: Tensor, weight_RW: Tensor, rows: Rows, slot_R: Tensor) -> Tensor:
    """The thresholds of rows; sets the weights of logits below the threshold to 0, in place."""
    params, samples_R = rows.params, rows.params.temperature_S[slot_R] > 0
    min_p_R, top_p_R = params.min_p_S[slot_R].double(), params.top_p_S[slot_R].double()
    min_p_on_R, top_p_on_R = (min_p_R > 0) & samples_R, (top_p_R < 1) & samples_R
    top_k_on_R = _top_k_active(rows, slot_R) & samples_R
    threshold_R = torch.full_like(samples_R, -torch.inf, dtype=torch.float32)
    if min_p_on_R.any():
        exact_R = x_RW.amax(dim=1) + temperatures(params, slot_R) * min_p_R.log()
        near_R = exact_R.float()  # rounded up below: then x >= near_R iff x >= exact_R
        above_R = near_R.nextafter(torch.full_like(near_R, torch.inf))
        near_R = torch.where(near_R < exact_R, above_R, near_R)
        threshold_R = torch.where(min_p_on_R, near_R, threshold_R)
        weight_RW *= x_RW >= threshold_R[:, None]
    if top_k_on_R.any():
        top_k_R1 = torch.where(top_k_on_R, params.top_k_S[slot_R], 1)[:, None]
        best_RK, id_RK = x_RW.topk(int(top_k_R1.max()), dim=1)
        kth_R = best_RK.gather(1, top_k_R1 - 1)[:, 0]
        threshold_R = torch.where(top_k_on_R, threshold_R.maximum(kth_R), threshold_R)
        weight_RW *= x_RW >= threshold_R[:, None]
        # The nucleus ends where the sum of weights is top_p of the total, or at the k-th logit.
        sum_RK = weight_RW.gather(1, id_RK).cumsum(dim=1)
        is_below_RK = sum_RK < (top_p_R * weight_RW.sum(dim=1))[:, None]
        place_R1 = is_below_RK.sum(dim=1, keepdim=True).clamp_(max=is_below_RK.shape[1] - 1)
        last_R = best_RK.gather(1, place_R1)[:, 0]
        threshold_R = torch.where(top_k_on_R & top_p_on_R, last_R, threshold_R)
        weight_RW *= x_RW >= threshold_R[:, None]
    only_top_p_R = top_p_on_R & ~top_k_on_R
    if only_top_p_R.any():
        least_R = top_p_R * weight_RW.sum(dim=1)
        last_R = threshold_R.maximum(_nucleus_end(as_ordered_int(x_RW), weight_RW, least_R))
        threshold_R = torch.where(only_top_p_R, last_R, threshold_R)
        weight_RW *= x_RW >= threshold_R[:, None]
    return threshold_R


def as_ordered_int(x: Tensor) -> Tensor:
    """Integers in the same order as the float32 `x`; 0.0 and -0.0 become equal."""
    bits = (x + 0.0).view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))


def _nucleus_end(key_RW: Tensor, weight_RW: Tensor, least_R: Tensor) -> Tensor:
    """The largest logit of each row such that the logits at or above it weigh at least `least_R`.

    A radix search by digits of 11, 11 and 10 bits of `as_ordered_int` keys, each digit among the
    keys that begin with the digits found before it. The search takes 2 ns per logit, a sort 35.
    """
    digit_RW = (key_RW >> 21).add_(1024)
    mass_RD = weight_RW.new_zeros(len(key_RW), 2048).scatter_add_(1, digit_RW.long(), weight_RW)
    digit_R, above_R = _digit_of_end(mass_RD, least_R, torch.zeros_like(least_R))
    row_M, id_M = (digit_RW == digit_R.int()[:, None]).nonzero(as_tuple=True)
    key_M, weight_M = key_RW[row_M, id_M], weight_RW[row_M, id_M]
    prefix_R = digit_R - 1024
    for shift, digits in ((10, 2048), (0, 1024)):
        digit_M = key_M >> shift & digits - 1
        mass = weight_M.new_zeros(len(least_R) * digits)
        mass.index_add_(0, row_M * digits + digit_M, weight_M)
        digit_R, above_R = _digit_of_end(mass.view(-1, digits), least_R, above_R)
        prefix_R = prefix_R * digits + digit_R
        weight_M = weight_M * (digit_M == digit_R[row_M])
    return (prefix_R ^ ((prefix_R >> 31) & 0x7FFFFFFF)).int().view(torch.float32)


def _digit_of_end(mass_RD: Tensor, least_R: Tensor, above_R: Tensor) -> tuple[Tensor, Tensor]:
    """The digit at which the sum of masses, from the largest digit on, is at least `least_R`; and
    the sum before this digit. Sums start with `above_R`, the mass of keys with a larger prefix."""
    sum_RD = above_R[:, None] + mass_RD.flip(1).cumsum(dim=1)
    is_below_RD = sum_RD < least_R[:, None]
    # Due to rounding, the masses of all digits may sum to less than `least_R`: then take digit 0.
    digit_R = (mass_RD.shape[1] - 1 - is_below_RD.sum(dim=1)).clamp_(min=0)
    return digit_R, torch.where(is_below_RD, sum_RD, above_R[:, None]).amax(dim=1)


def _process_rows(rows: Rows, index_R: Tensor) -> Tensor:
    """Processed logits: logit / T, -inf for dropped tokens, float32 [R, V]."""
    p, vocabulary = distribution(rows, index_R), rows.logits_NV.shape[1]
    temperature_R = temperatures(rows.params, rows.slot_N[index_R]).float()
    dropped_RW = p.logit_RW < p.threshold_R[:, None]
    x_RW = p.logit_RW.div_(temperature_R[:, None]).masked_fill_(dropped_RW, -torch.inf)
    return x_RW[:, :vocabulary]


def process_logits(rows: Rows) -> Tensor:
    """See `Backend.process_logits`. Returns new float32 [N, V]."""
    out_NV = torch.empty_like(rows.logits_NV, dtype=torch.float32)
    index_N = torch.arange(len(rows.slot_N), device=rows.slot_N.device)
    for part in chunks(*out_NV.shape):
        out_NV[part] = _process_rows(rows, index_N[part])
    return out_NV


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """See `Backend.logprobs`."""
    logits_NV = rows.logits_NV if isinstance(rows, Rows) else rows.detach()
    count, vocabulary = logits_NV.shape
    out = Logprobs.empty(count, num_top, token_N.device)
    index_N, id_V = (torch.arange(n, device=token_N.device) for n in (count, vocabulary))
    for part in chunks(count, vocabulary):
        if isinstance(rows, Rows):
            x_RV = _process_rows(rows, index_N[part])
        else:
            x_RV = logits_NV[part].float()
        lse_R1 = x_RV.double().logsumexp(dim=1, keepdim=True)
        given_R1 = x_RV.gather(1, token_N[part, None].long())
        # Of equal logits the lowest id gets the largest key; `topk` alone orders them arbitrarily.
        key_RV = (as_ordered_int(x_RV).long() << 32) - id_V
        top_RT = key_RV.topk(num_top, dim=1).indices
        out.logprob_N[part] = (given_R1 - lse_R1)[:, 0]
        out.rank_N[part] = (x_RV > given_R1).sum(dim=1) + 1
        out.top_logprob_NT[part] = x_RV.gather(1, top_RT) - lse_R1
        out.top_token_NT[part] = top_RT
    return out
