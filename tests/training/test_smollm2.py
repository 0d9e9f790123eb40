"""The recipe of the head for SmolLM2 at a tiny size: its words, texts, rows, a run, its figures."""

import itertools
import json
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.outputs import RequestMetrics
from training.smollm2 import evaluate, generate, prompts, results, texts, train

VOCAB = 64
HELD = [row["messages"][-1]["content"] for row in texts.read_heldout()]


class Letters:
    """A tokenizer of characters, with the two special tokens of the chat."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        parts = re.findall(r"<\|im_start\|>|<\|im_end\|>|.", text, re.DOTALL)
        return [{generate.START: 1, generate.END: 2}.get(part) or ord(part) for part in parts]

    def decode(self, ids: list[int]) -> str:
        return "".join({1: generate.START, 2: generate.END}.get(i) or chr(i) for i in ids)


class Parrot:
    """An engine that says the same to everything."""

    tokenizer = Letters()

    def __init__(self, says: str) -> None:
        self._ids = [*self.tokenizer.encode(says), 2]

    def generate(self, given: list[list[int]], params: list[Any]) -> list[Any]:
        one = SimpleNamespace(token_ids=self._ids, finish_reason="stop")
        return [SimpleNamespace(outputs=[one]) for _ in given]


def test_templates_are_many_and_none_twice() -> None:
    asked = list(islice(prompts.template_prompts(0), 4_000))
    assert len(set(asked)) == 4_000
    assert not any("{" in prompt for prompt in asked if "`" not in prompt)
    assert asked == list(islice(prompts.template_prompts(0), 4_000))
    assert len(set(prompts.phrases())) == len(prompts.phrases()) > 300


def test_held_out_prompts_are_in_no_template() -> None:
    assert len(set(HELD)) == 48
    said = "\n".join(HELD).lower()
    assert not [phrase for phrase in prompts.phrases() if phrase.lower() in said]
    assert not set(HELD) & set(islice(prompts.template_prompts(1), 4_000))


def test_what_resembles_a_held_out_prompt() -> None:
    held = texts.Heldout(HELD)
    assert all(map(held.resembles, HELD))
    assert not held.resembles("Write a Python function that squares a number.")


def test_a_round_has_first_and_second_turns() -> None:
    llm: Any = Parrot("A long and kind answer.")
    found = generate.Writer(llm, 0).round(40, 0)
    chats = [text for text in found if text.is_chat]
    assert chats
    assert {len(text.asked) for text in chats} == {1, 2}
    for text in chats:
        shown = Letters().decode(text.ids)
        assert shown.startswith(f"{generate.START}system\n")
        assert shown.endswith(f"{generate.START}assistant\nA long and kind answer.{generate.END}")
        assert shown.count(generate.USER) == len(text.asked)


def test_duplicates_held_out_prompts_and_loops_are_left_out(tmp_path: Path) -> None:
    given = [
        generate.Text([5, 6, 7], 0.0, asked=["What is new?"]),
        generate.Text([5, 6, 8], 0.0, asked=["what  is new?"]),
        generate.Text([5, 6, 9], 0.8, asked=["What is new?"]),
        generate.Text([5, 6, 9], 0.8, asked=["What else?", HELD[0]]),
        generate.Text([3, 4] + [9] * 200, 0.0, is_chat=False),
    ]
    generate.store(tmp_path / "texts-0.safetensors", given)
    taken, counts = texts.select([tmp_path / "texts-0.safetensors"], 0)
    assert sorted(taken) == [[3, 4] + [9] * texts.LOOP_TOKENS, [5, 6, 7], [5, 6, 9]]
    assert counts == {
        "written": 5, "duplicates": 1, "like held-out prompts": 1, "cut loops": 1, "taken": 3,
        "tokens": 6 + 2 + texts.LOOP_TOKENS,
    }  # fmt: skip


def test_rows_begin_with_a_text_and_hold_whole_ones() -> None:
    rows = texts.pack([[1] * 5, [2] * 9, [3] * 2, [4] * 3], 8).tolist()
    assert rows == [[1] * 5 + [4] * 3, [2] * 8, [3] * 2 + [3] * 2 + [3] * 2 + [3] * 2]
    assert texts.frequent_ids(torch.tensor([[7, 7, 2, 3, 3]]), 2, 9).tolist() == [3, 7]


def test_a_run_drafts_the_frequent_ids(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ticks = itertools.count()
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, head_dim=16, attn_implementation="sdpa",
    )  # fmt: skip
    module = LlamaForCausalLM(shape).eval().requires_grad_(False)
    config = train.HeadConfig(
        rows=4, length=16, held_rows=4, unroll=2, device="cpu", intermediate=32, heads=2,
        kv_heads=1, aux_layers=(1, 2),
    )  # fmt: skip
    run = train.Run(config, module, tmp_path, 20.0, clock=lambda: next(ticks) / 5)
    run.take((torch.arange(40 * 16) % 8 + 3).int().view(40, 16), 8)
    run.train()
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert (stored["d2t"] + torch.arange(8)).tolist() == list(range(3, 11))
    assert stored["lm_head.weight"].shape == (8, 32)
    record = results.run_record(json.loads((tmp_path / "eagle3.json").read_text()))
    assert record["rows"]["share_of_tokens_drafted"] == 1.0
    assert record["drafts_accepted_of_5_on_held_rows"]


def test_counts_are_by_position() -> None:
    metrics = RequestMetrics()
    for accepted in (0, 1, 2, 2):
        metrics.observe(2, accepted)
    one = SimpleNamespace(token_ids=range(100))
    looped = SimpleNamespace(token_ids=[1] * 100)
    outputs: Any = [SimpleNamespace(metrics=metrics, outputs=[o]) for o in (one, looped)]
    found = evaluate.summary(outputs, ["chat", "code"])
    assert found["all"]["requests"] == 2
    assert found["without_loops"] == found["chat"]
    assert found["chat"] == {
        "requests": 1, "verifications": 4, "length": 2.25,
        "accepted_at": [0.75, 0.5], "chance_at": [0.75, 0.5 / 0.75],
    }  # fmt: skip
    assert found["code"]["requests"] == 0
