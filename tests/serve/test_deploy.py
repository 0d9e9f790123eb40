"""Behind a proxy and with TLS: what docs/deploy.md shows is what runs here."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from foretoken import AsyncEngine, ConfigError
from foretoken.cli.app import app as command
from foretoken.serve.access import KEYLESS_PATHS
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from tests.project.source import ROOT
from tests.serve.running import PATH, PROMPT, running
from tests.support.asynchronous import PATIENCE, until

CONF = ROOT / "docs" / "deploy" / "foretoken.conf"
KEY = {"Authorization": "Bearer secret"}
LONG = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "abc", "max_tokens": 60}

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for this machine and `llm.example`, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    names = "subjectAltName=DNS:localhost,DNS:llm.example,IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
               "-nodes", "-days", "2", "-subj", "/CN=llm.example", "-addext", names,
               "-keyout", "key.pem", "-out", "cert.pem"]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def trusting(files: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files / "cert.pem"))


@needs_openssl
def test_the_server_speaks_tls_and_asks_for_certificates(files: Path, target: Path) -> None:
    cert, key = str(files / "cert.pem"), str(files / "key.pem")
    options = ServeOptions(
        ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2, api_key="secret"
    )
    with running(AsyncEngine(str(target)), options) as server:
        url = server.url.replace("http://", "https://")
        known = trusting(files)
        known.load_cert_chain(cert, key)
        with httpx.Client(base_url=url, verify=known, timeout=PATIENCE) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").status_code == 401
            with http.stream("POST", PATH, json=LONG | SHORT, headers=KEY) as stream:
                assert stream.read().endswith(b"data: [DONE]\n\n")
            with http.stream("POST", PATH, json=LONG | SHORT, headers=KEY) as stream:
                next(stream.iter_raw())
            until(lambda: server.engine.status.num_open == 0)  # its client has left
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trusting(files))  # without a certificate
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health")


@needs_openssl
def test_files_that_are_no_pair_are_refused_before_a_model_is_loaded(files: Path) -> None:
    for cert, key in (("no/such.pem", "key.pem"), ("cert.pem", "cert.pem")):
        words = ["--ssl-certfile", str(files / cert), "--ssl-keyfile", str(files / key)]
        done = CliRunner().invoke(command, ["serve", "no-such-model", "--port", "0", *words])
        assert done.exit_code == 2
        assert "`ssl_certfile, ssl_keyfile` is '" in done.output


def test_a_path_of_a_proxy_may_be_left_or_taken_off(target: Path) -> None:
    options = ServeOptions(root_path="/llm", api_key="secret")
    with (
        running(AsyncEngine(str(target)), options) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for prefix in ("", "/llm"):
            assert http.get(f"{prefix}/health").status_code == 200
            assert http.get(f"{prefix}/v1/models").status_code == 401
            assert http.get(f"{prefix}/v1/models", headers=KEY).status_code == 200
            error = http.post(f"{prefix}/v1/messages", json={}).json()
            assert error["type"] == "error", "Anthropic's body"
            assert http.get(f"{prefix}/page/page.js").status_code == 200
        assert http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert http.get("/llm").headers["location"].endswith("/llm/")
        said = http.get("/llmx/health", headers=KEY).json()["error"]["message"]
        assert said.startswith("GET /llmx/health is not here.")
        assert http.get("/llm/llm/metrics").status_code == 401, "it is taken off once"
        assert http.get("/llm/llm/metrics", headers=KEY).status_code == 404


def test_a_path_of_a_proxy_hides_none_of_ours(target: Path) -> None:
    app = build_app(AsyncEngine(str(target)), ServeOptions())
    for path in {*app.openapi()["paths"], *KEYLESS_PATHS} - {"/"}:
        first = "/" + path.split("/")[1]
        for root in (first, f"{first}/more"):
            with pytest.raises(ConfigError, match=f"`root_path` is '{root}': must"):
                ServeOptions(root_path=root)
    assert ServeOptions(root_path="/llm/v1").root_path == "/llm/v1"


def test_the_user_of_the_image_owns_the_folder_of_its_models() -> None:
    lines = (CONF.parent / "Containerfile").read_text(encoding="utf-8").splitlines()
    (home,) = [line.partition("=")[2] for line in lines if line.startswith("ENV HF_HOME=")]
    assert lines.index("USER foretoken") < lines.index(f"RUN mkdir {home}")
    assert f"A volume at `{home}` keeps" in (ROOT / "docs" / "deploy.md").read_text("utf-8")


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[str]:
    """nginx with the file of docs/deploy; only its two ports differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONF.read_text(encoding="utf-8")
    for old, new in (("listen 443 ", f"listen 127.0.0.1:{port} "), ("127.0.0.1:8000", upstream)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "foretoken.conf").write_text(text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {kind};" for kind in kinds)
    whole = f"daemon off; pid pid; error_log stderr; events {{}} http {{ access_log off; {paths}"
    (folder / "nginx.conf").write_text(f"{whole} include foretoken.conf; }}\n")
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(command)

    def listens() -> bool:
        assert process.poll() is None
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens)
        yield f"https://127.0.0.1:{port}/llm"
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.trial
@needs_openssl
@needs_nginx
def test_nginx_passes_streams_on_as_they_come(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path / "foretoken")
    options = ServeOptions(root_path="/llm", api_key="secret")
    engine = AsyncEngine("tiny-python", {"method": "draft_model"}, threads=1)
    with (
        running(engine, options) as server,
        nginx(tmp_path, server.url.removeprefix("http://")) as url,
        httpx.Client(verify=trusting(files), timeout=PATIENCE, headers=KEY) as http,
    ):
        assert http.get(f"{url}/v1/models").status_code == 200
        assert http.get(f"{url}/v1/models", headers={"Authorization": ""}).status_code == 401
        for path in ("metrics", "llm/metrics", "/metrics", "%6detrics", "x/../metrics"):
            answer = http.get(f"{url}/{path}", headers={"Authorization": ""})
            assert answer.status_code == (401 if path == "llm/metrics" else 403)
        assert http.get(f"{url}/llm/metrics").status_code == 404
        assert http.get(url).headers["location"].endswith("/llm/")
        page = http.get(f"{url}/")
        assert page.status_code == 200
        assert 'src="page/' in page.text, "by its own path"
        assert http.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        times = []
        with http.stream("POST", url + PATH, json=LONG | {"max_tokens": 400}) as stream:
            for _ in stream.iter_raw():
                times.append(time.perf_counter())
        assert len(times) > 20
        assert times[len(times) // 2] - times[0] > 0.2 * (times[-1] - times[0])
        with http.stream("POST", url + PATH, json=LONG) as stream:
            next(stream.iter_raw())
        until(lambda: server.engine.status.num_open == 0)  # nginx says that its client has left
        long = {"prompt": "x" * 9 * 2**20}
        assert http.post(url + PATH, json=long).status_code == 413
        time.sleep(4)  # longer than a kept connection
        for _ in range(20):
            assert http.post(url + PATH, json={"prompt": "a", "max_tokens": 2}).status_code == 200
