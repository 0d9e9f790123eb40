"""A client's connection: deadlines, a bound on heads of requests, and one request at a time.

A client that closes its sending half counts as disconnected, since both look the same. Requests are
not pipelined: while one is answered, further bytes are read and dropped, so that a disconnect is
noticed, and the connection closes after the answer (RFC 9112, 9.3.2: such clients retry on another
connection). An `Upgrade` to another protocol is ignored, as RFC 9110, 7.8, allows: the parser would
skip the body of such a request, and then read it as the next request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foretoken.serve.errors import Refusal, UnavailableError, refusal
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import ENDING_MESSAGE

_INVALID = Refusal(400, "This is no HTTP/1.1 request.", "invalid_request_error")
_TOO_SLOW = Refusal(408, "The request did not arrive in time.", "invalid_request_error")
_NO_HOST = Refusal(400, "A request must have one `Host` header.", "invalid_request_error")
_NO_TUNNEL = Refusal(400, "This server opens no tunnels.", "invalid_request_error")
_NO_MORE_REQUESTS = refusal(UnavailableError(ENDING_MESSAGE))
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """Uvicorn's connection with deadlines and a bound on heads of requests."""

    def __init__(self, options: ServeOptions, **uvicorn_options: Any) -> None:
        super().__init__(**uvicorn_options)
        self._options = options
        self._in_head, self._head_bytes = True, 0
        self._refusal = _INVALID  # the answer if the parser stops
        self._arrival_timer: asyncio.TimerHandle | None = None  # for a request to arrive
        self._reading_timer: asyncio.TimerHandle | None = None  # for the client to read an answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arrival_timer = self._start_timer(self._end_late)  # also if no byte ever comes

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request, but drop them while another request is answered."""
        if self._is_answering:
            self.cycle.keep_alive = False
            return
        if self._in_head:
            self._head_bytes += len(data)
            if not self._arrival_timer:
                self._arrival_timer = self._start_timer(self._end_late)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_head and self._head_bytes > self._options.max_header_bytes:
            self._refuse(self._head_too_long())

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade()
            self._parse(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _parse_without_upgrade(self) -> None:
        """Parse the head again, with a new parser and without the headers of an upgrade."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = value.split(b",")
                value = b",".join(o for o in options if o.strip().lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._parse(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        if self._is_answering:  # the error stops the parser, which calls `send_400_response`
            raise ValueError("a request came before the answer to the last one was complete")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # headers after a body are trailers and ignored (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._options.max_header_bytes:
            self._refusal = self._head_too_long()
            raise ValueError("a head is too long")  # stops the parser: see `on_message_begin`
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._refusal = _NO_HOST  # RFC 9112, 3.2
            raise ValueError("no host, or several")
        if self.parser.get_method() == b"CONNECT":
            self._refusal = _NO_TUNNEL
            raise ValueError("CONNECT is not supported")
        if self.parser.should_upgrade():
            return  # the parser stops, and `_parse` parses the head again
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # the head will be parsed again: see `on_headers_complete`
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0
        self._cancel_timers(self._arrival_timer)
        self._arrival_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_timer = self._start_timer(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timers(self._reading_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers(self._arrival_timer, self._reading_timer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection, and refuse a request that has not arrived completely."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._refuse(_NO_MORE_REQUESTS)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self._refuse(self._refusal)

    @property
    def _is_answering(self) -> bool:
        """Whether a request has arrived completely, and the answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not (cycle.more_body or cycle.response_complete)

    def _start_timer(self, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(self._options.io_timeout, call)

    def _cancel_timers(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in filter(None, timers):
            timer.cancel()

    def _end_late(self) -> None:
        """Close a connection that is idle after an answer, or refuse a request that is too slow."""
        cycle = self.cycle
        if cycle is not None and cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(_TOO_SLOW)

    def _head_too_long(self) -> Refusal:
        message = f"The head must have at most {self._options.max_header_bytes} bytes."
        return Refusal(431, message, "invalid_request_error")

    def _refuse(self, refused: Refusal) -> None:
        """Send the refusal, unless an answer is being sent, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            text = json.dumps(refused.openai).encode()
            head = (
                f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(text)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + text)
        self.transport.close()
