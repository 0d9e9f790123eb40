"""Sampling parameters: every bound is enforced and named."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.errors import RequestError
from foretoken.sampling.params import SamplingParams

BAD = [
    ("temperature", -0.1, ">= 0"),
    ("temperature", float("nan"), ">= 0"),
    ("temperature", float("inf"), ">= 0"),
    ("temperature", 1e-9, "greedy"),
    ("top_p", 0.0, r"\(0, 1\]"),
    ("top_p", 1.01, r"\(0, 1\]"),
    ("top_k", -2, ">= 1, or 0"),
    ("top_k", 1.5, ">= 1, or 0"),
    ("min_p", 1.1, r"\[0, 1\]"),
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", True, ">= 1"),
    ("min_tokens", 17, "max_tokens"),
    ("n", 0, r"\[1, 128\]"),
    ("n", 129, r"\[1, 128\]"),
    ("seed", -2, "2\\*\\*64"),
    ("detokenize", 1, "true or false"),
    ("truncate_prompt_tokens", 0, "or -1"),
    ("truncate_prompt_tokens", -2, "or -1"),
    ("cache_salt", "", "1 to 1024"),
    ("cache_salt", "x" * 1025, "1 to 1024"),
    ("cache_salt", 5, "1 to 1024"),
    ("cache_salt", "\ud800", "surrogate"),
    ("logprobs", -1, "whole vocabulary"),
    ("seed", 2**64, "2\\*\\*64"),
    ("logprobs", 21, "20"),
    ("prompt_logprobs", -1, "20"),
    ("presence_penalty", 3, r"\[-2, 2\]"),
    ("frequency_penalty", -3, r"\[-2, 2\]"),
    ("repetition_penalty", 0, "0.001"),
    ("stop", [""], "non-empty"),
    ("stop_token_ids", "12", "token ids"),
    ("stop_token_ids", [-1], "token ids"),
    ("bad_words", "word", "non-empty"),
    ("bad_words", [3], "non-empty"),
    ("stop", 5, "non-empty"),
    ("ignore_eos", "no", "true or false"),
    ("temperature", 2e6, "1e6"),
    ("allowed_token_ids", [], "non-empty"),
    ("logit_bias", {1: 200.0}, r"\[-100, 100\]"),
    ("logit_bias", {-1: 2.0}, "token ids"),
    ("num_speculative_tokens", -1, ">= 0"),
    ("skip_special_tokens", 1, "true or false"),
    ("stop", ["a\ud800"], r"lone surrogate '\\ud800' at index 1"),
    ("structured_outputs", "json", "a map with one of the keys json, json_object, regex"),
    ("structured_outputs", {}, "exactly one of json"),
    ("structured_outputs", {"regex": "a", "json": {}}, "exactly one of json"),
    ("structured_outputs", {"jsn": {}}, "Did you mean `json`"),
    ("structured_outputs", {"json": '{"type": }'}, "line 1 column 10"),
    ("structured_outputs", {"json": [1]}, "an object"),
    ("structured_outputs", {"json": {"minimum": float("nan")}}, "Out of range float"),
    ("structured_outputs", {"json_object": False}, "true, or left out"),
    ("structured_outputs", {"regex": ""}, "non-empty text"),
    ("structured_outputs", {"choice": "yes"}, "list of texts"),
    ("structured_outputs", {"choice": ["yes", "\ud800"]}, "lone surrogate at index 0"),
    ("structured_outputs", {"grammar": "a" * (2**18 + 1)}, "at most 262144 characters"),
    ("bad_words", ["\udc00"], r"lone surrogate '\\udc00' at index 0"),
]


@pytest.mark.parametrize(("name", "value", "bound"), BAD)
def test_out_of_bounds_names_field_and_bound(name: str, value: object, bound: str) -> None:
    with pytest.raises(RequestError, match=bound) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field.startswith(name)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="Did you mean `temperature`"):
        SamplingParams.parse({"temprature": 1.0})
    with pytest.raises(RequestError, match="Did you mean `temperature`"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="temprature"):
        SamplingParams().temprature = 1.0  # type: ignore[attr-defined]


FOREIGN: list[tuple[str, list[Any], Any, str]] = [
    ("best_of", [None, 1], 4, "Ask for `n` samples"),
    ("use_beam_search", [False], True, "rank them by cumulative_logprob"),
    ("guided_decoding", [None], {"json": {}}, "structured_outputs="),
    ("logits_processors", [None, []], [print], "`logit_bias`"),
    ("truncation_side", [None, "left"], "right", r"ids\[:n\]"),
    ("spaces_between_special_tokens", [True], False, "`token_ids`"),
    ("output_kind", [None], "DELTA", "yields new text"),
    ("length_penalty", [1, 1.0], True, "No beam search"),
    ("flat_logprobs", [False], np.ones(2), "list of dicts"),
]


@pytest.mark.parametrize(("name", "harmless", "other", "instead"), FOREIGN)
def test_names_of_vllm_are_taken_where_they_change_nothing(
    name: str, harmless: list[Any], other: Any, instead: str
) -> None:
    for value in harmless:
        assert SamplingParams(top_k=3, **{name: value}) == SamplingParams(top_k=3)
    with pytest.raises(RequestError, match=instead) as caught:
        SamplingParams(**{name: other})
    assert caught.value.field == name


def test_numbers_may_be_those_of_numpy_and_torch() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        max_tokens=torch.tensor(7),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int32(4)],
        logit_bias={np.int64(5): np.float64(1.5)},
    )
    plain = SamplingParams(
        temperature=0.5, top_k=3, max_tokens=7, ignore_eos=True, seed=2**64 - 1,
        stop_token_ids=[1, 2], allowed_token_ids=[4], logit_bias={5: 1.5},
    )  # fmt: skip
    assert params == plain
    assert repr(params) == repr(plain), "Python's own numbers"
    with pytest.raises(RequestError, match="token ids"):
        SamplingParams(stop_token_ids=np.array([1.5]))


def test_none_means_the_default_where_vllm_takes_it() -> None:
    params = SamplingParams(max_tokens=None, stop=None, stop_token_ids=None, seed=None)
    assert (params.stop, params.stop_token_ids, params.max_tokens) == ((), (), None)
    assert SamplingParams(max_tokens=None, min_tokens=99).min_tokens == 99


def test_a_copy_is_equal_and_checked_again() -> None:
    params = SamplingParams(stop="x", logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == replace(params) == params
    params.top_p = 3.0
    with pytest.raises(RequestError, match="top_p"):
        replace(params)


def test_edges_are_allowed_and_normalised() -> None:
    params = SamplingParams(top_p=1, top_k=-1, min_p=1, stop="x", max_tokens=1, seed=2**64 - 1)
    assert params.stop == ("x",)
    assert not params.edits_logits
    assert SamplingParams(bad_words=["a"]).edits_logits
    bias = {1: 2.0}
    held = SamplingParams(logit_bias=bias, bad_words=None)
    bias[1] = 500.0
    assert held.logit_bias == {1: 2.0}


def test_structured_outputs_are_copied_as_texts() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "null"}}}
    params = SamplingParams(structured_outputs={"json": schema, "regex": None})
    text = '{"type": "object", "properties": {"é": {"type": "null"}}'
    schema.clear()
    text += ', "x-guidance": {"whitespace_flexible": false}}'
    assert params.structured_outputs == {"json": text}
    assert replace(params) == params
    assert params.edits_logits
    deep = '{"items":' * 100_000 + "{}" + "}" * 100_000
    with pytest.raises(RequestError, match=r"less nesting|at most"):
        SamplingParams(structured_outputs={"json": deep})


def guidance(**asked: Any) -> dict[str, Any]:
    """The settings of white space that llguidance gets."""
    found = SamplingParams(structured_outputs=asked).structured_outputs
    assert isinstance(found, dict)
    told: dict[str, Any] = json.loads(found["json"])["x-guidance"]
    return told


def test_json_is_compact_unless_it_is_asked_for_otherwise() -> None:
    compact, free = {"whitespace_flexible": False}, {"whitespace_flexible": True}
    schema: Any = {"type": "object"}
    assert guidance(json=schema) == guidance(json=schema, disable_any_whitespace=True) == compact
    assert guidance(json=schema, disable_any_whitespace=False) == free
    assert guidance(json_object=True, disable_any_whitespace=False) == free
    assert guidance(json=schema, whitespace_pattern=" ?") == {**compact, "whitespace_pattern": " ?"}
    own = {**schema, "x-guidance": {"whitespace_flexible": True, "key_separator": ": "}}
    assert guidance(json=own) == {**free, "key_separator": ": "}
    assert guidance(json=own, disable_any_whitespace=True)["whitespace_flexible"] is False
    nulls = dict.fromkeys(("regex", "disable_any_whitespace", "whitespace_pattern",
                           "structural_tag"))  # fmt: skip
    assert guidance(json=schema, **nulls, disable_additional_properties=False) == compact
    for harmless in (True, False):  # where there is no JSON
        asked = {"regex": "a", "disable_any_whitespace": harmless}
        assert SamplingParams(structured_outputs=asked).structured_outputs == {"regex": "a"}


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "left out with regex"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
         "whitespace_pattern", "left out with `disable_any_whitespace`: true"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace", "true or false"),
        ({"structural_tag": "x"}, "structural_tag", "left out. Write a `grammar`"),
        ({"json": {}, "disable_additional_properties": True}, "disable_additional_properties",
         "additionalProperties: false"),
        ({"disable_any_whitespace": True}, "", "exactly one of"),
        ({"json": {}, "structural_tag": "x"}, "structural_tag", "Write a `grammar`"),
        ({"json": {"x-guidance": 5}}, "json.x-guidance", "an object"),
    ],
)  # fmt: skip
def test_white_space_that_is_refused(asked: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        SamplingParams(structured_outputs=asked)
    assert caught.value.field == f"structured_outputs.{field}".rstrip(".")


DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 7))


@pytest.mark.parametrize("draft", [None, DRAFT_4, DRAFT_7])
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}},
         "properties.a.items.uniqueItems"),
        ({"unevaluatedProperties": False, "$ref": "#/$defs/x"}, "unevaluatedProperties"),
        ({"anyOf": [{}, {"dependentRequired": {"a": ["b"]}}]}, "anyOf[1].dependentRequired"),
        ({"if": {}, "then": {}}, "if"),
        ({"contains": {"type": "null"}}, "contains"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"additionalProperties": {"not": {}}}, "additionalProperties.not"),
    ],
)  # fmt: skip
def test_keywords_that_no_grammar_holds_are_named(
    draft: str | None, schema: dict[str, Any], place: str
) -> None:
    """Also where llguidance ignores them silently, as keywords newer than the schema's draft."""
    asked = {**schema, **({"$schema": draft} if draft else {})}
    with pytest.raises(RequestError, match="llguidance cannot express it") as caught:
        SamplingParams(structured_outputs={"json": asked})
    assert caught.value.field == f"structured_outputs.json.{place}"
    lenient = {**asked, "x-guidance": {"lenient": True}}
    assert SamplingParams(structured_outputs={"json": lenient})


