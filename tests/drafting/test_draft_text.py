"""Drafts by text: the draft model reads the request's text, and its text becomes drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.vocabularies import cut
from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.drafting.draft_text import Transcript
from foretoken.drafting.registry import find_drafter
from foretoken.errors import ConfigError
from foretoken.models.locate import resolve_checkpoint
from foretoken.outputs import RequestOutput
from tests.support.checkpoints import save_checkpoint

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PROMPTS = ["def add(a, b):\n    ", "import os\nimport sys\n" * 6, "class Héllo:\n", "x = [1, 2"]


def byte_level(*merged: str) -> PreTrainedTokenizerFast:
    """One token per byte, and these tokens, each merged from two earlier ones."""
    vocab = {piece: i for i, piece in enumerate([*ALPHABET, *merged])}
    merges = [
        next((m[:i], m[i:]) for i in range(1, len(m)) if m[:i] in vocab and m[i:] in vocab)
        for m in merged
    ]
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>")


TARGET, DRAFT = byte_level("ab", "aba"), byte_level("ba", "Ġb", "bab")


@given(text=st.text("ab é€\n", max_size=120), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_the_draft_model_reads_the_text_wherever_rounds_end(text: str, cuts: list[int]) -> None:
    known = TARGET.encode(text)
    reader, before = Transcript(TARGET, DRAFT), list[int]()
    for end in [*sorted(cuts), len(known)]:
        part = known[:end]
        same, fresh = reader.read(part), Transcript(TARGET, DRAFT)
        assert (same is None) == (fresh.read(part) is None)
        if same is None:
            assert TARGET.decode(part).endswith("\ufffd")
        else:
            assert reader.ids == fresh.ids
            assert DRAFT.decode(reader.ids) == TARGET.decode(part)
            assert reader.ids[:same] == before[:same]
            assert same in (len(before), len(reader.ids)) or reader.ids[same] != before[same]
        before = reader.ids


@pytest.mark.parametrize(
    ("known", "said", "expected"),
    [
        ("x", "ab ab", ["ab", "Ġ"]),  # the last one might have been `aba`
        ("a", "b b", ["b", "Ġ"]),  # what is known stays as it is, though `ab` is one token
        ("x", "ab ab<|end|>b", ["ab", "Ġ", "ab", "<|end|>"]),
        ("x", "<|end|>", ["<|end|>"]),
        ("x", "a", []),
    ],
)
def test_the_drafted_text_becomes_tokens_of_the_target(
    known: str, said: str, expected: list[str]
) -> None:
    reader, ids = Transcript(TARGET, DRAFT), TARGET.encode(known)
    reader.read(ids)
    assert TARGET.convert_ids_to_tokens(reader.drafts(ids, DRAFT.encode(said))) == expected


def test_half_a_character_is_not_drafted() -> None:
    reader, ids = Transcript(TARGET, DRAFT), TARGET.encode("x")
    reader.read(ids)
    drafts = reader.drafts(ids, DRAFT.encode("ba €")[:-1])
    assert TARGET.convert_ids_to_tokens(drafts) == ["b", "a"], "the space may go on"


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """The embedded draft model with half of its merges: longer texts, other ids."""
    with tempfile.TemporaryDirectory() as folder:
        cut(resolve_checkpoint("tiny-python-draft"), 1920, Path(folder))
        yield folder


def serve(speculation: Any, params: list[SamplingParams], **options: Any) -> list[RequestOutput]:
    llm = LLM("tiny-python", speculation, max_model_len=192, block_size=8, **options)
    outputs = llm.generate(PROMPTS, params)
    llm.engine.check_integrity()
    assert not list(llm.engine.runner.drafter.held_slots() if speculation else ())  # type: ignore
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_text_is_what_it_is_without_drafts_and_in_any_batch(other: str) -> None:
    """With preemptions; where drafts change a text, they are the same drafts."""
    fixed = [SamplingParams(temperature=0, max_tokens=90), SamplingParams(seed=1, max_tokens=80)]
    fixed[1] = replace(fixed[1], rejection_sample_method="coupled")
    drawn = [SamplingParams(seed=2, max_tokens=60, n=2, temperature=0.8, ignore_eos=True)] * 2
    params = [fixed[0], drawn[0], fixed[1], drawn[1]]
    speculation = {"method": "draft_text", "model": other, "num_speculative_tokens": 4}
    plain = serve(None, params)
    crowded = serve(speculation, params, num_blocks=36, max_num_batched_tokens=64, max_num_seqs=6)
    assert sum(output.metrics.num_preemptions for output in crowded) > 0
    alone = serve(speculation, params, max_num_seqs=1, enable_prefix_caching=False)
    assert tokens(crowded) == tokens(alone)
    for mine, theirs in zip(crowded, alone, strict=True):
        assert [o.origins for o in mine.outputs] == [o.origins for o in theirs.outputs]
    assert [tokens(crowded)[i] for i in (0, 3)] == [tokens(plain)[i] for i in (0, 3)]
    assert all(output.metrics.mean_acceptance_length > 1.1 for output in crowded)


def test_a_grammar_of_the_target_masks_no_tokens_of_the_draft() -> None:
    """Masks are by the target's ids, here also the draft's: with a mask all drafts are digits."""
    digits = SamplingParams(
        temperature=0, max_tokens=12, trace=True, structured_outputs={"regex": "[0-9]{12}"}
    )
    outputs = serve({"method": "draft_text", "num_speculative_tokens": 4}, [digits] * 4)
    records = outputs[1].outputs[0].trace
    assert " sys" in [draft.decoded_token for record in records for draft in record.dropped]


def test_the_same_tokenizer_by_text_loses_little(other: str) -> None:
    params = [SamplingParams(temperature=0, max_tokens=90)] * 4
    by_ids, by_text = (serve({"method": m}, params) for m in ("draft_model", "draft_text"))
    ids, text = (
        sum(o.metrics.num_accepted_tokens for o in outputs) for outputs in (by_ids, by_text)
    )
    assert tokens(by_text) == tokens(by_ids)
    assert text > 0.8 * ids


def test_a_context_that_is_too_short_ends_drafts(target: Path, tmp_path: Path) -> None:
    short = save_checkpoint(tmp_path / "short", seed=1, max_len=32)
    llm = LLM(str(target), {"method": "draft_text", "model": str(short)}, max_num_seqs=2)
    [output] = llm.generate("abc" * 8, SamplingParams(temperature=0, max_tokens=60))
    assert output.error is None
    assert output.metrics.num_drafts < output.metrics.num_steps - 20
    plan, drafter = llm.memory_plan, llm.engine.runner.drafter
    assert plan is not None
    kept = sum(t.nbytes for t in (*drafter._model.kv.keys, *drafter._model.kv.values))  # type: ignore
    assert plan.parts["drafts of slots"] >= kept


def test_it_is_refused_where_it_cannot_run(target: Path, tmp_path: Path) -> None:
    bare = save_checkpoint(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ConfigError, match="a model with a tokenizer, for a target with one"):
        LLM(str(target), {"method": "draft_text", "model": str(bare)})
    with pytest.raises(ConfigError, match="`draft_text` reads tokens on the host, too late"):
        find_drafter(SpeculativeConfig(method="draft_text", model="x"), on_host=False)
