"""The training forward of an EAGLE-3 head: several draft steps from every position of a text.

Belongs here: the attention of drafting, for all positions at once, and the losses: how often drafts
will be rejected. The rest of a head runs through the stack in stock operators itself
(`ops/backends/torch/stack.py`), so that training and drafting compute the same.

Step j of position s stands for a drafter's pass for its draft j after the text up to s + 1. It
reads the token at s + j + 1, and its output predicts the token at s + j + 2. Step 0 reads the
target's feature of s, step j the output of step j - 1 of s ("training-time test", Li et al. 2025).
So step j of s sees step 0 of all positions up to s, and the steps in between of s only.

Shape suffixes: B texts, T tokens of a text, S positions drafted from, J steps, H heads, D head
size, C the head's hidden size, V ids that the head drafts, X positions in all (B S).
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

# Numbers in a piece of logits: its float32 copies should fit a CPU's cache, or be few on a GPU.
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 27}
Fuse = Callable[[Any], Any]


class Unroll:
    """The draft steps, on a device.

    Args:
        fuse: applied to each function over all positions: `torch.compile`, or the identity.
    """

    def __init__(self, device: torch.device, fuse: Fuse = lambda function: function) -> None:
        self._project, self._finish = fuse(_project), fuse(_finish)
        self._merge = fuse(_merge)
        self._first: Any = _Flex() if device.type == "cuda" else _causal

    def __call__(
        self, head: Stack, aux: Sequence[Tensor], token_BT: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """Yields the output of each step, [X, C]; S = T - `steps`, so that all have tokens to read.

        Args:
            aux: hidden states of the target, [B, T, target_hidden_size] each, in the order of
                layers.
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
            out_BHSD, lse_BHS = self._first(query, keys[0], values[0])
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
    """Causal attention, and the log-sum-exp of its scores [B, H, S], float32. Keeps all scores:
    B H S S numbers."""
    size, shared = query_BHSD.shape[2], query_BHSD.shape[1] // key_BHSD.shape[1]
    key_BHSD, value_BHSD = (x.repeat_interleave(shared, 1) for x in (key_BHSD, value_BHSD))
    score_BHSS = (query_BHSD * query_BHSD.shape[-1] ** -0.5) @ key_BHSD.transpose(-1, -2)
    unseen_SS = torch.ones(size, size, dtype=torch.bool, device=query_BHSD.device).triu_(1)
    score_BHSS = score_BHSS.float().masked_fill(unseen_SS, -torch.inf)
    lse_BHS = score_BHSS.logsumexp(-1)
    weight_BHSS = (score_BHSS - lse_BHS[..., None]).exp().to(value_BHSD.dtype)
    return weight_BHSS @ value_BHSD, lse_BHS


class _Flex:
    """`_causal` by PyTorch's fused kernels, which keep no scores; only on a GPU."""

    def __init__(self) -> None:
        from torch.nn.attention import flex_attention as flex

        self._attention: Any = torch.compile(flex.flex_attention, dynamic=False)
        self._create_mask, self._masks = flex.create_block_mask, dict[int, Any]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        size = query.shape[2]
        if size not in self._masks:
            self._masks[size] = self._create_mask(
                lambda b, h, i, j: j <= i, None, None, size, size, device=query.device
            )
        found: tuple[Tensor, Tensor] = self._attention(
            query, key, value, block_mask=self._masks[size], enable_gqa=True, return_lse=True
        )
        return found


def _merge(
    out_BHSD: Tensor, lse_BHS: Tensor, query_BHSD: Tensor, key_JBHSD: Tensor, value_JBHSD: Tensor
) -> Tensor:
    """Add to the attention one key per step in between, which only its own position sees."""
    shared = query_BHSD.shape[1] // key_JBHSD.shape[2]
    key_JBHSD, value_JBHSD = (x.repeat_interleave(shared, 2) for x in (key_JBHSD, value_JBHSD))
    score_JBHS = (query_BHSD.float() * key_JBHSD.float()).sum(-1) * query_BHSD.shape[-1] ** -0.5
    whole_BHS = torch.logaddexp(lse_BHS, score_JBHS.logsumexp(0))
    weight_JBHS = (score_JBHS - whole_BHS).exp()
    found_BHSD: Tensor = (lse_BHS - whole_BHS).exp()[..., None] * out_BHSD
    found_BHSD = found_BHSD + (weight_JBHS[..., None] * value_JBHSD).sum(0)
    return found_BHSD.to(out_BHSD.dtype)


