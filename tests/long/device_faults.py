"""Faults of a real GPU: each failed request has a reason, other requests are served, and it ends.

Each case is a process of its own, since a GPU that failed is lost to its process; one that is still
there after two minutes has failed. Injected into a step of the embedded pair's engine are an
assertion on the device, an access outside of memory, and an allocation that cannot succeed; one
token's vector is NaN; the GPU is hidden, or may not be filled.

    python -m tests.long.device_faults --output benchmarks/results
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, AsyncEngine, SamplingParams
from foretoken.engine.engine import Engine
from foretoken.engine.runner import Runner
from foretoken.errors import EngineBrokenError, EngineMemoryError, NonFiniteLogitsError
from foretoken.lab.results import Row, collect, write
from foretoken.models.causal_lm import CausalLM
from foretoken.ops.stack import Dense, plain

SECONDS = 120  # until a case has hung
STEP = 6  # of the engine: the one that fails
POISON = 777  # a token with a vector of NaN
OPTIONS: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 2, "max_model_len": 256, "num_blocks": 16,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": [40 + i, 50, 60]} for i in range(4)]
POISONED = {"prompt_token_ids": [40, POISON, 60]}


def assertion() -> None:
    torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))


def illegal_access() -> None:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def store(x, FAR: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x + FAR, 1.0)

    store[(1,)](torch.zeros(1, device="cuda"), 1 << 45)


def too_much_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def break_step(act: Callable[[], None]) -> None:
    """Run `act` on the device at the beginning of step number `STEP` of any engine."""
    serve, run, calls = Engine.step, Runner.run, 0

    def counted(self: Engine) -> Any:
        nonlocal calls
        calls += 1
        return serve(self)

    def broken(self: Runner, step: Any) -> Any:
        nonlocal calls
        if calls == STEP:
            calls += 1
            act()
        return run(self, step)

    Engine.step, Runner.run = counted, broken  # type: ignore[method-assign]


def poison(model: CausalLM) -> None:
    """Embed prompts by another table, outside of graphs; the output layer keeps its own."""
    network: Any = model.network
    table_VC = plain(network.stack.embedding).clone()
    table_VC[POISON] = float("nan")
    network.stack = replace(network.stack, embedding=Dense(table_VC))


def texts(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def in_llm(act: Callable[[], None], kind: type[Exception]) -> dict[str, bool]:
    """A step fails: its batch ends with the reason; the kind decides about other requests."""
    with LLM("tiny-python", **OPTIONS) as llm:
        whole = texts(llm.generate(PROMPTS, PARAMS))
        break_step(act)
        outputs = llm.generate(PROMPTS, PARAMS)
        is_lost = kind is EngineBrokenError
        ended, others = (outputs, []) if is_lost else (outputs[:2], outputs[2:])
        again = llm.generate(PROMPTS, PARAMS, on_error="return")
    return {
        "who ran ends with the reason": all(isinstance(o.error, kind) for o in ended),
        "what was generated is right": all(
            o.outputs[0].token_ids == tokens[: len(o.outputs[0].token_ids)]
            for o, tokens in zip(ended, whole, strict=False)
        ),
        "who waited is served, or told": texts(others) == whole[len(ended) :],
        "who comes later is served, or told": all(isinstance(o.error, kind) for o in again)
        if is_lost
        else texts(again) == whole,
    }


def nan_in_llm() -> dict[str, bool]:
    """One request's logits are NaN: only that one ends."""
    with LLM("tiny-python", **OPTIONS | {"max_num_seqs": 4}) as llm:
        whole = texts(llm.generate(PROMPTS, PARAMS))
        poison(llm.engine.runner.model)
        outputs = llm.generate([*PROMPTS[:2], POISONED, *PROMPTS[2:]], PARAMS)
        bad = outputs.pop(2)
        llm.engine.check_integrity()
    return {
        "it ends with the reason": isinstance(bad.error, NonFiniteLogitsError),
        "the others are served": texts(outputs) == whole,
    }


