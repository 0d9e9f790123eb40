"""Whether a backend's own implementation of an EAGLE-3 head may stand in for its operators.

It is compared with them on random rows; a head that differs drafts through operators, slower. Wrong
drafts would cost no more than speed: the target verifies them.

Shape suffixes: T packed rows, N wanted ones, C the head's hidden size.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import UnsupportedModelError
from foretoken.models.eagle3 import Eagle3Head
from foretoken.models.guards import TOLERANCE
from foretoken.ops import AttentionBatch, UnfitError
from foretoken.ops.decoder import DraftHead, RoundHead
from foretoken.ops.steps import ForwardBatch

_log = logging.getLogger(__name__)

_BLOCK = 4  # tokens per cache block of the check
_PASSES = ((70, 1, 5), (1, 1, 1), (5, 5, 5), (1,))
"""New rows of each request in turn: a prompt, drafts of three, what the target verified, of one."""
_LONGEST = sum(map(max, _PASSES))


def fuse(head: Eagle3Head, positions: int, most_rows: int) -> None:
    """Let the backend's own implementation compute the head, if it has one that agrees.

    Args:
        positions: longest context, in tokens.
        most_rows: requests that draft at once.

    Raises:
        UnsupportedModelError: its operators give NaN or infinity.
    """
    try:
        fused = head.backend.draft_head(head.model(max(positions, _LONGEST)), most_rows)
    except UnfitError as reason:
        _log.info("The EAGLE-3 head runs operator by operator: %s", reason)
        fused = None
    tried = (None,) if fused is None else (None, fused)
    head.backend.compile_ahead(lambda: [_outputs(head, one) for one in tried])
    expected, *others = (_outputs(head, one) for one in tried)
    if not all(bool((output < torch.inf).all()) for output in expected):  # -inf: never drafted
        raise UnsupportedModelError(
            f"The EAGLE-3 head gives numbers that are not finite in {head.dtype}: its weights are "
            "damaged, or too large for this dtype (float16 ends at 65504). Try another `dtype`."
        )
    if fused is None:
        return
    error = _difference(expected, *others)
    if not error <= (tolerance := TOLERANCE[head.dtype]):  # NaN too
        head.fused = None
        _log.warning(
            "The EAGLE-3 head runs operator by operator, slower: that of backend `%s` differs by "
            "%.1e of the largest number (bound %.0e).",
            head.backend.name,
            error,
            tolerance,
        )
    elif isinstance(fused, RoundHead):
        head.drop_matrices()


@torch.no_grad()
def _outputs(head: Eagle3Head, fused: DraftHead | None) -> list[Tensor]:
    """Hidden states and logits of `_PASSES`, each from random hidden states of a target."""
    head.fused, device, config = fused, head.device, head.config
    generator = torch.Generator().manual_seed(0)
    columns = -(-_LONGEST // _BLOCK)
    blocks_BL = torch.randperm(3 * columns, generator=generator).view(3, columns).to(device)
    kv = KVPool(head.layer_shapes, 3 * columns + 1, _BLOCK, dtype=head.dtype, device=device)
    length_B, outputs = torch.zeros(3, dtype=torch.int64), list[Tensor]()
    for rows in _PASSES:
        new_B = torch.tensor(rows)
        length_B = length_B[: len(rows)] + new_B
        start_B1 = torch.nn.functional.pad(new_B.cumsum(0), (1, 0))
        position_T = torch.cat(
            [torch.arange(end - n, end) for end, n in zip(length_B.tolist(), rows, strict=True)]
        )
        attention = AttentionBatch(
            start_B1.to(device), length_B.to(device), blocks_BL[: len(rows)], _BLOCK,
            most_queries=max(rows), values_fit=True,
        )  # fmt: skip
        total = len(position_T)
        token_T = torch.randint(config.vocab_size, (total,), generator=generator).to(device)
        batch = ForwardBatch(token_T, position_T.to(device), token_T[:0], attention)
        aux = torch.randn(config.num_aux, total, config.target_hidden_size, generator=generator).to(
            device, head.dtype
        )
        if max(rows) == 1:
            feature_TC = head.features(aux.unbind())
            hidden_NC, logits_NV = head.draft(batch, feature_TC, kv)
        else:
            hidden_NC = head.forward(batch, aux.unbind(), kv, (start_B1[1:] - 1).to(device))
            logits_NV = head.logits(hidden_NC)
        outputs += [hidden_NC, logits_NV.clone()]
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The worst, relative to the largest finite number of each; NaN if other logits are -inf."""
    worst = 0.0
    for want, have in zip(expected, found, strict=True):
        is_finite = want.isfinite()
        if not torch.equal(is_finite, have.isfinite()):
            return float("nan")
        error = (have.float() - want.float())[is_finite].abs().max()
        worst = max(worst, (error / want[is_finite].abs().max()).item())
    return worst
