"""The host side that all ops share: the arguments of an op's kernels, and overlapping launches.

The kernels of an op overlap (programmatic dependent launch): a kernel can start while the previous
one still runs, and waits for the results of that kernel with `wait_for_writes`. Every program must
wait before it returns, or else the kernel after next could read too early. Before the wait a kernel
reads only data that were written before the op's scan began and that the op does not change.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.backends.triton import records
from foretoken.ops.backends.triton.compiled import Shared, launch
from foretoken.ops.backends.triton.records import Batch, RawRows, Requests, Scratch
from foretoken.ops.backends.triton.rows import BLOCK, CAPACITY, GROUP, edit_kernel
from foretoken.ops.types import DraftCache, Edits, Rule, SlotParams, Stream

BLOCKS_PER_LOAD = 4  # upper bound; `begin_NJ` has so many spare columns


class Call:
    """One call of an op: the arguments of its kernels, and constants that these are compiled for.

    width, blocks_padded: upper bound of a request's rows; a row's blocks, padded to a power of 2
    flat: whether slots without top-k can draw by flat noise
    stream, drafts: the stream of token noise; whether that is DRAFT_TOKEN
    """

    def __init__(
        self,
        logits_NV: Tensor,
        params: SlotParams | None,
        requests: Requests,
        edits: Edits | None,
        cache: DraftCache | None = None,
        fp64: bool = False,
        stream: Stream = Stream.TARGET_TOKEN,
        width: int = 1,
    ) -> None:
        check_device(logits_NV)
        rows, slots, flat, filtering = rows_of(logits_NV, edits), None, False, False
        if params is not None:
            slots = records.Slots(*map(Tensor.contiguous, params.columns))
            flat, filtering = Rule.COUPLED in params.rules, params.has_filters
        q = None
        if cache is not None:
            _, K, V = cache.logits_SKV.shape
            q = records.Q(cache.logits_SKV, cache.threshold_SK, cache.lse_SK, K, V)
        self.batch = Batch(rows, requests, slots, q, scratch_of(rows, flat, filtering))
        self._shared, self._overlap = Shared(self.batch), overlaps(logits_NV.device)
        self.width, self.blocks_padded = width, max(4, 1 << (rows.NB - 1).bit_length())
        self.flat, self.fp64 = flat, fp64
        self.stream, self.drafts = int(stream), stream == Stream.DRAFT_TOKEN

    def launch(
        self, kernel: Any, programs: int, *args: Any, early: bool = True, **options: Any
    ) -> None:
        """Launch a kernel with the batch, `args` and, last, OVERLAP.
        early: whether this kernel can start while the previous one still runs."""
        options |= dependent(self._overlap and early)
        launch(kernel, (programs,), self._shared, *args, self._overlap, **options)


def check_device(tensor: Tensor, name: str = "logits") -> None:
    """Raise `ConfigError` unless the tensor is on the current GPU, or Triton is interpreted."""
    if tensor.is_cuda:
        if tensor.device.index == torch.cuda.current_device():
            return
        expected = f"cuda:{torch.cuda.current_device()}, the current device"
        remedy = f"Call the op inside `with torch.cuda.device({name}.device):`."
    elif triton.knobs.runtime.interpret:
        return
    else:
        expected, remedy = "a GPU", "Without a GPU, choose the backend `native` or `torch`."
    raise ConfigError(f"{name}.device", tensor.device, expected, remedy)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels can overlap: on NVIDIA GPUs of compute capability 9.0 or higher."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(overlap: bool) -> dict[str, Any]:
    """The launch option that lets a kernel start while the previous one runs."""
    return {"launch_pdl": True} if overlap else {}


def at_most_registers(count: int) -> dict[str, Any]:
    """The launch option that limits registers per thread; AMD's compiler lacks this option."""
    return {} if torch.version.hip else {"maxnreg": count}


def rows_of(logits_NV: Tensor, edits: Edits | None) -> RawRows:
    """The `RawRows` of logits and edits; launches `edit_kernel` if there are entries."""
    num_rows, vocabulary = logits_NV.shape
    blocks, groups = -(-vocabulary // BLOCK.value), -(-vocabulary // GROUP.value)
    mask = None
    if edits is not None and edits.mask_RW is not None and edits.mask_N is not None:
        words = edits.mask_RW.shape[1]
        mask = records.Mask(edits.mask_RW.contiguous(), edits.mask_N.contiguous(), words)
    rows = RawRows(logits_NV, logits_NV.stride(0), vocabulary, blocks, groups, mask, None)
    if edits is None or not edits.token_M.shape[0]:
        return rows
    columns, bias_M = blocks + BLOCKS_PER_LOAD, edits.bias_M.contiguous()
    begin_NJ = torch.empty(num_rows * columns, dtype=torch.int32, device=logits_NV.device)
    token_M, value_M = edits.token_M.contiguous(), torch.empty_like(bias_M)
    entries = records.Entries(token_M, value_M, begin_NJ, columns)
    launch(
        edit_kernel, (num_rows,),
        rows, entries, edits.start_N1.contiguous(), bias_M, edits.repetition_M.contiguous(),
        edits.subtract_M.contiguous(), 1 << (columns - 1).bit_length(), num_warps=4,
    )  # fmt: skip
    return rows._replace(entries=entries)


def requests_of(*tensors: Tensor) -> Requests:
    """The fields of `Requests`, each made contiguous."""
    return Requests(*map(Tensor.contiguous, tensors))


def scratch_of(rows: RawRows, flat: bool, filtering: bool) -> Scratch:
    """Memory for the kernels of an op. flat: as in `Call`; filtering: whether a slot has filters.
    A captured graph keeps this memory, so its replays allocate nothing."""
    num_rows, device = len(rows.logits_NV), rows.logits_NV.device
    f32, i32 = torch.float32, torch.int32
    mass = torch.empty(num_rows * rows.NB, dtype=f32, device=device)
    lse = torch.empty(num_rows, dtype=f32, device=device)
    best = torch.empty_like(mass) if flat or filtering else None
    if not filtering:
        return Scratch(mass, lse, best, None)
    list_x = torch.empty(num_rows * CAPACITY.value, dtype=f32, device=device)
    threshold, count = torch.empty_like(lse), torch.empty_like(lse, dtype=i32)
    list_id = torch.empty_like(list_x, dtype=i32)
    queue = torch.empty(num_rows + 1, dtype=i32, device=device)
    group_top = torch.empty(num_rows * rows.NG, dtype=f32, device=device)
    filtered = records.Filtered(threshold, count, list_id, list_x, queue, group_top)
    return Scratch(mass, lse, best, filtered)
