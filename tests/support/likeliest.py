"""Log-probabilities and ranks of rows that are hard to rank, held against the oracle.

The likeliest tokens are looked for in the groups of 64 with the largest maxima: here they tie
across blocks, share one group, have a group each, or are fewer than asked for.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.ops import Backend, Rows, get_backend
from tests.support.cases import make_params, random_edits
from tests.support.oracle import moved

INF = float("inf")
FIRST = 5  # of the rows, that many are ranked by processed logits too
CASES: list[dict[str, Any]] = [
    {"num_top": 64, "dtype": torch.float32, "processed": False},
    {"num_top": 7, "dtype": torch.bfloat16, "processed": False},
    {"num_top": 20, "dtype": torch.float32, "processed": True},
    {"num_top": 1, "dtype": torch.float16, "processed": True},
]
LAWS: dict[str, list[float]] = {
    "temperature": [0.7, 1.0, 0.0, 2.0, 1.0],
    "top_k": [50, 3, 3, 0, 700],
    "top_p": [0.9, 1.0, 0.5, 1.0, 1.0],
    "min_p": [0.0, 0.0, 0.0, 0.01, 0.0],
}


def ranked_rows(width: int) -> Tensor:
    """float32 [N, V]."""
    random = torch.Generator().manual_seed(width)
    normal = torch.randn(width, generator=random) * 3
    index = torch.arange(width)
    rows = [
        normal,
        normal.sort(descending=True).values,
        (normal * 2).round() / 2,
        torch.where(index % 64 == 63, normal + 20, normal),
        torch.where(index > width - 500, normal - 100, -INF),
        torch.where(index % 1000 == 5, 2.5, -INF),
        torch.where(index % 2 == 0, 0.0, -0.0),
        normal.sort().values + 1000,
    ]
    return torch.stack(rows)


def compare_likeliest(
    turn: int, backend: Backend, width: int, device: torch.device
) -> tuple[int, int]:
    """(rows compared, 0 near-ties); AssertionError where wrong. turn: which of `CASES`."""
    num_top, dtype, processed = CASES[turn].values()
    logits_NV = ranked_rows(width).to(dtype)[: FIRST if processed else None]
    rows = len(logits_NV)
    random = torch.Generator().manual_seed(turn)
    token_N = torch.randint(width, (rows,), generator=random)
    token_N[::2] = logits_NV[::2].argmax(dim=1)
    given: Rows | Tensor = logits_NV
    if processed:
        edits = random_edits(rows, width, random, 100)
        given = Rows(logits_NV, make_params(rows, **LAWS), torch.arange(rows), edits)
    want = get_backend("reference").logprobs(given, token_N, num_top)
    ours = backend.logprobs(moved(given, device), token_N.to(device), num_top)
    ours = moved(ours, torch.device("cpu"))
    assert ours.rank_N.tolist() == want.rank_N.tolist()
    assert ours.top_token_NT.tolist() == want.top_token_NT.tolist()
    torch.testing.assert_close(ours.logprob_N, want.logprob_N, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.top_logprob_NT, want.top_logprob_NT, rtol=1e-5, atol=2e-5)
    return rows * (1 + num_top), 0
