"""A wrong argument is named in a typed error, before any work is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.ops import (
    DRAFT,
    TARGET,
    DraftCache,
    Edits,
    Noise,
    Rows,
    Rule,
    SlotParams,
    Stream,
    VerifyBatch,
    get_backend,
)
from foretoken.ops.checks import check_sample
from tests.support.cases import drafts_of, make_edits, make_params

Arguments = dict[str, Any]
CPU = torch.device("cpu")
WHOLE = {(0, 1): (1.0, 1.0, 0.0), (0, 4): (1.0, 1.0, 0.0), (1, 2): (1.0, 1.0, 0.0)}


OPS = get_backend("reference")
"""One backend for all tests: arguments are checked before its own functions are called."""


def two() -> torch.Tensor:
    return torch.tensor([0, 1])


def edits_of(num_rows: int) -> Edits:
    return make_edits(num_rows, WHOLE, [[1, 2]], [0] + [-1] * (num_rows - 1), 8)


def sample_arguments() -> Arguments:
    return {
        "logits_NV": torch.zeros(2, 8), "params": make_params(2), "slot_N": two(),
        "position_N": two(), "draft_index_N": two(), "streams": TARGET, "edits": edits_of(2),
    }  # fmt: skip


def draft_arguments() -> Arguments:
    given = {**sample_arguments(), "streams": DRAFT, "edits": None}
    return given | {"cache": DraftCache.empty(2, 2, 8, torch.float32, CPU)}


def verify_arguments() -> Arguments:
    return {
        "logits_NV": torch.zeros(5, 8),
        "params": make_params(2, rule=[0, 3]),
        "slot_B": two(),
        "position_B": two(),
        "drafts": drafts_of([[1, 2], [3]], torch.zeros(2, 2, 8)),
        "edits": edits_of(5),
        "synthetic_rate_K": torch.tensor([0.5, 0.5], dtype=torch.float64),
    }


def logprobs_arguments() -> Arguments:
    return {
        "logits_NV": torch.zeros(2, 8), "token_N": two(), "num_top": 3, "params": make_params(2),
        "slot_N": two(), "edits": edits_of(2),
    }  # fmt: skip


def records(given: Arguments) -> tuple[Rows, Noise]:
    """The records of flat arguments, by the names of their fields."""
    rows, noise = ({k: given[k] for k in kind._fields if k in given} for kind in (Rows, Noise))
    return Rows(**rows), Noise(**noise)


def sample(**given: Any) -> Any:
    return OPS.sample(*records(given))


def draft(*, cache: Any, **given: Any) -> Any:
    return OPS.draft(*records(given), cache)


def verify(**given: Any) -> Any:
    return OPS.verify(VerifyBatch(**given))


def logprobs(*, token_N: Any, num_top: Any, **given: Any) -> Any:
    return OPS.logprobs(Rows(**given), token_N, num_top)


def refuses(call: Callable[..., object], given: Arguments, field: str, value: object) -> None:
    """The call runs as given, and names `field` once its argument (or a part of it) is `value`."""
    call(**given)
    name, _, part = field.partition(".")
    is_part = part not in ("", "stride", "device")
    changed = replace(given[name], **{part: value}) if is_part else value
    with pytest.raises(ConfigError) as caught:
        call(**{**given, name: changed})
    assert caught.value.field.startswith(field), caught.value


def each(wrong: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Pairs of a field and a value of it that is wrong."""
    return [(field, value) for field, values in wrong.items() for value in values]


SLOT_PARAMS = each({
    "params.rules": [None],
    "params.key_S": [torch.zeros(2, dtype=torch.int64).to_sparse()],
    "params.temperature_S": [
        torch.ones(2, requires_grad=True), torch.ones(3), torch.tensor([1.0, -0.5]),
        torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1e-6]),
    ],
    "params.top_k_S": [torch.ones(2)],
    "params.top_p_S": [torch.tensor([0.0, 1.0]), torch.tensor([1.5, 1.0])],
    "params.min_p_S": [torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, 1.5])],
    "params.rule_S": [
        torch.tensor([0, 4]), torch.tensor([-1, 0]), torch.zeros(2, dtype=torch.int32),
    ],
})  # fmt: skip
FLAG = ["x", 1, None]
EDITS = each({
    "edits.bias_M": [
        torch.zeros(3, requires_grad=True), torch.zeros(2), torch.tensor([0.0, math.nan, 0.0]),
        torch.tensor([0.0, math.inf, 0.0]),
    ],
    "edits.mask_RW": [
        torch.zeros(1, 1, dtype=torch.int32).to_sparse(), torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int64),
    ],
    "edits.mask_N": [None, torch.tensor([0, 1]), torch.tensor([0, -2])],
    "edits.start_N1": [
        torch.tensor([0, 3]), torch.tensor([0, 2, 4]), torch.tensor([1, 2, 3]),
        torch.tensor([0, 4, 3]),
    ],
    "edits.token_M": [
        torch.tensor([4, 1, 2]), torch.tensor([1, 1, 2]), torch.tensor([1, 8, 2]),
        torch.tensor([-1, 4, 2]),
    ],
    "edits.repetition_M": [torch.tensor([1.0, 0.0, 1.0])],
    "edits.subtract_M": [torch.tensor([1.0, -math.inf, 1.0])],
})  # fmt: skip


