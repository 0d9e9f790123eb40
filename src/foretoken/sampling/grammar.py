"""Grammars that outputs must match, by llguidance: compiled once, one matcher per sample. No torch.

Charter: all code that uses llguidance. Compiling happens in separate threads, never in a step, and
within limits. An error of llguidance becomes an error of the request that brought the grammar.

Shape suffixes: N rows of masks, G matchers, W words of 32 bits.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize, ref

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import RequestError
from foretoken.sampling.structured import ANY_OBJECT, FIELD, as_text

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

Array = NDArray[Any]

COMPILE_SECONDS = 10.0
"""For one grammar, not counting the wait for others; within the limits below it takes 0.3 s."""

_MOST_GBNF = 2**15
"""Characters: translation is quadratic in the number of rules, and takes at most 1 s for these."""
_GBNF_PARTS = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^]\\])*]?|\.', re.DOTALL)
"""Comments, literals, classes, `.`; an unclosed one reaches to the end."""
_GBNF_CHARACTER = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
_GBNF_RANGE = re.compile(rf"({_GBNF_CHARACTER})(?:-({_GBNF_CHARACTER}))?", re.DOTALL)
_GBNF_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{c: c for c in '"\\[]'}}
_THREADS = 2  # llguidance releases Python's lock, so a slow grammar does not delay a fast one
_CACHED = 128  # grammars that an engine keeps besides those that requests still hold


def _limits() -> LLParserLimits:
    """Limits, tighter than llguidance's own where hostile grammars made steps long or memory grow.

    A mask may take 100 000 units of lexer fuel (7 ms by llguidance's figures) and 20 000 items
    (1 ms); 16 384 states are 32 MB of a matcher.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=16_384,
        max_grammar_size=200_000, verbose_errors=False,
    )  # fmt: skip


class Grammar:
    """A grammar compiled for one engine's tokens: `structured_outputs` of an admitted request.

    Attributes:
        asked: the `structured_outputs` that it was compiled from.
        num_tokens: ids at or past it do not belong to the tokenizer.
    """

    def __init__(
        self, asked: dict[str, Any], start: LLMatcher, executor: LLExecutor, num_tokens: int
    ) -> None:
        self.asked, self.num_tokens, self.executor = asked, num_tokens, executor
        self._start = start

    def __repr__(self) -> str:
        return repr(self.asked)

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        return Matcher(self, self._start.deep_copy())


