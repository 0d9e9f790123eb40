"""llama.cpp as an opponent: its client, its server's work, and the weights it gets.

The server here is a program of a few lines: llama-server's options, and answers in its format.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks import gguf_export, llama_cpp
from benchmarks.common import DRAFT, QuietTimer
from benchmarks.speed import check_weights, goal_notes, row
from benchmarks.speed_cases import Case
from benchmarks.tables.documents import TABLES
from foretoken.errors import ConfigError
from foretoken.lab.results import Row, collect, write
from foretoken.models import load_tokenizer, resolve_checkpoint

FAKE = """\
#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if sys.argv[1:] == ["--version"]:
    print("version: 7 (fake)\\nbuilt with care", file=sys.stderr)
    sys.exit()
options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
if options["--model"].endswith("broken.gguf"):
    sys.exit("no such model")
started = time.monotonic()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() > started + 0.2
        self.answer(200 if ready else 503, {{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == [0]:
            return self.answer(400, {{"error": "an empty prompt"}})
        end = time.process_time() + 0.02 * len(asked["prompt"])
        while time.process_time() < end:
            pass
        tokens = [len(asked["prompt"])] * min(asked["n_predict"], 8)
        timings = {{"prompt_ms": 1500.0, "predicted_ms": 250.0}}
        asked["options"] = options
        self.answer(200, {{"tokens": tokens, "timings": timings, "asked": asked}})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_completion_is_the_servers_tokens_and_seconds(binary: Path, tmp_path: Path) -> None:
    model = llama_cpp.Model(Path("t.gguf"), Path("d.gguf"), k=5)
    with llama_cpp.serve(binary, model, 3, tmp_path) as server:
        assert server.complete([5, 6], 4, 0.8, seed=9) == ([2, 2, 2, 2], 1.75)
        answer = server.ask("POST", "/completion", {"prompt": [1], "n_predict": 1})[1]
        with pytest.raises(RuntimeError, match=r"status 400.*empty prompt"):
            server.complete([0], 4, 0.0, seed=9)
        with pytest.raises(RuntimeError, match="gave 8 tokens in place of 9"):
            server.complete([5], 9, 0.0, seed=9)
    options = answer["asked"]["options"]
    assert options["--model-draft"] == "d.gguf"
    assert options["--spec-draft-n-max"] == "5"
    assert {options[name] for name in options if "threads" in name} == {"3"}
    assert not Path(f"/proc/{server.pid}").exists(), "the server outlived its block"
    plain = llama_cpp.arguments(binary, llama_cpp.Model(Path("t.gguf")), 1, 80)
    assert not [word for word in plain if "draft" in word]
    assert llama_cpp.version(binary) == "7 (fake)"


def test_a_server_that_does_not_start_says_why(binary: Path, tmp_path: Path) -> None:
    model = llama_cpp.Model(Path("broken.gguf"))
    with ExitStack() as opened, pytest.raises(RuntimeError, match="no such model"):
        opened.enter_context(llama_cpp.serve(binary, model, 1, tmp_path))


def test_a_servers_work_is_not_a_disturbance(
    binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One core, on which only this process and its server work."""
    with llama_cpp.serve(binary, llama_cpp.Model(Path("t.gguf")), 1, tmp_path) as server:
        ours, everyone = QuietTimer(limit=0.05, patience=0), QuietTimer()
        everyone.processes = [server.pid]
        ours.cores = ours.cores[:1]
        monkeypatch.setattr(ours, "_busy", everyone._own)

        def complete() -> None:
            server.complete([1] * 20, 8, 0.0, 0)

        ours.processes = [server.pid]
        ours(complete)
        assert ours.disturbed == 0
        ours.processes = []
        ours(complete)
        assert ours.disturbed == 1


def config(**changed: Any) -> dict[str, Any]:
    given = json.loads((resolve_checkpoint(DRAFT) / "config.json").read_text(encoding="utf-8"))
    return given | changed


def test_rotated_queries_and_keys_have_equal_products_in_both_orders() -> None:
    """RoPE of a checkpoint turns halves of a head together, that of llama.cpp neighbours."""
    heads, size, position = 3, 8, 5
    rng = np.random.default_rng(0)
    weight_q, weight_k = rng.normal(size=(2, heads * size, 16))
    x, y = rng.normal(size=(2, 16))
    angles = position * 10000.0 ** (-np.arange(size // 2) / (size // 2))

    def rotated(vector: np.ndarray, neighbours: bool) -> np.ndarray:
        pairs = vector.reshape(heads, -1, 2) if neighbours else vector.reshape(heads, 2, -1)
        a, b = (pairs[..., 0], pairs[..., 1]) if neighbours else (pairs[:, 0], pairs[:, 1])
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    expected = (rotated(weight_q @ x, False) * (weight_k @ y).reshape(heads, size)).sum(-1)
    q, k = (gguf_export.interleave(w, heads) for w in (weight_q, weight_k))
    key = (k @ y).reshape(heads, -1, 2)
    turned = rotated(q @ x, True).reshape(heads, 2, -1)
    found = (turned[:, 0] * key[..., 0] + turned[:, 1] * key[..., 1]).sum(-1)
    assert found == pytest.approx(expected)
    assert (rotated(weight_q @ x, True) - rotated(weight_q @ x, False)).any()


def test_every_tensor_has_its_name_and_numbers() -> None:
    path = resolve_checkpoint(DRAFT) / "model.safetensors"
    found = dict(gguf_export.tensors(path, config()))
    given = load_file(path)
    assert len(found) == len(given)
    assert {numbers.dtype for numbers in found.values()} == {np.dtype(np.float32)}
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.1.self_attn.o_proj", "blk.1.attn_output"),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
        ("model.layers.1.post_attention_layernorm", "blk.1.ffn_norm"),
    ):
        assert np.array_equal(found[f"{theirs}.weight"], given[f"{ours}.weight"].float().numpy())
    q, key = (found[f"blk.0.attn_{x}.weight"] for x in "qk")
    wq, wk = (given[f"model.layers.0.self_attn.{x}_proj.weight"].float().numpy() for x in "qk")
    half = config()["head_dim"] // 2
    for head in range(3):
        at = 2 * half * head
        assert np.array_equal(q[at + 1], wq[at + half])
        assert np.array_equal(q[at + 2], wq[at + 1])
    assert np.array_equal(key[:4], wk[[0, half, 1, half + 1]])


def test_a_file_reads_back_as_it_was_described(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package that writes GGUF files")
    reader = gguf.GGUFReader(gguf_export.export(DRAFT, tmp_path))
    given = config()

    def value(name: str) -> Any:
        return reader.get_field(name).contents()

    assert value("general.architecture") == "llama"
    assert value("llama.attention.head_count") == given["num_attention_heads"]
    assert value("llama.attention.head_count_kv") == given["num_key_value_heads"]
    assert value("llama.rope.freq_base") == given["rope_parameters"]["rope_theta"]
    tokens = value("tokenizer.ggml.tokens")
    ids = load_tokenizer(DRAFT).get_vocab()
    assert tokens == sorted(ids, key=ids.__getitem__)
    path = resolve_checkpoint(DRAFT) / "model.safetensors"
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, numbers in gguf_export.tensors(path, given):
        assert np.array_equal(written.pop(name), numbers)
    assert not written


def test_other_models_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scaled = config()["rope_parameters"] | {"rope_type": "yarn"}
    for changed in ({"model_type": "qwen3"}, {"rope_parameters": scaled}):
        (tmp_path / "config.json").write_text(json.dumps(config(**changed)), encoding="utf-8")
        monkeypatch.setattr(gguf_export, "resolve_checkpoint", lambda name: tmp_path)
        with pytest.raises(ConfigError, match="a llama with default RoPE"):
            gguf_export.export("any", tmp_path)
        monkeypatch.undo()


SPEEDS = {
    ("foretoken", "plain", 0): 100.0, ("foretoken", "draft_model", 3): 210.0,
    ("foretoken", "ngram", 3): 150.0, ("transformers", "generate", 0): 50.0,
    ("transformers", "assisted", 3): 60.0, ("llama.cpp", "plain", 0): 80.0,
    ("llama.cpp", "draft_model", 2): 100.0, ("llama.cpp", "draft_model", 5): 120.0,
}  # fmt: skip
NAMES = {
    "foretoken": {"plain": "plain"},
    "transformers": {"generate": "Transformers generate", "assisted": "Transformers assisted"},
    "llama.cpp": {"plain": "llama.cpp", "draft_model": "llama.cpp draft model"},
}


def speed_rows(threads: int, engines: set[str]) -> list[Row]:
    cases, speeds = [], {}
    for (engine, method, k), tokens_per_second in SPEEDS.items():
        if engine in engines:
            name = NAMES[engine].get(method, method) + (f", K={k}" if k else "")
            labels = {"engine": engine, "method": method, "k": k}
            cases.append(Case(name, labels, lambda ids, t, seed: ([], 0.0)))
            speeds[name] = [threads * tokens_per_second, 2.0 * threads * tokens_per_second]
    return [
        row(case, {"threads": threads, "temperature": t}, speeds, {})
        for t in (0.0, 0.8)
        for case in cases
    ]


def test_speed_is_compared_with_llama_cpp_where_it_ran(tmp_path: Path) -> None:
    rows = speed_rows(1, set(NAMES)) + speed_rows(2, set(NAMES))
    notes = goal_notes(
        [r for r in rows if (r.labels["threads"], r.labels["temperature"]) == (1, 0)]
    )
    assert notes[3:] == [
        "plain, 1 thread, T=0: to llama.cpp 1.25, goal >= 1.1: reached.",
        "draft_model, K=3, 1 thread, T=0: to best drafted llama.cpp 1.75, goal >= 1.5: reached.",
    ]
    write(collect("speed", "python", {"threads": [1, 2], "cores": 2}, rows), tmp_path)
    ours = next(x for x in TABLES["speed"](tmp_path).splitlines() if "| plain, 2 threads |" in x)
    ratios = "1.00x | 2.00x | 1.67x | 1.25x | 0.83x"
    assert ours == f"| plain, 2 threads | 300 (200–400) | {ratios} | 300 (200–400) | {ratios} |"
    summary = TABLES["summary"](tmp_path)
    assert "| llama.cpp, same draft model | 360, K=5 | 1.20x | 360, K=5 | 1.20x |" in summary
    assert "| speculative, draft model | 630, K=3 |" in summary


def test_speed_without_llama_cpp_does_not_mention_it(tmp_path: Path) -> None:
    rows = speed_rows(1, {"foretoken", "transformers"})
    assert len(goal_notes(rows[: len(rows) // 2])) == 3
    write(collect("speed", "python", {"threads": [1], "cores": 1}, rows), tmp_path)
    assert not any("llama" in TABLES[name](tmp_path) for name in ("speed", "summary"))


def test_an_opponent_with_other_weights_is_no_opponent() -> None:
    check_weights({"plain": {"differ": 0}}, prompts=8)
    check_weights({"llama.cpp": {"differ": 4}}, prompts=8)
    with pytest.raises(RuntimeError, match="differ on 5 of 8"):
        check_weights({"llama.cpp": {"differ": 5}}, prompts=8)
