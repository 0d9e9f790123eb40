"""A server with OpenAI's API as the system under test, over HTTP/1.1 with asyncio's streams.

Each request has a new connection, and connecting is part of its time. Before the measurement,
test requests find out which fields beyond the API the server takes.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from foretoken.errors import ConfigError
from foretoken.lab.bench.load import (
    BenchRequest,
    Client,
    Record,
    RequestFailedError,
    ServerGoneError,
)
from foretoken.lab.bench.offline import set_fields
from foretoken.lab.bench.options import BenchCase
from foretoken.outputs import SpeculationMetrics
from foretoken.sampling.params import SamplingParams

_MAX_LINE = 2**20  # bytes of a line, or of the headers
_FIELDS = {name: name for name in ("num_speculative_tokens", "drafter")}
_FIELDS |= {"rejection_sample_method": "rule"}  # field of a case -> its name in `speculative`
_WRONG_BODY = (400, 422)  # statuses of a refused field
_COUNTING_OWNERS = ("foretoken", "vllm")  # servers that can send a token count per piece
_METRIC = re.compile(r"^(\w+):spec_decode_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Server(Client):
    """A server, and the fields that it takes.

    url: the server's root, with or without `/v1`
    model: None: the first model that the server lists
    timeout: seconds without data after which a request has failed
    speculates: whether the server drafts, and requests can set how
    """

    def __init__(
        self,
        url: str,
        params: SamplingParams,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", url, "a URL such as http://127.0.0.1:8000")
        self.url, self.model, self.timeout = url, model, timeout
        self._host, self._netloc = parts.hostname, parts.netloc.rpartition("@")[2]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._params = set_fields(params, without=("seed", "max_tokens"))
        self._extra: dict[str, Any] = {"ignore_eos": True}
        self._stream_options = {"include_usage": True}
        self.speculates, self.notes = False, list[str]()

    async def prepare(self) -> None:
        """Learn the model and fields; `ConfigError`: no answer, no model, or no completion."""
        try:
            listed = (await self.get("/v1/models"))["data"]
            owners = {str(card["id"]): card.get("owned_by") for card in listed}
            self.model = self.model or next(iter(owners))
            if owners.get(self.model) in _COUNTING_OWNERS:
                self._stream_options["continuous_usage_stats"] = True
            if owners.get(self.model) == "foretoken":
                self.speculates = await self.takes(speculative={"enabled": True})
            elif not await self.takes(**self._extra):
                self._extra = {}
                self.notes.append("The server refuses `ignore_eos`: answers may be too short.")
        except (ServerGoneError, RequestFailedError) as error:
            bound = "an OpenAI-compatible server that answers"
            raise ConfigError("url", self.url, bound, f"{error}.") from None
        except (KeyError, TypeError, StopIteration, AttributeError):
            bound = "an OpenAI-compatible server, whose /v1/models lists a model"
            raise ConfigError("url", self.url, bound) from None
        if not self.speculates:
            self.notes.append(
                "Requests to this server cannot switch drafts on and off: there is no plain "
                "decoding to compare with, and no speed-up is reported."
            )

    async def takes(self, **fields: Any) -> bool:
        """Whether the server takes these fields; `ConfigError` if it completes no prompt."""
        body = {"model": self.model, "prompt": "1", "max_tokens": 1}
        status, answer = await self.call("POST", "/v1/completions", {**body, **fields})
        if status in _WRONG_BODY:
            fields = {}
            status, answer = await self.call("POST", "/v1/completions", body)
        if status == 200:
            return bool(fields)
        remedy = f"The server answered {status}: {answer[:200].decode(errors='replace')}"
        raise ConfigError("url", self.url, "a server that completes a prompt", remedy)

    def shapes(self) -> dict[str, Any]:
        """What is known about the server; the hardware in a results file is the client's."""
        return {"url": self.url, "model": self.model, "sampling": self._params}

    async def send(self, request: BenchRequest, case: BenchCase, record: Record) -> None:
        body = {
            "model": self.model, "messages" if request.is_chat else "prompt": request.prompt,
            "max_tokens": request.num_output, "seed": request.seed, "stream": True,
            "stream_options": self._stream_options, **self._extra, **self._params,
            "temperature": case.fields["temperature"],
        }  # fmt: skip
        if self.speculates:
            fields = ((_FIELDS.get(name), value) for name, value in case.fields.items())
            body["speculative"] = {k: v for k, v in fields if k is not None and v is not None}
        path = f"/v1/{'chat/' if request.is_chat else ''}completions"
        async with self._request("POST", path, body) as (status, pieces):
            if status != 200:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                raise RequestFailedError(f"status {status}: {text[:200]}")
            async with aclosing(_events(pieces)) as events:
                async for event in events:
                    if "error" in event:
                        raise RequestFailedError(f"an error in the stream: {event['error']}")
                    try:
                        _record_event(event, record)
                    except (AttributeError, TypeError, ValueError):
                        message = f"no completion in the stream: {json.dumps(event)[:80]}"
                        raise RequestFailedError(message) from None
        record.num_output = record.num_output or len(record.arrivals)
        if not record.arrivals:
            raise RequestFailedError("a stream without a token")

    async def get(self, path: str) -> Any:
        """Get a path; returns the decoded JSON, or the text if it is no JSON."""
        status, answer = await self.call("GET", path)
        if status != 200:
            raise RequestFailedError(f"{path} answered {status}")
        try:
            return json.loads(answer)
        except ValueError:
            return answer.decode(errors="replace")

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send a request that is not streamed; returns the status and the whole body."""
        async with self._request(method, path, body) as (status, pieces):
            return status, b"".join([piece async for piece in pieces])

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Send a request; yields the status, and the body as a stream of pieces.

        `RequestFailedError`: an answer that is incomplete, late, or no HTTP; `ServerGoneError`: no
        connection.
        """
        opening = asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_MAX_LINE)
        try:
            reader, writer = await asyncio.wait_for(opening, self.timeout)
        except (OSError, TimeoutError) as error:
            raise ServerGoneError(f"no connection to {self._netloc}: {error!s}") from error
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {self._root}{path} HTTP/1.1", f"Host: {self._netloc}"]
        head += ["Connection: close", "Content-Type: application/json"]
        head.append(f"Content-Length: {len(data)}")
        head += [f"Authorization: Bearer {self._key}"] if self._key else []
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            async with asyncio.timeout(self.timeout):
                await writer.drain()
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            version, _, status = lines[0].partition(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError(f"{lines[0][:80]!r} is no status line")
            pairs = (line.partition(":") for line in lines[1:] if line)
            headers = {name.lower(): value.strip().lower() for name, _, value in pairs}
            yield int(status[:3]), self._body(reader, headers)
        except (
            *(OSError, EOFError, ValueError, RecursionError, TimeoutError),
            asyncio.LimitOverrunError,
        ) as error:
            why = f"no news for {self.timeout:g} s" if isinstance(error, TimeoutError) else error
            raise RequestFailedError(f"the answer broke off or is no HTTP: {why!s}") from error
        finally:
            writer.transport.abort()

    async def _body(
        self, reader: asyncio.StreamReader, headers: Mapping[str, str]
    ) -> AsyncIterator[bytes]:
        """The pieces of a body that is chunked, of a stated length, or ends with the connection."""
        remaining = int(headers["content-length"]) if "content-length" in headers else None
        while remaining != 0:
            async with asyncio.timeout(self.timeout):
                if headers.get("transfer-encoding") == "chunked":
                    size = int((await reader.readuntil(b"\n")).split(b";")[0], 16)
                    piece = (await reader.readexactly(size + 2))[:-2]
                elif not (piece := await reader.read(remaining or 2**16)) and remaining:
                    raise EOFError(f"{remaining} bytes are missing")
            if not piece:
                return
            remaining = None if remaining is None else remaining - len(piece)
            yield piece

    async def counts(self) -> SpeculationMetrics | None:
        try:  # metrics are named as by vLLM and Foretoken
            return _read_metrics(str(await self.get("/metrics")))
        except (ServerGoneError, RequestFailedError, ValueError, OverflowError):
            return None

    async def tokens(self, text: str) -> list[int]:
        try:
            body = {"model": self.model, "prompt": text}
            status, answer = await self.call("POST", "/tokenize", body)
            tokens = json.loads(answer)["tokens"] if status == 200 else []
        except (RequestFailedError, ValueError, KeyError, TypeError):
            return []
        is_ids = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        return tokens if is_ids else []


async def _events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The objects in a stream of server-sent events, up to `[DONE]`."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise RequestFailedError(f"no object in the stream: {data[:80]!r}")
            yield event
    raise RequestFailedError("the stream broke off before `[DONE]`")


def _read_metrics(text: str) -> SpeculationMetrics | None:
    """Counts from the text of `/metrics`; None if it has no counts of drafts.

    `ValueError` or `OverflowError`: a count is no number.
    """
    metrics, has_totals = SpeculationMetrics(), False
    by_name = defaultdict[str, Counter[int]](Counter)
    for _, name, labels, value in _METRIC.findall(text):
        if name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            setattr(metrics, name, getattr(metrics, name) + int(float(value)))
            has_totals = True
        elif position := re.search(r'position="(\d{1,3})"', labels):
            by_name[name][int(position[1])] += int(float(value))
    for prefix, name in (("accepted", "num_accepted_tokens"), ("drafted", "num_draft_tokens")):
        if by_position := by_name.get(f"{name}_per_pos"):
            dense = [by_position[i] for i in range(max(by_position) + 1)]
            setattr(metrics, f"{prefix}_per_position", dense)
    return metrics if has_totals else None


def _record_event(event: Mapping[str, Any], record: Record) -> None:
    """Add an event of a stream to a record; raises an error if the event is no completion."""
    usage = event.get("usage") or {}
    counts = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
    if min(counts) < 0 or not all(isinstance(count, int) for count in counts):
        raise ValueError(counts)
    record.num_input, record.num_output = map(max, counts, (record.num_input, record.num_output))
    if any(_has_tokens(choice) for choice in event.get("choices") or ()):
        if not record.arrivals:
            record.num_first = record.num_output or 1
        record.arrivals.append(time.perf_counter())


def _has_tokens(choice: Any) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(name) for name in names)
