"""Grammars that are wrong, too complex, too slow, or cannot be served: their own requests end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import RequestError
from foretoken.outputs import RequestOutput
from foretoken.sampling import grammar
from tests.support.asynchronous import PATIENCE
from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny-python", num_blocks=200)


def one(llm: LLM, asked: dict[str, Any], **params: Any) -> RequestOutput:
    given = SamplingParams(structured_outputs=asked, max_tokens=30, seed=1, **params)
    (output,) = llm.generate(["def f"], given, on_error="return")
    return output


HOSTILE: Sequence[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "strnig"}}, "Invalid type: strnig"),
    ({"json": {"oneOf": [{"minLength": 1}, {"maxLength": 2}]}}, "oneOf constraints"),
    ({"json": {"$ref": "http://localhost/x"}}, "retrieving it failed"),
    ({"json": {"$ref": "#"}}, "NoExtension"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable"),
    ({"json": '{"items":' * 900 + "{}" + "}" * 900}, "recursion limit"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(a{1000}){1000}"}, "too"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": "root ::= foo"}, "GBNF: Rule 'foo' not found"),
    ({"grammar": 'root ::= "a" (("b")'}, "GBNF: Expected ')'"),
    ({"grammar": r'root ::= "\ud800"'}, r"GBNF: \ud800 is no character"),
    ({"grammar": 'a ::= "b"'}, "or write Lark, which begins with `start:`"),
    ({"grammar": "root ::= a\n" * 4000}, "at most 32768 characters of GBNF"),
    ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
    ({"grammar": "%import /etc/passwd"}, "Expected name"),
    ({"grammar": "start: A\nA: /(a|b)*a(a|b){60}/ & ~/(.*b.*){40}/"}, "too many expressions"),
]


@pytest.mark.parametrize(("asked", "said"), HOSTILE)
def test_a_hostile_grammar_ends_its_own_request(
    tiny: LLM, asked: dict[str, Any], said: str
) -> None:
    bad, good = (
        SamplingParams(max_tokens=30, structured_outputs=given) for given in (asked, {"regex": "x"})
    )
    first, second = tiny.generate(["x", "y"], [bad, good], on_error="return")
    assert isinstance(first.error, RequestError)
    assert first.error.field == f"structured_outputs.{next(iter(asked))}"
    assert said in first.error.bound
    assert second.outputs[0].text == "x"
    tiny.engine.check_integrity()


def test_a_slow_grammar_is_given_up_and_others_go_on(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.2)
    release, compile_ = Event(), grammar._compile

    def slow(*given: Any) -> Any:
        release.wait(PATIENCE)
        return compile_(*given)

    monkeypatch.setattr(grammar, "_compile", slow)
    output = one(tiny, {"choice": ["slow"]})
    assert isinstance(output.error, RequestError)
    assert "compiled within 0.2 s" in output.error.bound
    release.set()
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 60)
    assert one(tiny, {"choice": ["slow2"]}).outputs[0].text == "slow2"


def test_grammars_that_wait_for_others_are_not_given_up(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor compiled again by a turn of the engine, however many there are; one that is stuck holds
    up nobody."""
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 3)
    monkeypatch.setattr(grammar, "_CACHED", 2)
    compiled, compile_, release = [], grammar._compile, Event()

    def slow(asked: Any, *given: Any) -> Any:
        compiled.append(asked["choice"][0])
        release.wait(PATIENCE if asked["choice"] == ["w0"] else 0.3)
        return compile_(asked, *given)

    monkeypatch.setattr(grammar, "_compile", slow)
    words = [f"w{i}" for i in range(12)]
    params = [SamplingParams(structured_outputs={"choice": [word]}) for word in words]
    first, *others = tiny.generate(["x"] * 12, params, on_error="return")
    release.set()
    assert isinstance(first.error, RequestError)
    assert [one.outputs[0].text for one in others] == words[1:]
    assert sorted(compiled) == sorted(words)


def test_a_grammar_is_compiled_once(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_ = [], grammar._compile
    monkeypatch.setattr(
        grammar, "_compile", lambda asked, *given: compiled.append(asked) or compile_(asked, *given)
    )
    for _ in range(3):
        assert one(tiny, {"choice": ["once"]}, n=2).outputs[1].text == "once"
    assert compiled == [{"choice": ["once"]}]


def test_what_it_needs_is_named(
    tiny: LLM, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = LLM(str(save_checkpoint(tmp_path, tokenizer=False)), num_blocks=64)
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate([1, 2], SamplingParams(structured_outputs={"regex": "a"}))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = LLM(str(target), num_blocks=64)
    with pytest.raises(RequestError, match=r"foretoken\[serve\]"):
        fresh.generate("a", SamplingParams(structured_outputs={"regex": "a"}))
