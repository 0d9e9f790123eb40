"""The EAGLE-3 drafter against the published equations: whole sequences in float64, no cache."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.heads import save_head
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.stacks import Eagle3
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models import TargetView
from foretoken.ops import (
    DRAFT,
    TARGET,
    AttentionBatch,
    DraftBlock,
    ForwardOutput,
    Noise,
    Rows,
    Rule,
    get_backend,
    unavailable,
)
from foretoken.ops.stack import Dense
from foretoken.ops.steps import ForwardBatch
from foretoken.slots.step import StepPlan
from tests.models.heads import NaiveHead, NaiveRows
from tests.support.cases import host_backends, make_params
from tests.support.checkpoints import save_checkpoint
from tests.support.slots import GivenSlots

CPU = torch.device("cpu")
HIDDEN, VOCABULARY, BLOCK, MOST, COLUMNS = 32, 60, 4, 4, 12
SLOTS = 3  # and the spare
PAD = 1  # requests of the spare slot, each with two more rows of padding; none on a host
PARAMS = make_params(
    SLOTS, temperature=[0.0, 0.8, 1.2], top_k=[0, 7, 0],
    rule=[Rule.STANDARD, Rule.BLOCK, Rule.COUPLED],
)  # fmt: skip
EMBEDDING = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))


def setup_of(folder: Path, backend: str = "torch", **speculation: Any) -> DrafterSetup:
    given = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": MOST}
    config = EngineConfig(
        model=str(folder), speculative_config={**given, **speculation}, block_size=BLOCK
    )  # type: ignore[arg-type]
    assert isinstance(config.speculative_config, SpeculativeConfig)
    return DrafterSetup(
        config, config.speculative_config, get_backend(backend), CPU, VOCABULARY, BLOCK * COLUMNS,
        embedding=Dense(EMBEDDING),
    )  # fmt: skip


def aux_of(tokens: list[int]) -> Tensor:
    """[3, T, hidden]: the target's hidden states for a text, a function of the tokens so far."""
    states = []
    for end in range(1, len(tokens) + 1):
        seed = hash(tuple(tokens[:end])) % 2**31
        states.append(torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(states, dim=1)


class Target:
    """Slots as a step leaves them, and batches as it packs them, padding included."""

    def __init__(self, folder: Path, backend: str, **speculation: Any) -> None:
        self.drafter = Eagle3(setup_of(folder, backend, **speculation))
        run = self.drafter.head.run

        def looking(batch: ForwardBatch, *args: Any, **named: Any) -> ForwardOutput:
            assert batch.token_T.min() >= 0, "no token"
            return run(batch, *args, **named)

        self.drafter.head.run = looking  # type: ignore[method-assign]
        trash, self.on_host = SLOTS * COLUMNS, backend == "native"
        sizes = {"max_tokens": BLOCK * COLUMNS - MOST, "max_drafts": MOST, "blocks": COLUMNS}
        self.slots = GivenSlots(
            PARAMS, **sizes, spare_block=trash, backend=self.drafter.backend, on_host=self.on_host
        )
        ids = random.Random(4).sample(range(trash), trash)
        blocks = [(s, 0, ids[s * COLUMNS : (s + 1) * COLUMNS]) for s in range(SLOTS)]
        self.slots.apply(StepPlan(new_blocks=blocks))
        self.drafter.allocate(self.slots, trash + 1)
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]
        self.computed = [0] * SLOTS

    def admit(self, slot: int, text: list[int]) -> None:
        self.texts[slot] = text
        self.computed[slot] = 0
        self.slots.put(slot, text)

    def step(self, passes: dict[int, list[int]], grown: dict[int, list[int]], pad: int) -> None:
        """The target computes tokens of slots, drafts included; then the slots get new tokens."""
        slots, tokens, positions, aux = [*passes], [], [], []
        starts, lengths = [0], []
        for slot, computed in passes.items():
            start, text = self.computed[slot], self.texts[slot]
            tokens += computed
            positions += range(start, start + len(computed))
            starts.append(len(tokens))
            lengths.append(start + len(computed))
            aux.append(aux_of(text[:start] + computed)[:, start:])
        for slot, computed in passes.items():
            new = grown.get(slot, [])
            self.texts[slot] += new
            # The last token is never computed, nor is a rejected draft.
            end = min(self.computed[slot] + len(computed), len(self.texts[slot]) - 1)
            self.computed[slot] = end
            self.slots.put(slot, self.texts[slot])
        pad = 0 if self.on_host else pad
        for _ in range(pad):  # requests of the spare slot, then rows of padding
            slots, starts = [*slots, SLOTS], [*starts, starts[-1] + 1]
            lengths, positions = [*lengths, 1], [*positions, 0]
        positions += [0] * pad
        aux.append(torch.full((3, 2 * pad, HIDDEN), 1e3))
        slot_B = torch.tensor(slots)
        blocks = self.slots.state.block_SL[slot_B]
        numbers = torch.tensor(starts), torch.tensor(lengths), blocks
        attention = AttentionBatch(*numbers, BLOCK, values_fit=True)  # values are not checked
        token_T = torch.tensor([*tokens, *[0] * (2 * pad)])
        batch = ForwardBatch(token_T, torch.tensor(positions), token_T[:0], attention)
        result: Any = SimpleNamespace(aux=torch.cat(aux, dim=1).unbind())
        rows: Any = SimpleNamespace(slot_B=slot_B, step=SimpleNamespace(slot_B=slots))
        self.drafter.observe(rows, batch, result)

    def propose(self, num_drafts: dict[int, int], pad: int) -> DraftBlock:
        pad = 0 if self.on_host else pad
        asked = self.slots.asking([*num_drafts, *[SLOTS] * pad], [*num_drafts.values(), *[0] * pad])
        return self.drafter.propose(asked._replace(most=MOST))

    def write_drafts(self, slot: int, drafts: list[int]) -> None:
        known = self.texts[slot]
        self.slots.put(slot, [*known, *drafts])
        self.slots.put(slot, known)


