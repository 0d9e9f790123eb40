"""The tokenizer that the metadata of a GGUF file describes: byte-level BPE (`gpt2`) or
SentencePiece's BPE (`llama`).

`tokenizer.ggml.pre` names the rule by which text is split into words before byte-level BPE. Only
rules that a well-known `tokenizer.json` states exactly are supported. Two kinds of rules are
refused, because a guess would silently give other tokens: rules that are known only from
llama.cpp's approximations, and `default`, which old files state for any rule.

The tokenizer encodes as the model's `tokenizer.json` does. Transformers' conversion of GGUF files
(5.23) differs in four ways. It does not apply Qwen's NFC. It splits words that are tokens, against
Llama 3's rule. It splits by GPT-2's pattern if it does not know the rule, such as SmolLM's rule of
single digits. It drops one of SentencePiece's spaces after a special token and before a text that
begins with a space.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.gguf.reader import GgufFile, short_repr

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5  # types of tokens; 6 is a byte
_KEY = "tokenizer.ggml."
# Transformers' names of special tokens, with the keys of the tokens' ids in GGUF.
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
_OTHER_MODELS = {
    "bert": "WordPiece", "t5": "a unigram model", "rwkv": "RWKV's trie", "gemma4": "Gemma 4's BPE",
    "plamo2": "PLaMo's", "none": "no tokenizer",
}  # fmt: skip
_SPACE = "▁"  # SentencePiece's mark of a space

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_LLAMA_3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


class WordRule(NamedTuple):
    """How text is split into words before byte-level BPE."""

    pattern: str | None = None  # a regular expression that matches words; None: GPT-2's pattern
    digits: bool = False  # whether each digit is a word
    normaliser: Any = None  # applied to the text before it is split
    takes_words: bool = False  # whether a word that is a token becomes that token without merges
    adds_bos: bool = False  # whether texts begin with `bos` where the file does not say

    def pre_tokenizer(self, adds_space: bool) -> Any:
        """The pre-tokenizer of `tokenizers` for this rule. `adds_space`: whether to add a space
        before a text that does not begin with a space."""
        to_bytes = pre_tokenizers.ByteLevel(
            add_prefix_space=adds_space, use_regex=self.pattern is None
        )
        if self.pattern is not None:
            to_words: Any = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
        elif self.digits:
            to_words = pre_tokenizers.Digits(individual_digits=True)
        else:
            return to_bytes
        return pre_tokenizers.Sequence([to_words, to_bytes])


_LLAMA = WordRule(_LLAMA_3, takes_words=True, adds_bos=True)
_DIGITS = WordRule(digits=True)
_WORD_RULES = {
    "gpt-2": WordRule(),
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "qwen2": WordRule(_QWEN, normaliser=normalizers.NFC()),
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": WordRule(_TEKKEN, takes_words=True, adds_bos=True),
}
"""The supported rules by the value of `tokenizer.ggml.pre`."""


def build_tokenizer(file: GgufFile) -> Any | None:
    """The tokenizer of a model (`PreTrainedTokenizerFast`); None if the file has no tokenizer.

    Raises:
        CheckpointError: the tokenizer's metadata are not valid.
        UnsupportedModelError: the kind of tokenizer, or its rule for words, is not known exactly.
    """
    if f"{_KEY}model" not in file.metadata:
        return None
    vocabulary = _Vocabulary(file)
    kind = vocabulary.value("model", str, "")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary)
    else:
        known = f" ({_OTHER_MODELS[kind]})" if kind in _OTHER_MODELS else ""
        raise UnsupportedModelError(
            f"`{file.path}` has a tokenizer of kind `{kind[:60]}`{known}, which is not supported: "
            "must be `gpt2` or `llama`. Give the folder or hub id of the model's original "
            "tokenizer as `tokenizer`."
        )
    for is_special, added_types in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER,))):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if token_type in added_types and token
        ]
        backend.add_tokens(added)
    return _wrap(backend, vocabulary, adds_bos)


def _wrap(backend: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> Any:
    """The tokenizer in Transformers' wrapper, with special tokens and chat template. `adds_bos`:
    whether texts begin with the token `bos` where the file does not say."""
    from transformers import PreTrainedTokenizerFast

    tokens = {name: vocabulary.special_token(key) for name, key in _SPECIAL_TOKENS.items()}
    adds_bos = adds_bos and tokens["bos_token"] is not None
    adds_bos = vocabulary.value("add_bos_token", bool, adds_bos)
    adds_eos = vocabulary.value("add_eos_token", bool, False)
    for name, is_added in (("bos_token", adds_bos), ("eos_token", adds_eos)):
        if is_added and tokens[name] is None:
            raise CheckpointError(
                f"`{vocabulary.path}` gives `{_KEY}add_{name}` as true: must be false in a file "
                f"without `{_KEY}{name}_id`."
            )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=adds_bos,
        add_eos_token=adds_eos,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in tokens.items() if token is not None},
    )
    if template := _chat_template(vocabulary):
        tokenizer.chat_template = template
    return tokenizer


class _Vocabulary:
    """The metadata about tokens. Methods raise `CheckpointError` for values that are not valid."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self.metadata = file.metadata
        self.tokens: list[str] = self.array("tokens", str)  # the texts of all tokens, by id
        if not self.tokens:
            raise CheckpointError(f"`{self.path}` has no tokens in `{_KEY}tokens`.")
        count = len(self.tokens)
        self.types: list[int] = self.array("token_type", int) or [_NORMAL] * count
        if len(self.types) != count:
            raise CheckpointError(
                f"`{self.path}` has {len(self.types)} types of {count} tokens: must have {count}."
            )

    def value(self, name: str, value_type: type, default: Any) -> Any:
        """The value of a key, which must be of this type; `default` if the key is missing."""
        value = self.metadata.get(_KEY + name, default)
        if type(value) is not value_type:
            raise CheckpointError(
                f"`{self.path}` gives `{_KEY}{name}` as {short_repr(value)}: must be of type "
                f"{value_type.__name__}."
            )
        return value

    def array(self, name: str, item_type: type) -> list[Any]:
        """The items of an array, which must be of this type; empty if there is no such key."""
        items = self.metadata.get(_KEY + name, [])
        # The format stores one type per array, so the first item shows the type of all.
        if not isinstance(items, list) or (items and type(items[0]) is not item_type):
            raise CheckpointError(
                f"`{self.path}` gives `{_KEY}{name}` as {short_repr(items)}: must be an array of "
                f"{item_type.__name__}."
            )
        return items

    def special_token(self, key: str) -> str | None:
        """The token with the id at this key; None if the file does not state an id."""
        token_id = self.metadata.get(_KEY + key)
        if token_id is None or token_id == 2**32 - 1:  # how llama.cpp writes that there is no token
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"`{self.path}` gives `{_KEY}{key}` as {short_repr(token_id)}: must be a token id "
                f"in 0..{len(self.tokens) - 1}."
            )
        if not self.tokens[token_id]:
            raise CheckpointError(
                f"`{self.path}` gives `{_KEY}{key}` as {token_id}: must be the id of a token that "
                "is not empty."
            )
        return self.tokens[token_id]

    def ids(self) -> dict[str, int]:
        """The id of each token, without tokens of type `unused`."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        used = [(token, i) for i, (token, token_type) in pairs if token_type != _UNUSED]
        ids = dict(used)
        if len(ids) != len(used):
            counts = Counter(token for token, _ in used)
            repeated = next(token for token, count in counts.items() if count > 1)
            raise CheckpointError(f"`{self.path}` has the token {short_repr(repeated)} twice.")
        for key in _SPECIAL_TOKENS.values():  # special tokens need ids, even of type `unused`
            if (token := self.special_token(key)) is not None and token not in ids:
                ids[token] = self.tokens.index(token)
        return ids


def _bpe(vocabulary: _Vocabulary, ids: dict[str, int], merges: Any, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # `tokenizers` raises no class of its own for an unknown token
        raise CheckpointError(
            f"`{vocabulary.path}` has merges that do not fit its tokens: {str(error)[:200]}"
        ) from error


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether texts begin with `bos` if the file does not say."""
    name = vocabulary.value("pre", str, "default")
    rule = _WORD_RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"`{vocabulary.path}` splits text by the rule `{name[:60]}` (`{_KEY}pre`), which is "
            "not known exactly: the model might get other tokens than in training. Give the folder "
            "or hub id of the model's original tokenizer as `tokenizer`."
        )
    merges = []
    for merge in vocabulary.array("merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"`{vocabulary.path}` has the merge {short_repr(merge)}: must be two tokens."
            )
        merges.append((left, right))
    if not merges:
        raise CheckpointError(f"`{vocabulary.path}` has no merges in `{_KEY}merges`.")
    model = _bpe(vocabulary, vocabulary.ids(), merges, ignore_merges=rule.takes_words)
    backend = Tokenizer(model)
    if rule.normaliser is not None:
        backend.normalizer = rule.normaliser
    adds_space = vocabulary.value("add_space_prefix", bool, False)
    backend.pre_tokenizer = rule.pre_tokenizer(adds_space)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A tokenizer with SentencePiece's BPE, and whether texts begin with `bos` where the file does
    not say.

    Of all neighbouring pairs, the pair with the best score is merged first. Unknown characters are
    encoded as bytes. Unless `add_space_prefix` is false, a space is added before a text, and before
    each part of the text after a special token, as in SentencePiece and llama.cpp.
    """
    ids = vocabulary.ids()
    scores = vocabulary.array("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"`{vocabulary.path}` has {len(scores)} scores of {len(vocabulary.tokens)} tokens: "
            f"must have {len(vocabulary.tokens)}."
        )
    unknown = vocabulary.special_token("unknown_token_id")
    merges = merges_by_score(vocabulary.tokens, vocabulary.types, scores)
    model = _bpe(vocabulary, ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    encode_steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decode_steps: list[Any] = [
        decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
    ]  # fmt: skip
    if vocabulary.value("add_space_prefix", bool, True):
        encode_steps.insert(0, normalizers.Prepend(_SPACE))
        decode_steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(encode_steps)
    backend.decoder = decoders.Sequence(decode_steps)
    return backend, True


def merges_by_score(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: all pairs of tokens that form another token.

    The order is that of Transformers: by the score of the formed token (highest first), then by the
    length of the left part, then of the right part (longest first), then by the formed token's id.
    """
    mergeable_types = (_NORMAL, _USER)
    ids = {token: i for i, token in enumerate(tokens) if types[i] in mergeable_types}
    merges = []
    for token, i in ids.items():
        splits = []
        for middle in range(1, len(token)):
            left = ids.get(token[:middle])
            if left is not None and (right := ids.get(token[middle:])) is not None:
                splits.append((left, right, middle))
        splits.sort()
        for _, _, middle in splits:
            key = scores[i], middle, len(token) - middle
            merges.append((key, token[:middle], token[middle:]))
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in merges]


def _chat_template(vocabulary: _Vocabulary) -> Any:
    """The text of the chat template; a dict of texts by name if there are several; None if the file
    has no chat template."""
    default = vocabulary.metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {
        key.removeprefix(prefix): text
        for key, text in vocabulary.metadata.items() if key.startswith(prefix)
    }  # fmt: skip
    for text in (default, *named.values()):
        if text is not None and not isinstance(text, str):
            raise CheckpointError(
                f"`{vocabulary.path}` gives `tokenizer.chat_template` as {short_repr(text)}: must "
                "be the text of a Jinja template."
            )
    if not named:
        return default
    return {"default": default, **named} if default else named
