"""Grammars that outputs must match, by llguidance: compiled once, one matcher per sample. No torch.

Charter: all that knows llguidance. Compiling is done in a thread of its own, never in a step, and
within limits; an error of llguidance is one of the request that brought the grammar.

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
"""For one grammar, waiting for others not counted; what is within the limits below takes 0.3 s."""

_MOST_GBNF = 2**15
"""Characters: translating takes the square of the number of rules, 1 s for these at worst."""
_GBNF_PARTS = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^]\\])*]?|\.', re.DOTALL)
"""Comments, literals, classes, and the sign for any character; to the end where one is open."""
_GBNF_CHARACTER = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
_GBNF_RANGE = re.compile(rf"({_GBNF_CHARACTER})(?:-({_GBNF_CHARACTER}))?", re.DOTALL)
_GBNF_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{c: c for c in '"\\[]'}}
_THREADS = 2  # llguidance lets go of Python's lock: a slow grammar holds up no quick one
_CACHED = 128  # grammars of an engine beyond those that somebody waits for


def _limits() -> LLParserLimits:
    """Tighter than llguidance's own where hostile ones made a step long or memory grow.

    A mask may take 100 000 units of lexer fuel (7 ms by llguidance's figures) and 20 000 items
    (1 ms); 16 384 states are 32 MB of a matcher.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=16_384,
        max_grammar_size=200_000, verbose_errors=False,
    )  # fmt: skip


class Grammar:
    """A grammar compiled for one engine's tokens; what a request's `structured_outputs` becomes.

    Attributes:
        asked: what it was made from.
        num_tokens: ids at or past it are none of the tokenizer's.
    """

    def __init__(
        self, asked: dict[str, Any], start: LLMatcher, executor: LLExecutor, num_tokens: int
    ) -> None:
        self.asked, self.num_tokens, self.executor = asked, num_tokens, executor
        self._start = start

    def __repr__(self) -> str:
        return repr(self.asked)

    def matcher(self) -> Matcher:
        """One at the beginning of an output."""
        return Matcher(self, self._start.deep_copy())


class Matcher:
    """How far one output has come in its grammar."""

    def __init__(self, grammar: Grammar, state: LLMatcher) -> None:
        self.grammar, self.state = grammar, state
        self._num_ahead = 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in what was emitted; what follows the end of the grammar is not looked at.

        Raises:
            RequestError: the grammar does not allow it, or is too complex there.
        """
        self.rewind()
        taken = self.state.try_consume_tokens([*token_ids])
        if taken < len(token_ids) and not self.is_finished:
            self.check()
            bound = f"such that token {token_ids[taken]} may follow here"
            raise RequestError(FIELD, self.grammar, bound)

    def advance(self, drafts: Sequence[int]) -> None:
        """Go behind drafts that begin with those of the last call, until `rewind`."""
        self._num_ahead += self.state.try_consume_tokens([*drafts[self._num_ahead :]])

    def rewind(self) -> None:
        """Go back to what was emitted."""
        if self._num_ahead:
            self.state.rollback(self._num_ahead)
            self._num_ahead = 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but the end of text."""
        return self.state.is_stopped() and not self.state.is_error()

    def forced(self) -> list[int]:
        """Tokens that must follow; none where there is a choice."""
        return self.state.compute_ff_tokens()

    def check(self) -> None:
        """Raise `RequestError` if it has failed: it can say nothing any more."""
        if self.state.is_error():
            raise _refused(self.grammar.asked, self.state.get_error())


def fill_masks(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], num_words: int
) -> list[Array]:
    """int32 [drafts + 1, W] of each matcher: the tokens that may stand at and behind its drafts.

    Row j is as if the drafts before it were accepted. Nothing comes behind a draft that is not
    allowed, since its p is 0, so rows there allow every token; the draft itself stays: dropping it
    for what it is would bias the output. All masks are filled in parallel by one native call, and
    one more for matchers without drafts, which that one does not take. A matcher may have failed
    then: see `Matcher.check`.
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
    """int32 [G, W], the tokens that may stand behind the drafts so far of G matchers, one or more.

    One mask for each, where `fill_masks` would fill those of every draft before it once more: of
    5 drafts 5, not 15.
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
    """A grammar that somebody asked for.

    Attributes:
        since: when it was asked for, and then when its turn came.
    """

    def __init__(self) -> None:
        self.since, self.has_begun = time.monotonic(), False
        self.future = Future[Grammar | RequestError]()


class Compilers:
    """Threads that do what is submitted, in this order; none keeps the process from ending."""

    def __init__(self) -> None:
        self._submitted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_threads = 0
        finalize(self, _let_go, self._submitted)

    def submit(self, work: Callable[..., None], *given: Any) -> None:
        """One thread at a time calls this; the work must not raise."""
        if self._num_threads < _THREADS:
            self._num_threads += 1
            name, given_to = "foretoken-grammar", (self._submitted,)
            Thread(target=_do, args=given_to, name=name, daemon=True).start()
        self._submitted.put(partial(work, *given))


