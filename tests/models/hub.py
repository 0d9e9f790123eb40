"""A small model hub on the loopback: what `huggingface_hub` asks of one, and its faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_API = re.compile(
    r"/api/models/(?P<name>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/?]+))?"
)
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>[^?]+)")


class Hub:
    """Repositories by id, each a folder; every request is remembered.
    refusals: id to (status, X-Error-Code) that every request for it is answered with
    cut: bytes missing at the end of weights as they are sent; asked for the length, it tells all
    delay: seconds before weights are sent
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.refusals: dict[str, tuple[int, str]] = {}
        self.cut = 0
        self.delay = 0.0
        self.requests: list[str] = []
        self.url = ""

    @property
    def downloads(self) -> set[str]:
        found = [_FILE.match(r.removeprefix("GET ")) for r in self.requests]
        return {match["path"] for match in found if match}

    @contextmanager
    def served(self) -> Iterator[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self.url
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def commit_of(name: str) -> str:
    """The commit of a repository's `main`, its only one; `v1` is a tag of it."""
    return hashlib.sha1(name.encode()).hexdigest()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    addresses = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    _set(monkeypatch, **addresses, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE=False)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, HF_HUB_OFFLINE=True)


def _set(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    from huggingface_hub import constants

    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)


def cached_files(cache: Path) -> set[str]:
    snapshots = cache.glob("models--*/snapshots/*/**/*")
    return {path.name for path in snapshots if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal."""

    def _answer(self, with_body: bool) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        match = _API.match(self.path) or _FILE.match(self.path)
        name = match["name"] if match else ""
        if name in self.hub.refusals:
            return self._refuse(*self.hub.refusals[name])
        if match is None or name not in self.hub.repositories:
            return self._refuse(401, "RepoNotFound")
        if match["revision"] not in (None, "main", "v1", commit_of(name)):
            return self._refuse(404, "RevisionNotFound")
        folder = self.hub.repositories[name]
        if match.re is _FILE:
            return self._file(folder / match["path"], commit_of(name), with_body)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [str(path.relative_to(folder)) for path in files]
        if match["what"] == "tree":
            entries = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": commit_of(n)}
                for n, p in zip(names, files, strict=True)
            ]
            return self._json(entries)
        siblings = [{"rfilename": name} for name in names]
        return self._json({"id": name, "sha": commit_of(name), "siblings": siblings})

    def _file(self, path: Path, commit: str, with_body: bool) -> None:
        body = path.read_bytes()
        is_weights = path.suffix == ".safetensors"
        if with_body and is_weights:
            body = body[: len(body) - self.hub.cut]
            time.sleep(self.hub.delay)
        self._send(
            200, body, with_body, {"ETag": f'"{commit_of(str(path))}"', "X-Repo-Commit": commit}
        )

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), True, {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", False, {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
