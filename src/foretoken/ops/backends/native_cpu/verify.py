"""Verification in three stages: native reductions, a rule, a native residual sampler.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from ctypes import byref

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
    token_BK = drafts.token_BK.to(torch.int64).contiguous()
    q_logits = drafts.logits_SKV
    if q_logits is not None:
        q_logits = q_logits.float().contiguous()
    logits_NV, num_B = logits_NV.float().contiguous(), drafts.num_B.contiguous()
    slot_B, position_B = slot_B.contiguous(), position_B.contiguous()
    real_q_B = drafts.real_q_B.contiguous()
    batch = library.VerifyBatch(
        logits_NV.data_ptr(),
        None if q_logits is None else q_logits.data_ptr(),
        slot_B.data_ptr(),
        position_B.data_ptr(),
        num_B.data_ptr(),
        token_BK.data_ptr(),
        real_q_B.data_ptr(),
        num_requests,
        most,
        logits_NV.shape[1],
        *((0, 0) if q_logits is None else q_logits.shape[1:]),
    )
    native, kernels = native_params(params), library.load()
    numbers = torch.empty(5, num_requests, most, dtype=torch.float64)
    reduced = library.Reduced(*[part.data_ptr() for part in numbers])
    n_accept_B = torch.zeros(num_requests, dtype=torch.int64)
    log_w_B = torch.zeros(num_requests, dtype=torch.float64)
    if most:
        kernels.foretoken_reduce(byref(native), byref(batch), byref(reduced))
        n_accept_B, log_w_B = decide(RuleInputs(*numbers[:3]))
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
