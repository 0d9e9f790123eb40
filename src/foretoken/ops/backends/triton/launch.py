"""What the host side of every op shares: records of pointers, scratch memory, launches.

Scratch comes from PyTorch's caching allocator, whose blocks a captured graph keeps: nothing is
allocated when it replays.

The kernels of an op are launched one upon the other (programmatic dependent launch): one may start
while the one before it ends, and waits for its results with `wait_for_writes`. Every program must
wait before it returns, or the kernel after next would not be kept from reading too early. What a
kernel reads before it waits was written before the op's scan began, and is not changed by the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from foretoken.errors import ConfigError
from foretoken.ops.backends.triton import records
from foretoken.ops.backends.triton.compiled import is_noted, launch
from foretoken.ops.backends.triton.records import Batch, RawRows, Requests, Scratch
from foretoken.ops.backends.triton.rows import BLOCK, CAPACITY, GROUP, edit_kernel
from foretoken.ops.types import DraftCache, Edits, Rule, SlotParams, Stream

BLOCKS_AT_ONCE = 4  # most blocks that a program loads in one span: what `begin_NJ` is padded by

Packed = tuple[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]]
"""Arguments with every tensor replaced by its address; and what else a kernel is compiled for: the
integers, and the addresses modulo 16, nothing if all are multiples of it."""

Packer = Callable[[tuple[Any, ...]], Packed]

_PACKERS: dict[tuple[Any, ...], Packer] = {}
"""Of batches, by `Call.variant`."""

_KERNELS: dict[tuple[Any, ...], tuple[Packer, dict[Any, Any]]] = {}
"""By kernel, constants, options and variant: a packer, and compiled kernels by what it finds."""


class Call:
    """One op on a batch, its scratch, and how its kernels are specialised.

    Attributes:
        width: most rows of a request.
        blocks_padded: a power of 2 from the blocks of a row on.
        flat: draws may be by flat noise though top-k is off.
        stream: of token noise; drafts: whether that is DRAFT_TOKEN.
        overlap: whether a kernel may start before the one before it has ended.
        variant: the device, dtypes, and what is None: where it is equal, so is the structure of
            what a kernel is given.
    """

    def __init__(
        self,
        logits_NV: Tensor,
        params: SlotParams | None,
        requests: Requests,
        edits: Edits | None,
        cache: DraftCache | None,
        fp64: bool,
        stream: Stream,
        width: int = 1,
        *variant: Any,
    ) -> None:
        """params: None for raw logits. variant: of whatever else the op's kernels are given."""
        check_device(logits_NV)
        rows, slots, flat, cut = rows_of(logits_NV, edits), None, False, False
        if params is not None:
            slots = records.Slots(
                params.key_S.contiguous(), params.temperature_S.contiguous(),
                params.top_k_S.contiguous(), params.top_p_S.contiguous(),
                params.min_p_S.contiguous(), params.rule_S.contiguous(),
            )  # fmt: skip
            flat, cut = Rule.COUPLED in params.rules, params.has_filters
        q, q_dtype = None, None
        if cache is not None:
            q_dtype, (_, drafts, vocabulary) = cache.logits_SKV.dtype, cache.logits_SKV.shape
            q = records.Q(cache.logits_SKV, cache.threshold_SK, cache.lse_SK, drafts, vocabulary)
        self.batch = Batch(rows, requests, slots, q, scratch_of(rows, flat, cut))
        self.width, self.blocks_padded = width, max(4, 1 << (rows.NB - 1).bit_length())
        self.flat, self.fp64 = flat, fp64
        self.stream, self.drafts = int(stream), stream == Stream.DRAFT_TOKEN
        self.overlap = overlaps(logits_NV.device)
        optional = rows.mask is None, rows.entries is None, slots is None, q_dtype, flat, cut
        self.variant = logits_NV.device, logits_NV.dtype, *optional, *variant
        self._packed: Packed | None = None

    def launch(
        self,
        kernel: Any,
        programs: int,
        given: tuple[Any, ...],
        *constants: Any,
        early: bool = True,
        **options: Any,
    ) -> None:
        """Launch a kernel with the batch, `given`, `constants` and, last of these, `overlap`.

        Binding about 60 arguments takes Triton 33 to 70 us of the host's time. Once compiled, a
        kernel whose integers, dtypes and alignments are the same is called directly, as Triton's
        own launcher would (3.6 and 3.7), but without hooks.

        Args:
            given: nested alike wherever kernel, constants and variant are the same.
            early: whether it may start before the kernel launched before it has ended.
        """
        if self._packed is None:
            pack = _PACKERS.get(self.variant)
            if pack is None:
                pack = _PACKERS[self.variant] = packer(self.batch)
            self._packed = pack(self.batch)
        constants = (*constants, self.overlap)
        dependent = {"launch_pdl": True} if self.overlap and early else {}
        if is_noted(kernel, (programs,), self.batch, *given, *constants, **options, **dependent):
            return
        key = (id(kernel), early, constants, self.variant, *options.values())
        found = _KERNELS.get(key)
        if found is None:
            found = _KERNELS[key] = packer(given), {}
        pack, kernels = found
        (batch, of_batch), (addresses, of_given) = self._packed, pack(given)
        compiled = kernels.get((of_batch, of_given))
        if compiled is not None:
            run, function, metadata = compiled
            stream = driver.active.get_current_stream(self.variant[0].index)
            run(
                programs, 1, 1, stream, function, metadata, None, None, None, batch, *addresses,
                *constants,
            )  # fmt: skip
            return
        compiled = kernel[(programs,)](self.batch, *given, *constants, **options, **dependent)
        if compiled is not None and not torch.version.hip:  # None: interpreted
            # AMD's kernels also depend on the size of each tensor
            kernels[of_batch, of_given] = compiled.run, compiled.function, compiled.packed_metadata


