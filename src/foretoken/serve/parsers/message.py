"""Reasoning and tool calls in an answer's text.

A part is reported only when it is certain, so that events do not depend on how tokens were split
into deltas. Text that is not a valid call of a known function is reported unchanged; therefore a
call is reported only when its JSON is complete. One exception: if `max_tokens` ends the answer
within a call, the incomplete call is reported if the function's name is complete. Under a grammar
this exception holds for any end within a call; if the grammar allows only calls, text that remains
at the end is not reported.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foretoken.outputs import CompletionDelta
from foretoken.serve.parsers.formats import END_THINK, THINK, CallFormat, MessageFormat

_NAME_BEFORE_JSON = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_MAX_NAME = 256  # characters of a name and an id before the JSON
_CUT_CALL = re.compile(  # the name in a call's JSON, and the beginning of the arguments
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(\{.*))?',
    re.DOTALL,
)
_SEPARATORS = re.compile(r"[\s,:]*")
_EMPTY_FORMAT = CallFormat(opener="")
_NOT_A_CALL = (ValueError, TypeError, KeyError, RecursionError)  # raised by text that is no call
_JSON_MARKS = re.compile(r'[{}\[\]"\\<]')


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before the answer's content."""

    text: str


class ToolCall(NamedTuple):
    """A call of a tool, the `number`th of its choice; `arguments` are the JSON text of an object.

    If the answer ended within the call, `is_whole` is False, and `arguments` are incomplete.
    """

    number: int
    id: str
    name: str
    arguments: str
    is_whole: bool = True


