"""The measurement of the ops: its inputs, its baseline's law, and what it makes of the times.

A stand-in backend keeps to the shapes of the contract; what backends compute has its own tests.
"""

from __future__ import annotations

import argparse
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops import baseline, report, run, timing
from benchmarks.ops import inputs as ops_inputs
from benchmarks.ops.backends import Module, Ours, rates
from benchmarks.ops.cases import Case, Goal, chosen, cpu_cases, gpu_cases
from benchmarks.ops.inputs import Pools, make, rows_of
from benchmarks.ops.timing import enough, in_turns
from foretoken.lab.results import Spread, read
from foretoken.ops import DraftCache, Noise, Rows, Rule, Verdict, VerifyBatch

CPU = torch.device("cpu")
V = 1200


class StandIn:
    """Counts calls; accepts each draft by a coin of its position, as often as it is told to."""

    def __init__(self, rate: float = 0.6) -> None:
        self.rate, self.calls = rate, 0
        self.rules: list[list[int]] = []  # of the requests of each batch that was verified

    def sample(self, rows: Rows, noise: Noise) -> Tensor:
        self.calls += 1
        assert len(rows.params.key_S) == len(rows.logits_NV)
        return rows.logits_NV.argmax(1)

    def draft(self, rows: Rows, noise: Noise, cache: DraftCache) -> Tensor:
        assert rows.logits_NV.is_contiguous()
        cache.logits_SKV[rows.slot_N, noise.draft_index_N] = rows.logits_NV
        return rows.logits_NV.argmax(1)

    def verify(self, batch: VerifyBatch) -> Verdict:
        logits_NV, params, slot_B, position_B, drafts, _, synthetic_rate_K, _, _ = batch
        num_requests, k = drafts.token_BK.shape
        assert len(logits_NV) == num_requests * (k + 1)
        synthetic = bool((params.rule_S[slot_B] == Rule.SYNTHETIC).all())
        self.rules += [params.rule_S[slot_B].tolist()]
        assert synthetic == (synthetic_rate_K is not None)
        rate = torch.full((k,), self.rate) if synthetic_rate_K is None else synthetic_rate_K
        seed_B = params.key_S[slot_B] + position_B + 7 * synthetic  # noise of a request's own
        u = [
            torch.rand(k, generator=torch.Generator().manual_seed(seed)) for seed in seed_B.tolist()
        ]
        u_BK = torch.stack(u)
        n_accept_B = (u_BK < rate).long().cumprod(1).sum(1)
        token_BK1 = torch.nn.functional.pad(drafts.token_BK, (0, 1), value=-1)
        return Verdict(token_BK1, n_accept_B, torch.ones(num_requests, dtype=torch.bool))


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_inputs, "ROTATED", 200_000)


@pytest.fixture
def session() -> run.Session:
    options = argparse.Namespace(repeats=3, quick=True, raise_errors=True)
    return run.Session(
        options,
        CPU,
        [Ours("stand_in", StandIn())],  # type: ignore[arg-type]
        [Module("pytorch", baseline)],
        [verify_case("standard")],
        floor_gb_per_s=10.0,
    )


def verify_case(rule: str, **fields: Any) -> Case:
    against = "verify standard" if rule == "synthetic" else ""
    fields = {"k": 3, "vocabulary": V, "logits": "peaked", "against": against} | fields
    return Case("verify", f"verify {rule}", 8, rule=rule, **fields)


def test_the_cases_are_named_once_and_their_partners_exist() -> None:
    for cases in (gpu_cases(), cpu_cases()):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        listed = {case.name: replace(case, goals=()) for case in cases}
        for case in cases:
            partner = replace(case.partner, baselines=True)
            assert not case.against or partner == listed.get(case.against, partner)
        assert all(case.goals for case in chosen(cases, "verify", quick=True))
    values = {goal.value for case in [*gpu_cases(), *cpu_cases()] for goal in case.goals}
    assert values == {
        "graph_us", "eager_us", "ratio", "extra_memory_share", "ns_per_logit",
        "speedup_over_pytorch",
    }  # fmt: skip


def test_bytes_are_the_rows_that_must_be_read() -> None:
    standard = verify_case("standard", dtype=torch.bfloat16)
    row = 2 * V
    assert standard.minimum_bytes() == 8 * (4 + 2) * row
    assert standard.minimum_bytes(accepted=1.0) == 8 * 4 * row
    assert verify_case("one_hot").minimum_bytes() == 8 * (4 + 1) * 4 * V
    assert verify_case("standard", temperature=0.0).minimum_bytes() == 8 * 4 * 4 * V
    assert verify_case("block").minimum_bytes(0.5) == 8 * (4 + 3 + 1) * 4 * V
    assert Case("sample", "", 8, vocabulary=V).minimum_bytes() == 8 * 4 * V
    assert Case("draft", "", 8, vocabulary=V).minimum_bytes() == 2 * 8 * 4 * V


