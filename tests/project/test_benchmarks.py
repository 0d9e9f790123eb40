"""Parts of the benchmarks that would spoil a figure in silence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import auto, near_ties
from benchmarks.acceptance import ending_cycle
from benchmarks.auto import Speeds, ratios_to_best, rows_of
from benchmarks.curves import fit
from benchmarks.near_ties import PAIR, Parted, nudged_pairs, unexplained
from benchmarks.opponents import torch_threads
from benchmarks.prefix import Prompts
from benchmarks.profile import DecodeSteps
from benchmarks.reproducibility import compare, seeded
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout
from foretoken.ops import unavailable
from tests.long import soak_serve
from tests.long.soak import PROMISED, Memory, failures

BLOCK = 16


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    speculation = {"method": "draft_model", "num_speculative_tokens": 2}
    threads = torch.get_num_threads()
    with LLM("tiny-python", speculation, max_num_seqs=2, threads=1) as llm:
        yield llm
    torch.set_num_threads(threads)


def points(*ms: float) -> list[Row]:
    return [
        Row(f"x={x}", {"x": x}, {"ms": Spread.of([y], "ms")}) for x, y in enumerate(ms, start=1)
    ]


def test_fit_finds_a_line_and_what_leaves_it() -> None:
    exact = fit(points(5.0, 7.0, 9.0))
    assert exact == pytest.approx(
        {"intercept": 3.0, "slope": 2.0, "r_squared": 1.0, "largest_deviation": 0.0}, abs=1e-12
    )
    # The line through (1, 1), (2, 2), (3, 6) is 2.5 x - 2: residuals -0.5, 1, -0.5.
    bent = fit(points(1.0, 2.0, 6.0))
    assert bent["r_squared"] == pytest.approx(1 - 1.5 / 14)
    assert bent["largest_deviation"] == pytest.approx(0.5)


def test_pytorch_threads_come_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    seen = []

    def fail() -> None:
        with torch_threads(before + 1):
            seen.append(torch.get_num_threads())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_cold_prompts_share_no_block() -> None:
    prompts = Prompts(length=1000, tail=16)
    taken = [prompts.take() for _ in range(40)]
    for shared, tail, other in taken:
        assert (len(shared), len(tail), len(other)) == (1000, 16, 16)
        assert tail != other
    assert len({tuple(shared[:BLOCK]) for shared, _, _ in taken}) == len(taken)


def test_profile_counts_decode_steps_and_leaves_no_trace(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, num_speculative_tokens=0)
    drafting, decoding = DecodeSteps(), DecodeSteps()
    with drafting.watched(llm):
        drafted = llm.generate("def f(x):\n    return ", params)[0]
    with decoding.watched(llm):
        llm.generate(["def g(x):\n    return ", "import os, "], plain)
    # The prompts' step gives the first token, and the step after it is left out.
    assert (len(decoding.traces), decoding.num_requests, decoding.num_tokens) == (5, 10, 10)
    assert len(drafting.traces) == drafted.metrics.num_steps - 2 >= 1
    assert len(drafting.traces) < drafting.num_tokens <= 5
    for watch in (drafting, decoding):
        ms, shares = watch.split()
        whole = ms.pop("step")
        assert ms.pop("outside the step") > 0
        assert sum(ms.values()) == pytest.approx(whole)
        assert 0 < shares["scheduling_and_sampling"] < shares["host_overhead"] < 1
    # Of the fastest steps: on a busy machine any single one may be interrupted in any phase.
    fastest = [min(t.seconds.get("draft", 0.0) for t in w.traces) for w in (drafting, decoding)]
    assert fastest[0] > 10 * fastest[1]
    steps = len(drafting.traces)
    llm.generate("def f(x):\n    return ", params)
    assert len(drafting.traces) == steps


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_in_float32_no_batch_changes_a_token(backend: str) -> None:
    """Of the embedded pair, in native kernels and in PyTorch's modules with packed layers."""
    if backend == "native" and unavailable("native") is not None:
        pytest.skip("there are no native kernels")
    threads = torch.get_num_threads()
    speculation = {"method": "draft_model", "num_speculative_tokens": 4}
    size = {"max_num_seqs": 8, "enable_prefix_caching": False, "threads": 1}
    with LLM("tiny-python", speculation, dtype="float32", backend=backend, **size) as llm:
        counts = compare(llm, seeded(count=8, max_tokens=12))
    torch.set_num_threads(threads)
    assert counts == {
        "requests": 8, "differ_in_batch": 0, "differ_in_reversed_batch": 0,
        "differ_when_repeated": 0,
    }  # fmt: skip


