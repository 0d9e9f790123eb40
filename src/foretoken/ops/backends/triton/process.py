"""Processed logits written out, for tools and tests: sampling and verification never need them.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.launch import Scratch, Sizes, edits_tuple, params_tuple
from foretoken.ops.backends.triton.rows import BLOCK, load_span
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.checks import check_rows
from foretoken.ops.types import Edits, SlotParams


@triton.jit
def _write_kernel(
    logits, stride, slot_ptr, state, edits, found, out, V, NB, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """A program per block of a row."""
    pid = tl.program_id(0)
    row, first = (pid // NB).to(tl.int64), pid % NB * BLOCK
    temperature = tl.load(state[1] + tl.load(slot_ptr + row))
    x = load_span(logits, stride, row, first, V, edits, BLOCK, MASKS, ENTRIES, "evict_first")
    if FILTERS:
        x = tl.where(x < tl.load(found[0] + row), float("-inf"), x)
    x = x / tl.where(temperature == 0, 1.0, temperature)
    off = first + tl.arange(0, BLOCK)
    tl.store(out + row * V + off, x, mask=off < V)


def process_logits(
    logits_NV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None
) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Returns new float32 [N, V].
    """
    check_rows(logits_NV, slot_N, params)
    sizes = Sizes.of(logits_NV)
    out_NV = torch.empty(logits_NV.shape, dtype=torch.float32, device=logits_NV.device)
    if not sizes.rows:
        return out_NV
    logits_NV, slot_N = logits_NV.contiguous(), slot_N.contiguous()
    pointers, packed = params_tuple(params), edits_tuple(edits, sizes, slot_N)
    filters = params.has_filters
    scratch = Scratch.of(sizes, logits_NV.device, filters, False)
    if filters:
        reduce_rows(
            logits_NV, None, slot_N, slot_N, slot_N, pointers, packed, scratch, sizes, 1, True,
            False, False, (0, 1, False), None,
        )  # fmt: skip
    _write_kernel[(sizes.rows * sizes.blocks,)](
        logits_NV, logits_NV.stride(0), slot_N, pointers, packed[0], scratch.found, out_NV,
        sizes.vocabulary, sizes.blocks, packed[1], packed[2], filters, num_warps=4,
    )  # fmt: skip
    return out_NV
