"""Choices of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from foretoken.outputs import Logprob
from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import Row, common_fields, likeliest, number, text
from foretoken.serve.parsers.parts import Content
from foretoken.serve.pieces import Rows
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
        first: list[str] = []
        rows: list[Row] = []
        for event in events:
            if event.echo and event.echo.logprobs:
                echoed = [row for row in event.echo.logprobs if row is not None]
                # The first token has no row: its text is what the others leave of the prompt's.
                others = sum(len(text(_own(row))) for row in echoed)
                first = [event.echo.text[: max(0, len(event.echo.text) - others)]]
                rows += echoed
            rows += event.sample.logprobs or ()
        tokens = first + [text(_own(row)) for row in rows]
        none, index = [None] * len(first), events[0].choice
        begin = self._offsets.get(index, 0)
        *offsets, self._offsets[index] = accumulate(map(len, tokens), initial=begin)
        return {
            "tokens": tokens,
            "token_logprobs": none + [number(_own(row)) for row in rows],
            "top_logprobs": Rows(chain(none, map(self._top, rows))),
            "text_offset": offsets,
        }

    def _top(self, row: Row) -> dict[str, float]:
        """The likeliest in a token's place by text, and the token itself."""
        shown = [*likeliest(row, self._num_top or 0), _own(row)]
        return {text(entry): number(entry) for entry in shown}


def _own(row: Row) -> Logprob:
    """Of a row, the entry of the token itself."""
    return next(iter(row.values()))
