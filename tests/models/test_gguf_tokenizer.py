"""Tokenizers of GGUF files: the ids of the tokenizer they were made from, and broken ones."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models import load_tokenizer
from foretoken.models.chat import ChatTemplate
from tests.models.gguf_files import Stored, Typed, real_file, small_vocabulary, write

TEXTS = [
    "", " ", "  two  spaces", "def f(x):\n    return x + 12345\n\n\n", "don't DON'T we're",
    "größer ünïcode 日本語のテスト 😀🦙 ½ ²", "\t\ttabs\r\nand\rreturns", "1234 + 98.76 = x_1y2",
    "<|end|>middle<|end|> after", "a<think>b</think> c", "HTTPServer camelCase ΑΒΓδ", "/* x */\n/",
]  # fmt: skip
CORPUS = [*TEXTS, Path(__file__).read_text(encoding="utf-8")]
SPECIAL, USER = ["<|bos|>", "<|end|>"], ["<think>", "</think>"]
BEHIND = r" ?[^\s\p{L}\p{N}]+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPACES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?" + f"{UPPER}*{LOWER}+|" + r"[^\r\n\p{L}\p{N}]?" + f"{UPPER}+{LOWER}*|"
    r"\p{N}|"
)


def cut(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


PRE: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": cut(QWEN + BEHIND + SPACES),
    "llama-bpe": cut(LLAMA + BEHIND + SPACES),
    "tekken": cut(TEKKEN + BEHIND + SPACES.replace(r"[\r\n]*", r"[\r\n/]*", 1)),
}


def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE[pre], decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in USER])
    return tokenizer


def written(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if t in SPECIAL else 4 if t in USER else 1 for t in tokens]
    model = json.loads(tokenizer.to_str())["model"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [Typed(5, kind) for kind in types],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocabulary["<|bos|>"],
        "tokenizer.ggml.eos_token_id": vocabulary["<|end|>"],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    embedding = {"token_embd.weight": Stored((len(tokens), 32))}
    return write(folder / "m.gguf", metadata, embedding)


@pytest.mark.parametrize("pre", PRE)
def test_byte_level(tmp_path: Path, pre: str) -> None:
    original = trained(pre)
    tokenizer = load_tokenizer(written(tmp_path, original, pre=pre))
    assert tokenizer.is_fast
    begins = pre in ("llama-bpe", "tekken")
    for text in CORPUS:
        expected = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text) == [*[0] * begins, *expected]
        as_read = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.decode(expected) == as_read
    assert tokenizer.get_vocab() == original.get_vocab()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|end|>")
    assert tokenizer.all_special_ids == [0, 1]


def test_the_normal_form_of_qwen(tmp_path: Path) -> None:
    original = trained("qwen2")
    tokenizer = load_tokenizer(written(tmp_path, original, pre="qwen2"))
    text = unicodedata.normalize("NFD", "größer")
    assert tokenizer.encode(text) == original.encode(text).ids == tokenizer.encode("größer")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_as_transformers_converts_it(tmp_path: Path, pre: str) -> None:
    """Where its conversion is right: for normalised text, without beginning tokens."""
    path = written(tmp_path, trained(pre), pre=pre, add_bos_token=False)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in CORPUS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.special_tokens_map.items() <= theirs.special_tokens_map.items()


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    path = written(tmp_path, trained("gpt-2"), pre="gpt-2", add_bos_token=True, add_eos_token=True)
    tokenizer = load_tokenizer(path)
    (bos, *middle, eos) = tokenizer.encode("hello")
    assert (bos, eos) == (0, 1)
    assert middle == tokenizer.encode("hello", add_special_tokens=False)
    path = written(tmp_path, trained("gpt-2"), pre="gpt-2", add_space_prefix=True)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello") == tokenizer.encode(" hello")


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁t", "he", "▁the", "▁▁", "▁▁▁", "▁a", "in", "ing", "▁is"]


def sentencepiece(folder: Path, **changes: Any) -> Path:
    """SentencePiece's BPE with bytes; a word that comes earlier has the better score."""
    letters = [*"▁abcdefghinst.,"]
    tokens = [*PIECES, *WORDS, *letters]
    scores = [0.0] * len(PIECES) + [float(-i) for i in range(len(WORDS) + len(letters))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [Typed(5, kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items() if value is not None},
    }
    for key in [key for key, value in changes.items() if value is None]:
        metadata.pop(f"tokenizer.ggml.{key}")
    return write(folder / "m.gguf", metadata, {"token_embd.weight": Stored((len(tokens), 32))})


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path))
    assert tokenizer.unk_token_id == 0
    cases = {
        "the thing": ["▁the", "▁t", "h", "ing"],
        "  the": ["▁▁", "▁the"],  # a space more than the text has
        "é": ["▁", "<0xC3>", "<0xA9>"],
        "a</s>the": ["▁a", "</s>", "▁the"],  # after a special token, too
        "\n": ["▁", "<0x0A>"],
        "": [],
    }
    for text, pieces in cases.items():
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *pieces]
        assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == (
            text.replace("</s>", "").replace(" ", "")
        )
    assert tokenizer.decode(tokenizer.encode("  the thing"), skip_special_tokens=True) == (
        "  the thing"
    )
    bare = load_tokenizer(sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False))
    assert bare.convert_ids_to_tokens(bare.encode("the the")) == ["t", "he", "▁the"]
    assert bare.decode(bare.encode(" the")) == " the"


