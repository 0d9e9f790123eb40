"""Grammars that outputs must match. llguidance compiles each grammar once. No torch.

All code that uses llguidance is here. Grammars are compiled in separate threads, never in a step,
and within limits. An error of llguidance becomes an error of the request that has the grammar.

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
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Array = NDArray[Any]

COMPILE_SECONDS = 10.0
"""Limit for compiling one grammar, without its time in the queue. A grammar of the largest allowed
size compiles in 0.3 s."""

_MAX_GBNF = 2**15
"""Limit of a GBNF grammar's characters. Translating so many takes at most 1 s; the time is
quadratic in the number of rules."""
_GBNF_PARTS = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^]\\])*]?|\.', re.DOTALL)
"""Comments, literals, character classes, `.`. An unclosed literal or class reaches to the end."""
_GBNF_CHARACTER = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
_GBNF_RANGE = re.compile(rf"({_GBNF_CHARACTER})(?:-({_GBNF_CHARACTER}))?", re.DOTALL)
_GBNF_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{c: c for c in '"\\[]'}}
_THREADS = 2  # llguidance releases Python's lock, so a slow grammar does not delay a fast one
_CACHED = 128  # compiled grammars that an engine keeps although no request uses them


class Grammar:
    """A grammar compiled for one engine's tokens: `structured_outputs` of an admitted request.

    source: the `structured_outputs` that the grammar was compiled from.
    num_tokens: number of token ids that the masks cover; larger ids are not the tokenizer's.
    """

    def __init__(
        self, source: dict[str, Any], start: LLMatcher, executor: LLExecutor, num_tokens: int
    ) -> None:
        self.source, self.num_tokens, self.executor = source, num_tokens, executor
        self._start = start

    def __repr__(self) -> str:
        return repr(self.source)

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        return Matcher(self, self._start.deep_copy())


class Matcher:
    """The state of one output in its grammar."""

    def __init__(self, grammar: Grammar, state: LLMatcher) -> None:
        self.grammar, self.state = grammar, state
        self._num_ahead = 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Advance over emitted tokens, except those after the end of the grammar; `RequestError` if
        the grammar does not allow a token or is too complex."""
        self.rewind()
        num_consumed = self.state.try_consume_tokens([*token_ids])
        if num_consumed < len(token_ids) and not self.is_finished:
            self.check()
            bound = f"a grammar that allows the drawn token {token_ids[num_consumed]} here"
            raise RequestError(FIELD, self.grammar, bound)

    def advance(self, drafts: Sequence[int]) -> None:
        """Advance over all drafts after the last emitted token; `rewind` goes back."""
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

    def forced_tokens(self) -> list[int]:
        """The tokens that must follow; empty if the grammar leaves a choice."""
        return self.state.compute_ff_tokens()

    def check(self) -> None:
        """Raise `RequestError` if llguidance has failed. The matcher is then unusable."""
        if self.state.is_error():
            raise _grammar_error(self.grammar.source, self.state.get_error())


