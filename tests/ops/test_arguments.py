"""A wrong argument is named in a typed error, before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.ops import BACKENDS, Backend, Stream, get_backend
from tests.support.cases import drafts_of, make_params

Arguments = dict[str, Any]


@pytest.fixture(params=sorted(BACKENDS))
def ops(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


def sample_arguments() -> Arguments:
    two = torch.tensor([0, 1])
    return {
        "logits_NV": torch.zeros(2, 8),
        "params": make_params(2),
        "slot_N": two,
        "position_N": two,
        "draft_index_N": two,
        "streams": (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK),
    }


def verify_arguments() -> Arguments:
    two = torch.tensor([0, 1])
    return {
        "logits_NV": torch.zeros(5, 8),
        "params": make_params(2),
        "slot_B": two,
        "position_B": two,
        "drafts": drafts_of([[1, 2], [3]], torch.zeros(2, 2, 8)),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logits_NV", torch.zeros(8)),
        ("logits_NV", torch.zeros(2, 8, dtype=torch.int64)),
        ("logits_NV", torch.zeros(2, 0)),
        ("slot_N", torch.tensor([0])),
        ("slot_N", torch.tensor([0, 1], dtype=torch.int32)),
        ("slot_N", [0, 1]),
        ("position_N", torch.tensor([[0, 1]])),
        ("draft_index_N", torch.tensor([0.0, 1.0])),
        ("params", replace(make_params(2), temperature_S=torch.ones(3))),
        ("params", replace(make_params(2), top_k_S=torch.ones(2))),
    ],
)
def test_sample(ops: Backend, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        ops.sample(**{**sample_arguments(), field: value})


def change_drafts(**changes: object) -> Callable[[Arguments], Arguments]:
    return lambda given: {**given, "drafts": replace(given["drafts"], **changes)}


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("logits_NV", lambda given: {**given, "logits_NV": torch.zeros(4, 8)}),
        ("logits_NV", lambda given: {**given, "logits_NV": torch.zeros(6, 8)}),
        ("slot_B", lambda given: {**given, "slot_B": torch.tensor([0.0, 1.0])}),
        ("position_B", lambda given: {**given, "position_B": torch.tensor([0])}),
        ("params.min_p_S", lambda given: {**given, "params": replace(
            given["params"], min_p_S=torch.zeros(2, dtype=torch.float64))}),
        ("rule", lambda given: {**given, "rule": "none"}),
        ("drafts.token_BK", change_drafts(token_BK=torch.zeros(2, 2))),
        ("drafts.token_BK", change_drafts(token_BK=torch.zeros(3, 2, dtype=torch.int64))),
        ("drafts.num_B", change_drafts(num_B=torch.tensor([3, 0]))),
        ("drafts.num_B", change_drafts(num_B=torch.tensor([4, -1]))),
        ("drafts.logits_SKV", change_drafts(logits_SKV=torch.zeros(2, 1, 8))),
        ("drafts.logits_SKV", change_drafts(logits_SKV=torch.zeros(2, 8))),
        ("drafts.logits_SKV", change_drafts(logits_SKV=None)),
        ("drafts.real_q_B", change_drafts(real_q_B=torch.ones(2))),
    ],
)  # fmt: skip
def test_verify(ops: Backend, named: str, change: Callable[[Arguments], Arguments]) -> None:
    ops.verify(**verify_arguments())
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        ops.verify(**change(verify_arguments()))


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="reference, torch_cpu"):
        get_backend("nonesuch")
