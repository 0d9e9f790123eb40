"""`foretoken audit`: verdicts, files, exit codes; servers that are absent, wrong or stop."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from foretoken import AsyncEngine
from foretoken.cli import app
from foretoken.cli.actions import Actions
from foretoken.lab.audit import command, server
from foretoken.lab.audit.evidence import Source
from foretoken.lab.audit.gallery import BUGS, member
from foretoken.lab.audit.reference import Reference, Text, filtered
from foretoken.lab.audit.server import Client, ServerAudit
from foretoken.lab.audit.subjects import StoppedError, Subject, bind, callable_subject
from foretoken.lab.audit.verdict import audit
from foretoken.lab.results import validate
from foretoken.models.locate import resolve_checkpoint
from foretoken.models.tokenizer import decode_after, load_tokenizer
from foretoken.sampling.params import SamplingParams
from foretoken.serve.options import ServeOptions
from tests.serve.running import running

ROOT = Path(__file__).parents[2]


class Auditing(Actions):
    def __init__(self, *subjects: Subject) -> None:
        self.subjects = subjects

    def audit(self, reporter: Any, *scope: Any) -> int:
        subjects = self.subjects

        class Given(command.AuditScope):
            def subjects(self, status: Any) -> Iterator[Subject]:
                yield from subjects

        return command.Command(reporter).run(Given(*scope))


def run(*args: object, actions: Actions | None = None) -> Any:
    return CliRunner().invoke(app.app, ["audit", *map(str, args)], obj=actions)


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    document = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "documented_verifier.py").write_text(code, encoding="utf-8")
    wrong = code.replace("p=rest / rest.sum()", "p=p[i]")
    assert wrong != code
    (tmp_path / "wrong_verifier.py").write_text(wrong, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_documented_verifier_passes_and_the_files_are_whole(documented: Path) -> None:
    files = ("--output", "x.json", "--output", "x.html")
    result = run("--callable", "documented_verifier:verify", "--draws", 1500, *files)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("Starting\n")
    assert "documented_verifier:verify: lossless: every probability equals p" in result.stdout
    data = json.loads((documented / "x.json").read_text(encoding="utf-8"))
    validate(data)
    (row,) = data["rows"]
    assert (row["labels"]["refuted"], row["values"]["draws"]) == (False, 1500)
    page = (documented / "x.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    shown = " ".join(re.findall(r"<text[^>]*>([^<]*)", page))  # notes are several lines
    for source in ("pairs", "binary", "filtered", "heated"):
        assert f"documented_verifier:verify: source `{source}`" in shown
    assert shown.count("target, and the range of 99% of lossless subjects") == 4
    assert "An outcome is a text of 2; the target's share of it is computed from the toy's" in shown
    assert "limit in at most one of 1,000 audits." in shown
    assert not re.findall(r"<script|<link|<img|src=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\s\"<]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_wrong_verifier_exits_with_1_and_json_names_the_bug(documented: Path) -> None:
    result = run("--callable", "wrong_verifier.py:verify", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["rows"]
    assert row["labels"]["bug"] == "residual_is_p"
    assert row["values"]["draws_to_refute"] < 1000


def test_an_interruption_keeps_what_there_is(tmp_path: Path) -> None:
    def draw(number: int, trials: int, batch: int) -> tuple[Any]:
        if batch == 2:
            raise KeyboardInterrupt
        return (np.arange(trials) % 16,)

    subject = Subject("x", [Source("m", np.full(16, 1 / 16), {})], draw)
    file = tmp_path / "x.json"
    result = run("--callable", "x:verify", "--output", file, actions=Auditing(subject))
    assert result.exit_code == 130
    assert "INTERRUPTED: partial" in result.stdout
    assert "0 of 60,000 draws of `x` done\n" in result.stderr
    assert "2,000 of 60,000 draws of `x` were done." in result.stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["rows"][0]["labels"]["complete"] is False
    assert data["notes"][-1] == "The audit of `x` is partial."


def test_a_gallery_is_a_page_and_one_that_is_not_refuted_exits_with_1(tmp_path: Path) -> None:
    few = Auditing(*(callable_subject(bug.key, bind(bug.verify)) for bug in BUGS[-2:]))
    args = ("--gallery", "--draws", 30)
    assert run(*args, "--output", tmp_path / "x.html", actions=few).exit_code == 0
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    links = dict(re.findall(r'<a href="#([\w-]+)">(\w+)</a>REFUTED', page))
    assert [*links.values()] == ["accept_at_zero", "float32_tail"]
    assert re.findall(r'<h2 id="([\w-]+)">', page) == [*links]
    right = callable_subject("float32_tail", bind(member("standard")))
    assert run(*args, actions=Auditing(right)).exit_code == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--callable", "x"], "`callable` is 'x': must be module:function."),
        (["--callable", "no.such:thing"], "No module named"),
        (["--callable", "no_such.py:thing"], "There is no file no_such.py"),
        (["--callable", "math:pi"], "must be a function, not float"),
        (["--callable", "x:y", "--gallery"], "`gallery` is True: must be left out with --callable"),
        (["--draws", "0"], "`draws` is 0"),
        (["--alpha", "2"], "`alpha` is 2.0"),
        (["--output", "x.pdf"], "`output` is 'x.pdf': must be a file that ends in .json, .csv"),
        (["--api-key", "x"], "`api_key`"),
        (["--url", "http://x", "--top-k", "5"], "`top_k` is 5: must be left out: the audit"),
        (["--callable", "x:y", "--temperature", "0.2"], "`temperature`"),
        (["--gallery", "--model", "tiny-python"], "`model`"),
        (["--backend", "native", "--speculative-config", "{}"], "`speculative_config`"),
        (["--backend", "native", "--suffix-corpus", "x"], "`suffix_corpus` is 'x'"),
        (["--url", "x"], "`url` is 'x': must be a URL such as http://"),
        (["--url", "http://127.0.0.1:9/v1"], "no connection to 127.0.0.1:9"),
    ],
)
def test_bad_input_is_one_message(args: list[str], said: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


# Servers ------------------------------------------------------------------------------------------


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """A server that answers completions by a function; it returns a body, or a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(b'{"data": [{"id": "some-model"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = choices("a") if body["max_tokens"] == 1 else answer(body)
            self._send(b"", given) if isinstance(given, int) else self._send(given.encode())

        def _send(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()


def in_turn(*answers: Any) -> Callable[[dict[str, Any]], Any]:
    """These answers in turn, then the last one again and again."""
    left = [*answers]
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def audited(url: str, draws: int) -> Any:
    asked = ServerAudit.__new__(ServerAudit)
    asked.client, asked.noise = Client(url, None), 0.03
    null = np.array([0.4995, 0.4995, 0.001])
    expected = Source("prompt 1", null, {}, delta=0.02, closed=True)
    params = SamplingParams(max_tokens=4)
    asked.chosen = [server.ChosenPrompt("p", [1], params, {"a": 0, "b": 1}, expected)]
    return audit(asked.subject("x")._replace(exact=None), draws)


def choices(texts: Iterable[str]) -> str:
    return json.dumps({"choices": [{"text": text} for text in texts]})


def test_a_server_that_is_right_passes_and_one_that_is_not_is_refuted() -> None:
    with serving(in_turn(choices("ab" * 16))) as url:
        found = audited(url, 3000)
    assert (found.refuted, found.complete) == (False, True)
    assert found.notes == [
        "Allowed for other arithmetic: logits off by 0.030 (standard deviation), "
        "which is TV <= 0.0200 per prompt, and 0.1% of impossible texts."
    ]
    with serving(in_turn(choices("aab" * 10))) as url:
        assert audited(url, 3000).refuted
    with serving(in_turn(choices("abc" * 10))) as url:  # what cannot be
        assert audited(url, 3000).evidence.refuted_at <= 300


def test_failures_are_named_and_counted_and_the_rest_goes_on() -> None:
    answers = in_turn("no JSON", "[]", 500, '{"choices": [{}]}', choices("ab" * 16))
    with serving(answers) as url:
        found = audited(url, 300)
    assert found.complete
    assert found.notes[-1] == (
        "Requests that failed: the answer is no JSON (1), the answer has no texts (2), "
        "status 500 (1)."
    )


def test_a_server_that_stops_ends_the_command_with_what_there_is_and_2(tmp_path: Path) -> None:
    two = choices("ab" * 16), choices("ab" * 16)
    with serving(in_turn(*two, 503)) as url:
        found = audited(url, 3000)
    assert (found.complete, found.evidence.draws) == (False, 64)
    assert "INTERRUPTED: partial" in found.verdict
    assert found.stopped == "the server gave no text 5 times in a row (status 503)"
    with serving(in_turn(*two, 503)) as url:
        args = ("--url", url, "--output", tmp_path / "x.json")
        result = run(*args, actions=Auditing(audited(url, 0).subject))
        stopping = audited(url, 0).subject
        refuted = stopping._replace(name="y", exact=lambda: (["greedy_differs"], []))
        assert run("--url", url, actions=Auditing(stopping, refuted)).exit_code == 1
    assert result.exit_code == 2
    assert "x: not refuted: no difference in 64 draws" in result.stdout
    assert "must be a server that answers until the audit ends." in result.stderr
    (row,) = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert (row["labels"]["complete"], row["values"]["draws"]) == (False, 64)


def test_a_server_that_is_gone_is_given_up_at_once() -> None:
    with serving(in_turn(choices("ab"))) as url:
        client = Client(url, None)
    with pytest.raises(StoppedError, match="the server stopped: no connection"):
        client.texts("p", 1)


# A server with a distribution of its own ----------------------------------------------------------

Laws = Callable[[torch.Tensor, torch.Tensor, SamplingParams], torch.Tensor]


def right(p: torch.Tensor, q: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return filtered(p, params)


@pytest.fixture(scope="module")
def auditor() -> ServerAudit:
    """Of the embedded pair; tests set its client."""
    tokenizer = load_tokenizer(resolve_checkpoint("tiny-python"))
    no_client: Any = None
    return ServerAudit(no_client, Reference("tiny-python"), tokenizer, SamplingParams())


@pytest.fixture(scope="module")
def draft() -> Reference:
    return Reference("tiny-python-draft")


def in_dtype(reference: Reference, dtype: torch.dtype) -> Reference:
    """The same checkpoint in PyTorch's own arithmetic of this machine."""
    other = copy.copy(reference)
    other.module = copy.deepcopy(reference.module)
    for parameter in other.module.parameters():  # RoPE's frequencies stay, as where it is served
        parameter.data = parameter.data.to(dtype)
    return other


def serves(
    auditor: ServerAudit, draft: Reference, law: Laws, target: Reference | None = None
) -> Callable[[dict[str, Any]], str]:
    """Completions of the embedded pair, token by token from `law(target, draft, params)`."""
    known: dict[tuple[Any, ...], torch.Tensor] = {}
    texts_of: dict[tuple[Any, ...], str] = {}
    random, tokenizer = torch.Generator().manual_seed(0), auditor.tokenizer
    target = target or auditor.reference

    def row(ids: tuple[int, ...], path: tuple[int, ...], params: SamplingParams) -> torch.Tensor:
        key = (ids, path, params.temperature, params.top_p)
        if key not in known:
            text = [Text([*ids], [*path, 0])]
            p = target.logits(text)[0][-1:].double()
            known[key] = filtered(p, params)[0]
            if params.temperature and law is not right:
                known[key] = law(p, draft.logits(text)[0][-1:].double(), params)[0]
        return known[key]

    def answer(body: dict[str, Any]) -> str:
        params = SamplingParams(temperature=body["temperature"], top_p=body.get("top_p", 1.0))
        ids, texts = tuple(tokenizer.encode(body["prompt"])), []
        for _ in range(body["n"]):
            path: tuple[int, ...] = ()
            while len(path) < body["max_tokens"]:
                drawn = torch.multinomial(row(ids, path, params), 1, generator=random)
                path = (*path, int(drawn))
            if (ids, path) not in texts_of:
                texts_of[ids, path] = decode_after(tokenizer, ids, path)
            texts.append(texts_of[ids, path])
        return choices(texts)

    return answer


def without_temperature(p: torch.Tensor, q: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return filtered(p, replace(params, temperature=1.0))


def nucleus_after_test(p: torch.Tensor, q: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """One draft: tested against p without its nucleus, replaced from p with it."""
    tested, inside = (filtered(p, each) for each in (replace(params, top_p=1.0), params))
    drafted = filtered(q, params)
    taken, rest = torch.minimum(tested, drafted), (inside - drafted).clamp(min=0)
    return taken + (1 - taken.sum()) * (rest / rest.sum() if rest.sum() > 0 else inside)


@pytest.mark.parametrize(
    ("law", "bug"),
    [
        (without_temperature, "temperature_ignored"),
        (lambda p, q, params: filtered(p, replace(params, top_p=1.0)), "nucleus_ignored"),
        (nucleus_after_test, "nucleus_leaks"),
    ],
)
def test_a_wrong_server_is_refuted_and_its_bug_named(
    auditor: ServerAudit, draft: Reference, law: Laws, bug: str
) -> None:
    with serving(serves(auditor, draft, law)) as url:
        auditor.client = Client(url, None)
        found = audit(auditor.subject("x")._replace(exact=None), 1500)
    assert found.bug == bug, found.verdict


def test_a_right_server_passes(auditor: ServerAudit, draft: Reference) -> None:
    with serving(serves(auditor, draft, right)) as url:
        auditor.client = Client(url, None)
        found = audit(auditor.subject("x"), 600)
    assert not found.refuted, found.verdict
    assert "Temperature 0: 8 of 8 texts are the target's, 0 differ" in found.exact[1]
    assert "not testable, the server takes no field `speculative`" in found.exact[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_right_server_of_another_arithmetic_passes(
    auditor: ServerAudit, draft: Reference, dtype: torch.dtype
) -> None:
    other = in_dtype(auditor.reference, dtype)
    with serving(serves(auditor, draft, right, other)) as url:
        auditor.client = Client(url, None)
        found = audit(auditor.subject("x"), 1500)
    assert not found.refuted, found.verdict
    assert found.evidence.log10_e < 0.5


def test_our_own_server_passes_and_repeats_itself_without_drafts(auditor: ServerAudit) -> None:
    speculation = {"method": "draft_model", "num_speculative_tokens": 4}
    engine = AsyncEngine("tiny-python", speculation, threads=1)
    with running(engine, ServeOptions()) as served:
        auditor.client = Client(served.url, None)
        found = audit(auditor.subject("x"), 600)
        drafted = engine.metrics.num_draft_tokens
    assert not found.refuted, found.verdict
    assert found.evidence.draws >= 600
    assert drafted > 100
    greedy, replayed = found.exact[1:]
    assert "Temperature 0: 8 of 8 texts are the target's" in greedy
    assert replayed == "`coupled` by seed, again without drafts: 8 of 8 texts are equal."
