"""What the host side of every op shares: tuples of pointers, scratch memory, launch sizes.

Scratch comes from PyTorch's caching allocator, whose blocks a captured graph keeps: nothing is
allocated when it replays.

Shapes: N rows, V vocabulary, NB blocks, NG groups, C list entries, B requests, K drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.backends.triton.filters import CAPACITY
from foretoken.ops.backends.triton.rows import BLOCK, GROUP, edit_kernel
from foretoken.ops.types import Edits, Rule, SlotParams, Stream

_BLOCKS_AT_ONCE = 4  # most blocks that a program loads in one span


class Sizes(NamedTuple):
    """Of one call: N rows of V logits in NB blocks and NG groups, and powers of 2 above those."""

    rows: int
    vocabulary: int
    blocks: int
    groups: int
    blocks_padded: int
    groups_padded: int

    @classmethod
    def of(cls, logits_NV: Tensor) -> Sizes:
        rows, vocabulary = logits_NV.shape
        blocks = -(-vocabulary // BLOCK.value)
        groups = -(-vocabulary // GROUP.value)
        padded = max(4, 1 << (blocks - 1).bit_length())
        per_block = BLOCK.value // GROUP.value
        return cls(rows, vocabulary, blocks, groups, padded, padded * per_block)


class Scratch(NamedTuple):
    """Of one call: `out` = (mass_NJ, best_NJ, gmax_NG), `found` as in `filters.py`."""

    out: tuple[Tensor, Tensor, Tensor]
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device, filters: bool, flat: bool) -> Scratch:
        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows, f32, i32 = sizes.rows, torch.float32, torch.int32
        mass = empty(f32, rows, sizes.blocks)
        best = empty(f32, rows, sizes.blocks) if filters or flat else mass
        lse = empty(f32, rows)
        if not filters:
            return cls((mass, best, mass), (lse, lse, lse, lse, lse))
        lists = empty(i32, rows, CAPACITY.value), empty(f32, rows, CAPACITY.value)
        found = (empty(f32, rows), lse, empty(i32, rows), *lists)
        return cls((mass, best, empty(f32, rows, sizes.groups)), found)


# AMD's compiler knows no `maxnreg`: there the choice is its own.
def at_most_registers(count: int) -> dict[str, int]:
    """The launch option that limits registers per thread, where the compiler takes it."""
    return {} if torch.version.hip else {"maxnreg": count}


def check_device(logits: Tensor) -> None:
    """Raise `ConfigError` unless Triton can run on these logits: on a GPU, or interpreted."""
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
        return (unused, unused, 0, unused, unused, unused, 0), False, False
    mask: tuple[Any, ...] = (unused, unused, 0)
    if edits.mask_RW is not None:
        mask = (edits.mask_RW, edits.mask_N, edits.mask_RW.shape[1])
    masks, entries = edits.mask_RW is not None, len(edits.token_M) > 0
    if not entries:
        return (*mask, unused, unused, unused, 0), masks, False
    columns = sizes.blocks + _BLOCKS_AT_ONCE
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

    @classmethod
    def of(
        cls,
        logits_NV: Tensor,
        params: SlotParams,
        where: tuple[Tensor, Tensor, Tensor, Tensor],
        edits: Edits | None,
        fp64: bool,
        noise: tuple[Stream, Stream],
        width: int = 1,
    ) -> Call:
        """`where` = (num_B, slot_B, position_B, index_B); allocates the scratch."""
        check_device(logits_NV)
        sizes = Sizes.of(logits_NV)
        num_B, slot_B, position_B, index_B = (x.contiguous() for x in where)
        filters, flat = params.has_filters, Rule.COUPLED in params.rules
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
            state=state_tuple(params),
            edits=pointers,
            masks=masks,
            entries=entries,
            filters=filters,
            flat=flat,
            fp64=fp64,
            noise=(int(noise[0]), int(noise[1])),
            drafts=noise[0] == Stream.DRAFT_TOKEN,
        )
