"""`max_step_seconds` through the engine: what is measured at start, and that no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken import LLM, ConfigError, EngineConfig, SamplingParams
from foretoken.engine.build import EngineParts
from foretoken.engine.step_costs import SECONDS
from tests.engine.doubles import ON_DEVICE, ON_HOST, llm_of
from tests.engine.paged_machine import given_pace

LONG = "for i in range(10):\n    print(i, i * i)\n" * 4


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "cpu", 0.05)


def build(target: Path, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM(str(target), speculation, **{"max_num_seqs": 3, "threads": 1, **options})


def tokens_and_chunks(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Of a request that decodes while two prompts come, with seeds; chunks computed next to it."""
    engine, params = llm.engine, SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    groups = [engine.add("a", [1, 2, 3], params)]
    engine.step()
    ids = llm.get_tokenizer().encode(LONG)
    groups += [engine.add(name, ids[cut:], params) for name, cut in (("b", 0), ("c", 40))]
    chunks, schedule = list[int](), engine.scheduler.schedule

    def watched() -> Any:
        left = {r: r.num_prefill for group in groups for r in group.samples}
        plan = schedule()
        chunks.extend(s.num_tokens for s in plan.shares if left[s.request])
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    return [group.samples[0].token_ids[group.samples[0].num_prompt :] for group in groups], chunks


@pytest.mark.parametrize("speculative", [False, True])
def test_no_seeded_text_depends_on_how_prompts_are_cut(
    target: Path, draft: Path, speculative: bool
) -> None:
    speculation = {"model": str(draft), "num_speculative_tokens": 3} if speculative else None
    expected, whole = tokens_and_chunks(build(target, speculation))
    llm = build(target, speculation)
    llm.engine.scheduler.pace = given_pace(0.03)
    found, chunks = tokens_and_chunks(llm)
    assert found == expected
    assert sum(chunks) == sum(whole)
    assert len(whole) == 2 < len(chunks)


@pytest.mark.parametrize("parts", [ON_HOST, ON_DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("length", [2, 9, 70, 256])
def test_what_is_measured_is_plausible(target: Path, parts: EngineParts, length: int) -> None:
    sizes = {"max_num_seqs": 3, "max_model_len": length}
    llm = llm_of(parts, target, backend="torch", threads=1, max_step_seconds=0.5, **sizes)
    pace = llm.engine.scheduler.pace
    assert pace is not None
    costs = pace.prompts
    assert list(costs.tokens) == sorted({*costs.tokens})
    assert len(costs.tokens) >= 2
    assert (np.diff(costs.seconds) >= 0).all()
    assert min(*costs.seconds, costs.pair) >= 0
    assert pace.room([0], 10).decoding > 0
    assert llm.engine.runner.slots.admitted == {}
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=length - 1))
    assert len(output.outputs[0].token_ids) == length - 1


def test_without_a_bound_nothing_is_measured(target: Path) -> None:
    assert build(target).engine.scheduler.pace is None


@pytest.mark.parametrize("value", [0, -1.0, "fast", True, float("nan"), 1e7])
def test_the_bound_has_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_step_seconds"):
        EngineConfig("m", max_step_seconds=value)