class Matcher:
    """The state of one output in its grammar."""

    def __init__(self, grammar: Grammar, state: LLMatcher) -> None:
        self.grammar, self.state = grammar, state
        self._num_ahead = 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Advance over emitted tokens; those after the end of the grammar are ignored.

        Raises:
            RequestError: the grammar does not allow them, or is too complex there.
        """
        self.rewind()
        taken = self.state.try_consume_tokens([*token_ids])
        if taken < len(token_ids) and not self.is_finished:
            self.check()
            bound = f"such that token {token_ids[taken]} may follow here"
            raise RequestError(FIELD, self.grammar, bound)

    def advance(self, drafts: Sequence[int]) -> None:
        """Advance over drafts until `rewind`; they must begin with those of the last call."""
        self._num_ahead += self.state.try_consume_tokens([*drafts[self._num_ahead :]])

    def rewind(self) -> None:
        """Go back to the last emitted token."""
        if self._num_ahead:
            self.state.rollback(self._num_ahead)
            self._num_ahead = 0

    @property
    def is_finished(self) -> bool:
        """Whether only the end of text may follow."""
        return self.state.is_stopped() and not self.state.is_error()

    def forced(self) -> list[int]:
        """Tokens that must follow; empty if there is a choice."""
        return self.state.compute_ff_tokens()

    def check(self) -> None:
        """Raise `RequestError` if llguidance has failed: the state is then useless."""
        if self.state.is_error():
            raise _refused(self.grammar.asked, self.state.get_error())


def fill_masks(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], num_words: int
) -> list[Array]:
    """Masks of allowed tokens, int32 [drafts + 1, W] for each matcher.

    Row j is made as if the drafts before it were accepted. A forbidden draft is always rejected,
    since its p is 0; the rows after it are unused and allow every token. The draft itself stays:
    dropping it because of its token would bias the output. One native call fills all masks in
    parallel, and a second one those of matchers without drafts, which the first does not take. A
    matcher may fail in this: see `Matcher.check`.
    """
    if not matchers:  # llguidance may be missing
        return []
    from llguidance import numpy as native

    grammar = matchers[0].grammar
    for matcher in matchers:
        matcher.rewind()
    first_N = np.cumsum([0, *(len(some) + 1 for some in drafts)]).tolist()
    mask_NW = np.full((first_N[-1], -(-grammar.num_tokens // 32)), -1, dtype=np.int32)
    alone: list[tuple[LLMatcher, int]] = []
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    for matcher, first, some in zip(matchers, first_N, drafts, strict=False):
        outside = (i for i, token in enumerate(some) if not 0 <= token < grammar.num_tokens)
        known = [*some[: next(outside, len(some))]]
        if known:
            drafted.append((matcher.state, first, known))
        else:
            alone.append((matcher.state, first))
    if drafted:
        native.fill_next_token_bitmask_par_with_draft_tokens(grammar.executor, drafted, mask_NW)
    if alone:
        native.fill_next_token_bitmask_par(grammar.executor, alone, mask_NW)
    return np.split(mask_NW[:, :num_words], first_N[1:-1])


def fill_ahead(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], num_words: int
) -> Array:
    """Masks of the tokens allowed after the drafts so far of G >= 1 matchers, int32 [G, W].

    It fills one mask per draft, where `fill_masks` would fill those of all earlier drafts again: 5
    masks for 5 drafts, not 15.
    """
    from llguidance import numpy as native

    grammar = matchers[0].grammar
    for matcher, some in zip(matchers, drafts, strict=True):
        matcher.advance(some)
    mask_GW = np.full((len(matchers), -(-grammar.num_tokens // 32)), -1, dtype=np.int32)
    states = [(matcher.state, g) for g, matcher in enumerate(matchers)]
    native.fill_next_token_bitmask_par(grammar.executor, states, mask_GW)
    return mask_GW[:, :num_words].copy()


class Compiling:
    """A grammar that is being compiled, or has been.

    Attributes:
        since: when it was asked for; once `has_begun`, when its compilation began.
    """

    def __init__(self) -> None:
        self.since, self.has_begun = time.monotonic(), False
        self.future = Future[Grammar | RequestError]()


class Compilers:
    """Threads that run submitted work in order; they do not keep the process from ending."""

    def __init__(self) -> None:
        self._submitted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_threads = 0
        finalize(self, _let_go, self._submitted)

    def submit(self, work: Callable[..., None], *given: Any) -> None:
        """Run `work(*given)` later; it must not raise. Only one thread may call this at a time."""
        if self._num_threads < _THREADS:
            self._num_threads += 1
            name, given_to = "foretoken-grammar", (self._submitted,)
            Thread(target=_do, args=given_to, name=name, daemon=True).start()
        self._submitted.put(partial(work, *given))


def _do(submitted: SimpleQueue[Callable[[], None] | None]) -> None:
    while work := submitted.get():
        work()
        del work  # an idle thread must not keep a grammar alive


def _let_go(submitted: SimpleQueue[Callable[[], None] | None]) -> None:
    for _ in range(_THREADS):
        submitted.put(None)


class Grammars:
    """Compiles the grammars of one engine's requests; any thread may call it.

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer.
        eos_ids: tokens that end a text, allowed where the grammar may end.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._pool = Compilers()
        self._known = WeakValueDictionary[str, Compiling]()
        self._recent = OrderedDict[str, Compiling]()
        self._last_began = 0.0
        self._entries, self._loading = Lock(), Lock()
        self._native: tuple[LLTokenizer, LLExecutor] | None = None

    def begin(self, asked: Any) -> Compiling | None:
        """Compile in the background, unless already done; None: there is nothing to compile.

        While the caller keeps the result, the grammar is not compiled again. If no caller keeps it
        when its turn comes, it is not compiled at all.
        """
        return None if asked is None or isinstance(asked, Grammar) else self._entry(asked)

    def _entry(self, asked: dict[str, Any]) -> Compiling:
        key = json.dumps(asked)
        with self._entries:
            entry = self._known.get(key)
            if entry is None:
                entry = self._known[key] = Compiling()
                self._pool.submit(self._compile, key, ref(entry), asked)
            if entry.future.done():
                self._keep(key, entry)
        return entry

    def _keep(self, key: str, entry: Compiling) -> None:
        """Keep the `_CACHED` entries that were asked for last; requests hold the others."""
        self._recent[key] = entry
        self._recent.move_to_end(key)
        while len(self._recent) > _CACHED:
            self._recent.popitem(last=False)

    def wait(self, several: Iterable[Any]) -> list[Compiling]:
        """Wait until all are compiled or out of time. Call it before taking a turn of the engine,
        in which other threads wait, and keep the result until that turn is over: see `begin`."""
        found = [entry for asked in several if (entry := self.begin(asked))]
        for entry in found:
            while (left := self.seconds_left(entry)) > 0:
                wait([entry.future], left)
        return found

    def seconds_left(self, entry: Compiling) -> float:
        """How long to wait for it; 0 once it is done. While it is queued, its time starts anew
        whenever another compilation begins."""
        since = entry.since if entry.has_begun else max(entry.since, self._last_began)
        left = since + COMPILE_SECONDS - time.monotonic()
        return 0.0 if entry.future.done() else left

    def compiled(self, asked: Any) -> Grammar | None:
        """The compiled `structured_outputs`, without waiting.

        Raises:
            RequestError: it cannot be compiled, or was not compiled in time (`seconds_left`).
        """
        if asked is None or isinstance(asked, Grammar):
            return asked
        entry = self._entry(asked)
        if not entry.future.done():
            raise _refused(asked, f"compiled within {COMPILE_SECONDS:g} s")
        found = entry.future.result()
        if isinstance(found, RequestError):
            raise RequestError(found.field, found.value, found.bound, found.remedy)
        return found

    def _compile(self, key: str, waiting: ref[Compiling], asked: dict[str, Any]) -> None:
        """Compile, in a thread of the pool. Errors are results, so that each request raises one."""
        entry = waiting()
        if entry is None:
            return
        self._last_began = entry.since = time.monotonic()
        entry.has_begun = True
        try:
            with self._loading:
                if self._native is None:
                    self._native = self._load(asked)
            tokens, executor = self._native
            found: Grammar | RequestError = _compile(asked, tokens, executor)
        except RequestError as error:
            found = error
        except Exception as error:
            found = _refused(asked, str(error))
        entry.future.set_result(found)
        with self._entries:
            self._keep(key, entry)

    def _load(self, asked: dict[str, Any]) -> tuple[LLTokenizer, LLExecutor]:
        try:
            from llguidance import LLExecutor
            from llguidance.hf import from_tokenizer
        except ImportError:
            remedy = "Install the package `llguidance`: pip install 'foretoken[serve]'."
            raise RequestError(FIELD, asked, "left out: `llguidance` is missing", remedy) from None
        tokenizer = self._tokenizer
        if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
            bound = "left out: this checkpoint has no tokenizer that the package `tokenizers` reads"
            raise RequestError(FIELD, asked, bound, "Add a `tokenizer.json` to the checkpoint.")
        if not self._eos_ids:
            bound = "left out: this checkpoint names no end-of-text token"
            raise RequestError(FIELD, asked, bound, "Set `eos_token_id` in its config.json.")
        most = max(self._vocab_size, tokenizer.backend_tokenizer.get_vocab_size())
        tokens = from_tokenizer(tokenizer, n_vocab=most, eos_token=sorted(self._eos_ids))
        return tokens, LLExecutor()


