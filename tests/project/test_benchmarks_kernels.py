"""`benchmarks.kernels`: kernels by name and place, times that add up, and what a call reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernels
from benchmarks.heads import save_head
from benchmarks.kernels import (
    RECORDED,
    SETTLING,
    Kernel,
    call_bytes,
    kernel_figures,
    kind_of,
    kinds,
    measure,
)
from foretoken import LLM
from foretoken.errors import ConfigError
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.models.eagle3 import read_head
from foretoken.models.eagle3_config import read_eagle3_config
from foretoken.ops.stack import Dense
from tests.project.source import ROOT

GEMM = "nvjet_sm90_tst_128x80_64x8_1x2_h_badd_TNT"
LAYER = ("qkv", "attention", "attention merge", "o", "gate_up", "down")


def layers(count: int, product: str) -> list[str]:
    after = [product, "norm_kernel", product, "silu_kernel", product]
    return [product, "decode_kernel", "merge_kernel", *after] * count


def eagle_step(depth: int) -> list[str]:
    """Two drafts, the target through cuBLAS, and the head over the target's rows."""
    drafted = ["streamk_kernel", "join_kernel", *layers(1, "streamk_kernel"), "streamk_kernel"]
    return [*drafted, *undrafted_step(depth)]


def undrafted_step(depth: int) -> list[str]:
    target = ["plan_kernel", "embed_kernel", *layers(depth, GEMM), GEMM, "decide_kernel"]
    observed = ["streamk_kernel", "join_kernel", *layers(1, "streamk_kernel")]
    return [*target, "Memset (Device)", "unheard_of", *observed]


def test_every_kernel_of_ours_has_a_kind() -> None:
    folder = ROOT / "src" / "foretoken" / "ops" / "backends" / "triton"
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    names = re.findall(r"@(?:triton|gluon)\.jit[^\n]*\ndef (\w+_kernel)\(", source)
    assert len(set(names)) > 30
    assert [name for name in names if kind_of(name) == "other"] == []
    others = {
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>": "split-K sums",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>": "product",
        "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<at_cuda_detail::x>": "torch",
        "void (anonymous namespace)::elementwise_kernel_with_index<int>": "torch",
    }
    assert {name: kind_of(name) for name in others} == others


@pytest.mark.parametrize("steps", [1, 3])
def test_products_are_told_apart_by_their_place(steps: int) -> None:
    found = kinds(eagle_step(3) * steps, 3)
    expected = dict.fromkeys(LAYER, 3) | {f"draft {kind}": 2 for kind in (*LAYER, "head")}
    expected |= dict.fromkeys(("head", "draft features", "slots", "sampling", "copies"), 1)
    expected |= {"rows": 13, "other": 1}
    assert {kind: found.count(kind) / steps for kind in set(found)} == expected
    found = kinds(undrafted_step(3) * steps, 3)  # no logits after the head's pass
    assert {found.count(kind) / steps for kind in LAYER} == {3}
    assert {found.count(f"draft {kind}") / steps for kind in LAYER} == {1}
    plain = [*layers(3, "gemv_kernel"), "gemv_kernel"] * steps
    assert set(kinds(plain, 3)) == {*LAYER, "head", "rows"}
    assert kinds(plain, None).count("product") == 13 * steps


