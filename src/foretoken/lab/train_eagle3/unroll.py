"""The training forward of an EAGLE-3 head: several draft steps from every position of a text.

Here are the attention for all positions at once, and the losses, which measure how often drafts
will be rejected. The rest of a head runs in the operators of `ops/backends/torch/stack.py`, so that
training and drafting compute the same.

Step j of position s stands for a drafter's pass for draft j, after the text up to s + 1. It reads
the token at s + j + 1, and its output predicts the token at s + j + 2. Step 0 reads the target's
feature at s; step j reads the output of step j - 1 of s ("training-time test", Li et al. 2025). So
step j of s attends to step 0 of all positions up to s, and to steps 1..j only of s itself.

Shape suffixes: B texts, T tokens of a text, S positions to draft from, J steps, H heads, D head
size, C the head's hidden size, V ids that the head drafts, X positions of all texts (B S).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from foretoken.errors import IntegrityError
from foretoken.ops.backends.torch.stack import begin, cos_sin, feature, finish, norm, project
from foretoken.ops.stack import FeatureRule, Stack

# Numbers in a piece of the logits, which are processed piece by piece. On a CPU the float32 copies
# of a piece should fit the cache; on a GPU there should be few pieces.
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 27}
Fuse = Callable[[Any], Any]


class Unroll:
    """The draft steps of a head, on a device.

    fuse: applied to each function that runs over all positions: `torch.compile`, or the identity
    """

    def __init__(self, device: torch.device, fuse: Fuse = lambda function: function) -> None:
        self._project, self._finish, self._merge = map(fuse, (_project, _finish, _merge))
        self._attend_first: Any = _Flex() if device.type == "cuda" else _causal

    def __call__(
        self, head: Stack, aux: Sequence[Tensor], token_BT: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """Yields the output of each step, [X, C].

        S = T - `steps`, so that every step of every position has a token to read.

        aux: hidden states of the target, [B, T, target_hidden_size] each, in the order of layers
        """
        size = token_BT.shape[1] - steps
        states = [state[:, :size].flatten(0, 1) for state in aux]
        feature_XC = feature(rule_of(head), states, head.eps)
        position_X = torch.arange(size, device=token_BT.device).repeat(len(token_BT))
        keys, values = list[Tensor](), list[Tensor]()
        for j in range(steps):
            token_X = token_BT[:, j + 1 : j + 1 + size].flatten()
            hidden_XC, projected = self._project(head, token_X, position_X + j, feature_XC)
            query, key, value = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in projected)
            keys.append(key)
            values.append(value)
            out_BHSD, lse_BHS = self._attend_first(query, keys[0], values[0])
            if j:
                later = torch.stack(keys[1:]), torch.stack(values[1:])
                out_BHSD = self._merge(out_BHSD, lse_BHS, query, *later)
            attended_XD = out_BHSD.transpose(1, 2).flatten(0, 1).flatten(1)
            feature_XC = self._finish(head, hidden_XC, attended_XD)
            yield feature_XC


def rule_of(head: Stack) -> FeatureRule:
    """The feature rule of a head; `IntegrityError` if it has none."""
    if head.features is None:
        raise IntegrityError("a stack without a feature rule is not a head")
    return head.features


def _project(
    head: Stack, token_X: Tensor, position_X: Tensor, feature_XC: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The part of a pass before attention: the residual [X, C], and query, key and value."""
    hidden_XC, read_XW = begin(head, token_X, feature_XC)
    mixer = head.layers[0].mixer
    return hidden_XC, project(head, mixer, read_XW, cos_sin(mixer.rope, position_X, head.dtype))


def _finish(head: Stack, hidden_XC: Tensor, attended_XD: Tensor) -> Tensor:
    """The part of a pass after attention, [X, C]."""
    hidden_XC = finish(head, head.layers[0], hidden_XC, attended_XD)
    is_normed = rule_of(head).norm_output
    return norm(hidden_XC, head.norm_C, head.eps) if is_normed else hidden_XC


