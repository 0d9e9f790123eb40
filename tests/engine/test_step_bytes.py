"""Memory as it is measured: steps that really run on slots of a device, on a GPU that is made up.

PyTorch runs on a CPU here. `Device` answers in the place of `torch.cuda`, and takes as much memory
for weights and for each token and row of a step as the tests say.
"""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, EngineConfig, SamplingParams
from foretoken.cache.kv_pool import KVPool
from foretoken.engine import build
from foretoken.engine.build import EngineParts
from foretoken.engine.step_costs import Gauge, gauge_of
from foretoken.errors import EngineMemoryError
from foretoken.models import CausalLM, load_model
from foretoken.ops import ForwardOutput, VerifyBatch
from foretoken.ops.steps import ForwardBatch
from tests.engine.doubles import ON_DEVICE, Double, llm_of

CPU = torch.device("cpu")
MIB = 2**20
WEIGHTS, DRAFT_WEIGHTS = 50 * MIB, 20 * MIB
BASE, TOKEN, ROW = 3 * MIB, 40_000, 70_000  # bytes that a step takes


class Device:
    """A GPU: what is reserved, by whom, and the most that ever was."""

    def __init__(self, total: int, others: int = 0) -> None:
        self.total, self.others = total, others
        self.reserved, self.cached, self.most, self.kernels, self.weights = 0, 0, 0, 0, 0
        self.steps: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        return self.total - self.others - self.reserved - self.cached - self.kernels

    def use(self, num_bytes: int) -> None:
        if num_bytes > self.free + self.cached:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.cached = max(self.cached, num_bytes)
        self.most = max(self.most, self.reserved + self.cached)

    # What `Gauge` asks.

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: Any) -> int:
        return self.reserved + self.cached

    def max_memory_reserved(self, device: Any) -> int:
        return self.most

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.most = self.reserved + self.cached

    def empty_cache(self) -> None:
        self.cached = 0

    def synchronize(self, device: Any) -> None:
        pass

    # What an engine on it is made of.

    def load(self, *args: Any, **kwargs: Any) -> Any:
        model, is_draft = load_model(*args, **kwargs), self.weights > 0
        self.weights += DRAFT_WEIGHTS if is_draft else WEIGHTS
        self.reserved += DRAFT_WEIGHTS if is_draft else WEIGHTS
        return model if is_draft else Double(model, forward=partial(self.forward, model))

    def forward(self, model: CausalLM, batch: ForwardBatch, kv: KVPool) -> ForwardOutput:
        output = model.forward(batch, kv)
        rows = len(batch.logit_row_N) if batch.num_deciding is None else batch.num_deciding
        self.steps.append((len(batch.token_T), rows))
        self.use(BASE + TOKEN * len(batch.token_T) + ROW * rows)
        return output

    def start(self, target: Path, spec: dict[str, Any] | None = None, **options: Any) -> LLM:
        self.reserved = self.weights = 0
        parts = EngineParts(
            on_host=lambda device: False,
            load_model=self.load,
            gauge_of=lambda device: Gauge(device, self),
        )
        completed = build._completed

        def as_on_a_gpu(given: EngineConfig, device: torch.device) -> EngineConfig:
            return completed(given, torch.device("cuda"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "_completed", as_on_a_gpu)
            return llm_of(parts, target, spec, backend="torch", threads=1, **options)


SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 300}


