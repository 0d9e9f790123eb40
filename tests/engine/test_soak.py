"""Two thousand requests through a pool far too small: nothing lost, nothing left, nothing changed.

The requests and the crowd are those of `tests/long/soak.py`, which lasts longer and takes one
drafter. Each request is compared with the same request alone. Both are exact for equal logits, and
the native decoder gives equal bits: no token may differ. Without native kernels the logits of one
row differ by about 1e-6 between batch shapes, so a token may differ where two are that close; the
bound is then one output in a thousand.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.engine import Engine
from foretoken.engine.request import Request, RequestGroup
from foretoken.lab.workloads import heldout
from foretoken.ops import unavailable
from tests.long.soak import PROMISED, Crowd, Known

NUM_REQUESTS = 2000  # per drafter
NUM_DISTINCT = 500  # the tokens of each request alone are computed once
MOST_NEAR_TIES = NUM_REQUESTS // 1000 if unavailable("native") else 0
RSS_BOUND_MIB = 24  # growth between a quarter of the run and its end
OPTIONS: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 512, "max_model_len": 256}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def live(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


def check_all_returned(engine: Engine) -> None:
    engine.check_integrity()  # nothing is kept for a slot or request that is not there
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.soak
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
def test_a_crowd_in_a_small_pool_gets_what_each_gets_alone(
    method: str, ahead: bool, record_property: Any
) -> None:
    speculation, rng = {"method": method, "num_speculative_tokens": 4}, random.Random(method)
    single = LLM("tiny-python", speculation, max_num_seqs=2, enable_prefix_caching=False, **OPTIONS)
    prompts = [single.get_tokenizer().encode(item.prompt) for item in heldout(40)]  # type: ignore[union-attr]
    known = [Known(prompts, rng, on_host=True) for _ in range(NUM_DISTINCT)]
    for one in known:
        one.run(single.engine)
    del single
    crowded = {"max_num_seqs": 8, "num_blocks": 14, "async_scheduling": ahead}
    engine = LLM("tiny-python", speculation, **crowded, **OPTIONS).engine
    crowd, resident = Crowd(engine, known, rng, 16), 0.0
    while crowd.found["requests"] < NUM_REQUESTS:
        crowd.step()
        if not resident and crowd.found["requests"] >= NUM_REQUESTS // 4:
            resident = resident_mib()
    crowd.drain()
    grown = resident_mib() - resident
    found = {**crowd.found, "different": len(crowd.parted), "MiB grown": round(grown, 1)}
    print(method, found)
    for name, value in found.items():
        record_property(name, value)
    assert len(crowd.parted) <= MOST_NEAR_TIES
    assert all(found[name] for name in PROMISED)
    assert found["preemptions"] > NUM_REQUESTS // 10
    assert grown < RSS_BOUND_MIB
    check_all_returned(engine)
    assert live(Request) == live(RequestGroup) == live(Detokenizer) == 0
