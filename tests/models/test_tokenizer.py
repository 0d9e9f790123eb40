"""Tokenizers: fast, slow, from other files than tokenizer.json, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import CapacityError, CheckpointError, RequestError
from foretoken.models import load_tokenizer
from tests.models import families
from tests.support.checkpoints import save_checkpoint, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_old_files(folder: Path) -> None:
    save_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def test_fast(tmp_path: Path) -> None:
    families.make_config("llama", {}).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer.encode("def f(): pass")) == "def f(): pass"


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    families.make_config("gpt2", {}).save_pretrained(tmp_path)
    save_old_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("def f(): pass")) == "def f(): pass"


def test_slow(tmp_path: Path) -> None:
    """A tokenizer in Python: text in, text out, stop strings and bad words."""
    save_checkpoint(tmp_path, seed=3, vocabulary=384, tokenizer=False)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "ByT5Tokenizer"})
    )
    llm = LLM(str(tmp_path), {"model": str(tmp_path)}, num_blocks=64)
    assert llm.tokenizer is not None
    assert not llm.tokenizer.is_fast
    (output,) = llm.generate("abc", GREEDY)
    assert output.prompt_token_ids == llm.tokenizer.encode("abc")
    completion = output.outputs[0]
    assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert completion.text
    stop = next(c for c in completion.text if c.isascii())
    (cut,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12, stop=[stop]))
    assert cut.outputs[0].text == completion.text[: completion.text.index(stop)]
    (other,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12, bad_words=[stop]))
    assert stop not in other.outputs[0].text


def test_none_at_all(tmp_path: Path) -> None:
    llm = LLM(str(save_checkpoint(tmp_path, tokenizer=False)), num_blocks=64)
    assert llm.tokenizer is None
    (output,) = llm.generate([1, 2, 3], GREEDY)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="this checkpoint has no tokenizer"):
        llm.generate("abc")
    with pytest.raises(RequestError, match=r"`tokenizer` is None: .* this checkpoint has no token"):
        llm.chat([{"role": "user", "content": "abc"}])


@pytest.mark.parametrize("vocabulary", [257, 320])
def test_a_vocabulary_of_another_size_than_the_models(tmp_path: Path, vocabulary: int) -> None:
    """Padding of the logits decodes to nothing."""
    folder = save_checkpoint(tmp_path, vocabulary=vocabulary, spread=0.01)
    llm = LLM(str(folder), num_blocks=64)
    padding = list(range(257, vocabulary))
    only = SamplingParams(max_tokens=6, allowed_token_ids=padding or [1, 2])
    (output,) = llm.generate("abc", only)
    assert len(output.outputs[0].token_ids) == 6
    assert (output.outputs[0].text == "") == bool(padding)


def test_a_text_with_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, vocabulary=40, tokenizer=False)
    save_tokenizer(folder)
    with pytest.raises(RequestError, match=r"made of token ids in \[0, 40\)"):
        LLM(str(folder), num_blocks=64).generate("abc", GREEDY)


def test_a_prompt_that_is_too_long_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By our error, without a warning of the tokenizer."""
    from transformers.utils import logging

    folder = save_checkpoint(tmp_path, max_len=16)
    edit(folder / "tokenizer_config.json", model_max_length=16)
    llm = LLM(folder, num_blocks=64)
    logging.enable_propagation()
    try:
        with pytest.raises(CapacityError, match="shorter than the context of 16"):
            llm.generate("a" * 40)
    finally:
        logging.disable_propagation()
    assert not caplog.records


def own_code(folder: Path) -> None:
    name = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    edit(folder / "tokenizer_config.json", **name)
    (folder / "mine.py").write_text("raise SystemExit('remote code ran')")


def without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def no_merges(folder: Path) -> None:
    save_old_files(folder)
    (folder / "merges.txt").unlink()


def only(name: str, content: bytes, config: str = "") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        without("tokenizer.json", "tokenizer_config.json")(folder)
        (folder / name).write_bytes(content)
        if config:
            (folder / "tokenizer_config.json").write_text(config)

    return damage


def writes(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


PIECES = b"\x0a\x0b\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02"  # a model of SentencePiece's
LLAMA = '{"tokenizer_class": "LlamaTokenizer"}'
BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (writes("tokenizer.json", b"{"), "tokenizer.json` is not valid JSON"),
    (writes("tokenizer.json", b"{}"), "tokenizer.json` cannot be loaded"),
    (writes("tokenizer.json", b""), "tokenizer.json` is not valid JSON"),
    (writes("tokenizer_config.json", b"{"), "tokenizer_config.json` is not valid JSON"),
    (writes("tokenizer_config.json", b"[]"), "tokenizer_config.json` must hold a JSON object"),
    (writes("special_tokens_map.json", b"{"), "special_tokens_map.json` is not valid JSON"),
    (writes("added_tokens.json", b"{"), "added_tokens.json` is not valid JSON"),
    (writes("chat_template.jinja", b"\xff\xfe\xff"), "chat_template.jinja` cannot be read"),
    (own_code, "tokenizer_config.json` names a tokenizer of the checkpoint's own code"),
    (only("tokenizer.model", PIECES), "model` alone makes no tokenizer.*writes `tokenizer.json`"),
    (only("tokenizer.model", PIECES, LLAMA), "tokenizer.model` alone makes no tokenizer"),
    (only("tekken.json", b"{}"), "tekken.json` alone makes no tokenizer"),
    (only("qwen.tiktoken", b"IQ== 0\n"), "qwen.tiktoken` alone makes no tokenizer"),
    (without("tokenizer.json"), "has `tokenizer_config.json`, .* tokenizer: add `tokenizer.json`"),
    (no_merges, "has `vocab.json`, which make no tokenizer"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_broken_files(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    families.make_config("llama", {}).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama", "hidden_size": "large"}'])
def test_a_broken_config_is_not_blamed_on_the_tokenizer(tmp_path: Path, content: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json` (must|is not)"):
        load_tokenizer(tmp_path)
