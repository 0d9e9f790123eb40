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
from foretoken.sampling.grammar import Grammar, Grammars
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


class Slow(Grammars):
    """Compiles a grammar of one choice only once it is let, or after some seconds."""

    def __init__(self, llm: LLM, pauses: dict[str, float], **limits: Any) -> None:
        engine = llm.engine
        super().__init__(llm.tokenizer, engine.limits.vocab_size, engine.eos_ids, **limits)
        self.pauses, self.release, self.words = pauses, Event(), list[str]()

    def build(self, asked: dict[str, Any], *given: Any) -> Grammar:
        (word,) = asked["choice"]
        self.words.append(word)
        self.release.wait(self.pauses.get(word, 0))
        return super().build(asked, *given)


@pytest.fixture
def fresh() -> LLM:
    return LLM("tiny-python", num_blocks=200)


def test_a_slow_grammar_is_given_up_and_others_go_on(fresh: LLM) -> None:
    slow = fresh.engine.grammars = Slow(fresh, {"slow": PATIENCE}, seconds=0.2)
    output = one(fresh, {"choice": ["slow"]})
    assert isinstance(output.error, RequestError)
    assert "compiled within 0.2 s" in output.error.bound
    slow.release.set()
    fresh.engine.grammars = Slow(fresh, {}, seconds=60)
    assert one(fresh, {"choice": ["slow2"]}).outputs[0].text == "slow2"


def test_grammars_that_wait_for_others_are_not_given_up(fresh: LLM) -> None:
    """Nor compiled again by a turn of the engine, however many there are. A grammar that never
    ends holds up no other."""
    words = [f"w{i}" for i in range(12)]
    pauses = dict.fromkeys(words, 0.3) | {"w0": PATIENCE}
    slow = fresh.engine.grammars = Slow(fresh, pauses, seconds=3, most_kept=2)
    params = [SamplingParams(structured_outputs={"choice": [word]}) for word in words]
    first, *others = fresh.generate(["x"] * 12, params, on_error="return")
    slow.release.set()
    assert isinstance(first.error, RequestError)
    assert [one.outputs[0].text for one in others] == words[1:]
    assert sorted(slow.words) == sorted(words)


def test_a_grammar_is_compiled_once(fresh: LLM) -> None:
    quick = fresh.engine.grammars = Slow(fresh, {})
    for _ in range(3):
        assert one(fresh, {"choice": ["once"]}, n=2).outputs[1].text == "once"
    assert quick.words == ["once"]


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