def test_sentencepiece_as_transformers_converts_it(tmp_path: Path) -> None:
    """Where its conversion is right: no special token inside, and no space at the beginning."""
    ours = load_tokenizer(sentencepiece(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*TEXTS, "the thing is in it", "a\n  the\n"]:
        if text[:1].strip() and "s>" not in text:
            assert ours.encode(text) == theirs.encode(text)


def test_chat_templates(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", **small_vocabulary()}, {})
    text, ids = ChatTemplate(load_tokenizer(path)).render([{"role": "user", "content": "ab ab"}])
    assert text == "ab ab"
    assert load_tokenizer(path).decode(ids) == "ab ab"
    several = {"tokenizer.chat_template.tool_use": "tools {{ tools }}"}
    metadata = {"general.architecture": "llama", **small_vocabulary(), **several}
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata, {}))
    assert set(tokenizer.chat_template) == {"default", "tool_use"}


def test_tokens_that_are_not_used(tmp_path: Path) -> None:
    """Rows of the embedding without a token: `tokenizer.json` does not have them either."""
    vocabulary = small_vocabulary()
    vocabulary["tokenizer.ggml.tokens"] += ["[PAD260]", "[PAD261]"]
    vocabulary["tokenizer.ggml.token_type"] += [Typed(5, 5)] * 2
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", **vocabulary}, {})
    assert len(load_tokenizer(path)) == 260


def test_no_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama"}, {})
    assert load_tokenizer(path) is None


UNKNOWN = {
    "bert": ({"model": "bert"}, r"of kind `bert` \(WordPiece\), which is not supported"),
    "t5": ({"model": "t5"}, r"of kind `t5` \(a unigram model\)"),
    "rwkv": ({"model": "rwkv"}, "of kind `rwkv`"),
    "rule": ({"pre": "viking"}, "splits text by the rule `viking`"),
    "no rule": ({"pre": None}, "splits text by the rule `default`"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known(tmp_path: Path, case: str) -> None:
    changes, message = UNKNOWN[case]
    with pytest.raises(UnsupportedModelError, match=message):
        load_tokenizer(changed(tmp_path, changes))


def changed(folder: Path, changes: dict[str, Any]) -> Path:
    metadata = {"general.architecture": "llama", **small_vocabulary()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write(folder / "m.gguf", kept, {})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"model": 3}, "`tokenizer.ggml.model` as 3: must be of type str"),
    "tokens": ({"tokens": None}, "has no tokens in `tokenizer.ggml.tokens`"),
    "numbers": ({"tokens": [1, 2]}, r"`tokenizer.ggml.tokens` as \[1, 2\]: must be an array of"),
    "types": ({"token_type": [Typed(5, 1)]}, "has 1 types of 260 tokens"),
    "twice": ({"tokens": ["a"] * 260}, "has the token 'a' twice"),
    "merges": ({"merges": None}, "has no merges in"),
    "merge": ({"merges": ["a b c"]}, "the merge 'a b c': must be two tokens"),
    "merged": ({"merges": ["a zz"]}, "merges that do not fit its tokens: .*zz"),
    "eos": ({"eos_token_id": 260}, "`tokenizer.ggml.eos_token_id` as 260: must be a token id in"),
    "bos": ({"add_bos_token": True}, "add_bos_token` as true: must be false in a file"),
    "flag": ({"add_bos_token": "yes"}, "add_bos_token` as 'yes': must be of type bool"),
    "scores": ({"model": "llama", "scores": [0.5]}, "has 1 scores of 260 tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_is_wrong(tmp_path: Path, case: str) -> None:
    changes, message = WRONG[case]
    path = changed(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(path)
    assert f"`{path}`" in str(caught.value)


def test_a_template_that_is_none(tmp_path: Path) -> None:
    vocabulary = {**small_vocabulary(), "tokenizer.chat_template": 3}
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", **vocabulary}, {})
    with pytest.raises(CheckpointError, match=r"`tokenizer.chat_template` as 3: must be the text"):
        load_tokenizer(path)


def test_a_real_file() -> None:
    """SmolLM2's, as Transformers converts it, except that digits are split, which it leaves out."""
    path = real_file()
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = PRE["smollm"]
    for text in [*CORPUS, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.chat_template == theirs.chat_template
    assert len(ours) == 49152
