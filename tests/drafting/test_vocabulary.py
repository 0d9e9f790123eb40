"""Draft models with another vocabulary: shared tokens, and drafts by the target's ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.drafting import vocabulary
from foretoken.drafting.vocabulary import Match, match_tokenizers
from foretoken.errors import ConfigError
from foretoken.outputs import RequestOutput
from tests.engine.doubles import ON_DEVICE, ON_HOST, llm_of

CPU = torch.device("cpu")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
REPLACED = [c for c in ALPHABET if c in "etaoin.;ABCDEFXYZ" or not c.isascii()]
PROMPTS = ["def add(a, b):", "x", "import os\nimport sys\n" * 4, "zz"]


def byte_level(pieces: Sequence[str], end: str = "<|end|>") -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end)


def sentence_piece(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokens.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>", unk_token="<unk>")


def save_other(source: Path, folder: Path, rows: Sequence[int], tokenizer: Any) -> Path:
    """A model in which token i is token `rows[i]` of the model in `source`, with a tokenizer."""
    model = LlamaForCausalLM.from_pretrained(source)
    embeddings = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    inner, head = (weight.detach()[torch.tensor(rows)].clone() for weight in embeddings)
    model.resize_token_embeddings(len(rows))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(inner)
        model.get_output_embeddings().weight.copy_(head)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def shuffled(draft: Path, folder: Path) -> Path:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).tolist()
    tokenizer = byte_level([ALPHABET[i] for i in order])
    return save_other(draft, folder, [*order, 256, *[0] * 43], tokenizer)


def reduced(draft: Path, folder: Path) -> Path:
    """A model with other tokens in place of some of the target's."""
    pieces = [f"{c}{c}" if c in REPLACED else c for c in reversed(ALPHABET)]
    return save_other(draft, folder, [*range(255, -1, -1), 256], byte_level(pieces, "</s>"))


def padded(draft: Path, folder: Path) -> Path:
    """The same tokenizer, with fewer columns of padding."""
    return save_other(draft, folder, range(257), byte_level(ALPHABET))


KINDS = {"shuffled": shuffled, "reduced": reduced, "padded": padded}


def serve(
    target: Path, draft: Path | None, *, on_host: bool = True, **options: Any
) -> list[RequestOutput]:
    rules = (
        [{}] if draft is None else [{"rejection_sample_method": r} for r in ("block", "coupled")]
    )
    params = [
        SamplingParams(
            temperature=t, seed=i, max_tokens=40, ignore_eos=True, **rules[i % len(rules)]
        )
        for i, t in enumerate((0.9, 0.8, 0.0, 1.0))
    ]
    speculation = {"model": str(draft), "num_speculative_tokens": 3} if draft else None
    llm = llm_of(
        ON_HOST if on_host else ON_DEVICE, target, speculation, block_size=4, max_num_seqs=3,
        max_num_batched_tokens=32, num_blocks=40, **{"backend": "torch", **options},
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, params)
    llm.engine.check_integrity()
    assert all(output.error is None for output in outputs)
    return outputs


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("on_host", [True, False])
def test_the_same_model_by_other_ids_makes_the_same_drafts(
    target: Path, draft: Path, tmp_path: Path, on_host: bool
) -> None:
    """All tokens and all acceptances are equal, with every rule: q and noise are by target ids."""
    expected = serve(target, padded(draft, tmp_path / "padded"), on_host=on_host)
    outputs = serve(target, shuffled(draft, tmp_path / "shuffled"), on_host=on_host)
    assert tokens(outputs) == tokens(expected)
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].origins == other.outputs[0].origins
        assert one.metrics.accepted_per_position == other.metrics.accepted_per_position
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize(
    ("backend", "on_host"), [("auto", True), ("torch", True), ("torch", False)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_it_is_without_drafts(
    target: Path, draft: Path, tmp_path: Path, kind: str, on_host: bool, backend: str
) -> None:
    """At T=0 and under `coupled`, which fix the text; the requests exceed the cache."""
    plain = tokens(serve(target, None, backend=backend))
    outputs = serve(target, KINDS[kind](draft, tmp_path), on_host=on_host, backend=backend)
    assert [tokens(outputs)[i] for i in (1, 2, 3)] == [plain[i] for i in (1, 2, 3)]
    accepted, drafted = (
        sum(getattr(output.metrics, name) for output in outputs)
        for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("on_host", [True, False])
def test_a_draft_of_a_shorter_context_stops_there(
    target: Path, draft: Path, tmp_path: Path, on_host: bool
) -> None:
    model = LlamaForCausalLM.from_pretrained(draft)
    model.config.max_position_embeddings = 64
    model.save_pretrained(tmp_path)
    byte_level(ALPHABET).save_pretrained(tmp_path)
    outputs = serve(target, tmp_path, on_host=on_host)
    plain, whole = serve(target, None), serve(target, draft, on_host=on_host)
    assert [tokens(outputs)[i] for i in (1, 2, 3)] == [tokens(plain)[i] for i in (1, 2, 3)]
    drafted = [
        (o.metrics.num_draft_tokens, w.metrics.num_draft_tokens)
        for o, w in zip(outputs, whole, strict=True)
    ]
    assert drafted[2][0] == 0 < drafted[2][1], "a prompt of 88 tokens"
    assert drafted[1][0] == drafted[1][1], "an output of 40"


def test_tokens_are_the_same_by_their_text() -> None:
    target = byte_level(["a", "the", "Ġthe", "Ċ", "é", "Ã", "zzz", "Ġq"], "<|eot|>")
    pieces = ["<unk>", "<0x0A>", "<0x61>", "▁the", "the", "a", "▁", "q"]
    shared, stand_ins = match_tokenizers("draft", target, sentence_piece(pieces))
    assert shared == {0: 5, 1: 4, 2: 3, 3: 1, 8: 8}, "a, the, _the, newline, and the end of text"
    assert stand_ins[7] == 7, "` q` is read as `q`"
    assert stand_ins[6] == 0, "`zzz` is unknown"


def test_a_map_fits_the_padding_of_both() -> None:
    assert Match(None, {}).ids(8, 8, CPU) is None
    wider, narrower = Match(None, {}).ids(8, 6, CPU), Match(None, {}).ids(6, 8, CPU)
    assert wider is not None
    assert narrower is not None
    assert wider.draft_id_V.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert wider.missing_V.tolist() == [False] * 6 + [True] * 2
    assert narrower.draft_id_V.tolist() == [0, 1, 2, 3, 4, 5]
    assert not narrower.missing_V.any()
    mapped = Match({0: 2, 1: 9}, {2: 1}).ids(4, 6, CPU)
    assert mapped is not None
    assert mapped.draft_id_V.tolist() == [2, 0, 1, 0]
    assert mapped.missing_V.tolist() == [False, True, True, True]


def test_too_few_shared_tokens_are_refused_and_few_warned_of(
    target: Path, draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = [f"{a}{b}" for a in ALPHABET[:16] for b in ALPHABET[:16]]
    rows = [*range(256), 256]
    folder = save_other(draft, tmp_path / "none", rows, byte_level(foreign, "</s>"))
    with pytest.raises(ConfigError, match=r"has 1% of the target's.* It has 1 of 257\."):
        LLM(str(target), {"model": str(folder)})
    some = byte_level([*ALPHABET[:50], *foreign[50:]], "</s>")
    folder = save_other(draft, tmp_path / "some", rows, some)
    with caplog.at_level(logging.WARNING, logger=vocabulary.__name__):
        LLM(str(target), {"model": str(folder)})
    assert "can draft 51 of the target's 257 tokens (20%). Few drafts" in caplog.text
