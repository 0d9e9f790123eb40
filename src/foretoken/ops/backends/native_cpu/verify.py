"""Verification in native code.

STANDARD and COUPLED are decided there, draft by draft, in one call: a request's rows are read as
far as it accepts. A batch with another rule takes three stages, with `ops/rules.py` in the middle:
reductions of every row, the rule, the token after what is accepted.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from foretoken.native import library
from foretoken.ops.backends.native_cpu.arguments import native_batch, native_params
from foretoken.ops.checks import check_verify
from foretoken.ops.rules import RuleInputs, accept, weights
from foretoken.ops.types import DraftBlock, Edits, Rule, SlotParams, Verdict


def verify(
    logits_NV: Tensor,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    drafts: DraftBlock,
    *,
    edits: Edits | None = None,
    synthetic_rate_K: Tensor | None = None,
    fp64_noise: bool = False,
) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The law of the output is exactly the target's (Leviathan et al. 2023, appendix A.1; Chen et
    al. 2023, theorem 1; Sun et al. 2024, theorem 1). A request whose deciding row is not finite
    gets -1 instead of a token.
    """
    check_verify(logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K)
    num_requests, most = drafts.token_BK.shape
    verdict = Verdict(
        torch.empty(num_requests, most + 1, dtype=drafts.token_BK.dtype),
        torch.empty(num_requests, dtype=torch.int64),
        torch.empty(num_requests, dtype=torch.bool),
    )
    batch = native_batch(logits_NV, slot_B, position_B, drafts, edits, fp64_noise)
    native, outcome = native_params(params), _outcome(verdict)
    if not library.load().foretoken_verify(byref(native), byref(batch), byref(outcome)):
        rule_B = params.rule_S[slot_B]
        return _verify_in_stages(native, batch, verdict, rule_B, synthetic_rate_K)
    return verdict


def _verify_in_stages(
    native: library.Params,
    batch: library.VerifyBatch,
    verdict: Verdict,
    rule_B: Tensor,
    synthetic_rate_K: Tensor | None,
) -> Verdict:
    """Any mix of rules; writes what `verdict` holds but `n_accept_B`, which is new."""
    kernels, params, given = library.load(), byref(native), byref(batch)
    num_requests, most = len(rule_B), verdict.token_BK1.shape[1] - 1
    log_p_BK, log_q_BK, log_u_BK, mass_BK = torch.empty(4, num_requests, most, dtype=torch.float64)
    finite_BK = torch.empty(num_requests, most, dtype=torch.bool)
    addresses = [part.data_ptr() for part in (log_p_BK, log_q_BK, log_u_BK, finite_BK)]
    reduced = byref(library.Reduced(*addresses))
    kernels.foretoken_reduce(params, given, reduced)
    inputs = RuleInputs(log_p_BK, log_q_BK, log_u_BK, synthetic_rate_K, mass_BK)
    log_w_BK1 = weights(inputs, rule_B).contiguous()
    if Rule.BLOCK in rule_B.tolist():
        kernels.foretoken_masses(params, given, reduced, log_w_BK1.data_ptr(), mass_BK.data_ptr())
    n_accept_B = accept(inputs, rule_B)
    decided = Verdict(verdict.token_BK1, n_accept_B.contiguous(), verdict.finite_B)
    outcome: Any = byref(_outcome(decided))
    kernels.foretoken_emit(params, given, reduced, log_w_BK1.data_ptr(), outcome)
    return decided


def _outcome(verdict: Verdict) -> library.Outcome:
    return library.Outcome(
        verdict.token_BK1.data_ptr(), verdict.n_accept_B.data_ptr(), verdict.finite_B.data_ptr()
    )
