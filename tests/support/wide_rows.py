"""Rows with more survivors than a short list holds, of every shape that their search tells apart.

What is kept and the tokens are held against the oracle; a row that keeps otherwise by less than
`BOUND` of its mass is a near-tie, whose token may differ.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops import TARGET, Backend, Noise, Rows, get_backend
from tests.support.cases import make_params
from tests.support.oracle import moved

INF = float("inf")
BOUND = 3e-6  # what float32 sums of some thousand logits err by
LAWS: list[dict[str, float]] = [
    {"top_p": 0.95},
    {"top_p": 0.9999999, "temperature": 3.0},
    {"top_k": 700},
    {"top_k": 2500, "top_p": 0.6},
    {"top_k": -1, "top_p": 0.9},  # all but one
    {"top_p": 0.8, "min_p": 1e-4},
    {"min_p": 1e-5},
    {"top_p": 0.7, "rule": 2},
]
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "rule": 0}


def wide_rows(width: int) -> Tensor:
    """float32 [N, V]."""
    random = torch.Generator().manual_seed(width)
    normal = torch.randn(width, generator=random)
    index = torch.arange(width)
    one, above = torch.ones(width), torch.nextafter(torch.ones(1), torch.full((1,), 2.0))
    rows = [
        normal,
        normal * 4,
        normal + 1000,
        normal * 1e-6 + 3,
        one * 2.5,
        torch.where(normal > 0, 0.0, -0.0),
        torch.where(index % 3 == 0, one, above),
        torch.where((index % 3 == 0) & (index < width // 2), normal, -INF),
        torch.where((index > 4) & (index < 405), normal, -INF),
        torch.where(index < width // 3, normal, torch.finfo(torch.float32).min),
        torch.where(index == 7, 25.0, normal),
        (normal * 2 + 20).bfloat16().float(),
        normal.sort(descending=True).values,
        torch.where(index // 8 % 2 == 0, normal - 50, normal),
        -index / 8,
    ]
    return torch.stack(rows)


def compare_wide(turn: int, backend: Backend, width: int, device: torch.device) -> tuple[int, int]:
    """(what is kept and the token of each row, near-ties among them); AssertionError where wrong.
    turn: which law falls to which row.
    """
    logits_NV = wide_rows(width)
    rows = len(logits_NV)
    given = [OFF | LAWS[(n + turn) % len(LAWS)] for n in range(rows)]
    columns = {name: [law[name] for law in given] for name in OFF}
    columns["top_k"] = [k % width for k in columns["top_k"]]
    params = make_params(rows, **columns)
    slot_N = torch.arange(rows)
    on, on_NV, on_N = moved(params, device), logits_NV.to(device), slot_N.to(device)
    kept_NV = backend.process_logits(Rows(on_NV, on, on_N)).cpu() > -INF
    token_N = backend.sample(Rows(on_NV, on, on_N), Noise(on_N, on_N * 0, TARGET)).cpu()
    oracle = get_backend("reference")
    want_NV = oracle.process_logits(Rows(logits_NV, params, slot_N)) > -INF
    want_N = oracle.sample(Rows(logits_NV, params, slot_N), Noise(slot_N, slot_N * 0, TARGET))
    p_NV = (logits_NV.double() / params.temperature_S[:, None]).softmax(dim=1)
    near_N = (kept_NV != want_NV).any(dim=1)
    differ_N = (p_NV * (kept_NV != want_NV)).sum(dim=1) / (p_NV * want_NV).sum(dim=1)
    for n in range(rows):
        dropped = logits_NV[n][~kept_NV[n]]
        assert not len(dropped) or logits_NV[n][kept_NV[n]].min() > dropped.max(), f"row {n}"
        assert differ_N[n] <= BOUND, f"row {n}: {kept_NV[n].sum()} kept of {want_NV[n].sum()}"
        assert near_N[n] or token_N[n] == want_N[n], f"row {n}: token {token_N[n]}, {want_N[n]}"
    return 2 * rows, 2 * int(near_N.sum())
