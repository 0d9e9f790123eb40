"""Cases of the Triton backend, and their comparison with the oracle, in a process of its own.

Triton decides when it is imported whether its kernels are compiled or interpreted, so that the
interpreter needs a process that starts with TRITON_INTERPRET=1:

    TRITON_INTERPRET=1 python -m tests.support.interpreted [name ...]

runs the cases of these names, or all, and prints one JSON object:
case -> {"decisions", "near_ties", "seconds", "failure"}.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from foretoken.ops import Backend, Rule, get_backend
from tests.support import interpreter as interpreter
from tests.support.layouts import EMPTY, KINDS, compare_layouts
from tests.support.likeliest import compare_likeliest
from tests.support.oracle import CPU, compare_batch, random_case
from tests.support.pieces import compare_pieces
from tests.support.unstated import compare_unstated
from tests.support.wide_rows import compare_wide

BF16 = torch.bfloat16
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SMALL = {"num_requests": 3, "num_slots": 4, "most": 2}
CASES: dict[str, dict[str, Any]] = {
    "5, every rule": {"seed": 1},
    "5, every rule, wider q, fp16": {"seed": 2, "wider": 3, "dtype": torch.float16},
    "5, junk, fp64 noise": {"seed": 10, "junk": True, "fp64_noise": True, "edited": False},
    "5, junk, top-p": {"seed": 50, "junk": True, "fixed": {**OFF, "top_p": 0.5}},
    "5, synthetic, much wider q": {"seed": 6, "wider": 60, "fixed": {"rule": Rule.SYNTHETIC}},
    "5, junk, block": {  # rows after a draft that the rule may or may not accept
        "seed": 8,
        "junk": True,
        "edited": False,
        "num_requests": 4,
        "num_slots": 4,
        "fixed": {**OFF, "rule": Rule.BLOCK, "temperature": 1.0},
    },
    "70, min-p above the k-th": {"seed": 3, "fixed": {"min_p": 0.5, "top_k": 5}},
    "5, synthetic, T=0": {"seed": 4, "fixed": {"rule": Rule.SYNTHETIC, "temperature": 0.0}},
    "1025, every rule": {"seed": 1},
    "1025, unfiltered, fp64 noise, bf16": {
        "seed": 5, "fixed": OFF, "fp64_noise": True, "dtype": BF16,
    },
    "1025, block, wider q in fp16, bf16": {
        "seed": 30,
        "fixed": {"rule": Rule.BLOCK, "temperature": 1.0},
        "wider": 3,
        "dtype": BF16,
        "draft_dtype": torch.float16,
    },
    "1025, coupled, min-p": {"seed": 7, "fixed": {**OFF, "min_p": 0.1, "rule": Rule.COUPLED}},
    "2100, junk, top-p": {"seed": 50, "junk": True, "fixed": {**OFF, "top_p": 0.5}},
    "2100, top-k, narrower q": {
        "seed": 40,
        "fixed": {"top_k": 3, "temperature": 0.7},
        "wider": -3,
        "draft_dtype": BF16,
    },
    "2100, standard, unfiltered": {"seed": 8, "fixed": {**OFF, "rule": Rule.STANDARD}},
    "2100, standard, unfiltered, many": {  # too many requests for `settle_kernel`
        "seed": 9,
        "fixed": {**OFF, "rule": Rule.STANDARD, "temperature": 1.0},
        "num_requests": 6,
        "num_slots": 6,
    },
    "1025, many edits, bf16": {
        "seed": 20,
        "most_edits": 3000,
        "most": 1,
        "num_requests": 1,
        "num_slots": 1,
        "fixed": {**OFF, "rule": Rule.STANDARD, "temperature": 1.0},
        "dtype": BF16,
    },
    "4500, wide: 3": {},
    "2100, likeliest: 0": {},
    "4500, likeliest: 1": {},
    "2100, likeliest: 2": {},
    "1000, likeliest: 3": {},
    "5, unstated rules": {},
    "5, laid apart": {"seed": 11, "most": 1},
    "5, with empty edits": {"seed": 12, "most": 1, "edited": False},
    "5, in pieces": {  # this one and the next draw through `settle_kernel` what the whole does not
        "seed": 10,
        "most": 1,
        "wider": 7,
        "num_requests": 5,
        "num_slots": 5,
        "edited": False,
        "fixed": {"temperature": 1.0},
    },
    "1025, in pieces": {
        "seed": 28,
        "wider": 1000,
        "num_requests": 5,
        "num_slots": 5,
        "fixed": {**OFF, "temperature": 1.0},
    },
}  # fmt: skip
"""Arguments of `random_case`, a turn of `compare_wide` or of `compare_likeliest`, or none.

A name begins with the vocabulary.

Of some the arguments lie apart in memory, or a batch is compared with its pieces.

wider: how much wider the draft vocabulary is.
"""
CHOICES = "choices with FP64 noise"


def compare(name: str, backend: Backend, device: torch.device = CPU) -> dict[str, Any]:
    """One case's outcome; `failure` is None, or what went wrong."""
    options = SMALL | CASES[name]
    vocabulary, seed = int(name.split(",")[0]), options.pop("seed", 0)
    width = vocabulary + options.pop("wider", 0)

    def run() -> tuple[int, int]:
        if "wide: " in name:
            return compare_wide(int(name[-1]), backend, vocabulary, device)
        if "likeliest: " in name:
            return compare_likeliest(int(name[-1]), backend, vocabulary, device)
        if "unstated" in name:
            return compare_unstated(backend, vocabulary, device)
        case = random_case(vocabulary, seed, draft_vocabulary=width, **options)
        if "apart" in name:
            return compare_layouts(backend, [case], [(KINDS, True)], device)
        if "empty edits" in name:
            layouts = [((), False), ((EMPTY,), False), ((), False)]
            return compare_layouts(backend, [case], layouts, device)
        if "in pieces" in name:
            return compare_pieces(case, backend, device)
        return compare_batch(backend, case, device=device)

    return _outcome(run)


def _outcome(run: Callable[[], tuple[int, int]]) -> dict[str, Any]:
    start, failure, tally = time.perf_counter(), None, (0, 0)
    try:
        tally = run()
    except Exception:  # a kernel may fail in any way; the other cases go on
        failure = traceback.format_exc(limit=-3)
    return {
        "decisions": tally[0],
        "near_ties": tally[1],
        "seconds": round(time.perf_counter() - start, 2),
        "failure": failure,
    }


def main() -> None:
    names = sys.argv[1:] or [*CASES, CHOICES]
    warnings.simplefilter("ignore")  # numpy's, about infinities that the kernels mask
    backend = get_backend("triton")
    outcomes = {name: compare(name, backend) for name in names if name != CHOICES}
    if CHOICES in names:
        choices = importlib.import_module("tests.support.argmax64")  # needs Triton
        outcomes[CHOICES] = _outcome(lambda: (choices.compare_choices(64, CPU)[0], 0))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
