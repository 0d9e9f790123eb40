"""Answers of `/v1/completions` and `/v1/chat/completions`, which have choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
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

_MINUS_INFINITY = -9999.0  # OpenAI's number for it, since JSON has none

Row = Mapping[int, Logprob]  # the log-probabilities of one position, by token id
_TRACE_FIELDS = tuple(field.name for field in fields(TokenTrace) if field.name != "dropped")
# `asdict` copies each value: it took five times as long as all other work on a long answer.
_trace_values = attrgetter(*_TRACE_FIELDS)


def _finite_logprob(entry: Logprob) -> float:
    return max(entry.logprob, _MINUS_INFINITY)


def _token_text(entry: Logprob) -> str:
    return entry.decoded_token or ""  # None without a tokenizer


def _token_label(token: int, entry: Logprob, *, as_id: bool) -> str:
    return f"token_id:{token}" if as_id or entry.decoded_token is None else entry.decoded_token


def _actual_entry(row: Row) -> tuple[int, Logprob]:
    """The entry of the token that the text has at this position: the first entry of its row."""
    return next(iter(row.items()))


def _top_entries(row: Row, num_top: int) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda item: item[1].rank)[:num_top]


def _prompt_logprobs(rows: Sequence[Row | None]) -> LazyList:
    """The value of `prompt_logprobs`: a row for each token, but null for the first token."""

    def entry_fields(entry: Logprob) -> dict[str, Any]:
        decoded = entry.decoded_token
        return {"logprob": _finite_logprob(entry), "rank": entry.rank, "decoded_token": decoded}

    return LazyList(
        None if row is None else {str(token): entry_fields(entry) for token, entry in row.items()}
        for row in rows
    )


def trace_dicts(traces: Iterable[TokenTrace]) -> Iterator[dict[str, Any]]:
    """The fields of each trace; its dropped drafts have the same fields, except `dropped`."""
    for trace in traces:
        token_fields, *dropped = (
            dict(zip(_TRACE_FIELDS, _trace_values(record), strict=True))
            for record in (trace, *trace.dropped)
        )
        yield token_fields | {"dropped": dropped}


def _extra_fields(events: Sequence[Event], *, token_ids: bool = False) -> dict[str, Any]:
    """The fields of a choice that OpenAI's API does not have, from the events of the choice."""
    sample = events[-1].sample
    extra: dict[str, Any] = {}
    if token_ids:
        extra["token_ids"] = [token for event in events for token in event.sample.token_ids]
    if sample.stop_reason is not None:
        extra["stop_reason"] = sample.stop_reason
    rows = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    if rows is not None and not any(event.echo for event in events):
        extra["prompt_logprobs"] = _prompt_logprobs(rows)
    if sample.trace is not None:
        traces = (trace for event in events for trace in event.sample.trace or ())
        extra["trace"] = LazyList(trace_dicts(traces))
    return extra


