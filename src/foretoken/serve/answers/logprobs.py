"""Log-probabilities and traces of tokens, as JSON has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken.outputs import Logprob, TokenTrace
from foretoken.serve.answers.events import Event

IMPOSSIBLE = -9999.0
"""In the place of minus infinity, which JSON does not have; OpenAI's number for it."""

Row = Mapping[int, Logprob]


def number(entry: Logprob) -> float:
    """A log-probability that JSON can hold."""
    return max(entry.logprob, IMPOSSIBLE)


def text(entry: Logprob) -> str:
    """A token alone; empty without a tokenizer."""
    return entry.decoded_token or ""


def likeliest(row: Row, num_top: int) -> list[Logprob]:
    """So many entries of a row by rank; its first is the token itself, likely or not."""
    return sorted(row.values(), key=lambda entry: entry.rank)[:num_top]


def by_token(rows: Sequence[Row | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: for each token those of its row by their ids; null for the first."""
    return [
        {str(token): {**asdict(entry), "logprob": number(entry)} for token, entry in row.items()}
        if row is not None
        else None
        for row in rows
    ]


def traced(records: Iterable[TokenTrace]) -> list[dict[str, Any]]:
    """How tokens came about, field by field; what was dropped dropped nothing itself."""
    found = [asdict(record) for record in records]
    for record in found:
        for draft in record["dropped"]:
            del draft["dropped"]
    return found


def common_fields(events: Sequence[Event]) -> dict[str, Any]:
    """What the choices of every API have beyond OpenAI's keys, where it was asked for."""
    sample = events[-1].sample
    found: dict[str, Any] = {}
    if sample.stop_reason is not None:
        found["stop_reason"] = sample.stop_reason
    rows = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    if rows is not None and not any(event.echo for event in events):
        found["prompt_logprobs"] = by_token(rows)
    if sample.trace is not None:
        found["trace"] = traced(token for event in events for token in event.sample.trace or ())
    return found
