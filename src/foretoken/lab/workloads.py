"""Prompts for measurements: files that the embedded pair was not trained on, and chats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Code that neither model of the embedded pair saw in training: `prompt`, then `reference`."""

    id: str
    package: str
    file: str
    licence: str
    prompt: str
    reference: str


@dataclass(frozen=True, slots=True)
class HeldOutChat:
    """A conversation without the answer, about everyday things (`chat`) or programs (`code`)."""

    id: str
    kind: str
    messages: list[dict[str, str]]


def heldout_chats() -> list[HeldOutChat]:
    """Conversations that SmolLM2's head was not trained on; `chat` and `code` alternate."""
    return [HeldOutChat(**fields) for fields in _lines("smollm2-135m-eagle3")]


def heldout(limit: int | None = None) -> list[HeldOut]:
    """The first `limit` held-out prompts in file order; None: all of them."""
    prompts = [HeldOut(**fields) for fields in _lines("tiny-python")]
    if limit is None:
        return prompts
    if not 1 <= limit <= len(prompts):
        raise ConfigError("limit", limit, f"in [1, {len(prompts)}], the number of prompts")
    return prompts[:limit]


def _lines(asset: str) -> list[dict[str, Any]]:
    file = files("foretoken") / "assets" / asset / "heldout.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
