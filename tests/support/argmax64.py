"""The choice of FP64 noise, as `noise.py: sure_argmax` finds it in FP32 and as all of it gives it.

Shapes: M choices of L lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken.ops.backends.triton import noise

LANES = 64


@triton.jit
def choose_kernel(weight_ptr, level_ptr, high_ptr, low_ptr, out, LANES: tl.constexpr):
    """A program per choice. out_M3: with all noise in FP64, the shortcut's, and the kernels'."""
    m = tl.program_id(0)
    lane = m * LANES + tl.arange(0, LANES)
    high = tl.load(high_ptr + lane).to(tl.uint32, bitcast=True)
    low = tl.load(low_ptr + lane).to(tl.uint32, bitcast=True)
    gumbel = noise.gumbel64(noise.uniform64(high, low))
    # where `level` is 1 the noise is taken off, so that all scores lie within what was given
    weight = tl.load(weight_ptr + lane) - tl.load(level_ptr + m) * gumbel.to(tl.float32)
    score = tl.where(weight > float("-inf"), weight + gumbel, float("-inf"))
    tl.store(out + m * 3, tl.argmax(score, axis=0))
    near = noise.near_gumbel64(high, low)
    tl.store(out + m * 3 + 1, noise.sure_argmax(weight, near))
    tl.store(out + m * 3 + 2, noise.argmax64(weight, noise.Noise64(high, low, near)))


def compare_choices(number: int, device: torch.device) -> tuple[int, int]:
    """(choices, those that FP32 left to FP64), of six kinds; one in three has tiny uniforms."""
    random = torch.Generator().manual_seed(number)
    words_2ML = torch.randint(-(2**31), 2**31, (2, number, LANES), generator=random)
    tiny_M = torch.arange(number) % 3 == 0
    shift_ML = torch.randint(33, (number, LANES), generator=random)
    words_2ML[0, tiny_M] = ((words_2ML[0] & 0xFFFFFFFF) >> shift_ML)[tiny_M]
    words_2ML = torch.where(words_2ML >= 2**31, words_2ML - 2**32, words_2ML).int().to(device)
    weight_ML = 3 * torch.randn(number, LANES, generator=random)
    kind_M = torch.randint(6, (number,), generator=random)
    weight_ML[kind_M == 1] *= 0
    weight_ML[kind_M == 2] -= 4000
    odd_ML = (kind_M == 3)[:, None] & (torch.rand(number, LANES, generator=random) < 0.9)
    weight_ML[odd_ML] = torch.tensor([torch.nan, -torch.inf])[torch.arange(int(odd_ML.sum())) % 2]
    weight_ML[kind_M == 4] *= 10 ** (4 * torch.rand(number, 1, generator=random) - 6)[kind_M == 4]
    weight_ML[kind_M == 5, 7] += 60  # one that wins whatever its noise
    level_M = (kind_M == 4).float()
    out_M3 = torch.empty(number, 3, dtype=torch.int32, device=device)
    choose_kernel[(number,)](
        weight_ML.to(device), level_M.to(device), words_2ML[0], words_2ML[1], out_M3, LANES
    )
    full_M, sure_M, ours_M = out_M3.cpu().unbind(1)
    left_M = sure_M < 0
    assert torch.equal(ours_M, full_M)
    assert torch.equal(sure_M[~left_M], full_M[~left_M])
    assert left_M[kind_M == 4].any()
    assert left_M[(kind_M != 4) & (kind_M != 2)].float().mean() < 0.01
    return number, int(left_M.sum())