def expected_drafts(
    naive: NaiveHead, text: list[int], slot: int, count: int, greedy: bool
) -> tuple[list[int], list[Tensor]]:
    """Drafts after a text and the logits that they are drawn from."""
    rows, drafts, logits = NaiveRows(naive), list[int](), list[Tensor]()
    for state, token in zip(aux_of(text[:-1]).unbind(1), text[1:], strict=True):
        hidden_C = rows.append(naive.feature(state), token)
    for i in range(count):
        if i:
            hidden_C = rows.append(hidden_C, drafts[-1])
        logits.append(naive.logits(hidden_C).float())
        drafts.append(int(drawn(logits[-1], slot, len(text) + i, i, greedy)))
    return drafts, logits


def drawn(logits_V: Tensor, slot: int, position: int, i: int, greedy: bool) -> Tensor:
    """A token drawn with the noise of draft i at a position; under COUPLED with the target's."""
    if greedy:
        return logits_V.argmax()
    coupled = PARAMS.rule_S[slot] == Rule.COUPLED
    streams, index = (TARGET, 0) if coupled else (DRAFT, i)
    noise = Noise(torch.tensor([position]), torch.tensor([index]), streams)
    rows = Rows(logits_V[None], PARAMS, torch.tensor([slot]))
    return get_backend("reference").sample(rows, noise)[0]


HEADS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "some of it": {"drafted": 23, "norm_before_residual": True},
}


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backend", host_backends())
def test_drafts_are_those_of_the_equations(
    tmp_path: Path, backend: str, head: str, method: str
) -> None:
    """Prompts in chunks, then rounds with some accepted drafts; a slot gets a new request."""
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, **HEADS[head])
    target = Target(folder, backend, draft_sample_method=method)
    naive, rng = NaiveHead(folder, EMBEDDING), random.Random(7)

    def text(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    for slot, length in enumerate((9, 1, 5)):
        target.admit(slot, text(length))
    target.step({2: target.texts[2][:3], 0: target.texts[0][:6]}, {}, pad=PAD)
    last = {0: target.texts[0][6:], 1: target.texts[1][:], 2: target.texts[2][3:]}
    target.step(last, {slot: text(1) for slot in last}, pad=PAD)
    num_checked = 0
    for round_ in range(7):
        if round_ == 4:  # prefilled while the others decode
            target.admit(1, text(7))
        asked = {slot: rng.choice([0, 1, 2, MOST, MOST]) for slot in rng.sample(range(SLOTS), 3)}
        if round_ == 4:
            del asked[1]
        block = target.propose(asked, pad=PAD)
        passes, grown = {}, {}
        for b, (slot, count) in enumerate(asked.items()):
            known = target.texts[slot]
            expected, logits = expected_drafts(naive, known, slot, count, method == "greedy")
            drafts = block.token_BK[b].tolist()
            assert drafts == [*expected, *[-1] * (len(drafts) - count)]
            assert bool(block.real_q_B[b]) == (method == "probabilistic" and count > 0)
            if block.cache is not None and count:
                q_KV = block.cache.logits_SKV[slot, :count]
                torch.testing.assert_close(q_KV, torch.stack(logits), atol=2e-5, rtol=1e-5)
            num_checked += count
            target.write_drafts(slot, expected)
            accepted = rng.randint(0, count)
            passes[slot] = [known[-1], *expected]
            grown[slot] = [*expected[:accepted], *text(1)]
        if round_ == 4:
            passes[1], grown[1] = target.texts[1][:], text(1)
        target.step(passes, grown, pad=PAD)
    assert num_checked > 20
    assert (block.cache is None) == (method == "greedy")


@pytest.mark.skipif(unavailable("native") is not None, reason="needs native kernels")
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("head", HEADS)
def test_a_round_in_one_call_is_its_passes_to_the_bit(
    tmp_path: Path, head: str, method: str
) -> None:
    """Drafts and their q: at T=0, under `block` and `coupled`, some requests without drafts."""
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, **HEADS[head])
    target = Target(folder, "native", draft_sample_method=method)
    drafter, rng = target.drafter, random.Random(3)
    assert drafter._round_stack is not None
    for slot, length in enumerate((9, 2, 21)):
        target.admit(slot, [rng.randrange(VOCABULARY) for _ in range(length)])
    texts = {slot: text[:] for slot, text in enumerate(target.texts)}
    target.step(texts, {slot: [rng.randrange(VOCABULARY)] for slot in texts}, pad=0)
    for counts in ((4, 4, 4), (0, 3, 1), (2, 0, 4), (0, 0, 0), (1, 4, 0)):
        outcomes = []
        for rounds in (drafter._round_stack, None):
            with mock.patch.object(drafter, "_round_stack", rounds):
                block = target.propose(dict(enumerate(counts)), pad=0)
            assert (block.token_BK >= 0).sum(dim=1).tolist() == [*counts]
            outcomes.append([block.token_BK[:, : max(counts)].clone()])
            q = block.cache
            for column in (q.logits_SKV, q.threshold_SK, q.lse_SK) if q is not None else ():
                outcomes[-1] += [column[slot, :count].clone() for slot, count in enumerate(counts)]
        assert all(map(torch.equal, *outcomes))


