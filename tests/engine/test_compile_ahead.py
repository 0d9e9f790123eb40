"""A step that launches nothing, which is how kernels are compiled ahead, survives what it reads.

Kernels are found, compiled in parallel, while an engine is built: the measured steps run once on
memory that no kernel has written. It is filled with the worst that it can hold here, in Triton's
interpreter, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.heads import save_head
from foretoken import LLM
from foretoken.drafting.control import draft_widths
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory_plan import Sizes
from foretoken.engine.step_costs import Gauge, measure_step_bytes, measure_step_seconds
from foretoken.ops import Rule, checks
from tests.engine.doubles import ON_DEVICE, double, engine_of
from tests.support.checkpoints import save_checkpoint
from tests.support.interpreter import INTERPRETED, interpret_tests

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")


@pytest.mark.skipif(INTERPRETED, reason="this is the process it would start")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("few", ["draft_model", pytest.param("", marks=pytest.mark.trial)])
def test_in_the_interpreter(few: str) -> None:
    interpret_tests(__file__, few)


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold the largest integer, or NaN."""
    monkeypatch.setattr(checks, "check_verify", lambda batch: None)  # reads no numbers of a device
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.use_deterministic_algorithms(False)


class Compiled(Exception):
    """What is measured afterwards is left out."""


class NoGauge(Gauge):
    def __init__(self) -> None:
        pass

    def peak(self, run: Callable[[], object], base: int) -> None:
        run()


@interpreted
@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "padded", "eagle3", "unfused"])
def test_no_garbage_is_used_as_an_index(method: str, tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", max_len=128, layers=3)
    spec: dict[str, Any] | None = {"method": method, "num_speculative_tokens": 3}
    if method in ("none", "unfused"):
        spec = None
    elif method == "draft_model":
        spec = {"model": str(target), "num_speculative_tokens": 3}
    elif method == "padded":
        draft = save_checkpoint(tmp_path / "draft", max_len=128, vocabulary=300)
        spec = {"model": str(draft), "num_speculative_tokens": 3}
    elif method == "eagle3":
        config = LLM(str(target), backend="torch").engine.runner.model.config
        hidden, vocabulary = config.hidden_size, config.vocab_size
        spec["model"] = str(save_head(tmp_path / "head", hidden=hidden, vocabulary=vocabulary))
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 96}
    options: dict[str, Any] = {"threads": 2, "num_blocks": 40, "block_size": 16, **sizes}
    runner = engine_of(ON_DEVICE, target, spec, backend="triton", **options).runner
    if method == "unfused":
        model = runner.model
        model.network = model.backend.stock_stack(model.network.stack)
    ran = []

    def dry(compile_ahead: Any, run: Any) -> None:
        compile_ahead(lambda: ran.append(run()))
        raise Compiled

    drafts = 0 if spec is None else 3
    graphs = Graphs((1, 3), draft_widths(drafts, adapts=True))
    with double(runner.model, "backend", compile_ahead=dry):
        with pytest.raises(Compiled):
            measure_step_bytes(runner, Sizes(3, 48, 96, drafts), NoGauge())
        assert ran
        ran.clear()
        runner.graphs = graphs
        with pytest.raises(Compiled):  # as they are captured
            measure_step_seconds(runner, 3, drafts, graphs.widths, Rule.STANDARD)
        assert ran
