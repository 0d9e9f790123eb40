"""The recipe of the embedded head, end to end at a tiny size on the CPU."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.errors import ConfigError
from foretoken.models.eagle3_config import read_eagle3_config
from training.tiny_python import eagle3
from training.tiny_python.corpus import SourceFile, write_split

VOCAB = 64


def test_the_packed_stream_is_the_first_files_within_the_limit(tmp_path: Path) -> None:
    files = [
        SourceFile("p", f"p/{i}.py", "\n".join(f"x_{i}_{j} = {j}" for j in range(40)))
        for i in range(300)
    ]
    write_split(tmp_path / "train.jsonl.xz", files)
    whole, part = tmp_path / "whole.xz", tmp_path / "part.xz"
    count = eagle3.pack(tmp_path, whole, 10**9, num_files=100)
    stream_N = eagle3.unpack(whole)
    assert len(stream_N) == count
    assert int((stream_N == 0).sum()) == 300, "an end of text after each file"
    limit = whole.stat().st_size * 3 // 4
    fewer = eagle3.pack(tmp_path, part, limit, num_files=100)
    assert 0 < fewer < count
    assert part.stat().st_size <= limit
    assert torch.equal(eagle3.unpack(part), stream_N[:fewer])


def test_a_run_continues_a_narrower_head_with_the_best_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) / 50  # so many steps take a second

    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, head_dim=16, attn_implementation="sdpa",
    )  # fmt: skip
    module = LlamaForCausalLM(shape).eval().requires_grad_(False)
    stream_N = (torch.arange(4_000) % VOCAB).to(torch.int16)

    def run(name: str, start: Path | None, **others: Any) -> eagle3.Run:
        config = eagle3.HeadConfig(
            rows=4, length=32, prompt=8, rounds=1, sample_rows=24, held_rows=4, unroll=2,
            trial_steps=4, device="cpu", **others,
        )  # fmt: skip
        (tmp_path / name).mkdir()
        until = clock() + 3 + eagle3.RESERVE_S
        run = eagle3.Run(config, module, tmp_path / name, until, start, clock)
        run.texts(stream_N)
        return run

    narrow = run("narrow", None, intermediate=32, aux_layers=(2, 0, 1))
    narrow.train()
    record = json.loads((tmp_path / "narrow" / "eagle3.json").read_text())
    shares = {
        s: sum(record[f"trial: Muon {s}"][f"T{t}"] for t in (0.8, 0.3)) for s in eagle3.MUON_SHARES
    }
    assert shares[record["taken"]] == max(shares.values())
    head = tmp_path / "narrow" / "head"
    assert read_eagle3_config(head).aux_layers == (2, 0, 1)
    started = {}
    for name, start, others in (
        ("same", head, {"intermediate": 32, "aux_layers": (2, 0, 1)}),
        ("wide", head, {"intermediate": 48, "aux_layers": (0, 1, 2)}),
        ("more", head, {"intermediate": 32, "aux_layers": (2, 0, 1), "heads": 8, "kv_heads": 4}),
        ("fresh", None, {"intermediate": 32, "aux_layers": (2, 0, 1)}),
    ):
        started[name] = run(name, start, **others).trainer(10).evaluate(narrow.held_NL, 4, 0.8)
    assert started["wide"] == pytest.approx(started["same"], abs=1e-6), "what is new adds nothing"
    assert started["more"] == pytest.approx(started["same"], abs=1e-6), "nor more attention"
    assert started["fresh"] != pytest.approx(started["same"], abs=1e-4)
    for i, (heads, kv_heads) in enumerate(((8, 2), (4, 4), (2, 1))):
        bad = run(f"bad{i}", head, aux_layers=(2, 0, 1), heads=heads, kv_heads=kv_heads)
        with pytest.raises(ConfigError, match="heads, kv_heads"):
            bad.trainer(10)