def test_reproducibility_counts_every_request_that_parts() -> None:
    """Request 0 depends on the batch's order, 2 on its size, 3 on the calls before."""

    class Engine:
        calls = 0

        def generate(self, prompts: list[str], params: list[SamplingParams]) -> list[Any]:
            self.calls += 1
            tokens = {0: params[0].seed == 0, 1: 7, 2: len(prompts), 3: self.calls}
            samples = [SimpleNamespace(token_ids=[tokens[p.seed or 0]]) for p in params]
            return [SimpleNamespace(outputs=[s], interrupted_by=None) for s in samples]

    counts = compare(Engine(), seeded(count=4, max_tokens=1))
    assert counts == {
        "requests": 4, "differ_in_batch": 2, "differ_in_reversed_batch": 3,
        "differ_when_repeated": 1,
    }  # fmt: skip


def test_where_two_texts_part() -> None:
    params = SamplingParams()

    def parted(got: list[int], other: list[int]) -> tuple[list[int], bool] | None:
        found = Parted.of([1], params, 0, got, other)
        return found and (found.tokens, found.ended)

    assert parted([1, 2], [1, 2]) is None
    assert parted([1, 2, 3], [1, 4, 3]) == ([1, 2], False)
    assert parted([1, 2, 3], [1, 2]) == ([1, 2, 3], False)
    assert parted([1, 2], [1, 2, 3]) == ([1, 2], True)
    ended = Parted.of([1], params, 0, [1, 2], [1, 2, 3])
    assert ended is not None
    assert ended.agrees([1, 2])
    assert not ended.agrees([1, 2, 3])