def test_a_minimum_of_keys_that_could_repeat_is_refused() -> None:
    """A grammar does not know which open keys there were: two of one name would count as two."""
    some = {"type": "integer"}
    for least, schema in ((2, {"additionalProperties": some}), (3, {"required": ["a", "b"]}),
                          (2, {"patternProperties": {"^[ab]$": some},
                               "additionalProperties": False})):  # fmt: skip
        asked = {"json": {"type": "object", "minProperties": least, **schema}}
        with pytest.raises(RequestError, match="an open key may come twice") as caught:
            SamplingParams(structured_outputs=asked)
        assert caught.value.field == "structured_outputs.json.minProperties"
    closed = {"properties": {"a": some, "b": some}, "additionalProperties": False}
    for least, schema in ((2, closed), (1, {"additionalProperties": some}),
                          (2, {"required": ["a", "b"]})):  # fmt: skip
        assert SamplingParams(structured_outputs={"json": {"minProperties": least, **schema}})


def test_a_keyword_is_found_only_if_a_reference_leads_to_it() -> None:
    definitions = {"$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"not": {}}}}
    assert SamplingParams(structured_outputs={"json": definitions})
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs={"json": {**definitions, "$ref": "#/$defs/a~1b"}})
    assert caught.value.field == "structured_outputs.json.$defs.c.not"