def test_the_memory_plan_is_what_is_allocated(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, drafted=23)
    for method in ("probabilistic", "greedy"):
        drafter = Target(folder, "torch", draft_sample_method=method).drafter
        held = [drafter._hidden_SC]
        if drafter.cache is not None:
            cache = drafter.cache
            held += [cache.logits_SKV, cache.threshold_SK, cache.lse_SK]
            assert cache.logits_SKV.shape == (SLOTS + 1, MOST, VOCABULARY)
        assert sum(tensor.nbytes for tensor in held) == (SLOTS + 1) * drafter.bytes_per_slot
        held = [*drafter.kv.keys, *drafter.kv.values]
        num_blocks = len(drafter.kv.keys[0])
        assert sum(tensor.nbytes for tensor in held) == num_blocks * drafter.kv_bytes_per_block


def test_what_it_reads_of_the_target_is_known_before_the_target_is_loaded(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", layers=5, tokenizer=False)
    (target / "model.safetensors").unlink()
    sizes = {"hidden": HIDDEN, "vocabulary": 260}
    for layers, expected in ((None, (2, 2, 2)), ((0, 3, 4), (0, 3, 4))):
        head = save_head(tmp_path / "head", aux_layers=layers, **sizes)
        speculation: Any = {"method": "eagle3", "model": str(head)}
        config = EngineConfig(model=str(target), speculative_config=speculation)
        assert Eagle3.target_view(config) == TargetView(expected, head=False)
    tensors = load_file(head / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    assert Eagle3.target_view(config) == TargetView(expected, head=True)


def test_a_head_must_be_named(tmp_path: Path) -> None:
    speculation: Any = {"method": "eagle3"}
    config = EngineConfig(model=str(tmp_path), speculative_config=speculation)
    with pytest.raises(
        ConfigError,
        match=r"`speculative_config\.model` is None: .* EAGLE-3 head.* `smollm2-135m-eagle3` for",
    ):
        Eagle3.target_view(config)
    speculation = {"method": "eagle3", "model": str(tmp_path / "nowhere")}
    with pytest.raises(CheckpointError, match="nowhere"):
        Eagle3.target_view(EngineConfig(model=str(tmp_path), speculative_config=speculation))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocabulary": 61}, "It was trained for 61 logits; the target has 60"),
        ({"hidden": 48}, "for 48 numbers in a hidden state of its target; the target has 32"),
        ({"target_hidden_size": 16}, "16 numbers in a hidden state of its target"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    folder = save_head(tmp_path, **{"hidden": HIDDEN, "vocabulary": VOCABULARY, **given})
    with pytest.raises(ConfigError, match=message):
        Eagle3(setup_of(folder))


def test_a_head_of_another_size_has_vectors_of_its_own(tmp_path: Path) -> None:
    sizes = {"hidden": 48, "vocabulary": VOCABULARY, "target_hidden_size": HIDDEN}
    folder = save_head(tmp_path, **sizes)
    assert Eagle3(setup_of(folder)).head.stack.embedding.shape == (VOCABULARY, 48)
    tensors = load_file(folder / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    message = "lack `embed_tokens.weight`: .* vectors of 48 numbers, the target's have 32"
    with pytest.raises(CheckpointError, match=message):
        Eagle3(setup_of(folder))
