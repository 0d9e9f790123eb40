"""From a process's start to its first token: with an empty Triton cache, and with a warm one.

Default options, so that the memory planner runs; seconds by what they go to. Eight tokens are
generated, since CUDA graphs are captured when they are first needed: behind the first token.

    python -m benchmarks.start --device cuda --output benchmarks/results
    python -m benchmarks.start --device cpu --model tiny-python --method draft_model
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from foretoken.lab.results import Row, collect, write

SHAPES = Path("benchmarks") / "shapes"
TARGET, HEAD = SHAPES / "llama-3.1-8b", SHAPES / "llama-3.1-8b-eagle3"
BOUNDS = {"empty": 120.0, "warm": 60.0}  # seconds to the first token
PROMPT, TOKENS = list(range(2, 1026)), 8


def timed(call: Any, seconds: dict[str, float], part: str) -> Any:
    """The same function; its calls add their time to a part."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start

    return watched


def child(options: dict[str, Any], begun: float) -> dict[str, float]:
    """What the process that was begun then took, in this one."""
    from foretoken import LLM, EngineConfig, SamplingParams
    from foretoken.drafting import stacks
    from foretoken.engine.build import Assembly, EngineParts, build_engine
    from foretoken.engine.runner import Runner
    from foretoken.models import load_model

    seconds = {"import": time.time() - begun}
    load_target = timed(load_model, seconds, "target")

    def load(*args: Any, **kwargs: Any) -> Any:
        """The target, and then a draft model, which is no part."""
        return (load_model if "target" in seconds else load_target)(*args, **kwargs)

    for owner, name, part in ((stacks, "_load_head", "head"), (Assembly, "plan", "plan"),
                              (Runner, "capture", "graphs")):  # fmt: skip
        setattr(owner, name, timed(getattr(owner, name), seconds, part))
    engine = build_engine(EngineConfig.parse(**options), EngineParts(load_model=load))
    llm = LLM.from_engine(engine)
    seconds["engine"] = time.time() - begun
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    [output] = llm.generate([PROMPT[: llm.engine.limits.max_model_len - TOKENS]], params)
    seconds["all_tokens"] = time.time() - begun
    if output.error is not None:
        raise output.error
    to_first = output.metrics.time_to_first_token
    assert to_first is not None
    seconds["first_token"] = seconds["engine"] + to_first
    return {part: round(count, 2) for part, count in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--method", default="eagle3", help="with the 8B head, if this")
    parser.add_argument("--child", type=float, help="what this command starts itself with")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    speculation: dict[str, Any] = {"method": args.method, "num_speculative_tokens": 4}
    options = {"model": args.model, "device": args.device, "speculative_config": speculation}
    if args.method == "eagle3":
        speculation["model"] = str(HEAD)
        options |= {"load_format": "dummy", "dtype": "bfloat16"}
    if args.child:
        print(json.dumps(child(options, args.child)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in BOUNDS:
            words = [sys.executable, "-m", "benchmarks.start", *sys.argv[1:]]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(
                [*words, "--child", repr(time.time())],
                env=environment, stdout=subprocess.PIPE, check=True, text=True,
            )  # fmt: skip
            values = json.loads(done.stdout.splitlines()[-1])
            rows.append(Row(f"Triton cache {cache}", {"cache": cache}, values))
            print(rows[-1].case, values, flush=True)
    if args.output is not None:
        command = f"python -m benchmarks.start {' '.join(sys.argv[1:])}"
        notes = [
            "Seconds since the process began: engine, first_token, all_tokens (eight of them). "
            "Seconds of their own: import (Python and PyTorch), target and head (made, checked, "
            "kernels compiled), plan (of memory: the largest steps are run), graphs."
        ]
        write(collect(f"start_{args.device}", command, options, rows, notes), args.output)
    return int(any(row.values["first_token"] > BOUNDS[str(row.labels["cache"])] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