WRONG_SAMPLE = each({
    "logits_NV": [torch.zeros(8), torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 0)],
    "logits_NV.stride": [torch.zeros(8, 2).t()],
    "slot_N": [
        torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int32), [0, 1], torch.tensor([0, 2]),
        torch.tensor([-1, 0]),
    ],
    "slot_N.device": [torch.zeros(2, dtype=torch.int64, device="meta")],
    "position_N": [torch.tensor([[0, 1]])],
    "draft_index_N": [torch.tensor([0.0, 1.0])],
    "draft_index_N.device": [torch.zeros(2, dtype=torch.int64, device="meta")],
    "streams": [
        (Stream.TARGET_TOKEN,), (Stream.TARGET_TOKEN, 99),
        (Stream.TARGET_TOKEN, Stream.TARGET_TOKEN), (Stream.TARGET_BLOCK, Stream.TARGET_TOKEN),
        (Stream.TARGET_TOKEN, []), None,
    ],
    "params": [None],
    "edits": [{}],
    "fp64": [*FLAG],
})  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [*WRONG_SAMPLE, *SLOT_PARAMS, *EDITS])
def test_sample(field: str, value: object) -> None:
    refuses(sample, sample_arguments(), field, value)


def test_filters_in_spite_of_has_filters() -> None:
    given = sample_arguments()
    for params in (make_params(2, top_k=3), make_params(2, top_p=0.9), make_params(2, min_p=0.1)):
        with pytest.raises(ConfigError, match=r"params\.has_filters"):
            sample(**{**given, "params": replace(params, has_filters=False)})
    wide = replace(make_params(2, top_k=8), has_filters=False)  # k >= V is off
    sample(**{**given, "params": wide})


def test_a_rule_that_params_rules_lacks() -> None:
    given, params = sample_arguments(), make_params(2, rule=[Rule.STANDARD, Rule.BLOCK])
    with pytest.raises(ConfigError, match=r"params\.rules.*BLOCK"):
        sample(**{**given, "params": replace(params, rules=frozenset({Rule.STANDARD}))})
    exact = replace(params, rules=frozenset({Rule.STANDARD, Rule.BLOCK}))
    sample(**{**given, "params": exact})


WRONG_DRAFT = each({
    "logits_NV": [torch.zeros(8)],
    "slot_N": [torch.tensor([0, 7]), torch.tensor([0])],
    "position_N": [torch.tensor([0.0, 1.0])],
    "draft_index_N": [torch.tensor([0, 2]), torch.tensor([-1, 0])],
    "streams": [TARGET],
    "edits": [edits_of(2)],
    "cache": [{}],
    "cache.logits_SKV": [
        torch.zeros(2, 8), torch.zeros(1, 2, 8), torch.zeros(2, 2, 9),
        torch.zeros(2, 2, 8).bfloat16(), torch.zeros(2, 8, 2).transpose(1, 2),
    ],
    "cache.threshold_SK": [torch.zeros(2, 3), torch.zeros(2, 2).double()],
    "cache.lse_SK": [torch.zeros(2, 2)],
    "fp64": [*FLAG],
})  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_DRAFT)
def test_draft(field: str, value: object) -> None:
    refuses(draft, draft_arguments(), field, value)


def test_a_row_of_the_cache_is_written_once() -> None:
    given = {**draft_arguments(), "slot_N": torch.tensor([0, 0])}
    draft(**given)  # two drafts of one slot
    with pytest.raises(ConfigError, match="slot_N"):
        draft(**{**given, "draft_index_N": torch.tensor([1, 1])})
    padding = {"slot_N": torch.tensor([1, 1]), "draft_index_N": torch.tensor([1, 1])}
    draft(**{**given, **padding})  # of the last slot


