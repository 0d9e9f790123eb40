"""The records of a step: some of its requests, what was decided, and whose log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

from foretoken.ops import DraftBlock, Logprobs, Verdict
from foretoken.ops.steps import SlotSpan
from foretoken.slots.step import NONE, Outcome, StepInput, StepResult, some_rows

STEP = StepInput(
    slot_B=[3, 0, 5],
    num_tokens_B=[1, 7, 1],
    max_drafts_B=[2, 0, 4],
    decides_B=[True, False, True],
    num_logprobs_B=[NONE, NONE, 2],
    num_prompt_logprobs_B=[NONE, 4, NONE],
    traces_B=[False, True, True],
)


def make_result(**others: Any) -> StepResult:
    """Slot 5 accepts one draft of two, slot 3 all of one, slot 1 has none and no token."""
    drafts = DraftBlock(
        token_BK=torch.tensor([[7, 8], [4, -1], [-1, -1]]),
        num_B=torch.tensor([2, 1, 0]),
        cache=None,
        real_q_B=torch.zeros(3, dtype=torch.bool),
    )
    verdict = Verdict(
        token_BK1=torch.tensor([[7, 2, -1], [4, 9, -1], [-1, -1, -1]]),
        n_accept_B=torch.tensor([1, 1, 0]),
        finite_B=torch.tensor([True, True, False]),
    )
    spans = [SlotSpan(5, 6, 3, 3), SlotSpan(0, 0, 4, 0), SlotSpan(3, 2, 2, 2), SlotSpan(1, 1, 1, 1)]
    return StepResult(spans, [5, 3, 1], drafts, verdict, **others)


def test_some_of_the_requests_of_a_step() -> None:
    some = STEP.at([2, 0])
    assert some.slot_B == [5, 3]
    assert some.max_drafts_B == [4, 2]
    assert some.decides_B == [True, True]
    assert (STEP.most_logprobs, some.most_logprobs) == (4, 2)
    assert STEP.at([0]).most_logprobs == NONE


def test_outcomes_are_read_by_slot_accepted_drafts_and_the_token_after_them() -> None:
    result = make_result()
    expected = {
        5: Outcome([7, 2], num_drafts=2, num_accepted=1),
        3: Outcome([4, 9], num_drafts=1, num_accepted=1),
        1: Outcome([], num_drafts=0, num_accepted=0, is_finite=False),
    }
    assert result.decisions == expected
    assert result.read() == {**expected, 0: Outcome([])}, "a prompt that goes on"
    assert result.decisions is result.decisions, "the device is waited for once"


def test_what_is_wrong_with_one_request_is_said_of_it_alone() -> None:
    fault = ZeroDivisionError("injected")
    outcomes = make_result(faults={3: fault}, banned_all={1}).read()
    assert outcomes[3].fault is fault
    assert outcomes[1].bans_all
    assert [slot for slot, outcome in outcomes.items() if outcome.fault] == [3]
    assert [slot for slot, outcome in outcomes.items() if outcome.bans_all] == [1]


def test_log_probabilities_are_cut_into_prompts_and_decisions() -> None:
    values = torch.arange(7.0)
    found = Logprobs(values, values.long(), values[:, None], values.long()[:, None])
    borders = {0: (0, 3, 3), 5: (3, 3, 5), 3: (5, 6, 7)}
    parts = {
        slot: (some_rows(found, begin, middle), some_rows(found, middle, end))
        for slot, (begin, middle, end) in borders.items()
    }
    outcomes = make_result(logprobs=parts).read()

    def logprobs(part: Logprobs | None) -> list[float] | None:
        return None if part is None else part.logprob_N.tolist()

    assert {
        slot: (logprobs(outcome.prompt_logprobs), logprobs(outcome.logprobs))
        for slot, outcome in outcomes.items()
    } == {0: ([0, 1, 2], None), 5: (None, [3, 4]), 3: ([5], [6]), 1: (None, None)}


def test_a_step_whose_requests_had_all_ended_says_nothing() -> None:
    nothing = StepResult.empty()
    assert nothing.read() == nothing.decisions == {}