class ChunkWriter(ABC):
    """Writes an answer with choices; a subclass makes the choices of its API."""

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

    @abstractmethod
    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The choices that a stream sends for one event, each in its own chunk."""

    @abstractmethod
    def whole_choice(self, events: Sequence[Event]) -> dict[str, Any]:
        """A complete choice, from all of its events."""

    def prompt_fields(self, events: Sequence[Event]) -> dict[str, Any]:
        """Fields of the answer, next to `choices`, from the events of one choice."""
        return {}

    def body(self, choices: Choices, usage: Usage) -> Iterator[bytes]:
        prefix, last_fields = self._head.removeprefix(b"data: "), dict[str, Any]()
        for index in sorted(choices):
            last_fields |= self.prompt_fields(choices[index])
            yield prefix
            yield from pieces(self.whole_choice(choices.pop(index)))
            prefix = b","
        yield b"]," + dumps(last_fields | _counts(usage))[1:]

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        # Without `LazyList`, a choice is written in one piece.
        has_lazy_lists = self._num_top is not None or self._generation.params.trace
        tail = b"]}\n\n"
        if self._generation.continuous_usage:
            tail = b'],"usage":' + dumps(usage.body()) + b"}\n\n"
        elif self._generation.include_usage:
            tail = b'],"usage":null}\n\n'
        for event in events:
            prompt_fields = self.prompt_fields([event])
            suffix = b"]," + dumps(prompt_fields)[1:-1] + tail[1:] if prompt_fields else tail
            for choice in self.chunks(event):
                yield self._head
                yield from pieces(choice) if has_lazy_lists else (dumps(choice),)
                yield suffix
                suffix = tail

    def end(self, usage: Usage) -> Iterator[bytes]:
        if self._generation.include_usage:
            yield self._head + b"]," + dumps(_counts(usage))[1:] + b"\n\n"
        yield DONE

    def failure(self, refused: Refusal) -> Iterator[bytes]:
        yield b"data: " + dumps(refused.openai) + b"\n\n" + DONE

    def _shows_tokens(self, event: Event) -> bool:
        """Whether tokens without text get a chunk, too."""
        has_trace = event.sample.trace is not None
        return self._num_top is not None or has_trace or self._shows_ids


def _counts(usage: Usage) -> dict[str, Any]:
    return {"usage": usage.body(), "metrics": usage.speculation()}


class CompletionWriter(ChunkWriter):
    """Writes completions: a choice has a text, and log-probabilities in parallel lists."""

    id_prefix = "cmpl-"
    chunk_object = body_object = "text_completion"

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        super().__init__(generation, model)
        self._text_ends: dict[int, int] = {}  # by choice: the end of its last token's text

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        sample, reason = event.sample, event.sample.finish_reason
        if self._shows_tokens(event) or event.echo:
            return [self.whole_choice([event])]
        if not (event.parts or reason):
            return []
        choice = {"index": event.choice, "text": sample.text, "logprobs": None}
        extra = _extra_fields([event]) if reason else {}
        return [{**choice, "finish_reason": reason, **extra}]

    def whole_choice(self, events: Sequence[Event]) -> dict[str, Any]:
        ids = events[0].prompt_ids
        texts = [event.echo.prompt or "" for event in events if event.echo]
        texts += [part.text for e in events for part in e.parts if isinstance(part, Content)]
        return {
            "index": events[0].choice,
            "text": "".join(texts),
            "logprobs": self._logprobs(events),
            "finish_reason": events[-1].sample.finish_reason,
            **_extra_fields(events, token_ids=self._shows_ids),
            **({} if ids is None else {"prompt_token_ids": ids}),
        }

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """The value of `logprobs`: lists of one item per token; `echo` adds the prompt's tokens."""
        if self._num_top is None:
            return None
        first_text: list[str] = []
        first_label: list[str] = []
        rows: list[Row] = []
        for event in events:
            if event.echo and event.echo.prompt_logprobs:
                prompt, ids = event.echo.prompt or "", event.echo.prompt_token_ids or []
                prompt_rows = [row for row in event.echo.prompt_logprobs if row is not None]
                # The prompt's first token has no row: its text precedes that of the rows.
                num_chars = sum(len(_token_text(_actual_entry(row)[1])) for row in prompt_rows)
                first_text = [prompt[: max(0, len(prompt) - num_chars)]]
                first_label = [f"token_id:{ids[0]}"] if self._as_id or not prompt else first_text
                rows += prompt_rows
            rows += event.sample.logprobs or ()
        entries = [_actual_entry(row) for row in rows]
        texts = first_text + [_token_text(entry) for _, entry in entries]
        nulls, index = [None] * len(first_text), events[0].choice
        start = self._text_ends.get(index, 0)
        *offsets, self._text_ends[index] = accumulate(map(len, texts), initial=start)
        return {
            "tokens": first_label + [_token_label(*item, as_id=self._as_id) for item in entries],
            "token_logprobs": nulls + [_finite_logprob(entry) for _, entry in entries],
            "top_logprobs": LazyList(chain(nulls, map(self._top, rows))),
            "text_offset": offsets,
        }

    def _top(self, row: Row) -> dict[str, float]:
        items = [*_top_entries(row, self._num_top or 0), _actual_entry(row)]
        return {_token_label(*item, as_id=self._as_id): _finite_logprob(item[1]) for item in items}