def _causal(query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention, and the log-sum-exp of its scores, float32 [B, H, S].

    It keeps all scores in memory: B H S S numbers.
    """
    size, shared = query_BHSD.shape[2], query_BHSD.shape[1] // key_BHSD.shape[1]
    key_BHSD, value_BHSD = (x.repeat_interleave(shared, 1) for x in (key_BHSD, value_BHSD))
    score_BHSS = (query_BHSD * query_BHSD.shape[-1] ** -0.5) @ key_BHSD.transpose(-1, -2)
    unseen_SS = torch.ones(size, size, dtype=torch.bool, device=query_BHSD.device).triu_(1)
    score_BHSS = score_BHSS.float().masked_fill(unseen_SS, -torch.inf)
    lse_BHS = score_BHSS.logsumexp(-1)
    weight_BHSS = (score_BHSS - lse_BHS[..., None]).exp().to(value_BHSD.dtype)
    return weight_BHSS @ value_BHSD, lse_BHS


class _Flex:
    """`_causal` with PyTorch's fused kernels, which keep no scores in memory; only on a GPU."""

    def __init__(self) -> None:
        from torch.nn.attention import flex_attention as flex

        self._attention: Any = torch.compile(flex.flex_attention, dynamic=False)
        self._create_mask, self._masks = flex.create_block_mask, dict[int, Any]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        size = query.shape[2]  # number of positions
        if size not in self._masks:
            self._masks[size] = self._create_mask(
                lambda b, h, i, j: j <= i, None, None, size, size, device=query.device
            )
        result: tuple[Tensor, Tensor] = self._attention(
            query, key, value, block_mask=self._masks[size], enable_gqa=True, return_lse=True
        )
        return result


def _merge(
    out_BHSD: Tensor, lse_BHS: Tensor, query_BHSD: Tensor, key_JBHSD: Tensor, value_JBHSD: Tensor
) -> Tensor:
    """The attention of a later step: over step 0, merged with attention over later steps.

    Each position attends only to its own later keys, one per step.

    out_BHSD, lse_BHS: attention over the keys of step 0, and the log-sum-exp of its scores
    """
    shared = query_BHSD.shape[1] // key_JBHSD.shape[2]
    key_JBHSD, value_JBHSD = (x.repeat_interleave(shared, 2) for x in (key_JBHSD, value_JBHSD))
    score_JBHS = (query_BHSD.float() * key_JBHSD.float()).sum(-1) * query_BHSD.shape[-1] ** -0.5
    total_BHS = torch.logaddexp(lse_BHS, score_JBHS.logsumexp(0))
    weight_JBHS = (score_JBHS - total_BHS).exp()
    merged_BHSD: Tensor = (lse_BHS - total_BHS).exp()[..., None] * out_BHSD
    merged_BHSD = merged_BHSD + (weight_JBHS[..., None] * value_JBHSD).sum(0)
    return merged_BHSD.to(out_BHSD.dtype)


def loss_of(kind: str, overlaps: Sequence[Tensor], cross_entropies: Sequence[Tensor]) -> Tensor:
    """A scalar loss from the `agreement` of each step.

    `kl`: the mean cross-entropy. `tv`: 1 - the mean overlap, which is the rate of rejections.
    `length`: 1 - the mean chance that a draft and all drafts before it are accepted.
    """
    if kind == "kl":
        return torch.stack(list(cross_entropies)).mean()
    rate_JBS = torch.stack(list(overlaps))
    return 1 - (rate_JBS.cumprod(dim=0) if kind == "length" else rate_JBS).mean()


def agreement(
    logits_BSV: Tensor, p_BSV: Tensor, temperature: float, functions: LogitFunctions | None = None
) -> tuple[Tensor, Tensor]:
    """How well q fits p at each position: overlap and cross-entropy, float32 [B, S] each.

    The overlap sum(min(p, q)) is the probability that a draft is accepted. The cross-entropy -sum(p
    log q) in nats is KL(p, q) plus a term that does not depend on q. q is the softmax of
    `logits_BSV / temperature`. p has the target's probabilities of the same ids; only its last
    dimension must be dense.
    """
    # A tensor: a plain number would be a constant of the compiled code.
    scale = torch.full((), 1 / temperature, device=logits_BSV.device)
    overlap_BS, entropy_BS = _Agreement.apply(  # type: ignore[no-untyped-call]
        logits_BSV, p_BSV, scale, functions or LogitFunctions()
    )
    return overlap_BS, entropy_BS


class _Agreement(Function):
    """Overlap, cross-entropy and the gradients of both, in one pass over the logits.

    The gradients have the logits' dtype. Only these two tensors are as large as the logits;
    PyTorch's autograd would keep ten such tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, p_BSV: Tensor, scale: Tensor, functions: LogitFunctions
    ) -> tuple[Tensor, ...]:
        size = max(1, _PIECE[logits_BSV.device.type] // logits_BSV[0].numel())
        pieces = torch.split(logits_BSV, size), torch.split(p_BSV, size)
        results = [functions.measure(*piece, scale) for piece in zip(*pieces, strict=True)]
        overlap_BS, entropy_BS, overlap_slope, entropy_slope = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True)
        )
        ctx.save_for_backward(overlap_slope, entropy_slope)
        ctx.functions = functions
        return overlap_BS, entropy_BS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.functions.weigh(*ctx.saved_tensors, *gradients), None, None, None


def _measure(
    logits_BSV: Tensor, p_BSV: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overlap and cross-entropy [B, S], and the gradients of both by the logits [B, S, V]."""
    log_q_BSV = (logits_BSV.float() * scale).log_softmax(-1)
    q_BSV = log_q_BSV.exp()
    smaller_BSV = q_BSV * (q_BSV < p_BSV)  # min(p, q) depends on q only where q < p
    overlap_slope = smaller_BSV - q_BSV * smaller_BSV.sum(-1, keepdim=True)
    entropy_slope = q_BSV * p_BSV.sum(-1, keepdim=True) - p_BSV
    overlap_BS, entropy_BS = torch.minimum(p_BSV, q_BSV).sum(-1), -(p_BSV * log_q_BSV).sum(-1)
    dtype = logits_BSV.dtype
    overlap_slope, entropy_slope = overlap_slope * scale, entropy_slope * scale
    return overlap_BS, entropy_BS, overlap_slope.to(dtype), entropy_slope.to(dtype)


def _weigh(
    overlap_slope: Tensor, entropy_slope: Tensor, by_overlap_BS: Tensor, by_entropy_BS: Tensor
) -> Tensor:
    """The gradient of a loss with respect to the logits, by the chain rule.

    overlap_slope, entropy_slope: gradients of overlap and cross-entropy, from `_measure`
    by_overlap_BS, by_entropy_BS: the loss's gradients with respect to overlap and cross-entropy
    """
    gradient_BSV = overlap_slope * by_overlap_BS[..., None]
    gradient_BSV = gradient_BSV + entropy_slope * by_entropy_BS[..., None]
    return gradient_BSV.to(overlap_slope.dtype)


class LogitFunctions(NamedTuple):
    """The two functions that run over all logits; they may be fused."""

    measure: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = _measure
    weigh: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _weigh