def test_peaked_rows_are_peaked_and_flat_ones_flat() -> None:
    generator = torch.Generator().manual_seed(0)

    def nucleus(kind: str) -> Tensor:
        prob = rows_of(kind, 32, 20_000, generator).softmax(1).sort(1, descending=True).values
        return (prob.cumsum(1) < 0.95).sum(1) + 1

    assert nucleus("peaked").max() <= ops_inputs.HEAD
    assert nucleus("flat").min() > 5000
    mixed = nucleus("mixed")
    assert mixed[::16].min() > 5000
    assert mixed.median() <= ops_inputs.HEAD


def test_inputs_differ_and_drafts_resemble_their_rows() -> None:
    inputs = make(verify_case("standard", penalties=True), Pools(CPU))
    assert inputs.count >= 2
    assert not torch.equal(inputs.logits[0], inputs.logits[1])
    p = inputs.logits[0].view(8, 4, V)[:, :-1].softmax(-1)
    q = inputs.draft_logits[0].softmax(-1)
    assert 0.5 < torch.minimum(p, q).sum(-1).mean() < 0.8
    assert (inputs.seen_BL[0].diff(dim=1) > 0).all()
    assert inputs.seen_BL[0].max() < V


def test_pools_are_reused_and_grow() -> None:
    pools, case = Pools(CPU), Case("sample", "", 4, vocabulary=V)
    first = pools.get(case, 8)
    assert pools.get(case, 4) is first
    assert len(pools.get(case, 16)) == 16


@pytest.mark.parametrize("rule", ["standard", "block", "one_hot"])
def test_the_baseline_keeps_the_law(rule: str) -> None:
    """The comparison is fair only if the baseline does the work: its first token is p's."""
    torch.manual_seed(0)
    trials, k, vocabulary = 40_000, 2, 5
    p_V, q_V = torch.randn(vocabulary), torch.randn(vocabulary)
    token_BK = q_V.softmax(0).multinomial(trials * k, replacement=True).view(trials, k)
    call = baseline.verify(
        rule=rule, logits_NV=p_V.expand(trials * (k + 1), -1),
        draft_logits_BKV=q_V.expand(trials, k, -1), token_BK=token_BK, rate_K=None, seen_BL=None,
        repetition=1.0, presence=0.0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
    )  # fmt: skip
    token_BK1 = call()
    expected = p_V.softmax(0)
    counts = torch.bincount(token_BK1[:, 0], minlength=vocabulary)
    chi_square = ((counts - trials * expected) ** 2 / (trials * expected)).sum()
    assert chi_square < 23.5  # 4 degrees of freedom, p = 1e-4
    mean_accepted = (token_BK1 >= 0).sum(1).double().mean() - 1
    if rule == "standard":
        overlap = torch.minimum(p_V.softmax(0), q_V.softmax(0)).sum()
        assert mean_accepted == pytest.approx(float(overlap + overlap**2), abs=0.02)


def test_the_baseline_filters_like_the_contract() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0, -1.0]])
    prob = baseline.probabilities(logits, 1.0, top_k=2, top_p=1.0, min_p=0.0)
    assert (prob > 0).tolist() == [[True, True, True, False, False]]  # the tie is kept
    prob = baseline.probabilities(logits, 1.0, top_k=0, top_p=0.5, min_p=0.0)
    assert (prob > 0).tolist() == [[True, False, False, False, False]]
    prob = baseline.probabilities(logits, 1.0, top_k=0, top_p=1.0, min_p=0.2)
    assert (prob > 0).tolist() == [[True, True, True, False, False]]
    seen = torch.tensor([[0, 4]])
    row = baseline.penalised(logits, seen, repetition=2.0, presence=0.5)
    assert row.tolist() == [[1.0, 2.0, 2.0, 1.0, -2.5]]


def test_synthetic_acceptance_is_timed_at_the_counts_of_standard(session: run.Session) -> None:
    case = verify_case("synthetic")
    inputs = make(case, Pools(CPU))
    ours = session.ours[0]
    standard = torch.cat(run.counts(ours.calls(verify_case("standard"), inputs)))
    synthetic = torch.cat(run.counts(ours.calls(case, inputs)))
    assert inputs.rate_K is not None
    assert torch.equal(standard, synthetic)
    assert 0 < standard.double().mean() < 3


def test_a_block_request_is_put_among_the_others_of_each_batch(session: run.Session) -> None:
    goal = Goal("ratio", 1e9)
    case = verify_case("standard", against="verify standard", blocks=1, goals=(goal,))
    stand_in = StandIn()
    session.ours = [Ours("stand_in", stand_in)]  # type: ignore[arg-type]
    rows = run.measure(session, [replace(case, name="one block", baselines=False)], Pools(CPU))
    assert [row.case for row in rows] == ["one block: stand_in"]
    assert isinstance(rows[0].values["ratio"], Spread)
    of_case, of_partner = [1] + [0] * 7, [0] * 8
    assert {tuple(rules) for rules in stand_in.rules} == {tuple(of_case), tuple(of_partner)}


def test_rates_are_conditional() -> None:
    assert rates(torch.tensor([0, 1, 1, 3]), 3).tolist() == [0.75, 1 / 3, 1.0]
    assert rates(torch.tensor([0, 0]), 2).tolist() == [0.0, 0.0]


