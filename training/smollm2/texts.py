"""From generated texts to rows of equal length: what is taken, and how it is laid out.

Belongs here: duplicates, held-out prompts, loops, packing. A row begins with a text and holds whole
ones as far as they fit, so that most tokens have the context that they will have in use.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from foretoken.lab.workloads import heldout_chats
from training.tiny_python.neardup import overlap, shingles
from training.tiny_python.windows import cycle_start

LOOP_TOKENS = 32  # that stay of what repeats itself to the end
WORDS = 4  # of a shingle
HELD_OVERLAP = 0.3


def read_heldout() -> list[dict[str, Any]]:
    """The held-out chats that come with the package."""
    return [asdict(chat) for chat in heldout_chats()]


class Heldout:
    """Tells what resembles a held-out prompt by runs of words that only one of these has."""

    def __init__(self, asked: Iterable[str]) -> None:
        times = Counter(piece for text in asked for piece in self._pieces(text))
        self._known = {piece for piece, count in times.items() if count == 1}

    @staticmethod
    def _pieces(text: str) -> set[int]:
        return shingles(re.findall(r"\w+", text.lower()), WORDS)

    def resembles(self, asked: str) -> bool:
        """Whether too many of its runs of words are such."""
        return overlap(self._pieces(asked), self._known) > HELD_OVERLAP


def without_loop(ids: list[int]) -> list[int]:
    """Without most of what a text repeats to its end."""
    start = cycle_start(ids)
    return ids if start is None else ids[: start + LOOP_TOKENS]


def select(paths: Sequence[Path], seed: int) -> tuple[list[list[int]], dict[str, int]]:
    """The texts of all files in random order, and counts. Of equal first user turns one for each
    temperature stays."""
    held = Heldout(row["messages"][-1]["content"] for row in read_heldout())
    texts, seen, counts = list[list[int]](), set[tuple[str, float]](), Counter[str]()
    for path in sorted(paths):
        with safe_open(path, "pt") as file:
            asked = json.loads(file.metadata()["asked"])
            sizes = file.get_tensor("sizes").tolist()
            runs = file.get_tensor("ids").split(sizes)
            temperatures = file.get_tensor("temperature").tolist()
        for run, turns, temperature in zip(runs, asked, temperatures, strict=True):
            counts["written"] += 1
            key = (" ".join(turns[0].lower().split()) if turns else "", temperature)
            if turns and key in seen:
                counts["duplicates"] += 1
            elif any(map(held.resembles, turns)):
                counts["like held-out prompts"] += 1
            else:
                seen.add(key)
                ids = without_loop(run.tolist())
                counts["cut loops"] += len(ids) < len(run)
                texts.append(ids)
    random.Random(seed).shuffle(texts)
    counts["taken"], counts["tokens"] = len(texts), sum(map(len, texts))
    return texts, dict(counts)


def pack(texts: Sequence[list[int]], length: int) -> Tensor:
    """Rows [N, length], int32. A row begins with the next text, then takes the longest that fits,
    and is filled with the beginning of another one; of a text longer than a row, the beginning."""
    waiting = sorted((len(ids), i) for i, ids in enumerate(texts))
    is_used, rows = [False] * len(texts), list[list[int]]()
    for first, ids in enumerate(texts):
        if is_used[first]:
            continue
        is_used[first] = True
        row = ids[:length]
        while waiting and (fits := bisect_right(waiting, (length - len(row), len(texts)))):
            _, i = waiting.pop(fits - 1)
            if not is_used[i]:
                is_used[i] = True
                row = row + texts[i]
        while len(row) < length:
            row = row + texts[len(rows) % len(texts)][: length - len(row)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)


def frequent_ids(rows_NL: Tensor, count: int, vocab_size: int) -> Tensor:
    """The ids that the rows have most often, ascending, int64."""
    counts_V = torch.bincount(rows_NL.flatten().long(), minlength=vocab_size)
    return counts_V.argsort(descending=True, stable=True)[:count].sort().values
