"""Tokens per second with K fixed at 0 to 4, and with K = `auto`, of an 8B shape on a GPU.

One engine with random weights and the rule `synthetic`: requests name their K, or leave it to the
engine. All cases of a batch size and context take turns; of each, steps are timed in which the
whole batch decodes. Contexts are not computed: their blocks, each request's own, hold random
numbers and are found as if a prompt had been computed there.

Also what proposing K drafts takes at batch 1, against reading what it must read.

    python -m benchmarks.auto_gpu --seconds 140
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from benchmarks.auto import Speeds, rows_of
from benchmarks.common import arguments, goal, record
from benchmarks.start import HEAD, TARGET
from foretoken import LLM, SamplingParams
from foretoken.cache.block_pool import ROOT
from foretoken.engine.engine import Engine
from foretoken.engine.request import Request, RequestGroup
from foretoken.engine.step_costs import _TimedSteps
from foretoken.engine.trace import StepTrace
from foretoken.errors import EngineMemoryError
from foretoken.lab.bench.figures import device_seconds
from foretoken.lab.bench.floor import Floor
from foretoken.lab.results import Row, Spread
from foretoken.ops import Rule

MOST = 4
KS: list[int | str] = [*range(MOST + 1), "auto"]
RATES = [0.78, 0.57, 0.39, 0.26]  # that so many drafts are accepted: 3.0 tokens a step
CASES = [(1, 1024), (64, 1024), (256, 1024), (8, 16384), (8, 1024), (32, 16384), (1, 16384)]
NEW = 1536  # tokens that a request may generate; none gets so far
LEAST_NEW = 512  # for which there must be room
TEMPERATURE = 0.8
UNTIMED = 12  # steps of each turn
REPEATS = 3
WINDOW = 0.15, 0.6  # seconds that are timed, of `auto` twice as many
PROPOSALS = 150
PROPOSING = 1.35  # times its floor, at most
Prompts = list[list[int]]


class Turn(NamedTuple):
    """What one turn of a case found: tokens per second, seconds beside the timing, steps by K."""

    speed: float
    beside: float
    steps_per_k: Counter[int]


def build(options: argparse.Namespace) -> LLM:
    """The engine; its cache is as large as memory allows, and filled with random numbers."""
    speculation = {
        "method": "eagle3", "model": options.head, "num_speculative_tokens": "auto",
        "max_speculative_tokens": MOST, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": RATES,
    }  # fmt: skip
    cases = options.cases
    llm = LLM(
        options.target, speculation, device=options.device, load_format="dummy",
        dtype=options.dtype, max_num_seqs=max(batch for batch, _ in cases),
        max_model_len=max(context for _, context in cases) + 1 + NEW, max_num_batched_tokens=8192,
        num_blocks=options.num_blocks, memory_fraction=0.95,
    )  # fmt: skip
    runner = llm.engine.runner
    runner.graphs.widths = tuple(range(MOST + 1))  # a K of 3 is not padded to 4
    steps = _TimedSteps(runner, MOST, Rule.SYNTHETIC)
    steps.compile_ahead([batch for batch, _ in cases], runner.graphs.widths)
    steps.clear()
    drafter: Any = runner.drafter
    with torch.inference_mode():
        for pool in (runner.kv, drafter.kv):
            for kept in (*pool.keys, *pool.values):
                kept.normal_()
    return llm


def contexts(engine: Engine, batch: int, length: int) -> Prompts:
    """Prompts of `length` tokens, which the cache has, and one more."""
    chance, pool = random.Random(f"{batch} {length}"), engine.scheduler.pool
    words, size = range(engine.limits.vocab_size), pool.block_size
    prompts = [chance.choices(words, k=length + 1) for _ in range(batch)]
    for prompt in prompts:
        blocks, serial = pool.allocate(length // size), ROOT
        for column, block in enumerate(blocks):
            serial = pool.enter(serial, pool.key(prompt, column), block)
        pool.free(blocks)
    return prompts


def begin(engine: Engine, prompts: Prompts, k: int | str, temperature: float) -> list[RequestGroup]:
    """Requests that all decode, and have for some steps."""
    params = SamplingParams(
        temperature=temperature, max_tokens=NEW, ignore_eos=True, num_speculative_tokens=k
    )
    groups = [engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while min(group.samples[0].num_output for group in groups) < 1:
        engine.step()
    for _ in range(UNTIMED):
        engine.step()
    return groups


def end(engine: Engine, groups: list[RequestGroup], context: int) -> None:
    for group in groups:
        if group.error is not None:
            raise group.error
        metrics = group.metrics
        if metrics.num_preemptions or metrics.num_cached_tokens != context or group.finished:
            raise SystemExit(f"Not what was to be measured: {metrics}, finished {group.finished}")
        engine.abort(group)
    engine.step()  # reads what ran ahead


def turn(engine: Engine, prompts: Prompts, k: int | str, seconds: float) -> Turn:
    """Time steps of the whole batch."""
    begun = time.perf_counter()
    groups = begin(engine, prompts, k, TEMPERATURE)
    requests = [group.samples[0] for group in groups]
    tokens, start = -sum(r.num_output for r in requests), time.perf_counter()
    engine.step()
    while (took := time.perf_counter() - start) < seconds and not _nears_end(requests):
        engine.step()
    tokens += sum(r.num_output for r in requests)
    steps = Counter[int]()
    for group in groups:
        steps.update(dict(enumerate(group.metrics.steps_per_k)))
    end(engine, groups, len(prompts[0]) - 1)
    return Turn(tokens / took, time.perf_counter() - begun - took, steps)


def measure(engine: Engine, prompts: Prompts, budget: float) -> tuple[Speeds, Counter[int]]:
    """Every K in turn, within about so many seconds; the first turns, in which steps are captured,
    are left out. Also the steps of `auto` by K."""
    start = time.perf_counter()
    for k in KS:
        turn(engine, prompts, k, 0.0)
    beside = turn(engine, prompts, MOST, 0.0).beside
    left = budget - (time.perf_counter() - start)
    window = min(max(left / REPEATS - len(KS) * beside, 0.0) / (len(KS) + 1), WINDOW[1])
    window = max(window, WINDOW[0])
    speeds: Speeds = {k: [] for k in KS}
    chosen = Counter[int]()
    for repeat in range(REPEATS):
        for k in KS[repeat:] + KS[:repeat]:
            found = turn(engine, prompts, k, window * (2 if k == "auto" else 1))
            speeds[k].append(found.speed)
            chosen += found.steps_per_k if k == "auto" else Counter()
    return speeds, chosen


def proposing(engine: Engine, prompts: Prompts, temperature: float, bandwidth: float) -> Row:
    """Device time of drafting and observing at batch 1, against its reads."""
    traces, context = list[StepTrace](), len(prompts[0]) - 1
    groups = begin(engine, prompts, MOST, temperature)
    engine.on_step = traces.append
    for _ in range(PROPOSALS):
        engine.step()
    engine.on_step = None
    length = fmean((context, len(groups[0].samples[0].token_ids)))
    end(engine, groups, context)
    taken = [device_seconds(t)["draft"] * 1e3 for t in traces if t.num_drafts == MOST]
    reads = MOST * Floor.of(engine, bandwidth).drafter.per_pass(1, length)
    floor = reads / bandwidth / 1e6
    values = {
        "draft_ms": Spread.of(taken, "ms"), "read_gb": reads / 1e9, "read_gb_per_s": bandwidth,
        "floor_ms": floor, "ratio_to_floor": Spread.of([ms / floor for ms in taken], "ratio"),
    }  # fmt: skip
    labels = {"batch": 1, "context": context, "k": MOST, "temperature": temperature}
    return Row(f"proposing, batch 1, K={MOST}, T={temperature:g}", labels, values)


def propose(engine: Engine, notes: list[str]) -> list[Row]:
    """Both temperatures, if memory has room to measure how fast it is read."""
    try:
        bandwidth = Floor.of(engine, None).bandwidth
    except EngineMemoryError as error:
        print(error)
        return []
    prompts = contexts(engine, *min(CASES))
    rows = [proposing(engine, prompts, t, bandwidth) for t in (0.0, TEMPERATURE)]
    for row in rows:
        notes.append(goal(f"{row.case}: times its floor", row, "ratio_to_floor", PROPOSING, False))
        print(notes[-1], f"{row.values['draft_ms'].median:.3f} ms", flush=True)  # type: ignore[union-attr]
    return rows


def shown(speeds: Speeds, row: Row, chosen: Counter[int], engine: Engine) -> str:
    """A case on two lines: thousands of tokens per second by K, and what `auto` did."""
    control = engine.scheduler.control
    assert control is not None
    found = "  ".join(f"K={k} {median(speeds[k]) / 1e3:.3f}" for k in KS)
    ratio, steps = row.values["ratio_to_best"], sum(chosen.values())
    parts = " ".join(f"{k}:{count / steps:.0%}" for k, count in sorted(chosen.items()) if count)
    chances = " ".join(f"{chance:.2f}" for chance in control.acceptance.shared())
    return (
        f"{row.case}: {found}\n    to best (K={row.labels['best_k']}) {ratio.median:.3f} "  # type: ignore[union-attr]
        f"[{ratio.min:.3f}, {ratio.max:.3f}]; its K {parts}; thinks drafts are accepted {chances}, "  # type: ignore[union-attr]
        f"steps off by {control.costs.log_slowdown:+.2f}"
    )


def _nears_end(requests: list[Request]) -> bool:
    """Fast small models only."""
    return min(r.num_remaining for r in requests) <= 2 * (MOST + 1)


def has_room(engine: Engine, batch: int, context: int) -> bool:
    pool = engine.scheduler.pool
    return batch * (pool.blocks_for(context + LEAST_NEW) + 1) <= pool.num_blocks


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", default=str(TARGET))
    parser.add_argument("--head", default=str(HEAD))
    parser.add_argument("--num-blocks", type=int, help="of the cache; as many as fit")
    parser.add_argument("--seconds", type=float, default=140.0, help="for all")
    parser.add_argument("--cases", type=_case, nargs="+", default=CASES, help="BATCHxCONTEXT")
    options, start = parser.parse_args(), time.perf_counter()
    llm = build(options)
    engine, control = llm.engine, llm.engine.scheduler.control
    assert control is not None
    table = control.costs.table
    began = f"Loaded in {time.perf_counter() - start:.1f} s; costs at start:"
    print(f"{began}\n{table.shown()}\nns per token of context, by K: "
          f"{' '.join(f'{x * 1e9:.1f}' for x in table.context_K1)}", flush=True)  # fmt: skip
    notes = [
        "One engine with K = `auto` of at most 4. Timed are steps in which the whole batch "
        "decodes, behind the first "
        f"{UNTIMED}; ratios are taken turn by turn.",
        f"Costs at start, in ms by K: {table.shown()}".replace("\n", "; "),
    ]
    rows = propose(engine, notes)
    shapes = {
        "target": Path(options.target).name, "head": Path(options.head).name,
        "dtype": options.dtype, "most_drafts": MOST, "accepted": RATES, "temperature": TEMPERATURE,
    }  # fmt: skip
    for done, (batch, context) in enumerate(options.cases):
        left = options.seconds - (time.perf_counter() - start)
        if left < 8 or not has_room(engine, batch, context):
            print(f"LEFT OUT: batch {batch}, {context} tokens: {left:.0f} s are left", flush=True)
            continue
        prompts = contexts(engine, batch, context)
        # The last ones may take what the first have left.
        speeds, chosen = measure(engine, prompts, 0.9 * left / (len(options.cases) - done))
        what = f"{context} tokens of context"
        found = rows_of(speeds, batch, what, context=context)
        rows += found
        notes.append(goal(f"batch {batch}, {what}: to best K", found[-1], "ratio_to_best", 0.95))
        print(shown(speeds, found[-1], chosen, engine), flush=True)
        record("auto_gpu", options, shapes, rows, notes)
    print(f"{time.perf_counter() - start:.0f} s in all")


def _case(text: str) -> tuple[int, int]:
    batch, context = map(int, text.split("x"))
    return batch, context


if __name__ == "__main__":
    main()
