"""The records of a step: some of its requests, their decisions and their log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.ops import Evidence, Logprobs
from foretoken.ops.pinned import ToHost
from foretoken.slots.step import NONE, Outcome, StepInput, StepResult

STEP = StepInput(
    slot_B=[5, 0, 3, 1], num_tokens_B=[1, 4, 1, 2], max_drafts_B=[2, 0, 1, 0],
    decides_B=[True, False, True, True], num_logprobs_B=[2, NONE, 0, NONE],
    num_prompt_logprobs_B=[NONE, 4, NONE, 1], traces_B=[False, True, True, False],
)  # fmt: skip
# Slot 5 accepts one draft of two, slot 3 all of one, slot 1 has none and no token.
DECIDED = [[2, 1, 1, 7, 2, -1], [1, 1, 1, 4, 9, -1], [0, 0, 0, -1, -1, -1]]
EXPECTED = {
    5: Outcome([7, 2], num_drafts=2, num_accepted=1),
    3: Outcome([4, 9], num_drafts=1, num_accepted=1),
    1: Outcome([], num_drafts=0, num_accepted=0, is_finite=False),
}


def make_result(pad: int = 0, **others: Any) -> StepResult:
    """A result of a step that was padded by so many requests."""
    computed, padding = [6, 0, 2, 1, *[0] * pad], [0, 0, 1, 8, -1, -1]
    rows = [number for row in (*DECIDED, *[padding] * pad) for number in row]
    packet = ToHost([torch.tensor(computed + rows)])
    return StepResult(STEP, packet, num_padded=pad, **others)


def test_some_of_the_requests_of_a_step() -> None:
    assert STEP.slot_D == [5, 3, 1]
    assert STEP.decider_B == [0, -1, 1, 2]
    assert STEP.traced_D == [1], "a prompt that goes on has no evidence yet"
    assert STEP.reported_D == [0, 1]
    assert STEP.reported_prompts_B == [1, 3]
    assert STEP.most_logprobs == 4
    nothing = StepInput([1], [1], [0], [True], [NONE], [NONE], [False])
    assert nothing.most_logprobs == NONE
    assert nothing.traced_D == nothing.reported_D == nothing.reported_prompts_B == []


@pytest.mark.parametrize("pad", [0, 1, 4])
def test_outcomes_are_read_by_slot_accepted_drafts_and_the_token_after_them(pad: int) -> None:
    result = make_result(pad)
    assert result.decisions == EXPECTED
    assert result.read() == {**EXPECTED, 0: Outcome([])}, "a prompt that goes on"
    assert result.decisions is result.decisions, "the device is waited for once"


def test_where_each_token_came_from() -> None:
    origins = [outcome.origins for outcome in make_result().decisions.values()]
    assert origins == [["accepted", "resampled"], ["accepted", "bonus"], ["plain"]]


def test_what_is_wrong_with_one_request_is_said_of_it_alone() -> None:
    fault = ZeroDivisionError("injected")
    outcomes = make_result(faults={3: fault}).read()
    assert [slot for slot, outcome in outcomes.items() if outcome.fault] == [3]
    assert outcomes[3].fault is fault
    for raw, banned in (([True] * 6, [1]), ([True] * 5 + [False], [])):
        outcomes = make_result(is_finite_N=ToHost([torch.tensor(raw)])).read()
        assert [slot for slot, outcome in outcomes.items() if outcome.bans_all] == banned


def test_who_drafted_and_the_evidence_are_those_of_the_request() -> None:
    evidence = ToHost([torch.tensor([[i, i]]) for i in range(len(Evidence._fields))])
    outcomes = make_result(source_D=torch.tensor([1, 0, 2]), evidence=evidence).read()
    drafters = {slot: outcome.drafter for slot, outcome in outcomes.items()}
    assert drafters == {5: 1, 0: None, 3: 0, 1: 2}
    assert [slot for slot, outcome in outcomes.items() if outcome.evidence] == [3]
    assert outcomes[3].evidence is not None
    assert [part.tolist() for part in outcomes[3].evidence] == [
        [i, i] for i in range(len(Evidence._fields))
    ]


def test_log_probabilities_are_cut_into_decisions_and_prompts() -> None:
    """As many rows for each decision as the one with most drafts has; then those of prompts."""
    values = torch.arange(12.0)
    found = Logprobs(values, values.long(), values[:, None], values.long()[:, None])
    outcomes = make_result(logprobs=ToHost([*found])).read()

    def logprobs(part: Logprobs | None) -> list[float] | None:
        return None if part is None else part.logprob_N.tolist()

    assert {
        slot: (logprobs(outcome.prompt_logprobs), logprobs(outcome.logprobs))
        for slot, outcome in outcomes.items()
    } == {
        5: (None, [0, 1]), 3: (None, [3, 4]), 0: ([6, 7, 8, 9], None),
        1: ([10], None),  # what follows the prompt's last token is no part of it
    }  # fmt: skip


def test_a_step_of_ended_requests_has_no_outcomes() -> None:
    nothing = StepResult()
    assert nothing.read() == nothing.decisions == {}
