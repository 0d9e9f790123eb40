"""Choices of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.outputs import Logprob
from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import Row, common_fields, likeliest, number, own, shown, text
from foretoken.serve.parsers.parts import Content, Part, Reasoning, ToolCall, call_fields
from foretoken.serve.pieces import Rows
from foretoken.serve.requests import Asked

_HALF = "�"


class ChatForm:
    """A message of the assistant, and log-probabilities token by token."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, asked: Asked) -> None:
        self._num_top = asked.num_top
        self._shows_ids, self._as_id = asked.return_token_ids, asked.tokens_as_ids
        self._shows_reasoning = asked.include_reasoning
        self._begun: set[int] = set()
        self._called: dict[int, bool] = {}  # whether the last call of a choice is whole

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The role before a choice's first words; none where there is nothing to tell."""
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
        shows_tokens = self._num_top is not None or sample.trace is not None or self._shows_ids
        if not deltas and (sample.finish_reason or shows_tokens):
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
        """The prompt's token ids, where they were asked for: in a stream beside the first chunk."""
        ids = events[0].prompt_ids
        return {} if ids is None or events[0].choice else {"prompt_token_ids": ids}

    def _shown(self, event: Event) -> Sequence[Part]:
        if self._shows_reasoning:
            return event.parts
        return [part for part in event.parts if not isinstance(part, Reasoning)]

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The choice, from all its events."""
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
        return {"content": Rows(map(self._token, rows)), "refusal": None}

    def _token(self, row: Row) -> dict[str, Any]:
        top = [self._entry(*item) for item in likeliest(row, self._num_top or 0)]
        return {**self._entry(*own(row)), "top_logprobs": top}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        """A token, and the bytes of its text, which are null where it is part of a character."""
        said = text(entry)
        return {
            "token": shown(token, entry, as_id=self._as_id),
            "logprob": number(entry),
            "bytes": None if _HALF in said else [*said.encode()],
        }


def _deltas(part: Part) -> list[dict[str, Any]]:
    """What a stream says of it: of a call first its name, then its arguments."""
    if isinstance(part, Content):
        return [{"content": part.text}]
    if isinstance(part, Reasoning):
        return [_reasoning(part.text)]
    first = {"index": part.number, **_call(part._replace(arguments=""))}
    then = {"index": part.number, "function": {"arguments": part.arguments}}
    return [{"tool_calls": [first]}, {"tool_calls": [then]}]


def _reasoning(text: str) -> dict[str, str]:
    """DeepSeek's name of it, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(part: ToolCall) -> dict[str, Any]:
    return call_fields(part.id, part.name, part.arguments)


def _reason(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
