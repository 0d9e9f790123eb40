"""What a head is trained on: rows of token ids, real ones and the target's own.

Shape suffixes: N rows, L tokens of a row, B rows of a batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.models.checkpoint import reading

SAMPLING = ((1.0, 0.35), (0.8, 0.4), (0.0, 0.25))
"""Temperatures of the target's texts, with their shares. Greedy ones soon repeat themselves."""


class Documents(NamedTuple):
    """What a data file holds.

    texts: to be learnt as they are, and to be continued
    prompts: only to be continued
    """

    texts: list[str]
    prompts: list[str]


def read_documents(path: Path) -> Documents:
    """Read a text, or JSON lines of which each has a `text` or a `prompt`.

    Raises:
        CheckpointError: the file cannot be read, or is not UTF-8.
        ConfigError: a line is no such object, or nothing is in the file.
    """
    with reading(path):
        content = path.read_text(encoding="utf-8")
    found = Documents([], [])
    if path.suffix != ".jsonl":
        found.texts.append(content)
    else:
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                kind, text = _parse_line(path, number, line)
                (found.texts if kind == "text" else found.prompts).append(text)
    if not any(text.strip() for text in (*found.texts, *found.prompts)):
        raise ConfigError("data", str(path), "a file with text in it")
    return found


def _parse_line(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    kinds = [kind for kind in ("text", "prompt") if isinstance(row, dict) and kind in row]
    if len(kinds) != 1 or not isinstance(row[kinds[0]], str):
        bound = "a JSON object with one of `text` and `prompt`, a string"
        raise ConfigError(f"data, line {number} of {path.name}", line, bound)
    return kinds[0], row[kinds[0]]


class Batches:
    """Batches of rows, each epoch in another order; batch i is the same in every run.

    Args:
        own_NL, real_NL: the target's rows and real ones; one of them may have none.
        real_share: of each batch, real ones.
    """

    def __init__(
        self, own_NL: Tensor, real_NL: Tensor, batch_size: int, real_share: float, seed: int
    ) -> None:
        real = round(batch_size * real_share) if len(own_NL) and len(real_NL) else 0
        if not len(own_NL):
            real = batch_size
        self._parts = [(own_NL, batch_size - real, 2 * seed), (real_NL, real, 2 * seed + 1)]
        self._orders = dict[tuple[int, int], list[int]]()

    def batch(self, index: int) -> Tensor:
        """Int64 ids [B, L], on the rows' device."""
        picked = []
        for rows_NL, count, seed in self._parts:
            at = range(index * count, (index + 1) * count)
            rows = [
                self._order(seed, i // len(rows_NL), len(rows_NL))[i % len(rows_NL)] for i in at
            ]
            picked += [rows_NL[rows].long()] if rows else []
        return torch.cat(picked)

    def _order(self, seed: int, epoch: int, size: int) -> list[int]:
        if (seed, epoch) not in self._orders:
            # Of each part the last two epochs: a batch may lie in both.
            kept = {key: o for key, o in self._orders.items() if key != (seed, epoch - 2)}
            generator = torch.Generator().manual_seed((seed << 24) + epoch & (1 << 63) - 1)
            self._orders = {
                **kept,
                (seed, epoch): torch.randperm(size, generator=generator).tolist(),
            }
        return self._orders[seed, epoch]


def cut(tokens: Sequence[int] | Tensor, length: int) -> Tensor:
    """Consecutive rows [N, length] of one run of ids, int32; what is left over is dropped."""
    whole = len(tokens) // length * length
    return torch.as_tensor(tokens[:whole], dtype=torch.int32).view(-1, length)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """All texts as one run of ids, an end of text behind each, if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [i for text in texts for i in (*tokenizer.encode(text), *end)]


def pick_prompts(
    tokenizer: Any, documents: Documents, stream: Sequence[int], length: int, count: int, seed: int
) -> Iterator[list[int]]:
    """`count` prompts of at most `length` tokens: those of the file in turn, ends of long ones;
    and windows of its texts, at random."""
    generator = torch.Generator().manual_seed(seed)
    given = [tokenizer.encode(prompt)[-length:] for prompt in documents.prompts]
    given = [prompt for prompt in given if prompt]
    starts = torch.randint(max(1, len(stream) - length), (count,), generator=generator).tolist()
    for i, start in enumerate(starts):
        if given and (not stream or i % 2):
            yield given[i // (2 if stream else 1) % len(given)]
        else:
            yield list(stream[start : start + length])
