"""Options, sweeps and prompts of `foretoken bench`; the bytes that its floor counts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM
from foretoken.errors import ConfigError
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.options import (
    BenchOptions,
    Load,
    engine_cases,
    parse_sweep,
    speculation_of,
)
from foretoken.lab.bench.run import Item, PromptSource, Workload, read_dataset, read_text
from foretoken.lab.workloads import heldout
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.ops import get_backend
from tests.lab.runs import NGRAM
from tests.project.source import ROOT


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurrency": "1,x"}, "`concurrency` is '1,x': must be integers >= 1, separated"),
        ({"concurrency": ""}, "`concurrency` is ''"),
        ({"concurrency": "0"}, "`concurrency` is '0'"),
        ({"concurrency": "2,2"}, "concurrency 2, concurrency 2': must be values that all differ"),
        ({"request_rate": "2,-1"}, "`request_rate` is '2,-1': must be numbers > 0"),
        ({"request_rate": "inf"}, "`request_rate` is 'inf'"),
        ({"num_requests": "0"}, "`num_requests` is '0'"),
        (
            {"num_requests": "4,8"},
            "`num_requests` is '4,8': must be one number, or one for each of the 3 loads",
        ),
        ({"input_len": "0"}, "`input_len` is '0': must be an integer >= 1, or two such as"),
        ({"input_len": "9-3"}, "`input_len` is '9-3'"),
        ({"output_len": "-1"}, "`output_len` is '-1'"),
        ({"repeats": 0}, "`repeats` is 0"),
        ({"warmup": -1}, "`warmup` is -1"),
        ({"seed": -1}, "`seed` is -1"),
        ({"bandwidth": 0.0}, "`bandwidth` is 0.0"),
        ({"bandwidth": float("nan")}, "`bandwidth` is nan"),
        ({"bandwidth": 1.0, "url": "http://x"}, "`bandwidth` is 1.0: must be left out"),
        ({"api_key": "secret"}, "`api_key` is 'given': must be left out without --url"),
        ({"timeout": 0.0}, "`timeout` is 0.0"),
        ({"sweep": ("n=1",)}, "`sweep` is 'n=1': must be NAME=VALUE,VALUE with NAME one of k,"),
        ({"sweep": ("k=1", "k=2")}, "`sweep` is 'k=2'"),
        ({"sweep": ("k=1,x",)}, "`sweep` is 'k=1,x': must be int values of `k`"),
        ({"sweep": ("rule=block,block",)}, "must be values that all differ"),
        ({"slo": "ttft=0"}, "`slo` is 'ttft=0': must be bounds in ms > 0"),
        ({"slo": "tpot=5,tpot=6"}, "`slo` is"),
        ({"slo": "speed=5"}, "`slo` is"),
        ({"output": ("x.txt",)}, "`output` is 'x.txt': must be a file that ends in .json, .csv"),
        ({"output": ("no/such/x.json",)}, "must be a file in a folder that exists"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BenchOptions(**given)
    assert said in str(raised.value)


def test_loads_lengths_and_bounds() -> None:
    options = BenchOptions(
        concurrency="2,9", request_rate="0.5", input_len="7-11", slo="ttft=200, itl=9.5"
    )
    assert options.loads == [Load(2), Load(9), Load(0, 0.5)]
    assert [load.name for load in options.loads][1:] == ["concurrency 9", "0.5 requests/s"]
    assert [options.requests_of(load) for load in options.loads] == [8, 18, 32]
    assert options.lengths == ((7, 11), (64, 64))
    assert options.bounds == {"ttft_ms": 200.0, "itl_ms": 9.5}
    assert [load.concurrency for load in BenchOptions().loads] == [1, 4, 16]
    assert BenchOptions(request_rate="3").loads == [Load(0, 3.0)]


def test_the_engine_gets_room_for_the_largest_load() -> None:
    options = BenchOptions(concurrency="4,600", input_len="5-20", output_len="13")
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
    for open_ended in ({"request_rate": "2"}, {"prompts": "x.jsonl"}):
        assert "num_blocks" not in BenchOptions(**open_ended).sized({"model": "m"})


def names(*sweep: str, speculation: Any = NGRAM, compare: bool = True) -> list[list[str]]:
    groups = engine_cases(parse_sweep(sweep), 0.0, speculation, compare=compare)
    return [[case.name for case in group] for group in groups]


def test_sweeps_are_cases_of_one_engine_where_requests_can_choose() -> None:
    assert names() == [["plain", "ngram, K=4"]]
    assert names(compare=False) == [["ngram, K=4"]]
    assert names(speculation=None) == [["plain"]]
    assert names("k=2,6", "temperature=0,0.8") == [
        ["plain, T=0", "plain, T=0.8", "ngram, K=2, T=0", "ngram, K=2, T=0.8",
         "ngram, K=6, T=0", "ngram, K=6, T=0.8"]
    ]  # fmt: skip
    ((plain, *_, last),) = engine_cases(
        parse_sweep(["k=2,6", "rule=standard,block", "drafter=a"]), 0.3, NGRAM, compare=True
    )
    assert dict(plain.fields) == {"temperature": 0.3, "num_speculative_tokens": 0}
    assert dict(last.fields) == {
        "temperature": 0.3, "num_speculative_tokens": 6, "drafter": "a",
        "rejection_sample_method": "block",
    }  # fmt: skip
    assert dict(last.labels) == {"method": "a", "k": 6, "rule": "block", "temperature": 0.3}
    made = speculation_of(NGRAM, plain)
    assert made is not None
    assert (made.num_speculative_tokens, made.method) == (6, "ngram")
    with pytest.raises(ConfigError, match="must be left out without drafts"):
        names("k=2", speculation=None)


def test_synthetic_rates_take_an_engine_each() -> None:
    groups = engine_cases(parse_sweep(["k=2,3", "length=2,2.5"]), 0.0, NGRAM, compare=True)
    assert [group[1].name for group in groups][:2] == [
        "ngram, K=2, length 2", "ngram, K=2, length 2.5"
    ]  # fmt: skip
    assert groups[3][0].name == "plain (K=3, length 2.5)"  # each next to its own
    made = speculation_of(NGRAM, groups[3][0])
    assert made is not None
    assert (made.num_speculative_tokens, made.rejection_sample_method) == (3, "synthetic")
    assert made.synthetic_acceptance_length == 2.5
    assert groups[3][1].labels["length"] == 2.5
    with pytest.raises(ConfigError, match="must be one of the two"):
        names("length=2", "rate=0.5")


def test_prompts_are_as_long_as_asked_and_differ() -> None:
    def made(source: PromptSource, seed: int = 0, size: str = "24") -> Workload:
        options = BenchOptions(input_len=size, output_len="5-9", seed=seed)
        return Workload(source, options.lengths, seed)

    for source in (PromptSource(range(900)), PromptSource([3, 5, 9], shuffled=True)):
        workload = made(source)
        runs = [workload.requests(Load(5), 5 * turn, 5) for turn in range(3)]
        asked = [request for run in runs for _, request in run]
        assert {len(one.prompt) for one in asked} == {24}
        assert {one.num_output for one in asked} <= {*range(5, 10)}
        assert len({one.num_output for one in asked}) > 1
        assert len({tuple(one.prompt) for one in asked}) == 15  # type: ignore[arg-type]
        assert [one.seed for one in asked] == [*range(15)]
        assert made(source).requests(Load(5), 5, 5, 1) == runs[1]
        assert made(source, 1).requests(Load(5), 5, 5) != runs[1]
    gaps = [gap for gap, _ in made(source).requests(Load(0, 4.0), 0, 2000)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.1)
    text = made(PromptSource(text="abcd" * 30), size="10").requests(Load(1), 0, 3)
    assert {len(one.prompt) for _, one in text} == {40}
    with pytest.raises(ConfigError, match="`input_len` is 24: must be at most 3 for this text"):
        made(PromptSource(range(3)))


def test_where_prefixes_are_kept_no_case_has_the_prompts_of_another() -> None:
    """Pieces of a text begin a token later for each case, lines of a dataset differ."""
    for source in (PromptSource(range(900)), PromptSource([3, 5, 9] * 99, shuffled=True)):
        workload = Workload(source, ((24, 24), (5, 9)), 0, distinct_cases=3)
        cases = [[a for _, a in workload.requests(Load(2), 4, 9, case)] for case in range(3)]
        for one, next_ in itertools.pairwise(cases):
            assert [a.prompt[1:] for a in one] == [a.prompt[:-1] for a in next_]
            assert [a[1:] for a in one] == [a[1:] for a in next_]  # lengths and seeds
    lines = PromptSource(items=[Item(str(i)) for i in range(60)])
    workload, sent = Workload(lines, ((1, 1), (9, 9)), 0, distinct_cases=2), list[str]()
    for load, before, count in ((Load(1), 0, 5), (Load(1), 5, 5), (Load(4), 10, 20)):
        for case in (1, 0):
            sent += [str(a.prompt) for _, a in workload.requests(load, before, count, case)]
    assert len(sent) == len({*sent}) == 60


def test_held_out_prompts_are_enough_and_distinct() -> None:
    items = heldout()
    assert len(items) >= 50
    assert len({item.id for item in items}) == len({item.prompt for item in items}) == len(items)
    assert all(item.licence and item.prompt.strip() and item.reference for item in items)


def test_held_out_prompts_are_taken_in_order() -> None:
    assert heldout(3) == heldout()[:3]
    with pytest.raises(ConfigError, match="limit"):
        heldout(0)
    with pytest.raises(ConfigError, match="limit"):
        heldout(100_000)


LINES = [
    '{"prompt": "def f():", "max_tokens": 3}',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
    '{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}',
    '{"id": 1, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, '
    '{"from": "human", "value": "c"}]}',
]
WRONG = [
    "{broken", "3", "{}", '{"prompt": ""}', '{"prompt": "a", "max_tokens": 0}', '{"messages": []}',
    '{"messages": [{"role": "robot", "content": "a"}]}', '{"messages": [1]}',
    '{"conversations": [{"from": "gpt", "value": "b"}]}',
]  # fmt: skip


def test_datasets_in_common_shapes(tmp_path: Path) -> None:
    lines, array = tmp_path / "x.jsonl", tmp_path / "x.json"
    lines.write_text("\n".join([LINES[0], WRONG[0], "", *LINES[1:], *WRONG[1:]]))
    array.write_text(json.dumps([json.loads(line) for line in [*LINES, "3"]], indent=1))
    found = read_dataset(str(lines))
    assert [item.prompt for item in found.items] == [
        "def f():",
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
         {"role": "user", "content": "c"}],
        [{"role": "user", "content": "a"}],
    ]  # fmt: skip
    (note,) = found.notes
    assert note.startswith("x.jsonl: 9 of 12 entries were left out: line 2: ")
    assert "line 6: not an object" in note
    other = read_dataset(str(array))
    assert other.items == found.items
    assert other.notes == ["x.json: 1 of 4 entries were left out: entry 4: not an object."]
    workload = Workload(found, ((1, 1), (9, 9)), 0)
    asked = [request for _, request in workload.requests(Load(1), 0, 6)]
    assert sorted(one.num_output for one in asked) == [3, 3, 9, 9, 9, 9]
    lines.write_text("\n".join(WRONG))
    with pytest.raises(ConfigError, match=r"a dataset with a request in it\. The first error"):
        read_dataset(str(lines))
    with pytest.raises(ConfigError, match=r"`prompts` is .*: must be `heldout`"):
        read_text(str(tmp_path / "none"))
    (tmp_path / "own.py").write_text("import os\n")
    assert read_text(str(tmp_path / "own.py")) == "import os\n"
    assert len(read_text("heldout")) > 10_000


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
    kernels = get_backend("torch")
    return SimpleNamespace(
        module=module, network=ModuleNetwork(module, kernels), config=config,
        layer_shapes=shapes, dtype=dtype,
    )  # fmt: skip


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