UNHELD = {"dependentRequired": {"a": ["b"]}}


@pytest.mark.parametrize(
    ("reference", "definitions", "place"),
    [
        ("#/definitions/l/0", {"l": [UNHELD]}, "l.0"),
        ("#/definitions/l/x/1", {"l": {"x": [0, UNHELD]}}, "l.x.1"),
        ("#x", {"l": {"$id": "#x", **UNHELD}}, "l"),
        ("#x", {"l": {"$anchor": "x", **UNHELD}}, "l"),
        ("#x", {"l": {"then": {"$id": "#x", **UNHELD}}}, "l.then"),
        ("http://e.org/x", {"l": {"$id": "http://e.org/x", **UNHELD}}, "l"),
        ("http://e.org/#/definitions/l", {"l": UNHELD}, "l"),
        ("#/definitions/l", {"l": {"$id": "x", "$ref": "#/definitions/m",
                                   "definitions": {"m": UNHELD}}, "m": {}}, "l.definitions.m"),
    ],
)  # fmt: skip
def test_a_keyword_is_found_wherever_a_reference_leads(
    reference: str, definitions: dict[str, Any], place: str
) -> None:
    """Also by a name, or by a pointer within a part that has a name and definitions of its own."""
    asked = {"$schema": DRAFT_7, "$id": "http://e.org/", "definitions": definitions}
    assert SamplingParams(structured_outputs={"json": asked}), "nothing refers to it"
    with pytest.raises(RequestError, match="llguidance cannot express it") as caught:
        SamplingParams(structured_outputs={"json": {**asked, "$ref": reference}})
    expected = f"structured_outputs.json.definitions.{place}.dependentRequired"
    assert caught.value.field == expected


