"""Is it lossless? Two checks through the real engine, each with a figure a reader can judge.

Greedy: at T=0 speculative tokens must equal plain tokens, one by one. Sampled: at T>0 they must
be distributed alike, so many short completions of one prompt are drawn both ways and their joint
distributions compared by a chi-square test. Both use one engine: plain decoding is the same engine
with `num_speculative_tokens=0` for the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from foretoken.config import LOSSLESS_METHODS
from foretoken.errors import ConfigError
from foretoken.lab.chi_square import ChiSquare, homogeneity
from foretoken.outputs import RequestMetrics
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM

NEAR_TIE = 1e-4  # logits closer than this may swap between passes over 1 row and K+1 rows
ALPHA = 1e-3  # a p-value below this is reported as a difference
_REQUESTS_PER_CALL = 256

Report = Callable[[int], None]
"""Gets how many of the prompts or samples (of both sides) are done."""
Verdict = Literal["equal", "different", "inconclusive"]
"""Inconclusive: no difference, but nothing was at stake, so that a bug could not have shown."""


@dataclass(frozen=True, slots=True)
class GreedyAudit:
    """Speculative against plain tokens at T=0.

    Attributes:
        prompts: completed both ways.
        tokens: compared.
        near_ties: prompts that part where the two best logits are within `NEAR_TIE`.
        differing: indices of prompts that part anywhere else: a bug.
        metrics: of the speculative side: what was drafted and accepted.
    """

    prompts: int
    tokens: int
    near_ties: int
    differing: tuple[int, ...]
    metrics: RequestMetrics

    @property
    def verdict(self) -> Verdict:
        """Different where a near-tie does not explain it."""
        return _verdict(bool(self.differing), self.metrics)


@dataclass(frozen=True, slots=True)
class SampledAudit:
    """Speculative against plain completions of one prompt at T>0.

    Attributes:
        samples: completions on each side.
        length: tokens of each, whose joint distribution is compared.
        test: the chi-square test of homogeneity.
        metrics: of the speculative side: what was drafted and accepted.
    """

    samples: int
    length: int
    test: ChiSquare
    metrics: RequestMetrics

    @property
    def verdict(self) -> Verdict:
        """Different where the test finds a difference at level `ALPHA`."""
        if self.test.degrees == 0 and self.test.p_value >= ALPHA:
            return "inconclusive"  # one outcome alone: there was nothing to compare
        return _verdict(self.test.p_value < ALPHA, self.metrics)


def _verdict(different: bool, metrics: RequestMetrics) -> Verdict:
    """Without drafts both accepted and rejected, half of the rule was never used."""
    if different:
        return "different"
    at_stake = 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    return "equal" if at_stake else "inconclusive"


def _check_lossless(llm: LLM) -> None:
    speculation = llm.config.speculative_config
    if speculation is not None and speculation.rejection_sample_method == "synthetic":
        field = "speculative_config.rejection_sample_method"
        bound = f"one of {', '.join(LOSSLESS_METHODS)} for an audit"
        remedy = "Synthetic acceptance is not lossless, by design."
        raise ConfigError(field, "synthetic", bound, remedy)


def greedy_audit(
    llm: LLM, prompts: Sequence[str], *, max_tokens: int, report: Report = lambda done: None
) -> GreedyAudit:
    """Complete every prompt at T=0 with and without speculation and compare token by token."""
    _check_lossless(llm)
    speculative = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    plain = replace(speculative, num_speculative_tokens=0)
    tokens = near_ties = 0
    metrics = RequestMetrics()
    differing = []
    for done, prompt in enumerate(prompts):
        report(done)
        (drafted,) = llm.generate(prompt, speculative)
        (reference,) = llm.generate(prompt, plain)
        mine, theirs = drafted.outputs[0].token_ids, reference.outputs[0].token_ids
        tokens += len(theirs)
        metrics.add(drafted.metrics)
        if mine == theirs:
            continue
        pairs = zip(mine, theirs, strict=False)
        same = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if _top_gap(llm, reference.prompt_token_ids + same) <= NEAR_TIE:
            near_ties += 1
        else:
            differing.append(done)
    report(len(prompts))
    return GreedyAudit(len(prompts), tokens, near_ties, tuple(differing), metrics)


def _top_gap(llm: LLM, token_ids: list[int]) -> float:
    """Distance of the two best logits after `token_ids`."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, num_speculative_tokens=0)
    (output,) = llm.generate(token_ids, params)
    found = (output.outputs[0].logprobs or [{}])[0]
    best = sorted((entry.logprob for entry in found.values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def sampled_audit(
    llm: LLM,
    prompt: str | Sequence[int],
    *,
    samples: int,
    length: int,
    params: SamplingParams,
    report: Report = lambda done: None,
) -> SampledAudit:
    """Draw `samples` completions of `length` tokens each way and compare their joint distribution.

    Every completion has its own noise (no seed is given), so the two sides are independent.

    A completion that failed raises its error: what is cut short is no sample.

    Args:
        params: temperature and filters; length, stopping and seed are set here.
    """
    _check_lossless(llm)
    speculative = replace(params, max_tokens=length, ignore_eos=True, seed=None)
    plain = replace(speculative, num_speculative_tokens=0)
    metrics = RequestMetrics()
    drawn: tuple[list[list[int]], list[list[int]]] = ([], [])
    for start in range(0, samples, _REQUESTS_PER_CALL):
        count = min(_REQUESTS_PER_CALL, samples - start)
        for side, side_params in enumerate((speculative, plain)):
            report(2 * start + side * count)
            outputs = llm.generate([prompt] * count, side_params, use_tqdm=False)
            for output in outputs:
                if output.error is not None:
                    raise output.error
                drawn[side].append(output.outputs[0].token_ids)
                if side == 0:
                    metrics.add(output.metrics)
    report(2 * samples)
    return SampledAudit(samples, length, homogeneity(*drawn), metrics)
