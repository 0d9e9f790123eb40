"""The op `verify`: its launches, the residual pass over p and q, and the draws that follow it.

In `residual_kernel` many programs sum a request's residual, each over some blocks of a row, and
count themselves. The last one to arrive applies the block rule, if that is pending, and draws the
token: that saves a fourth launch. If a request has nothing to sum, its first program draws.

If there are few requests, `settle_kernel` replaces both `decide_kernel` and `residual_kernel`. Each
of its programs makes the request's decision by itself and draws the best token of one block; the
last one to arrive takes the best of these. That saves a launch, and the draw at the end. With many
requests, deciding so often is wasted work (decision 010). `settle_kernel` lacks BLOCK, which first
needs the masses of all rows. All programs of a request must reach the same decision: until all have
arrived, a program changes nothing that decisions read (what it stores to `Scratch.lse_N` is equal).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken.ops.backends.triton import launch, rules

from foretoken.ops.backends.triton.decide import (  # isort: skip
    ALL_ROWS, DONE, DRAW, FLOATS, HEADER, INTEGERS, ONE_ROW, Request, RequestAgenda,
    accept_uniforms, agenda_of, all_finite, decide_kernel, decide_request, draw_next_token,
    is_finite, load_line, load_masses, log2_of, read_request, shifted, store_accepted, store_token,
    value_at,
)  # fmt: skip
from foretoken.ops.backends.triton.draw import (  # isort: skip
    FROM_P, Softmax, Source, block_masses, draw_verified, load_list, log2_weights, q_offset,
    with_mode,
)  # fmt: skip
from foretoken.ops.backends.triton.noise import (  # isort: skip
    RESIDUAL_TOKEN, Address, argmax_with, block_address, gumbel_at, gumbel_span, noise_span,
)  # fmt: skip
from foretoken.ops.backends.triton.records import Agenda, Batch, Candidates, Drafts

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, REQUEST_CHUNK, Settings, load_span, log2_sum, read_settings, wait_for_writes,
)  # fmt: skip
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.types import Rule, Stream, Verdict, VerifyBatch

FEW = tl.constexpr(4)  # `settle_kernel` takes up to so many requests; a power of 2


@triton.jit
def residual_kernel(batch: Batch, drafts: Drafts, outcome: Verdict, agenda: Agenda, parts, lines,
                    KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr, PER: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """Programs: (request, line of its agenda, PER blocks of that line's row).

    If DRAW is pending, the first program draws; if ONE_ROW, the programs of line 0 sum its row, and
    the last one to arrive draws. If ALL_ROWS, line i is row i of the request. Of the programs that
    sum rows 1..K-1 the last one to arrive applies the block rule. If the rule accepts a draft, row
    0 is not needed, and the same program draws. If it accepts none, the last one to arrive at row 0
    draws: a program that sums row 0, or the one that applied the rule.

    Requests come in reverse: the L2 cache probably still has the rows that the scan read last. Row
    0 of all requests runs last: under BLOCK its mass is unused once a draft has been accepted.

    parts: programs per row. lines: how many lines of an agenda have programs.
    """
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part, item = pid % parts, pid // parts
    requests = tl.num_programs(0) // (parts * lines)
    line_index, b = item // requests, item % requests
    settings = read_settings(batch.slots, tl.load(batch.requests.slot_B + b), batch.rows.V)
    wait_for_writes(OVERLAP)
    agenda_b = agenda_of(agenda, b, drafts.K)
    pending = tl.load(agenda_b.pending, cache_modifier=".cg")
    line = load_line(agenda_b, line_index, True)
    accepted = tl.load(outcome.n_accept_B + b).to(tl.int32)
    # To sum one row, the programs of line 0 suffice; to draw, the first of these does.
    idle = (pending == DONE) | ((pending != ALL_ROWS) & (line_index > 0))
    if idle | ((pending == DRAW) & (part > 0)):
        return
    i = tl.arange(0, KP)
    # `expected` programs count themselves in `arrived`; the last of them continues.
    arrived, expected, later_rows = agenda_b.arrived, tl.full((), 0, tl.int32) + parts, 0
    if pending == ALL_ROWS:
        to_sum = (load_line(agenda_b, i, i < lines).row >= 0).to(tl.int32)
        later_rows = tl.sum(tl.where(i > 0, to_sum, 0), axis=0)  # rows to sum, except row 0
        if (line.row < 0) & ((tl.sum(to_sum, axis=0) > 0) | (part + line_index > 0)):
            return  # in a request without rows to sum, the first program continues
        expected = later_rows * parts
        if line_index == 0:  # the program that applies the rule arrives here, too
            arrived, expected = agenda_b.arrived_first, parts + tl.minimum(later_rows, 1)
    if (line.row >= 0) & (pending != DRAW):
        address = Address(settings.key, line.position, 0, RESIDUAL_TOKEN)
        mass, best, _ = measure_residual(batch, line.row, part, settings, line.p, line.source,
                                         address, PER, FP64)  # fmt: skip
        j = part * PER + tl.arange(0, PER)
        place = line.row * batch.rows.NB + j
        tl.store(batch.scratch.mass_NJ + place, mass, mask=j < batch.rows.NB)
        if batch.scratch.filtered is not None:
            if settings.flat:
                tl.store(batch.scratch.best_NJ + place, best, mask=j < batch.rows.NB)
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel") != expected - 1:
            return
    # If DRAW or ONE_ROW is pending, the rows 0..accepted are finite.
    row, position, source, finite = line.row, line.position, line.source, True
    if pending == ALL_ROWS:
        request = read_request(batch, b, True, REQUEST_CHUNK)
        accepted = tl.full((), 0, tl.int32)
        if (line_index > 0) | (later_rows == 0):
            accepted = _block_rule(batch, drafts, agenda_b, request, b, KP, NBP, FP64)
            lse = tl.load(batch.scratch.lse_N + request.first + i, mask=i <= accepted, other=0.0)
            finite = all_finite(lse, accepted)
            store_accepted(outcome, drafts, b, accepted, finite, KP)
            if (accepted == 0) & (later_rows > 0) & (load_line(agenda_b, 0, True).row >= 0):
                tl.debug_barrier()
                if tl.atomic_add(agenda_b.arrived_first, 1, sem="acq_rel") != parts:
                    return  # row 0 is still being summed; its last program will draw
            tl.store(agenda_b.pending, DONE)  # later programs of row 0 have nothing to do
        else:  # another program applied the rule, which accepted no draft
            finite = tl.load(outcome.finite_B + b) != 0
        next_line = load_line(agenda_b, tl.minimum(accepted, drafts.K - 1), True)
        mode = tl.where(accepted < request.num, next_line.source.mode, FROM_P)
        source = with_mode(next_line.source, mode)
        row, position = request.first + accepted, request.position + accepted
    drawn_token = draw_verified(batch, row, settings, source, position, NBP, FP64)
    store_token(outcome, drafts, b, accepted, drawn_token, finite)


@triton.jit
def measure_residual(batch: Batch, row, part, settings: Settings, p: Softmax, source: Source,
                     address: Address, PER: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """(log2 masses, best scores, logits) of PER blocks of a row's residual, from part * PER on.
    Without flat noise the best scores mean nothing."""
    width: tl.constexpr = PER * BLOCK
    start = part * width
    off = start + tl.arange(0, width)
    x = load_span(batch.rows, row, start, width, "evict_first")
    mass = block_masses(x, off, p, source, batch.q, PER)
    best = mass
    if batch.scratch.filtered is not None:
        if settings.flat:
            score = log2_weights(x, off, p, source, batch.q)
            score = score + gumbel_span(address, start, width, FP64)
            best = tl.max(tl.reshape(score, (PER, BLOCK)), axis=1).to(tl.float32)
    return mass, best, x


@triton.jit
def _block_rule(batch: Batch, drafts: Drafts, agenda_b: RequestAgenda, request: Request, b,
                KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """How many drafts BLOCK accepts, from the residual masses of all rows that have a q."""
    i, scratch, num = tl.arange(0, KP), batch.scratch, request.num
    lines = load_line(agenda_b, i, i < num)
    log_w = lines.source.log_w
    mass = tl.exp2(log_w) * (1 - tl.exp2(lines.log_p))  # for a one-hot q: w (1 - p(x_i))
    if batch.q is not None:
        if tl.load(drafts.real_q_B + b) != 0:
            block_mass = load_masses(batch, request.first + i, i < num, NBP)
            mass = tl.where(log_w > float("-inf"), tl.sum(tl.exp2(block_mass), axis=1), 0.0)
            if scratch.filtered is not None:
                for k in range(num):  # rows with a short list
                    row = request.first + k
                    count = tl.load(scratch.filtered.count_N + row)
                    if count >= 0:
                        line = load_line(agenda_b, k, True)
                        x, id_ = load_list(scratch.filtered, row, count)
                        weight = log2_weights(x, id_, line.p, line.source, batch.q)
                        mass = tl.where(i == k, tl.exp2(log2_sum(weight)), mass)
    mass = tl.where((i < num) & is_finite(lines.p.lse), mass, 0.0)
    has_q = (i < num) & (lines.log_q > float("-inf"))
    is_last = shifted(has_q.to(tl.float32), 1) == 0
    log_u = log2_of(accept_uniforms(request, i, FP64), FP64)
    mass_next = shifted(mass, 1)
    return rules.block(lines.log_next, mass_next, is_last, lines.log_q, log_u, i, num)


@triton.jit
def settle_kernel(batch: Batch, drafts: Drafts, outcome: Verdict, candidates: Candidates,
                  KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr,
                  OVERLAP: tl.constexpr):  # fmt: skip
    """Programs: (request, block of the row to be drawn from). No slot can be under BLOCK.
    ONE_ROW: every program draws from its block of the residual; the last to arrive takes the best
    of these tokens. In all other cases the first program draws, and all others do nothing."""
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    NB = batch.rows.NB
    b, block = tl.program_id(0) // NB, tl.program_id(0) % NB
    decision = decide_request(batch, drafts, None, b, RAGGED=True, UNDER_BLOCK=False,
                              RESIDUALS=True, CHUNK=FEW, KP=KP, NBP=NBP, FP64=FP64,
                              OVERLAP=OVERLAP)  # fmt: skip
    request, drafted, p, accepted, pending, mode, draws_decide = decision
    settings, finite = request.settings, all_finite(p.lse, accepted)
    row, position = request.first + accepted, request.position + accepted
    p = Softmax(value_at(p.threshold, accepted), settings.scale, value_at(p.lse, accepted))
    source = Source(
        mode, value_at(drafted.token, accepted), q_offset(batch.q, settings.slot, accepted),
        value_at(drafted.q_threshold, accepted), value_at(drafted.q_lse, accepted), 0.0,
    )  # fmt: skip
    if block == 0:
        if not draws_decide:
            store_accepted(outcome, drafts, b, accepted, finite, KP)
    drawn_token = tl.full((), -1, tl.int64)
    undrawn = (pending == ONE_ROW) | (pending == DRAW)
    if pending == ONE_ROW:
        address = Address(settings.key, position, 0, RESIDUAL_TOKEN)
        score_p = candidates.score_token_BJ2 + b.to(tl.int64) * NB * 2
        _store_candidate(batch, row, block, settings, p, source, address, score_p + 2 * block, FP64)
        tl.debug_barrier()
        if tl.atomic_add(candidates.arrived_B + b, 1, sem="acq_rel") != NB - 1:
            return
        j = tl.arange(0, NBP)
        score = tl.load(score_p + 2 * j, mask=j < NB, other=float("-inf"), cache_modifier=".cg")
        token = tl.load(score_p + 2 * j + 1, mask=j < NB, other=0.0, cache_modifier=".cg")
        best, token = tl.reduce((score, token), 0, _better)
        drawn_token, undrawn = token.to(tl.int64), best == float("-inf")
        if undrawn:  # with masses of 0 `draw` uses p; no program still reads the masses
            tl.store(batch.scratch.mass_NJ + row * NB + j, float("-inf"), mask=j < NB)
            tl.debug_barrier()
    else:
        if block > 0:
            return
    if undrawn:
        drawn_token = draw_verified(batch, row, settings, source, position, NBP, FP64)
    if draws_decide:
        accepted, drawn_token = draw_next_token(batch, decision, NBP, FP64)
        finite = all_finite(decision.p.lse, accepted)
        store_accepted(outcome, drafts, b, accepted, finite, KP)
    store_token(outcome, drafts, b, accepted, drawn_token, finite)


@triton.jit
def _store_candidate(batch: Batch, row, block, settings: Settings, p: Softmax, source: Source,
                     address: Address, candidate, FP64: tl.constexpr):  # fmt: skip
    """Store a block's best token of the residual, and the score with which the block competes."""
    mass, best, x = measure_residual(batch, row, block, settings, p, source, address, 1, FP64)
    score = mass + gumbel_at(block_address(address), block + tl.arange(0, 1), FP64)
    score = tl.where(settings.flat, best.to(tl.float64), score.to(tl.float64))
    first = block * BLOCK
    weight = log2_weights(x, first + tl.arange(0, BLOCK), p, source, batch.q)
    token = first + argmax_with(weight, noise_span(address, first, BLOCK, FP64), FP64)
    tl.store(candidate, tl.max(tl.where(mass > float("-inf"), score, float("-inf")), axis=0))
    tl.store(candidate + 1, token.to(tl.float64))


@triton.jit
def _better(score, token, other_score, other_token):
    """(the larger score, its token); of equal scores the lower token."""
    first = (score > other_score) | ((score == other_score) & (token < other_token))
    return tl.where(first, score, other_score), tl.where(first, token, other_token)


def verify(batch: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    Three launches (two for few requests), more with filters, and one more for edit entries. The
    host never waits for the device.

    The output has exactly the target's distribution (Leviathan et al. 2023, appendix A.1; Sun et
    al. 2024, theorem 1; Daliri et al. 2024). If one of the rows 0..n_accept of a request is not
    finite, the request's next token is -1.
    """
    logits_NV, params, slot_B, position_B, proposal, edits, rate_K, fp64, _ = batch
    device, (num_requests, max_drafts) = logits_NV.device, proposal.token_BK.shape
    verdict = Verdict(
        torch.empty(num_requests, max_drafts + 1, dtype=proposal.token_BK.dtype, device=device),
        torch.empty_like(slot_B),
        torch.empty_like(slot_B, dtype=torch.bool),
    )
    if not num_requests:
        return verdict
    requests = launch.requests_of(proposal.num_B, slot_B, position_B, proposal.num_B)
    block_rule = Rule.BLOCK in params.rules
    residuals = max_drafts > 0 and (proposal.cache is not None or block_rule or params.has_filters)
    settles = residuals and num_requests <= FEW.value and not block_rule
    call = launch.Call(
        logits_NV, params, requests, edits, proposal.cache, fp64, Stream.TARGET_TOKEN,
        max_drafts + 1,
    )  # fmt: skip
    blocks = call.batch.rows.NB
    drafts = Drafts(
        proposal.token_BK.contiguous(), proposal.real_q_B.contiguous(),
        None if rate_K is None else rate_K.contiguous(), max_drafts,
    )  # fmt: skip
    constants = (max(2, 1 << max_drafts.bit_length()), call.blocks_padded, fp64)
    if settles:
        candidates = Candidates(
            torch.empty(num_requests, dtype=torch.int64, device=device),
            torch.empty(num_requests * blocks * 2, dtype=torch.float64, device=device),
        )
        reduce_rows(call, counter_B=candidates.arrived_B)
        call.launch(settle_kernel, num_requests * blocks, drafts, verdict, candidates, *constants)
        return verdict
    agenda = None
    if residuals:
        integers, floats = HEADER.value + INTEGERS.value * max_drafts, FLOATS.value * max_drafts
        agenda = Agenda(
            torch.empty(num_requests * integers, dtype=torch.int64, device=device),
            torch.empty(num_requests * floats, dtype=torch.float32, device=device),
        )
    reduce_rows(call)
    args = (drafts, verdict, agenda)
    call.launch(decide_kernel, num_requests, *args, max_drafts > 0, block_rule, *constants)
    if residuals:
        lines, parts = max_drafts if block_rule else 1, -(-blocks // launch.BLOCKS_PER_LOAD)
        call.launch(
            residual_kernel, num_requests * lines * parts, *args, parts, lines, *constants,
            launch.BLOCKS_PER_LOAD, **launch.at_most_registers(96),
        )  # fmt: skip
    return verdict
