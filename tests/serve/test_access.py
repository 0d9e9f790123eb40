"""Who may call: by which key, or by which name of this machine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
import pytest

from foretoken import AsyncEngine
from foretoken.errors import ConfigError
from foretoken.serve.access import PAGE_FILES
from foretoken.serve.options import ServeOptions
from tests.serve.running import PATH, Running, connect, running

OURS = ["localhost", "LOCALHOST:8000", "localhost.:80", "a.localhost:1", "127.0.0.1:8000",
        "127.9.9.9", "[::1]:8000", "[::1]"]  # fmt: skip
THEIRS = ["evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost", "10.1.2.3",
          "127.0.0.1.evil.example", "[::2]:80", "::1", "localhost@evil.example", "x/localhost", "",
          "localhost:80:80", "[::1]evil.example", "0.0.0.0"]  # fmt: skip


def status(http: httpx.Client, host: str, path: str = "/v1/models", method: str = "GET") -> int:
    return http.request(method, path, headers={"Host": host}).status_code


@pytest.mark.parametrize("host", OURS)
def test_names_of_this_machine_are_answered(http: httpx.Client, host: str) -> None:
    assert status(http, host) == 200


@pytest.mark.parametrize("host", THEIRS)
def test_other_names_are_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/models", headers={"Host": host})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (421, "host_not_allowed", "Host")
    assert f"`Host` is {host!r}." in error["message"]
    assert "localhost, 127.0.0.1, [::1]" in error["message"]
    assert "--allowed-hosts" in error["message"]


def test_names_that_the_operator_gives_are_answered_too(target: Path) -> None:
    options = ServeOptions(allowed_hosts=("Proxy.example", "10.1.2.3", "fd00::7"))
    with (
        running(AsyncEngine(str(target)), options) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for host in (*OURS, "proxy.EXAMPLE:443", "10.1.2.3:80", "[fd00::7]:80"):
            assert status(http, host) == 200
        answer = http.get("/v1/messages", headers={"Host": "x.proxy.example"})
    assert (answer.status_code, answer.json()["type"]) == (421, "error"), "in Anthropic's shape"
    assert "[::1], 10.1.2.3, fd00::7, proxy.example" in answer.json()["error"]["message"]


def test_every_route_asks_for_the_name(http: httpx.Client) -> None:
    documented = [
        (method.upper(), path.replace("{name}", "tiny"))
        for path, methods in http.get("/openapi.json").json()["paths"].items()
        for method in methods
    ]
    others = [("GET", path) for path in (*PAGE_FILES, "/docs", "/openapi.json", "/nowhere")]
    preflights = [("OPTIONS", PATH), ("OPTIONS", "/"), ("HEAD", "/"), ("PUT", PATH)]
    assert len(documented) > 12
    for method, path in [*documented, *others, *preflights]:
        assert status(http, "evil.example", path, method) == 421, path


def test_an_origin_that_is_allowed_has_a_name_of_this_machine_too(target: Path) -> None:
    options = ServeOptions(allowed_origins=("*",))
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    with running(AsyncEngine(str(target)), options) as server:
        for host, code in (("localhost", 200), ("evil.example", 421)):
            answer = httpx.options(server.url + PATH, headers={"Host": host, **asked})
            assert answer.status_code == code
            assert ("access-control-allow-origin" in answer.headers) == (code == 200)


@pytest.mark.parametrize(
    ("line", "code"), [("", 200), ("Host: [::1]:8000\r\n", 200), ("Host: evil.example\r\n", 421)]
)
def test_a_client_of_http_1_0_may_name_no_host(server: Running, line: str, code: int) -> None:
    with closing(connect(server)) as client:
        client.sendall(f"GET /health HTTP/1.0\r\n{line}\r\n".encode())
        assert client.recv(12) == f"HTTP/1.1 {code}".encode()


@pytest.mark.parametrize(
    "options",
    [{"api_key": "key"}, {"host": "0.0.0.0"}, {"host": "10.1.2.3"}, {"allowed_hosts": ("*",)}],
)
def test_any_name_is_answered_where_a_page_is_kept_out_otherwise(
    target: Path, options: dict[str, str]
) -> None:
    """Probes of a pod come by its address."""
    with running(AsyncEngine(str(target)), ServeOptions(**options)) as server:
        headers = {"Host": "10.9.8.7:8000", "Authorization": "Bearer key"}
        for path in ("/health", "/v1/models"):
            assert httpx.get(server.url + path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allowed_hosts": ("http://a.example",)}, "without scheme"),
        ({"allowed_hosts": ("a.example:80",)}, "without scheme"),
        ({"allowed_hosts": ("",)}, "without scheme"),
        ({"allowed_hosts": ("a.example",), "api_key": "key"}, "left out with a key"),
        ({"allowed_hosts": ("a.example",), "host": "0.0.0.0"}, "left out with a key"),
    ],
)
def test_names_that_would_never_be_compared_are_refused(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeOptions(**options)  # type: ignore[arg-type]


def test_a_key_may_come_under_any_spelling_of_its_scheme(target: Path) -> None:
    with running(AsyncEngine(str(target)), ServeOptions(api_key="k3y à")) as server:
        asked = [("Bearer k3y à", 200), ("bearer k3y à", 200), ("BEARER  k3y à", 200),
                 ("Bearer k3y", 401), ("Bearer", 401), ("Basic k3y à", 401), ("k3y à", 401),
                 ("", 401)]  # fmt: skip
        for sent, code in asked:
            headers = {"Authorization": sent.encode()}
            answer = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert answer.status_code == code, sent
            assert (answer.headers.get("www-authenticate") == "Bearer") == (code == 401)
        for sent, code in (("k3y à", 200), ("Bearer k3y à", 401)):
            headers = {"x-api-key": sent.encode()}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == code
