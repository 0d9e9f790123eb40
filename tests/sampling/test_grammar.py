"""Masks by grammar: for every kind of tokenizer, however a matcher reached its state."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken.drafting.forced import by_grammar
from foretoken.errors import RequestError
from foretoken.sampling.grammar import Compilers, Grammar, Grammars, Matcher, fill_ahead, fill_masks
from foretoken.sampling.history import Array
from foretoken.sampling.params import SamplingParams
from tests.support.asynchronous import PATIENCE

WORDS = ["a", "b", "ab", "ba", "aab", "é", "c"]
CHOICES = ["ab", "aba b", "aab", "bé", "cab", "c"]
PADDING = 40


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *("ab", "ba", "aab"), "</s>"]
    tokens = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")


def sentence_piece() -> PreTrainedTokenizerFast:
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁b", *WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokens.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    vocab = {name: i for i, name in enumerate(["▁", "▁b", *WORDS, "</s>"])}
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokens.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")


KINDS = {make.__name__: make for make in (byte_level, sentence_piece)}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def grammars_of(
    tokenizer: Any, compilers: Compilers | None = None, make: type[Grammars] = Grammars
) -> Grammars:
    size, ends = len(tokenizer) + PADDING, frozenset([tokenizer.eos_token_id])
    return make(tokenizer, size, ends, compilers=compilers)


def compiled(tokenizer: Any, choices: Sequence[str] = CHOICES) -> Grammar:
    grammars = grammars_of(tokenizer)
    grammars.wait([asked := {"choice": [*choices]}])
    grammar = grammars.compiled(asked)
    assert grammar is not None
    return grammar


def allowed(mask_W: Array) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask_W).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def next_mask(matcher: Matcher) -> Array:
    grammar = matcher.grammar
    [mask_RW] = fill_masks([matcher], [[]], -(-grammar.num_tokens // 32))
    assert len(mask_RW) == 1
    return mask_RW[0]


def test_walks_through_the_masks_spell_the_choices(tokenizer: Any) -> None:
    grammar, draw, seen = compiled(tokenizer), random.Random(1), set()
    for _ in range(200):
        matcher, ids = grammar.matcher(), list[int]()
        while not matcher.is_finished:
            token = draw.choice(allowed(next_mask(matcher)))
            matcher.append([token])
            ids.append(token)
        text = b"".join(spelled(tokenizer, token) for token in ids).decode()
        assert text in CHOICES
        seen.add(text)
    assert seen == set(CHOICES)


def spelled(tokenizer: Any, token: int) -> bytes:
    """A token's bytes, by the rules of its kind; the end of text has none."""
    name = tokenizer.convert_ids_to_tokens(token)
    if token == tokenizer.eos_token_id:
        return b""
    if isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        of = {chr(byte): byte for byte in printable}
        of |= {chr(256 + i): byte for i, byte in enumerate(others)}
        return bytes(of[letter] for letter in name)
    if name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()


def test_rows_are_those_of_matchers_that_took_the_drafts_in(tokenizer: Any) -> None:
    grammar, draw = compiled(tokenizer), random.Random(2)
    size, words = grammar.num_tokens, -(-grammar.num_tokens // 32)
    for _ in range(60):
        matchers = [grammar.matcher() for _ in range(3)]
        drafts, expected = list[list[int]](), list[list[Array]]()
        for matcher in matchers:
            fresh, some, rows = grammar.matcher(), list[int](), list[Array]()
            for _ in range(draw.randrange(2)):  # tokens that were emitted
                token = draw.choice(allowed(next_mask(fresh)))
                fresh.append([token])
                matcher.append([token])
            for _ in range(draw.randrange(5)):
                rows.append(next_mask(fresh))
                if fresh.is_finished:
                    break
                some.append(draw.choice(allowed(rows[-1])))
                fresh.append([some[-1]])
            else:
                rows.append(next_mask(fresh))
            some = some[: len(rows) - 1]
            if draw.random() < 0.5:  # what is not allowed ends what can be reached
                some += [draw.choice([-1, size - 1, size, 10**7]), 0]
                rows += [np.full(words, -1, np.int32)] * 2
            drafts.append(some)
            expected.append(rows)
        for found, some, rows in zip(
            fill_masks(matchers, drafts, words), drafts, expected, strict=True
        ):
            assert found.tolist() == np.stack(rows).tolist(), some
        known = [some[: len(rows) - 1] for some, rows in zip(drafts, expected, strict=True)]
        for i in range(3):  # pass by pass, and back again
            so_far = [[t for t in some[:i] if 0 <= t < size - 1] for some in known]
            found = fill_ahead(matchers, so_far, words)
            for g, some in enumerate(so_far):
                assert found[g].tolist() == expected[g][len(some)].tolist() or len(some) < i
        again = fill_masks(matchers, drafts, words)
        assert all(a.tolist() == np.stack(e).tolist() for a, e in zip(again, expected, strict=True))


def test_tokens_without_an_alternative_are_forced(tokenizer: Any) -> None:
    params = SamplingParams()
    assert by_grammar(params) is None
    params.structured_outputs = compiled(tokenizer, ["cab", "cac"])
    ahead = by_grammar(params)
    assert ahead is not None
    forced, ids = [], np.array([], dtype=np.int32)
    while len(some := [*ahead(ids)]):
        forced += some
        ids = np.array(forced, dtype=np.int32)
    text = b"".join(spelled(tokenizer, token) for token in forced)
    assert text in (b"c", b"ca"), "the last may be part of a longer token"


def test_a_decoder_that_says_nothing_of_bytes_is_refused() -> None:
    with pytest.raises(RequestError, match="can't determine decoder type"):
        compiled(metaspace())


def test_compiling_keeps_no_process_from_ending() -> None:
    """Python waits at its end for every thread that is no daemon."""
    compilers, threads, end = Compilers(), SimpleQueue[Thread](), Event()

    def compile_slowly() -> None:
        threads.put(current_thread())
        end.wait()

    compilers.submit(compile_slowly)
    thread = threads.get(timeout=PATIENCE)
    assert thread.daemon
    del compilers
    end.set()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for work that cannot come"


class SlowToBegin(Compilers):
    def submit(self, work: Callable[..., None], *args: Any) -> None:
        time.sleep(0.02)  # in which the other threads ask
        super().submit(work, *args)


def test_threads_that_ask_for_one_grammar_share_it() -> None:
    grammars, asked = grammars_of(byte_level(), SlowToBegin()), {"choice": ["a"]}

    def ask(_: int) -> Grammar | None:
        kept = grammars.wait([asked])
        return grammars.compiled(asked) if kept else None

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(ask, range(8))]
    assert found[0] is not None
    assert all(one is found[0] for one in found)


class Noting(Grammars):
    """Notes which grammars are compiled, which takes until `release` is set."""

    noted: list[str] = []
    release = Event()

    def build(self, outputs: dict[str, Any], *given: Any) -> Grammar:
        self.noted.append(outputs["choice"][0])
        self.release.wait(PATIENCE)
        return super().build(outputs, *given)


def test_a_grammar_that_is_no_longer_wanted_is_not_compiled() -> None:
    grammars = grammars_of(byte_level(), make=Noting)
    kept = [grammars.begin({"choice": [word]}) for word in ("first", "second")]
    grammars.begin({"choice": ["left"]})
    kept.append(grammars.begin({"choice": ["stays"]}))
    Noting.release.set()
    for entry in kept:
        assert entry is not None
        assert isinstance(entry.future.result(PATIENCE), Grammar)
    assert sorted(Noting.noted) == ["first", "second", "stays"]
