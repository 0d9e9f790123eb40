"""How many drafts are accepted: each drafter, free-running, on the held-out prompts.

Every request runs on its own text, not on the reference. Outputs that end in a cycle are easy to
draft; they are left out of the counts and reported. For sampled drafts every verification is done
twice on the same drafts with the same uniforms, with the real q and as one-hot; only the first
decides the text, so the two columns differ in nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.common import DRAFT, TARGET, parse, progress, record
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout
from foretoken.ops import Verdict, VerifyBatch
from foretoken.outputs import RequestOutput, SpeculationMetrics

TEMPERATURES = (0.0, 0.8)
MASK = 2**64 - 1
LONGEST_PERIOD = 48


@dataclass
class OneHotShadow:
    """A backend whose `verify` also counts what one-hot verification would have accepted.

    Attributes:
        decides: let the one-hot verdict decide the text, too.
        accepted: per sample (its noise key), drafts accepted as one-hot.
    """

    backend: Any
    decides: bool = False
    accepted: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def verify(self, batch: VerifyBatch) -> Verdict:
        one_hot = replace(batch.drafts, real_q_B=torch.zeros_like(batch.drafts.real_q_B))
        shadow = self.backend.verify(batch._replace(drafts=one_hot))
        keys = batch.params.key_S[batch.slot_B].tolist()
        for key, count in zip(keys, shadow.n_accept_B.tolist(), strict=True):
            self.accepted[key & MASK] += count
        if self.decides:
            return shadow
        return self.backend.verify(batch)


@dataclass(frozen=True)
class Case:
    name: str
    method: str
    sample_method: str = "probabilistic"
    one_hot_decides: bool = False
    temperatures: tuple[float, ...] = TEMPERATURES


CASES = (
    Case("draft model, sampled, real q", "draft_model"),
    Case(
        "draft model, sampled, verified as one-hot",
        "draft_model",
        one_hot_decides=True,
        temperatures=(0.8,),
    ),
    Case("draft model, greedy drafts", "draft_model", "greedy", temperatures=(0.8,)),
    Case("n-gram", "ngram"),
)


def run_case(case: Case, temperature: float, options: Any) -> Row:
    """Complete all prompts at one temperature in one batch and count."""
    speculation = {"method": case.method, "num_speculative_tokens": options.k}
    if case.method == "draft_model":
        speculation["draft_sample_method"] = case.sample_method
    prompts = [item.prompt for item in heldout(options.prompts)]
    params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens)
    with LLM(TARGET, speculation, max_num_seqs=len(prompts)) as llm:
        sampler = llm.engine.runner.sampler
        shadow = sampler.backend = OneHotShadow(sampler.backend, case.one_hot_decides)
        outputs = llm.generate(prompts, params)
    kept = [o for o in outputs if ending_cycle(o.outputs[0].token_ids) is None]
    labels = {
        "method": case.method,
        "draft_sample_method": case.sample_method if case.method == "draft_model" else None,
        "temperature": temperature,
        "k": options.k,
    }
    values = count(kept, options.k) | {"prompts": len(outputs), "cycles": len(outputs) - len(kept)}
    if case.sample_method == "probabilistic" and case.method == "draft_model" and temperature:
        drafts = sum(o.metrics.num_drafts for o in kept)
        as_one_hot = sum(shadow.accepted[o.outputs[0].seed] for o in kept)
        values["same_drafts_as_one_hot_accepted"] = as_one_hot
        values["same_drafts_as_one_hot_length"] = 1 + as_one_hot / drafts
    return Row(f"{case.name}, T={temperature:g}", labels, values)


def ending_cycle(token_ids: Sequence[int]) -> int | None:
    """Period of the cycle that an output ends in, or None; a small model at T=0 often does.

    The tail must repeat at least 3 times and span at least 16 tokens, so that ordinary runs (a line
    of dashes, nested brackets) do not count.
    """
    size = len(token_ids)
    for period in range(1, min(LONGEST_PERIOD, size // 3) + 1):
        tail = period
        while tail < size and token_ids[size - 1 - tail] == token_ids[size - 1 - tail + period]:
            tail += 1
        if tail >= max(3 * period, 16):
            return period
    return None


def count(outputs: list[RequestOutput], k: int) -> dict[str, Value]:
    """Acceptance summed over outputs, and its spread over prompts."""
    total = SpeculationMetrics()
    for output in outputs:
        total.add(output.metrics)
    lengths = [o.metrics.mean_acceptance_length for o in outputs if o.metrics.num_drafts]
    values: dict[str, Value] = {
        "mean_acceptance_length": total.mean_acceptance_length,
        "per_prompt_length": Spread.of(lengths, "tokens per verification"),
        "verifications": total.num_drafts,
        "drafted": total.num_draft_tokens,
        "accepted": total.num_accepted_tokens,
        "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "passes": total.num_steps,
    }
    for i in range(k):
        drafted, accepted = total.drafted_per_position[i], total.accepted_per_position[i]
        values[f"unconditional_at_{i + 1}"] = accepted / drafted if drafted else 0.0
    return values


def main() -> None:
    options = parse(__doc__, prompts=128, max_tokens=96, k=4)
    runs = [(case, t) for case in CASES for t in case.temperatures]
    rows = [run_case(case, t, options) for case, t in progress(runs, "acceptance")]
    for row in rows:
        print(f"{row.case:<52} {row.values['mean_acceptance_length']:.2f}")
    record(
        "acceptance",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "k": options.k,
            "dtype": "float32",
            "batch": options.prompts,
        },
        rows,
        [
            "mean_acceptance_length is accepted drafts + 1 per verification, summed over prompts "
            "whose output does not end in a cycle; per_prompt_length is its spread over them.",
            "same_drafts_as_one_hot_*: the same drafts with the same uniforms, verified as one-hot "
            "beside the verification that decided.",
            "A draft at position i counts as accepted when all before it were, too.",
        ],
    )


if __name__ == "__main__":
    main()
