"""Logs: a line for each request, with its name and without its text."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing
from functools import partial
from typing import Any

import httpx
import pytest

from foretoken.errors import ConfigError
from foretoken.serve.logs import JsonLines
from foretoken.serve.options import ServeOptions
from tests.serve.running import Running, until
from tests.serve.test_lifetime import LONG, connect, request

PATH = "/v1/completions"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [r for r in caplog.records if r.name == "foretoken.serve.logs"]
    return [{**json.loads(JsonLines().format(record))} for record in found]


def is_logged(caplog: pytest.LogCaptureFixture, number: int) -> bool:
    return len(lines(caplog)) == number


def test_a_request_is_one_line_and_has_a_name(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "my secret", "max_tokens": 5, "ignore_eos": True, "user": "somebody"}
    with caplog.at_level(logging.INFO, "foretoken"):
        for number, stream in enumerate((False, True), start=1):
            headers = {"X-Request-Id": f"client/{stream}"}
            answer = http.post(
                f"{PATH}?key=hidden", json={**body, "stream": stream}, headers=headers
            )
            assert answer.headers["x-request-id"] == f"client/{stream}"
            until(partial(is_logged, caplog, number))
        refused = http.post(
            PATH, json={**body, "n": "secret"}, headers={"X-Request-Id": "a b" * 99}
        )
        http.get("/health")
        until(lambda: len(lines(caplog)) == 3)
    whole, streamed, bad = lines(caplog)
    for line in (whole, streamed):
        assert line.pop("seconds") > 0
        assert line.pop("time").endswith("+00:00")
        assert line == {
            "level": "info", "message": "request", "method": "POST", "path": PATH, "status": 200,
            "complete": True, "prompt_tokens": line["prompt_tokens"], "completion_tokens": 5,
        }  # fmt: skip
        assert line["prompt_tokens"] > 0
    assert bad["status"] == refused.status_code == 400
    assert len(refused.headers["x-request-id"]) == 32, "a name that could not be a header's"
    for word in ("secret", "hidden", "somebody"):
        assert word not in caplog.text


def test_a_client_that_leaves_shows(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "foretoken"):
        for stream in (False, True):
            with closing(connect(server)) as leaving:
                body = {**LONG, "prompt": "def f(", "max_tokens": 1900, "stream": stream}
                leaving.sendall(request(body))
                until(lambda: server.engine.status.num_running == 1)
            until(lambda: server.engine.status.num_open == 0)
        until(lambda: len(lines(caplog)) == 2)
    assert [line["complete"] for line in lines(caplog)] == [False, False]
    assert lines(caplog)[0]["status"] == 499


def test_lines_are_json_whatever_is_said() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 1, 'say "%s"', ("a\nb",), sys.exc_info())
    text = JsonLines().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert found["message"] == 'say "a\nb"'
    assert "two\nlines" in found["traceback"]
    with pytest.raises(ConfigError, match="log_level"):
        ServeOptions(log_level="loud")
