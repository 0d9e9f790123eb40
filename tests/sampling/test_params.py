"""Sampling parameters: every bound is enforced and named."""

from __future__ import annotations

import pytest

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
    ("seed", -1, "2\\*\\*64"),
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
]


@pytest.mark.parametrize(("name", "value", "bound"), BAD)
def test_out_of_bounds_names_field_and_bound(name: str, value: object, bound: str) -> None:
    with pytest.raises(RequestError, match=bound) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field.startswith(name)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="Did you mean `temperature`"):
        SamplingParams.parse({"temprature": 1.0})


def test_edges_are_allowed_and_normalised() -> None:
    params = SamplingParams(top_p=1, top_k=-1, min_p=1, stop="x", max_tokens=1, seed=2**64 - 1)
    assert params.stop == ("x",)
    assert not params.edits_logits
    assert SamplingParams(bad_words=["a"]).edits_logits
    bias = {1: 2.0}
    held = SamplingParams(logit_bias=bias, bad_words=None)
    bias[1] = 500.0
    assert held.logit_bias == {1: 2.0}
