"""A GPU that fails: every request ends with the reason, no other is served, nothing hangs.

Errors are injected where PyTorch raises them, into engines with slots as on a device: in a pass,
or later, when a result is read. Memory that runs out is no such failure: the engine goes on.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, AsyncEngine, SamplingParams
from foretoken.cli.app import app
from foretoken.engine import faults
from foretoken.engine.build import EngineParts
from foretoken.engine.engine import Engine
from foretoken.engine.graphs import Graphs
from foretoken.engine.runner import Runner
from foretoken.errors import (
    EngineBrokenError,
    EngineMemoryError,
    ForetokenError,
    NonFiniteLogitsError,
)
from foretoken.models import load_model
from foretoken.ops import ForwardOutput
from foretoken.slots.step import StepResult, StepShape
from tests.engine.doubles import ON_DEVICE, always, double, engine_of, failing, llm_of, nth
from tests.support.asynchronous import PATIENCE

OPTIONS: dict[str, Any] = {
    "backend": "torch", "threads": 1, "num_blocks": 40, "block_size": 4, "max_num_seqs": 2,
    "max_num_batched_tokens": 48, "max_model_len": 96,
}  # fmt: skip
PROMPTS = ["abc", "abd", "abe", "abf"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nHints.")
FAILURES = [
    ILLEGAL,
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
]


class Lost:
    """A result that was on its way to the host when the device failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def wait(self) -> Any:
        raise self.error


def fail_at(engine: Engine, place: str, error: BaseException, when: Any = always) -> Any:
    """Inside, each pass raises, or each result when it is read, for which `when` is true."""
    if place == "pass":
        return double(engine.runner, "model", forward=failing(error, when))

    def losing(finish: Callable[..., StepResult], *given: Any) -> StepResult:
        result = finish(*given)
        if when():
            result.packet = Lost(error)  # type: ignore[assignment]
        return result

    return double(engine, "runner", finish=losing)


def build(target: Path, spec: dict[str, Any] | None = None, **options: Any) -> LLM:
    return llm_of(ON_DEVICE, target, spec, **OPTIONS | options)


def speculation(draft: Path, kind: str) -> dict[str, Any] | None:
    return {"model": str(draft)} if kind == "draft_model" else None


@pytest.mark.parametrize("place", ["pass", "result"])
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("kind", ["plain", "draft_model"])
def test_all_requests_end_and_no_other_is_taken(
    target: Path, draft: Path, kind: str, ahead: bool, number: int, place: str
) -> None:
    llm = build(target, speculation(draft, kind), async_scheduling=ahead)
    whole = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
    engine = llm.engine
    with fail_at(engine, place, ILLEGAL, nth(number)):
        outputs = llm.generate(PROMPTS, PARAMS)
    for output, tokens in zip(outputs, whole, strict=True):
        assert isinstance(output.error, EngineBrokenError)
        assert output.error.__cause__ is ILLEGAL
        (sample,) = output.outputs
        assert sample.finish_reason == "error"
        assert sample.token_ids == tokens[: len(sample.token_ids)] != tokens
    message = str(outputs[0].error)
    assert "(CUDA error: an illegal memory access was encountered)" in message
    assert "Hints" not in message
    assert "start another process" in message
    assert not engine.has_work
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == 40
    for call in (llm.generate, lambda prompt: [*llm.stream(prompt)]):
        with pytest.raises(EngineBrokenError) as caught:
            call("abc")
        assert caught.value.__cause__ is ILLEGAL
    with pytest.raises(EngineBrokenError):
        engine.add("late", [1, 2], PARAMS)
    refused = llm.generate(PROMPTS, PARAMS, on_error="return")
    assert all(isinstance(output.error, EngineBrokenError) for output in refused)
    llm.close()


@pytest.mark.parametrize("error", FAILURES)
def test_how_a_device_says_that_it_failed(error: RuntimeError) -> None:
    assert faults.is_device_failure(error)
    assert isinstance(faults.step_failure(error), EngineBrokenError)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_that_ran_out_is_no_failure_of_the_device(error: RuntimeError) -> None:
    assert not faults.is_device_failure(error)
    failure = faults.step_failure(error)
    assert isinstance(failure, EngineMemoryError)
    assert "`memory_fraction`" in str(failure)


def test_other_errors_are_no_failure_of_the_device() -> None:
    for error in (RuntimeError("shapes differ"), ValueError("CUDA error: x"), KeyError("cuda")):
        assert not faults.is_device_failure(error)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "draft_model"])
