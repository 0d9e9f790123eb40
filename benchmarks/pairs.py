"""Two versions of the code side by side: decoding speed and host work, in interleaved pairs.

    python -m benchmarks.pairs --before ../before/src --after src --repeats 15

Each version runs in a process of its own, both on the same cores. They take turns, case by case:
whatever else a machine does falls on both of a pair, so that the median of the pairs' ratios shows
a difference of a few per cent where absolute times spread by tens of them. Only names that all
versions share are used here, as in `record.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import timeit
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import DRAFT, ROOT, TARGET, arguments, goal, progress, record, use_cores

CASES = {  # drafter, requests that run together
    "plain": (None, 1),
    "draft model": ("draft_model", 1),
    "eagle3": ("eagle3", 1),
    "plain, batch 16": (None, 16),
    "draft model, batch 16": ("draft_model", 16),
}
DRAFTS, SLOTS, PROMPTS = 5, 16, 4
TEMPERATURE = 0.8
DEVICE_PHASES = ("draft", "forward", "verify", "observe")


class Version:
    """The code of one source tree, in a process that measures cases as they are named to it."""

    def __init__(self, src: Path, options: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(src), str(ROOT)])}
        command = [sys.executable, "-m", "benchmarks.pairs", "--serve", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, case: str, repeat: int) -> dict[str, float]:
        """Seconds of each part per token or step."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self.process.stdin.write(json.dumps([case, repeat]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a version ended in case {case!r}: see its error above")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def serve(options: Any) -> None:
    """Measure what is named on the standard input, one line each, until it ends."""
    from foretoken import LLM, SamplingParams
    from foretoken.lab.workloads import heldout

    use_cores(options.cores)
    size = {"max_num_seqs": SLOTS, "threads": options.cores, "enable_prefix_caching": False}
    drafters = {method for method, _ in CASES.values()}
    with ExitStack() as stack:
        llms = {}
        for method in sorted(drafters, key=str):
            drafts = {"method": method, "num_speculative_tokens": DRAFTS} if method else None
            llms[method] = stack.enter_context(LLM(TARGET, drafts, **size))
        prompts = [item.prompt for item in heldout(SLOTS * 2)]
        for line in sys.stdin:
            case, repeat = json.loads(line)
            method, batch = CASES[case]
            params = SamplingParams(
                temperature=TEMPERATURE, max_tokens=options.max_tokens, ignore_eos=True, seed=repeat
            )
            traces: list[Any] = []
            llms[method].engine.on_step = traces.append
            for first in range(0, max(PROMPTS, batch), batch):
                some = prompts[first : first + batch]
                llms[method].generate(some, params, use_tqdm=False)
            llms[method].engine.on_step = None
            steps = [t for t in traces if 0 < t.num_requests == t.num_decoding]
            total = sum(t.total for t in steps)
            tokens = sum(t.num_requests + t.num_accepted for t in steps)
            device = sum(t.seconds.get(phase, 0.0) for t in steps for phase in DEVICE_PHASES)
            host = (total - device) / len(steps)
            print(json.dumps({"token": total / tokens, "host": host}), flush=True)


def bookkeeping(backend: str, batch: int, repeats: int) -> list[float]:
    """Microseconds of counting, writing, packing and advancing in a step with five drafts each."""
    import torch

    from foretoken.ops import Verdict, get_backend
    from foretoken.ops.steps import DraftRequests, PackSizes, SlotState, StepTokens

    length, slots, block = 100, batch + 1, 16
    columns = [torch.full((slots,), value) for value in (length, length - 1, 10**6)]
    shape = (slots, 64)
    state = SlotState(
        torch.ones(slots, 1024, dtype=torch.int32), torch.zeros(shape, dtype=torch.int64), *columns
    )
    steps, slot_B = get_backend(backend).steps(state), torch.arange(batch)
    most_B, one_B = torch.full((batch,), DRAFTS), torch.ones(batch, dtype=torch.int64)
    token_BK, sizes = torch.ones(batch, DRAFTS, dtype=torch.int64), PackSizes(1, 1, DRAFTS + 1)
    verdict = Verdict(torch.ones(batch, DRAFTS + 1, dtype=torch.int64), 0 * one_B, one_B > 0)
    params: Any = None  # of no interest here

    def step() -> None:
        num_B, position_B = steps.count_drafts(slot_B, most_B)
        asked = DraftRequests(slot_B, num_B, position_B, DRAFTS, params)
        steps.write_drafts(asked, num_B, token_BK, 9)
        tokens = StepTokens(slot_B, one_B, None, num_B)
        steps.pack(tokens, sizes, block)
        steps.advance(tokens, verdict)

    found = []
    for _ in range(repeats):
        state.length_S.fill_(length)
        state.computed_S.fill_(length - 1)
        found.append(timeit.timeit(step, number=200) / 200 * 1e6)
    return found


