"""Prompts to measure on: the held-out part of the corpus that the embedded pair was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A piece of code from a file of a package that neither model of the pair saw in training.

    `id` stays the same; `prompt` is the beginning of the piece, `reference` how the file goes on.
    """

    id: str
    package: str
    file: str
    licence: str
    prompt: str
    reference: str


def heldout(limit: int | None = None) -> list[HeldOut]:
    """The held-out prompts in file order, the first `limit` of them if given."""
    file = files("foretoken") / "assets" / "tiny-python" / "heldout.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")
    prompts = [HeldOut(**json.loads(line)) for line in lines if line]
    if limit is None:
        return prompts
    if not 1 <= limit <= len(prompts):
        raise ConfigError("limit", limit, f"in [1, {len(prompts)}], the prompts there are")
    return prompts[:limit]
