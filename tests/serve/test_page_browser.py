"""The page in a real browser, where there is one: Chromium, through Playwright."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.serve.running import Running, chunks, running
from tests.support.asynchronous import PATIENCE, Gate, until

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(
    not BROWSER, reason="no Chromium here to show the page in: apt install chromium"
)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PROMPT = 'import os\n# <img src=x onerror="document.title = 1">\n'
HOSTILE = '<img src=x onerror="document.title = 1"><script>document.title = 1</script>'
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, server: Running) -> Iterator[Open]:
    """Opens the page; at the end there was no error in it, and no request to another server."""
    contexts, wrong = [], []

    def watch(page: Any, url: str, expected: str) -> None:
        def said(message: Any) -> None:
            if message.type in ("error", "warning") and not re.search(expected, message.text):
                wrong.append(message.text)

        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(url) else None)

    def open_page(
        width: int = 1280, scheme: str = "light", expected: str = "^$", url: str = server.url,
        height: int = 800,
    ) -> Any:  # fmt: skip
        size = {"width": width, "height": height}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * PATIENCE)
        watch(page, url, expected)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def run(page: Any, **fields: str) -> None:
    page.wait_for_selector("#run:enabled")
    for name, value in fields.items():
        field = page.locator(f"#{name}")
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#run")
    page.wait_for_selector("#run:enabled")


def test_no_run_can_start_before_the_server_has_answered(opened: Open) -> None:
    page = opened()
    held: list[Any] = []
    page.route("**/page/state", lambda route: held.append(route))
    page.reload()
    until(lambda: bool(held) or page.wait_for_timeout(10))
    assert page.locator("#run").is_disabled()
    page.unroute("**/page/state")  # the held requests go on
    page.wait_for_selector("#run:enabled")


def numbers(element: Any) -> list[float]:
    """All numbers in the detail, with all their digits."""
    return [float(one.get_attribute("value")) for one in element.locator("data").all()]


def test_tokens_have_origins_and_the_numbers_of_the_trace(opened: Open, http: httpx.Client) -> None:
    page = opened()
    run(page, prompt=PROMPT, temperature="0.8", max_tokens="60", seed="5", pairs="0")
    body = {"prompt": PROMPT, "temperature": 0.8, "max_tokens": 60, "seed": 5,
            "speculative": {"trace": True}}  # fmt: skip
    found = [c for chunk in chunks(http, "/v1/completions", **body) for c in chunk["choices"]]
    trace = [token for choice in found for token in choice["trace"]]
    shown = page.locator("#tokens span.token")
    origins = [token["origin"] for token in trace]
    classes = shown.evaluate_all("all => all.map(e => e.className.split(' ').at(-1))")
    assert classes == origins
    assert {"accepted", "resampled", "bonus", "plain"} == {*origins}
    text = "".join(shown.all_text_contents())
    assert text == "".join(choice["text"] for choice in found)
    for origin in dict.fromkeys(origins):
        assert page.locator(f"#n-{origin}").text_content() == str(origins.count(origin))
    for origin in ("accepted", "resampled", "bonus"):
        index = origins.index(origin)
        shown.nth(index).hover()
        token, detail = trace[index], page.locator("#detail")
        records = [token, *token["dropped"]]
        values = [r[name] for r in records for name in ("p", "q", "u", "threshold")]
        assert numbers(detail) == [value for value in values if value is not None]
        assert (len(values) > 4) == bool(token["dropped"])
        if origin == "resampled":
            assert token["dropped"][0]["reason"] in detail.inner_text()
    dropped = page.locator("#tokens s")
    assert dropped.count() == sum(len(token["dropped"]) for token in trace) > 0
    assert not dropped.first.is_visible()
    page.check("#show-dropped")
    assert dropped.first.is_visible()
    rounds = 1 + trace[-1]["round"]
    assert page.locator(".step").count() == rounds
    assert page.locator("#per-step").text_content() == f"{len(trace) / rounds:.2f}"
    drafts = [r for token in trace for r in (token, *token["dropped"]) if r["draft_index"] == 0]
    accepted = sum(r["origin"] == "accepted" for r in drafts)
    first = page.locator("#positions tbody tr").first
    assert f"({accepted} of {len(drafts)})" in first.inner_text()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "0", "pairs": "3"}, "are the same, as they must be at temperature 0"),
        ({"rule": "coupled", "pairs": "1"}, "are the same, as they must be under the rule coupled"),
        ({"rule": "block", "pairs": "1"}, "the rule block keeps their distribution"),
        ({"api": "chat", "temperature": "0", "pairs": "1"}, "are the same"),
    ],
)
def test_the_comparison_says_what_speculation_brought(
    opened: Open, fields: dict[str, str], said: str
) -> None:
    page = opened()
    page.evaluate(RECORD, "#verdict")
    run(page, prompt="import os\nimport sys\n", max_tokens="40", **fields)
    assert float(page.locator("#ratio").inner_text().removesuffix("×")) > 0
    *before, verdict = page.evaluate("recorded")
    assert before[0] == "To be timed when the text is there."
    assert before[1:] == [f"Timing: {i} of {fields['pairs']}" for i in range(1, len(before))]
    if fields["pairs"] == "1":
        assert re.fullmatch(r"Too few for a verdict: .+ in 1 pair; 2 more are needed\.", verdict), (
            verdict
        )
    else:
        assert re.match(r"(Speculation|No clear)", verdict)
    assert said in page.locator("#same").inner_text()
    assert page.locator("#on-text").text_content() == page.locator("#tokens").evaluate(
        "e => [...e.querySelectorAll('span')].map(x => x.textContent).join('')"
    )
    for name in ("on", "off"):
        assert re.fullmatch(r"\d+ tokens/s", page.locator(f"#{name}-speed").inner_text())


RECORD = """selector => {
  window.recorded = [];
  const element = document.querySelector(selector);
  const observer = new MutationObserver(() => recorded.push(element.textContent));
  observer.observe(element, {childList: true});
}"""


def boxes(page: Any, selector: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = page.evaluate(
        """selector => Object.fromEntries(
          [...document.querySelectorAll(selector)].filter(e => e.checkVisibility())
            .map(e => [e.id || e.textContent.trim(), e.getBoundingClientRect().toJSON()]))""",
        selector,
    )
    assert found
    return found


def test_it_stands_on_one_edge_and_fingers_hit_it(opened: Open) -> None:
    page = opened()
    page.wait_for_selector("#run:enabled")
    targets = "button, select, input:not([type=checkbox]), label.check, summary, header a"
    for width, height in ((320, 640), (390, 844), (1280, 800), (1900, 1000)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        small = [name for name, box in boxes(page, targets).items() if box["height"] < 44]
        assert small == []
        fields = boxes(page, "form input, form select")
        assert {box["height"] for box in fields.values()} == {44}
        for left, right in (("temperature", "max_tokens"), ("seed", "k")):
            assert fields[left]["y"] == fields[right]["y"], width
        lined = ["header h1", "form"] if width > 960 else ["header h1", "form", "section"]
        lefts = {page.locator(one).first.bounding_box()["x"] for one in lined}
        assert len(lefts) == 1, (width, lefts)
        rights = {box["right"] for box in boxes(page, "#results, section").values()}
        clear = page.evaluate("document.documentElement.clientWidth") - lefts.pop()
        assert len(rights) == 1
        assert rights.pop() == pytest.approx(clear, abs=8)  # half of a scroll bar
    page.goto(page.url + "docs")
    assert boxes(page, "header a")["openapi.json"]["height"] >= 44
    assert len({round(box["x"]) for box in boxes(page, "header h1, section").values()}) == 1


def test_the_form_stays_next_to_long_results_and_steps_have_axes(opened: Open) -> None:
    page = opened(height=700)
    run(page, max_tokens="150", seed="3", pairs="0")
    for end in ("0", "document.documentElement.scrollHeight"):
        page.evaluate(f"scrollTo(0, {end})")
        for name, box in boxes(page, "#form, #run, #stop").items():
            assert 0 <= box["top"] < box["bottom"] <= 700, name
    assert page.evaluate("scrollY") > 100
    labels = page.locator(".axis").all_inner_texts()
    assert labels == ["tokens in a step", "number of the step"]
    page.evaluate("document.querySelector('#steps').scrollLeft = 0")
    counts = boxes(page, "#counts .tick")
    assert [*counts] == ["0", "1", "2", "3", "4", "5", "6"]  # with 5 drafts
    column = page.locator(".step").first
    cells = [one.bounding_box() for one in column.locator("i").all()]
    for number, cell in enumerate(cells):  # each from one count to the next
        ends = [counts[str(n)]["y"] + counts[str(n)]["height"] / 2 for n in (number, number + 1)]
        assert [cell["y"] + cell["height"], cell["y"]] == pytest.approx(ends, abs=2)
    numbered = page.locator(".step:has(.tick)")
    rounds = page.locator(".step").count()
    assert numbered.locator(".tick").all_inner_texts() == [str(n) for n in range(0, rounds, 5)]
    for tick in (page.locator(".step").nth(10), page.locator(".step").nth(10).locator(".tick")):
        box = tick.bounding_box()
        middle = page.locator(".step").nth(10).bounding_box()["x"] + 8
        assert box["x"] + box["width"] / 2 == pytest.approx(middle, abs=1)
    for selector in (".axis", "#counts .tick", ".step .tick"):
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector
        size = page.locator(selector).first.evaluate("e => getComputedStyle(e).fontSize")
        assert float(size.removesuffix("px")) >= 12


def test_it_is_used_by_keys_alone(opened: Open) -> None:
    page = opened()
    page.wait_for_selector("#run:enabled")
    page.select_option("#pairs", "0")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#status:not(:empty)")
    page.wait_for_selector("#run:enabled")
    page.focus("#show-dropped")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tokens"
    detail = page.locator("#detail")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert detail.is_visible()
    focused = page.evaluate(
        "[...document.querySelectorAll('.token')].indexOf(document.activeElement)"
    )
    assert focused == 2
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement === document.querySelector('#tokens').lastChild")
    page.keyboard.press("Home")
    assert detail.is_visible()
    page.keyboard.press("Escape")
    assert not detail.is_visible()


def test_nothing_of_a_text_is_markup(opened: Open) -> None:
    """A server that says all this is ours; the model and the prompt may be anybody's."""
    page = opened(expected="status of 400")
    token = {
        "token_id": 1, "decoded_token": HOSTILE, "position": 3, "round": 0, "rule": "standard",
        "origin": "resampled", "p": 0.5, "q": 0.25, "drafter": HOSTILE, "draft_index": None,
        "u": None, "threshold": None, "reason": None,
    }  # fmt: skip
    draft = {**token, "origin": "rejected", "draft_index": 0, "u": 0.5, "threshold": 0.25,
             "reason": HOSTILE}  # fmt: skip
    top = {"tokens": [HOSTILE], "top_logprobs": [{HOSTILE: -1.0}]}
    choice = {"text": HOSTILE, "trace": [{**token, "dropped": [draft]}], "logprobs": top}
    ended = {"choices": [], "usage": {"completion_tokens": 1}}
    lines = [json.dumps(one) for one in ({"choices": [choice]}, ended)] + ["[DONE]"]
    body = "".join(f"data: {line}\n\n" for line in lines)
    page.route("**/v1/completions", lambda route: route.fulfill(
        body=body, content_type="text/event-stream"))  # fmt: skip
    run(page, prompt=HOSTILE, pairs="1")
    page.check("#show-dropped")
    page.locator("#tokens span").focus()
    assert page.locator("#tokens span").text_content() == HOSTILE
    assert page.locator("#off-text").text_content() == HOSTILE
    assert HOSTILE.replace('"', '\\"') in page.locator("#detail").inner_text()
    error = json.dumps({"error": {"message": HOSTILE}})
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, body=error))
    run(page)
    assert page.locator("#error").text_content() == HOSTILE
    assert page.locator("main img, main script, #detail img").count() == 0
    assert page.title() == "Foretoken: what speculation does"


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_it_fits_and_can_be_read(opened: Open, width: int, scheme: str) -> None:
    page = opened(width, scheme)
    run(page, max_tokens="80", pairs="1")
    page.check("#show-dropped")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.mouse.move(0, 0)
    page.locator("#tokens span.resampled").first.focus()
    box = page.locator("#detail").bounding_box()
    token = page.locator("#tokens span.resampled").first.bounding_box()
    assert box["y"] >= token["y"] + token["height"] or box["y"] + box["height"] <= token["y"]
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 800
    for selector in ("h1", ".note", "#legend li", "#tokens span.accepted", "#tokens s", "#run"):
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector


CONTRAST = """element => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = element;
  while (parts(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]
    .map((text) => light(parts(text))).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


def test_what_the_server_refuses_is_shown(opened: Open) -> None:
    page = opened(expected="status of 400")
    run(page, temperature="-1")
    assert "`temperature` is -1" in page.locator("#error[role=alert]").inner_text()
    run(page, temperature="warm")
    assert "temperature" in page.locator("#error").inner_text()
    run(page, temperature="0", max_tokens="9", pairs="0")
    assert not page.locator("#error").is_visible()
    run(page, k="0", pairs="3")
    assert "nothing to compare" in page.locator("#verdict").inner_text()
    assert page.locator("#n-plain").text_content() == "9"


def test_a_phone_goes_to_the_result_and_keeps_stop_at_hand(opened: Open, server: Running) -> None:
    page = opened(390, height=844)
    page.wait_for_selector("#run:enabled")
    page.fill("#max_tokens", "1900")
    page.fill("#seed", "1")
    with closing(Gate(server.engine)) as gate:
        page.click("#run")
        until(lambda: server.engine.status.num_open > 0)
        gate.open(3)
        page.wait_for_selector("#tokens span")
        page.wait_for_selector("#running:text-is('1')")
        # It scrolls smoothly; `wait_for_function` would evaluate strings, which the page forbids.
        for _ in range(200):
            if abs(boxes(page, "#results")["results"]["top"]) < 30:
                break
            page.wait_for_timeout(50)
        found = boxes(page, "#tokens, #stop")
        assert 0 <= found["tokens"]["top"] < 844 / 2
        assert 844 - 80 < found["stop"]["top"] < found["stop"]["bottom"] < 844
        assert page.evaluate("document.activeElement.id") == "stop"
        page.click("#stop")
        page.wait_for_selector("#run:enabled")
        assert page.locator("#status").inner_text() == "Stopped."
        assert "no verdict" in page.locator("#verdict").inner_text()
        assert page.evaluate("document.activeElement.id") == "run"
        until(lambda: server.engine.status.num_open == 0)


def test_a_key_is_asked_for(opened: Open, target: Any) -> None:
    with running(AsyncEngine(str(target)), ServeOptions(api_key="secret")) as server:
        page = opened(expected="status of 401", url=server.url)
        page.wait_for_selector("#key")
        assert "Authorization" in page.locator("#error").inner_text()
        page.fill("#key", "secret")
        page.locator("#key").blur()
        run(page, max_tokens="5")
        assert not page.locator("#error").is_visible()
        assert "nothing to compare" in page.locator("#verdict").inner_text()
        page.close()  # which asks for the server's state now and then