def record_bookkeeping(options: Any) -> None:
    """Of this version alone, by backend and batch."""
    from foretoken.lab.results import Row, Spread

    rows = []
    for backend, batch in product(("native", "torch"), (1, SLOTS)):
        taken = Spread.of(bookkeeping(backend, batch, 10 * options.repeats), "us")
        labels = {"backend": backend, "batch": batch}
        rows.append(Row(f"{backend}, batch {batch}", labels, {"us": taken}))
        print(rows[-1].case, round(taken.median, 1))
    notes = [
        "Counting, writing, packing and advancing together, from Python; the two records that a "
        "step makes for them are made in between.",
        goal("native, batch 1: us", rows[0], "us", 10.0, least=False),
    ]
    options.machine = options.machine or "bookkeeping"  # ends the file's name
    record("pairs", options, {"k": DRAFTS, "context": 100, "block_size": 16}, rows, notes)


def main() -> None:
    """Measure all cases; the first pair of each warms up."""
    from foretoken.lab.results import Row, Spread

    parser = arguments(__doc__, repeats=15, max_tokens=64, cores=1)
    parser.add_argument("--before", type=Path, help="`src` of the older version")
    parser.add_argument("--after", type=Path, default=ROOT / "src", help="`src` of the newer one")
    parser.add_argument("--serve", action="store_true", help="what its processes are told")
    parser.add_argument("--bookkeeping", action="store_true", help="time that of a step, no pairs")
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.bookkeeping:
        record_bookkeeping(options)
        return
    if options.before is None:
        parser.error("--before: name the `src` folder of the version to compare with")
    passed = ["--max-tokens", str(options.max_tokens), "--cores", str(options.cores)]
    versions = [Version(src.resolve(), passed) for src in (options.before, options.after)]
    found: dict[str, list[list[dict[str, float]]]] = {case: [] for case in CASES}
    rounds = [(r, case) for r in range(options.repeats + 1) for case in CASES]
    try:
        for repeat, case in progress(rounds, "pairs"):
            order = (0, 1) if repeat % 2 else (1, 0)
            pair = {i: versions[i].measure(case, repeat) for i in order}
            if repeat:
                found[case].append([pair[0], pair[1]])
    finally:
        for version in versions:
            version.close()
    rows, notes = [], []
    for case, pairs in found.items():
        speed = Spread.of([old["token"] / new["token"] for old, new in pairs], "of the older")
        old_host, new_host = (
            Spread.of([1e6 * pair[i]["host"] for pair in pairs], "us per step") for i in (0, 1)
        )
        change = Spread.of([new["host"] / old["host"] for old, new in pairs], "of the older")
        values = {"speed": speed, "host_before": old_host, "host_after": new_host, "host": change}
        rows.append(Row(case, {"method": CASES[case][0], "batch": CASES[case][1]}, values))
        notes.append(goal(f"{case}: speed", rows[-1], "speed", 0.98))
        print(case, {name: round(value.median, 3) for name, value in values.items()})
    shapes = {
        "target": TARGET, "draft": DRAFT, "k": DRAFTS, "temperature": TEMPERATURE,
        "max_tokens": options.max_tokens, "cores": options.cores, "dtype": "float32",
    }  # fmt: skip
    notes.append(
        "speed: seconds per token of the older version over those of the newer, of decode steps by "
        "the engine's own trace. host: a step without drafting, pass, verification and what the "
        "drafter does after it."
    )
    record("pairs", options, shapes, rows, notes)


if __name__ == "__main__":
    main()