def packer(given: tuple[Any, ...]) -> Packer:
    """A function that packs arguments nested as these are, written out: a loop takes twice as long.

    Where there is None here, there must be None again.
    """
    tensors: list[str] = []
    integers: list[str] = []
    nones: list[str] = []

    def listed(names: Iterable[str]) -> str:
        return "(" + "".join(f"{name}, " for name in names) + ")"

    def pattern(value: Any) -> str:
        if isinstance(value, tuple):
            return listed(map(pattern, value))
        kind = (nones, "n") if value is None else (tensors, "t")
        names, first = (integers, "i") if isinstance(value, int) else kind
        names.append(f"{first}{len(names)}")
        return names[-1]

    nested = pattern(given)
    addresses = "".join(f"    {name} = {name}.data_ptr()\n" for name in tensors)
    odd = listed(f"{name} % 16" for name in tensors)
    if tensors:
        odd += f" if ({' | '.join(tensors)}) % 16 else ()"
    check = f"    if not ({' is '.join(nones)} is None): raise TypeError(given)\n" if nones else ""
    body = f"{addresses}    return {nested}, ({listed(integers)}, {odd})"
    scope: dict[str, Any] = {}
    exec(f"def pack(given):\n    {nested} = given\n{check}{body}", scope)
    pack: Packer = scope["pack"]
    return pack


def check_device(tensor: Tensor, name: str = "logits") -> None:
    """Raise `ConfigError` unless Triton can run on this tensor: on a GPU, or interpreted."""
    if tensor.is_cuda:
        if tensor.device.index == torch.cuda.current_device():
            return
        wanted = f"cuda:{torch.cuda.current_device()}, the current device"
        remedy = f"Call under `torch.cuda.device({name}.device)`."
    elif triton.knobs.runtime.interpret:
        return
    else:
        wanted, remedy = "a GPU's", "Without one, choose the backend `native` or `torch`."
    raise ConfigError(f"{name}.device", tensor.device, wanted, remedy)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one that it depends on has ended: NVIDIA since 9.0."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def at_most_registers(count: int) -> dict[str, Any]:
    """The launch option that limits registers per thread; AMD's compiler has none."""
    return {} if torch.version.hip else {"maxnreg": count}


def rows_of(logits_NV: Tensor, edits: Edits | None) -> RawRows:
    """The logits, and what is edited on load; launches the kernel that prepares entries."""
    number, vocabulary = logits_NV.shape
    blocks, groups = -(-vocabulary // BLOCK.value), -(-vocabulary // GROUP.value)
    mask = None
    if edits is not None and edits.mask_RW is not None and edits.mask_N is not None:
        words = edits.mask_RW.shape[1]
        mask = records.Mask(edits.mask_RW.contiguous(), edits.mask_N.contiguous(), words)
    rows = RawRows(logits_NV, logits_NV.stride(0), vocabulary, blocks, groups, mask, None)
    if edits is None or not edits.token_M.shape[0]:
        return rows
    columns, bias_M = blocks + BLOCKS_AT_ONCE, edits.bias_M.contiguous()
    begin_NJ = torch.empty(number * columns, dtype=torch.int32, device=logits_NV.device)
    entries = records.Entries(
        edits.token_M.contiguous(), torch.empty_like(bias_M), begin_NJ, columns
    )
    launch(
        edit_kernel, (number,),
        rows, entries, edits.start_N1.contiguous(), bias_M, edits.repetition_M.contiguous(),
        edits.subtract_M.contiguous(), 1 << (columns - 1).bit_length(), num_warps=4,
    )  # fmt: skip
    return rows._replace(entries=entries)


def requests_of(*tensors: Tensor) -> Requests:
    """The fields of `Requests`, each made contiguous."""
    return Requests(*map(Tensor.contiguous, tensors))


def scratch_of(rows: RawRows, flat: bool, cut: bool) -> Scratch:
    """Memory for the kernels of an op. flat: draws may be by flat noise; cut: there are filters."""
    number, device = len(rows.logits_NV), rows.logits_NV.device
    f32, i32 = torch.float32, torch.int32
    mass = torch.empty(number * rows.NB, dtype=f32, device=device)
    lse = torch.empty(number, dtype=f32, device=device)
    best = torch.empty_like(mass) if flat or cut else None
    if not cut:
        return Scratch(mass, lse, best, None)
    list_x = torch.empty(number * CAPACITY.value, dtype=f32, device=device)
    filtered = records.Filtered(
        threshold_N=torch.empty_like(lse),
        count_N=torch.empty_like(lse, dtype=i32),
        list_id_NC=torch.empty_like(list_x, dtype=i32),
        list_x_NC=list_x,
        queue_N1=torch.empty(number + 1, dtype=i32, device=device),
        group_top_NG=torch.empty(number * rows.NG, dtype=f32, device=device),
    )
    return Scratch(mass, lse, best, filtered)
