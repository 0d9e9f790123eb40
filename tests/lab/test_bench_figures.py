"""The figures of a run mean what their names say, worked out by hand."""

from __future__ import annotations

import pytest

from foretoken.engine.trace import StepTrace
from foretoken.lab.bench.figures import (
    LATENCIES,
    device_seconds,
    figures,
    outcomes,
    percentiles,
    unit_of,
)
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.load import Record, Run, difference
from foretoken.outputs import SpeculationMetrics
from tests.lab.runs import by_hand, counted, step


def test_figures_of_a_run_worked_out_by_hand() -> None:
    # Weights of 1 GB and 2 GB; 10 MB and 1 MB per token, half of the target's within 4 tokens.
    target = Reads(10**9, ((5 * 10**6, None), (5 * 10**6, 4)))
    floor = Floor(target, Reads(2 * 10**9, ((10**6, None),)), 2000.0)
    bounds = {"ttft_ms": 200.0, "tpot_ms": 75.1, "itl_ms": 200.1}
    found = figures(by_hand(), floor, bounds)
    latency = {name: found.pop(name) for name in [*found] if name.startswith(tuple(LATENCIES))}
    assert [latency[name] for name in LATENCIES] == pytest.approx([200, 75, 150, 350])
    # The decode steps are 4 ms with two requests and 6 ms with one, two drafts for each.
    reads = (2 + 2 * 0.005 * 10 + 2 * 0.005 * 4 + 0.005 * 10 + 0.005 * 4 + 0) / 2
    draft = 2 * (2 + 2 * 0.001 * 10 + 2 + 0.001 * 10) / 2
    assert found == pytest.approx(
        {
            "requests": 2,
            "failed_requests": 1,
            "output_tokens_per_second": 6 / 0.5,
            "total_tokens_per_second": 56 / 0.5,
            "tokens_per_second_per_user": 1000 / 75,
            "requests_per_second": 2 / 0.5,
            "goodput_requests_per_second": 1 / 0.5,
            "slo_met": 1 / 3,
            "send_lag_ms": 20.0,
            "offered_requests_per_second": 2 / 0.2,
            "sent_requests_per_second": 2 / 0.22,
            "wall_s": 0.5,
            "output_tokens": 3,
            "acceptance_length": 2.0,
            "acceptance_rate": 3 / 5,
            "unconditional_at_1": 2 / 3,
            "unconditional_at_2": 1 / 2,
            "conditional_at_1": 2 / 3,  # one was replaced at once, of the one that failed
            "conditional_at_2": 1 / 2,
            "length_share_1": 1 / 3,
            "length_share_2": 1 / 3,
            "length_share_3": 1 / 3,
            "requests_per_step": 1.5,
            "step_ms": 5.0,
            "draft_ms": 0.5,
            "target_ms": 2.5,
            "verify_ms": 0.5,
            "host_gap_ms": 1.5,
            "tokens_per_step": 1 + 4 / 3,
            "decode_ms_per_token": 5 / (1 + 4 / 3),
            "read_gb": reads + draft,
            "floor_ms": (reads + draft) / 2,
            "share_of_floor": (reads + draft) / 2 / 5,
        }
    )
    assert {*map(unit_of, found)}
    assert latency["ttft_ms_max"] == pytest.approx(300)
    whole = by_hand()
    whole.concurrency = 3  # which these steps never reach: most are those of 2
    assert (figures(whole, None, {})["step_ms"], figures(whole, None, {})["draft_ms"]) == (
        pytest.approx((4.0, 0.4))
    )


def test_a_head_that_follows_plain_decoding_is_drafting_and_no_host_gap() -> None:
    """In a step of 8B after 32 768 tokens with K = 0 it takes 0.2 ms: nothing else explains it."""
    seconds = {"gap": 0.1, "draft": 0.2, "forward": 5.0, "verify": 0.3, "observe": 0.4}
    trace = StepTrace(seconds)
    assert device_seconds(trace) == {"draft": 0.4, "target": 5.0, "verify": 0.3}
    trace.num_drafts = 2
    assert device_seconds(trace)["draft"] == pytest.approx(0.6)


def test_what_a_run_cannot_tell_is_left_out() -> None:
    run = Run([Record(0.0, [0.1], 0.1, 0, 1)], 0.2, [step(9, 0)], SpeculationMetrics())
    found = figures(run, None, {})
    told = ("ttft_ms", "e2e_ms", "output_tokens", "output_tokens_per_second", "requests", "wall_s")
    told += ("failed_requests", "requests_per_second", "ttft_ms_max")
    assert {*found} == {*told}


def test_time_is_shared_by_the_tokens_after_the_first_piece() -> None:
    """4 of 7 tokens came at once; an answer in one piece has no TPOT, and keeps no bound on it."""
    several = Record(0.0, [1.0, 1.3], 1.3, 10, 7, num_first=4)
    whole = Record(0.0, [1.0], 1.0, 10, 64, num_first=64)
    short = Record(0.0, [1.0], 1.0, 10, 1)
    found = figures(Run([several, whole, short], 2.0), None, {"tpot_ms": 110.0})
    assert found["tpot_ms"] == pytest.approx(100.0)
    assert found["slo_met"] == pytest.approx(2 / 3)
    assert "tpot_ms" not in figures(Run([whole, short], 2.0), None, {})


def test_percentiles_are_told_by_enough_requests_alone() -> None:
    def told(count: int) -> dict[str, float]:
        return percentiles({"ttft_ms": [float(i) for i in range(count)]})

    assert [len(told(count)) for count in (1, 9, 10, 20, 99, 100)] == [1, 1, 2, 3, 3, 4]
    assert told(101) == {f"ttft_ms_p{p}": p for p in (50, 90, 95, 99)}


@pytest.mark.parametrize(
    ("rounds", "conditional", "unconditional"),
    [
        ([(3, 3), (3, 1), (3, 0)], [2 / 3, 1 / 2, 1], [2 / 3, 1 / 3, 1 / 3]),
        ([(2, 2), (2, 0)], [1 / 2, 1], [1 / 2, 1 / 2]),
    ],
)
def test_a_servers_counts_give_both_kinds_of_acceptance(
    rounds: list[tuple[int, int]], conditional: list[float], unconditional: list[float]
) -> None:
    counts = counted(*rounds)
    counts.accepted_per_position += [0]  # as long as the server's K
    counts.drafted_per_position += [0]
    run = Run([Record(0.0, [0.1], 0.1, 0, 1)], 0.2, [], counts)
    found = figures(run, None, {})
    for kind, expected in (("conditional", conditional), ("unconditional", unconditional)):
        names = sorted(name for name in found if name.startswith(f"{kind}_at_"))
        assert [found[name] for name in names] == pytest.approx(expected)
    counts.drafted_per_position = []  # vLLM does not tell them
    assert [*outcomes(run)[0].values()] == counts.accepted_per_position


def test_counts_between_two_looks() -> None:
    before, after = counted((2, 1)), counted((2, 1), (3, 3), (0, 0))
    found = difference(before, after)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (1, 3, 3)
    assert (found.accepted_per_position, found.drafted_per_position) == ([1, 1, 1], [1, 1, 1])
