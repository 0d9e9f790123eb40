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
    """Of one call: N rows of V logits in NB blocks and NG groups, and a power of 2 above the blocks."""

    rows: int
    vocabulary: int
    blocks: int
    groups: int
    blocks_padded: int

    @classmethod
    def of(cls, logits_NV: Tensor) -> Sizes:
        rows, vocabulary = logits_NV.shape
        blocks = -(-vocabulary // BLOCK.value)
        groups = -(-vocabulary // GROUP.value)
        padded = max(4, 1 << (blocks - 1).bit_length())
        return cls(rows, vocabulary, blocks, groups, padded)


class Scratch(NamedTuple):
    """Of one call: `out` = (mass_NJ, best_NJ, gmax_NG), `found` as in `filters.py`.

    Without filters nothing of `found` but its second is used, and no gmax.
    """

    out: tuple[Tensor, ...]
    found: tuple[Tensor, ...]

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device, filters: bool, flat: bool) -> Scratch:
        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows, f32, i32 = sizes.rows, torch.float32, torch.int32
        mass = empty(f32, rows, sizes.blocks)
        best = empty(f32, rows, sizes.blocks) if filters or flat else mass
        lse = empty(f32, rows)
        if not filters:
            return cls((mass, best), (lse, lse))
        lists = empty(i32, rows, CAPACITY.value), empty(f32, rows, CAPACITY.value)
        found = (empty(f32, rows), lse, empty(i32, rows), *lists, empty(i32, rows + 1))
        return cls((mass, best, empty(f32, rows, sizes.groups)), found)


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


class Packing:
    """Arguments of one op's launches as addresses, and what its compiled kernels depend on.

    key: dtypes that may vary; then, as arguments are packed, integers and misaligned addresses.
    """

    def __init__(self, *key: Any) -> None:
        self.key: list[Any] = [*key]
        self._tuples = 0
        self._known: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}

    def addresses(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Every tensor replaced by its address, in nested tuples too (each is packed once)."""
        found: list[Any] = []
        append, key = found.append, self.key
        self._tuples += 1
        number = self._tuples
        for value in given:
            kind = value.__class__
            if kind is tuple:
                known = self._known.get(id(value))
                if known is None:  # the value is kept too: no other may get its id
                    known = self._known[id(value)] = value, self.addresses(value)
                append(known[1])
            elif kind is int:
                key.append(value)
                append(value)
            else:
                address = value.data_ptr()
                append(address)
                if address % 16:
                    key.append((number, len(found), address % 16))
        return tuple(found)


_COMPILED: dict[tuple[Any, ...], Any] = {}


def check_device(logits: Tensor) -> None:
    """Raise `ConfigError` unless Triton can run on these logits: on a GPU, or interpreted."""
    if logits.is_cuda and logits.device.index != torch.cuda.current_device():
        raise ConfigError(
            "logits.device",
            logits.device,
            f"cuda:{torch.cuda.current_device()}, the current device",
            "Call under `torch.cuda.device(logits.device)`.",
        )
    if not logits.is_cuda and not triton.knobs.runtime.interpret:
        raise ConfigError(
            "logits.device",
            logits.device,
            "a GPU's",
            "Without one, choose the backend `native_cpu` or `torch_cpu`.",
        )


def state_tuple(params: SlotParams) -> tuple[Tensor, ...]:
    """The pointers of `rows.py: state`."""
    return (
        params.key_S,
        params.temperature_S,
        params.top_k_S,
        params.top_p_S,
        params.min_p_S,
        params.rule_S,
    )


def edits_tuple(
    edits: Edits | None, logits_NV: Tensor, sizes: Sizes, unused: Tensor
) -> tuple[tuple[Any, ...], bool, bool]:
    """(the pointers of `rows.py: edits`, whether there are masks, whether there are entries)."""
    if edits is None:
        return (unused,), False, False
    mask: tuple[Any, ...] = (unused, unused, 0)
    if edits.mask_RW is not None:
        mask = (edits.mask_RW, edits.mask_N, edits.mask_RW.shape[1])
    masks, entries = edits.mask_RW is not None, len(edits.token_M) > 0
    if not entries:
        return (*mask, unused, unused, unused, 0), masks, False
    columns = sizes.blocks + BLOCKS_AT_ONCE
    begin = torch.empty(sizes.rows, columns, dtype=torch.int32, device=logits_NV.device)
    pointers = (*mask, edits.token_M, torch.empty_like(edits.bias_M), begin, columns)
    padded = 1 << (columns - 1).bit_length()
    edit_kernel[(sizes.rows,)](
        logits_NV, logits_NV.stride(0), edits.start_N1, edits.bias_M, edits.repetition_M,
        edits.subtract_M, pointers, sizes.vocabulary, masks, padded, num_warps=4,
    )  # fmt: skip
    return pointers, masks, True


class Call(NamedTuple):
    """One op's rows, and how its kernels are specialised.

    B requests of up to `width` rows each; `num_B` says how many drafts a request has (any tensor
    if width is 1). noise: (token stream, block stream), and whether the rows are drafts, for flat
    draws of dense rows at draft index `index_B`.
    """

    logits_NV: Tensor
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
    packing: Packing

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
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> Call:
        """Allocates the scratch.

        Args:
            params: None for raw logits.
            where: num_B, slot_B, position_B, index_B.
            dtypes: of all arguments that may have several, but for the logits'.
        """
        check_device(logits_NV)
        sizes = Sizes.of(logits_NV)
        num_B, slot_B, position_B, index_B = (x.contiguous() for x in where)
        filters, flat = False, False
        state: tuple[Tensor, ...] = (slot_B,)
        if params is not None:
            filters, flat = params.has_filters, Rule.COUPLED in params.rules
            state = state_tuple(params)
        pointers, masks, entries = edits_tuple(edits, logits_NV, sizes, slot_B)
        return cls(
            logits_NV=logits_NV,
            num_B=num_B,
            slot_B=slot_B,
            position_B=position_B,
            index_B=index_B,
            width=width,
            sizes=sizes,
            scratch=Scratch.of(sizes, logits_NV.device, filters, flat),
            state=state,
            edits=pointers,
            masks=masks,
            entries=entries,
            filters=filters,
            flat=flat,
            fp64=fp64,
            noise=(int(noise[0]), int(noise[1])),
            drafts=noise[0] == Stream.DRAFT_TOKEN,
            overlap=overlaps(logits_NV.device),
            packing=Packing(logits_NV.device, logits_NV.dtype, *dtypes),
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
            early: whether it may start before the kernel launched before it has ended.
        """
        constants = (*constants, self.overlap)
        addresses = self.packing.addresses(given)
        key = (id(kernel), early, constants, *options.values(), *self.packing.key)
        compiled = _COMPILED.get(key)
        if compiled is not None:
            stream = driver.active.get_current_stream(self.logits_NV.device.index)
            compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None,
                None, *addresses, *constants,
            )  # fmt: skip
            return
        if self.overlap and early:
            options["launch_pdl"] = True
        compiled = kernel[(programs,)](*given, *constants, **options)
        if compiled is not None and not torch.version.hip:  # None: interpreted
            _COMPILED[key] = compiled  # AMD's kernels also depend on the size of each tensor
