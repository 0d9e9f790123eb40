"""Answers of `/v1/completions` and `/v1/chat/completions`, which have choices.

A row holds the log-probabilities of one position: entries by token id.
"""

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
# Not `asdict`, which copies each value: it took five times as long as all other work on a long
# answer.
_TRACE = tuple(field.name for field in fields(TokenTrace) if field.name != "dropped")
_trace_values = attrgetter(*_TRACE)


def finite_logprob(entry: Logprob) -> float:
    """A log-probability that JSON can hold."""
    return max(entry.logprob, IMPOSSIBLE)


def token_text(entry: Logprob) -> str:
    """The text of one token; empty without a tokenizer."""
    return entry.decoded_token or ""


def token_label(token: int, entry: Logprob, *, as_id: bool) -> str:
    """How an answer names a token: by its text, or as `token_id:` and its number.

    Args:
        as_id: whether to use the number even if there is a tokenizer.
    """
    return f"token_id:{token}" if as_id or entry.decoded_token is None else token_text(entry)


def actual_entry(row: Row) -> tuple[int, Logprob]:
    """The token at a row's position in the text, and its entry: the first of the row."""
    return next(iter(row.items()))


def top_entries(row: Row, num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` likeliest tokens of a row and their entries, by rank."""
    return sorted(row.items(), key=lambda item: item[1].rank)[:num_top]


def prompt_rows(rows: Sequence[Row | None]) -> LazyList:
    """`prompt_logprobs` of an answer: a row for each token, but null for the first token."""

    def fields_of(entry: Logprob) -> dict[str, Any]:
        decoded = entry.decoded_token
        return {"logprob": finite_logprob(entry), "rank": entry.rank, "decoded_token": decoded}

    return LazyList(
        None if row is None else {str(token): fields_of(entry) for token, entry in row.items()}
        for row in rows
    )


def trace_dicts(records: Iterable[TokenTrace]) -> Iterator[dict[str, Any]]:
    """The fields of each trace; those of its dropped drafts are without `dropped`."""
    for record in records:
        dropped = [dict(zip(_TRACE, _trace_values(draft), strict=True)) for draft in record.dropped]
        yield dict(zip(_TRACE, _trace_values(record), strict=True)) | {"dropped": dropped}


def extra_fields(events: Sequence[Event], *, token_ids: bool = False) -> dict[str, Any]:
    """The fields that we add to OpenAI's choice, from its events.

    These are token ids, prompt log-probabilities and traces if requested, and the stop reason.
    """
    sample = events[-1].sample
    keys: dict[str, Any] = {}
    if token_ids:
        keys["token_ids"] = [token for event in events for token in event.sample.token_ids]
    if sample.stop_reason is not None:
        keys["stop_reason"] = sample.stop_reason
    rows = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    if rows is not None and not any(event.echo for event in events):
        keys["prompt_logprobs"] = prompt_rows(rows)
    if sample.trace is not None:
        records = (record for event in events for record in event.sample.trace or ())
        keys["trace"] = LazyList(trace_dicts(records))
    return keys


class ChunkWriter:
    """Writes an answer with choices; a subclass makes the choices of its API.

    Args:
        model: the model's name in the answer.
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
        """The choices of a stream's chunks for one event, one per chunk.

        Empty if the event tells the client nothing new.
        """
        raise NotImplementedError

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A choice of the whole answer, from all events of the choice."""
        raise NotImplementedError

    def root(self, events: Sequence[Event]) -> dict[str, Any]:
        """Keys next to the key `choices`, from the events of one choice."""
        return {}

    def body(self, choices: Choices, usage: Usage) -> Iterator[bytes]:
        """The whole answer, in pieces; removes each choice from `choices` when it is written."""
        prefix, root = self._head.removeprefix(b"data: "), dict[str, Any]()
        for index in sorted(choices):
            root |= self.root(choices[index])
            yield prefix
            yield from pieces(self.whole(choices.pop(index)))
            prefix = b","
        yield b"]," + dumps(root | _counts(usage))[1:]

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        """The stream's chunks for these events: a chunk has the head, one choice, and the root."""
        # Without `LazyList`, a choice is written in one piece.
        has_lazy_lists = self._num_top is not None or self._generation.params.trace
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
                yield from pieces(choice) if has_lazy_lists else (dumps(choice),)
                yield suffix
                suffix = tail

    def last(self, usage: Usage) -> Iterator[bytes]:
        if self._generation.include_usage:
            yield self._head + b"]," + dumps(_counts(usage))[1:] + b"\n\n"
        yield DONE

    def failed(self, refused: Refusal) -> Iterator[bytes]:
        yield b"data: " + dumps(refused.body) + b"\n\n" + DONE

    def _shows_tokens(self, event: Event) -> bool:
        """Whether the answer shows a token even if the token has no text."""
        has_trace = event.sample.trace is not None
        return self._num_top is not None or has_trace or self._shows_ids


def _counts(usage: Usage) -> dict[str, Any]:
    return {"usage": usage.body(), "metrics": usage.speculation()}


class CompletionWriter(ChunkWriter):
    """Writes completions: a choice has a text, and log-probabilities as parallel lists."""

    id_prefix = "cmpl-"
    chunk_object = body_object = "text_completion"

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        super().__init__(generation, model)
        self._text_ends: dict[int, int] = {}  # by choice: the end of its last token's text

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """At most one choice: all its fields if the client wants tokens, else the text."""
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
        return [choice | extra_fields([event]) if sample.finish_reason else choice]

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A choice with all of its fields, from all its events or from one event of a stream."""
        ids = events[0].prompt_ids
        texts = [event.echo.prompt or "" for event in events if event.echo]
        texts += [part.text for e in events for part in e.parts if isinstance(part, Content)]
        return {
            "index": events[0].choice,
            "text": "".join(texts),
            "logprobs": self._logprobs(events),
            "finish_reason": events[-1].sample.finish_reason,
            **extra_fields(events, token_ids=self._shows_ids),
            **({} if ids is None else {"prompt_token_ids": ids}),
        }

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """`logprobs` of a choice: lists of one item per token; `echo` adds the prompt's tokens."""
        if self._num_top is None:
            return None
        first_text: list[str] = []
        first_label: list[str] = []
        rows: list[Row] = []
        for event in events:
            if event.echo and event.echo.prompt_logprobs:
                prompt, ids = event.echo.prompt or "", event.echo.prompt_token_ids or []
                echoed = [row for row in event.echo.prompt_logprobs if row is not None]
                # The first token has no row. Its text is the prompt's text without that of the
                # rows.
                num_later = sum(len(token_text(actual_entry(row)[1])) for row in echoed)
                first_text = [prompt[: max(0, len(prompt) - num_later)]]
                first_label = [f"token_id:{ids[0]}"] if self._as_id or not prompt else first_text
                rows += echoed
            rows += event.sample.logprobs or ()
        texts = first_text + [token_text(actual_entry(row)[1]) for row in rows]
        nulls, index = [None] * len(first_text), events[0].choice
        labels = [token_label(*actual_entry(row), as_id=self._as_id) for row in rows]
        start = self._text_ends.get(index, 0)
        *offsets, self._text_ends[index] = accumulate(map(len, texts), initial=start)
        return {
            "tokens": first_label + labels,
            "token_logprobs": nulls + [finite_logprob(actual_entry(row)[1]) for row in rows],
            "top_logprobs": LazyList(chain(nulls, map(self._top, rows))),
            "text_offset": offsets,
        }

    def _top(self, row: Row) -> dict[str, float]:
        entries = [*top_entries(row, self._num_top or 0), actual_entry(row)]
        return {token_label(*item, as_id=self._as_id): finite_logprob(item[1]) for item in entries}


_REPLACEMENT = "�"  # stands for an incomplete character


class ChatWriter(ChunkWriter):
    """Writes chats: a choice has a message, and log-probabilities token by token."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        super().__init__(generation, model)
        self._begun_choices: set[int] = set()  # choices with a first chunk
        self._ends_with_call: dict[int, bool] = {}  # by choice: whether its last call is whole

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The choices of the chunks for an event; the first chunk of a choice has only the role."""
        choices, sample, index = [], event.sample, event.choice
        if index not in self._begun_choices:
            self._begun_choices.add(index)
            role = {"role": "assistant", "content": "", "refusal": None}
            choices.append(self._choice(index, {"delta": role}, None, None))
        parts = self._visible_parts(event)
        deltas = [delta for part in parts for delta in _deltas(part)]
        for part in parts:
            if isinstance(part, ToolCall):
                self._ends_with_call[index] = part.is_whole
        if not deltas and (sample.finish_reason or self._shows_tokens(event)):
            deltas = [{}]
        reason = _reason(
            sample.finish_reason, ends_with_call=self._ends_with_call.get(index, False)
        )
        for i, delta in enumerate(deltas):
            if i < len(deltas) - 1:
                choices.append(self._choice(index, {"delta": delta}, None, None))
            else:
                last = self._choice(index, {"delta": delta}, self._logprobs([event]), reason)
                choices.append(last | extra_fields([event], token_ids=self._shows_ids))
        return choices

    def root(self, events: Sequence[Event]) -> dict[str, Any]:
        """The prompt's token ids, if the request wants them; a stream's first chunk has them."""
        ids = events[0].prompt_ids
        return {} if ids is None or events[0].choice else {"prompt_token_ids": ids}

    def _visible_parts(self, event: Event) -> Sequence[Part]:
        if self._generation.include_reasoning:
            return event.parts
        return [part for part in event.parts if not isinstance(part, Reasoning)]

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A choice with its message: content, reasoning and calls."""
        parts = [part for event in events for part in self._visible_parts(event)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            message |= _reasoning(reasoning)
        if calls:
            message |= {"content": content or None, "tool_calls": [*map(_call, calls)]}
        reason = _reason(
            events[-1].sample.finish_reason, ends_with_call=bool(calls) and calls[-1].is_whole
        )
        logprobs = self._logprobs(events)
        choice = self._choice(events[0].choice, {"message": message}, logprobs, reason)
        return choice | extra_fields(events, token_ids=self._shows_ids)

    @staticmethod
    def _choice(
        index: int, message: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, **message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        rows = (row for event in events for row in event.sample.logprobs or ())
        return {"content": LazyList(map(self._token, rows)), "refusal": None}

    def _token(self, row: Row) -> dict[str, Any]:
        top = [self._entry(*item) for item in top_entries(row, self._num_top or 0)]
        return {**self._entry(*actual_entry(row)), "top_logprobs": top}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        """A token, its log-probability, and the bytes of its text.

        The bytes are null if the text has an incomplete character, since they are not known then.
        """
        decoded = token_text(entry)
        return {
            "token": token_label(token, entry, as_id=self._as_id),
            "logprob": finite_logprob(entry),
            "bytes": None if _REPLACEMENT in decoded else [*decoded.encode()],
        }


def _deltas(part: Part) -> list[dict[str, Any]]:
    """The deltas of a stream for a part: one, or two for a call, its name and its arguments."""
    if isinstance(part, Content):
        return [{"content": part.text}]
    if isinstance(part, Reasoning):
        return [_reasoning(part.text)]
    name_delta = {"index": part.number, **_call(part._replace(arguments=""))}
    arguments_delta = {"index": part.number, "function": {"arguments": part.arguments}}
    return [{"tool_calls": [name_delta]}, {"tool_calls": [arguments_delta]}]


def _reasoning(text: str) -> dict[str, str]:
    """A message's reasoning under two keys, DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(part: ToolCall) -> dict[str, Any]:
    return call_fields(part.id, part.name, part.arguments)


def _reason(reason: str | None, *, ends_with_call: bool) -> str | None:
    return "tool_calls" if ends_with_call and reason == "stop" else reason
