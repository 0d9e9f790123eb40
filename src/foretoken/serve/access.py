"""Access: clients must send a key or, if the server has no key, a `Host` of this machine.

The check of `Host` is against DNS rebinding: a web site can have its name resolve to 127.0.0.1, and
its page then calls a server here as the page's own origin. But the browser sends the site's name as
`Host`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from ipaddress import ip_address
from itertools import product

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.serve.errors import Refusal, path_without_root
from foretoken.serve.options import ServeOptions

PAGE_FILES = {
    "/": "index.html",
    **{f"/page/{name}": name for name in ("page.css", "icon.svg")},
    **{f"/page/{name}.js": f"{name}.js" for name in ("page", "api", "run", "detail", "compare")},
}
KEYLESS_PATHS = frozenset(
    {"/health", "/health/ready", "/ping", "/load", "/metrics", "/version", "/docs", "/openapi.json"}
    | PAGE_FILES.keys()
)
"""Probes and scrapers have no key, and the page and the API's documents have no private data."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]+?)\.?(?::\d*)?")


class RootPath:
    """Adds `--root-path` to paths without it: ASGI demands this prefix, some proxies remove it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root = self._root
            scope["root_path"] = root
            if not f"{scope['path']}/".startswith(f"{root}/"):
                scope["path"] = root + scope["path"]
                scope["raw_path"] = root.encode() + scope["raw_path"]
        await self._app(scope, receive, send)


class KeyCheck:
    """Answers 401 to requests without one of the keys, except to `KEYLESS_PATHS`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_without_root(scope) not in KEYLESS_PATHS:
            headers = Headers(scope=scope)
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            bearer = credentials.strip(" ") if scheme.lower() == "bearer" else ""  # RFC 9110, 11.1
            has_key = False  # compared with all keys in constant time, so that time tells nothing
            for sent_key, key in product((bearer, headers.get("x-api-key", "")), self._keys):
                has_key |= hmac.compare_digest(sent_key.encode("latin-1"), key)
            if not has_key:
                message = "`Authorization` must be `Bearer` and the key, or `x-api-key` the key."
                refusal = Refusal(401, message, "invalid_request_error", code="invalid_api_key")
                await refusal.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostCheck:
    """Answers 421 to requests with a `Host` that is neither this machine nor allowed."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._allowed = app, {name.lower() for name in options.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request without `Host` is of HTTP/1.0, which no browser speaks.
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is not None and not self._is_allowed(host):
            allowed = ", ".join(["localhost, 127.0.0.1, [::1]", *sorted(self._allowed)])
            message = (
                f"`Host` is {host[:200]!r}. It must be one of {allowed}, so that web sites cannot "
                "use a server without a key. Start the server with --allowed-hosts or --api-key."
            )
            refusal = Refusal(421, message, "invalid_request_error", "Host", "host_not_allowed")
            await refusal.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        if "*" in self._allowed:
            return True
        if not (match := _HOST.fullmatch(host.strip().lower())):
            return False
        name = match[1].strip("[]")
        if name in self._allowed or name.rpartition(".")[2] == "localhost":  # RFC 6761, 6.3
            return True
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return False