def test_memory_that_runs_out_ends_what_runs_and_the_engine_goes_on(
    target: Path, draft: Path, kind: str, number: int, ahead: bool
) -> None:
    llm = build(target, speculation(draft, kind), async_scheduling=ahead)
    whole = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
    full = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB of "
        "which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.1 GiB in use."
    )
    with fail_at(llm.engine, "pass", full, nth(number)):
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [type(o.error) for o in outputs] == [EngineMemoryError] * 2 + [type(None)] * 2
    message = str(outputs[0].error)
    assert "1.10 GiB is free. Lower `memory_fraction`" in message
    assert [o.outputs[0].token_ids for o in outputs[2:]] == whole[2:], "those that waited"
    llm.engine.check_integrity()
    assert llm.engine.scheduler.pool.num_free == 40
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == whole


def test_an_error_that_is_kept_keeps_no_tensors(target: Path) -> None:
    """Outputs hold the error, the error its frames, and those would hold the step's logits."""
    llm = build(target)
    held: list[weakref.ref[torch.Tensor]] = []

    def forward(*given: Any) -> Any:
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with double(llm.engine.runner, "model", forward=forward):
        (output,) = llm.generate(["abc"], PARAMS)
    assert output.error is not None
    gc.collect()
    assert held
    assert held[0]() is None


@pytest.mark.parametrize("ahead", [True, False])
def test_logits_that_are_no_numbers_end_their_request_alone(target: Path, ahead: bool) -> None:
    llm = build(target, async_scheduling=ahead, max_num_seqs=4)
    whole = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
    is_fourth = nth(4)

    def poisoned(forward: Callable[..., ForwardOutput], *given: Any) -> ForwardOutput:
        output = forward(*given)
        if is_fourth():  # four requests decode, a row each
            logits = output.logits_NV.clone()
            logits[1] = float("nan")
            output = output._replace(logits_NV=logits)
        return output

    with double(llm.engine.runner, "model", forward=poisoned):
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [type(o.error) for o in outputs] == [
        type(None), NonFiniteLogitsError, type(None), type(None)
    ]  # fmt: skip
    others = [0, 2, 3]
    assert [outputs[i].outputs[0].token_ids for i in others] == [whole[i] for i in others]
    assert outputs[1].outputs[0].token_ids == whole[1][:3]
    llm.engine.check_integrity()


@pytest.mark.parametrize("place", ["pass", "result"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ILLEGAL, EngineBrokenError),
        (torch.OutOfMemoryError("CUDA out of memory."), EngineMemoryError),
    ],
)
def test_readers_of_an_async_engine_end(
    target: Path, place: str, error: RuntimeError, kind: type[Exception]
) -> None:
    engine = AsyncEngine.from_engine(engine_of(ON_DEVICE, target, **OPTIONS))

    async def read(prompt: str) -> BaseException | None:
        try:
            async for output in engine.generate(prompt, PARAMS):
                last = output
        except ForetokenError as raised:
            return raised
        assert last.finished
        return last.error

    async def read_all() -> list[BaseException | None]:
        ended = await asyncio.wait_for(asyncio.gather(*map(read, PROMPTS)), timeout=PATIENCE)
        again = await asyncio.wait_for(read("later"), timeout=PATIENCE)
        await engine.close()
        return [*ended, again]

    with fail_at(engine.engine, place, error):
        found = asyncio.run(read_all())
    assert all(isinstance(e, kind) for e in found), found


def test_a_step_that_cannot_be_captured_runs_without_a_graph(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[StepShape] = []

    class Full(Graphs):
        def recording(self, shape: StepShape) -> Any:
            tried.append(shape)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    whole = [o.outputs[0].token_ids for o in build(target).generate(PROMPTS, PARAMS)]
    llm = llm_of(replace(ON_DEVICE, graphs=Full), target, **OPTIONS)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == whole
    assert len(tried) == len({*tried}) > 0, "each once"
    assert caplog.text.count("run without a CUDA graph") == len(tried)


def loading(error: BaseException, number: int) -> EngineParts:
    """The model that is loaded as this one, from 1, raises instead."""
    when = nth(number)
    return replace(ON_DEVICE, load_model=partial(failing(error, when), load_model))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, r"weights were loaded: CUDA out of.*files hold .* MiB\. Take a smaller checkpoint"),
        (2, r"drafter was loaded.*Take a smaller draft model"),
    ],
)
def test_weights_that_do_not_fit(target: Path, number: int, said: str) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    with pytest.raises(EngineMemoryError, match=said):
        llm_of(loading(error, number), target, {"model": str(target)}, **OPTIONS)


def test_a_device_that_fails_while_the_engine_is_built(target: Path) -> None:
    with pytest.raises(EngineBrokenError, match="illegal memory access"):
        llm_of(loading(ILLEGAL, 1), target, **OPTIONS)


def test_the_command_exits_with_2(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    begin, fail = Runner.begin, failing(ILLEGAL, nth(2))
    monkeypatch.setattr(Runner, "begin", lambda runner, plan: fail(partial(begin, runner), plan))
    result = CliRunner().invoke(
        app, ["generate", "abc", "--model", str(target), "--max-tokens", "9", "--backend", "torch"]
    )
    assert result.exit_code == 2
    assert "The device failed (CUDA error" in result.stderr
