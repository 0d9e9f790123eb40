"""How text is cut into words before byte-level BPE, by the names of `tokenizer.ggml.pre`.

Belongs here: the rules of well-known `tokenizer.json` files, each of which is known exactly. Does
not: rules that are only known from llama.cpp's approximations, and `default`, which old files have
whatever their model was trained with: a guess would give other tokens in silence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

BYTE_LEVEL = decoders.ByteLevel()

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_LLAMA_3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


class Split(NamedTuple):
    """One rule.

    pattern:     of words; None: GPT-2's
    digits:      each digit is a word
    normaliser:  of the text before that
    takes_words: a word that is a token is taken as it is, whatever the merges make of it
    adds_bos:    a text begins with a token where the file does not say
    """

    pattern: str | None = None
    digits: bool = False
    normaliser: Any = None
    takes_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self, adds_space: bool) -> Any:
        """What cuts a text; `adds_space` puts a space in front of one that has none."""
        bytes_of = pre_tokenizers.ByteLevel(
            add_prefix_space=adds_space, use_regex=self.pattern is None
        )
        if self.pattern is not None:
            words = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence([words, bytes_of])
        if self.digits:
            return pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), bytes_of]
            )
        return bytes_of


_LLAMA = Split(_LLAMA_3, takes_words=True, adds_bos=True)
_DIGITS = Split(digits=True)
_SPLITS = {
    "gpt-2": Split(),
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "qwen2": Split(_QWEN, normaliser=normalizers.NFC()),
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": Split(_TEKKEN, takes_words=True, adds_bos=True),
}


def split_of(name: str) -> Split | None:
    """The rule of a name; None if it is not known exactly."""
    return _SPLITS.get(name)
