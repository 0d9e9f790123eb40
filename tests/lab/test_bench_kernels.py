"""`foretoken bench --kernels`: kernels by name and place, times that add up, and what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.lab.bench import kernels
from foretoken.lab.bench.chart import chart
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.kernels import RECORDED, Kernel, Use, figures_of, kind_of, kinds, uses
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.report import results, tables
from foretoken.lab.bench.run import Bench
from foretoken.lab.results import Spread
from tests.project.source import ROOT

SVG = "{http://www.w3.org/2000/svg}"
GEMM = "nvjet_sm90_tst_128x80_64x8_1x2_h_badd_TNT"
TORCH = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >"


def layers(count: int, product: str) -> list[str]:
    behind = [product, "norm_kernel", product, "silu_kernel", product]
    return [product, "decode_kernel", "merge_kernel", *behind] * count


def eagle_step(depth: int) -> list[str]:
    """Two drafts, the target through cuBLAS, and the head over the target's rows."""
    drafted = [*layers(1, "streamk_kernel"), "streamk_kernel", "spread_kernel", "decide_kernel"]
    target = ["pack_kernel", TORCH, *layers(depth, GEMM), GEMM, "decide_kernel", "advance_kernel"]
    observed = ["shift_kernel", "streamk_kernel", "join_kernel", *layers(1, "streamk_kernel")]
    first = ["count_kernel", "streamk_kernel", "decide_kernel", "plan_kernel", "join_kernel"]
    return [*first, *drafted, *target, *observed, "Memcpy DtoH (Device -> Pinned)", "unheard_of"]


def test_every_kernel_of_ours_has_a_kind() -> None:
    folder = ROOT / "src" / "foretoken" / "ops" / "backends" / "triton"
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    names = re.findall(r"@(?:triton|gluon)\.jit[^\n]*\ndef (\w+_kernel)\(", source)
    assert len(set(names)) > 30
    assert [name for name in names if kind_of(name) == "other"] == []
    others = {
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>": "split-K sums",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>": "product",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "product",
        "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<at_cuda_detail::x>": "torch",
        "void (anonymous namespace)::elementwise_kernel_with_index<int>": "torch",
        "Memset (Device)": "copies",
    }
    assert {name: kind_of(name) for name in others} == others


@pytest.mark.parametrize("steps", [1, 3])
def test_products_are_told_apart_by_their_place(steps: int) -> None:
    found = kinds(eagle_step(3) * steps, 3)
    layer = {"qkv": 3, "attention": 3, "attention merge": 3, "o": 3, "gate_up": 3, "down": 3}
    drafted = {f"draft {kind}": 2 for kind in [*layer, "head"]}
    small = {"rows": 13, "slots": 5, "sampling": 3, "torch": 1, "copies": 1, "other": 1}
    expected = layer | drafted | small | {"head": 1, "draft features": 1}
    assert {kind: found.count(kind) / steps for kind in set(found)} == expected
    plain = ["pack_kernel", *layers(3, "gemv_kernel"), "gemv_kernel", "decide_kernel"]
    assert set(kinds(plain * steps, 3)) == {*layer, "head", "rows", "slots", "sampling"}
    unsplit = kinds(plain * steps, None)
    assert unsplit.count("product") == 13 * steps


def test_own_times_and_idle_time_make_the_step() -> None:
    # qkv; attention waits for it from 6 on; idle from 20 to 25; the last product's own 5.
    seen = [
        Kernel("merge_kernel", 25, 10),
        Kernel("gemv_kernel", 30, 10),
        Kernel("gemv_kernel", 0, 10),
        Kernel("decode_kernel", 6, 14),
    ]
    found = uses(seen, 1, steps=1)
    assert found == {
        "qkv": Use(1, 0.010, 0.010),
        "attention": Use(1, 0.014, 0.010),
        "attention merge": Use(1, 0.010, 0.010),
        "o": Use(1, 0.010, 0.005),
        "idle": Use(0, 0.0, 0.005),
        "all": Use(4, 0.044, 0.040),
    }
    assert uses(seen * 2, 1, steps=2)["all"].calls == 4
    made = figures_of(found, {"o": 10_000, "head": 1}, bandwidth=4.0)
    assert made["o"] == pytest.approx(
        {"calls": 1, "duration_ms": 0.010, "kernel_ms": 0.005, "share_of_step": 0.125,
         "call_us": 10.0, "read_gb": 1e-5, "read_gb_per_s": 2.0, "share_of_floor": 0.5}
    )  # fmt: skip
    assert "call_us" not in made["idle"]
    assert "read_gb" not in made["qkv"]


