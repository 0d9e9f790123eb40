"""Training EAGLE-3 heads: the mathematics of drafting, losses by hand, resuming, bad input."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.heads import save_head
from foretoken import LLM, SamplingParams
from foretoken.cache.kv_pool import KVPool
from foretoken.cli.app import app
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.lab.train_eagle3.command import Batches, Documents, Training, cut, pick_prompts
from foretoken.lab.train_eagle3.options import TrainOptions
from foretoken.lab.train_eagle3.trainer import Trainer
from foretoken.lab.train_eagle3.unroll import Unroll, agreement, loss_of
from foretoken.models.eagle3 import read_head
from foretoken.models.eagle3_config import read_eagle3_config
from foretoken.ops import LoadedStack, get_backend
from foretoken.ops.backends.torch.stack import output
from foretoken.ops.stack import Dense
from tests.models.batches import Span, build_batch
from tests.models.heads import SWITCHES
from tests.support.checkpoints import save_checkpoint

UNROLL, LENGTH, BLOCK = 4, 24, 4


# --- the same mathematics as drafting ---


def drafted(head: LoadedStack, aux: Tensor, tokens: list[int], last: int) -> list[Tensor]:
    """Logits of each draft step after position `last`, by packed rows and a paged cache."""
    stack, device = head.stack, head.stack.device
    kv = KVPool(stack.layer_shapes, 9, BLOCK, dtype=stack.dtype, device=device)
    blocks = [3, 1, 7, 5, 2, 8]
    states = aux[:, : last + 1].unbind()
    batch = build_batch([Span(blocks, 0, tokens[1 : last + 2], 1)], BLOCK, device)
    hidden_1C, found = head.run(batch, kv, features=states).hidden_NC, list[Tensor]()
    for j in range(UNROLL):
        if j:
            at = last + j
            batch = build_batch([Span(blocks, at, tokens[at + 1 : at + 2], 1)], BLOCK, device)
            hidden_1C = head.run(batch, kv, features=hidden_1C).hidden_NC
        assert hidden_1C is not None
        found.append(head.logits(hidden_1C)[0])
    return found


@pytest.mark.parametrize(
    "switches", ["none", "normed residual", "a norm of each state", "norms of queries and keys"]
)
def test_every_step_of_training_is_a_pass_of_drafting(tmp_path: Path, switches: str) -> None:
    folder = save_head(tmp_path, hidden=32, vocabulary=60, **SWITCHES[switches])
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(60, 32, generator=generator)
    head = read_head(folder, read_eagle3_config(folder), Dense(embedding))
    loaded = get_backend("torch").stock_stack(head)
    token_BT = torch.randint(60, (2, LENGTH), generator=generator)
    aux = torch.randn(3, 2, LENGTH, 32, generator=generator)
    steps = [output(head, h) for h in Unroll(head.device)(head, aux.unbind(), token_BT, UNROLL)]
    size = LENGTH - UNROLL
    for b, last in ((0, 0), (0, 7), (1, size - 1)):
        expected = drafted(loaded, aux[:, b], token_BT[b].tolist(), last)
        for found, want in zip(steps, expected, strict=True):
            torch.testing.assert_close(found[b * size + last], want, atol=1e-4, rtol=1e-4)


# --- losses ---


def test_an_overlap_is_the_rate_of_acceptance_and_its_slope_is_autograds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(agreement.__globals__["_PIECE"], "cpu", 40)  # a text at a time
    generator = torch.Generator().manual_seed(2)
    logits_BSV = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    p_BTV = torch.randn(3, 8, 9, generator=generator).softmax(-1)
    p_BSV = p_BTV[:, 2:7, :7]  # two ids it never drafts
    weight_BS = torch.rand(2, 3, 5, generator=generator)
    log_q_BSV = (logits_BSV / 0.7).log_softmax(-1)
    want = torch.minimum(log_q_BSV.exp(), p_BSV).sum(-1), -(p_BSV * log_q_BSV).sum(-1)
    found = agreement(logits_BSV, p_BSV, 0.7)
    slopes = []
    for numbers in (found, want):
        loss = sum((w * n).sum() for w, n in zip(weight_BS, numbers, strict=True))
        slopes.append(torch.autograd.grad(loss, logits_BSV)[0])
    for one, other in zip((*found, slopes[0]), (*want, slopes[1]), strict=True):
        torch.testing.assert_close(one, other)


def test_losses_by_hand() -> None:
    rates = [torch.tensor([1.0, 0.5]), torch.tensor([0.5, 1.0])]
    assert loss_of("tv", rates, ()).item() == pytest.approx(1 - 3 / 4)
    assert loss_of("length", rates, ()).item() == pytest.approx(1 - (1.5 + 1.0) / 4)
    assert loss_of("kl", (), [torch.tensor([2.0, 4.0])]).item() == pytest.approx(3.0)


# --- texts ---


def test_batches_take_every_row_of_each_part_once_an_epoch_whatever_came_before() -> None:
    own_NL, real_NL = torch.arange(7)[:, None].int(), 100 + torch.arange(3)[:, None].int()
    every = Batches(own_NL, real_NL, 4, 0.25, seed=5)
    rows = torch.cat([every.batch(i) for i in range(7)]).flatten().tolist()
    own, real = [i for i in rows if i < 100], [i for i in rows if i >= 100]
    assert [sorted(own[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert sorted(real[:3]) == sorted(real[3:6]) == [100, 101, 102]
    later = Batches(own_NL, real_NL, 4, 0.25, seed=5)
    assert torch.equal(later.batch(6), every.batch(6)), "resumed there"
    assert not torch.equal(Batches(own_NL, real_NL, 4, 0.25, seed=6).batch(6), every.batch(6))
    assert Batches(own_NL, real_NL[:0], 4, 0.25, seed=5).batch(0).max() < 100


def test_rows_and_prompts() -> None:
    assert cut(range(7), 3).tolist() == [[0, 1, 2], [3, 4, 5]]

    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    given = Documents(texts=[], prompts=["abcdef", ""])
    assert [*pick_prompts(Bytes(), given, [], 4, 2, 0)] == [list(b"cdef")] * 2
    stream = range(20)
    windows = [*pick_prompts(Bytes(), given, stream, 4, 6, 0)]
    assert windows[1::2] == [list(b"cdef")] * 3
    assert all(w == [*range(w[0], w[0] + 4)] for w in windows[::2])


# --- the command ---


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("train") / "target", layers=3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "%s"}\n{"prompt": "once upon a time"}\n' % ("a few words " * 40))
    return path


def options_of(target: Path, data: Path, output: Path, **others: Any) -> TrainOptions:
    given = {"steps": 150, "batch_size": 4, "length": 40, "unroll": 3, "num_texts": 33, "seed": 3}
    paths = {"model": str(target), "data": str(data), "output": str(output)}
    return TrainOptions(**{**paths, **given, "learning_rate": 1e-2, **others})


def train(options: TrainOptions, stop_after: int | None = None) -> list[str]:
    """Train and return the reported lines; Ctrl-C comes at the report of step `stop_after`."""
    lines = list[str]()

    def say(line: str) -> None:
        lines.append(line)
        if stop_after is not None and line.startswith(f"step {stop_after} "):
            signal.raise_signal(signal.SIGINT)

    Training(options, say, lambda text: None).run()
    return lines


def losses(lines: list[str]) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]


def accepted(target: Path, head: Path) -> float:
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0.8, max_tokens=60, seed=1)
    with LLM(str(target), speculation, max_num_seqs=8) as llm:
        llm.generate([f"a few {i}" for i in range(8)], params)
        return llm.metrics.num_accepted_tokens / llm.metrics.num_draft_tokens


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"tied_head": True, "fc_norm": True, "norm_output": True, "loss": "tv"},
        {"draft_vocab_size": 100, "intermediate_size": 16},
    ],
)
def test_a_trained_head_loads_and_drafts_better_than_before(
    target: Path, data: Path, tmp_path: Path, switches: dict[str, Any]
) -> None:
    trained, untrained = tmp_path / "trained", tmp_path / "untrained"
    found = losses(train(options_of(target, data, trained, **switches)))
    assert found[-1] < 0.95 * found[4], "both behind the steps with `kl`"
    train(options_of(target, data, untrained, **switches, steps=1, learning_rate=1e-8))
    config = read_eagle3_config(trained)
    assert (config.fc_norm, config.norm_output) == 2 * (switches.get("fc_norm", False),)
    assert config.draft_vocab_size == switches.get("draft_vocab_size", config.vocab_size)
    stored = load_file(trained / "model.safetensors")
    assert {w.dtype for n, w in stored.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert ("lm_head.weight" in stored) != switches.get("tied_head", False)
    assert "accepted at T=1" in (trained / "README.md").read_text()
    assert accepted(target, trained) > 1.3 * accepted(target, untrained)


def test_training_goes_on_bit_for_bit_after_ctrl_c(
    target: Path, data: Path, tmp_path: Path
) -> None:
    whole, parts = (options_of(target, data, tmp_path / n, steps=6) for n in ("whole", "parts"))
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(parts, stop_after=2)
    assert read_eagle3_config(tmp_path / "parts")
    first = load_file(tmp_path / "parts" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"`output` is .*: must be a folder without a checkpoint"):
        train(parts)
    with pytest.raises(ConfigError, match=r"`steps` is 7: must be 6, with which the training was"):
        train(options_of(target, data, tmp_path / "parts", steps=7, resume=True))
    lines = train(TrainOptions(output=str(tmp_path / "parts"), resume=True))
    assert lines[0].startswith("step 3 of 6")
    for name in ("model.safetensors", "training/state.safetensors"):
        one, other = (load_file(tmp_path / n / name) for n in ("whole", "parts"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(
        first["fc.weight"], load_file(tmp_path / "parts" / "model.safetensors")["fc.weight"]
    )


# --- bad input ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": ""}, "`data` is '': must be a path. Give `--data`."),
        ({"steps": 0}, "`steps` is 0: must be an integer >= 1"),
        ({"length": 7}, r"`length` is 7: must be an integer >= 8"),
        ({"loss": "mse"}, "`loss` is 'mse': must be one of length, tv, kl"),
        ({"tied_head": True, "draft_vocab_size": 9}, "`tied_head` is True: must be left out with"),
        ({"real_share": 1.5}, "`real_share` is 1.5"),
    ],
)
def test_options_out_of_bounds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**{"data": "x", "output": "y", "unroll": 3, **given})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"txt": "b"}', r"`data, line 2 of data.jsonl` is .* one of `text` and"),
        ('{"text": 3}', "line 1"),
        ("not json", "line 1"),
        ("\n", "a file with text in it"),
    ],
)
def test_data_without_texts_is_refused(
    target: Path, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        train(options_of(target, path, tmp_path / "out"))


def test_what_cannot_be_trained_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(options_of(target, tmp_path / "none.txt", out))
    with pytest.raises(ConfigError, match=r"`draft_vocab_size` is 999: must be at most 260"):
        train(options_of(target, data, out, draft_vocab_size=999))
    with pytest.raises(ConfigError, match="a folder with a checkpoint"):
        train(options_of(target, data, out, resume=True))
    shallow = save_checkpoint(tmp_path / "shallow", layers=2)
    with pytest.raises(UnsupportedModelError, match="3 layers or more"):
        train(options_of(shallow, data, out))

    class Diverging(Trainer):
        def train(self, token_BT: Tensor) -> Tensor:
            self.step += 1
            return torch.tensor(float("nan"))

    class DivergingTraining(Training):
        trainer = Diverging

    training = DivergingTraining(options_of(target, data, out, steps=1), str, str)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`learning_rate` is 0.01: must be lower: the loss is n"):
        training.run()


def test_the_command_line_reports_one_line_of_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train-eagle3", "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "`data` is ''" in done.output