def test_own_times_and_idle_time_make_the_step() -> None:
    # Attention waits for qkv from 6 on; nothing runs from 20 to 25; of `o` 5 are covered.
    seen = [
        Kernel("merge_kernel", 25, 10),
        Kernel("gemv_kernel", 30, 10),
        Kernel("gemv_kernel", 0, 10),
        Kernel("decode_kernel", 6, 14),
    ]
    found = kernel_figures(seen, 1, {"o": 20_000, "head": 1}, bandwidth=4.0, steps=2)
    own = {kind: round(2000 * values["kernel_ms"], 9) for kind, values in found.items()}
    merged = {"qkv": 10, "attention": 10, "attention merge": 10, "o": 5}
    assert own == merged | {"idle": 5, "all": 40}
    assert found["o"] == pytest.approx(
        {"calls": 0.5, "duration_ms": 0.005, "kernel_ms": 0.0025, "share_of_step": 0.125,
         "call_us": 10.0, "read_gb": 1e-5, "read_gb_per_s": 4.0, "share_of_floor": 1.0}
    )  # fmt: skip
    assert found["all"]["duration_ms"] == pytest.approx(0.022)  # more than the step
    assert found["idle"].keys() == {"calls", "duration_ms", "kernel_ms", "share_of_step"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    with LLM("tiny-python", {"method": "draft_model"}, max_num_seqs=2, threads=1) as llm:
        yield llm
    torch.set_num_threads(threads)


def test_what_one_call_reads(llm: LLM, tmp_path: Path) -> None:
    floor = Floor.of(llm.engine, 40.0)
    target, rows = call_bytes(llm.engine, floor, 2, 10), 4 * 256  # bytes of a row of weights
    sizes = {"qkv": 8 * 64, "o": 4 * 64, "gate_up": 2 * 640, "down": 640, "head": 4096}
    assert [target[name] / rows for name in sizes] == pytest.approx([*sizes.values()])
    assert target["attention"] == 2 * 10 * 1024
    in_layers = floor.target.weights - target["head"] - rows * (20 * 2 + 1)
    assert 20 * sum(target[name] for name in list(sizes)[:4]) == pytest.approx(in_layers)
    assert 0 < target["draft qkv"] < target["qkv"]
    folder = save_head(tmp_path, hidden=32, vocabulary=60, sliding_window=1)
    stack = read_head(folder, read_eagle3_config(folder), Dense(torch.zeros(60, 32)))
    drafter, (layer,) = Reads.of_stack(stack, torch.float32), stack.layers
    linears = (layer.mixer.qkv, layer.mixer.o, layer.feed.gate_up, layer.feed.down, stack.head)
    numbers = sum(linear.weight.values.numel() for linear in linears) + 3 * 32
    heads = layer.mixer.kv_heads * layer.mixer.head_size
    assert drafter == Reads(4 * numbers, ((4 * 2 * heads, 1),))
    head = SimpleNamespace(stack=stack)
    runner = SimpleNamespace(model=llm.engine.runner.model, drafter=SimpleNamespace(head=head))
    engine: Any = SimpleNamespace(runner=runner)
    found = call_bytes(engine, Floor(floor.target, drafter, 40.0), 3, 2)
    own = {name: found[f"draft {name}"] for name in ("o", "features", "attention")}
    assert own == {
        "o": layer.mixer.o.weight.values.nbytes, "features": 4 * 32 * 96,
        "attention": 3 * 1 * 4 * 2 * heads,
    }  # fmt: skip


def test_whole_steps_are_recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a profiler that sees these kernels, 90 us in every 100."""
    seen = [SimpleNamespace(name="cudaGraphLaunch", device_type=SimpleNamespace(name="CPU"))]
    for i, name in enumerate(eagle_step(20) * RECORDED):
        place = SimpleNamespace(start=100.0 * i, elapsed_us=lambda: 90.0)
        on = SimpleNamespace(name="CUDA")
        seen.append(SimpleNamespace(name=name, device_type=on, time_range=place))
    calls: list[str] = []
    start, stop = (lambda name=name: calls.append(name) for name in ("start", "stop"))
    fake = SimpleNamespace(start=start, stop=stop, events=lambda: seen)
    monkeypatch.setattr(kernels, "profile", lambda **named: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr("foretoken.lab.bench.floor.read_bandwidth", lambda device: 40.0)
    found = {row.labels["kernels"]: row for row in measure(llm, 2, None, (24, 80))}
    assert calls == ["wait", "start", "wait", "stop"]
    assert found["o"].case == "batch 2, draft_model: o"
    assert "share_of_floor" in found["qkv"].values
    of_o = [found["o"].values[name].median for name in ("calls", "call_us", "kernel_ms")]  # type: ignore[union-attr]
    assert of_o == pytest.approx([20.0, 90.0, 1.8])
    own = [row.values["kernel_ms"].median for row in found.values()]  # type: ignore[union-attr]
    assert sum(own[:-1]) == pytest.approx(own[-1])
    with pytest.raises(ConfigError, match="`output_len` is 4: must be longer"):
        measure(llm, 2, 0, (24, SETTLING + 1))
