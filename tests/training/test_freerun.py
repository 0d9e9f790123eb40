"""The reference loop against the target alone, and its rejection rule against the target's law."""

import pytest
import torch

from training.tiny_python.freerun import Cached, distribution, run, verify
from training.tiny_python.models import build

VOCAB = 16


def test_greedy_output_is_the_targets_own() -> None:
    target = build("tiny", VOCAB, seed=1).eval()
    draft = build("tiny-draft", VOCAB, seed=2).eval()
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
    target = build("tiny", VOCAB, seed=1).eval()
    _, lengths = run(target, target, [3, 1, 4], 0.8, seed=0, new_tokens=40)
    assert set(lengths) == {5}


@torch.no_grad()
def test_first_emitted_token_follows_the_target() -> None:
    model = build("tiny", VOCAB, seed=1).eval()
    model.model.embed_tokens.weight.mul_(8)  # far from uniform
    prompt, t, draws = [3, 1, 4], 0.8, 1_000
    p_V = distribution(model(torch.tensor([prompt])).logits[0, -1], t)
    q_V = torch.arange(1.0, VOCAB + 1).softmax(-1).flip(0) * 0.5 + 0.5 / VOCAB
    noise = torch.Generator().manual_seed(0)
    counts_V = torch.zeros(VOCAB)
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