def _compile(asked: dict[str, Any], tokens: LLTokenizer, executor: LLExecutor) -> Grammar:
    from llguidance import LLMatcher

    [(kind, value)] = asked.items()
    if kind == "regex":
        text = LLMatcher.grammar_from_regex(value)
    elif kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
        text = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    elif kind == "grammar":
        text = LLMatcher.grammar_from_lark(_as_lark(asked, value))
    else:
        schema = value if kind == "json" else as_text(kind, ANY_OBJECT)
        text = LLMatcher.grammar_from_json_schema(schema)
    start = LLMatcher(tokens, text, log_level=0, limits=_limits())
    if not start.is_error():
        start.compute_bitmask()  # only this finds some grammars too complex, or without any match
    if start.is_error():
        raise _refused(asked, start.get_error())
    return Grammar(asked, start, executor, tokens.vocab_size)


def _as_lark(asked: dict[str, Any], text: str) -> str:
    """A grammar in Lark; llama.cpp's GBNF (`root ::= ...`) is translated."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if "::=" not in text or is_lark_syntax(text):
        return text
    if len(text) > _MOST_GBNF:
        raise _refused(asked, f"at most {_MOST_GBNF} characters of GBNF; Lark may be longer")
    try:
        return gbnf_to_lark(_GBNF_PARTS.sub(_written_out, text))
    except Exception as error:  # the translation raises errors of any type
        raise _refused(asked, f"GBNF: {error}; or write Lark, which begins with `start:`") from None


def _written_out(found: re.Match[str]) -> str:
    """A part of GBNF with characters written so that both the translation and Lark accept them.

    The translation loses zeros of escapes, makes `.` exclude line ends, and leaves sequences in a
    class that are special only in regular expressions, such as `&&`.
    """
    part = found[0]
    if part.startswith("#"):
        return part
    part = f"[\\x00-{chr(0x10FFFF)}]" if part == "." else part
    first = 2 if part.startswith("[^") else 1
    last = max(first, len(part) - 1)

    def write(one: re.Match[str]) -> str:
        return "-".join(_written_character(c) for c in one.groups() if c)

    return part[:first] + _GBNF_RANGE.sub(write, part[first:last]) + part[last:]


def _written_character(given: str) -> str:
    """A GBNF character, perhaps escaped; ValueError for an escape that is no character."""
    char: str | None = given
    if len(given) > 2:
        code = int(given[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{given} is no character")
        char = chr(code)
    elif len(given) == 2:
        char = _GBNF_ESCAPES.get(given[1])
    if char is None:  # an unknown escape, which the translation refuses
        return given
    is_plain = char.isalnum() or char == " " or char > "\x7f"
    return char if is_plain else f"\\x{ord(char):02x}"


def _refused(asked: dict[str, Any], reason: str) -> RequestError:
    """The error of the request that brought a grammar, with llguidance's reason."""
    [(kind, value)] = asked.items()
    reason = reason.removesuffix("\n<non-verbose/>").strip()
    return RequestError(f"{FIELD}.{kind}", value, f"a grammar that can be served: {reason}")
