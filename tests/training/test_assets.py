"""The shipped folders load alone, with nothing but Transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ASSETS = Path(__file__).parents[2] / "src" / "foretoken" / "assets"
FOLDERS = ["tiny-python", "tiny-python-draft"]


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_loads_and_models_python(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(ASSETS / name)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / name)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 4096
    ids_1T = tokenizer("import os\nimport sys\n\n\ndef main(", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model.float()(ids_1T, labels=ids_1T).loss
    assert loss < 6.0  # ln 4096 is 8.3


@pytest.mark.parametrize("name", FOLDERS)
def test_generation_config_carries_no_sampling_flags(name: str) -> None:
    config = GenerationConfig.from_pretrained(ASSETS / name)
    assert config.eos_token_id == 0
    stored = json.loads((ASSETS / name / "generation_config.json").read_text())
    assert not {"do_sample", "temperature", "top_k", "top_p"} & set(stored)


def test_pair_shares_its_tokenizer_and_stays_small() -> None:
    target, draft = ((ASSETS / name / "tokenizer.json").read_bytes() for name in FOLDERS)
    assert target == draft
    files = [f for name in FOLDERS for f in (ASSETS / name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 36_000_000


def test_heldout_prompts_are_complete() -> None:
    lines = (ASSETS / "tiny-python" / "heldout.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({r["id"] for r in rows}) == len({(r["package"], r["file"]) for r in rows}) == 192
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-python")
    for r in rows:
        assert {"licence", "prompt", "reference"} <= r.keys()
        assert 150 <= len(tokenizer(r["prompt"])["input_ids"]) <= 250
        assert len(tokenizer(r["reference"])["input_ids"]) >= 90
