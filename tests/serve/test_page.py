"""The page's files and what it asks the server; `test_page_browser.py` uses it in a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx

from foretoken import AsyncEngine
from foretoken.serve.access import KEYLESS_PATHS, PAGE_FILES
from foretoken.serve.options import ServeOptions
from tests.project.source import PACKAGE
from tests.serve.running import PROMPT, Running, fail_later, post, running, until

FOLDER = PACKAGE / "serve" / "page"
HTML = (FOLDER / "index.html").read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.js"))}


class Markup(HTMLParser):
    """Elements in order, each with its attributes and the elements around it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._around: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), list(self._around)))
        if tag not in ("meta", "link", "input"):
            self._around.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._around.pop() == tag


def elements() -> list[tuple[str, dict[str, str | None], list[str]]]:
    markup = Markup()
    markup.feed(HTML)
    return markup.found


def test_every_file_is_served_and_kept_by_its_tag(http: httpx.Client) -> None:
    assert {*PAGE_FILES.values()} == {path.name for path in FOLDER.iterdir()}
    for path, name in PAGE_FILES.items():
        answer = http.get(path)
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["cache-control"] == "no-cache"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        for known in (answer.headers["etag"], f'"x", W/{answer.headers["etag"]}'):
            again = http.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
        assert http.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
    kinds = {http.get(path).headers["content-type"].split(";")[0] for path in PAGE_FILES}
    assert kinds == {"text/html", "text/css", "text/javascript", "image/svg+xml"}
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/", "/page/index.html"):
        assert http.get(path).status_code == 404


def test_it_is_small_and_nothing_in_it_leaves_this_server() -> None:
    assert sum(len(text.splitlines()) for text in SCRIPTS.values()) <= 540
    for text in (HTML, *SCRIPTS.values(), (FOLDER / "page.css").read_text(encoding="utf-8")):
        assert {*re.findall(r"https?://[^\s\"']+", text)} <= {"http://www.w3.org/2000/svg"}
    for tag, attributes, _ in elements():
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert tag != "style"
        for name in ("src", "href"):
            assert f"/{attributes.get(name, 'page/page.js')}" in PAGE_FILES
    for text in SCRIPTS.values():
        imported = re.findall(r'from "\./([\w.]+)"', text)
        assert {*imported} <= {*SCRIPTS}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_every_control_has_a_name_and_every_id_is_there() -> None:
    found = elements()
    ids = [attributes["id"] for _, attributes, _ in found if "id" in attributes]
    assert len({*ids}) == len(ids)
    for tag, _, around in found:
        assert tag not in ("input", "select", "textarea") or "label" in around
    named = [a[name] for _, a, _ in found for name in ("aria-labelledby",) if name in a]
    used = [name for text in SCRIPTS.values() for name in re.findall(r'byId\("([\w-]+)"\)', text)]
    assert used
    assert {*named, *used} - {*ids} == set()


def test_the_state_says_what_there_is_and_how_busy_it_is(
    server: Running, http: httpx.Client
) -> None:
    state = http.get("/page/state").json()
    now = state.pop("now")
    assert state == {
        "model": "tiny", "has_chat": True, "num_drafts": 5, "adapts": False,
        "drafter": "draft_model", "drafters": ["draft_model", "prediction", "hybrid"],
        "predictors": ["prediction", "hybrid"], "rule": "standard",
        "rules": ["standard", "block", "coupled"],
    }  # fmt: skip
    for name in ("drafter", "rule"):  # every one that is offered is served
        for value in state[f"{name}s"]:
            body = {"prompt": PROMPT, "max_tokens": 2, "speculative": {name: value}}
            assert "choices" in post(http, "/v1/completions", **body)
    assert now.keys() == {
        "running", "waiting", "kv_cache_usage", "num_draft_tokens", "num_accepted_tokens", "failure"
    }  # fmt: skip
    before = http.get("/page/state").json()["now"]
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    metrics = post(http, "/v1/completions", **body)["metrics"]["speculative_decoding"]
    after = http.get("/page/state").json()["now"]
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    assert drafted == metrics["num_draft_tokens"] > 0
    long = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 4}
    with http.stream("POST", "/v1/completions", json=long) as answer:
        pieces = answer.iter_raw()  # one that is collected closes its stream
        next(pieces)
        busy = http.get("/page/state").json()["now"]
        assert busy["running"] == 4
        assert 0 < busy["kv_cache_usage"] < 1
    until(lambda: server.engine.status.num_open == 0)


def test_an_engine_without_drafts_a_key_and_a_failure(target: Path) -> None:
    engine = AsyncEngine(str(target))
    with running(engine, ServeOptions(api_key="secret")) as server:
        assert {*PAGE_FILES} < KEYLESS_PATHS
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/page/state").status_code == 401
        headers = {"Authorization": "Bearer secret"}

        def state() -> dict[str, Any]:
            found = httpx.get(f"{server.url}/page/state", headers=headers).json()
            assert isinstance(found, dict)
            return found

        found = state()
        assert (found["num_drafts"], found["drafter"], found["drafters"]) == (0, "", [])
        assert found["has_chat"] is False
        assert found["now"]["failure"] is None
        fail_later(engine.engine, "step", "the step is broken", steps=0)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"}, headers=headers)
        assert "The engine failed" in state()["now"]["failure"]
