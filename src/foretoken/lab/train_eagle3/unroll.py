"""The training forward of an EAGLE-3 head: several draft steps from every position of a text.

Belongs here: attention as drafting has it, for all positions at once. The rest of a head is
`models/eagle3.py` itself, so that what is trained is what drafts.

Step j of position s stands for the pass that a drafter runs for its draft j behind the text up to
s + 1: it reads the token at s + j + 1, and what it puts out predicts the token at s + j + 2. Step 0
reads the target's feature of s, step j what step j - 1 of s put out ("training-time test", Li et
al. 2025). So step j of s sees step 0 of all positions up to s, and of s alone the steps in between.

Shape suffixes: B texts, T tokens of a text, S positions drafted from, J steps, H heads, D head
size, C the head's hidden size, X positions in all (B S).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models.eagle3 import Eagle3Head

Fuse = Callable[[Any], Any]


class Unroll:
    """The steps, on a device.

    Args:
        fuse: what is done to each function that runs over all positions: `torch.compile`, or
            nothing.
    """

    def __init__(self, device: torch.device, fuse: Fuse = lambda function: function) -> None:
        self._project, self._finish = fuse(Eagle3Head.project), fuse(Eagle3Head.finish)
        self._merge = fuse(_merge)
        self._first: Any = _Flex() if device.type == "cuda" else _causal

    def __call__(
        self, head: Eagle3Head, aux: Sequence[Tensor], token_BT: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """What each step puts out, [X, C] in turn; S = T - `steps`: all have tokens to read.

        Args:
            aux: hidden states of the target, [B, T, target_hidden_size] each, as `features` takes
                them.
        """
        size = token_BT.shape[1] - steps
        feature_XC = head.features([state[:, :size].flatten(0, 1) for state in aux])
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


def _causal(query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all positions up to one's own, and the logarithm of its scores' exponentials'
    sum [B, H, S], float32. Scores take B H S S numbers."""
    size, shared = query_BHSD.shape[2], query_BHSD.shape[1] // key_BHSD.shape[1]
    key_BHSD, value_BHSD = (x.repeat_interleave(shared, 1) for x in (key_BHSD, value_BHSD))
    score_BHSS = (query_BHSD * query_BHSD.shape[-1] ** -0.5) @ key_BHSD.transpose(-1, -2)
    unseen_SS = torch.ones(size, size, dtype=torch.bool, device=query_BHSD.device).triu_(1)
    score_BHSS = score_BHSS.float().masked_fill(unseen_SS, -torch.inf)
    lse_BHS = score_BHSS.logsumexp(-1)
    weight_BHSS = (score_BHSS - lse_BHS[..., None]).exp().to(value_BHSD.dtype)
    return weight_BHSS @ value_BHSD, lse_BHS


class _Flex:
    """`_causal` by PyTorch's fused kernels, which keep no scores; on a GPU only."""

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
    """Attention with one key more of each step in between, which only their own position sees."""
    shared = query_BHSD.shape[1] // key_JBHSD.shape[2]
    key_JBHSD, value_JBHSD = (x.repeat_interleave(shared, 2) for x in (key_JBHSD, value_JBHSD))
    score_JBHS = (query_BHSD.float() * key_JBHSD.float()).sum(-1) * query_BHSD.shape[-1] ** -0.5
    whole_BHS = torch.logaddexp(lse_BHS, score_JBHS.logsumexp(0))
    weight_JBHS = (score_JBHS - whole_BHS).exp()
    found_BHSD: Tensor = (lse_BHS - whole_BHS).exp()[..., None] * out_BHSD
    found_BHSD = found_BHSD + (weight_JBHS[..., None] * value_JBHSD).sum(0)
    return found_BHSD.to(out_BHSD.dtype)
