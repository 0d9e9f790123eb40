"""The tokenizer round-trips any text and compresses indentation."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.tiny_python.train_tokenizer import END_OF_TEXT, train_tokenizer

SOURCE = Path(__file__).read_text()
SHIPPED = Path(__file__).parents[2] / "src" / "foretoken" / "assets" / "tiny-python"


@pytest.fixture(scope="module", params=["small", "shipped"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    if request.param == "shipped":
        return AutoTokenizer.from_pretrained(SHIPPED)
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([SOURCE] * 3, vocab_size=400).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t.'!,"))))
def test_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("text", ["  a  .  b ,\n\n\t\tx = 'n''t' ?\r\n", " ", "\n", "", "é \u4e2d"])
def test_whitespace_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_no_token_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("")["input_ids"] == []
    assert tokenizer.eos_token_id not in tokenizer(SOURCE)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == END_OF_TEXT


def test_shipped_vocabulary_and_indentation() -> None:
    shipped = AutoTokenizer.from_pretrained(SHIPPED)
    assert len(shipped) == 4096
    assert len(shipped("\n" + " " * 8 + "return")["input_ids"]) <= 3
