"""One client's connection: how long it may take, how long a head may be, where a request ends.

Charter: what HTTP's parser must know, before there is a request that an application could refuse.
A client that sends slowly, or does not read, holds its connection for `io_timeout` at most. One
that closes its sending half is taken to have left, since a client that has gone looks the same.
Requests are not pipelined: while one is answered, what its client sends ahead is read and dropped,
so that its leaving is seen, and the connection closes after the answer (RFC 9112, 9.3.2: such
clients ask again on another one). An offer to leave HTTP/1.1 (`Upgrade`) is ignored, as RFC 9110,
7.8, allows: the parser would skip the body of such a request, and read it as the next request.
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
from foretoken.serve.running import NO_MORE

_INVALID = Refusal(400, "This is no HTTP/1.1 request.", "invalid_request_error")
_TOO_SLOW = Refusal(408, "The request did not arrive in time.", "invalid_request_error")
_NO_HOST = Refusal(400, "A request must have one `Host` header.", "invalid_request_error")
_NO_TUNNEL = Refusal(400, "This server opens no tunnels.", "invalid_request_error")
_ENDING = refusal(UnavailableError(NO_MORE))
_OFFER = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """Uvicorn's connection with deadlines and a bound on heads."""

    def __init__(self, options: ServeOptions, **given: Any) -> None:
        super().__init__(**given)
        self._options = options
        self._in_head, self._num_head, self._refused = True, 0, _INVALID
        self._arriving: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that says nothing has a deadline, too."""
        super().connection_made(transport)
        self._arriving = self._later(self._is_late)

    def data_received(self, data: bytes) -> None:
        """Parse; a head must end before it is too long."""
        if self._is_answering:
            self.cycle.keep_alive = False
            return
        if self._in_head:
            self._num_head += len(data)
            if not self._arriving:
                self._arriving = self._later(self._is_late)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_head and self._num_head > self._options.max_header_bytes:
            self._refuse(self._too_long())

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:  # at the end of the head
            self._parse_without_offer()
            self._parse(data[stopped.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _parse_without_offer(self) -> None:
        """Have another parser read the head that has come, as if nothing had been offered."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [part for part in value.split(b",") if part.strip().lower() not in _OFFER]
                value = b",".join(kept)
            if name not in _OFFER:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._parse(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        """A further request, which may come in one piece with the one before it."""
        if self._is_answering:
            raise ValueError("a request before its turn")  # see `on_headers_complete`
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; after a body they are trailers, which nothing here reads (RFC 9110, 6.5.1)."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The application begins here, unless the head is refused, or will be read again."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._options.max_header_bytes:
            self._refused = self._too_long()
            raise ValueError("a head is too long")  # the parser stops, `send_400_response` follows
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._refused = _NO_HOST  # RFC 9112, 3.2
            raise ValueError("no host, or several")
        if self.parser.get_method() == b"CONNECT":
            self._refused = _NO_TUNNEL
            raise ValueError("a tunnel is asked for")
        if self.parser.should_upgrade():
            return  # `_parse_without_offer` follows
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here: what follows is the next one's."""
        if self._in_head:
            return  # without its body: see `on_headers_complete`
        super().on_message_complete()
        self._in_head, self._num_head = True, 0
        self._cancel(self._arriving)
        self._arriving = None

    def pause_writing(self) -> None:
        """The client does not read what is ready for it: from here on it has a deadline."""
        super().pause_writing()
        self._leaving = self._later(self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._cancel(self._leaving)

    def connection_lost(self, exc: Exception | None) -> None:
        """No deadline outlives its connection."""
        self._cancel(self._arriving, self._leaving)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends, and would refuse what has not wholly come."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._refuse(_ENDING)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """What is no request is answered in the form of all errors."""
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self._refuse(self._refused)

    @property
    def _is_answering(self) -> bool:
        """Whether a request has come wholly, and its answer has not gone wholly."""
        cycle = self.cycle
        return cycle is not None and not (cycle.more_body or cycle.response_complete)

    def _later(self, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(self._options.io_timeout, call)

    def _cancel(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in filter(None, timers):
            timer.cancel()

    def _is_late(self) -> None:
        cycle = self.cycle
        if cycle is not None and cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(_TOO_SLOW)

    def _too_long(self) -> Refusal:
        told = f"The head must have at most {self._options.max_header_bytes} bytes."
        return Refusal(431, told, "invalid_request_error")

    def _refuse(self, refused: Refusal) -> None:
        """Say why, unless another answer is being sent, and hang up."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            text = json.dumps(refused.body).encode()
            head = (
                f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(text)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + text)
        self.transport.close()
