"""Who may call: a key that clients send, compared in constant time."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.serve.errors import Refusal

PAGE = {
    "/": "index.html",
    **{f"/page/{name}": name for name in ("page.css", "icon.svg")},
    **{f"/page/{name}.js": f"{name}.js" for name in ("page", "api", "run", "detail", "compare")},
}
"""Paths of the page's files, which hold nothing of this server's."""
OPEN = frozenset(
    {"/health", "/health/ready", "/metrics", "/version", "/docs", "/openapi.json", *PAGE}
)
"""Paths that need no key: probes and scrapers have none, the page asks for it, and documents of
the API hold nothing of this server's."""


class KeyCheck:
    """Answers 401 to who does not send the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what has the key, or needs none."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = Headers(scope=scope)
            sent = headers.get("authorization", "").encode("latin-1")
            anthropic = headers.get("x-api-key", "").encode("latin-1")
            has_key = hmac.compare_digest(sent, self._expected)
            if not (has_key | hmac.compare_digest(anthropic, self._key)):
                told = "`Authorization` must be `Bearer` and the key, or `x-api-key` the key."
                refused = Refusal(401, told, "invalid_request_error", code="invalid_api_key")
                await refused.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
