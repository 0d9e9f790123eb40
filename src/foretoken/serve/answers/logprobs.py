"""Log-probabilities and traces of tokens, as JSON has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from foretoken.outputs import Logprob, TokenTrace
from foretoken.serve.answers.events import Event
from foretoken.serve.pieces import Rows

IMPOSSIBLE = -9999.0
"""In the place of minus infinity, which JSON does not have; OpenAI's number for it."""

Row = Mapping[int, Logprob]
# `asdict` copies what it finds: of a long answer it took five times as long as all else.
_TRACE = tuple(field.name for field in fields(TokenTrace) if field.name != "dropped")
_trace_values = attrgetter(*_TRACE)


def number(entry: Logprob) -> float:
    """A log-probability that JSON can hold."""
    return max(entry.logprob, IMPOSSIBLE)


def text(entry: Logprob) -> str:
    """A token alone; empty without a tokenizer."""
    return entry.decoded_token or ""


def shown(token: int, entry: Logprob, *, as_id: bool) -> str:
    """What a token is called: its text, or its number, also where there is no tokenizer."""
    return f"token_id:{token}" if as_id or entry.decoded_token is None else text(entry)


def own(row: Row) -> tuple[int, Logprob]:
    """Of a row, the token itself and its entry."""
    return next(iter(row.items()))


def likeliest(row: Row, num_top: int) -> list[tuple[int, Logprob]]:
    """So many tokens and entries of a row by rank; its first is the token itself, or not likely."""
    return sorted(row.items(), key=lambda item: item[1].rank)[:num_top]


def by_token(rows: Sequence[Row | None]) -> Rows:
    """`prompt_logprobs`: for each token those of its row by their ids; null for the first."""
    return Rows(None if row is None else _by_id(row) for row in rows)


def _by_id(row: Row) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": number(entry),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in row.items()
    }


def traced(records: Iterable[TokenTrace]) -> Iterator[dict[str, Any]]:
    """How tokens came about, field by field; what was dropped dropped nothing itself."""
    for record in records:
        dropped = [dict(zip(_TRACE, _trace_values(draft), strict=True)) for draft in record.dropped]
        yield dict(zip(_TRACE, _trace_values(record), strict=True)) | {"dropped": dropped}


def common_fields(events: Sequence[Event], *, token_ids: bool = False) -> dict[str, Any]:
    """What the choices of every API have beyond OpenAI's keys, where it was asked for."""
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
        found["trace"] = Rows(traced(t for event in events for t in event.sample.trace or ()))
    return found