def test_the_steps_are_as_large_as_they_can_be(target: Path) -> None:
    device = Device(total=4096 * MIB)
    llm = device.start(target, **SIZES)
    assert device.steps[::2] == device.steps[1::2] == [(1, 1), (8, 8), (300, 8)]
    plan = llm.memory_plan
    assert plan is not None
    assert plan.parts["weights"] == WEIGHTS
    assert plan.parts["activations"] == BASE + 300 * TOKEN + 8 * ROW
    assert plan.num_blocks == 8 * 4, "no more than 8 requests of 256 tokens can use"
    assert llm.engine.runner.kv.block_size == 64
    pool = llm.engine.runner.kv
    taken = sum(t.nbytes for t in (*pool.keys, *pool.values))
    assert plan.parts["K/V cache"] == taken, "the spare block, too"
    state = llm.engine.runner.slots.state
    assert 0 <= state.token_SL.nbytes + state.block_SL.nbytes - plan.parts["slots"] <= 9 * 4
    (output,) = llm.generate(["abc"], SamplingParams(max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5
    llm.engine.check_integrity()


class Compiling(Device):
    """What is compiled ahead is run."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.filters: list[bool] = []

    def load(self, *args: Any, **kwargs: Any) -> Any:
        model = super().load(*args, **kwargs)
        self.verify = model.backend.verify
        ahead = {"compile_ahead": lambda run: run(), "verify": self.watch}
        model.backend = Double(model.backend, **ahead)
        return model

    def watch(self, batch: VerifyBatch) -> Any:
        self.filters.append(batch.params.has_filters)
        return self.verify(batch)


def test_what_is_compiled_ahead_is_every_kind_of_step(target: Path) -> None:
    device = Compiling(total=4096 * MIB)
    plan = device.start(target, **SIZES).memory_plan
    assert plan is not None
    assert plan.parts["activations"] == BASE + 300 * TOKEN + 8 * ROW
    sizes = [(1, 1), (8, 8), (300, 8)]
    assert device.steps[:6] == sizes * 2
    assert device.filters[:6] == [False] * 3 + [True] * 3
    assert device.steps[6::2] == sizes


def test_drafts_take_part(target: Path, draft: Path) -> None:
    device = Device(total=4096 * MIB)
    llm = device.start(target, {"model": str(draft), "num_speculative_tokens": 3}, **SIZES)
    assert device.steps[::2] == [(4, 4), (32, 32), (300, 32)]
    plan, drafter = llm.memory_plan, llm.engine.runner.drafter
    assert plan is not None
    assert drafter is not None
    assert plan.parts["weights"] == WEIGHTS
    assert plan.parts["weights of the draft"] == DRAFT_WEIGHTS
    assert plan.parts["drafts of slots"] == 9 * drafter.bytes_per_slot
    assert plan.parts["K/V cache of the draft"] == 33 * drafter.kv_bytes_per_block
    params = SamplingParams(temperature=1, seed=3, max_tokens=20)
    (output,) = llm.generate(["abc"], params)
    assert output.metrics.num_draft_tokens > 0


def test_a_short_context_bounds_the_tokens_of_a_step(target: Path, draft: Path) -> None:
    device = Device(total=4096 * MIB)
    device.start(target, max_num_seqs=2, max_num_batched_tokens=300, max_model_len=40)
    assert device.steps[::2] == [(1, 1), (2, 2), (2 * 39, 2)]
    drafts = {"model": str(draft), "num_speculative_tokens": 9}
    device.steps.clear()
    device.start(target, drafts, **SIZES | {"max_model_len": 4})
    assert {*device.steps} == {(3, 3), (24, 24)}, "two drafts, and no room for a prompt"


def test_what_does_not_run_is_computed_from_what_does(target: Path) -> None:
    """40 MiB for steps: 560 tokens of 40 kB run, 2048 do not."""
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    device = Device(total=90 * MIB)
    with pytest.raises(EngineMemoryError, match=r"are missing\. Enough would be") as caught:
        device.start(target, **sizes)
    tokens = [tokens for tokens, _ in device.steps]
    assert tokens == [1, 1, 64, 64, 2048, 1056, 560, 560]
    needed = BASE + 2048 * TOKEN + 64 * ROW
    assert f"activations {needed / MIB:.3g} MiB" in str(caught.value)
    assert "max_num_batched_tokens" in str(caught.value)


def test_not_even_one_request(target: Path) -> None:
    device = Device(total=52 * MIB)
    with pytest.raises(EngineMemoryError, match="one request: weights and kernels take 50 MiB"):
        device.start(target)


def test_what_others_hold_is_not_planned_with(target: Path) -> None:
    device = Device(total=4096 * MIB, others=4000 * MIB)
    gauge = Gauge(CPU, device)
    assert (gauge.budget(0.5).total, gauge.budget(0.5).free) == (4096 * MIB, 96 * MIB)
    device.reserved, device.cached, device.kernels = 10 * MIB, 5 * MIB, 7 * MIB
    assert gauge.taken() == 10 * MIB
    assert gauge.libraries() == 7 * MIB
    with pytest.raises(EngineMemoryError, match=r"of 4\.0 GiB are free"):
        device.start(target, max_num_seqs=64, max_num_batched_tokens=2048)


def test_the_peak_is_what_a_step_adds() -> None:
    device = Device(total=100 * MIB)
    gauge = Gauge(CPU, device)
    device.reserved = 20 * MIB
    base = gauge.taken()
    assert gauge.peak(lambda: device.use(30 * MIB), base) == 30 * MIB
    assert gauge.peak(lambda: device.use(3 * MIB), base) == 3 * MIB
    assert gauge.peak(lambda: device.use(90 * MIB), base) is None
    with pytest.raises(RuntimeError, match="another"):
        gauge.peak(lambda: (_ for _ in ()).throw(RuntimeError("another")), base)


def test_a_context_that_was_not_asked_for_is_shortened(
    target: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from tests.support.checkpoints import save_checkpoint

    long = save_checkpoint(tmp_path / "long", max_len=100_000)
    device = Device(total=100 * MIB)
    with caplog.at_level(logging.INFO, logger="foretoken"):
        llm = device.start(long, **SIZES)
    plan = llm.memory_plan
    assert plan is not None
    assert 1024 < plan.max_model_len < 100_000
    assert f"`max_model_len` is {plan.max_model_len}, not the checkpoint's 100000" in caplog.text
    assert "K/V cache" in caplog.text, "the table"
    assert llm.engine.limits.max_model_len == plan.max_model_len
    assert llm.engine.limits.cache_tokens >= plan.max_model_len
    with pytest.raises(EngineMemoryError, match=rf"`max_model_len` 100000 -> {plan.max_model_len}"):
        device.start(long, max_model_len=100_000, **SIZES)


def test_a_cache_of_given_size_overrides_the_plan(target: Path) -> None:
    device = Device(total=100 * MIB)
    assert device.start(target, num_blocks=3, **SIZES).engine.scheduler.pool.num_blocks == 3
    llm = device.start(target, kv_cache_gib=0.001, **SIZES)
    plan = llm.memory_plan
    assert plan is not None
    cache = plan.parts["K/V cache"]
    assert 0 < cache + plan.parts["slots"] <= 0.001 * 2**30
    with pytest.raises(EngineMemoryError, match="num_blocks or kv_cache_gib"):
        device.start(target, num_blocks=2000, **SIZES)


def test_on_a_cpu_nothing_is_measured(target: Path) -> None:
    assert gauge_of(CPU) is None
    llm = LLM(str(target))
    plan = llm.memory_plan
    assert plan is not None
    assert plan.usable is None
    assert plan.parts.keys() == {"slots", "K/V cache"}
    assert llm.engine.runner.kv.block_size == 16
    assert plan.num_blocks == llm.engine.scheduler.pool.num_blocks


def test_garbage_is_not_looked_for_in_what_is_loaded(target: Path) -> None:
    gc.unfreeze()
    LLM(str(target))
    assert gc.get_freeze_count() == 0, "a pause costs no device anything on a CPU"
    drafts = {"model": str(target), "num_speculative_tokens": 2}
    llm = llm_of(ON_DEVICE, target, drafts, backend="torch")
    assert len(gc.get_objects()) < 0.1 * gc.get_freeze_count()
    runner = llm.engine.runner
    kept = [weakref.ref(one) for one in (runner.model.network, runner.drafter, runner.slots)]
    del llm, runner
    assert [one() for one in kept] == [None] * 3, "nothing needs the collector to be given back"
    gc.unfreeze()
