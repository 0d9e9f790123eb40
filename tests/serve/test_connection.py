"""Where one request ends and the next begins: no byte of a body is ever read as a request."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import closing, suppress
from http.client import HTTPResponse

import pytest

from tests.serve.running import PATH, Running, connect

NEXT = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OFFERS = [
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\n",
    "Connection: upgrade\r\nConnection: x\r\nUpgrade: anything/1\r\nUpgrade: more\r\n",
]


def say(client: socket.socket, pieces: tuple[bytes, ...]) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for number, piece in enumerate(pieces):
        time.sleep(0.05 * (number > 0))  # else the server may read two as one
        with suppress(OSError):  # it may have hung up
            client.sendall(piece)


def heard(client: socket.socket) -> list[int]:
    found = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            found += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


def sent(*pieces: bytes, to: Running) -> list[int]:
    with closing(connect(to)) as client:
        say(client, pieces)
        return heard(client)


def answers(*pieces: bytes, to: Running) -> tuple[int, bytes, list[int]]:
    """Status and body of one answer, and the statuses of answers to `NEXT` after it."""
    with closing(connect(to)) as client:
        say(client, pieces)
        answer = HTTPResponse(client)
        answer.begin()
        body = answer.read()
        say(client, (NEXT,))
        return answer.status, body, heard(client)


def post(body: bytes, headers: str, *, chunked: bool) -> tuple[bytes, bytes]:
    """The head of a request, and its body as it goes over the wire."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    wire = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return f"{head}{headers}{length}\r\n\r\n".encode(), wire


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "any"])
def test_an_offer_to_upgrade_changes_no_request(
    server: Running, offer: str, segments: int, chunked: bool
) -> None:
    head, wire = post(b'{"prompt": "a", "max_tokens": 3}', offer, chunked=chunked)
    half = len(head) // 2
    three = (head[:half], head[half:] + wire[:9], wire[9:])
    pieces = {1: (head + wire,), 2: (head, wire), 3: three}[segments]
    status, body, after = answers(*pieces, to=server)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)
    assert after == [200]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
def test_a_body_that_is_a_request_is_a_body(server: Running, segments: int, chunked: bool) -> None:
    inner = NEXT.replace(b"/v1/models", b"/nowhere")  # 404, if it were answered
    head, wire = post(inner, OFFERS[0], chunked=chunked)
    pieces = (head + wire,) if segments == 1 else (head, wire)
    status, _, after = answers(*pieces, to=server)
    assert (status, after) == (400, [200])


@pytest.mark.parametrize(
    "request_",
    [
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 46\r\n\r\n",
        b"CONNECT /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 46\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 46\r\n"
        b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
        b"Content-Length: 46\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: +0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Length: 0\n\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    ],
    ids=["connect", "connect to a path", "h2", "two lengths", "two lengths and an offer",
         "another coding", "a space", "two numbers", "a sign", "bare line feeds", "a fold"],
)  # fmt: skip
def test_a_request_without_a_certain_end_is_refused_and_nothing_follows_it(
    server: Running, request_: bytes
) -> None:
    for pieces in ((request_ + NEXT,), (request_, NEXT)):
        assert sent(*pieces, to=server) == [400]


def test_trailers_are_no_headers(server: Running) -> None:
    """As headers, the first trailer would make the body JSON, and the rest would leave HTTP/1.1."""
    head, wire = post(b'{"prompt": "a", "max_tokens": 3}', "", chunked=True)
    head = head.replace(b"Content-Type: application/json\r\n", b"")
    trailers = b"Content-Type: application/json\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    status, _, after = answers(head + wire[:-2] + trailers, to=server)
    assert (status, after) == (400, [200])


@pytest.mark.parametrize("offer", ["", OFFERS[0]])
def test_a_body_that_waits_to_be_asked_for_is_read_once(server: Running, offer: str) -> None:
    body = b'{"prompt": "a", "max_tokens": 3}'
    head, wire = post(body, offer + "Expect: 100-continue\r\n", chunked=False)
    with closing(connect(server)) as client:
        client.sendall(head)
        go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert client.recv(len(go_on), socket.MSG_WAITALL) == go_on
        say(client, (wire,))
        answer = HTTPResponse(client)
        answer.begin()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
        say(client, (NEXT,))
        assert heard(client) == [200]


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: localhost\r\n"])
def test_a_request_names_one_host(server: Running, hosts: bytes) -> None:
    status, body, after = answers(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n", to=server)
    assert (status, b"`Host`" in body, after) == (400, True, [])
