"""Sampling and verification in plain PyTorch: the baseline of `benchmarks.ops`, and its protocol.

A baseline is a module with any of the functions below; what it lacks, or raises NotImplementedError
for, is skipped. `--baseline package.module` times yours in the same process. A function gets the
inputs once, as keywords, may prepare what it likes (layouts, ids, compiled kernels), and returns
the callable that is timed. That one must read everything that the caller gave, may run inside a
CUDA-graph capture, and returns the token ids, which nobody reads. New keywords may come:
end the parameters with `**_`.

    sample(*, logits_NV, temperature, top_k, top_p, min_p, fp64_noise)
        one token per row of raw logits. The parameters are one number each, the same for all rows
        (fill a tensor where yours are per row); off: top_k 0, top_p 1, min_p 0.
    draft(*, logits_BV, temperature, top_k, top_p, min_p)
        a draft per row, and a copy of the row to where verification finds it.
    verify(*, rule, logits_NV, draft_logits_BKV, token_BK, temperature, top_k, top_p, min_p, rate_K,
           seen_BL, repetition, presence)
        B requests of K drafts; N = B (K + 1) raw target rows, those of a request adjacent. rule:
        standard, block, synthetic (accept x_i at rate_K[i]) or one_hot (draft_logits_BKV is then
        not to be read). seen_BL: None, or token ids that carry both penalties in all K + 1 rows.
    logprobs(*, logits_NV, token_N, num_top)

Here, the exponential race stands for `multinomial` on a GPU: it is what `multinomial` computes,
without its check that waits for the device and cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "pytorch"
Call = Callable[[], Any]


def sample(*, logits_NV: Tensor, fp64_noise: bool, **law: Any) -> Call:
    """Softmax and multinomial; with filters, by a sort."""
    return lambda: draw(probabilities(logits_NV, **law), fp64_noise)


def draft(*, logits_BV: Tensor, **law: Any) -> Call:
    """As `sample`, and a copy of the row for verification."""
    kept_BV = torch.empty_like(logits_BV)

    def call() -> Tensor:
        kept_BV.copy_(logits_BV)
        return draw(probabilities(logits_BV, **law))

    return call


def verify(
    *,
    rule: str,
    logits_NV: Tensor,
    draft_logits_BKV: Tensor,
    token_BK: Tensor,
    rate_K: Tensor | None,
    seen_BL: Tensor | None,
    repetition: float,
    presence: float,
    **law: Any,
) -> Call:
    """The ratio test on probabilities (Leviathan et al. 2023), all rows at once."""
    num_requests, k = token_BK.shape
    row_B = torch.arange(num_requests, device=logits_NV.device)

    def call() -> Tensor:
        raw_NV = logits_NV
        if seen_BL is not None:
            raw_NV = penalised(raw_NV, seen_BL.repeat_interleave(k + 1, 0), repetition, presence)
        p_BK1V = probabilities(raw_NV, **law).view(num_requests, k + 1, -1)
        if rule == "one_hot":
            q_BKV = torch.zeros_like(p_BK1V[:, :-1]).scatter_(2, token_BK[..., None], 1.0)
        else:
            q_BKV = probabilities(draft_logits_BKV, **law)
        at = token_BK[..., None]
        ratio_BK = (p_BK1V[:, :-1].gather(2, at) / q_BKV.gather(2, at)).squeeze(2)
        u_BK = torch.rand(token_BK.shape, device=logits_NV.device)
        w_BK1 = torch.ones(num_requests, k + 1, device=logits_NV.device)
        if rule == "block":
            n_accept_B, w_BK1 = block(p_BK1V, q_BKV, ratio_BK, u_BK)
        else:
            accept_BK = u_BK < (ratio_BK if rate_K is None else rate_K)
            n_accept_B = accept_BK.cumprod(1).sum(1)
        zero_BV = torch.zeros_like(q_BKV[:, :1])
        q_BK1V = torch.cat([q_BKV, zero_BV], dim=1)  # the bonus is drawn from p
        w_B = w_BK1[row_B, n_accept_B, None]
        residual_BV = (w_B * p_BK1V[row_B, n_accept_B] - q_BK1V[row_B, n_accept_B]).clamp_(min=0)
        token_B = draw(residual_BV)
        token_BK1 = torch.nn.functional.pad(token_BK, (0, 1), value=-1)
        index_K1 = torch.arange(k + 1, device=logits_NV.device)
        token_BK1 = token_BK1.where(index_K1 < n_accept_B[:, None], -1)
        return token_BK1.scatter_(1, n_accept_B[:, None], token_B[:, None])

    return call


def block(p_BK1V: Tensor, q_BKV: Tensor, ratio_BK: Tensor, u_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts and weights p_0..p_K of block verification (Sun et al. 2024, algorithm 2)."""
    weights = [torch.ones_like(ratio_BK[:, 0])]
    for ratio_B in ratio_BK.unbind(1):
        weights.append((weights[-1] * ratio_B).clamp(max=1))
    w_BK1 = torch.stack(weights, dim=1)
    w_BK = w_BK1[:, 1:]
    left_BK = (w_BK[:, :-1, None] * p_BK1V[:, 1:-1] - q_BKV[:, 1:]).clamp_(min=0).sum(2)
    h_BK = torch.cat([left_BK / (left_BK + 1 - w_BK[:, :-1]), w_BK[:, -1:]], dim=1)
    index_K = torch.arange(1, ratio_BK.shape[1] + 1, device=u_BK.device)
    return ((u_BK <= h_BK) * index_K).amax(1), w_BK1