def fill_masks(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], num_words: int
) -> list[Array]:
    """Masks of allowed tokens, int32 [drafts + 1, W] for each matcher. A matcher may fail here: see
    `Matcher.check`.

    Row j assumes that the drafts before it were accepted. A forbidden draft is always rejected,
    since its p is 0; the rows after it are unused and allow every token. The forbidden draft itself
    is not dropped: dropping a draft because of its token would bias the output.
    """
    if not matchers:  # return before the import, since llguidance may be missing
        return []
    from llguidance import numpy as native

    grammar = matchers[0].grammar
    for matcher in matchers:
        matcher.rewind()
    # The first row of each matcher, then the total number of rows.
    first_rows = np.cumsum([0, *(len(token_ids) + 1 for token_ids in drafts)]).tolist()
    mask_NW = np.full((first_rows[-1], -(-grammar.num_tokens // 32)), -1, dtype=np.int32)
    with_drafts: list[tuple[LLMatcher, int, list[int]]] = []
    without_drafts: list[tuple[LLMatcher, int]] = []
    for matcher, row, token_ids in zip(matchers, first_rows, drafts, strict=False):
        unknown = (i for i, token in enumerate(token_ids) if not 0 <= token < grammar.num_tokens)
        known_ids = [*token_ids[: next(unknown, len(token_ids))]]
        if known_ids:
            with_drafts.append((matcher.state, row, known_ids))
        else:  # the first call below refuses an empty list
            without_drafts.append((matcher.state, row))
    if with_drafts:
        native.fill_next_token_bitmask_par_with_draft_tokens(grammar.executor, with_drafts, mask_NW)
    if without_drafts:
        native.fill_next_token_bitmask_par(grammar.executor, without_drafts, mask_NW)
    return np.split(mask_NW[:, :num_words], first_rows[1:-1])


def fill_ahead(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], num_words: int
) -> Array:
    """Masks of the tokens that each matcher allows after its drafts, int32 [G, W], G >= 1.

    A drafter calls `fill_ahead` once for each draft, and each call fills one mask per matcher.
    `fill_masks` would fill the masks of all earlier drafts again: 15 masks for 5 drafts, not 5.
    """
    from llguidance import numpy as native

    grammar = matchers[0].grammar
    for matcher, token_ids in zip(matchers, drafts, strict=True):
        matcher.advance(token_ids)
    mask_GW = np.full((len(matchers), -(-grammar.num_tokens // 32)), -1, dtype=np.int32)
    states = [(matcher.state, g) for g, matcher in enumerate(matchers)]
    native.fill_next_token_bitmask_par(grammar.executor, states, mask_GW)
    return mask_GW[:, :num_words].copy()


class Compilation:
    """The compilation of one grammar: queued, running or done.

    start_time: when it was queued; once it `has_begun`, when it began (`time.monotonic`).
    future: the compiled grammar, or the error.
    """

    def __init__(self) -> None:
        self.start_time, self.has_begun = time.monotonic(), False
        self.future = Future[Grammar | RequestError]()


class Compilers:
    """Daemon threads that run submitted work in order."""

    def __init__(self) -> None:
        self._submitted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_threads = 0
        finalize(self, _end_threads, self._submitted)

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        """Run `work(*args)`, which must not raise, later in one of the threads. Only one thread may
        call `submit` at a time."""
        if self._num_threads < _THREADS:
            self._num_threads += 1
            name, thread_args = "foretoken-grammar", (self._submitted,)
            Thread(target=_run_submitted, args=thread_args, name=name, daemon=True).start()
        self._submitted.put(partial(work, *args))


def _run_submitted(submitted: SimpleQueue[Callable[[], None] | None]) -> None:
    while work := submitted.get():
        work()
        del work  # an idle thread must not keep a grammar alive


def _end_threads(submitted: SimpleQueue[Callable[[], None] | None]) -> None:
    for _ in range(_THREADS):
        submitted.put(None)


class Grammars:
    """Compiles the grammars of one engine's requests. Any thread may call the methods.

    Args:
        vocab_size: number of the model's token ids; the tokenizer may have fewer.
        eos_ids: tokens that end a text, allowed where the grammar may end.
        seconds: limit for compiling one grammar; None: `COMPILE_SECONDS`.
        most_kept: number of compiled grammars that are kept although no request uses them.
        compilers: the threads that compile; None: new threads.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        seconds: float | None = None,
        most_kept: int = _CACHED,
        compilers: Compilers | None = None,
    ) -> None:
        self._given_seconds, self._most_kept = seconds, most_kept
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._compilers = compilers or Compilers()
        self._known = WeakValueDictionary[str, Compilation]()  # by JSON of `structured_outputs`
        self._recent = OrderedDict[str, Compilation]()  # strong references, the latest last
        self._last_start = 0.0  # when the latest compilation began
        self._entries_lock, self._native_lock = Lock(), Lock()
        self._native: tuple[LLTokenizer, LLExecutor] | None = None

    @property
    def seconds(self) -> float:
        return COMPILE_SECONDS if self._given_seconds is None else self._given_seconds

    def build(self, outputs: dict[str, Any], tokens: LLTokenizer, executor: LLExecutor) -> Grammar:
        return _compile(outputs, tokens, executor)

    def begin(self, outputs: Any) -> Compilation | None:
        """Begin to compile `structured_outputs` in the background, unless that was done before.

        Returns the compilation; None if `outputs` is None or a compiled grammar. While a caller
        keeps the result, the grammar is not compiled again. A compilation that no caller keeps when
        it reaches the head of the queue is dropped.
        """
        if outputs is None or isinstance(outputs, Grammar):
            return None
        key = json.dumps(outputs)
        with self._entries_lock:
            entry = self._known.get(key)
            if entry is None:
                entry = self._known[key] = Compilation()
                self._compilers.submit(self._compile, key, ref(entry), outputs)
            if entry.future.done():
                self._keep(key, entry)
        return entry

    def _keep(self, key: str, entry: Compilation) -> None:
        """Keep the entry among the `most_kept` latest; older ones live while requests use them."""
        self._recent[key] = entry
        self._recent.move_to_end(key)
        while len(self._recent) > self._most_kept:
            self._recent.popitem(last=False)

    def wait(self, outputs: Iterable[Any]) -> list[Compilation]:
        """Wait until each of several `structured_outputs` is compiled or has run out of time.

        Call it before a turn of the engine, since other threads wait during a turn. Keep the result
        until the turn is over, as in `begin`.
        """
        entries = [entry for value in outputs if (entry := self.begin(value))]
        for entry in entries:
            while (seconds := self.seconds_left(entry)) > 0:
                wait([entry.future], seconds)
        return entries

    def seconds_left(self, entry: Compilation) -> float:
        """The seconds that a compilation may still take, 0 once it is done. A queued one gets its
        full time again whenever another compilation begins."""
        start = entry.start_time if entry.has_begun else max(entry.start_time, self._last_start)
        seconds = start + self.seconds - time.monotonic()
        return 0.0 if entry.future.done() else seconds

    def compiled(self, outputs: Any) -> Grammar | None:
        """The compiled grammar of `structured_outputs`, without waiting; `RequestError` if it could
        not be compiled, or not in time (`seconds_left`)."""
        if (entry := self.begin(outputs)) is None:
            grammar: Grammar | None = outputs
            return grammar
        if not entry.future.done():
            raise _grammar_error(outputs, f"compiled within {self.seconds:g} s")
        result = entry.future.result()
        if isinstance(result, RequestError):  # a new error for each request
            raise RequestError(result.field, result.value, result.bound, result.remedy)
        return result

    def _compile(self, key: str, entry_ref: ref[Compilation], outputs: dict[str, Any]) -> None:
        """Compile in a thread of `compilers`. The entry's future gets the grammar, or the error."""
        entry = entry_ref()
        if entry is None:  # no caller keeps the compilation
            return
        self._last_start = entry.start_time = time.monotonic()
        entry.has_begun = True
        try:
            with self._native_lock:
                if self._native is None:
                    self._native = self._load(outputs)
            tokens, executor = self._native
            result: Grammar | RequestError = self.build(outputs, tokens, executor)
        except RequestError as error:
            result = error
        except Exception as error:
            result = _grammar_error(outputs, str(error))
        entry.future.set_result(result)
        with self._entries_lock:
            self._keep(key, entry)

    def _load(self, outputs: dict[str, Any]) -> tuple[LLTokenizer, LLExecutor]:
        """llguidance's form of the tokenizer, and the threads in which it fills masks;
        `RequestError` if llguidance, a tokenizer or an end-of-text token is missing."""
        try:
            from llguidance import LLExecutor
            from llguidance.hf import from_tokenizer
        except ImportError:
            bound = "left out: `llguidance` is missing"
            remedy = "Install the package `llguidance`: pip install 'foretoken[serve]'."
            raise RequestError(FIELD, outputs, bound, remedy) from None
        tokenizer = self._tokenizer
        if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
            bound = "left out: this checkpoint has no tokenizer of the package `tokenizers`"
            raise RequestError(FIELD, outputs, bound, "Add a `tokenizer.json` to the checkpoint.")
        if not self._eos_ids:
            bound = "left out: this checkpoint names no end-of-text token"
            raise RequestError(FIELD, outputs, bound, "Set `eos_token_id` in its config.json.")
        num_ids = max(self._vocab_size, tokenizer.backend_tokenizer.get_vocab_size())
        tokens = from_tokenizer(tokenizer, n_vocab=num_ids, eos_token=sorted(self._eos_ids))
        return tokens, LLExecutor()


def _compile(outputs: dict[str, Any], tokens: LLTokenizer, executor: LLExecutor) -> Grammar:
    """Compile checked `structured_outputs`; `RequestError` if llguidance refuses them."""
    from llguidance import LLMatcher, LLParserLimits

    [(key, value)] = outputs.items()
    if key == "regex":
        text = LLMatcher.grammar_from_regex(value)
    elif key == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
        text = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    elif key == "grammar":
        text = LLMatcher.grammar_from_lark(_as_lark(outputs, value))
    else:
        schema = value if key == "json" else as_text(key, ANY_OBJECT)
        text = LLMatcher.grammar_from_json_schema(schema)
    # With llguidance's own, looser limits, hostile grammars made steps long or memory grow. A mask
    # may take 100 000 units of lexer fuel (7 ms by llguidance's figures) and 20 000 items (1 ms), a
    # matcher 16 384 lexer states (32 MB).
    limits = LLParserLimits(
        step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=16_384,
        max_grammar_size=200_000, verbose_errors=False,
    )  # fmt: skip
    start = LLMatcher(tokens, text, log_level=0, limits=limits)
    if not start.is_error():
        # Some grammars that are too complex, or match no text, fail only at their first mask.
        start.compute_bitmask()
    if start.is_error():
        raise _grammar_error(outputs, start.get_error())
    return Grammar(outputs, start, executor, tokens.vocab_size)


def _as_lark(outputs: dict[str, Any], text: str) -> str:
    """The grammar `text` in Lark; llama.cpp's GBNF (`root ::= ...`) is translated."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if "::=" not in text or is_lark_syntax(text):
        return text
    if len(text) > _MAX_GBNF:
        raise _grammar_error(outputs, f"at most {_MAX_GBNF} characters of GBNF; Lark may be longer")
    try:
        return gbnf_to_lark(_GBNF_PARTS.sub(_rewrite_part, text))
    except Exception as error:  # the translation raises errors of any type
        reason = f"no translation of GBNF: {error}; or write Lark, which begins with `start:`"
        raise _grammar_error(outputs, reason) from None


def _rewrite_part(match: re.Match[str]) -> str:
    """Rewrite a comment, literal, class or `.` of GBNF so that `gbnf_to_lark` keeps its meaning.

    Otherwise the translation drops zeros of escapes, makes `.` exclude line ends, and keeps
    sequences in classes that are special only in regular expressions, such as `&&`.
    """
    part = match[0]
    if part.startswith("#"):
        return part
    part = f"[\\x00-{chr(0x10FFFF)}]" if part == "." else part
    first = 2 if part.startswith("[^") else 1  # after the opening quote or bracket
    last = max(first, len(part) - 1)

    def rewrite_range(ends: re.Match[str]) -> str:
        return "-".join(_rewrite_character(end) for end in ends.groups() if end)

    return part[:first] + _GBNF_RANGE.sub(rewrite_range, part[first:last]) + part[last:]


def _rewrite_character(text: str) -> str:
    """A GBNF character or escape as Lark reads it; `ValueError` if an escape is no character."""
    char: str | None = text
    if len(text) > 2:
        code = int(text[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{text} is no character")
        char = chr(code)
    elif len(text) == 2:
        char = _GBNF_ESCAPES.get(text[1])
    if char is None:  # an unknown escape: `gbnf_to_lark` raises an error
        return text
    needs_no_escape = char.isalnum() or char == " " or char > "\x7f"
    return char if needs_no_escape else f"\\x{ord(char):02x}"


def _grammar_error(outputs: dict[str, Any], reason: str) -> RequestError:
    [(key, value)] = outputs.items()
    reason = reason.removesuffix("\n<non-verbose/>").strip()
    return RequestError(f"{FIELD}.{key}", value, f"a grammar that can be served: {reason}")
