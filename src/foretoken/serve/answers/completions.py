"""Choices of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import Row, common_fields, likeliest, number, text
from foretoken.serve.parsers.parts import Content
from foretoken.serve.requests import Asked


class CompletionForm:
    """A text, and log-probabilities as parallel lists."""

    id_prefix = "cmpl-"
    chunk_object = body_object = "text_completion"

    def __init__(self, asked: Asked) -> None:
        self._num_top = asked.num_top
        self._offsets: dict[int, int] = {}

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """One choice, or none where there is neither text nor anything else to tell."""
        sample = event.sample
        if self._num_top is not None or sample.trace is not None or event.echo:
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
        """The choice, from all its events or from one."""
        said = [event.echo.text for event in events if event.echo]
        said += [part.text for e in events for part in e.parts if isinstance(part, Content)]
        return {
            "index": events[0].choice,
            "text": "".join(said),
            "logprobs": self._logprobs(events),
            "finish_reason": events[-1].sample.finish_reason,
        } | common_fields(events)

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for event in events:
            if event.echo and event.echo.logprobs:
                _, *rows = event.echo.logprobs
                self._add(rows, found)
                # The first token has no row: its text is what the others leave of the prompt's.
                others = sum(map(len, found["tokens"]))
                first = event.echo.text[: max(0, len(event.echo.text) - others)]
                for name, value in (("tokens", first), ("token_logprobs", None)):
                    found[name].insert(0, value)
                found["top_logprobs"].insert(0, None)
            self._add(event.sample.logprobs or (), found)
        sizes = map(len, found["tokens"])
        index = events[0].choice
        *offsets, self._offsets[index] = accumulate(sizes, initial=self._offsets.get(index, 0))
        return found | {"text_offset": offsets}

    def _add(self, rows: Sequence[Row | None], found: dict[str, Any]) -> None:
        """Add tokens, and with each of them the likeliest in its place by text."""
        for row in rows:
            entries = [*(row or {}).values()]
            shown = [*likeliest(row or {}, self._num_top or 0), entries[0]]
            found["tokens"].append(text(entries[0]))
            found["token_logprobs"].append(number(entries[0]))
            found["top_logprobs"].append({text(entry): number(entry) for entry in shown})