def logprobs(*, logits_NV: Tensor, token_N: Tensor, num_top: int, **_: Any) -> Call:
    """Log-softmax, gathered and ranked."""

    def call() -> tuple[Tensor, ...]:
        logp_NV = logits_NV.float().log_softmax(-1)
        logp_N1 = logp_NV.gather(1, token_N[:, None])
        rank_N = (logp_NV > logp_N1).sum(1) + 1
        return (logp_N1, rank_N, *logp_NV.topk(num_top))

    return call


def probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Softmax of the processed logits, float32, over the last axis; filters as in Transformers."""
    x = logits.float() / temperature
    if min_p > 0:
        prob = x.softmax(-1)
        x = x.masked_fill(prob < min_p * prob.amax(-1, keepdim=True), -torch.inf)
    if top_k or top_p < 1:
        ordered, index = x.sort(dim=-1, descending=True)
        if top_k:
            ordered = ordered.masked_fill(ordered < ordered[..., top_k - 1 : top_k], -torch.inf)
        prob = ordered.softmax(-1)
        ordered = ordered.masked_fill(prob.cumsum(-1) - prob >= top_p, -torch.inf)
        x = torch.empty_like(x).scatter_(-1, index, ordered)
    return x.softmax(-1)


def penalised(logits_NV: Tensor, seen_NL: Tensor, repetition: float, presence: float) -> Tensor:
    """Repetition and presence penalties on the tokens of each row."""
    x_NV = logits_NV.float()
    x_NV = x_NV.clone() if x_NV is logits_NV else x_NV
    x_NL = x_NV.gather(1, seen_NL)
    x_NL = torch.where(x_NL > 0, x_NL / repetition, x_NL * repetition) - presence
    return x_NV.scatter_(1, seen_NL, x_NL)


def draw(prob: Tensor, fp64_noise: bool = False) -> Tensor:
    """One index per row, in proportion; rows need not sum to 1."""
    if prob.is_cuda or fp64_noise:
        dtype = torch.float64 if fp64_noise else prob.dtype
        return (prob / torch.empty_like(prob, dtype=dtype).exponential_()).argmax(-1)
    return prob.multinomial(1).squeeze(1)
