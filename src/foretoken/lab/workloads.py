"""Prompts to measure on: files that the embedded pair was not trained on, and chats for others."""

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


@dataclass(frozen=True, slots=True)
class HeldOutChat:
    """A conversation that awaits an answer, about everyday things (`chat`) or programs (`code`)."""

    id: str
    kind: str
    messages: list[dict[str, str]]


def heldout_chats() -> list[HeldOutChat]:
    """Conversations that SmolLM2's head was not trained on, of each kind in turn."""
    file = files("foretoken") / "assets" / "smollm2-135m-eagle3" / "heldout.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")
    return [HeldOutChat(**json.loads(line)) for line in lines if line]


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
