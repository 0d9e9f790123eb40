"""The training forward of an EAGLE-3 head: several draft steps from every position of a text.

Belongs here: attention as drafting has it, for all positions at once. The rest of a head is
`models/eagle3.py` itself, so that what is trained is what drafts.

Step j of position s stands for the pass that a drafter runs for its draft j behind the text up to
s + 1: it reads the token at s + j + 1, and what it puts out predicts the token at s + j + 2. Step 0
reads the target's feature of s, step j what step j - 1 of s put out ("training-time test", Li et
al. 2025). So step j of s sees step 0 of all positions up to s, and of s alone the steps in between.

Shape suffixes: B texts, T tokens of a text, S positions drafted from, J steps, H heads, D head
size, G heads that share a key, C the head's hidden size, X positions in all (B S).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretoken.models.eagle3 import Eagle3Head


def unroll(
    head: Eagle3Head, aux: Sequence[Tensor], token_BT: Tensor, steps: int
) -> Iterator[Tensor]:
    """What each step puts out, [X, C] in turn; S = T - `steps`, so that all have tokens to read.

    Args:
        aux: hidden states of the target, [B, T, target_hidden_size] each, as `features` takes them.
    """
    size = token_BT.shape[1] - steps
    feature_XC = head.features([state[:, :size].flatten(0, 1) for state in aux])
    attention = UnrolledAttention(len(token_BT), size)
    position_X = torch.arange(size, device=token_BT.device).repeat(len(token_BT))
    for j in range(steps):
        token_X = token_BT[:, j + 1 : j + 1 + size].flatten()
        feature_XC = head.block(token_X, position_X + j, feature_XC, attention)
        yield feature_XC


class UnrolledAttention:
    """Attention of the steps in turn; keeps the keys and values of all that came before.

    Plain products: equal bits in every run, also on a GPU. Scores take B H S (S + J) numbers.
    """

    def __init__(self, texts: int, size: int) -> None:
        self._shape = (texts, size)
        self._keys, self._values = list[Tensor](), list[Tensor]()

    def __call__(self, query_XHD: Tensor, key_XHD: Tensor, value_XHD: Tensor) -> Tensor:
        query_BHSD, key_BHSD, value_BHSD = (
            x.view(*self._shape, *x.shape[1:]).transpose(1, 2)
            for x in (query_XHD, key_XHD, value_XHD)
        )
        self._keys.append(key_BHSD)
        self._values.append(value_BHSD)
        # Heads that share a key lie beside each other.
        (texts, size), (_, heads, size_D) = self._shape, key_XHD.shape
        query_BHGSD = query_BHSD.reshape(texts, heads, -1, size, size_D) * size_D**-0.5
        (first_BHSD, *later), (values_BHSD, *later_values) = self._keys, self._values
        unseen_SS = torch.ones(size, size, dtype=torch.bool, device=query_XHD.device).triu_(1)
        score_BHGSS = query_BHGSD @ first_BHSD.unsqueeze(2).transpose(-1, -2)
        scores = [score_BHGSS.masked_fill(unseen_SS, -torch.inf)]
        scores += [(query_BHGSD * key.unsqueeze(2)).sum(-1, keepdim=True) for key in later]
        weight = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(query_XHD.dtype)
        out_BHGSD = weight[..., :size] @ values_BHSD.unsqueeze(2)
        for i, value in enumerate(later_values):
            out_BHGSD = out_BHGSD + weight[..., size + i, None] * value.unsqueeze(2)
        return out_BHGSD.flatten(1, 2).transpose(1, 2).flatten(0, 1)
