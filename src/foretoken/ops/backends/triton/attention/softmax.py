"""Scores of a tile of keys, and their running softmax in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Scores

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a key that is not seen. Finite, so that a row that has seen nothing yet has weights
# (of 1, gone as soon as it sees a key) and no NaN; a tile that is not seen changes no bit.
UNSEEN = tl.constexpr(-1e30)


@triton.jit
def score(product, scores: Scores):
    """Products of queries and keys as scores, base 2."""
    if scores.softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends
        twice = product * (scores.scale * (2 * LOG2E) / scores.softcap)
        return (1 - 2 / (tl.exp2(twice) + 1)) * (scores.softcap * LOG2E)
    return product * (scores.scale * LOG2E)


@triton.jit
def settled(top, total, acc, h_R, live_R, scores: Scores):
    """The values of R rows of heads h: acc / total, a sink's weight added."""
    if scores.sink_H is not None:
        sink = tl.load(scores.sink_H + h_R, mask=live_R, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        mine = tl.exp2(top - highest)
        return acc * mine[:, None] / (total * mine + tl.exp2(sink - highest))[:, None]
    return acc / total[:, None]
