"""Answers as choices: of `/v1/completions` and `/v1/chat/completions`; their log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, ClassVar

from foretoken.outputs import Logprob, TokenTrace
from foretoken.serve.answers.events import Event, Usage
from foretoken.serve.errors import Refusal
from foretoken.serve.parsers.message import Content, Part, Reasoning, ToolCall, call_fields
from foretoken.serve.requests import GenerationRequest
from foretoken.serve.sse import DONE, Choices, LazyList, dumps, pieces

IMPOSSIBLE = -9999.0
"""OpenAI's number for minus infinity, which JSON does not have."""

Row = Mapping[int, Logprob]
# `asdict` copies each value: for a long answer it took five times as long as everything else.
_TRACE = tuple(field.name for field in fields(TokenTrace) if field.name != "dropped")
_trace_values = attrgetter(*_TRACE)


def finite(entry: Logprob) -> float:
    """A log-probability that JSON can hold."""
    return max(entry.logprob, IMPOSSIBLE)


def text(entry: Logprob) -> str:
    """The text of one token; empty without a tokenizer."""
    return entry.decoded_token or ""


def shown(token: int, entry: Logprob, *, as_id: bool) -> str:
    """A token in an answer: its text, or `token_id:` and its number if `as_id` or no tokenizer."""
    return f"token_id:{token}" if as_id or entry.decoded_token is None else text(entry)


def own(row: Row) -> tuple[int, Logprob]:
    """The token of a row's position, and its entry; it is the first of the row."""
    return next(iter(row.items()))


