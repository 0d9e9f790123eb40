"""Processed logits written out, for tools and tests: sampling and verification never need them.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.launch import Call
from foretoken.ops.backends.triton.rows import BLOCK, load_span
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.types import Rows, Stream


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


def process_logits(asked: Rows) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Returns new float32 [N, V].
    """
    logits_NV, params, slot_N, edits = asked
    where = (slot_N, slot_N, slot_N, slot_N)
    call = Call.of(
        logits_NV, params, where, edits, False, (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
    )
    rows, sizes = logits_NV.shape[0], call.sizes
    out_NV = torch.empty(logits_NV.shape, dtype=torch.float32, device=logits_NV.device)
    if not rows:
        return out_NV
    if call.filters:
        reduce_rows(call)
    _write_kernel[(rows * sizes.blocks,)](
        logits_NV, call.stride, call.slot_B, call.state, call.edits, call.scratch.found,
        out_NV, sizes.vocabulary, sizes.blocks, call.masks, call.entries, call.filters, num_warps=4,
    )  # fmt: skip
    return out_NV
