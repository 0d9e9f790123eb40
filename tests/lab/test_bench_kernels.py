"""`foretoken bench --kernels`: kernels by name and place, times that add up, and what is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from foretoken.lab.bench.kernels import RECORDED, Kernel, kernel_figures, kind_of, kinds
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.report import results, tables
from foretoken.lab.bench.run import Bench
from tests.project.source import ROOT

SVG = "{http://www.w3.org/2000/svg}"
GEMM = "nvjet_sm90_tst_128x80_64x8_1x2_h_badd_TNT"
LAYER = ("qkv", "attention", "attention merge", "o", "gate_up", "down")


def layers(count: int, product: str) -> list[str]:
    behind = [product, "norm_kernel", product, "silu_kernel", product]
    return [product, "decode_kernel", "merge_kernel", *behind] * count


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
    found = kinds(undrafted_step(3) * steps, 3)  # no logits behind the head's pass
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


def test_what_one_call_reads(pair: LLM) -> None:
    floor = Floor.of(pair.engine, 40.0)
    target, rows = floor.per_call(2, 10), 4 * 256  # bytes of a row of weights
    sizes = {"qkv": 8 * 64, "o": 4 * 64, "gate_up": 2 * 640, "down": 640, "head": 4096}
    assert [target[name] / rows for name in sizes] == pytest.approx([*sizes.values()])
    assert target["attention"] == 2 * 10 * 1024
    in_layers = floor.target.weights - target["head"] - rows * (20 * 2 + 1)
    assert 20 * sum(target[name] for name in list(sizes)[:4]) == pytest.approx(in_layers)
    assert 0 < target["draft qkv"] < target["qkv"]
    weights = SimpleNamespace(_asdict=lambda: {"fc": torch.zeros(3), "o": torch.zeros(5)})
    window = SimpleNamespace(sliding_window=1)
    head: Any = SimpleNamespace(
        weights=weights, layer_shapes=[(2, 8, 8)], dtype=torch.float32, config=window
    )
    reads = Reads.of_head(head)
    assert reads == Reads(20, ((128, 1),))
    assert reads.per_call(3, 2) == {"o": 20, "features": 12, "attention": 3 * 1 * 128}


def record(pair: LLM, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], **given: Any) -> Bench:
    """A benchmark under a profiler that sees these kernels, 90 us in every 100."""
    seen = [SimpleNamespace(name="cudaGraphLaunch", device_type=SimpleNamespace(name="CPU"))]
    for i, name in enumerate(names):
        place = SimpleNamespace(start=100.0 * i, elapsed_us=lambda: 90.0)
        on = SimpleNamespace(name="CUDA")
        seen.append(SimpleNamespace(name=name, device_type=on, time_range=place))
    calls: list[str] = []
    start, stop = (lambda name=name: calls.append(name) for name in ("start", "stop"))
    fake = SimpleNamespace(start=start, stop=stop, events=lambda: seen)
    monkeypatch.setattr(kernels, "profile", lambda **named: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    options = BenchOptions(batch_size="2", bandwidth=40.0, kernels=True, **given)
    bench, said = Bench(pair, options, SamplingParams(temperature=0.0)), list[str]()
    bench.run(lambda done, what: said.append(f"{done} of {bench.num_runs}: {what}"))
    assert said[2] == "2 of 4: batch 2, plain, kernels"
    assert calls == ["wait", "start", "wait", "stop"] * 2
    return bench


def test_a_benchmark_records_behind_its_runs(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"input_len": 24, "output_len": 80, "repeats": 1, "warmup": 0, "compare": True}
    bench = record(pair, monkeypatch, eagle_step(20) * RECORDED, **given)
    found = results(bench, "foretoken bench")
    assert found is not None
    assert any("kind `other`: unheard_of." in note for note in found.notes)
    assert any("ms: 16.830 and 18.699 at batch 2, plain; " in note for note in found.notes)
    row = next(row for row in found.rows if row.case == "batch 2, plain: qkv")
    assert row.labels == {**found.rows[0].labels, "kernels": "qkv"}
    assert "share_of_floor" in row.values
    shown = tables(found.rows)
    lines = {line[0]: line[1:] for line in shown["Kernels of a step: batch 2, plain"].lines}
    assert lines["o"][:4] == ["20.0", "90.00", "1.800", "1.800"]
    assert len(shown["Speed"].lines) == 2
    panels = ElementTree.fromstring(chart(found)).findall(f"{SVG}g/{SVG}svg")
    assert len(panels) == 4
    assert len(panels[-1].findall(f"{SVG}rect")) == 11 * (1 + 2)  # with the legend
    with pytest.raises(ConfigError, match="`kernels` is True: must be left out where PyTorch"):
        record(pair, monkeypatch, [], **given)
    with pytest.raises(ConfigError, match="`kernels` is True: must be left out on a CPU"):
        bench.options.sized({"device": "cpu", "speculative_config": {"method": "ngram"}})
