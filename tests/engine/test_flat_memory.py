"""Ten thousand finished requests take no more memory than two thousand, with any drafter."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.heads import save_head
from foretoken import LLM, SamplingParams
from foretoken.drafting.registry import DRAFTERS
from foretoken.engine.request import Request, RequestGroup
from foretoken.ops import unavailable
from tests.engine.test_soak import check_all_returned, live, resident_mib

NUM_REQUESTS, WARM, WAVE = 10_000, 2_000, 250
RSS_BOUND_MIB = 3
OPTIONS: dict[str, dict[str, Any]] = {
    # The least there may be, so that the oldest outputs make room long before the count begins.
    "suffix": {"suffix_decoding_max_cached_tokens": 1024},
    "ngram": {"prompt_lookup_min": 1},
}
ASKED: dict[str, dict[str, Any]] = {
    "forced": {"allowed_token_ids": [7]},
    "prediction": {"prediction": "abc" * 20},
}
NATIVE_ALONE = {"suffix", "hybrid"}


@pytest.mark.soak
@pytest.mark.parametrize("name", [*DRAFTERS, "hybrid"])
def test_finished_requests_leave_nothing(
    target: Path, draft: Path, tmp_path: Path, name: str
) -> None:
    if name in NATIVE_ALONE and unavailable("native"):
        pytest.skip(f"{name} needs the native kernels")
    options = {method: {"model": str(draft)} for method in ("draft_model", "draft_text")} | OPTIONS
    if name == "eagle3":
        options[name] = {
            "model": str(
                save_head(tmp_path / "head", hidden=32, vocabulary=260, aux_layers=(0, 1, 1))
            )
        }
    if name == "hybrid":
        entries = [{"method": one, **options[one]} for one in ("suffix", "draft_model")]
        options[name] = {"drafters": entries}
    speculation = {"method": name, "num_speculative_tokens": 3, **options.get(name, {})}
    rng = random.Random(f"flat {name}")
    with LLM(str(target), speculation, max_num_seqs=32, max_model_len=64, threads=1) as llm:
        if name == "draft_text":  # tokenizers keep 10 000 words each, here up to 15 MiB
            drafter: Any = llm.engine.runner.drafter
            for tokenizer in drafter._tokenizers:
                tokenizer.backend_tokenizer.model._resize_cache(0)
        resident = 0.0
        for first in range(0, NUM_REQUESTS, WAVE):
            if first % WARM == 0:  # garbage in cycles, of pytest's too, is not what is looked for
                gc.collect()
            if first == WARM:
                resident = resident_mib()
            prompts = [[rng.randrange(97, 123) for _ in range(8)] for _ in range(WAVE)]
            asked = ASKED.get(name, {})
            params = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, **asked)
            outputs = llm.generate(prompts, params)
            assert sum(output.metrics.num_drafts for output in outputs)
            del outputs
        grown = resident_mib() - resident
        check_all_returned(llm.engine)
        assert live(Request) == live(RequestGroup) == 0
    print(f"{name}: {grown:+.1f} MiB")
    assert grown < RSS_BOUND_MIB
