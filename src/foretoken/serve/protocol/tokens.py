"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from foretoken.serve.protocol.common import Fields, Items, TemplateFields
from foretoken.serve.protocol.foreign import TOKENIZE


class TokenizeBody(TemplateFields):
    """A text, or a conversation."""

    foreign = TOKENIZE
    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]