def likeliest(row: Row, num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` likeliest tokens of a row and their entries, by rank."""
    return sorted(row.items(), key=lambda item: item[1].rank)[:num_top]


def by_token(rows: Sequence[Row | None]) -> LazyList:
    """`prompt_logprobs`: for each token its row by token ids; null for the first token."""

    def fields_of(entry: Logprob) -> dict[str, Any]:
        said = entry.decoded_token
        return {"logprob": finite(entry), "rank": entry.rank, "decoded_token": said}

    return LazyList(
        None if row is None else {str(token): fields_of(entry) for token, entry in row.items()}
        for row in rows
    )


def traced(records: Iterable[TokenTrace]) -> Iterator[dict[str, Any]]:
    """Traces field by field; those of dropped drafts have no `dropped` of their own."""
    for record in records:
        dropped = [dict(zip(_TRACE, _trace_values(draft), strict=True)) for draft in record.dropped]
        yield dict(zip(_TRACE, _trace_values(record), strict=True)) | {"dropped": dropped}


def common_fields(events: Sequence[Event], *, token_ids: bool = False) -> dict[str, Any]:
    """Keys beyond OpenAI's that the choices of every API have, where the request wants them."""
    sample = events[-1].sample
    found: dict[str, Any] = {}
    if token_ids:
        found["token_ids"] = [token for event in events for token in event.sample.token_ids]
    if sample.stop_reason is not None:
        found["stop_reason"] = sample.stop_reason
    rows = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    if rows is not None and not any(event.echo for event in events):
        found["prompt_logprobs"] = by_token(rows)
    if sample.trace is not None:
        found["trace"] = LazyList(traced(t for event in events for t in event.sample.trace or ()))
    return found


class ChunkWriter:
    """An answer as choices; a subclass makes the choices of its API.

    Args:
        model: its name in the answer.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    body_object: ClassVar[str]

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        self._generation, self._num_top = generation, generation.num_top
        self._shows_ids, self._as_id = generation.return_token_ids, generation.tokens_as_ids
        head = {
            "id": generation.answer_id(self.id_prefix),
            "object": self.chunk_object if generation.stream else self.body_object,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + dumps(head)[:-1] + b',"choices":['

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Choices of a stream's chunks; none where a client would learn nothing."""
        raise NotImplementedError

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """One choice from all its events."""
        raise NotImplementedError

    def root(self, events: Sequence[Event]) -> dict[str, Any]:
        """Keys next to the choices, from the events of one choice."""
        return {}

    def body(self, choices: Choices, usage: Usage) -> Iterator[bytes]:
        prefix, root = self._head.removeprefix(b"data: "), dict[str, Any]()
        for index in sorted(choices):
            root |= self.root(choices[index])
            yield prefix
            yield from pieces(self.whole(choices.pop(index)))
            prefix = b","
        yield b"]," + dumps(root | _counts(usage))[1:]

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        has_lists = self._num_top is not None or self._generation.params.trace  # of `LazyList`
        tail = b"]}\n\n"
        if self._generation.continuous_usage:
            tail = b'],"usage":' + dumps(usage.body()) + b"}\n\n"
        elif self._generation.include_usage:
            tail = b'],"usage":null}\n\n'
        for event in events:
            root = self.root([event])
            suffix = b"]," + dumps(root)[1:-1] + tail[1:] if root else tail
            for choice in self.chunks(event):
                yield self._head
                yield from pieces(choice) if has_lists else (dumps(choice),)
                yield suffix
                suffix = tail

    def last(self, usage: Usage) -> Iterator[bytes]:
        if self._generation.include_usage:
            yield self._head + b"]," + dumps(_counts(usage))[1:] + b"\n\n"
        yield DONE

    def failed(self, refused: Refusal) -> Iterator[bytes]:
        yield b"data: " + dumps(refused.body) + b"\n\n" + DONE

    def _shows_tokens(self, event: Event) -> bool:
        """Whether a client learns of tokens that have no text."""
        has_trace = event.sample.trace is not None
        return self._num_top is not None or has_trace or self._shows_ids


def _counts(usage: Usage) -> dict[str, Any]:
    return {"usage": usage.body(), "metrics": usage.speculation()}


class CompletionWriter(ChunkWriter):
    """A text, and log-probabilities as parallel lists."""

    id_prefix = "cmpl-"
    chunk_object = body_object = "text_completion"

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        super().__init__(generation, model)
        self._offsets: dict[int, int] = {}

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        sample = event.sample
        if self._shows_tokens(event) or event.echo:
            return [self.whole([event])]
        if not (event.parts or sample.finish_reason):
            return []
        choice = {
            "index": event.choice,
            "text": sample.text,
            "logprobs": None,
            "finish_reason": sample.finish_reason,
        }
        return [choice | common_fields([event]) if sample.finish_reason else choice]

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        ids = events[0].prompt_ids
        said = [event.echo.prompt or "" for event in events if event.echo]
        said += [part.text for e in events for part in e.parts if isinstance(part, Content)]
        return {
            "index": events[0].choice,
            "text": "".join(said),
            "logprobs": self._logprobs(events),
            "finish_reason": events[-1].sample.finish_reason,
            **common_fields(events, token_ids=self._shows_ids),
            **({} if ids is None else {"prompt_token_ids": ids}),
        }

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        first: list[str] = []
        named: list[str] = []
        rows: list[Row] = []
        for event in events:
            if event.echo and event.echo.prompt_logprobs:
                prompt, ids = event.echo.prompt or "", event.echo.prompt_token_ids or []
                echoed = [row for row in event.echo.prompt_logprobs if row is not None]
                # The first token has no row: its text is the prompt's without that of the others.
                others = sum(len(text(own(row)[1])) for row in echoed)
                first = [prompt[: max(0, len(prompt) - others)]]
                named = [f"token_id:{ids[0]}"] if self._as_id or not prompt else first
                rows += echoed
            rows += event.sample.logprobs or ()
        texts = first + [text(own(row)[1]) for row in rows]
        none, index = [None] * len(first), events[0].choice
        begin = self._offsets.get(index, 0)
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=begin)
        return {
            "tokens": named + [shown(*own(row), as_id=self._as_id) for row in rows],
            "token_logprobs": none + [finite(own(row)[1]) for row in rows],
            "top_logprobs": LazyList(chain(none, map(self._top, rows))),
            "text_offset": offsets,
        }

    def _top(self, row: Row) -> dict[str, float]:
        entries = [*likeliest(row, self._num_top or 0), own(row)]
        return {shown(*item, as_id=self._as_id): finite(item[1]) for item in entries}


_HALF = "�"


class ChatWriter(ChunkWriter):
    """A message of the assistant, and log-probabilities token by token."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        super().__init__(generation, model)
        self._begun: set[int] = set()
        self._called: dict[int, bool] = {}  # whether the last call of a choice is whole

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Chunks of an event, with the role before a choice's first."""
        found, sample, index = [], event.sample, event.choice
        if index not in self._begun:
            self._begun.add(index)
            role = {"role": "assistant", "content": "", "refusal": None}
            found.append(self._choice(index, {"delta": role}, None, None))
        parts = self._shown(event)
        deltas = [delta for part in parts for delta in _deltas(part)]
        for part in parts:
            if isinstance(part, ToolCall):
                self._called[index] = part.is_whole
        if not deltas and (sample.finish_reason or self._shows_tokens(event)):
            deltas = [{}]
        reason = _reason(sample.finish_reason, called=self._called.get(index, False))
        for i, delta in enumerate(deltas):
            if i < len(deltas) - 1:
                found.append(self._choice(index, {"delta": delta}, None, None))
            else:
                last = self._choice(index, {"delta": delta}, self._logprobs([event]), reason)
                found.append(last | common_fields([event], token_ids=self._shows_ids))
        return found

    def root(self, events: Sequence[Event]) -> dict[str, Any]:
        """The prompt's token ids, if the request wants them; in a stream with the first chunk."""
        ids = events[0].prompt_ids
        return {} if ids is None or events[0].choice else {"prompt_token_ids": ids}

    def _shown(self, event: Event) -> Sequence[Part]:
        if self._generation.include_reasoning:
            return event.parts
        return [part for part in event.parts if not isinstance(part, Reasoning)]

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        parts = [part for event in events for part in self._shown(event)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        said = "".join(part.text for part in parts if isinstance(part, Content))
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if thought := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            message |= _reasoning(thought)
        if calls:
            message |= {"content": said or None, "tool_calls": [*map(_call, calls)]}
        reason = _reason(events[-1].sample.finish_reason, called=bool(calls) and calls[-1].is_whole)
        logprobs = self._logprobs(events)
        choice = self._choice(events[0].choice, {"message": message}, logprobs, reason)
        return choice | common_fields(events, token_ids=self._shows_ids)

    @staticmethod
    def _choice(
        index: int, said: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        rows = (row for event in events for row in event.sample.logprobs or ())
        return {"content": LazyList(map(self._token, rows)), "refusal": None}

    def _token(self, row: Row) -> dict[str, Any]:
        top = [self._entry(*item) for item in likeliest(row, self._num_top or 0)]
        return {**self._entry(*own(row)), "top_logprobs": top}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        """A token with the bytes of its text; null where the token is part of a character."""
        said = text(entry)
        return {
            "token": shown(token, entry, as_id=self._as_id),
            "logprob": finite(entry),
            "bytes": None if _HALF in said else [*said.encode()],
        }


def _deltas(part: Part) -> list[dict[str, Any]]:
    """Deltas of a stream for a part; a call is two: its name, then its arguments."""
    if isinstance(part, Content):
        return [{"content": part.text}]
    if isinstance(part, Reasoning):
        return [_reasoning(part.text)]
    first = {"index": part.number, **_call(part._replace(arguments=""))}
    then = {"index": part.number, "function": {"arguments": part.arguments}}
    return [{"tool_calls": [first]}, {"tool_calls": [then]}]


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under DeepSeek's key, and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(part: ToolCall) -> dict[str, Any]:
    return call_fields(part.id, part.name, part.arguments)


def _reason(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
