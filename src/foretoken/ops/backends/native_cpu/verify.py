"""Verification in three stages: native reductions, a rule, a native residual sampler.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from ctypes import byref
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.native import library
from foretoken.ops.backends import torch_cpu
from foretoken.ops.backends.native_cpu.process import native_params
from foretoken.ops.checks import check_verify
from foretoken.ops.rules import RuleInputs, get_rule
from foretoken.ops.types import DraftBlock, SlotParams, Verdict


def verify(
    logits_NV: Tensor,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    drafts: DraftBlock,
    *,
    rule: str = "standard",
    fp64_noise: bool = False,
) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The law of the output is exactly the target's (Leviathan et al. 2023, appendix A.1; Chen et
    al. 2023, theorem 1). A request whose deciding row is not finite gets -1 instead of a token.
    """
    if fp64_noise:
        return torch_cpu.verify(
            logits_NV, params, slot_B, position_B, drafts, rule=rule, fp64_noise=True
        )
    decide = get_rule(rule)
    check_verify(logits_NV, params, slot_B, position_B, drafts)
    num_requests, most = drafts.token_BK.shape
    given = _Given.of(logits_NV, slot_B, position_B, drafts)
    batch, native, kernels = given.packed(), native_params(params), library.load()
    numbers = torch.empty(5, num_requests, most, dtype=torch.float64)
    reduced = library.Reduced(*[part.data_ptr() for part in numbers])
    if most:
        kernels.foretoken_reduce(byref(native), byref(batch), byref(reduced))
        n_accept_B, log_w_B = decide(RuleInputs(*numbers[:3]))
    else:  # plain decoding: nothing to decide
        n_accept_B = torch.zeros(num_requests, dtype=torch.int64)
        log_w_B = torch.zeros(num_requests, dtype=torch.float64)
    token_BK1 = torch.empty(num_requests, most + 1, dtype=torch.int64)
    finite_B = torch.empty(num_requests, dtype=torch.bool)
    kernels.foretoken_emit(
        byref(native),
        byref(batch),
        byref(reduced),
        n_accept_B.data_ptr(),
        log_w_B.data_ptr(),
        token_BK1.data_ptr(),
        finite_B.data_ptr(),
    )
    return Verdict(token_BK1.to(drafts.token_BK.dtype), n_accept_B, finite_B)


class _Given(NamedTuple):
    """The arguments as the kernels read them; keeps alive what `packed` points to."""

    logits_NV: Tensor
    q_logits_SKV: Tensor | None
    slot_B: Tensor
    position_B: Tensor
    num_B: Tensor
    token_BK: Tensor
    real_q_B: Tensor

    @classmethod
    def of(
        cls, logits_NV: Tensor, slot_B: Tensor, position_B: Tensor, drafts: DraftBlock
    ) -> _Given:
        q_logits = drafts.logits_SKV
        return cls(
            logits_NV.float().contiguous(),
            None if q_logits is None else q_logits.float().contiguous(),
            slot_B.contiguous(),
            position_B.contiguous(),
            drafts.num_B.contiguous(),
            drafts.token_BK.to(torch.int64).contiguous(),
            drafts.real_q_B.contiguous(),
        )

    def packed(self) -> library.VerifyBatch:
        q_shape = (0, 0) if self.q_logits_SKV is None else self.q_logits_SKV.shape[1:]
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in self]
        return library.VerifyBatch(
            *addresses, *self.token_BK.shape, self.logits_NV.shape[1], *q_shape
        )