def test_keywords_that_change_nothing_are_no_reason_to_refuse() -> None:
    harmless = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": {},
                "propertyNames": {"type": "string"}, "dependentRequired": {},
                "format": "path"}  # fmt: skip
    plain = {"type": "object", "properties": {"uniqueItems": {"const": {"not": 1}}}}
    both: list[Any] = [
        SamplingParams(structured_outputs={"json": schema}).structured_outputs
        for schema in (plain, {**plain, **harmless})
    ]
    assert both[0] == both[1]
    closed, same = (
        SamplingParams(structured_outputs={"json": {**plain, name: False}}).structured_outputs
        for name in ("additionalProperties", "unevaluatedProperties")
    )
    assert json.loads(closed["json"]) == json.loads(same["json"])  # type: ignore[index]


def test_room_is_left_only_for_a_number_of_tokens() -> None:
    with pytest.raises(RequestError, match="Give `max_tokens`: -1 leaves room for it") as caught:
        SamplingParams(max_tokens=None, truncate_prompt_tokens=-1)
    assert caught.value.field == "truncate_prompt_tokens"


@pytest.mark.parametrize("value", [False, {"type": "null"}])
def test_unevaluated_items_are_those_after_the_others(value: Any) -> None:
    for given, same in (
        ({"items": [{"type": "null"}]}, {"additionalItems": value}),
        ({"prefixItems": [{"type": "null"}]}, {"items": value}),
        ({"items": {"type": "null"}}, {}),
        ({"items": [{}], "additionalItems": {}}, {}),
    ):
        expected, found = (
            SamplingParams(structured_outputs={"json": {**given, **more}}).structured_outputs
            for more in (same, {"unevaluatedItems": value})
        )
        assert json.loads(found["json"]) == json.loads(expected["json"])  # type: ignore[index]


def test_ids_that_are_named_twice_are_kept_once() -> None:
    params = SamplingParams(allowed_token_ids=[7, 5, 7] * 9, stop_token_ids=[3, 3, 2])
    assert (params.allowed_token_ids, params.stop_token_ids) == ((7, 5), (3, 2))
