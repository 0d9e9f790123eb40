"""Choices of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import Row, common_fields, likeliest, number, own, shown, text
from foretoken.serve.parsers.parts import Content
from foretoken.serve.pieces import Rows
from foretoken.serve.requests import Asked


class CompletionForm:
    """A text, and log-probabilities as parallel lists."""

    id_prefix = "cmpl-"
    chunk_object = body_object = "text_completion"

    def __init__(self, asked: Asked) -> None:
        self._num_top = asked.num_top
        self._shows_ids, self._as_id = asked.return_token_ids, asked.tokens_as_ids
        self._offsets: dict[int, int] = {}

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """One choice, or none where there is neither text nor anything else to tell."""
        sample = event.sample
        has_more = self._num_top is not None or sample.trace is not None or self._shows_ids
        if has_more or event.echo:
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
        } | self._further(events)

    def root(self, events: Sequence[Event]) -> dict[str, Any]:
        """Nothing: what is said of a prompt is said in its choices."""
        return {}

    def _further(self, events: Sequence[Event]) -> dict[str, Any]:
        found = common_fields(events, token_ids=self._shows_ids)
        if events[0].prompt_ids is not None:
            found["prompt_token_ids"] = events[0].prompt_ids
        return found

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        first: list[str] = []
        named: list[str] = []
        rows: list[Row] = []
        for event in events:
            if event.echo and event.echo.logprobs:
                echoed = [row for row in event.echo.logprobs if row is not None]
                # The first token has no row: its text is what the others leave of the prompt's.
                others = sum(len(text(own(row)[1])) for row in echoed)
                first = [event.echo.text[: max(0, len(event.echo.text) - others)]]
                by_id = self._as_id or not event.echo.text
                named = [f"token_id:{event.echo.token_ids[0]}"] if by_id else first
                rows += echoed
            rows += event.sample.logprobs or ()
        texts = first + [text(own(row)[1]) for row in rows]
        none, index = [None] * len(first), events[0].choice
        begin = self._offsets.get(index, 0)
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=begin)
        return {
            "tokens": named + [shown(*own(row), as_id=self._as_id) for row in rows],
            "token_logprobs": none + [number(own(row)[1]) for row in rows],
            "top_logprobs": Rows(chain(none, map(self._top, rows))),
            "text_offset": offsets,
        }

    def _top(self, row: Row) -> dict[str, float]:
        """The likeliest in a token's place by text, and the token itself."""
        entries = [*likeliest(row, self._num_top or 0), own(row)]
        return {shown(*item, as_id=self._as_id): number(item[1]) for item in entries}