def _do(submitted: SimpleQueue[Callable[[], None] | None]) -> None:
    while work := submitted.get():
        work()
        del work  # while it waits, it keeps no grammar


def _let_go(submitted: SimpleQueue[Callable[[], None] | None]) -> None:
    for _ in range(_THREADS):
        submitted.put(None)


class Grammars:
    """Compiles what requests of one engine ask for; any thread may call it.

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer.
        eos_ids: what ends a text, where the grammar may end.
        seconds: limit for compiling one grammar; None: `COMPILE_SECONDS`.
        most_kept: compiled grammars that are kept, besides those that a request waits for.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        seconds: float | None = None,
        most_kept: int = _CACHED,
    ) -> None:
        self._given_seconds, self._most_kept = seconds, most_kept
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._pool = Compilers()
        self._known = WeakValueDictionary[str, Compiling]()
        self._recent = OrderedDict[str, Compiling]()
        self._last_began = 0.0
        self._entries, self._loading = Lock(), Lock()
        self._native: tuple[LLTokenizer, LLExecutor] | None = None

    @property
    def seconds(self) -> float:
        """Limit for compiling one grammar."""
        return COMPILE_SECONDS if self._given_seconds is None else self._given_seconds

    def build(self, asked: dict[str, Any], tokens: LLTokenizer, executor: LLExecutor) -> Grammar:
        """Compile a grammar in a thread of the pool; an exception refuses the grammar."""
        return _compile(asked, tokens, executor)

    def begin(self, asked: Any) -> Compiling | None:
        """Compile in the background, unless that was done; None: nothing is to be compiled.

        As long as what it returns is kept, the grammar is not compiled again; if nobody keeps it
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
        """Keep what is compiled, as much as was asked for last; others are their requests'."""
        self._recent[key] = entry
        self._recent.move_to_end(key)
        while len(self._recent) > self._most_kept:
            self._recent.popitem(last=False)

    def wait(self, several: Iterable[Any]) -> list[Compiling]:
        """Have them compiled, or as much of it as there is time for: before a turn of the engine,
        in which others wait, begins. To be kept until that is over, see `begin`."""
        found = [entry for asked in several if (entry := self.begin(asked))]
        for entry in found:
            while (left := self.seconds_left(entry)) > 0:
                wait([entry.future], left)
        return found

    def seconds_left(self, entry: Compiling) -> float:
        """How long to wait for it; 0 once it is there. Behind others it has as long as they do."""
        since = entry.since if entry.has_begun else max(entry.since, self._last_began)
        left = since + self.seconds - time.monotonic()
        return 0.0 if entry.future.done() else left

    def compiled(self, asked: Any) -> Grammar | None:
        """What `structured_outputs` becomes; it does not wait.

        Raises:
            RequestError: it cannot be compiled, or was not in the time that `seconds_left` gives.
        """
        if asked is None or isinstance(asked, Grammar):
            return asked
        entry = self._entry(asked)
        if not entry.future.done():
            raise _refused(asked, f"compiled within {self.seconds:g} s")
        found = entry.future.result()
        if isinstance(found, RequestError):
            raise RequestError(found.field, found.value, found.bound, found.remedy)
        return found

    def _compile(self, key: str, waiting: ref[Compiling], asked: dict[str, Any]) -> None:
        """In a thread of the pool; errors are values, so that each request raises its own."""
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
            found: Grammar | RequestError = self.build(asked, tokens, executor)
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
        start.compute_bitmask()  # some are found to be too complex, or to match nothing, only here
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
    except Exception as error:  # of any type
        raise _refused(asked, f"GBNF: {error}; or write Lark, which begins with `start:`") from None


def _written_out(found: re.Match[str]) -> str:
    """A part of GBNF with its characters as both the translation and Lark take them.

    The translation loses zeros of escapes, has `.` stop at line ends, and leaves in a class what
    means something there to regular expressions alone, as `&&`.
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
    """One of GBNF, perhaps escaped; raises ValueError where an escape stands for none."""
    char: str | None = given
    if len(given) > 2:
        code = int(given[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{given} is no character")
        char = chr(code)
    elif len(given) == 2:
        char = _GBNF_ESCAPES.get(given[1])
    if char is None:  # which the translation refuses
        return given
    is_plain = char.isalnum() or char == " " or char > "\x7f"
    return char if is_plain else f"\\x{ord(char):02x}"


def _refused(asked: dict[str, Any], reason: str) -> RequestError:
    """The error of the request that brought a grammar; llguidance says what and where."""
    [(kind, value)] = asked.items()
    reason = reason.removesuffix("\n<non-verbose/>").strip()
    return RequestError(f"{FIELD}.{kind}", value, f"a grammar that can be served: {reason}")