def test_what_one_call_reads(pair: LLM) -> None:
    floor = Floor.of(pair.engine, 40.0)
    target, hidden, inner = floor.target.per_call(2, 10), 256, 640
    assert target == pytest.approx(
        {
            "qkv": 4 * hidden * 8 * 64,
            "o": 4 * hidden * 4 * 64,
            "gate_up": 4 * hidden * 2 * inner,
            "down": 4 * hidden * inner,
            "head": 4 * hidden * 4096,
            "attention": 2 * 10 * 1024,
        }
    )
    norms = 4 * (20 * 2 * hidden + hidden)
    products = sum(target[name] for name in ("qkv", "o", "gate_up", "down"))
    assert 20 * products + target["head"] + norms == floor.target.weights
    drafted = {f"draft {name}": read for name, read in floor.drafter.per_call(2, 10).items()}
    assert floor.per_call(2, 10) == target | drafted
    weights = SimpleNamespace(_asdict=lambda: {"fc": torch.zeros(3), "o": torch.zeros(5)})
    head: Any = SimpleNamespace(weights=weights, layer_shapes=[(2, 8, 8)], dtype=torch.float32)
    reads = Reads.of_head(head)
    assert reads == Reads(20, ((128, None),))
    assert reads.per_call(3, 2) == {"o": 20, "features": 12, "attention": 3 * 2 * 128}


def events(steps: int) -> Iterator[SimpleNamespace]:
    """As a profiler has them: of the host, too."""
    yield SimpleNamespace(name="cudaGraphLaunch", device_type=torch.device("cpu"))
    for i, name in enumerate(eagle_step(20) * steps):
        place = SimpleNamespace(start=100.0 * i, elapsed_us=lambda: 90.0)
        device_type = SimpleNamespace(name="CUDA")
        yield SimpleNamespace(name=name, device_type=device_type, time_range=place)


def test_a_benchmark_records_behind_its_runs(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake = SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        events=lambda: [*events(RECORDED)],
    )
    monkeypatch.setattr(kernels, "profile", lambda **named: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    options = BenchOptions(
        batch_size="1,2", input_len=24, output_len=80, bandwidth=40.0, repeats=1, warmup=0,
        prompts="heldout", compare=True, kernels=True,
    )  # fmt: skip
    bench, said = Bench(pair, options, SamplingParams(temperature=0.0)), list[str]()
    bench.run(lambda done, what: said.append(f"{done} of {bench.num_runs}: {what}"))
    assert said[4] == "4 of 8: batch 1, plain, kernels"
    assert said[-1] == "8 of 8: done"
    assert calls == ["wait", "start", "wait", "stop"] * 4
    found = results(bench, "foretoken bench")
    assert found is not None
    assert any("kind `other`: unheard_of." in note for note in found.notes)
    case = found.rows[0].case
    row = next(row for row in found.rows if row.case == f"{case}: qkv")
    assert row.labels == {**found.rows[0].labels, "kernels": "qkv"}
    assert row.values["calls"] == Spread.of([20], "per decode step")
    assert set(row.values) == set(figures_of({"qkv": Use(1, 1, 1), "all": Use(1, 1, 1)},
                                             {"qkv": 1}, 1)["qkv"])  # fmt: skip
    shown = tables(found.rows)
    lines = {line[0]: line[1:] for line in shown[f"Kernels of a step: {case}"].lines}
    assert lines["o"][:4] == ["20.0", "90.00", "1.800", "1.800"]
    assert len([title for title in shown if title.startswith("Kernels")]) == 4
    assert all(":" not in line[0] for line in shown["Speed"].lines)
    panels = ElementTree.fromstring(chart(found)).findall(f"{SVG}g/{SVG}svg")
    bars = [r for r in panels[-1].findall(f"{SVG}rect") if r.get("width") != "12"]
    assert len(bars) == 4 * 10  # qkv, attention, o, gate_up, down, head, draft, sampling, ...
    assert len(panels) == 4


def test_no_kernels_is_an_error(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "profile", lambda **named: SimpleNamespace())
    options = BenchOptions(batch_size="1", input_len=9, output_len=1, bandwidth=1.0, kernels=True)
    with pytest.raises(ConfigError, match="`kernels` is True: must be left out where PyTorch"):
        Bench(pair, options, SamplingParams()).run()
    with pytest.raises(ConfigError, match="`kernels` is True: must be left out on a CPU"):
        options.sized({"device": "cpu"})
    monkeypatch.setattr("foretoken.engine.devices.choose_device", lambda name: torch.device("cuda"))
    with pytest.raises(ConfigError, match="`output_len` is 1: must be at least 80"):
        options.sized({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}})
