"""`trace`: from its records alone every decision can be made again, whatever happens to a request.

u is drawn again from the seed, by the oracle's noise; what each rule says of the numbers is written
again here. Decisions within 1e-5 of their threshold are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.engine.boundary import build_output
from foretoken.engine.rounds import trace_round
from foretoken.ops import Evidence, Stream
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.outputs import REASONS, CompletionOutput, RequestOutput, TokenTrace
from foretoken.slots.step import Outcome
from tests.engine.doubles import double

PROMPTS = ["def f(x):\n", "import os", "a = 1\na = 1\na ="]
RATES = [0.9, 0.6, 0.6, 0.3]
RULES = ["standard", "block", "coupled", "synthetic"]
KINDS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "greedy": {"draft_sample_method": "greedy"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
}
NOT_NUMBERS = {"p", "q", "u", "threshold", "residual_mass", "dropped"}


def build(target: Path, draft: Path, kind: str, rule: str = "standard", **options: Any) -> LLM:
    spec = {"num_speculative_tokens": 4, "rejection_sample_method": rule, **KINDS[kind]}
    if kind != "ngram":
        spec["model"] = str(draft)
    if rule == "synthetic":
        spec["synthetic_acceptance_rates"] = list(torch.tensor(RATES).cumprod(0).tolist())
    return LLM(str(target), spec, block_size=4, max_num_seqs=6, max_model_len=128, **options)


def params_of(**given: Any) -> list[SamplingParams]:
    mine: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "trace": True, "n": 2, **given}
    return [SamplingParams(seed=70 + i, **mine) for i in range(len(PROMPTS))]


def accepted_by(rule: str, drafts: Sequence[TokenTrace]) -> int:
    """How many drafts of a round are accepted, by what its records say."""
    if rule == "greedy":
        return next((i for i, d in enumerate(drafts) if d.p < 1), len(drafts))
    ratios = [d.p / (d.q or 1.0) for d in drafts]
    if rule == "synthetic":
        ratios = RATES
    if rule != "block":
        tests = zip(drafts, ratios, strict=False)
        return next((i for i, (d, ratio) in enumerate(tests) if d.u >= ratio), len(drafts))
    tau, w = 0, 1.0
    for i, (draft, ratio) in enumerate(zip(drafts, ratios, strict=True), 1):
        w = min(1.0, w * ratio)
        h = w
        if i < len(drafts):
            assert draft.residual_mass is not None
            rest = draft.residual_mass + 1 - w
            h = draft.residual_mass / rest if rest > 0 else 1.0
        assert draft.threshold == pytest.approx(h, abs=1e-12)
        if draft.u < h:
            tau = i
    return tau


def check_sample(output: RequestOutput, sample: CompletionOutput, temperature: float) -> int:
    """Raise AssertionError unless the records explain the tokens; how many drafts were looked at"""
    trace, looked_at = sample.trace, 0
    assert trace is not None
    assert [token.token_id for token in trace] == sample.token_ids
    assert [token.origin for token in trace] == sample.origins
    first = len(output.prompt_token_ids)
    assert [token.position for token in trace] == [*range(first, first + len(trace))]
    rounds = [[*tokens] for _, tokens in groupby(trace, lambda token: token.round)]
    assert [tokens[0].round for tokens in rounds] == [*range(len(rounds))]
    for *accepted, last in rounds:
        assert all(token.origin == "accepted" and not token.dropped for token in accepted)
        drafts = [*accepted, *([last] if last.draft_index is not None else []), *last.dropped]
        assert [draft.draft_index for draft in drafts] == [*range(len(drafts))]
        assert (last.origin == "plain") == (not drafts) == (last.drafter is None)
        looked_at += check_drafts(sample, last, drafts, temperature)
    return looked_at


def check_drafts(
    sample: CompletionOutput, last: TokenTrace, drafts: Sequence[TokenTrace], temperature: float
) -> int:
    rule = "greedy" if temperature == 0 and last.rule != "synthetic" else last.rule
    for draft in drafts:
        assert draft.rule == last.rule
        assert (draft.reason is not None) == (draft.origin == "rejected")
        assert draft.reason in (None, REASONS[rule])
        if rule in ("coupled", "greedy"):
            assert draft.u is draft.threshold is None
            continue
        assert draft.u is not None
        name = draft.position, draft.draft_index, Stream.ACCEPT, 0
        assert draft.u == uniform_of(0, sample.seed, *name)
    tau = sum(draft.origin == "accepted" for draft in drafts)
    assert [draft.origin == "accepted" for draft in drafts] == [i < tau for i in range(len(drafts))]
    near = [d.u is not None and abs(d.u - d.threshold) < 1e-5 for d in drafts]
    if rule == "coupled":
        assert last.origin != "resampled" or drafts[tau].token_id != last.token_id
    elif not any(near):
        assert accepted_by(rule, drafts) == tau
    rejected = [draft for draft in drafts if draft.origin == "rejected"]
    assert (last.origin == "resampled") <= bool(rejected)
    if rule == "block":
        return len(drafts)
    assert len(rejected) <= 1
    return tau + len(rejected)


def served(llm: LLM, temperature: float, **given: Any) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, params_of(temperature=temperature, **given))
    assert all(output.error is None for output in outputs)
    return outputs


def check_all(llm: LLM, temperature: float, **given: Any) -> int:
    outputs = served(llm, temperature, **given)
    return sum(check_sample(o, sample, temperature) for o in outputs for sample in o.outputs)


def check_equal(mine: Sequence[TokenTrace] | None, theirs: Sequence[TokenTrace] | None) -> None:
    """Equal records, up to rounding."""
    assert (mine is None) == (theirs is None)
    assert len(mine or ()) == len(theirs or ())
    for one, other in zip(mine or (), theirs or (), strict=True):
        for field in fields(TokenTrace):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name in NOT_NUMBERS - {"dropped"}:
                assert a == (b if b is None else pytest.approx(b, rel=1e-3, abs=1e-5)), field.name
            elif field.name != "dropped":
                assert a == b, field.name
        check_equal(one.dropped, other.dropped)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_decisions_follow_from_the_records(
    target: Path, draft: Path, kind: str, rule: str, temperature: float
) -> None:
    llm = build(target, draft, kind, rule)
    assert check_all(llm, temperature) > 20
    filters: dict[str, Any] = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
    assert check_all(llm, temperature, repetition_penalty=1.2, bad_words=["a"], **filters) > 0


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("rule", RULES)
def test_backends_tell_the_same(target: Path, draft: Path, rule: str, backend: str) -> None:
    given: dict[str, Any] = {"max_tokens": 8, "n": 1, "logit_bias": {40: 2.0}}
    one, other = (
        served(build(target, draft, "draft_model", rule, backend=name), 0.9, **given)
        for name in ("auto", backend)
    )
    for mine, theirs in zip(one, other, strict=True):
        check_equal(mine.outputs[0].trace, theirs.outputs[0].trace)


def test_p_is_the_probability_after_edits(target: Path, draft: Path) -> None:
    """At temperature 1 it is that of the log-probabilities, which know no edits."""
    llm = build(target, draft, "draft_model")
    asked: dict[str, Any] = {"temperature": 1.0, "trace": True, "logprobs": 0, "seed": 3}
    params = [SamplingParams(**asked), SamplingParams(allowed_token_ids=[77], **asked)]
    raw, edited = (output.outputs[0] for output in llm.generate(PROMPTS[:2], params))
    assert raw.trace
    assert raw.logprobs
    assert edited.trace
    for token, row in zip(raw.trace, raw.logprobs, strict=True):
        assert token.p == pytest.approx(math.exp(row[token.token_id].logprob), rel=1e-4)
    assert [token.p for token in edited.trace] == [1.0] * len(edited.token_ids)


def test_preemption_changes_no_record(target: Path, draft: Path) -> None:
    few, many = (
        served(build(target, draft, "draft_model", num_blocks=blocks), 0.9) for blocks in (24, 300)
    )
    assert sum(output.metrics.num_preemptions for output in few) > 0
    for mine, theirs in zip(few, many, strict=True):
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            check_equal(a.trace, b.trace)


def test_an_aborted_request_keeps_its_records(target: Path, draft: Path) -> None:
    engine = build(target, draft, "draft_model").engine
    params = params_of(temperature=0.9)[0]
    group = engine.add("a", [5, 3, 8, 1], params)
    for _ in range(4):
        engine.step()
    engine.abort(group)
    output = build_output(engine, group)
    assert all(sample.finish_reason == "abort" for sample in output.outputs)
    assert sum(check_sample(output, sample, 0.9) for sample in output.outputs) > 0


def test_a_round_that_is_cut_short_keeps_its_drafts(target: Path, draft: Path) -> None:
    """A stop token within it: drafts accepted after it are in the record and not emitted."""
    llm = build(target, draft, "draft_model")
    asked: dict[str, Any] = {"temperature": 0.9, "n": 1, "max_tokens": 60}
    whole = served(llm, **asked)[0].outputs[0].trace or []
    cut = next(
        token
        for token, following in pairwise(whole)
        if token.origin == following.origin == "accepted"
        and token.round == following.round
        and token.token_id not in [t.token_id for t in whole[: whole.index(token)]]
    )
    output = served(llm, stop_token_ids=[cut.token_id], **asked)[0]
    trace = output.outputs[0].trace or []
    check_sample(output, output.outputs[0], 0.9)
    assert trace[-1].token_id == cut.token_id
    assert [d.origin for d in trace[-1].dropped][:1] == ["accepted"]
    same_round = [token for token in whole if token.round == cut.round]
    drafts = [t.token_id for t in same_round if t.draft_index is not None]
    drafts += [t.token_id for t in same_round[-1].dropped]
    kept = [t.token_id for t in trace if t.round == cut.round]
    assert [*kept, *[t.token_id for t in trace[-1].dropped]] == drafts


def test_no_evidence_is_made_for_a_request_without_trace(target: Path, draft: Path) -> None:
    llm, asked = build(target, draft, "draft_model"), []

    def counted(evidence: Callable[..., Evidence], *given: Any) -> Evidence:
        asked.append(len(given[2]))
        return evidence(*given)

    with double(llm.engine.runner.sampler, "backend", evidence=counted):
        plain = llm.generate(PROMPTS, params_of(trace=False))
        assert not asked
        assert [o.outputs[0].trace for o in plain] == [None] * 3
        mixed = [replace(params, trace=i == 1, n=1) for i, params in enumerate(params_of())]
        outputs = llm.generate(PROMPTS, mixed)
    assert {*asked} == {1}
    assert [o.outputs[0].trace is None for o in outputs] == [True, False, True]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


class Asked:
    """What `trace_round` reads of a request."""

    def __init__(self, rule: str, temperature: float = 1.0) -> None:
        self.rule, self.params = rule, SamplingParams(temperature=temperature)
        self.token_ids, self.trace = [1, 2], list[TokenTrace]()


def evidence_of(token: list[int], q: list[float]) -> Evidence:
    count = len(token)
    numbers = torch.full((count,), 0.5, dtype=torch.float64)
    q_K1 = torch.tensor([*q, 0.25], dtype=torch.float64)
    p_K1 = torch.full((count + 1,), 0.25, dtype=torch.float64)
    none = torch.full((count,), math.nan, dtype=torch.float64)
    return Evidence(torch.tensor(token), p_K1, q_K1, numbers, none, torch.tensor(True))


@pytest.mark.parametrize(
    ("token", "q", "reason"),
    [(-1, 0.0, "placeholder"), (9, 0.0, "placeholder"), (9, math.nan, "not finite")],
)
@pytest.mark.parametrize("rule", RULES)
def test_what_counts_as_no_draft(rule: str, token: int, q: float, reason: str) -> None:
    evidence = evidence_of([7, token, 5], [0.25, q, 0.25])
    outcome = Outcome([7, 4], num_drafts=3, num_accepted=1, evidence=evidence)
    request: Any = Asked(rule)
    records = trace_round(request, outcome, "mine", [0.75] * 3, str)
    assert [record.origin for record in records] == ["accepted", "resampled"]
    assert records[1].q is None, "no draft stood there"
    rejected, unread = records[1].dropped
    assert (rejected.origin, rejected.reason) == ("rejected", REASONS[reason])
    assert rejected.q is rejected.u is rejected.threshold is None
    assert (unread.origin, unread.reason) == ("unread", None)
    assert {record.drafter for record in (*records, rejected, unread)} == {"mine"}


def test_a_rule_that_is_not_stated_fails() -> None:
    request: Any = Asked("another")
    outcome = Outcome([5], 1, 0, evidence=evidence_of([7], [0.5]))
    with pytest.raises(NotImplementedError, match="another"):
        trace_round(request, outcome, "a", (), str)


def test_accepted_drafts_of_a_request_that_cannot_go_on() -> None:
    evidence = evidence_of([7, 5], [0.5, 0.5])
    outcome = Outcome([7], num_drafts=2, num_accepted=1, is_finite=False, evidence=evidence)
    request: Any = Asked("standard")
    (record,) = trace_round(request, outcome, "a", (), str)
    assert (record.origin, [d.origin for d in record.dropped]) == ("accepted", ["unread"])


def rows_behind(found: Evidence) -> Evidence:
    return found._replace(p_RK1=found.p_RK1.roll(-1, dims=1))


def one_hot(found: Evidence) -> Evidence:
    return found._replace(real_q_R=found.real_q_R & False)


def noise_behind(found: Evidence) -> Evidence:
    return found._replace(u_RK=found.u_RK.roll(-1, dims=1))


def massless(found: Evidence) -> Evidence:
    return found._replace(mass_RK=found.mass_RK * 0)


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        ("standard", rows_behind),
        ("standard", one_hot),
        ("standard", noise_behind),
        ("block", rows_behind),
        ("block", massless),
        ("synthetic", noise_behind),
    ],
)
def test_mutants_are_noticed(
    target: Path, draft: Path, rule: str, mutant: Callable[[Evidence], Evidence]
) -> None:
    llm = build(target, draft, "draft_model", rule)
    evidence = {"evidence": lambda real, *given: mutant(real(*given))}
    with double(llm.engine.runner.sampler, "backend", **evidence), pytest.raises(AssertionError):
        check_all(llm, 0.9, n=4)
