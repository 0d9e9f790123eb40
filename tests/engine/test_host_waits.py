"""The host never waits for a GPU while it launches a step.

Each kind of request is served twice: at first kernels are compiled and graphs captured, and then
PyTorch raises where it would wait. Prompts arrive, in chunks, while others decode.

    python -m tests.engine.test_host_waits --output benchmarks/results  # without pytest
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.heads import save_head
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, collect, write
from foretoken.lab.workloads import heldout

K = 3
ARRIVALS = (0, 0, 4, 7)  # steps before which requests come
DRAFTERS = ("plain", "eagle3", "draft_model", "ngram")
A_WAIT = {"temperature": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filters": {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "block": {"rejection_sample_method": "block"},
    "coupled": {"rejection_sample_method": "coupled"},
    "log-probabilities": {"logprobs": 3},
    "those of prompts": {"prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "bans and biases": {"bad_words": [" re", "x"], "logit_bias": {60: 2.0}, "min_tokens": 8},
    "no drafts": {"num_speculative_tokens": 0},
    "a wait": A_WAIT,  # which is made: noticed, or nothing is shown
}


def speculation(drafter: str, folder: Path) -> dict[str, Any] | None:
    given: dict[str, Any] = {"method": drafter, "num_speculative_tokens": K}
    if drafter == "eagle3":
        config = LLM("tiny-python", device="cpu", num_blocks=4).engine.runner.model.config
        sizes = {"hidden": config.hidden_size, "vocabulary": config.vocab_size, "head_dim": 64}
        given["model"] = str(save_head(folder / "head", **sizes))
    return None if drafter == "plain" else given


@contextmanager
def raising() -> Iterator[None]:
    """Whatever waits for a GPU inside is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def serve(llm: LLM, kind: dict[str, Any]) -> None:
    prompts = [llm.get_tokenizer().encode(item.prompt)[:90] for item in heldout(len(ARRIVALS))]
    groups, step = [], 0
    while len(groups) < len(prompts) or llm.engine.has_work:
        while len(groups) < len(prompts) and ARRIVALS[len(groups)] <= step:
            i = len(groups)
            asked = {"temperature": 0.8, "seed": i, "max_tokens": 16, "ignore_eos": True, **kind}
            groups.append(llm.engine.add(str(i), prompts[i], SamplingParams(**asked)))
        llm.engine.step()
        step += 1
    for group in groups:
        if group.error is not None:
            raise group.error


def check(drafter: str, device: str) -> Iterator[Row]:
    """How many steps of each kind were launched, and whether any of them would have waited."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            "tiny-python", speculation(drafter, Path(folder)), device=device, dtype="float32",
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=64,
            block_size=16, enable_prefix_caching=False, async_scheduling=True,
        )  # fmt: skip
    engine, is_gpu = llm.engine, llm.engine.runner.slots.device.type == "cuda"
    launch, steps = engine.launch, 0

    def watched(plan: Any) -> Any:
        nonlocal steps
        steps += 1
        with raising() if is_gpu else nullcontext():
            if kind is A_WAIT:
                engine.runner.kv.keys[0].sum().item()
            return launch(plan)

    for name, kind in KINDS.items():
        serve(llm, kind)
        engine.launch, steps, waits = watched, 0, 0  # type: ignore[method-assign]
        try:
            serve(llm, kind)
        except Exception as error:
            waits = 1
            if kind is not A_WAIT:
                traceback.print_exception(error, limit=-5)
        engine.launch = launch  # type: ignore[method-assign]
        labels = {"drafter": drafter, "kind": name}
        yield Row(f"{drafter}, {name}", labels, {"steps": steps, "waits": waits})


def is_right(row: Row) -> bool:
    return row.values["waits"] == (row.labels["kind"] == "a wait")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_launch_waits(drafter: str) -> None:
    assert [row for row in check(drafter, "cuda") if not is_right(row)] == []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    rows = []
    for drafter in DRAFTERS:
        for row in check(drafter, args.device):
            rows.append(row)
            print("ok " if is_right(row) else "BAD", row.case, row.values, flush=True)
    if args.output is not None:
        command = f"python -m tests.engine.test_host_waits {' '.join(sys.argv[1:])}"
        shapes = {"drafts": K, "arrivals": ARRIVALS, "requests": KINDS}
        write(collect(f"host_waits_{args.device}", command, shapes, rows), args.output)
    return int(not all(map(is_right, rows)))


if __name__ == "__main__":
    sys.exit(main())