WRONG_VERIFY = each({
    "logits_NV": [torch.zeros(4, 8), torch.zeros(6, 8)],
    "slot_B": [torch.tensor([0.0, 1.0]), torch.tensor([0, 2])],
    "position_B": [torch.tensor([0])],
    "drafts": [None],
    "drafts.cache": [
        {}, None, DraftCache.empty(2, 1, 8, torch.float32, CPU),
        DraftCache.empty(1, 2, 8, torch.float32, CPU),
    ],
    "drafts.token_BK": [torch.zeros(2, 2), torch.zeros(3, 2, dtype=torch.int64)],
    "drafts.num_B": [torch.tensor([3, 0]), torch.tensor([4, -1])],
    "drafts.real_q_B": [torch.ones(2)],
    "synthetic_rate_K": [
        None, torch.tensor([0.5, 0.5]), torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([0.5, 1.1], dtype=torch.float64),
        torch.tensor([-0.1, 0.5], dtype=torch.float64),
        torch.tensor([math.nan, 0.5], dtype=torch.float64),
    ],
    "fp64_noise": [*FLAG],
})  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [*WRONG_VERIFY, *SLOT_PARAMS])
def test_verify(field: str, value: object) -> None:
    refuses(verify, verify_arguments(), field, value)


def test_only_synthetic_slots_need_rates() -> None:
    given = {**verify_arguments(), "synthetic_rate_K": None}
    assert verify(**{**given, "params": make_params(2, rule=Rule.BLOCK)}).finite_B.all()
    with pytest.raises(ConfigError, match="synthetic_rate_K"):
        verify(**given)


def test_rates_are_checked_again_in_another_call() -> None:
    given = verify_arguments()
    rate_K = given["synthetic_rate_K"]
    verify(**given)
    wide = {**given, "drafts": drafts_of([[1, 2, 3], [3, 1, 2]]), "edits": None}
    wide["logits_NV"] = torch.zeros(8, 8)
    with pytest.raises(ConfigError, match=r"synthetic_rate_K\.shape"):
        verify(**wide)
    rate_K[1] = 1.5
    with pytest.raises(ConfigError, match=r"`synthetic_rate_K` is 1\.5"):
        verify(**given)


WRONG_LOGPROBS = each({
    "logits_NV": [torch.zeros(2)],
    "token_N": [
        torch.tensor([0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 8]), torch.tensor([-1, 0]),
    ],
    "num_top": [-1, 9, 2.0, True],
})  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [*WRONG_LOGPROBS, *EDITS])
def test_logprobs(field: str, value: object) -> None:
    refuses(logprobs, logprobs_arguments(), field, value)


WRONG_EVIDENCE = each({
    "batch": [None],
    "verdict": [None],
    "verdict.token_BK1": [torch.zeros(2, 2).long()],
    "verdict.n_accept_B": [torch.zeros(3).long()],
    "request_R": [torch.tensor([2]), torch.tensor([-1]), torch.tensor([0.0])],
})  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_EVIDENCE)
def test_evidence(field: str, value: Any) -> None:
    batch = VerifyBatch(**verify_arguments())
    given: Any = {"batch": batch, "verdict": OPS.verify(batch), "request_R": two()}
    OPS.evidence(**given)
    name, _, part = field.partition(".")
    given[name] = given[name]._replace(**{part: value}) if part else value
    with pytest.raises(ConfigError) as caught:
        OPS.evidence(**given)
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize("value", [None, torch.zeros(2), torch.zeros(2, 8).long()])
def test_logprobs_of_raw_logits(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        OPS.logprobs(value, two(), 3)
    assert caught.value.field.startswith("rows")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: OPS.process_logits(torch.zeros(2, 8)), "rows"),  # type: ignore[arg-type]
        (lambda: OPS.sample(records(sample_arguments())[0], None), "noise"),  # type: ignore[arg-type]
        (lambda: OPS.verify(None), "batch"),  # type: ignore[arg-type]
    ],
)
def test_something_else_than_a_record(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.field == name


def test_values_on_a_device_are_not_read() -> None:
    """Every tensor on `meta`, which has no values: shapes are checked all the same."""
    given = sample_arguments()

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, SlotParams | Edits):
            names = value.__dataclass_fields__
            return replace(value, **{name: moved(getattr(value, name)) for name in names})
        return value

    there = {name: moved(value) for name, value in given.items()}
    check_sample(*records(there))
    there["position_N"] = torch.zeros(3, dtype=torch.int64, device="meta")
    wrong = records(there)
    with pytest.raises(ConfigError, match=r"position_N\.shape"):
        check_sample(*wrong)


def test_arguments_that_fit_one_call_are_checked_in_another() -> None:
    given = verify_arguments()
    verify(**given)
    more = make_params(given["drafts"].cache.logits_SKV.shape[0] + 1)
    with pytest.raises(ConfigError, match=r"drafts\.cache\.logits_SKV\.shape"):
        verify(**{**given, "params": more})
    away = {name: given[name].to("meta") for name in ("logits_NV", "slot_B", "position_B")}
    with pytest.raises(ConfigError, match=r"params\.key_S\.device"):
        verify(**{**given, **away})