def test_a_case_gives_a_row_per_implementation_and_its_goals_verdicts(session: run.Session) -> None:
    goals = (Goal("ratio", 1e9), Goal("eager_us", 0.0), Goal("graph_us", 1.0))
    case = verify_case("synthetic", goals=goals)
    rows = run.measure(session, [case], Pools(CPU))
    assert [row.labels["engine"] for row in rows] == ["stand_in", "pytorch"]
    mine = rows[0].values
    assert isinstance(mine["ratio"], Spread)
    assert isinstance(mine["speedup_over_pytorch"], Spread)
    assert mine["read_floor_us"] == pytest.approx(mine["bytes"] / 1e4)
    assert mine["draft_cache_bytes"] == 8 * 3 * V * 4
    first, second = report.goal_notes([case], rows, session.ours)
    assert first.endswith("goal <= 1e+09: reached.")
    assert second.endswith("goal <= 0: NOT reached.")
    assert second.startswith("verify synthetic: stand_in: us, eager ")


def test_a_gpu_is_timed_in_graphs_and_eagerly_and_its_memory_counted(
    session: run.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_shot = timing.host_shot
    monkeypatch.setattr(timing, "host_shot", lambda calls, _: host_shot(calls, CPU))
    monkeypatch.setattr(timing, "graph_shot", lambda calls: host_shot(calls, CPU))
    monkeypatch.setattr(timing, "extra_bytes", lambda call: 4 * V)
    session.device = torch.device("cuda")
    goals = (Goal("graph_us", 0.0), Goal("eager_us", 1e9, note="stretch"))
    case = verify_case("synthetic", goals=(*goals, Goal("extra_memory_share", 0.02)))
    rows = run.measure(session, [case], Pools(CPU))
    assert {"graph_us", "eager_us", "ratio"} <= set(rows[0].values)
    assert rows[0].values["extra_memory_share"] == 1 / 32
    notes = report.goal_notes([case], rows, session.ours)
    assert [note.partition(", goal")[2] for note in notes] == [
        " <= 0: NOT reached.",
        " <= 1e+09: reached.",
        " <= 0.02: NOT reached.",
    ]
    assert "us, eager (stretch)" in notes[1]
    point = Case("sample", "sample, rows, x=4", 4, vocabulary=V, curve="sample, rows", x=4)
    assert [row.case for row in run.measure(session, [point], Pools(CPU))] == [
        "sample, rows, x=4: stand_in"
    ]


def test_what_a_module_lacks_is_skipped_and_what_fails_is_named(session: run.Session) -> None:
    partial = types.ModuleType("partial")
    session.modules.append(Module("partial", partial))
    case = Case("sample", "sample", 4, vocabulary=V)
    assert len(run.measure(session, [case], Pools(CPU))) == 2
    assert session.failed == []

    def broken(**_: Any) -> None:
        raise ValueError("no such layout")

    partial.sample = broken  # type: ignore[attr-defined]
    session.options.raise_errors = False
    assert len(run.measure(session, [case], Pools(CPU))) == 2
    assert session.failed == ["sample: partial failed: ValueError no such layout"]


def test_a_wrong_token_is_not_timed(session: run.Session) -> None:
    class Wrong(StandIn):
        def sample(self, rows: Rows, noise: Noise) -> Tensor:
            return rows.logits_NV.argmin(1)

    session.ours = [Ours("wrong", Wrong())]  # type: ignore[arg-type]
    case = Case("sample", "sample", 4, vocabulary=V, top_k=20)
    with pytest.raises(RuntimeError, match="not among the top 20"):
        run.measure(session, [case], Pools(CPU))


def test_shots_are_long_enough_and_take_turns() -> None:
    calls = [lambda: None] * 3
    assert len(enough(calls, slow_us=5000.0, least_us=100.0)) == 3
    assert len(enough(calls, slow_us=100.0, least_us=100.0)) == 15
    assert len(enough(calls, slow_us=100.0, least_us=1.0)) == 189
    order: list[str] = []

    def shot(name: str) -> Any:
        return lambda: (order.append(name), 1.0)[1]

    found = in_turns({"a": shot("a"), "b": shot("b")}, most=3, seconds=1.0)
    assert found == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert len(in_turns({"a": shot("a")}, most=9, seconds=-1.0)["a"]) == 3


def test_a_run_writes_its_file(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, session: run.Session
) -> None:
    case = Case("sample", "sample", 4, vocabulary=V, goals=(Goal("ns_per_logit", 1e9),))
    session.cases = [case]

    def prepare(options: argparse.Namespace) -> run.Session:
        session.options = options
        return session

    monkeypatch.setattr(run, "prepare", prepare)
    arguments = ["ops", "--device", "cpu", "--commit", "a" * 40, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    run.main()
    results = read(tmp_path / f"{run.results_name(torch.device('cpu'))}.json")
    assert results.commit == "a" * 40
    assert [row.case for row in results.rows] == ["sample: stand_in", "sample: pytorch"]
    assert any("goal <= 1e+09: reached" in note for note in results.notes)
