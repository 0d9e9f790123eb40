"""The embedded pair: its corpus and tokenizer, training at a tiny size, and the shipped folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from foretoken.lab.train_eagle3.trainer import learning_rate
from training.tiny_python.corpus import HELDOUT_SHARE, SourceFile, looks_like_code, split, unit_hash
from training.tiny_python.data import Windows
from training.tiny_python.decode import StaticDecoder
from training.tiny_python.distill import DistillConfig, distill, kl_loss, tv_loss
from training.tiny_python.evaluate import evaluate
from training.tiny_python.freerun import Cached, distribution, run, verify
from training.tiny_python.generate import row_temperatures, sample_corpus
from training.tiny_python.models import build
from training.tiny_python.neardup import SeenShingles, drop_near_duplicates, overlap, shingles
from training.tiny_python.pretrain import PretrainConfig, pretrain
from training.tiny_python.train_tokenizer import END_OF_TEXT, train_tokenizer
from training.tiny_python.windows import cycle_start, ends_in_cycle, window_lengths

VOCAB = 64


def stream(tokens: int) -> torch.Tensor:
    """A noisy walk over the vocabulary, easy to learn. Shape: [tokens]."""
    torch.manual_seed(0)
    steps = torch.where(torch.rand(tokens) < 0.9, 1, 5)
    return (steps.cumsum(0) % VOCAB).to(torch.int16)


def test_windows_cover_an_epoch_without_replacement() -> None:
    windows = Windows(torch.arange(1_001, dtype=torch.int16), 10, seed=0, device="cpu")
    ids_BT = windows.batch(99)
    assert ids_BT.shape == (99, 11)
    assert len(set(ids_BT[:, 0].tolist())) == 99
    assert (ids_BT.diff(dim=1) == 1).all()


def test_decoder_matches_the_library() -> None:
    model = build("tiny", VOCAB, seed=1)
    prompt_BP = torch.randint(VOCAB, (3, 7))
    ours_BT = StaticDecoder(model, 3, 40).generate(prompt_BP, torch.zeros(3))
    ids_BT = prompt_BP
    with torch.no_grad():
        for _ in range(33):
            next_B = model(ids_BT, use_cache=False).logits[:, -1].argmax(-1)
            ids_BT = torch.cat([ids_BT, next_B[:, None]], 1)
    assert torch.equal(ours_BT, ids_BT)


def test_losses_are_zero_for_equal_logits_and_tv_is_the_rejection_rate() -> None:
    p_1TV = torch.tensor([[[2.0, 0.0, -1.0]]])
    q_1TV = torch.tensor([[[0.0, 1.0, 0.5]]])
    one = torch.tensor(1.0)
    assert kl_loss(p_1TV, p_1TV).abs() < 1e-6
    assert tv_loss(p_1TV, p_1TV, one).abs() < 1e-6
    expected = 0.5 * (p_1TV.softmax(-1) - q_1TV.softmax(-1)).abs().sum()
    assert tv_loss(p_1TV, q_1TV, one).item() == pytest.approx(expected.item(), abs=1e-6)


def test_learning_rate_warms_up_and_decays() -> None:
    assert learning_rate(0, 100, 1.0, 10) == pytest.approx(0.1)
    assert learning_rate(10, 100, 1.0, 10) == pytest.approx(1.0)
    assert learning_rate(100, 100, 1.0, 10) == pytest.approx(0.02)


def test_row_temperatures_fill_every_row() -> None:
    assert len(row_temperatures(7)) == 7
    assert row_temperatures(100).tolist().count(0.0) == 25


def test_twenty_steps_end_to_end() -> None:
    text_N = stream(20_000)
    sizes: Any = {"steps": 20, "rows": 16, "length": 32, "warmup": 4}
    sizes |= {"device": "cpu", "compile": False}
    config = PretrainConfig(shape="tiny", eval_every=10, eval_rows=32, **sizes)
    target, history = pretrain(config, text_N, text_N[:4_000], VOCAB)
    assert history[-1]["heldout"] < history[0]["heldout"] < 4.2
    target.requires_grad_(False)
    own_NT, stats = sample_corpus(target, text_N, 2, 32, prompt=8, length=32, seed=0)
    assert own_NT.shape == (64, 32)
    assert stats["new_tokens"] == 2 * 32 * 24
    small = DistillConfig(shapes=("tiny-draft",), log_every=5, **sizes)
    drafts, log = distill(small, target, own_NT, text_N)
    assert [row["loss"] for row in log] == ["kl", "tv", "tv", "tv"]
    table = evaluate(target, drafts, text_N[:8_000], rows=4)
    assert 1.0 <= table["tiny-draft"]["mean_length_with_cycles_T0.8"] <= 5.0


# Figures of merit, against hand-worked examples
def test_windows_hand_worked() -> None:
    # K = 2. Token 0 passes, token 1 does not: 1 accepted + 1 emitted = 2, next start 2.
    # Tokens 2, 3 pass: 2 + 1 = 3, next start 5. From 5 a window of 3 tokens does not fit.
    assert window_lengths([True, False, True, True, True, True, True], 2) == [2, 3]


@pytest.mark.parametrize(("flag", "expected"), [(True, [5, 5]), (False, [1] * 6)])
def test_windows_extremes(flag: bool, expected: list[int]) -> None:
    assert window_lengths([flag] * 10, 4) == expected


def test_windows_shorter_than_one_window() -> None:
    assert window_lengths([True] * 4, 4) == []


@pytest.mark.parametrize("period", [1, 3, 17, 64])
def test_cycle_is_found_at_every_period(period: int) -> None:
    assert ends_in_cycle([1_000 + i for i in range(50)] + list(range(period)) * max(3, 24))


def test_cycle_needs_three_repeats_over_the_minimum_span() -> None:
    assert not ends_in_cycle([*range(100), *range(20), *range(20)])
    assert not ends_in_cycle([*range(100), *([7] * 23)])
    assert ends_in_cycle([*range(100), *([7] * 24)])
    assert not ends_in_cycle([])


def test_cycle_start_hand_worked() -> None:
    assert cycle_start([1, 2, 3, *([9] * 24)]) == 3
    assert cycle_start([5, 6, 7, *([8, 9] * 12)]) == 3
    assert cycle_start([1, 2, 3]) is None


def test_cycle_must_reach_the_end() -> None:
    assert not ends_in_cycle([7] * 100 + list(range(100)))


# The corpus: near-duplicates, filters, the split
def program(name: str, lines: int = 60) -> str:
    return "\n".join(f"    value_{name}_{i} = compute_{name}({i}, other)" for i in range(lines))


def test_shingles_count_runs() -> None:
    assert len(shingles(["a", "b", "c"], 2)) == 2
    assert len(shingles(["a"], 2)) == 1
    assert shingles([], 2) == set()


def test_overlap_of_nothing_is_zero() -> None:
    assert overlap(set(), {1}) == 0.0


def test_reindented_copy_is_a_near_duplicate() -> None:
    seen = SeenShingles()
    seen.add(program("x"))
    copy = "\n".join("    " + line for line in program("x").splitlines())
    assert seen.overlap(copy) == 1.0
    assert seen.overlap(program("y")) < 0.1


def test_growing_filter_keeps_the_first_copy() -> None:
    texts = [("a", program("x")), ("b", program("x")), ("c", program("z"))]
    assert drop_near_duplicates(texts, SeenShingles(), 0.5, grow=True) == ["a", "c"]


def test_split_is_by_file_and_drops_copies_of_training_text() -> None:
    files = [SourceFile("p", f"p/{i}.py", program(f"n{i}")) for i in range(300)]
    held = next(f for f in files if unit_hash(f.key) < HELDOUT_SHARE)
    kept = next(f for f in files if unit_hash(f.key) >= HELDOUT_SHARE)
    files[files.index(held)] = SourceFile("p", held.key, kept.text + "\n# tail")
    train, heldout = split(files)
    assert not {f.key for f in train} & {f.key for f in heldout}
    assert held.key not in {f.key for f in heldout}
    assert all(unit_hash(f.key) < HELDOUT_SHARE for f in heldout)


def test_tables_are_not_code() -> None:
    assert looks_like_code(program("x"))
    assert not looks_like_code("\n".join("0x1f, 0x2e, 123, 456, 789," for _ in range(100)))
    assert not looks_like_code("x = 1\n")


# The reference loop, against the target alone and its distribution
FEW = 16


def test_greedy_output_is_the_targets_own() -> None:
    target = build("tiny", FEW, seed=1).eval()
    draft = build("tiny-draft", FEW, seed=2).eval()
    prompt = [3, 1, 4, 1, 5]
    tokens, lengths = run(target, draft, prompt, 0.0, seed=0, new_tokens=40)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokens[:40] == ids[len(prompt) :]
    assert sum(lengths) == len(tokens)
    assert all(1 <= n <= 5 for n in lengths)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    target = build("tiny", FEW, seed=1).eval()
    _, lengths = run(target, target, [3, 1, 4], 0.8, seed=0, new_tokens=40)
    assert set(lengths) == {5}


@torch.no_grad()
def test_first_emitted_token_follows_the_target() -> None:
    model = build("tiny", FEW, seed=1).eval()
    model.model.embed_tokens.weight.mul_(8)  # far from uniform
    prompt, t, draws = [3, 1, 4], 0.8, 1_000
    p_V = distribution(model(torch.tensor([prompt])).logits[0, -1], t)
    q_V = torch.arange(1.0, FEW + 1).softmax(-1).flip(0) * 0.5 + 0.5 / FEW
    noise = torch.Generator().manual_seed(0)
    counts_V = torch.zeros(FEW)
    side = Cached(model)
    for _ in range(draws):
        side.rewind(len(prompt) - 1)
        token = int(torch.multinomial(q_V, 1, generator=noise))
        counts_V[verify(side, prompt, [(token, q_V)], t, noise)[0]] += 1
    chi2 = ((counts_V - draws * p_V) ** 2 / (draws * p_V)).sum().item()
    assert chi2 < 44.3  # 99.99% point at 15 degrees of freedom


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_distribution_sums_to_one(t: float) -> None:
    assert distribution(torch.tensor([0.1, 2.0, -1.0]), t).sum().item() == pytest.approx(1.0)


# The shipped folders load with nothing but Transformers
ASSETS = Path(__file__).parents[2] / "src" / "foretoken" / "assets"
FOLDERS = ["tiny-python", "tiny-python-draft"]


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_loads_and_models_python(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(ASSETS / name)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / name)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 4096
    ids_1T = tokenizer("import os\nimport sys\n\n\ndef main(", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model.float()(ids_1T, labels=ids_1T).loss
    assert loss < 6.0  # ln 4096 is 8.3


@pytest.mark.parametrize("name", FOLDERS)
def test_generation_config_carries_no_sampling_flags(name: str) -> None:
    config = GenerationConfig.from_pretrained(ASSETS / name)
    assert config.eos_token_id == 0
    stored = json.loads((ASSETS / name / "generation_config.json").read_text())
    assert not {"do_sample", "temperature", "top_k", "top_p"} & set(stored)


def test_pair_shares_its_tokenizer_and_stays_small() -> None:
    target, draft = ((ASSETS / name / "tokenizer.json").read_bytes() for name in FOLDERS)
    assert target == draft
    files = [f for name in FOLDERS for f in (ASSETS / name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 36_000_000


def test_heldout_prompts_are_complete() -> None:
    lines = (ASSETS / "tiny-python" / "heldout.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({r["id"] for r in rows}) == len({(r["package"], r["file"]) for r in rows}) == 192
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-python")
    for r in rows:
        assert {"licence", "prompt", "reference"} <= r.keys()
        assert 150 <= len(tokenizer(r["prompt"])["input_ids"]) <= 250
        assert len(tokenizer(r["reference"])["input_ids"]) >= 90


# The tokenizer
SOURCE = Path(__file__).read_text()
SHIPPED = ASSETS / "tiny-python"


@pytest.fixture(scope="module", params=["small", "shipped"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    if request.param == "shipped":
        return AutoTokenizer.from_pretrained(SHIPPED)
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([SOURCE] * 3, vocab_size=400).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t.'!,"))))
def test_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("text", ["  a  .  b ,\n\n\t\tx = 'n''t' ?\r\n", " ", "\n", "", "é \u4e2d"])
def test_whitespace_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_no_token_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("")["input_ids"] == []
    assert tokenizer.eos_token_id not in tokenizer(SOURCE)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == END_OF_TEXT


def test_shipped_vocabulary_and_indentation() -> None:
    shipped = AutoTokenizer.from_pretrained(SHIPPED)
    assert len(shipped) == 4096
    assert len(shipped("\n" + " " * 8 + "return")["input_ids"]) <= 3