def test_near_ties_are_told_from_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are a hundred times as far off change texts where nudged weights do not."""
    monkeypatch.setattr(near_ties, "MODELS", 2)  # that part as `far` does at once, or hardly ever
    speculation = {"method": "draft_model", "num_speculative_tokens": 2}
    params = [SamplingParams(temperature=0.8, max_tokens=32, seed=i) for i in range(48)]

    def texts(target: str, draft: str) -> list[list[int]]:
        with LLM(target, {**speculation, "model": draft}, device="cpu") as llm:
            outputs = llm.generate([item.prompt for item in heldout(48)], params)
            prompts[:] = [output.prompt_token_ids for output in outputs]
        return [output.outputs[0].token_ids for output in outputs]

    prompts: list[list[int]] = []
    far = nudged_pairs(1e-3)
    other, got = texts(*PAIR), texts(*map(str, next(far)))
    found = [Parted.of(*x) for x in zip(prompts, params, [0] * 48, got, other, strict=True)]
    parted = [x for x in found if x is not None]
    assert len(parted) >= 4
    assert unexplained(parted, speculation, nudge=1e-3) == []
    assert len(unexplained(parted, speculation)) >= len(parted) - 1


def test_a_soak_fails_if_anything_promised_never_happened() -> None:
    args = SimpleNamespace(minutes=8.0, requests=20000)
    found = dict.fromkeys(PROMISED, 1) | {
        "seconds": 480.0, "requests": 20000, "distinct": 100, "blocks_missing": 0, "unexplained": 0,
        "resident_mib_grown": 64, "gpu_mib_grown": -3.0, "steady_seconds": 48.0,
    }  # fmt: skip
    assert failures(found, args) == []
    wrong = {"preemptions": 0, "seconds": 462.8, "distinct": 3, "resident_mib_grown": 83.4}
    assert failures(found | wrong, args) == [
        "seconds is 462.8, not at least 480.0", "distinct is 3, not at least 100",
        "preemptions is 0, not at least 1", "resident_mib_grown is 83.4, not at most 64",
    ]  # fmt: skip
    del found["aborted"]
    assert failures(found, args) == ["aborted is 0, not at least 1"]


def test_a_soak_of_the_server_fails_if_something_differs_or_is_held_too_long() -> None:
    found: dict[str, Any] = dict.fromkeys(soak_serve.MOST, 0)
    assert soak_serve.failures({**found, "seconds_to_free": Spread.of([0.1, 0.9], "s")}) == []
    wrong = {**found, "different": 1, "seconds_to_free": Spread.of([0.1, 1.4], "s")}
    assert soak_serve.failures(wrong) == [
        "most_seconds_to_free is 1.4, not at most 1.0",
        "different is 1, not at most 0.0",
    ]


def test_an_answer_says_the_same_streamed_in_any_pieces() -> None:
    whole = {"id": "x", "choices": [{"text": "ab", "trace": [{"text": "no"}]}]}
    parts = [{"choices": [{"text": t, "finish_reason": "stop"}]} for t in "ab"]
    assert "".join(soak_serve.spoken(whole)) == "".join(soak_serve.spoken(parts)) == "ab"
    with pytest.raises(RuntimeError, match="broke off"):
        list(soak_serve.chunks('data: {"choices": []}\n\n'))


def test_what_a_soak_captures_is_no_growth() -> None:
    """Only stretches count in which nothing was captured, from a quarter of the time on."""
    seen = [(0, 9, 1), (0, 15, 1), (4, 20, 2), (5, 30, 9), (5, 31, 9.5), (6, 40, 15), (6, 41, 16)]
    looks = iter(seen)

    class Scripted(Memory):
        def _now(self) -> Any:
            return next(looks)

    memory = Scripted(None, 100.0)  # type: ignore[arg-type]
    for seconds in (10, 20, 40, 45, 60, 80):
        memory.look(seconds)
    assert (memory.on_host, memory.on_gpu, memory.steady) == (1 + 1, 0.5 + 1, 5 + 20)


def test_the_best_k_of_a_turn_is_chosen_in_the_turns_between() -> None:
    # K=1 had luck in even turns, K=2 in odd ones: each is compared in the turns where it had none.
    speeds: Speeds = {0: [1.0] * 5, 1: [8, 2, 8, 2, 2], 2: [4, 5, 4, 5, 5], "auto": [4.0] * 5}
    assert ratios_to_best(speeds) == [4 / 4, 4 / 2, 4 / 4, 4 / 2, 4 / 5]
    row = rows_of(speeds, 1, "T=0")[-1]
    assert row.labels["best_k"] == 2
    assert row.values["ratio_to_plain"] == Spread.of([4.0] * 5, "ratio")
    assert row.values["ratio_to_best"] == Spread.of([1.0, 2.0, 1.0, 2.0, 0.8], "ratio")


def test_many_turns_are_for_the_fastest_k(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def turns(*given: Any) -> Speeds:
        numbers, cases = given[4:]
        asked.append((numbers, cases))
        return {k: [9.0 if k == "auto" else 10 - abs(4.1 - k)] * len(numbers) for k in cases}

    monkeypatch.setattr(auto, "turns", turns)
    speeds = auto.measure(None, None, 4, 0.0, 5)  # type: ignore[arg-type]
    many = auto.TURNS[4] * 5
    assert asked == [
        (range(auto.SCOUTS), auto.CASES),
        (range(auto.SCOUTS, auto.SCOUTS + many), [0, 4, 5, 3, "auto"]),
    ]
    assert list(speeds) == auto.CASES
    counts = {k: len(found) for k, found in speeds.items()}
    assert counts == dict.fromkeys(auto.CASES, auto.SCOUTS) | dict.fromkeys(
        [0, 3, 4, 5, "auto"], many
    )
    assert rows_of(speeds, 4, "T=0")[-1].labels["best_k"] == 4


TOKENS = st.lists(st.integers(0, 50), max_size=30)


def test_a_cycle_at_the_end_of_an_output_has_the_shortest_period() -> None:
    assert ending_cycle([9, 8] + [1, 2, 3] * 6) == 3
    assert ending_cycle([5] * 20) == 1


def test_short_runs_are_no_cycle() -> None:
    assert ending_cycle([1, 2, 3, 4, 4, 4, 4]) is None
    assert ending_cycle(list(range(40))) is None
    assert ending_cycle([]) is None


def test_a_cycle_that_stopped_earlier_does_not_count() -> None:
    assert ending_cycle([1, 2] * 20 + list(range(10, 30))) is None


@given(TOKENS, st.lists(st.integers(51, 90), min_size=1, max_size=12, unique=True))
def test_any_cycle_is_found_after_any_beginning(head: list[int], period: list[int]) -> None:
    repeats = max(3, -(-16 // len(period)))
    assert ending_cycle(head + period * repeats) == len(period)
