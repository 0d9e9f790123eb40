"""Drivers of Ray in processes of their own: `python -m tests.serve.ray_child NAME ARGUMENTS`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx

import foretoken


def other_version() -> None:
    """`foretoken serve` of another version than that of the replicas."""
    foretoken.__version__ = "0.0.1"
    from foretoken.cli import main

    sys.argv[1:] = ["serve", "tiny-python", "--replicas", "1", "--port", "0"]
    main()


def deploy(args: str) -> None:
    from foretoken.serve.command import prepare_own_cluster

    prepare_own_cluster()
    import ray
    from ray import serve

    from foretoken.serve.deployment import build

    port = 8100 + int(time.time()) % 800
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build(json.loads(args)), name="foretoken", route_prefix="/")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            print(json.dumps(list(map(list, _asked(http)))))
    finally:
        ray.shutdown()


def _asked(http: httpx.Client) -> Any:
    http.headers["x-api-key"] = "secret"
    for name in ("tiny-python", "small", "none"):
        body = {"model": name, "prompt": "def fibonacci(n):\n", "max_tokens": 8, "temperature": 0}
        answer = http.post("/v1/completions", json=body)
        yield answer.status_code, answer.json()
    stream = http.post("/v1/completions", json={**body, "model": "small", "stream": True})
    yield stream.status_code, stream.text
    yield 200, http.get("/metrics").text
    yield 200, http.get("/v1/models").json()
    yield http.get("/v1/models", headers={"x-api-key": ""}).status_code, ""


if __name__ == "__main__":
    {"other_version": other_version, "deploy": deploy}[sys.argv[1]](*sys.argv[2:])
