"""`--json` prints the keys of docs/cli.md, and samples are printed one after another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken import LLM
from foretoken.cli import app as cli
from foretoken.cli.output import as_json
from foretoken.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenTrace
from tests.cli.fake_llm import WithLLM
from tests.project.source import ROOT
from tests.support.checkpoints import save_checkpoint

OPTIONS = ["--temperature", "1", "--max-tokens", "5", "--n", "3", "--seed", "4"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_checkpoint(tmp_path_factory.mktemp("json"), seed=1)
    return LLM(str(folder), {"method": "ngram", "prompt_lookup_min": 1}, num_blocks=64)


def generate(llm: Any, *words: str) -> Result:
    return CliRunner().invoke(cli.app, ["generate", *words], obj=WithLLM(llm))


def keys(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from keys(item, where + "[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            path = f"{where}.{key}" if where else key
            yield path
            yield from keys(item, path)


def documented() -> list[str]:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("## `--json`")[2]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_every_key_is_documented_and_there(llm: LLM) -> None:
    wanted = ["--json", "--trace", "--logprobs", "2", "--prompt-logprobs", "1"]
    wanted += ["--allowed-token-ids", "64"]  # `a`: looked up, and accepted
    (line,) = generate(llm, "aaaa", *OPTIONS, *wanted).stdout.splitlines()
    data = json.loads(line)
    assert [sample["index"] for sample in data["outputs"]] == [0, 1, 2]
    assert [len(sample["token_ids"]) for sample in data["outputs"]] == [5, 5, 5]
    for sample in data["outputs"]:
        assert [row[0]["token_id"] for row in sample["logprobs"]] == sample["token_ids"]
        assert all(2 <= len(row) <= 3 for row in sample["logprobs"])
    assert data["prompt_logprobs"][0] is None
    places = data.pop("prompt_logprobs")[1:]
    assert [row[0]["token_id"] for row in places] == data["prompt_token_ids"][1:]
    assert places[0][0].keys() == data["outputs"][0]["logprobs"][0][0].keys()
    assert sorted(documented()) == sorted({*keys(data), "prompt_logprobs"})


def test_what_was_not_asked_for_is_null(llm: LLM) -> None:
    data = json.loads(generate(llm, "abc", *OPTIONS, "--json").stdout)
    assert data["prompt_logprobs"] is None
    assert [sample["logprobs"] for sample in data["outputs"]] == [None] * 3
    assert set(keys(data)) < set(documented())


def test_a_dropped_draft_has_the_keys_of_a_token() -> None:
    draft = TokenTrace(4, "d", 1, 0, "standard", "rejected", p=0.5, reason="u >= p/q")
    token = TokenTrace(3, "c", 1, 0, "standard", "resampled", p=0.25, dropped=(draft,))
    sample = CompletionOutput(0, [3], "x", "length", trace=[token])
    data = as_json(RequestOutput("1", "p", [1], [sample], RequestMetrics()))
    (shown,) = data["outputs"][0]["trace"]
    assert shown["dropped"][0].keys() == shown.keys() - {"dropped"}
    assert (shown["token_id"], shown["dropped"][0]["reason"]) == (3, "u >= p/q")


def test_an_infinite_logarithm_is_null() -> None:
    rows = [{3: Logprob(-math.inf, 9), 4: Logprob(-0.5, 1)}]
    sample = CompletionOutput(0, [3], "x", "length", logprobs=rows)
    data = as_json(RequestOutput("1", "p", [1], [sample], RequestMetrics()))
    text = json.dumps(data, allow_nan=False)
    (row,) = json.loads(text)["outputs"][0]["logprobs"]
    assert [(entry["token_id"], entry["logprob"]) for entry in row] == [(3, None), (4, -0.5)]


def test_samples_are_printed_one_after_another(llm: LLM) -> None:
    result = generate(llm, "abc", *OPTIONS)
    data = json.loads(generate(llm, "abc", *OPTIONS, "--json").stdout)
    texts = [sample["text"] for sample in data["outputs"]]
    expected = "".join(f"--- {j + 1} of 3 ---\n{text}\n" for j, text in enumerate(texts))
    assert result.stdout == expected


def test_a_sample_that_ends_early_waits_for_those_before_it() -> None:
    """The second ends first, and the first is shown as it grows."""
    states = [
        [("a", None), ("x", None)],
        [("ab", None), ("xy", "stop")],
        [("abc", "stop"), ("xy", "stop")],
    ]

    class Growing:
        def stream(self, *args: Any, **options: Any) -> Iterator[RequestOutput]:
            for state in states:
                samples = [CompletionOutput(j, [1], *now) for j, now in enumerate(state)]
                yield RequestOutput("1", "p", [1], samples, RequestMetrics())

    result = generate(Growing(), "p", "--n", "2")
    assert result.stdout == "--- 1 of 2 ---\nabc\n--- 2 of 2 ---\nxy\n"
