"""What the host side of every op shares: tuples of pointers, scratch memory, launches.

Scratch comes from PyTorch's caching allocator, whose blocks a captured graph keeps: nothing is
allocated when it replays.

The kernels of an op are launched one upon the other (programmatic dependent launch): one may start
while the one before it ends, and waits for its results with `wait_for_writes`. Every program must
wait before it returns, or the kernel after next would not be kept from reading too early. What a
kernel reads before it waits was written before the op's scan began, and is not changed by the op.

Shapes: N rows, V vocabulary, NB blocks, NG groups, C list entries, B requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from foretoken.errors import ConfigError
from foretoken.ops.backends.triton.rows import BLOCK, CAPACITY, GROUP, edit_kernel
from foretoken.ops.types import Edits, Rule, SlotParams, Stream

BLOCKS_AT_ONCE = 4  # most blocks that a program loads in one span: what `begin_NJ` is padded by


class Sizes(NamedTuple):
    """Of rows of V logits: NB blocks and NG groups each, and a power of 2 above the blocks."""

    vocabulary: int
    blocks: int
    groups: int
    blocks_padded: int

    @classmethod
    @cache
    def of(cls, vocabulary: int) -> Sizes:
        blocks = -(-vocabulary // BLOCK.value)
        groups = -(-vocabulary // GROUP.value)
        padded = max(4, 1 << (blocks - 1).bit_length())
        return cls(vocabulary, blocks, groups, padded)


class Scratch(NamedTuple):
    """Of one call: `out` = (mass_NJ, best_NJ, gmax_NG), `found` as in `filters.py`.

    Without filters nothing of `found` but its second is used, and no gmax.
    """

    out: tuple[Tensor, ...]
    found: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, rows: int, sizes: Sizes, device: torch.device, filters: bool, flat: bool
    ) -> Scratch:
        f32, i32 = torch.float32, torch.int32
        mass = torch.empty(rows * sizes.blocks, dtype=f32, device=device)
        best = torch.empty_like(mass) if filters or flat else mass
        lse = torch.empty(rows, dtype=f32, device=device)
        if not filters:
            return cls((mass, best), (lse, lse))
        gmax = torch.empty(rows * sizes.groups, dtype=f32, device=device)
        list_x = torch.empty(rows * CAPACITY.value, dtype=f32, device=device)
        list_id = torch.empty_like(list_x, dtype=i32)
        queue = torch.empty(rows + 1, dtype=i32, device=device)
        threshold, count = torch.empty_like(lse), torch.empty_like(lse, dtype=i32)
        return cls((mass, best, gmax), (threshold, lse, count, list_id, list_x, queue))


# AMD's compiler knows no `maxnreg`: there the choice is its own.
def at_most_registers(count: int) -> dict[str, Any]:
    """The launch option that limits registers per thread, where the compiler takes it."""
    return {} if torch.version.hip else {"maxnreg": count}


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one that it depends on has ended: NVIDIA since 9.0."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def packer(given: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function of arguments nested as these are, written out: a loop takes twice its time.

    It returns (arguments with every tensor replaced by its address, integers, and the addresses
    modulo 16, nothing if all are multiples of it).
    """
    tensors: list[str] = []
    integers: list[str] = []

    def listed(names: Iterable[str]) -> str:
        return "(" + "".join(f"{name}, " for name in names) + ")"

    def pattern(value: Any) -> str:
        if isinstance(value, tuple):
            return listed(map(pattern, value))
        names, first = (integers, "i") if isinstance(value, int) else (tensors, "t")
        names.append(f"{first}{len(names)}")
        return names[-1]

    nested = pattern(given)
    addresses = "".join(f"    {name} = {name}.data_ptr()\n" for name in tensors)
    odd = listed(f"{name} % 16" for name in tensors)
    found = f"{nested}, {listed(integers)}, {odd} if ({' | '.join(tensors)}) % 16 else ()"
    scope: dict[str, Any] = {}
    exec(f"def pack(given):\n    {nested} = given\n{addresses}    return {found}", scope)
    pack: Callable[[tuple[Any, ...]], tuple[Any, ...]] = scope["pack"]
    return pack


_PLANS: dict[tuple[Any, ...], tuple[Callable[..., tuple[Any, ...]], dict[Any, Any]]] = {}
"""By kernel, constants, options and dtypes: a packer, and kernels by what else it finds."""


def check_device(logits: Tensor) -> None:
    """Raise `ConfigError` unless Triton can run on these logits: on a GPU, or interpreted."""
    if logits.is_cuda:
        if logits.device.index == torch.cuda.current_device():
            return
        raise ConfigError(
            "logits.device",
            logits.device,
            f"cuda:{torch.cuda.current_device()}, the current device",
            "Call under `torch.cuda.device(logits.device)`.",
        )
    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            "logits.device",
            logits.device,
            "a GPU's",
            "Without one, choose the backend `native` or `torch`.",
        )


def state_tuple(params: SlotParams) -> tuple[Tensor, ...]:
    """The pointers of `rows.py: state`."""
    return (
        params.key_S.contiguous(),
        params.temperature_S.contiguous(),
        params.top_k_S.contiguous(),
        params.top_p_S.contiguous(),
        params.min_p_S.contiguous(),
        params.rule_S.contiguous(),
    )


