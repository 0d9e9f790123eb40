"""Reasoning and tool calls are the same however the tokens were split, and broken JSON is text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.errors import ConfigError
from foretoken.outputs import CompletionDelta
from foretoken.sampling.grammar import Grammars
from foretoken.sampling.structured import as_text
from foretoken.serve.options import ServeOptions
from foretoken.serve.parsers.formats import FORMATS, MessageFormat
from foretoken.serve.parsers.message import Content, Parsing, Part, Reasoning, ToolCall, join_parts
from tests.sampling.test_grammar import allowed, byte_level, next_mask

NAMES = ("area", "now")
CALL = '{"name": "area", "arguments": {"w": 1, "of": "é🙂 \\"}</tool_call> \\\\"}}'
ARGUMENTS = json.dumps({"w": 1, "of": 'é🙂 "}</tool_call> \\'}, ensure_ascii=False)
HEADLESS = 'area[ARGS]{"w": 1}'
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *(CALL, f"[{CALL}, {CALL}]", HEADLESS, '{"name": "now"}', '{"name": "no"}', '{"a": [1}', "{"),
    *("; ", "\n", " ", "<|eot|>", "<tool", "é🙂", "so", "<", '"', "\\", "[", "]", "}"),
]  # fmt: skip


def parsing(name: str, *, has_reasoning: bool = True, parallel: bool = True) -> Parsing:
    form = MessageFormat(FORMATS[name], has_reasoning, {"<|eot|>": 5, FORMATS[name].opener: 6})
    return Parsing.for_format(form, NAMES, has_reasoning=has_reasoning, parallel=parallel)


def read(how: Parsing, pieces: Sequence[str], prompt: str = "", reason: str = "stop") -> list[Part]:
    """The parts that a parser makes of pieces, without the random ids of calls."""
    parser, last = how.new_parser(prompt), len(pieces) - 1
    parts = [
        part
        for i, text in enumerate(pieces)
        for part in parser.feed(CompletionDelta(0, [], text, reason if i == last else None))
    ]
    return join_parts(
        part._replace(id="") if isinstance(part, ToolCall) else part for part in parts
    )


def call(index: int = 0, arguments: str = ARGUMENTS, *, is_whole: bool = True) -> ToolCall:
    return ToolCall(index, "", "area", arguments, is_whole)


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from([*FORMATS]),
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    is_open=st.booleans(),
    parallel=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    bound=st.sampled_from(["", "only_calls", "calls_or_text"]),
)
def test_every_way_to_split_gives_the_same_events(
    name: str, pieces: list[str], cuts: list[int], is_open: bool, parallel: bool, reason: str,
    bound: str,
) -> None:  # fmt: skip
    """In one piece, by characters and by random pieces, some of them without text."""
    text, prompt = "".join(pieces), "<think>\n" if is_open else ""
    how = replace(parsing(name, parallel=parallel), **({bound: True} if bound else {}))
    whole = read(how, [text], prompt, reason)
    assert read(how, [*text, ""], prompt, reason) == whole
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = [text[a:b] for a, b in pairwise(places)]
    assert read(how, split, prompt, reason) == whole


@given(name=st.sampled_from([*FORMATS]), text=st.text('{}[]"\\<tol_ca>;: \n1', max_size=60))
def test_what_is_no_call_is_text_as_it_stands(name: str, text: str) -> None:
    parts = read(parsing(name, has_reasoning=False), [*text, ""])
    assert parts == ([Content(text)] if text else [])


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("hermes", f"Well:\n<tool_call>\n{CALL}\n</tool_call>", [Content("Well:\n"), call()]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}", [call(), call(1)]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\nend", [call(), Content("\nend")]),
        ("hermes", "<tool_call>{}</tool_call>", [Content("<tool_call>{}</tool_call>")]),
        ("hermes", '<tool_call>{"name": "no"}', [Content('<tool_call>{"name": "no"}')]),
        # A brace is missing: what follows is read again.
        ("hermes", f'<tool_call>{{"a": {{}}</tool_call><tool_call>{CALL}</tool_call>',
         [Content('<tool_call>{"a": {}</tool_call>'), call()]),
        ("hermes", '<tool_call>{"name": "area", "arguments": {"x": NaN}}',
         [Content('<tool_call>{"name": "area", "arguments": {"x": NaN}}')]),
        # As it is written: no float holds it.
        ("hermes", '<tool_call>{ "arguments" : {"x":1e999} ,"name":"area"}',
         [call(0, '{"x":1e999}')]),
        ("mistral", "[TOOL_CALLS]area[ARGS][1]", [Content("[TOOL_CALLS]area[ARGS][1]")]),
        ("llama3_json", CALL.replace("arguments", "parameters"), [call()]),
        ("llama3_json", f"{CALL}; {CALL}", [call(), call(1)]),
        ("llama3_json", f"<|python_tag|>{CALL}<|eot|>", [call()]),
        ("llama3_json", f"So {CALL}", [Content(f"So {CALL}")]),
        ("llama3_json", '{"answer": 4}', [Content('{"answer": 4}')]),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", [call(), call(1)]),
        ("mistral", f"[TOOL_CALLS]{HEADLESS}[TOOL_CALLS]{HEADLESS}",
         [call(0, '{"w": 1}'), call(1, '{"w": 1}')]),
        ("mistral", "[TOOL_CALLS]area of what?", [Content("[TOOL_CALLS]area of what?")]),
        ("hermes", "<think>\nWhy <tool_call>?\n</think>\n\nSo.",
         [Reasoning("Why <tool_call>?"), Content("So.")]),
        ("hermes", f"<think>a</think>\n<tool_call>{CALL}</tool_call>", [Reasoning("a"), call()]),
        ("hermes", "a <think>b</think>", [Content("a <think>b</think>")]),
        ("hermes", "<think>cut \n", [Reasoning("cut")]),
        ("hermes", " \n", [Content(" \n")]),
    ],
)  # fmt: skip
def test_what_models_write(name: str, text: str, parts: list[Part]) -> None:
    assert read(parsing(name), [*text, ""]) == parts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        ("llama3_json", f"{CALL}; {CALL}"),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]"),
    ],
)
def test_forced_calls_are_cut_anywhere(name: str, text: str) -> None:
    """For any split into tokens: whole calls, then the beginning of one, and never a text."""
    free = parsing(name, has_reasoning=False)
    how, done = replace(free, only_calls=True), 0
    for size in range(len(text)):
        found = read(how, [text[:size]], reason="length")
        assert read(how, [*text[:size], ""], reason="length") == found
        unforced = read(free, [text[:size]], reason="length")
        assert [part for part in unforced if isinstance(part, ToolCall)] == found
        *whole, last = found or [call(is_whole=False)]
        assert isinstance(last, ToolCall)
        assert whole == [call(i) for i in range(len(whole))]
        assert ARGUMENTS.startswith(last.arguments)
        assert len(whole) + last.is_whole >= done
        done = len(whole) + last.is_whole
    assert done == (1 if name == "llama3_json" else 2)  # the last brace is cut


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("hermes", 'So <tool_call>{"name":"area" , "arguments":{"w"',
         [Content("So "), call(0, '{"w"', is_whole=False)]),
        ("hermes", '<tool_call>{"name": "no", "arg', [Content('<tool_call>{"name": "no", "arg')]),
        ("hermes", '<tool_call>{"na', [Content('<tool_call>{"na')]),
        ("mistral", '[TOOL_CALLS]area[ARGS]{"w', [call(0, '{"w', is_whole=False)]),
        ("mistral", "[TOOL_CALLS][7, ", [Content("[TOOL_CALLS][7, ")]),
        ("llama3_json", '{"name": "Ada", "age"', [Content('{"name": "Ada", "age"')]),
    ],
)  # fmt: skip
def test_calls_that_are_not_forced_may_be_cut(name: str, text: str, parts: list[Part]) -> None:
    assert read(parsing(name), [text], reason="length") == parts


def test_a_template_may_open_the_reasoning() -> None:
    how = parsing("hermes")
    assert read(how, ["a</think>b"], "x\n<think>\n") == [Reasoning("a"), Content("b")]
    assert read(how, ["a"], "<think>\n\n</think>\n\n") == [Content("a")]


def test_only_one_call_where_no_more_are_wanted() -> None:
    how = parsing("mistral", parallel=False)
    assert read(how, [f"[TOOL_CALLS][{CALL}, {CALL}] and so on"]) == [call()]


def test_ids_are_as_templates_take_them() -> None:
    for name, size in (("mistral", 9), ("hermes", 29)):
        text = f"{FORMATS[name].opener}{CALL}"
        (found,) = parsing(name).new_parser("").feed(CompletionDelta(0, [], text, "stop"))
        assert isinstance(found, ToolCall)
        assert len(found.id) == size


@pytest.mark.parametrize(
    ("template", "calls", "reasons"),
    [
        ("{{ tools }}<tool_call>", "hermes", False),
        ("{{ tools }}<tool_call><function=", None, False),
        ("{{ tools }}<|python_tag|>", "llama3_json", False),
        ("{{ tools }}[TOOL_CALLS]</think>", "mistral", True),
        ("{{ messages }}", None, False),
    ],
)
def test_formats_are_found_in_templates(template: str, calls: str | None, reasons: bool) -> None:
    special = SimpleNamespace(content="[TOOL_CALLS]", special=True)
    tokenizer: Any = SimpleNamespace(
        chat_template=template, added_tokens_decoder={7: special}, decode=str
    )
    form = MessageFormat.from_options(tokenizer, None, "auto", "auto")
    thoughts = "<think>" if reasons else "none"
    told = f"tool calls: {calls or 'none'}; reasoning: {thoughts}."
    assert form.summary == f"Chat template: the checkpoint's own; {told}"
    assert form == MessageFormat(FORMATS[calls] if calls else None, reasons, {"[TOOL_CALLS]": 7})
    assert MessageFormat.from_options(tokenizer, None, "hermes", "none").calls == FORMATS["hermes"]
    grammar = MessageFormat(FORMATS["mistral"], special=form.special).grammar(
        FORMATS["mistral"], [{"function": {"name": "now"}}], parallel=False
    )
    assert "call: <[7]>" in grammar
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=name):  # before a model is loaded
            ServeOptions(**{name: "x"})  # type: ignore[arg-type]


def test_the_template_in_use_is_told_and_one_that_is_none_is_refused() -> None:
    named: Any = {"default": "{{ 1 }}", "rag": "{{ 2 }}</think>"}
    tokenizer: Any = SimpleNamespace(chat_template=named, decode=str)
    for template, told in (
        ("rag", "Chat template: the checkpoint's `rag`; tool calls: none; reasoning: <think>."),
        ("{{ 3 }}<tool_call>",
         "Chat template: of --chat-template; tool calls: hermes; reasoning: none."),
    ):  # fmt: skip
        assert MessageFormat.from_options(tokenizer, template, "auto", "auto").summary == told
    bare: Any = SimpleNamespace(chat_template=None, decode=str)
    for nothing, said in ((bare, "no chat template"), (None, "no tokenizer")):
        form = MessageFormat.from_options(nothing, None, "auto", "auto")
        assert (form.has_template, form.summary) == (False, f"Chats are refused: there is {said}.")
    for wrong in ("rga", "template.jinja"):
        with pytest.raises(ConfigError, match="`chat_template`"):
            MessageFormat.from_options(tokenizer, wrong, "auto", "auto")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('<tool_call>\n{"name": "area", "arguments": {"w": 1', ("area", '{"w": 1', False)),
        ('<tool_call>\n{"name": "now", "arguments": {}}', ("now", "{}", True)),
        ('<tool_call>\n{"name": "ar', None),
    ],
)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_forced_call_that_is_cut_leaves_no_text(text: str, call: Any, reason: str) -> None:
    form = MessageFormat(FORMATS["hermes"])
    parsing = replace(
        Parsing.for_format(form, NAMES, has_reasoning=False, parallel=True), only_calls=True
    )
    cut = CompletionDelta(index=0, token_ids=[1], text=text, finish_reason=reason)
    found = [(p.name, p.arguments, p.is_whole) for p in parsing.new_parser("").feed(cut)]  # type: ignore[union-attr]
    assert found == ([call] if call else [])


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("hermes", f'{{"a":"<tool_call>{CALL}"}}', None),
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [call()]),
        ("hermes", '<tool_call>\n{"name": "area", "arg', [call(0, "", is_whole=False)]),
        ("hermes", "<tool_ca", []),
        ("hermes", f"<tool_call>\n{CALL}\n</too", [call()]),
        ("llama3_json", '{"name":"area","parameters":{}}', None),
        ("llama3_json", '{"name": "area", "parameters": {}}', [call(0, "{}")]),
        ("llama3_json", '{"na', None),
        ("mistral", f"[TOOL_CALLS][{CALL}", [call()]),
        ("mistral", '["[TOOL_CALLS]"]', None),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_grammar_of_calls_or_a_text_mixes_nothing(
    name: str, text: str, parts: list[Part] | None, reason: str
) -> None:
    how = replace(parsing(name, has_reasoning=False), calls_or_text=True)
    wanted = [Content(text)] if parts is None else parts
    for pieces in ([text], [*text], [*text, ""]):
        assert read(how, pieces, reason=reason) == wanted


@pytest.mark.parametrize("kind", ["object", "name"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_every_walk_through_a_grammar_of_calls_or_json_is_one_of_them(
    name: str, parallel: bool, kind: str
) -> None:
    """For each format, and JSON that begins as a call may: the lexer takes the longest match."""
    area = {"type": "object", "properties": {"w": {"enum": [1, 22]}}, "required": ["w"],
            "additionalProperties": False}  # fmt: skip
    members: Any = {"object": {"w": {"type": "null"}},
                    "name": {"name": {"enum": ["area", "x"]}, "w": area}}  # fmt: skip
    answer: Any = {**area, "properties": members[kind]}
    form = MessageFormat(FORMATS[name])
    tools = [{"function": {"name": each, "parameters": area}} for each in NAMES]
    lark = form.grammar(FORMATS[name], tools, parallel=parallel, answer=as_text("x", answer))
    tokenizer: Any = byte_level()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    grammars.wait([asked := {"grammar": lark}])
    grammar, draw, seen = grammars.compiled(asked), random.Random(1), set()
    assert grammar is not None
    how = replace(
        Parsing.for_format(form, NAMES, has_reasoning=False, parallel=parallel), calls_or_text=True
    )
    for _ in range(16):
        matcher, ids = grammar.matcher(), list[int]()
        while not matcher.is_finished:
            ids += (some := matcher.forced_tokens() or [draw.choice(allowed(next_mask(matcher)))])
            matcher.append(some)
        parts = read(how, [tokenizer.decode(ids, skip_special_tokens=True)])
        for part in parts:
            seen.add(type(part))
            if isinstance(part, ToolCall):
                assert json.loads(part.arguments) in ({"w": 1}, {"w": 22})
                assert part.is_whole
                assert part.name in NAMES
            else:
                assert jsonschema_rs.is_valid(answer, json.loads(part.text))
        assert len({type(part) for part in parts}) == 1
        assert parallel or len(parts) == 1
    assert seen == {ToolCall, Content}


def test_tokens_of_reasoning_are_counted_however_they_were_split() -> None:
    pieces = [" <th", "ink>", "a b", "c</thi", "nk>x", "yz", "!"]
    form = MessageFormat(decode=lambda ids, **options: "".join(pieces[i] for i in ids).lstrip())
    parsing = replace(
        Parsing.for_format(form, (), has_reasoning=True, parallel=True), decode=form.decode
    )
    for cuts in range(2 ** (len(pieces) - 1)):
        borders = [0, *(i + 1 for i in range(len(pieces) - 1) if cuts >> i & 1), len(pieces)]
        parser = parsing.new_parser("")
        for begin, end in pairwise(borders):
            text = "".join(pieces[begin:end])
            parser.feed(CompletionDelta(index=0, token_ids=[*range(begin, end)], text=text))
            if end <= 4:
                assert parser.num_reasoning in (0, end), "nothing is said before it is sure"
        assert parser.num_reasoning == 5
    plain = parsing.new_parser("")
    plain.feed(CompletionDelta(index=0, token_ids=[2], text="a b"))
    assert plain.num_reasoning == 0