def call_fields(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a chat's message, of a request or of an answer."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


Part = Content | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class Parsing:
    """Options of a parser of an answer's text.

    Attributes:
        names: the functions that can be called; (): calls are not looked for.
        has_reasoning: whether to look for reasoning.
        parallel: whether to read more than one call.
        hidden: texts of special tokens, which the parser removes from the text.
        only_calls: a grammar allows only calls.
        calls_or_text: a grammar allows calls or a text; an answer that begins as text has no calls.
        decode: returns the text of token ids as in the answer.
    """

    format: MessageFormat
    names: tuple[str, ...] = ()
    has_reasoning: bool = False
    parallel: bool = True
    hidden: tuple[str, ...] = ()
    only_calls: bool = False
    calls_or_text: bool = False
    decode: Callable[[list[int]], str] = field(default=lambda ids: "", compare=False)

    @classmethod
    def for_format(
        cls, form: MessageFormat, names: Sequence[str], *, has_reasoning: bool, parallel: bool
    ) -> Parsing:
        """Options for a model that writes in this format.

        If a mark is a special token, the engine must leave all special tokens in the text. `hidden`
        then has the special tokens that are no marks.
        """
        marks = [THINK, END_THINK] if has_reasoning else []
        if names and form.calls:
            marks += [form.calls.opener, form.calls.closer]
        hides = any(mark in form.special for mark in marks)
        hidden = tuple(text for text in form.special if text not in marks) if hides else ()
        return cls(form, tuple(names), has_reasoning, parallel, hidden)

    def new_parser(self, prompt: str) -> MessageParser:
        """A parser for one choice; the prompt may end with the mark that begins the reasoning."""
        in_reasoning = self.has_reasoning and prompt.rstrip().endswith(THINK)
        return MessageParser(self, in_reasoning=in_reasoning)


class PlainParser:
    """Has the interface of `MessageParser`, but reports all text as content."""

    num_reasoning = 0

    def feed(self, sample: CompletionDelta) -> Sequence[Part]:
        return (Content(sample.text),) if sample.text else ()


class MessageParser:
    """Reads the text of one choice; `_state` is the method that reads the next text.

    Such a method gets `is_last`: whether the answer ends with the text that has come. It returns
    True if `_state`, which it may have changed, shall read the rest of the text now.
    """

    def __init__(self, parsing: Parsing, *, in_reasoning: bool = False) -> None:
        self._parsing = parsing
        self._call_format = (parsing.format.calls if parsing.names else None) or _EMPTY_FORMAT
        self._state = MessageParser._read_reasoning if in_reasoning else MessageParser._read_space
        self._text = ""  # not yet reported
        self._parts: list[Part] = []
        self._num_calls = 0
        self._has_reasoned = False
        self._unreported_space = ""  # white space that is reported only if text follows
        self._scanner = _JsonScanner()
        self._text_marks = (*filter(None, (self._call_format.opener,)), *parsing.hidden)
        # The beginning of a call without a mark.
        self._bare_start = '{"name": "' if parsing.calls_or_text else "{"
        self._reasoning_marks = (END_THINK, *parsing.hidden)
        self.num_reasoning = 0  # tokens of the reasoning that has come, including its marks
        self._counter = _ReasoningCounter(parsing.decode) if parsing.has_reasoning else None

    def feed(self, sample: CompletionDelta) -> Sequence[Part]:
        """The parts that are certain after this delta; after the last delta, all other parts."""
        self._text += sample.text
        num_tokens = self._counter.add(sample) if self._counter else 0
        is_last = sample.finish_reason is not None
        has_grammar = self._parsing.only_calls or self._parsing.calls_or_text
        is_cut = is_last and (has_grammar or sample.finish_reason == "length")
        self._run_states(is_last and not is_cut)
        if is_cut:
            has_reported = self._report_cut_calls()
            if not has_reported and not (has_grammar and self._allows_only_calls()):
                self._run_states(is_last=True)
        if self._state is MessageParser._read_reasoning:
            self.num_reasoning = num_tokens
        elif self._state is MessageParser._read_text:
            self._counter = None
        parts, self._parts = join_parts(self._parts), []
        return parts

    def _run_states(self, is_last: bool) -> None:
        while self._state(self, is_last):
            pass

    def _allows_only_calls(self) -> bool:
        """Whether the grammar allows only calls: always, or since a call or its mark has begun."""
        if self._parsing.only_calls or self._state is MessageParser._read_text:
            return self._parsing.only_calls
        if self._num_calls or self._state is not MessageParser._read_space:
            return True
        return any(mark.startswith(self._text) for mark in self._text_marks if self._text)

    def _report_cut_calls(self) -> bool:
        """Report the calls in JSON that the answer's end cuts off; False if it reports no call."""
        scanner, in_call = self._scanner, self._state is MessageParser._read_call
        if not in_call or scanner.start is None or scanner.is_broken:
            return False
        text, calls = self._text[scanner.start :], list[tuple[str, str, bool]]()
        if scanner.name is not None:
            calls.append((scanner.name, text, False))
        else:
            items, rest = _json_items(text if text[0] == "[" else f"[{text}")
            with suppress(*_NOT_A_CALL):
                calls += [(*_read_call_object(item), True) for item in items]
                if match := _CUT_CALL.match(rest):
                    calls.append((json.loads(match[1]), match[2] or "", False))
        if not all(name in self._parsing.names for name, _, _ in calls):
            return False
        for name, arguments, is_whole in calls if self._parsing.parallel else calls[:1]:
            self._report_call(name, arguments, is_whole=is_whole)
        return bool(calls)

    def _report_call(self, name: str, arguments: str, *, is_whole: bool = True) -> None:
        call_id, length = f"call_{secrets.token_hex(12)}", self._call_format.id_length
        if length is not None:
            letters = string.ascii_letters + string.digits
            call_id = "".join(secrets.choice(letters) for _ in range(length))
        self._parts.append(ToolCall(self._num_calls, call_id, name, arguments, is_whole))
        self._num_calls += 1

    def _report(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._parts.append(kind(text))

    def _read_space(self, is_last: bool) -> bool:
        """Read white space before the answer, after the reasoning or after a call."""
        separators = ";" if self._call_format.is_bare and self._num_calls else ""
        rest = self._text.lstrip(string.whitespace + separators)
        marks = [*self._text_marks, *((THINK,) if self._can_reason else ())]
        marks += [self._bare_start] if self._call_format.is_bare else []
        if not is_last and any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        space, self._text = self._text[: len(self._text) - len(rest)], rest
        if not rest:
            if is_last and not (self._num_calls or self._has_reasoned):
                self._report(Content, self._unreported_space + space)
            else:
                self._unreported_space += space
            return False
        if self._can_reason and rest.startswith(THINK):
            self._text, self._state = rest[len(THINK) :], MessageParser._read_reasoning
        elif marks_here := [m for m in self._text_marks if m and rest.startswith(m)]:
            self._skip_mark(max(marks_here, key=len))
        elif self._call_format.is_bare and rest.startswith(self._bare_start):
            self._skip_mark("")
        else:
            self._state = MessageParser._read_text
            if not self._has_reasoned or self._num_calls:
                self._report(Content, self._unreported_space + space)
        self._unreported_space = ""
        return True

    @property
    def _can_reason(self) -> bool:
        return self._parsing.has_reasoning and not (self._has_reasoned or self._num_calls)

    def _skip_mark(self, mark: str) -> None:
        """Remove a hidden token; at any other mark, or at "" for no mark, begin to read a call."""
        if mark in self._parsing.hidden:
            self._text = self._text[len(mark) :]
            return
        self._state, self._scanner = MessageParser._read_call, _JsonScanner(mark)

    def _read_text(self, is_last: bool) -> bool:
        marks = self._parsing.hidden if self._parsing.calls_or_text else self._text_marks
        place, mark = _find_mark(self._text, marks, is_last)
        self._report(Content, self._text[:place])
        self._text = self._text[place:]
        if mark:
            self._skip_mark(mark)
        return bool(mark)

    def _read_reasoning(self, is_last: bool) -> bool:
        """Read reasoning, without the white space that the template puts around it."""
        place, mark = _find_mark(self._text, self._reasoning_marks, is_last)
        reasoning = self._text[:place].rstrip()
        self._report(Reasoning, reasoning if self._has_reasoned else reasoning.lstrip())
        self._has_reasoned = self._has_reasoned or bool(reasoning)
        if not mark:
            self._text = "" if is_last else self._text[len(reasoning) :]
            return False
        self._text = self._text[place + len(mark) :]
        if mark == END_THINK:
            if self._counter:
                self.num_reasoning = self._counter.count_until_mark(len(self._text))
                self._counter = None
            self._has_reasoned, self._state = True, MessageParser._read_space
        return True

    def _read_call(self, is_last: bool) -> bool:
        """Read the JSON of a call or of a list of calls; text that is no call becomes content."""
        scanner, call_format = self._scanner, self._call_format
        if scanner.start is None and not scanner.find_start(self._text, call_format, is_last):
            return False
        end = scanner.find_end(self._text)
        if end is None:
            if is_last:
                self._report_as_content(len(self._text))
            return False
        parsed = None
        if not scanner.is_broken:
            parsed = self._parse_calls(self._text[scanner.start : end], scanner.name)
        if parsed is None:
            self._report_as_content(end)
            return True
        self._text = self._text[end:]
        for name, arguments in parsed if self._parsing.parallel else parsed[:1]:
            self._report_call(name, arguments)
        parallel = self._parsing.parallel
        self._state = MessageParser._read_closer if parallel else MessageParser._drop_text
        return True

    def _report_as_content(self, end: int) -> None:
        self._report(Content, self._text[:end])
        self._text, self._state = self._text[end:], MessageParser._read_text

    def _parse_calls(self, text: str, name: str | None) -> list[tuple[str, str]] | None:
        """Names and arguments of the calls in a text; None unless all are calls of known functions.

        If `name` is given, the text is the arguments of this function.
        """
        try:
            json.loads(text, parse_constant=_refuse_constant)
            text.encode()  # a lone surrogate cannot be sent
            if name is not None:
                calls = [(name, text)] if text[0] == "{" else []
            else:
                items = _json_items(text)[0] if text[0] == "[" else [text]
                calls = [_read_call_object(item) for item in items]
        except _NOT_A_CALL:
            return None
        are_known = all(called in self._parsing.names for called, _ in calls)
        return calls if calls and are_known else None

    def _read_closer(self, is_last: bool) -> bool:
        """Skip the mark after a call, if there is one."""
        closer, rest = self._call_format.closer, self._text.lstrip()
        if closer and rest.startswith(closer):
            self._text = rest[len(closer) :]
        elif closer and closer.startswith(rest) and not is_last:
            return False
        self._state = MessageParser._read_space
        return True

    def _drop_text(self, is_last: bool) -> bool:
        self._text = ""
        return False


class _JsonScanner:
    """Finds a call's JSON in a growing text that begins with a mark; reads each character once.

    Attributes:
        name: the function's name, if it stands before the JSON.
        start: index of the JSON's first character; None: this character has not come.
        is_broken: whether the text cannot be a call.
    """

    def __init__(self, opener: str = "") -> None:
        self._opener = opener
        self.name: str | None = None
        self.start: int | None = None
        self.is_broken = False
        self._position = self._depth = 0
        self._in_string = False

    def find_start(self, text: str, call_format: CallFormat, is_last: bool) -> bool:
        """Find the start of the JSON; False if more text is needed."""
        after_mark = len(self._opener)
        rest = text[after_mark:].lstrip()
        start = len(text) - len(rest)
        if call_format.name_can_precede and rest and rest[0] not in "[{":
            start = text.find("{", after_mark, after_mark + _MAX_NAME)
            is_decided = start >= 0 or is_last or len(text) >= after_mark + _MAX_NAME
            if not is_decided:
                return False
            match = _NAME_BEFORE_JSON.fullmatch(text, after_mark, start) if start >= 0 else None
            self.name, self.is_broken = match and match[1], match is None
        elif not rest and not is_last:
            return False
        else:
            self.is_broken = not rest or rest[0] not in "[{"
        self.start = self._position = after_mark if self.is_broken else start
        return True

    def find_end(self, text: str) -> int | None:
        """The index after the JSON, or of a character that breaks it; None: not known yet."""
        if self.is_broken:
            return self._position
        while match := _JSON_MARKS.search(text, self._position):
            mark, self._position = match[0], match.end()
            if mark == "\\" and self._in_string:
                if self._position == len(text):
                    self._position -= 1  # the escaped character has not come yet
                    return None
                self._position += 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark in "<\\":
                self.is_broken, self._position = True, match.start()
                return self._position
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return self._position
        self._position = len(text)
        return None


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """The parts, where neighbours are joined if both are content or both are reasoning."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined


def _find_mark(text: str, marks: Sequence[str], is_last: bool) -> tuple[int, str]:
    """The index of the first mark in a text, and the mark.

    Without a mark the result is the length of the text and "". If the text can end within a mark
    that more text completes, the result is the index of that mark and "".
    """
    matches = [(index, -len(mark), mark) for mark in marks if (index := text.find(mark)) >= 0]
    if matches:
        index, _, mark = min(matches)
        return index, mark
    if not is_last:
        longest = max(map(len, marks), default=1)
        for index in range(max(len(text) - longest + 1, 0), len(text)):
            if any(mark.startswith(text[index:]) for mark in marks):
                return index, ""
    return len(text), ""


def _read_call_object(text: str) -> tuple[str, str]:
    """Name and arguments of a call from the JSON text of an object.

    The arguments are the model's own text, since a float could not hold all numbers.
    Raises one of `_NOT_A_CALL` for any other text.
    """
    if text[0] != "{":
        raise TypeError
    texts = dict(zip(*[iter(_json_items(text)[0])] * 2, strict=True))
    values = {json.loads(key): value for key, value in texts.items()}
    name, arguments = json.loads(values["name"]), "{}"
    for key in ("parameters", "arguments"):
        arguments = values.get(key, arguments)
    if not isinstance(name, str) or arguments[0] != "{":
        raise TypeError
    return name, arguments


def _json_items(text: str) -> tuple[list[str], str]:
    """The items of a list, or an object's keys and values in turn, as texts; and the text's rest.

    The rest begins at the first item that is not complete JSON.
    """
    items, decoder = [], json.JSONDecoder()
    position = _SEPARATORS.match(text, 1).end()  # type: ignore[union-attr]
    with suppress(ValueError, RecursionError):
        while True:
            end = decoder.raw_decode(text, position)[1]
            items.append(text[position:end])
            position = _SEPARATORS.match(text, end).end()  # type: ignore[union-attr]
    return items, text[position:]


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)


class _ReasoningCounter:
    """Counts tokens up to and including the mark that ends the reasoning."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._text = ""

    def add(self, sample: CompletionDelta) -> int:
        """Add a delta; returns the number of tokens of all deltas."""
        self._ids.extend(sample.token_ids)
        self._text += sample.text
        return len(self._ids)

    def count_until_mark(self, num_after: int) -> int:
        """The number of tokens up to the mark, which `num_after` characters follow."""
        # A decoder may drop leading white space of the first token, so this is not counted.
        size = len(self._text[: len(self._text) - num_after].lstrip())
        counts = range(len(self._ids) if num_after else 0)
        if not counts:
            return len(self._ids)
        return bisect_left(counts, size, key=lambda n: len(self._decode(self._ids[:n]).lstrip()))
