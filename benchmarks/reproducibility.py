"""Does a seeded request get the same tokens whatever else is in the batch? By dtype and backend.

Noise is named by seed and position, so tokens can only part where logits do: where the kernels of a
matrix product or of attention round a row by what is computed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.common import DRAFT, SMOLLM2, TARGET, goal, parse, progress, record
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row
from foretoken.lab.workloads import heldout

KS = (0, 4)
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 20})
Ids = list[int]


@dataclass(frozen=True)
class Case:
    """A model on a backend; `drafter`: its method of drafting."""

    label: str
    backend: str = "native"
    model: str = TARGET
    dtype: str = "auto"
    drafter: str = "draft_model"


CASES = (
    Case("float32"),
    Case("float32", "torch"),
    Case("bfloat16", dtype="bfloat16"),
    Case("bfloat16", "torch", dtype="bfloat16"),
    Case("float16", dtype="float16"),
    Case("float16", "torch", dtype="float16"),
    Case("SmolLM2-135M Q4_1", model=SMOLLM2, drafter="ngram"),
)


@dataclass(frozen=True)
class Request:
    """A prompt with a seed of its own."""

    prompt: str
    params: SamplingParams


def seeded(count: int, max_tokens: int) -> list[Request]:
    """Held-out prompts at T = 0.8 with filters in turn, seeds 0..count - 1."""
    return [
        Request(
            item.prompt,
            SamplingParams(
                temperature=0.8, max_tokens=max_tokens, seed=seed, **FILTERS[seed % len(FILTERS)]
            ),
        )
        for seed, item in enumerate(heldout(count))
    ]


def complete(llm: LLM, requests: list[Request]) -> list[Ids]:
    """Tokens of all requests, run as one batch."""
    outputs = llm.generate([r.prompt for r in requests], [r.params for r in requests])
    return [output.outputs[0].token_ids for output in outputs]


def compare(llm: LLM, requests: list[Request]) -> dict[str, int]:
    """How many requests got other tokens than alone, or than in the same batch before."""
    alone = [complete(llm, [request])[0] for request in requests]
    batch = complete(llm, requests)
    return {
        "requests": len(requests),
        "differ_in_batch": differ(alone, batch),
        "differ_in_reversed_batch": differ(alone, complete(llm, requests[::-1])[::-1]),
        "differ_when_repeated": differ(batch, complete(llm, requests)),
    }


def differ(some: list[Ids], others: list[Ids]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))


def main() -> None:
    options = parse(__doc__, requests=32, max_tokens=48, threads=1)
    requests = seeded(options.requests, options.max_tokens)
    rows, notes = [], []
    cases = [(case, k) for case in CASES for k in KS]
    size = {
        "max_num_seqs": options.requests,
        "enable_prefix_caching": False,  # a hit would leave a request fewer rows to compute
        "threads": options.threads,
    }
    for case, k in progress(cases, "reproducibility"):
        speculation = {"method": case.drafter, "num_speculative_tokens": k} if k else None
        chosen = {"dtype": case.dtype, "backend": case.backend}
        with LLM(case.model, speculation, **chosen, **size) as llm:
            values = compare(llm, requests)
        drafted = f"{case.drafter.replace('_', ' ')}, K={k}" if k else "plain"
        name = f"{case.label}, {case.backend}, {drafted}"
        rows.append(Row(name, {**chosen, "model": case.model, "k": k}, dict(values)))
        if case.backend == "native":
            what = f"{name}: requests that a batch changed"
            notes.append(goal(what, rows[-1], "differ_in_batch", 0, least=False))
        print(f"{name:<44} {values}")
    record(
        "reproducibility",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "temperature": 0.8,
            "filters": list(FILTERS),
            "max_tokens": options.max_tokens,
            "threads": options.threads,
        },
        rows,
        [
            "Counts of requests whose tokens are not those that they get alone in the same engine: "
            "in one batch of all, and in the batch in reversed order. differ_when_repeated: whose "
            "tokens are not those of the same batch before.",
            "On native, weights are kept as the first word says, and all else is float32; on torch "
            "everything is computed in that dtype.",
            *notes,
        ],
    )


if __name__ == "__main__":
    main()
