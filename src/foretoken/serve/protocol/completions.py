"""The body of `/v1/completions`."""

from __future__ import annotations

from foretoken.serve.protocol.common import GenerationFields, Items
from foretoken.serve.protocol.foreign import COMPLETION


class CompletionBody(GenerationFields):
    """One prompt or several, as texts or token ids."""

    foreign = COMPLETION
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    logprobs: int | None = None
