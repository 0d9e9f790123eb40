"""Every Triton kernel turned into Triton's IR without a GPU: run as a program of its own.

    python -m tests.ops.typed_kernels [few]

few: every kernel, but not with every set of types and constants.

The interpreter runs kernels as Python, where a name may change its type from line to line; the
compiler refuses that. Only the first stage runs, the one that types.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from foretoken.ops import (
    DRAFT,
    TARGET,
    AttentionBatch,
    AttentionOptions,
    DraftBlock,
    DraftCache,
    Edits,
    Noise,
    Rows,
    Rule,
    SlotParams,
    VerifyBatch,
)
from foretoken.ops.steps import PackSizes, StepTokens
from tests.ops.test_steps import BLOCK_SIZE, Bind, make_asked, make_case, make_verdict

typed: dict[str, str] = {}
"""The kernel of each launch that was typed, by name, argument types and constants."""


class NoDriver:
    """The part of a GPU driver that chooses a compilation target."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


def stop_at_ir(src: Any, target: Any = None, options: Any = None) -> Any:
    """In place of `triton.compile`: types the kernel, then there is nothing to launch.
    Launches that differ in how their arguments are aligned have the same types.
    """
    key = f"{src.fn.__name__} {src.signature} {src.constants}"
    if key in typed:
        return None
    backend = triton.compiler.make_backend(target)
    parsed = backend.parse_options(dict(options or {}))
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    try:
        src.make_ir(target, parsed, codegen, modules, context)
    except TypeError:  # Triton 3.6 takes no target here
        src.make_ir(parsed, codegen, modules, context)
    typed[key] = src.fn.__name__
    return None


