"""Cases of the Triton backend, and their comparison with the oracle, in a process of its own.

Triton decides when it is imported whether its kernels are compiled or interpreted, so that the
interpreter needs a process that starts with TRITON_INTERPRET=1:

    TRITON_INTERPRET=1 python -m tests.support.interpreted [part of a case's name]

prints one JSON object: case -> {"decisions", "near_ties", "seconds", "failure"}.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from typing import Any

import torch

from foretoken.ops import Backend, Rule, get_backend
from tests.support.oracle import CPU, compare_batch, random_case

BF16 = torch.bfloat16
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "junk-fp64": {"edited": False, "fp64_noise": True, "junk": True},
    "unfiltered": {"fixed": OFF},
    "block-bf16-wide-q": {
        "fixed": {"rule": Rule.BLOCK},
        "dtype": BF16,
        "draft_dtype": BF16,
        "wider": 3,
    },
    "top-k-fp16-narrow-q": {
        "fixed": {"top_k": 3, "temperature": 0.7},
        "dtype": torch.float16,
        "draft_dtype": BF16,
        "wider": -3,
    },
    "top-p-junk": {"fixed": {**OFF, "top_p": 0.5, "temperature": 1.0}, "junk": True},
    "min-p-fp64": {"fixed": {**OFF, "min_p": 0.1, "temperature": 1.0}, "fp64_noise": True},
    "unfiltered-fp64-bf16": {"fixed": OFF, "fp64_noise": True, "edited": False, "dtype": BF16},
}
"""By name, arguments of `random_case`; `wider`: how much the draft vocabulary is."""
VOCABULARIES = {5: 3, 1025: 1, 2100: 1}
"""Below, at and past one block and two; how many seeds of each kind."""
NAMES = [
    f"{vocabulary}-{kind}-{seed}"
    for vocabulary, seeds in VOCABULARIES.items()
    for number, kind in enumerate(KINDS)
    for seed in range(10 * number, 10 * number + seeds)
]


def compare(name: str, backend: Backend, device: torch.device = CPU) -> dict[str, Any]:
    """One case's outcome; `failure` is None, or what went wrong."""
    vocabulary, rest = name.split("-", 1)
    kind, seed = rest.rsplit("-", 1)
    options = dict(KINDS[kind])
    wider = options.pop("wider", 0)
    start, failure, tally = time.perf_counter(), None, (0, 0)
    try:
        case = random_case(
            int(vocabulary), int(seed), draft_vocabulary=int(vocabulary) + wider, **options
        )
        tally = compare_batch(backend, case, device=device)
    except Exception:  # a kernel may fail in any way; the other cases go on
        failure = traceback.format_exc(limit=-3)
    return {
        "decisions": tally[0],
        "near_ties": tally[1],
        "seconds": round(time.perf_counter() - start, 2),
        "failure": failure,
    }


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    warnings.simplefilter("ignore")  # numpy's, about infinities that the kernels mask
    backend = get_backend("triton")
    print(json.dumps({name: compare(name, backend) for name in NAMES if part in name}))


if __name__ == "__main__":
    main()
