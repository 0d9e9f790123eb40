"""What `foretoken bench` is asked: options, prompts, and the bytes that its floor counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.run import Bench
from foretoken.lab.bench.workload import Workload
from tests.project.source import ROOT

SMALL = {"batch_size": "1,3", "input_len": 24, "output_len": 12, "bandwidth": 40.0}
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": "1,x"}, "`batch_size` is '1,x': must be integers >= 1, separated"),
        ({"batch_size": ""}, "`batch_size` is ''"),
        ({"batch_size": "0"}, "`batch_size` is '0'"),
        ({"batch_size": "2,2"}, "`batch_size` is '2,2': must be sizes that all differ"),
        ({"input_len": 0}, "`input_len` is 0: must be an integer >= 1"),
        ({"output_len": -1}, "`output_len` is -1"),
        ({"repeats": 0}, "`repeats` is 0"),
        ({"warmup": -1}, "`warmup` is -1"),
        ({"seed": -1}, "`seed` is -1"),
        ({"prompts": "mine"}, "`prompts` is 'mine': must be one of random, heldout"),
        ({"bandwidth": 0.0}, "`bandwidth` is 0.0"),
        ({"bandwidth": float("nan")}, "`bandwidth` is nan"),
        ({"output": "x.txt"}, r"`output` is 'x.txt': must be a file that ends in .json"),
        ({"output": "no/such/x.json"}, "must be a file in a folder that exists"),
        ({"plot": "x.png"}, "`plot` is 'x.png': must be a file that ends in .svg"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        BenchOptions(**given)


def test_the_engine_gets_room_for_the_largest_batch() -> None:
    options = BenchOptions(batch_size="4,600", input_len=20, output_len=13)
    sized = options.sized(
        {"model": "m", "block_size": 8, "speculative_config": {"method": "ngram"}}
    )
    assert sized["max_num_seqs"] == 600
    assert sized["max_num_batched_tokens"] == 3000
    assert sized["num_blocks"] == 600 * (5 + 1)
    kept = options.sized({"model": "m", "kv_cache_gib": 1.0, "max_num_batched_tokens": 7})
    assert "num_blocks" not in kept
    assert (kept["max_num_batched_tokens"], kept["speculative_config"]) == (7, None)
    with pytest.raises(ConfigError, match="`max_num_seqs` is 8: must be at least 600"):
        options.sized({"model": "m", "max_num_seqs": 8})
    with pytest.raises(ConfigError, match="`compare` is True"):
        BenchOptions(compare=True).sized({"model": "m"})


def test_a_request_that_does_not_fit_is_refused(pair: LLM) -> None:
    said = r"`input_len \+ output_len` is 2049: must be at most 2048"
    with pytest.raises(ConfigError, match=said):
        Bench(pair, BenchOptions(input_len=2000, output_len=49, bandwidth=1.0), GREEDY)


def test_prompts_are_as_long_as_asked_and_differ(pair: LLM) -> None:
    def made(**options: Any) -> Workload:
        return Workload(BenchOptions(**SMALL | options), GREEDY, pair.engine)

    for source in ("random", "heldout"):
        workload = made(prompts=source)
        batches = [workload.prompts(5, repeat) for repeat in range(3)]
        ids = [tuple(prompt) for batch in batches for prompt in batch]
        assert {len(prompt) for prompt in ids} == {24}
        assert len(set(ids)) == 15
        assert made(prompts=source).prompts(5, 1) == batches[1]
        assert made(prompts=source, seed=1).prompts(5, 1) != batches[1]
    special = pair.engine.tokenizer.all_special_ids
    assert special
    assert not set(special) & {i for prompt in made().prompts(500, 0) for i in prompt}
    params = [p for repeat in range(3) for p in made(seed=7).params(4, repeat, None)]
    assert [p.seed for p in params] == list(range(7, 19))
    assert {(p.max_tokens, p.ignore_eos) for p in params} == {(12, True)}


def test_what_passes_read(pair: LLM) -> None:
    floor = Floor.of(pair.engine, None)
    target = floor.target
    hidden, inner, vocabulary = 256, 640, 4096
    layer = hidden * (4 + 2 + 2) * 64 + 4 * 64 * hidden + 3 * hidden * inner + 2 * hidden
    assert target.weights == 4 * (20 * layer + hidden + vocabulary * hidden)  # tied: read once
    assert target.per_pass(2, 10) == target.weights + 2 * 10 * 20480
    assert 0 < floor.drafter.weights < target.weights / 5
    assert Reads(1, ((10, 4), (10, None))).per_pass(3, 6) == 1 + 3 * (40 + 60)
    assert floor.bandwidth > 0.1


def model_of(module: Any, config: Any, shapes: Any, dtype: Any = torch.float32) -> Any:
    return SimpleNamespace(module=module, config=config, layer_shapes=shapes, dtype=dtype)


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ({}, [None, None]),
        ({"sliding_window": 8}, [8, 8]),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [8, None]),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, [None, None]),
    ],
)
def test_windows_bound_what_is_read(text: dict[str, Any], windows: list[int | None]) -> None:
    embedding, head = torch.nn.Embedding(3, 4), torch.nn.Linear(4, 3)
    module = torch.nn.Module()
    module.embedding, module.head = embedding, head
    module.get_input_embeddings = lambda: embedding  # type: ignore[assignment]
    module.get_output_embeddings = lambda: head  # type: ignore[assignment]
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text))
    reads = Reads.of(model_of(module, config, [(2, 8, 4), (1, 8, 8)]))
    assert reads == Reads(4 * 15, ((4 * 2 * 12, windows[0]), (4 * 16, windows[1])))


def test_the_shapes_that_come_along() -> None:
    """8.03e9 parameters, of which a pass leaves out all but a few rows of the embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes = ROOT / "benchmarks" / "shapes"
    config = AutoConfig.from_pretrained(shapes / "llama-3.1-8b")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) == 8_030_261_248
    reads = Reads.of(model_of(module, config, [(8, 128, 128)] * 32, torch.bfloat16))
    assert reads.weights == 2 * (8_030_261_248 - 128_256 * 4096)
    assert reads.per_pass(1, 1) - reads.weights == 131_072
    head = AutoConfig.from_pretrained(shapes / "llama-3.1-8b-eagle3")
    assert head.architectures == ["LlamaForCausalLMEagle3"]
    sizes = (head.hidden_size, head.intermediate_size, head.draft_vocab_size, head.vocab_size)
    assert sizes == (4096, 14336, 32000, config.vocab_size)
    assert (head.num_attention_heads, head.num_key_value_heads) == (32, 8)
