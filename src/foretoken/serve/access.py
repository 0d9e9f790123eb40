"""Access: clients send a key, compared in constant time, or else call this machine by its name.

Any web site can have its own name resolve to 127.0.0.1; its page then calls a server here as its
own origin (DNS rebinding). The browser still sends the site's `Host`, which is refused here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from ipaddress import ip_address
from itertools import product

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.serve.errors import Refusal, own_path
from foretoken.serve.options import ServeOptions

PAGE = {
    "/": "index.html",
    **{f"/page/{name}": name for name in ("page.css", "icon.svg")},
    **{f"/page/{name}.js": f"{name}.js" for name in ("page", "api", "run", "detail", "compare")},
}
"""The page's files by path; they hold no data of this server."""
OPEN = frozenset(
    {"/health", "/health/ready", "/ping", "/load", "/metrics", "/version", "/docs", "/openapi.json"}
    | PAGE.keys()
)
"""Paths that need no key: probes and scrapers have none, the page asks its user for it, and the
API's documents hold no data of this server."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]+?)\.?(?::\d*)?")


class RootPath:
    """Has every path begin with the prefix under which a proxy has this server, as ASGI demands.

    A proxy may keep the prefix or remove it, so it is added only where it is missing. The router
    removes it once.
    """

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
    """Answers 401 to requests without one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and own_path(scope) not in OPEN:
            headers = Headers(scope=scope)
            scheme, _, sent = headers.get("authorization", "").partition(" ")
            bearer = sent.strip(" ") if scheme.lower() == "bearer" else ""  # RFC 9110, 11.1
            has_key = False
            for given, key in product((bearer, headers.get("x-api-key", "")), self._keys):
                has_key |= hmac.compare_digest(given.encode("latin-1"), key)
            if not has_key:
                message = "`Authorization` must be `Bearer` and the key, or `x-api-key` the key."
                refused = Refusal(401, message, "invalid_request_error", code="invalid_api_key")
                await refused.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostCheck:
    """Answers 421 to requests that call this machine by another name than its own."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._allowed = app, {name.lower() for name in options.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests to this machine's names, or of HTTP/1.0, which no browser speaks."""
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is not None and not self._is_allowed(host):
            allowed = ", ".join(["localhost, 127.0.0.1, [::1]", *sorted(self._allowed)])
            message = (
                f"`Host` is {host[:200]!r}. It must be one of {allowed}: without a key this "
                "server answers by these names alone, so that no web page can reach it by its "
                "own. Start it with --allowed-hosts, or with --api-key."
            )
            refused = Refusal(421, message, "invalid_request_error", "Host", "host_not_allowed")
            await refused.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        if "*" in self._allowed:
            return True
        if not (found := _HOST.fullmatch(host.strip().lower())):
            return False
        name = found[1].strip("[]")
        if name in self._allowed or name.rpartition(".")[2] == "localhost":  # RFC 6761, 6.3
            return True
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return False