def in_async_engine(act: Callable[[], None] | None, kind: type[Exception]) -> dict[str, bool]:
    """All readers end, also one that comes later; `act` None: a NaN."""
    engine = AsyncEngine("tiny-python", **OPTIONS)
    prompts = list(PROMPTS)
    if act is None:
        poison(engine.engine.runner.model)
        prompts = [POISONED] * 2
    else:
        break_step(act)

    async def read(prompt: Any) -> BaseException | None:
        last = None
        try:
            async for output in engine.generate(prompt, PARAMS):
                last = output
        except Exception as error:  # what readers are told
            return error
        return last.error if last is not None else None

    async def main() -> tuple[list[BaseException | None], BaseException | None]:
        ended = await asyncio.gather(*map(read, prompts))
        later = await read(PROMPTS[0])
        await engine.close()
        return ended, later

    ended, later = asyncio.run(main())
    is_lost = kind is EngineBrokenError
    told = ended if is_lost or act is None else ended[:2]
    return {
        "readers end with the reason": all(isinstance(error, kind) for error in told),
        "who comes later is served, or told": isinstance(later, kind) if is_lost else later is None,
    }


def in_command(said: str, *words: str, act: Callable[[], None] | None = None) -> dict[str, bool]:
    """Check stderr and the exit status of `foretoken generate`, run in this process."""
    from typer.testing import CliRunner

    from foretoken.cli.app import app

    if act is not None:
        break_step(act)
    done = CliRunner().invoke(app, ["generate", "def f(", "--max-tokens", "30", *words])
    print(done.stderr[-600:], file=sys.stderr)
    if not said:
        return {"exit status 0": done.exit_code == 0}
    return {f"says {said!r}": said in done.stderr, "exit status 2": done.exit_code == 2}


CUDA = ("--device", "cuda")
CASES: dict[str, Callable[[], dict[str, bool]]] = {
    "LLM, assertion": lambda: in_llm(assertion, EngineBrokenError),
    "LLM, illegal access": lambda: in_llm(illegal_access, EngineBrokenError),
    "LLM, out of memory": lambda: in_llm(too_much_memory, EngineMemoryError),
    "LLM, NaN": nan_in_llm,
    "AsyncEngine, assertion": lambda: in_async_engine(assertion, EngineBrokenError),
    "AsyncEngine, illegal access": lambda: in_async_engine(illegal_access, EngineBrokenError),
    "AsyncEngine, out of memory": lambda: in_async_engine(too_much_memory, EngineMemoryError),
    "AsyncEngine, NaN": lambda: in_async_engine(None, NonFiniteLogitsError),
    "command, assertion": lambda: in_command("The device failed", *CUDA, act=assertion),
    "command, illegal access": lambda: in_command("The device failed", *CUDA, act=illegal_access),
    "command, out of memory": lambda: in_command("out of memory", *CUDA, act=too_much_memory),
    "command, no memory to start": lambda: in_command(
        "memory", *CUDA, "--memory-fraction", "0.0001"
    ),
    "command, no GPU": lambda: in_command("cuda", *CUDA),
    "command, no GPU, device auto": lambda: in_command("", "--device", "auto"),
}


def run(name: str) -> Row:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if "no GPU" in name else {}
    command = [sys.executable, "-m", "tests.long.device_faults", "--case", name]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=os.environ | hidden, capture_output=True, text=True, timeout=SECONDS
        )
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        checks = json.loads(found[-1]) if found else {"it was checked": False}
        checks["the process ended by itself"] = done.returncode == 0
        if not all(checks.values()):
            print(name, checks, done.stderr[-1500:], sep="\n", flush=True)
    except subprocess.TimeoutExpired as error:
        checks = {"the process ended by itself": False}
        print(name, f"hung for {SECONDS} s", (error.stderr or b"")[-1500:], sep="\n", flush=True)
    seconds = round(time.perf_counter() - started, 1)
    return Row(
        name,
        {"case": name},
        {**{what: int(held) for what, held in checks.items()}, "seconds": seconds},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="this one, in this process")
    parser.add_argument("--jobs", type=int, default=5, help="processes at a time")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(CASES[args.case]()), flush=True)
        return 0
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(run, CASES))
    for row in rows:
        print(row.case, row.values)
    if args.output is not None:
        command = f"python -m tests.long.device_faults {' '.join(sys.argv[1:])}"
        write(collect("gpu_faults", command, {**OPTIONS, "step": STEP}, rows), args.output)
    return int(not all(value for row in rows for value in row.values.values()))


if __name__ == "__main__":
    sys.exit(main())
