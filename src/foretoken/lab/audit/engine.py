"""A live engine compared with the reference's probabilities, token by token.

If the engine is lossless, a token's rank in the reference's distribution is uniform
(`reference.ranks`), whatever the text before. (Ranks of tokens that end a round are not uniform by
themselves, since some of these tokens replaced drafts.) With a reference of the draft model, q is
known, too: then the number of accepted drafts and the replacements of rejected drafts have known
distributions. At temperature 0 each token must be the likeliest, except at numeric ties. `coupled`
must give the same text without drafts. Every sampling parameter must take effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretoken.config import LOSSLESS_METHODS
from foretoken.drafting.vocabulary import BUILT_IN_DRAFTS
from foretoken.errors import ConfigError
from foretoken.lab.audit.evidence import ALPHA, PlotText, Source
from foretoken.lab.audit.gallery import after_the_same_race, mean_accepted_by_block, residual
from foretoken.lab.audit.reference import Reference, Text, check_known, edited, filtered, ranks
from foretoken.lab.audit.subjects import Checks, Subject, run_checks
from foretoken.lab.workloads import heldout
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.ops.stack import Dense, rounds_rows
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM

CELLS, SIDE = 16, 4  # cells: sixteenths of one number, or pairs of quarters of two numbers
FLAT = np.full(CELLS, 1 / CELLS)
LENGTH, PROMPT_TOKENS, BATCH = 16, 32, 32  # tokens of a text and of a prompt; requests at a time
NEAR_TIE = 1e-4  # closer logits may change their order between passes over 1 row and K + 1 rows
FEW: dict[str, Any] = {"top_k": 3, "top_p": 1.0, "min_p": 0.0}  # two or three outcomes per token
CHANGES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.3, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "repetition_penalty": 1.5,
    "logit_bias": {}, "allowed_token_ids": (),  # `_values` fills in token ids
}  # fmt: skip
PARAMETERS = {name: {name: value} for name, value in CHANGES.items()}
RANK = "A token's rank is its place in the distribution that the target's own module computes"
UNRELATED = "all pairs are equally frequent if the two numbers are independent."
WITHIN = "all outcomes with the same first digit are equally frequent."


def _plot_of_pairs(about: str) -> PlotText:
    names = [f"{first}{second}" for first in range(SIDE) for second in range(SIDE)]
    return PlotText("quarter of the first number, quarter of the second", about, names)


PLOTS = {
    "tokens": PlotText(
        "rank, in sixteenths",
        f"{RANK}: each sixteenth is equally frequent if tokens are drawn from this distribution.",
    ),
    "neighbours": _plot_of_pairs(f"Ranks of a token and the next one. {RANK}: {UNRELATED}"),
    "requests": _plot_of_pairs(f"Ranks of tokens of two requests in one batch: {UNRELATED}"),
    "uniforms after ranks": _plot_of_pairs(
        f"A token's rank, then the random number that tests the next draft: {WITHIN}"
    ),
    "uniforms in turn": _plot_of_pairs(
        f"Random numbers that tested drafts of two rounds in turn: {WITHIN}"
    ),
    "two or three outcomes": PlotText(
        "rank, in sixteenths",
        f"As `tokens`, under top_k {FEW['top_k']}, which leaves few tokens to draw from. {RANK}.",
    ),
}
MAX_BATCHES = 8  # of 256 tokens each, in which a parameter must show its effect
MIXED = 0.01  # weight of the other distribution in each mixture of `_gain`
DRAW_SHARE = 0.5  # share of alpha for the draws; the checks of parameters share the rest
DRAWS = 12_000  # half a minute for the embedded pair on two cores
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
EDITS = {"logit_bias", "allowed_token_ids", *PENALTIES}
NOISE_SHARE = 0.01  # of `shared_noise` in the null, so that that bug's ratio is at most 100
TINY = 1e-30


class EngineAudit:
    """The audit of an engine.

    Args:
        llm: the engine, with any model, drafter and lossless rule.
        params: temperature, filters, edits, rule, K. The audit sets length, stopping and seed.
        reference: a reference of the engine's checkpoint.
        draft: a reference of the draft model's checkpoint, see `draft_reference`; None: q is
            unknown.
        alpha: upper bound of the probability that a lossless engine is refuted.
    """

    # A subclass may set all three.
    batch = BATCH  # number of requests at a time
    parameters = PARAMETERS  # the sampling parameters to check, each with the change that it makes
    max_batches = MAX_BATCHES  # upper bound of the half-sized batches that check one parameter

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        reference: Reference,
        seed: int = 0,
        draft: Reference | None = None,
        alpha: float = ALPHA,
    ) -> None:
        check_lossless(llm, params)
        check_known(params)
        self.llm, self.reference = llm, reference
        unedited = all(getattr(params, name) == getattr(SamplingParams(), name) for name in EDITS)
        self.draft = draft if unedited else None  # the engine decides how edits change q
        self.params = replace(params, max_tokens=LENGTH, ignore_eos=True, trace=True, logprobs=None)
        self.seed, self.alpha, self._num_requests = seed, alpha, 0
        self.generator = torch.Generator().manual_seed(seed)
        tokenizer: Any = llm.tokenizer
        if tokenizer is None:
            generator = torch.Generator().manual_seed(1)
            size = (self.batch, PROMPT_TOKENS)
            ids = torch.randint(reference.vocabulary, size, generator=generator).tolist()
        else:
            ids = [tokenizer.encode(item.prompt)[:PROMPT_TOKENS] for item in heldout(self.batch)]
        self.prompts: list[list[int]] = ids
        self._ranks = torch.empty(0, 0)
        self._texts: list[Text] = []
        self._p: list[torch.Tensor] = []

    def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
        """`count` completions with seeds from `first` on; None: from the first unused seed on."""
        start = self._num_requests if first is None else first
        self._num_requests += count * (first is None)
        seeded = [replace(params, seed=(self.seed << 32) + start + i) for i in range(count)]
        prompts: Any = [self.prompts[i % len(self.prompts)] for i in range(count)]
        outputs = self.llm.generate(prompts, seeded, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [
            Text([*o.prompt_token_ids], [*o.outputs[0].token_ids], o.outputs[0].trace or ())
            for o in outputs
        ]

    def ranked(self, params: SamplingParams, count: int) -> tuple[list[Text], torch.Tensor]:
        """New texts, and the ranks of the generated tokens, [texts, LENGTH]; sets `self._p`."""
        texts = self.texts(params, count)
        self._p = self.reference.probabilities(texts, params)
        rows = zip(self._p, texts, strict=True)
        return texts, torch.stack([ranks(p, text.output, self.generator) for p, text in rows])

    def subject(self, name: str) -> Subject:
        """The audit as a subject; at temperature 0 it has no draws, only checks."""
        has_draws = self.params.temperature > 0
        bugs = {} if self.draft is None else {"residual_is_p": FLAT, "shared_noise": FLAT}
        num_drafts, rule = self._drafts_per_outcome()
        null_in_group = np.full(CELLS, 1 / SIDE)
        sources = [
            Source("tokens", FLAT, bugs, num_drafts, cluster=LENGTH, usual_rule=rule),
            Source("neighbours", FLAT, {}, cluster=LENGTH // 2),
            Source("requests", FLAT, {}, cluster=LENGTH),
            Source("uniforms after ranks", null_in_group, {}, cluster=LENGTH, groups=SIDE),
            Source("uniforms in turn", null_in_group, {}, cluster=LENGTH, groups=SIDE),
            Source("two or three outcomes", FLAT, {}, cluster=LENGTH),
        ]
        sources = [source._replace(plot=PLOTS[source.name]) for source in sources if has_draws]
        subject = Subject(name, sources, self._draw, self.checks, self.batch, DRAWS)
        return subject._replace(draw_share=DRAW_SHARE)

    def _draw(self, number: int, trials: int, batch: int) -> tuple[Any, ...]:
        """Outcomes of source `number`. Source 0 draws the texts of all sources except the last."""
        if number == 0:
            self._texts, self._ranks = self.ranked(self.params, self.batch)
            return (cells(self._ranks), *self._acceptance())
        if number == 1:
            return (pairs(self._ranks[:, ::2], self._ranks[:, 1::2]),)
        if number == 2:
            return (pairs(self._ranks[::2], self._ranks[1::2]),)
        if number in (3, 4):
            return (self._uniforms()[number - 3],)
        return (cells(self.ranked(replace(self.params, **FEW), self.batch)[1]),)

    def _drafts_per_outcome(self) -> tuple[int, str]:
        """The most accepted drafts per token as `_acceptance` counts, and the `usual_rule`."""
        speculation = self.llm.config.speculative_config
        if speculation is None:
            return 1, "standard"
        rule = self.params.rejection_sample_method or speculation.rejection_sample_method
        return (speculation.num_drafts, "block") if rule == "block" else (1, "standard")

    def _block_acceptance(self) -> tuple[Any, Any]:
        """By token: the number of accepted drafts, and the expected number under `block`.

        A round is counted at its last token, other tokens have 0. p and q are computed along all
        drafts of a round, including drafts after a rejected draft. If q is neither one-hot nor
        known, the thresholds come from the engine.
        """
        num_accepted, paths = np.zeros((len(self._texts), LENGTH), dtype=int), []
        expected = np.zeros(num_accepted.shape)
        for number, text in enumerate(self._texts):
            for first, last, drafts in block_rounds(text.trace):
                num_accepted[number, last] = sum(draft.origin == "accepted" for draft in drafts)
                ids = [draft.token_id for draft in drafts]
                path = Text(text.prompt, [*text.output[:first], *ids])
                if drafts[0].q is None or self.draft is not None:
                    paths.append((number, first, last, drafts, path))
                else:
                    chance_to_fail = 1 - np.array([draft.threshold for draft in drafts])
                    expected[number, last] = (1 - chance_to_fail[::-1].cumprod()).sum()
        texts = [path for *_, path in paths]
        p = self.reference.probabilities(texts, self.params)
        q = self.draft.probabilities(texts, self.params) if self.draft else p
        for (number, first, last, drafts, _), p_RV, q_RV in zip(paths, p, q, strict=True):
            ids = [draft.token_id for draft in drafts]
            # q must not be 0 for a draft, which rounding may put outside the reference's filters.
            q_KV = np.maximum(q_RV[first:].numpy(), TINY)
            if drafts[0].q is None:
                q_KV = one_hot(ids, q_KV.shape[1])
            expected[number, last] = mean_accepted_by_block(p_RV[first:].numpy(), q_KV, ids)
        return num_accepted.flatten(), expected.flatten()

    def _acceptance(self) -> tuple[Any, ...]:
        """By token: number of accepted drafts, expected number, likelihood ratios of two bugs.

        The ratios are left out if `self.draft` is None or the rule is `block`.
        Under the bug `residual_is_p`, a token has probability min(p, q), plus p times the chance
        that a draft is rejected; without the bug its probability is p. The bug `shared_noise`
        affects only tokens in place of sampled drafts.
        """
        if self._drafts_per_outcome()[1] == "block":
            return self._block_acceptance()
        if self.draft is None:
            return accepted(self._texts, self._p)
        num_accepted, expected, residual_ratios, race_ratios = [], [], [], []
        q = self.draft.probabilities(self._texts, self.params)
        for text, p_RV, q_RV in zip(self._texts, self._p, q, strict=True):
            for p_V, q_V, record in zip(p_RV.numpy(), q_RV.numpy(), text.trace, strict=True):
                draft, token = decided_draft(record), record.token_id
                is_accepted = record.origin == "accepted"
                if draft is not None and draft.q is None:  # a draft that was not sampled
                    q_V = one_hot([draft.token_id], len(q_V))[0]
                overlap = np.minimum(p_V, q_V).sum()
                num_accepted.append(int(is_accepted))
                expected.append(float(is_accepted) if draft is None else overlap)
                residual_ratio = race_ratio = 1.0
                if draft is not None and p_V[token] > 0:
                    chance = min(p_V[token], q_V[token]) + (1 - overlap) * p_V[token]
                    residual_ratio = chance / p_V[token]
                if draft is not None and not is_accepted and draft.q is not None:
                    residual_V, shared = residual(p_V, q_V), after_the_same_race(p_V, q_V)[token]
                    null = residual_V[token] / residual_V.sum()
                    race_ratio = shared / max((1 - NOISE_SHARE) * null + NOISE_SHARE * shared, TINY)
                residual_ratios.append(residual_ratio)
                race_ratios.append(race_ratio)
        ratios = {"residual_is_p": np.array(residual_ratios), "shared_noise": np.array(race_ratios)}
        return np.array(num_accepted), np.array(expected), ratios

    def _uniforms(self) -> tuple[Any, Any]:
        """The cells of two kinds of pairs; a pair's second number is a round's first uniform.

        A pair's first number is the rank of the token before the round, or the last uniform that
        was read in the previous round. A round's later uniforms are left out: whether `block` reads
        them depends on the first uniform. Sources group pairs by the first number, which is not
        uniform: whether a round ends depends on that number.
        """
        after_ranks: list[tuple[float, float]] = []
        in_turn: list[tuple[float, float]] = []
        for text, ranks_L in zip(self._texts, self._ranks.tolist(), strict=True):
            last_u = None
            for i, record in enumerate(text.trace):
                tested = [x for x in (record, *record.dropped[:1]) if x.u is not None]
                for draft in tested:
                    if draft.draft_index == 0 and i > 0:
                        after_ranks.append((ranks_L[i - 1], draft.u))
                        in_turn += [(last_u, draft.u)] if last_u is not None else []
                last_u = tested[-1].u if tested else last_u
        pairs_N2 = (torch.tensor(numbers).reshape(-1, 2) for numbers in (after_ranks, in_turn))
        first, second = (pairs(x_N2[:, 0], x_N2[:, 1]) for x_N2 in pairs_N2)
        return first, second

    def checks(self) -> Checks:
        return run_checks(self.greedy, self._coupled, self._parameters)

    def greedy(self) -> tuple[str | None, str]:
        params = replace(self.params, temperature=0.0)
        texts = self.texts(params, self.batch)
        return classify(texts, self.reference.logits(texts), params, self._ulp())

    def _ulp(self) -> float:
        """The relative spacing of the engine's numbers: of the dtype, or of eight-bit inputs."""
        if rounds_inputs(self.llm):
            return 1 / 127
        return float(torch.finfo(self.llm.engine.runner.model.dtype).eps)

    def _coupled(self) -> tuple[str | None, str]:
        """Check that `coupled` gives the same texts without drafts; an eighth may differ."""
        params = replace(self.params, rejection_sample_method="coupled", trace=False)
        if params.temperature == 0:
            params = replace(params, temperature=1.0)
        drafted = self.texts(params, self.batch, first=0)
        plain = self.texts(replace(params, num_speculative_tokens=0), self.batch, first=0)
        differ = sum(a.output != b.output for a, b in zip(drafted, plain, strict=True))
        equal = f"{self.batch - differ} of {self.batch} texts are equal"
        line = f"`coupled` again without drafts: {equal}."
        return ("replay_differs" if differ > self.batch // 8 else None), line

    def _parameters(self) -> tuple[str | None, str]:
        """Check that each of `self.parameters`, added to the audited parameters, has an effect.

        If a parameter acts, exp(-gain) is a supermartingale that starts at 1: with n parameters
        this *ever* exceeds n/alpha with probability at most alpha/n.
        """
        limit = math.log(len(self.parameters) / ((1 - DRAW_SHARE) * self.alpha))
        names_of: dict[str, list[str]] = {"act": [], "ARE IGNORED": [], "remain unclear": []}
        params = replace(self.params, temperature=self.params.temperature or 1.0)
        for name, change in self.parameters.items():
            changed, gain = replace(params, **self._values(name, change)), 0.0
            for _ in range(self.max_batches):
                gain += self._gain(self.texts(changed, self.batch // 2), changed, params)
                if abs(gain) > limit:
                    break
            acts, ignored, unclear = names_of.values()
            (acts if gain > limit else ignored if gain < -limit else unclear).append(name)
        parts = [f"{', '.join(names)} {verb}" for verb, names in names_of.items() if names]
        bug = "parameter_ignored" if names_of["ARE IGNORED"] else None
        return bug, f"Sampling parameters: {'; '.join(parts)}."

    def _values(self, name: str, change: dict[str, Any]) -> dict[str, Any]:
        """The change of a parameter, with token ids of the model filled in."""
        if name == "allowed_token_ids":
            return {name: tuple(range(0, self.reference.vocabulary, 2))}
        if name == "logit_bias":
            (logits,) = self.reference.logits([Text(self.prompts[0], [0])])
            return {name: dict.fromkeys(logits[0].topk(8).indices.tolist(), 4.0)}
        return change

    def _gain(
        self, texts: Sequence[Text], params: SamplingParams, without: SamplingParams
    ) -> float:
        """Log-likelihood of all tokens under `params`, minus their log-likelihood under `without`.

        Each of these two distributions, f and g, is mixed with a share m = `MIXED` of the other: a
        token at the edge of a filter, which rounding may move, contributes at most log(1/m). The
        ratio ((1 - m) g + m f) / ((1 - m) f + m g) is concave in g/f, and 1 where g/f = 1. By
        Jensen's inequality its mean under f is at most 1.
        """
        gain = 0.0
        for text, raw in zip(texts, self.reference.logits(texts), strict=True):
            index_R1 = torch.tensor(text.output)[:, None]
            f, g = (
                filtered(edited(raw.double(), text, x), x).gather(1, index_R1).clamp(min=TINY)
                for x in (params, without)
            )
            mixed = torch.log((1 - MIXED) * f + MIXED * g) - torch.log((1 - MIXED) * g + MIXED * f)
            gain += float(mixed.sum())
        return gain


def check_lossless(llm: LLM, params: SamplingParams) -> None:
    """Raise `ConfigError` for a rule that is lossy by design."""
    speculation = llm.config.speculative_config
    default = speculation.rejection_sample_method if speculation is not None else "standard"
    if "synthetic" in (default, params.rejection_sample_method):
        field = "speculative_config.rejection_sample_method"
        bound = f"one of {', '.join(LOSSLESS_METHODS)} for an audit"
        remedy = "Synthetic acceptance is not lossless, by design."
        raise ConfigError(field, "synthetic", bound, remedy)


def classify(
    texts: Sequence[Text], logits: Sequence[torch.Tensor], params: SamplingParams, ulp: float
) -> tuple[str | None, str]:
    """Check that tokens at temperature 0 are the likeliest; returns a bug or None, and a line.

    A token that is not the likeliest is a *numeric tie* if its logit is within `NEAR_TIE` or 4 ulp
    of the best, else a *bug*. `ulp` is the relative spacing of the subject's numbers.
    """
    tokens, ties, bugs, widest, in_ulps = 0, 0, 0, 0.0, 0.0
    for text, raw in zip(texts, logits, strict=True):
        rows = edited(raw.double(), text, params)
        best = rows.amax(dim=1)
        gaps = best - rows.gather(1, torch.tensor(text.output)[:, None])[:, 0]
        near = torch.maximum(4 * ulp * best.abs(), torch.tensor(NEAR_TIE))
        tokens += len(gaps)
        ties += int(((gaps > 0) & (gaps <= near)).sum())
        bugs += int((gaps > near).sum())
        widest = max(widest, float(gaps.max()))
        in_ulps = max(in_ulps, float((gaps / (ulp * best.abs())).max()))
    line = (
        f"Temperature 0: {tokens - ties - bugs} of {tokens} tokens are the target's likeliest, "
        f"{ties} numeric ties, {bugs} bugs (widest gap {widest:.2g}, {in_ulps:.0f} ulp)."
    )
    return ("greedy_differs" if bugs else None), line


def cells(rank: torch.Tensor) -> Any:
    """The cell of each rank: the index of a sixteenth of [0, 1)."""
    return (rank.flatten() * CELLS).long().clamp(max=CELLS - 1).numpy()


def pairs(first: torch.Tensor, second: torch.Tensor) -> Any:
    """The cell of each pair of numbers: the indices of two quarters of [0, 1)."""
    quarter = [(x.flatten() * SIDE).long().clamp(0, SIDE - 1) for x in (first, second)]
    return (quarter[0] * SIDE + quarter[1]).numpy()


def decided_draft(record: Any) -> Any | None:
    """The draft that `standard` accepted or replaced at a token's trace `record`, or None."""
    if record.rule != "standard" or record.origin not in ("accepted", "resampled"):
        return None
    draft = record if record.origin == "accepted" else next(iter(record.dropped), None)
    return draft if draft is not None and draft.threshold is not None else None


def one_hot(ids: Sequence[int], vocabulary: int) -> Any:
    """q of drafts that were not sampled: one-hot rows [len(ids), vocabulary]."""
    rows = np.zeros((len(ids), vocabulary))
    rows[np.arange(len(ids)), ids] = 1
    return rows


def block_rounds(trace: Sequence[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """For each round of `block` with drafts: indices of its first and last token, and its drafts.

    The drafts end before the first placeholder.
    """
    for _, numbered in groupby(enumerate(trace), key=lambda item: item[1].round):
        members = list(numbered)
        last, ending = members[-1]
        drafts = [record for _, record in members if record.draft_index is not None]
        drafts = list(takewhile(lambda x: x.threshold is not None, [*drafts, *ending.dropped]))
        if drafts and ending.rule == "block":
            yield members[0][0], last, drafts


def accepted(texts: Sequence[Text], p: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """By token: 1 for an accepted draft, else 0; and the chance of 1 under `standard`.

    The chance of a one-hot draft is its probability under p [R, V]. If only the engine knows q, the
    chance is the engine's threshold. Where `standard` decided no draft, the chance is that 1 or 0.
    """
    observed, chance = [], []
    for text, p_RV in zip(texts, p, strict=True):
        for p_V, record in zip(p_RV, text.trace, strict=True):
            draft, is_accepted = decided_draft(record), record.origin == "accepted"
            observed.append(int(is_accepted))
            if draft is None:
                chance.append(float(is_accepted))
            else:
                chance.append(float(p_V[draft.token_id]) if draft.q is None else draft.threshold)
    return np.array(observed), np.array(chance)


def rounds_inputs(llm: LLM) -> bool:
    """Whether the target's linear layers round their inputs, because its weights are quantised."""
    network = llm.engine.runner.model.network
    return not isinstance(network, ModuleNetwork) and rounds_rows(network.stack)


def reference_of(llm: LLM) -> Reference:
    """A reference of the engine's target."""
    network = llm.engine.runner.model.network
    has_plain_head = not isinstance(network, ModuleNetwork) and (
        isinstance(head := network.stack.head.weight, Dense) and not head.rounds
    )
    model, revision, round_inputs = llm.config.model, llm.config.revision, rounds_inputs(llm)
    return Reference(model, revision, round_inputs=round_inputs, plain_head=has_plain_head)


def draft_reference(llm: LLM, reference: Reference) -> Reference | None:
    """A reference of the draft model; None without a draft model, or if vocabularies differ."""
    speculation = llm.config.speculative_config
    drafter = speculation and speculation.members.get(str(speculation.method))
    if drafter is None or drafter.method != "draft_model":
        return None
    draft = Reference(drafter.model or BUILT_IN_DRAFTS[llm.config.model], drafter.revision)
    return draft if draft.vocabulary == reference.vocabulary else None