def every_op(
    ops: Any,
    dtype: torch.dtype,
    rules: frozenset[Rule],
    fp64: bool,
    full: bool,
    only: str = "",
    width: int = 5000,
) -> None:
    """All launches of all ops, or of `verify` alone, of 2 requests.
    full: with filters and edits. width: of a row; sizes of 1 are compiled in.
    """
    slots, drafts = 4, 3
    params = SlotParams(
        *(torch.zeros(slots, dtype=torch.int64), torch.ones(slots)),
        *(torch.zeros(slots, dtype=torch.int64), torch.ones(slots), torch.zeros(slots)),
        torch.full((slots,), min(rules), dtype=torch.int64), full, rules,
    )  # fmt: skip
    at = torch.tensor([0, 1])

    def edits(rows: int) -> Edits | None:
        if not full:
            return None
        masks = torch.zeros(1, -(-width // 32), dtype=torch.int32), torch.full((rows,), -1)
        start = torch.cat([torch.zeros(1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)])
        one = torch.ones(1)
        return Edits(*masks, start, torch.tensor([3 % width]), one * 0, one, one * 0)

    logits = torch.zeros(2, width, dtype=dtype)
    cache = DraftCache.empty(slots, drafts, width, dtype, logits.device)
    if not only:
        ops.sample(Rows(logits, params, at, edits(2)), Noise(at, at * 0, TARGET, fp64=fp64))
        ops.process_logits(Rows(logits, params, at, edits(2)))
        ops.logprobs(logits, at % width, min(5 * full, width))
        ops.logprobs(Rows(logits, params, at, edits(2)), at % width, min(20, width))
        ops.draft(Rows(logits, params, at), Noise(at, at * 0, DRAFT, fp64=fp64), cache)
    blocks = ((drafts, cache), (1, None), (1, cache), (0, None))
    for num, own in blocks[: 2 if only or width == 1 else 4]:
        rows = 2 * (num + 1)
        token_BK, real_q_B = (
            torch.zeros(2, num, dtype=torch.int64),
            torch.full((2,), own is not None),
        )
        block = DraftBlock(token_BK, torch.full((2,), num), own, real_q_B)
        rates = torch.ones(max(num, 1), dtype=torch.float64) if Rule.SYNTHETIC in rules else None
        logits_NV = torch.zeros(rows, width, dtype=dtype)
        more = {"edits": edits(rows), "synthetic_rate_K": rates, "fp64_noise": fp64}
        ops.verify(VerifyBatch(logits_NV, params, at, at, block, **more))  # type: ignore[arg-type]


def every_step(bind: Bind, requests: int, most: int) -> None:
    """All launches of a step's bookkeeping; `most` drafts."""
    case = make_case(1, requests, most, prompts=requests > 1, device=torch.device("cpu"))
    steps = bind(case.state)
    num_D, position_D = steps.count_drafts(case.slot_D, case.most_D)
    tokens = StepTokens(case.slot_B, case.num_tokens_B, case.decider_B, num_D)
    steps.pack(tokens, PackSizes(64, 8, 9), BLOCK_SIZE)
    steps.advance(tokens, make_verdict(1, case.most_D * 0, most))
    asked = make_asked(case, num_D, position_D)
    steps.begin_round(asked, 2, 50, BLOCK_SIZE)
    drafts = steps.join_drafts([num_D] * most, num_D)
    steps.write_drafts(asked, num_D, drafts, 6)
    steps.look_up(asked, 1, 3)


def every_attention(package: Any, dtype: torch.dtype, new: int, full: bool) -> None:
    """Attention of 2 requests with `new` tokens each. full: with all options and norms."""
    heads, kv_heads, size, page = 4, 2, 64, 16
    start = torch.tensor([0, new, 2 * new])
    few = new if new <= package.MOST_NEW else 0
    batch = AttentionBatch(start, torch.tensor([60, 90]), torch.zeros(2, 40).long(), page, few)
    options = AttentionOptions(0.1)
    if full:
        options = AttentionOptions(0.1, 33, 5.0, torch.zeros(heads))
    norms = (torch.ones(size),) * 2 if full else (None, None)
    turns = package.HeadInputs(torch.zeros(99, size // 4), torch.zeros(99, size // 4), *norms)
    cache = torch.zeros(9, page, kv_heads, size, dtype=dtype)
    qkv_TW = torch.zeros(2 * new, (heads + 2 * kv_heads) * size, dtype=dtype)
    if few:
        out_TC = torch.zeros(2 * new, heads * size, dtype=dtype)
        package.attend_new(qkv_TW, turns, cache, cache, batch, options, out_TC, True)
    query_THD = package.write_new(qkv_TW, turns, cache, cache, batch, True)
    package.attention(query_THD, cache, cache, batch, options)


def main(few: bool) -> None:
    driver.set_active(NoDriver())
    run = JITFunction.run
    JITFunction.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
    triton.compiler.compile = stop_at_ir
    ops = importlib.import_module("foretoken.ops.backends.triton").load()
    launch = importlib.import_module("foretoken.ops.backends.triton.launch")
    launch.check_device = lambda logits: None  # type: ignore[attr-defined]
    launch.overlaps = lambda device: True  # type: ignore[attr-defined]
    every_op(ops, torch.float16, frozenset(Rule), fp64=True, full=True)
    only = "verify" if few else ""
    every_op(ops, torch.float32, frozenset([Rule.STANDARD]), False, False, only)
    if not few:
        every_op(ops, torch.float32, frozenset(Rule), False, False, only="verify")
        every_op(ops, torch.float16, frozenset(Rule) - {Rule.BLOCK}, True, True, only="verify")
        every_op(ops, torch.float32, frozenset(Rule), False, True, width=1)
    for requests, most in ((5, 4), (1, 1))[: 1 if few else 2]:
        every_step(ops.steps, requests, most)
    package = importlib.import_module("foretoken.ops.backends.triton.attention")
    package.attend.check_device = lambda *query: None
    for new, full in ((5, True), (40, True), (1, False), (16, True))[: 2 if few else 4]:
        for dtype in (torch.bfloat16, torch.float32)[: 1 if few else 2]:
            every_attention(package, dtype, new, full)
    print(" ".join(sorted({*typed.values()})))


if __name__ == "__main__":
    main("few" in sys.argv)
