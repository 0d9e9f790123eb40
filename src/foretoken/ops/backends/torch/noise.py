"""Philox4x32-10 noise by key and counter, in int64 tensors; see `ops/__init__.py`.

Shapes: N rows, G groups of four 32-bit words.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_LARGEST_BELOW_1 = {False: 1 - 2.0**-24, True: 1 - 2.0**-53}  # by `fp64`


class RowNoise(NamedTuple):
    """Key and counter of the noise of N rows: int64 [N]; all except the key have 32 bits."""

    key_N: Tensor
    position_N: Tensor
    draft_index_N: Tensor
    token_stream_N: Tensor
    block_stream_N: Tensor
    fp64: bool

    @property
    def per_group(self) -> int:
        """Draws from each group of four words."""
        return 2 if self.fp64 else 4

    def take(self, index: Tensor | slice) -> RowNoise:
        key_N, position_N, draft_index_N, token_N, block_N = (x[index] for x in self[:5])
        return RowNoise(key_N, position_N, draft_index_N, token_N, block_N, self.fp64)

    def tokens(self, first_N: Tensor, count: int) -> Tensor:
        """Gumbel noise of ids first_N (a multiple of 4), first_N + 1, ...: float64 [N, count]."""
        return self._gumbel(first_N, count, self.token_stream_N)

    def blocks(self, count: int) -> Tensor:
        """Gumbel noise of blocks 0, ..., count - 1: float64 [N, count]."""
        return self._gumbel(torch.zeros_like(self.key_N), count, self.block_stream_N)

    def _gumbel(self, first_N: Tensor, count: int, stream_N: Tensor) -> Tensor:
        groups_G = torch.arange(-(-count // self.per_group), device=first_N.device)
        group_NG = first_N[:, None] // self.per_group + groups_G
        word_NG4 = words(group_NG, self.key_N, self.position_N, self.draft_index_N, stream_N)
        return to_gumbel(to_uniform(word_NG4, self.fp64)[:, :count])


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Philox's multipliers of the even words, and its increments of the key's halves per round."""
    pairs = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
    multiplier, weyl = (torch.tensor(pair).view(2, 1, 1).to(device) for pair in pairs)
    return multiplier, weyl


def words(
    group_NG: Tensor, key_N: Tensor, position_N: Tensor, draft_index_N: Tensor, stream_N: Tensor
) -> Tensor:
    """The four words of each group, counter = (group, position, draft index, stream): [N, G, 4].

    Philox4x32-10 (Salmon et al. 2011, with the constants of Random123) on even words (0, 2) and odd
    words (1, 3), each [2, N, G]. A product that overflows int64 still has the bits of the unsigned
    product. Bits of `odd` and `key` above the lower 32 are masked off in `even`, and at the end.
    """
    multiplier, weyl = _constants(key_N.device)
    even = torch.stack([group_NG, draft_index_N[:, None].expand_as(group_NG)]).bitwise_and_(_MASK)
    odd = torch.stack([position_N, stream_N])[..., None]
    key = torch.stack([key_N, key_N >> 32])[..., None]
    for _ in range(10):
        product = (even * multiplier).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_MASK)
        odd, key = product, key + weyl
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1).bitwise_and_(_MASK)


def to_uniform(words_NG4: Tensor, fp64: bool) -> Tensor:
    """Convert words to uniforms in the open interval (0, 1): float32 [N, 4G], or float64 [N, 2G].

    FP32: u = (h + 1/2) 2^-32 of each word h, at most 1 - 2^-24. FP64: u = (h + 1/2) 2^-53 of the
    upper 53 bits h of two adjacent words, at most 1 - 2^-53.
    """
    if fp64:
        high, low = words_NG4[..., 0::2], words_NG4[..., 1::2]
        h, bits = (high << 21 | low >> 11).double(), 53
    else:
        h, bits = words_NG4.float(), 32
    return h.add_(0.5).mul_(2.0**-bits).clamp_(max=_LARGEST_BELOW_1[fp64]).flatten(1)


def to_gumbel(u: Tensor) -> Tensor:
    """-log(-log(1 - u)), float64. Large noise comes from u near 0, where floats are dense."""
    return u.double().neg_().log1p_().neg_().log_().neg_()


def first_uniform(
    key_N: Tensor, position_N: Tensor, draft_index_N: Tensor, stream: int, fp64: bool
) -> Tensor:
    """The first uniform of a stream for each of N rows: [N], float32, or float64 with `fp64`."""
    group_N1, stream_N = torch.zeros_like(key_N)[:, None], torch.full_like(key_N, stream)
    return to_uniform(words(group_N1, key_N, position_N, draft_index_N, stream_N), fp64)[:, 0]