def edits_tuple(
    edits: Edits | None, logits_NV: Tensor, sizes: Sizes, unused: Tensor
) -> tuple[tuple[Any, ...], bool, bool]:
    """(the pointers of `rows.py: edits`, whether there are masks, whether there are entries)."""
    masks = edits is not None and edits.mask_RW is not None
    entries = edits is not None and edits.token_M.shape[0] > 0
    if edits is None or not (masks or entries):  # one structure for one pair of flags: see `launch`
        return (unused,), False, False
    mask: tuple[Any, ...] = (unused, unused, 0)
    if edits.mask_RW is not None and edits.mask_N is not None:
        mask = edits.mask_RW.contiguous(), edits.mask_N.contiguous(), edits.mask_RW.shape[1]
    if not entries:
        return (*mask, unused, unused, unused, 0), masks, False
    columns = sizes.blocks + BLOCKS_AT_ONCE
    rows, stride = logits_NV.shape[0], logits_NV.stride(0)
    begin = torch.empty(rows * columns, dtype=torch.int32, device=logits_NV.device)
    token_M, bias_M = edits.token_M.contiguous(), edits.bias_M.contiguous()
    pointers = (*mask, token_M, torch.empty_like(bias_M), begin, columns)
    padded = 1 << (columns - 1).bit_length()
    edit_kernel[(rows,)](
        logits_NV, stride, edits.start_N1.contiguous(), bias_M, edits.repetition_M.contiguous(),
        edits.subtract_M.contiguous(), pointers, masks, padded, num_warps=4,
    )  # fmt: skip
    return pointers, masks, True


@dataclass(slots=True)
class Call:
    """One op's rows, and how its kernels are specialised.

    B requests of up to `width` rows each; `num_B` says how many drafts a request has (any tensor
    if width is 1). noise: (token stream, block stream), and whether the rows are drafts, for flat
    draws of dense rows at draft index `index_B`. dtypes: what may vary, and the device.
    """

    logits_NV: Tensor
    stride: int
    num_B: Tensor
    slot_B: Tensor
    position_B: Tensor
    index_B: Tensor
    width: int
    sizes: Sizes
    scratch: Scratch
    state: tuple[Tensor, ...]
    edits: tuple[Any, ...]
    masks: bool
    entries: bool
    filters: bool
    flat: bool
    fp64: bool
    noise: tuple[int, int]
    drafts: bool
    overlap: bool
    dtypes: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        logits_NV: Tensor,
        params: SlotParams | None,
        where: tuple[Tensor, Tensor, Tensor, Tensor],
        edits: Edits | None,
        fp64: bool,
        noise: tuple[Stream, Stream],
        width: int = 1,
        dtypes: tuple[torch.dtype | None, ...] = (),
    ) -> Call:
        """Allocates the scratch.

        Args:
            params: None for raw logits.
            where: num_B, slot_B, position_B, index_B.
            dtypes: of all arguments that may have several, but for the logits'.
        """
        check_device(logits_NV)
        device, (rows, vocabulary) = logits_NV.device, logits_NV.shape
        sizes = Sizes.of(vocabulary)
        num_B, slot_B, position_B, index_B = where
        slot_B = slot_B.contiguous()
        filters, flat = False, False
        state: tuple[Tensor, ...] = (slot_B,)
        if params is not None:
            filters, flat = params.has_filters, Rule.COUPLED in params.rules
            state = state_tuple(params)
        pointers, masks, entries = edits_tuple(edits, logits_NV, sizes, slot_B)
        return cls(
            logits_NV,
            logits_NV.stride(0),
            num_B.contiguous(),
            slot_B,
            position_B.contiguous(),
            index_B.contiguous(),
            width,
            sizes,
            Scratch.of(rows, sizes, device, filters, flat),
            state,
            pointers,
            masks,
            entries,
            filters,
            flat,
            fp64,
            (int(noise[0]), int(noise[1])),
            noise[0] == Stream.DRAFT_TOKEN,
            overlaps(device),
            (device, logits_NV.dtype, *dtypes),
        )

    def launch(
        self,
        kernel: Any,
        programs: int,
        given: tuple[Any, ...],
        *constants: Any,
        early: bool = True,
        **options: Any,
    ) -> None:
        """Launch a kernel with `given`, then `constants`, the last of which is `overlap`.

        Binding about 60 arguments takes Triton 33 to 70 us of the host's time. Once compiled, a
        kernel whose integers, dtypes and alignments are the same is called directly, as Triton's
        own launcher would (3.6 and 3.7), but without hooks.

        Args:
            given: nested alike wherever kernel and constants are the same.
            early: whether it may start before the kernel launched before it has ended.
        """
        constants = (*constants, self.overlap)
        key = (id(kernel), early, constants, self.dtypes, *options.values())
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = packer(given), {}
        pack, kernels = plan
        addresses, integers, odd = pack(given)
        found = kernels.get((integers, odd))
        if found is not None:
            run, function, metadata = found
            stream = driver.active.get_current_stream(self.logits_NV.device.index)
            run(
                programs, 1, 1, stream, function, metadata, None, None, None, *addresses,
                *constants,
            )  # fmt: skip
            return
        if self.overlap and early:
            options["launch_pdl"] = True
        compiled = kernel[(programs,)](*given, *constants, **options)
        if compiled is not None and not torch.version.hip:  # None: interpreted
            # AMD's kernels also depend on the size of each tensor
            kernels[integers, odd] = compiled.run, compiled.function, compiled.packed_metadata