def loss_of(kind: str, overlaps: Sequence[Tensor], cross_entropies: Sequence[Tensor]) -> Tensor:
    """A scalar loss from each step's `agreement`.

    `kl`: the mean cross-entropy. `tv`: 1 - the mean overlap, which is the rate of rejections.
    `length`: 1 - accepted drafts per step; a draft counts if all before it are accepted as well.
    """
    if kind == "kl":
        return torch.stack(list(cross_entropies)).mean()
    rate_JBS = torch.stack(list(overlaps))
    return 1 - (rate_JBS.cumprod(dim=0) if kind == "length" else rate_JBS).mean()


def agreement(
    logits_BSV: Tensor, p_BSV: Tensor, temperature: float, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """How well q fits p at each position, float32, [B, S] each: sum(min(p, q)), which is the chance
    that a draft is accepted, and the cross-entropy -sum(p log q) in nats, which is KL(p, q) plus a
    term that does not depend on q.

    q is the softmax of `logits_BSV / temperature`. p has the target's probabilities of these ids;
    only its last dimension must be dense.
    """
    scale = torch.full((), 1 / temperature, device=logits_BSV.device)  # a number is compiled in
    overlap_BS, entropy_BS = _Agreement.apply(  # type: ignore[no-untyped-call]
        logits_BSV, p_BSV, scale, rows or Rows()
    )
    return overlap_BS, entropy_BS


class _Agreement(Function):
    """Both numbers of each position and their gradients in one pass, in the logits' dtype.

    Only the two gradients are as large as the logits; PyTorch's autograd would keep ten such
    tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, p_BSV: Tensor, scale: Tensor, rows: Rows
    ) -> tuple[Tensor, ...]:
        size = max(1, _PIECE[logits_BSV.device.type] // logits_BSV[0].numel())
        pieces = torch.split(logits_BSV, size), torch.split(p_BSV, size)
        found = [rows.measure(*both, scale) for both in zip(*pieces, strict=True)]
        whole = [
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)
        ]
        *numbers, slope_BSV, other_BSV = whole
        ctx.save_for_backward(slope_BSV, other_BSV)
        ctx.rows = rows
        return tuple(numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.rows.weigh(*ctx.saved_tensors, *gradients), None, None, None


def _measure(
    logits_BSV: Tensor, p_BSV: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overlap and cross-entropy [B, S], and their gradients [B, S, V] by the logits."""
    log_q_BSV = (logits_BSV.float() * scale).log_softmax(-1)
    q_BSV = log_q_BSV.exp()
    counted_BSV = q_BSV * (q_BSV < p_BSV)  # where q is the smaller, more of it helps
    overlap_slope = counted_BSV - q_BSV * counted_BSV.sum(-1, keepdim=True)
    entropy_slope = q_BSV * p_BSV.sum(-1, keepdim=True) - p_BSV
    overlap_BS, entropy_BS = torch.minimum(p_BSV, q_BSV).sum(-1), -(p_BSV * log_q_BSV).sum(-1)
    first, other = overlap_slope * scale, entropy_slope * scale
    return overlap_BS, entropy_BS, first.to(logits_BSV.dtype), other.to(logits_BSV.dtype)


def _weigh(one_BSV: Tensor, other_BSV: Tensor, by_one_BS: Tensor, by_other_BS: Tensor) -> Tensor:
    """The gradient of a loss by the logits, from its gradients by both numbers."""
    found_BSV = one_BSV * by_one_BS[..., None] + other_BSV * by_other_BS[..., None]
    return found_BSV.to(one_BSV.dtype)


class Rows(NamedTuple):
    """The functions that run over all logits; they may be fused."""

    measure: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = _measure
    weigh: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _weigh
