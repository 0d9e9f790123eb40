"""Grammars that outputs must match, by llguidance: compiled once, one matcher per sample. No torch.

Charter: all that knows llguidance. Compiling is done in a thread of its own, never in a step, and
within limits; an error of llguidance is one of the request that brought the grammar.

Shape suffixes: N rows of masks, G matchers, W words of 32 bits.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import RequestError
from foretoken.sampling.structured import FIELD

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

Array = NDArray[Any]

COMPILE_SECONDS = 10.0
"""From when a grammar was asked for; what is within the limits below takes 0.3 s."""

_CACHED = 128  # grammars of an engine


def _limits() -> LLParserLimits:
    """Tighter than llguidance's own where hostile ones made a step long or memory grow.

    A mask may take 100 000 units of lexer fuel (7 ms by llguidance's figures) and 20 000 items
    (1 ms); 16 384 states are 32 MB of a matcher.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=16_384,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


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


class Grammars:
    """Compiles what requests of one engine ask for; any thread may call it.

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer.
        eos_ids: what ends a text, where the grammar may end.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foretoken-grammar")
        self._compiled = OrderedDict[str, tuple[float, Future[Grammar | RequestError]]]()
        self._native: tuple[LLTokenizer, LLExecutor] | None = None

    def begin(self, asked: Any) -> Future[Grammar | RequestError] | None:
        """Compile in the background, unless that was done; None: nothing is to be compiled."""
        return None if asked is None or isinstance(asked, Grammar) else self._begun(asked)[1]

    def wait(self, several: Iterable[Any]) -> None:
        """Have them compiled, or as much of it as there is time for: before a turn of the engine,
        in which others wait, begins."""
        wait([future for asked in several if (future := self.begin(asked))], COMPILE_SECONDS)

    def compiled(self, asked: Any) -> Grammar | None:
        """What `structured_outputs` becomes; waits until it is compiled.

        Raises:
            RequestError: it cannot be compiled, or was not within `COMPILE_SECONDS` of `begin`.
        """
        if asked is None or isinstance(asked, Grammar):
            return asked
        deadline, future = self._begun(asked)
        try:
            found = future.result(max(deadline - time.monotonic(), 0))
        except FutureTimeout:
            raise _refused(asked, f"compiled within {COMPILE_SECONDS:g} s") from None
        if isinstance(found, RequestError):
            raise RequestError(found.field, found.value, found.bound, found.remedy)
        return found

    def _begun(self, asked: dict[str, Any]) -> tuple[float, Future[Grammar | RequestError]]:
        key = json.dumps(asked)
        entry = self._compiled.pop(key, None)
        if entry is None:
            deadline = time.monotonic() + COMPILE_SECONDS
            entry = deadline, self._pool.submit(self._compile, asked)
        self._compiled[key] = entry
        while len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        return entry

    def _compile(self, asked: dict[str, Any]) -> Grammar | RequestError:
        """In the pool's thread; errors are values, so that each request raises its own."""
        try:
            if self._native is None:
                self._native = self._load(asked)
            tokens, executor = self._native
            return _compile(asked, tokens, executor)
        except RequestError as error:
            return error
        except Exception as error:
            return _refused(asked, str(error))

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
        text = LLMatcher.grammar_from_lark(value)
    else:
        schema = value if kind == "json" else '{"type": "object"}'
        text = LLMatcher.grammar_from_json_schema(schema)
    start = LLMatcher(tokens, text, log_level=0, limits=_limits())
    if not start.is_error():
        start.compute_bitmask()  # some are found to be too complex, or to match nothing, only here
    if start.is_error():
        raise _refused(asked, start.get_error())
    return Grammar(asked, start, executor, tokens.vocab_size)


def _refused(asked: dict[str, Any], reason: str) -> RequestError:
    """The error of the request that brought a grammar; llguidance says what and where."""
    [(kind, value)] = asked.items()
    reason = reason.removesuffix("\n<non-verbose/>").strip()
    return RequestError(f"{FIELD}.{kind}", value, f"a grammar that can be served: {reason}")