class ChatWriter(ChunkWriter):
    """Writes chats: a choice has a message, and log-probabilities token by token."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        super().__init__(generation, model)
        self._ends_with_call: dict[int, bool] = {}  # by choice, once it has begun

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        parts, reason, index = self._visible_parts(event), event.sample.finish_reason, event.choice
        if index not in self._ends_with_call:
            self._ends_with_call[index] = False
            deltas = [{"role": "assistant", "content": "", "refusal": None}]
        has_news = bool(parts or reason or self._shows_tokens(event))
        for part in parts:
            deltas += _deltas(part)
            if isinstance(part, ToolCall):
                self._ends_with_call[index] = part.is_whole
        if has_news and not parts:
            deltas.append({})
        choices = [self._choice_fields(index, {"delta": delta}, None, None) for delta in deltas]
        if has_news:  # the last choice also has the fields that are not deltas
            reason = _finish_reason(reason, ends_with_call=self._ends_with_call[index])
            choices[-1] |= {"logprobs": self._logprobs([event]), "finish_reason": reason}
            choices[-1] |= _extra_fields([event], token_ids=self._shows_ids)
        return choices

    def prompt_fields(self, events: Sequence[Event]) -> dict[str, Any]:
        """The prompt's token ids, if the request wants them; a stream's first event has them."""
        ids = events[0].prompt_ids
        return {} if ids is None or events[0].choice else {"prompt_token_ids": ids}

    def _visible_parts(self, event: Event) -> Sequence[Part]:
        if self._generation.include_reasoning:
            return event.parts
        return [part for part in event.parts if not isinstance(part, Reasoning)]

    def whole_choice(self, events: Sequence[Event]) -> dict[str, Any]:
        parts = [part for event in events for part in self._visible_parts(event)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            message |= _reasoning(reasoning)
        if calls:
            message |= {"content": content or None, "tool_calls": [*map(_call, calls)]}
        ends_with_call = bool(calls) and calls[-1].is_whole
        reason = _finish_reason(events[-1].sample.finish_reason, ends_with_call=ends_with_call)
        logprobs = self._logprobs(events)
        choice = self._choice_fields(events[0].choice, {"message": message}, logprobs, reason)
        return choice | _extra_fields(events, token_ids=self._shows_ids)

    @staticmethod
    def _choice_fields(
        index: int, message: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, **message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        rows = (row for event in events for row in event.sample.logprobs or ())
        return {"content": LazyList(map(self._position, rows)), "refusal": None}

    def _position(self, row: Row) -> dict[str, Any]:
        top = [self._entry(*item) for item in _top_entries(row, self._num_top or 0)]
        return {**self._entry(*_actual_entry(row)), "top_logprobs": top}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        decoded = _token_text(entry)
        return {
            "token": _token_label(token, entry, as_id=self._as_id),
            "logprob": _finite_logprob(entry),
            # The replacement character stands for bytes that are not known.
            "bytes": None if "�" in decoded else [*decoded.encode()],
        }


def _deltas(part: Part) -> list[dict[str, Any]]:
    """The deltas of a stream for a part: one, but two for a call, its name and its arguments."""
    if isinstance(part, Content):
        return [{"content": part.text}]
    if isinstance(part, Reasoning):
        return [_reasoning(part.text)]
    name_delta = {"index": part.number, **_call(part._replace(arguments=""))}
    arguments_delta = {"index": part.number, "function": {"arguments": part.arguments}}
    return [{"tool_calls": [name_delta]}, {"tool_calls": [arguments_delta]}]


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text}  # DeepSeek's key and vLLM's


def _call(part: ToolCall) -> dict[str, Any]:
    return call_fields(part.id, part.name, part.arguments)


def _finish_reason(reason: str | None, *, ends_with_call: bool) -> str | None:
    return "tool_calls" if ends_with_call and reason == "stop" else reason
