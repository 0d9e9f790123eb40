"""Reasoning and tool calls in an answer's text.

Charter: a part is reported only when it is certain, and never taken back, so that events do not
depend on how tokens were split into deltas. Anything but a valid call of a known function is text,
unchanged; therefore a call is reported when its JSON is complete. If `max_tokens` ends the answer
within a call, the call is reported as far as it goes, once its function's name is there. Under a
grammar that allows no text around calls this also holds for a stop string; under one that allows
only calls, no remainder is reported as text.
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

_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_HEAD_OF_BODY = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(\{.*))?',
    re.DOTALL,
)
_MOST_HEAD = 256  # the most characters of a name and an id before the arguments
_BETWEEN = re.compile(r"[\s,:]*")
_NO_CALLS = CallFormat(opener="")
_NO_CALL = (ValueError, TypeError, KeyError, RecursionError)  # raised by text that is no call
_JSON_MARKS = re.compile(r'[{}\[\]"\\<]')


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before the answer."""

    text: str


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        number: its index among the calls of its choice.
        arguments: the JSON text of an object.
        is_whole: False if the answer ended within the call: `arguments` is then a beginning.
    """

    number: int
    id: str
    name: str
    arguments: str
    is_whole: bool = True


def call_fields(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a chat's message, of a request or an answer."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


Part = Content | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class Parsing:
    """What to look for in an answer.

    Attributes:
        names: the functions that may be called; () looks for no calls.
        reasons: whether to look for reasoning.
        parallel: whether to read more than one call.
        hidden: special tokens that are no part of any text.
        is_forced: a grammar allows calls only.
        is_either: a grammar allows calls or a text; an answer that begins as text has no calls.
        decode: the text of token ids as the answer has it.
    """

    format: MessageFormat
    names: tuple[str, ...] = ()
    reasons: bool = False
    parallel: bool = True
    hidden: tuple[str, ...] = ()
    is_forced: bool = False
    is_either: bool = False
    decode: Callable[[list[int]], str] = field(default=lambda ids: "", compare=False)

    @classmethod
    def of(
        cls, form: MessageFormat, names: Sequence[str], *, reasons: bool, parallel: bool
    ) -> Parsing:
        """What to look for in a message; `hidden` is set if a mark is a special token.

        Such a mark is read from the text, so no special token may be left out of it before.
        """
        marks = [THINK, END_THINK] if reasons else []
        if names and form.calls:
            marks += [form.calls.opener, form.calls.closer]
        hides = any(mark in form.special for mark in marks)
        hidden = tuple(text for text in form.special if text not in marks) if hides else ()
        return cls(form, tuple(names), reasons, parallel, hidden)

    def new(self, prompt: str) -> MessageParser:
        """A parser of one choice; the end of the prompt may have begun the reasoning."""
        return MessageParser(self, is_open=self.reasons and prompt.rstrip().endswith(THINK))


class Plain:
    """Has the interface of `MessageParser`, and takes all text as content."""

    num_reasoning = 0

    def feed(self, sample: CompletionDelta) -> Sequence[Part]:
        return (Content(sample.text),) if sample.text else ()


class MessageParser:
    """Reads one choice. Its state is the method that reads the text from here on.

    Such a method is told whether the text ends here, and returns whether to continue at once.
    """

    def __init__(self, parsing: Parsing, *, is_open: bool = False) -> None:
        self._parsing = parsing
        self._calls = (parsing.format.calls if parsing.names else None) or _NO_CALLS
        self._state = MessageParser._read_reasoning if is_open else MessageParser._read_lead
        self._text = ""  # not yet reported
        self._parts: list[Part] = []
        self._num_calls = 0
        self._has_reasoned = False
        self._lead = ""  # white space that counts only if text follows
        self._json = _JsonEnd()
        self._text_marks = (*filter(None, (self._calls.opener,)), *parsing.hidden)
        self._bare_head = '{"name": "' if parsing.is_either else "{"
        self._reasoning_marks = (END_THINK, *parsing.hidden)
        self.num_reasoning = 0  # tokens so far, including those of the marks
        self._count = ReasoningCount(parsing.decode) if parsing.reasons else None

    def feed(self, sample: CompletionDelta) -> Sequence[Part]:
        """The new parts that are certain; after a delta with `finish_reason` no text is left."""
        self._text += sample.text
        num_tokens = self._count.add(sample) if self._count else 0
        is_last = sample.finish_reason is not None
        is_bound = self._parsing.is_forced or self._parsing.is_either
        is_cut = is_last and (is_bound or sample.finish_reason == "length")
        self._steps(is_last and not is_cut)
        if is_cut and not self._cut() and not (is_bound and self._only_calls()):
            self._steps(is_last=True)
        if self._state is MessageParser._read_reasoning:
            self.num_reasoning = num_tokens
        elif self._state is MessageParser._read_text:
            self._count = None
        parts, self._parts = merged(self._parts), []
        return parts

    def _steps(self, is_last: bool) -> None:
        while self._state(self, is_last):
            pass

    def _only_calls(self) -> bool:
        """Whether the grammar allows no text at this place of the answer."""
        if self._parsing.is_forced or self._state is MessageParser._read_text:
            return self._parsing.is_forced
        begins = any(mark.startswith(self._text) for mark in self._text_marks if self._text)
        return bool(self._num_calls) or begins or self._state is not MessageParser._read_lead

    def _cut(self) -> bool:
        """Report the calls that the answer's end cut off; False if there are none."""
        state = self._json
        if self._state is not MessageParser._read_call or state.start is None or state.is_broken:
            return False
        text, found = self._text[state.start :], list[tuple[str, str, bool]]()
        if state.name is not None:
            found.append((state.name, text, False))
        else:
            whole, rest = _items(text if text[0] == "[" else f"[{text}")
            with suppress(*_NO_CALL):
                found += [(*_call(item), True) for item in whole]
                if head := _HEAD_OF_BODY.match(rest):
                    found.append((json.loads(head[1]), head[2] or "", False))
        if not all(name in self._parsing.names for name, _, _ in found):
            return False
        for name, arguments, is_whole in found if self._parsing.parallel else found[:1]:
            self._report_call(name, arguments, is_whole=is_whole)
        return bool(found)

    def _report_call(self, name: str, arguments: str, *, is_whole: bool = True) -> None:
        made = _new_id(self._calls)
        self._parts.append(ToolCall(self._num_calls, made, name, arguments, is_whole))
        self._num_calls += 1

    def _report(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._parts.append(kind(text))

    def _read_lead(self, is_last: bool) -> bool:
        """Read white space: at the beginning, after the reasoning or after a call."""
        extra = ";" if self._calls.is_bare and self._num_calls else ""
        rest = self._text.lstrip(string.whitespace + extra)
        marks = [*self._text_marks, *((THINK,) if self._can_reason else ())]
        marks += [self._bare_head] if self._calls.is_bare else []
        if not is_last and any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        lead, self._text = self._text[: len(self._text) - len(rest)], rest
        if not rest:
            if is_last and not (self._num_calls or self._has_reasoned):
                self._report(Content, self._lead + lead)
            else:
                self._lead += lead
            return False
        if self._can_reason and rest.startswith(THINK):
            self._text, self._state = rest[len(THINK) :], MessageParser._read_reasoning
        elif found := [mark for mark in self._text_marks if rest.startswith(mark)]:
            self._begin(max(found, key=len))
        elif self._calls.is_bare and rest.startswith(self._bare_head):
            self._begin("")
        else:
            self._state = MessageParser._read_text
            lead = "" if self._has_reasoned and not self._num_calls else self._lead + lead
            self._report(Content, lead)
        self._lead = ""
        return True

    @property
    def _can_reason(self) -> bool:
        return self._parsing.reasons and not (self._has_reasoned or self._num_calls)

    def _begin(self, mark: str) -> None:
        """Skip a mark; that of a call begins to read the call."""
        if mark in self._parsing.hidden:
            self._text = self._text[len(mark) :]
            return
        self._state, self._json = MessageParser._read_call, _JsonEnd()
        self._json.opener = mark

    def _read_text(self, is_last: bool) -> bool:
        marks = self._parsing.hidden if self._parsing.is_either else self._text_marks
        place, mark = _find(self._text, marks, is_last)
        self._report(Content, self._text[:place])
        self._text = self._text[place:]
        if mark:
            self._begin(mark)
        return bool(mark)

    def _read_reasoning(self, is_last: bool) -> bool:
        """Read reasoning, without the white space that the template puts around it."""
        place, mark = _find(self._text, self._reasoning_marks, is_last)
        said = self._text[:place].rstrip()
        self._report(Reasoning, said if self._has_reasoned else said.lstrip())
        self._has_reasoned = self._has_reasoned or bool(said)
        if not mark:
            self._text = "" if is_last else self._text[len(said) :]
            return False
        self._text = self._text[place + len(mark) :]
        if mark == END_THINK:
            if self._count:
                self.num_reasoning, self._count = self._count.end(len(self._text)), None
            self._has_reasoned, self._state = True, MessageParser._read_lead
        return True

    def _read_call(self, is_last: bool) -> bool:
        state, calls = self._json, self._calls
        if state.start is None and not state.begin(self._text, calls, is_last=is_last):
            return False
        end = state.find(self._text)
        if end is None:
            if is_last:
                self._give_up(len(self._text))
            return False
        found = None if state.is_broken else self._parse(self._text[state.start : end], state.name)
        if found is None:
            self._give_up(end)
            return True
        self._text = self._text[end:]
        for name, arguments in found if self._parsing.parallel else found[:1]:
            self._report_call(name, arguments)
        self._state = MessageParser._read_closer if self._parsing.parallel else MessageParser._drop
        return True

    def _give_up(self, place: int) -> None:
        """Report the text up to `place`, which looked like a call, as content."""
        self._report(Content, self._text[:place])
        self._text, self._state = self._text[place:], MessageParser._read_text

    def _parse(self, text: str, head: str | None) -> list[tuple[str, str]] | None:
        """Names and arguments of the calls in a text; None if it is not a call."""
        try:
            json.loads(text, parse_constant=_refuse)
            text.encode()  # a lone surrogate cannot be sent
            if head is not None:
                found = [(head, text)] if text[0] == "{" else []
            else:
                found = [_call(item) for item in (_items(text)[0] if text[0] == "[" else [text])]
        except _NO_CALL:
            return None
        known = all(name in self._parsing.names for name, _ in found)
        return found if found and known else None

    def _read_closer(self, is_last: bool) -> bool:
        closer, rest = self._calls.closer, self._text.lstrip()
        if closer and rest.startswith(closer):
            self._text = rest[len(closer) :]
        elif closer and closer.startswith(rest) and not is_last:
            return False
        self._state = MessageParser._read_lead
        return True

    def _drop(self, is_last: bool) -> bool:
        self._text = ""
        return False


class _JsonEnd:
    """Where a call's JSON begins and ends: by brackets outside strings, each character read once.

    Attributes:
        opener: the mark at the beginning of the text.
        name: the function's, where it stands before the JSON.
        start: index of the JSON's first character; None until it has come.
        is_broken: whether the text cannot be a call.
    """

    def __init__(self) -> None:
        self.opener = ""
        self.name: str | None = None
        self.start: int | None = None
        self.is_broken = False
        self._at = self._depth = 0
        self._is_text = False

    def begin(self, text: str, calls: CallFormat, *, is_last: bool) -> bool:
        """Find the start; False if more text is needed."""
        first = len(self.opener)
        rest = text[first:].lstrip()
        start = len(text) - len(rest)
        if calls.has_heads and rest and rest[0] not in "[{":
            start = text.find("{", first, first + _MOST_HEAD)
            is_decided = start >= 0 or is_last or len(text) >= first + _MOST_HEAD
            if not is_decided:
                return False
            head = _HEAD.fullmatch(text, first, start) if start >= 0 else None
            self.name, self.is_broken = head and head[1], head is None
        elif not rest and not is_last:
            return False
        else:
            self.is_broken = not rest or rest[0] not in "[{"
        self.start = self._at = first if self.is_broken else start
        return True

    def find(self, text: str) -> int | None:
        """The index after the JSON, or of the place that breaks it; None if it goes on."""
        if self.is_broken:
            return self._at
        while found := _JSON_MARKS.search(text, self._at):
            mark, self._at = found[0], found.end()
            if mark == "\\" and self._is_text:
                if self._at == len(text):
                    self._at -= 1  # the escaped character has not come yet
                    return None
                self._at += 1
            elif mark == '"':
                self._is_text = not self._is_text
            elif not self._is_text and mark in "<\\":
                self.is_broken, self._at = True, found.start()
                return self._at
            elif not self._is_text:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, with neighbouring texts of one kind joined."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


def _find(text: str, marks: Sequence[str], is_last: bool) -> tuple[int, str]:
    """The index of the first mark, and the mark; "" for a mark that may still be incomplete."""
    places = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if places:
        place, _, mark = min(places)
        return place, mark
    if not is_last:
        longest = max(map(len, marks), default=1)
        for place in range(max(len(text) - longest + 1, 0), len(text)):
            if any(mark.startswith(text[place:]) for mark in marks):
                return place, ""
    return len(text), ""


def _call(text: str) -> tuple[str, str]:
    """Name and arguments of a call, an object as the model wrote it: a float may not hold its
    numbers. Raises `_NO_CALL`."""
    if text[0] != "{":
        raise TypeError
    members = dict(zip(*[iter(_items(text)[0])] * 2, strict=True))
    found = {json.loads(key): value for key, value in members.items()}
    name, arguments = json.loads(found["name"]), "{}"
    for key in ("parameters", "arguments"):
        arguments = found.get(key, arguments)
    if not isinstance(name, str) or arguments[0] != "{":
        raise TypeError
    return name, arguments


def _items(text: str) -> tuple[list[str], str]:
    """The texts of a list's items, or of an object's keys and values in turns; and the rest."""
    found, decoder, at = [], json.JSONDecoder(), _BETWEEN.match(text, 1).end()  # type: ignore[union-attr]
    with suppress(ValueError, RecursionError):
        while True:
            end = decoder.raw_decode(text, at)[1]
            found.append(text[at:end])
            at = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return found, text[at:]


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _new_id(calls: CallFormat) -> str:
    if calls.id_length is None:
        return f"call_{secrets.token_hex(12)}"
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(calls.id_length))


class ReasoningCount:
    """Counts tokens up to and including the mark that ends the reasoning.

    Args:
        decode: the text of token ids as the answer has it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._text = ""

    def add(self, sample: CompletionDelta) -> int:
        """Take in a delta; returns the number of tokens so far."""
        self._ids.extend(sample.token_ids)
        self._text += sample.text
        return len(self._ids)

    def end(self, num_after: int) -> int:
        """The count, if `num_after` characters follow the mark: a delta may continue after it.

        Leading white space is ignored: a decoder may drop that of its first token.
        """
        size = len(self._text[: len(self._text) - num_after].lstrip())
        counts = range(len(self._ids) if num_after else 0)
        if not counts:
            return len(self._ids)
        return bisect_left(counts, size, key=lambda n: len(self._decode(self._ids[:n]).lstrip()))
