"""The threads of the kernels: shared, changed while in use, absent after a fork."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from foretoken.ops.backends.native import library
from tests.support.asynchronous import PATIENCE
from tests.support.checkpoints import save_checkpoint
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

# Eight rows of 20 000 are enough to be shared among threads.
PRELUDE = """
import os, sys, threading, time
import torch
from foretoken.ops.backends.native import library
from foretoken.ops import DRAFT, Noise, Rows, get_backend
from tests.support.cases import make_params
ops, params, slot = get_backend("native"), make_params(8, 1.0), torch.arange(8)
logits = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0))
def draw():
    return ops.sample(Rows(logits, params, slot), Noise(slot, slot, DRAFT)).tolist()
alone = draw()
"""
FORK = """
library.set_num_threads(2)
assert draw() == alone
time.sleep(0.2)  # the pool's thread sleeps
child = os.fork()
if child == 0:
    if sys.argv[1] == "used":
        assert draw() == alone
        library.set_num_threads(3)
        assert draw() == alone
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert draw() == alone
"""
CHANGED = """
library.set_num_threads(2)
end = time.monotonic() + 0.5
def work():
    while time.monotonic() < end:
        if draw() != alone:
            os._exit(3)
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers:
    worker.start()
while time.monotonic() < end:
    for count in (1, 2, 3, 20):
        library.set_num_threads(count)
        time.sleep(0.001)
for worker in workers:
    worker.join()
"""


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", PRELUDE + script, *arguments]
    done = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("use", ["used", "unused"])
def test_a_forked_child_computes_and_ends(use: str) -> None:
    run(FORK, use)


@pytest.mark.usefixtures("forked")
def test_the_number_of_threads_may_change_while_others_compute() -> None:
    run(CHANGED)


def test_engines_in_two_threads_give_the_tokens_of_each_alone(tmp_path: Path) -> None:
    from foretoken import LLM, SamplingParams

    folder = save_checkpoint(tmp_path, hidden=64, vocabulary=2000, tokenizer=False)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    prompts = [[7 * i + j for j in range(40)] for i in range(6)]

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    options = {"max_num_seqs": 6, "num_blocks": 64, "backend": "native"}
    engines = [
        LLM(str(folder), {"model": str(folder), "num_speculative_tokens": 3}, threads=2, **options),
        LLM(str(folder), threads=2, **options),
    ]
    try:
        alone = [tokens(llm) for llm in engines]
        found: list[list[list[int]]] = [[], []]

        def work(i: int) -> None:
            found[i] = tokens(engines[i])

        for _ in range(2):
            threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == alone
    finally:
        library.set_num_threads(1)
