"""Processed logits written out, for tools and tests: sampling and verification never need them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.compiled import launch
from foretoken.ops.backends.triton.launch import Call, requests_of
from foretoken.ops.backends.triton.records import Batch
from foretoken.ops.backends.triton.rows import BLOCK, load_span
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.types import Rows


@triton.jit
def write_kernel(batch: Batch, out_NV):
    """Programs: (row, block of it)."""
    batch = batch  # see `records.py`
    rows, filtered = batch.rows, batch.scratch.filtered
    pid = tl.program_id(0)
    row, first = (pid // rows.NB).to(tl.int64), pid % rows.NB * BLOCK
    temperature = tl.load(batch.slots.temperature_S + tl.load(batch.requests.slot_B + row))
    x = load_span(rows, row, first, BLOCK, "evict_first")
    if filtered is not None:
        x = tl.where(x < tl.load(filtered.threshold_N + row), float("-inf"), x)
    x = x / tl.where(temperature == 0, 1.0, temperature)
    off = first + tl.arange(0, BLOCK)
    tl.store(out_NV + row * rows.V + off, x, mask=off < rows.V)


def process_logits(rows: Rows) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Returns new float32 [N, V].
    """
    logits_NV, params, slot_N, edits = rows
    call = Call(logits_NV, params, requests_of(*[slot_N] * 4), edits)
    out_NV = torch.empty(logits_NV.shape, dtype=torch.float32, device=logits_NV.device)
    if len(out_NV):
        if params.has_filters:
            reduce_rows(call)
        programs = len(out_NV) * call.batch.rows.NB
        launch(write_kernel, (programs,), call.batch, out_NV, num_warps=4)
    return out_NV
