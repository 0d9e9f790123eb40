"""End to end at a tiny size on the CPU: pre-train, sample, distil, evaluate."""

import pytest
import torch

from foretoken.lab.train_eagle3.trainer import learning_rate
from training.tiny_python.data import Windows
from training.tiny_python.decode import StaticDecoder
from training.tiny_python.distill import DistillConfig, distill, kl_loss, tv_loss
from training.tiny_python.evaluate import evaluate
from training.tiny_python.generate import row_temperatures, sample_corpus
from training.tiny_python.models import build
from training.tiny_python.pretrain import PretrainConfig, pretrain

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
    config = PretrainConfig(
        shape="tiny",
        steps=20,
        rows=16,
        length=32,
        warmup=4,
        eval_every=10,
        eval_rows=32,
        device="cpu",
        compile=False,
    )
    target, history = pretrain(config, text_N, text_N[:4_000], VOCAB)
    assert history[-1]["heldout"] < history[0]["heldout"] < 4.2
    target.requires_grad_(False)
    own_NT, stats = sample_corpus(target, text_N, 2, 32, prompt=8, length=32, seed=0)
    assert own_NT.shape == (64, 32)
    assert stats["new_tokens"] == 2 * 32 * 24
    small = DistillConfig(
        shapes=("tiny-draft",),
        steps=20,
        rows=16,
        length=32,
        warmup=4,
        log_every=5,
        device="cpu",
        compile=False,
    )
    drafts, log = distill(small, target, own_NT, text_N)
    assert [row["loss"] for row in log] == ["kl", "tv", "tv", "tv"]
    table = evaluate(target, drafts, text_N[:8_000], rows=4)
    assert 1.0 <= table["tiny-draft"]["mean_length_with_cycles_T0.8"] <= 5.0
