"""Choices of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.outputs import Logprob
from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import common_fields, likeliest, number, text
from foretoken.serve.requests import Asked

_HALF = "�"


class ChatForm:
    """A message of the assistant, and log-probabilities token by token."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, asked: Asked) -> None:
        self._num_top = asked.num_top
        self._begun: set[int] = set()

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The role before a choice's first words; none where there is nothing to tell."""
        found, sample = [], event.sample
        if event.choice not in self._begun:
            self._begun.add(event.choice)
            role = {"role": "assistant", "content": "", "refusal": None}
            found.append(self._choice(event.choice, {"delta": role}, None, None))
        shows_tokens = self._num_top is not None or sample.trace is not None
        if event.parts or sample.finish_reason or shows_tokens:
            delta = {"content": "".join(part.text for part in event.parts)} if event.parts else {}
            logprobs, reason = self._logprobs([event]), sample.finish_reason
            choice = self._choice(event.choice, {"delta": delta}, logprobs, reason)
            found.append(choice | common_fields([event]))
        return found

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The choice, from all its events."""
        said = "".join(part.text for event in events for part in event.parts)
        message = {"role": "assistant", "content": said, "refusal": None}
        reason, logprobs = events[-1].sample.finish_reason, self._logprobs(events)
        choice = self._choice(events[0].choice, {"message": message}, logprobs, reason)
        return choice | common_fields(events)

    @staticmethod
    def _choice(
        index: int, said: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        content = []
        for event in events:
            for row in event.sample.logprobs or ():
                top = [_entry(entry) for entry in likeliest(row, self._num_top)]
                content.append({**_entry(next(iter(row.values()))), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _entry(entry: Logprob) -> dict[str, Any]:
    """A token's text; its bytes are null where it is part of a character."""
    said = text(entry)
    return {
        "token": said,
        "logprob": number(entry),
        "bytes": None if _HALF in said else [*said.encode()],
    }
