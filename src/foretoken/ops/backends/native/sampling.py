"""The functions of `Backend` on rows, one native call each."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.native import library

from foretoken.ops.backends.native.arguments import (  # isort: skip
    addresses, native_batch, native_cache, native_noise, native_rows,
)  # fmt: skip
from foretoken.ops.types import DraftCache, Logprobs, Noise, Rows, Verdict, VerifyBatch


def process_logits(rows: Rows) -> Tensor:
    """Processed logits; rows that are not finite are edited and scaled, but not filtered."""
    out_NV = torch.empty(rows.logits_NV.shape, dtype=torch.float32)
    library.load().foretoken_process(native_rows(rows), out_NV.data_ptr())
    return out_NV


def sample(rows: Rows, noise: Noise) -> Tensor:
    """Draw a token per row, int64 [N]; a row that is not finite gives 0."""
    token_N = torch.empty(len(rows.slot_N), dtype=torch.int64)
    library.load().foretoken_sample(native_rows(rows), native_noise(noise), token_N.data_ptr())
    return token_N


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """Draw a draft per row, int64 [B], and store its q: at T=0 the threshold is -inf, the LSE 0."""
    token_B = torch.empty(len(rows.slot_N), dtype=torch.int64)
    library.load().foretoken_draft(
        native_rows(rows), native_noise(noise), native_cache(cache), token_B.data_ptr()
    )
    # The kernel wrote the logits to a float32 copy of a float64 cache.
    if cache is not None and cache.logits_SKV.dtype is torch.float64:
        cache.logits_SKV[rows.slot_N, noise.draft_index_N] = rows.logits_NV
    return token_B


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """See `Backend.logprobs`; all log-probabilities are NaN in a row that is not finite."""
    token_N = token_N.long().contiguous()
    out = Logprobs.empty(len(token_N), num_top, token_N.device)
    library.load().foretoken_logprobs(native_rows(rows), *addresses((token_N, *out)), num_top)
    return out


def verify(batch: VerifyBatch) -> Verdict:
    """Verify drafts; of each request only the rows that its own rule needs are read (decision 015).

    The distribution of the emitted tokens is exactly the target's: Leviathan et al. 2023, appendix
    A.1; Chen et al. 2023, theorem 1; Sun et al. 2024, theorem 1.
    """
    token_BK = batch.drafts.token_BK
    num_requests, num_columns = token_BK.shape
    token_BK1 = torch.empty(num_requests, num_columns + 1, dtype=torch.int64)
    n_accept_B = torch.empty(num_requests, dtype=torch.int64)
    finite_B = torch.empty(num_requests, dtype=torch.bool)
    outputs = addresses((token_BK1, n_accept_B, finite_B))
    library.load().foretoken_verify(native_batch(batch), *outputs)
    return Verdict(token_BK1.to(token_BK.dtype), n_accept_B, finite_B)
