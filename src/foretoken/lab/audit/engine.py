"""A live engine against probabilities that are computed next to it, token by token.

Every token has a known distribution, so there is no second sample: its rank in that distribution is
uniform if the engine is lossless (`reference.ranks`), whatever the text before it (but not of a
token that is known to end a round: it may have replaced a draft). With a draft model at hand, so is
q: how many drafts `standard` or `block` accepts, and what replaces a rejected one. At temperature 0
each token must be the likeliest, except at ties of arithmetic; `coupled` must repeat itself without
drafts; and every sampling parameter must act as it says.
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
from foretoken.lab.audit.evidence import ALPHA, Model, Shown
from foretoken.lab.audit.gallery import after_the_same_race, block_keeps, residual
from foretoken.lab.audit.reference import Reference, Text, check_known, edited, filtered, ranks
from foretoken.lab.audit.subjects import Checks, Subject, checked
from foretoken.lab.workloads import heldout
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.ops.stack import Dense, rounds_rows
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM

CELLS, SIDE = 16, 4
FLAT = np.full(CELLS, 1 / CELLS)
LENGTH, PROMPT_TOKENS, BATCH = 16, 32, 32
NEAR_TIE = 1e-4  # logits closer than this may swap between passes over 1 row and K + 1 rows
FEW: dict[str, Any] = {"top_k": 3, "top_p": 1.0, "min_p": 0.0}  # two or three outcomes to a token
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.3},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {}},  # of the likeliest tokens
    "allowed_token_ids": {"allowed_token_ids": ()},  # half of all
}
RANK = "A token's rank is where it fell in the distribution that the target's module computes there"
UNRELATED = "all pairs are as frequent, if the two know nothing of each other."
WITHIN = "among outcomes with one first digit all are as frequent."


def _in_pairs(about: str) -> Shown:
    names = [f"{first}{second}" for first in range(SIDE) for second in range(SIDE)]
    return Shown("two quarters: of the first, of the second", about, names)


SHOWN = {
    "tokens": Shown(
        "rank, in sixteenths", f"{RANK}: as often in each sixteenth, if tokens are drawn from it."
    ),
    "neighbours": _in_pairs(f"Ranks of a token and the next one. {RANK}: {UNRELATED}"),
    "requests": _in_pairs(f"Ranks of tokens of two requests that run side by side: {UNRELATED}"),
    "uniforms after ranks": _in_pairs(
        f"A token's rank, then the random number that tests the next draft: {WITHIN}"
    ),
    "uniforms in turn": _in_pairs(
        f"Random numbers that tested drafts of two rounds in turn: {WITHIN}"
    ),
    "two or three outcomes": Shown(
        "rank, in sixteenths",
        f"As `tokens`, under top_k {FEW['top_k']}, where each draw decides between few. {RANK}.",
    ),
}
MOST_WAVES = 8  # of 256 tokens each in which a parameter must show
MIXED = 0.01  # no token is less likely, as a part of what it is otherwise: see `_gain`
DRAWN = 0.5  # part of alpha that the draws have; the parameters share the rest
DRAWS = 12_000  # half a minute for the embedded pair on two cores
EDITS = {
    "logit_bias": None, "allowed_token_ids": None, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
ODDS = 0.01  # a replacement is no rarer than this part of what it is with noise that is shared
TINY = 1e-30


class EngineAudit:
    """What is asked of an engine.

    Args:
        llm: with whatever model, drafter and rule.
        params: temperature, filters, edits, rule, K; length, stopping and seed are set here.
        reference: of the same checkpoint; drafted: of the draft model's, see `draft_reference`.
        alpha: the probability at most that a lossless engine is refuted, by draws or parameters.

    Attributes, of which a subclass may have others:
        batch: requests at a time.
        parameters: sampling parameters that are probed, each with what it is set to.
        waves: most batches of half the size that probe a parameter.
    """

    batch, parameters, waves = BATCH, PARAMETERS, MOST_WAVES

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        reference: Reference,
        seed: int = 0,
        drafted: Reference | None = None,
        alpha: float = ALPHA,
    ) -> None:
        check_lossless(llm, params)
        check_known(params)
        self.llm, self.reference = llm, reference
        unedited = all(getattr(params, name) == value for name, value in EDITS.items())
        self.drafted = drafted if unedited else None  # edits of q are the engine's own affair
        self.params = replace(params, max_tokens=LENGTH, ignore_eos=True, trace=True, logprobs=None)
        self.seed, self.alpha, self._asked = seed, alpha, 0
        self.generator = torch.Generator().manual_seed(seed)
        tokenizer: Any = llm.tokenizer
        if tokenizer is None:
            every = torch.Generator().manual_seed(1)
            size = (self.batch, PROMPT_TOKENS)
            ids = torch.randint(reference.vocabulary, size, generator=every).tolist()
        else:
            ids = [tokenizer.encode(item.prompt)[:PROMPT_TOKENS] for item in heldout(self.batch)]
        self.prompts: list[list[int]] = ids
        self._ranks = torch.empty(0, 0)
        self._texts: list[Text] = []
        self._p: list[torch.Tensor] = []

    def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
        """Completions of the prompts in turn; every request has its own seed, or those given."""
        start = self._asked if first is None else first
        self._asked += count * (first is None)
        asked = [replace(params, seed=(self.seed << 32) + start + i) for i in range(count)]
        prompts: Any = [self.prompts[i % len(self.prompts)] for i in range(count)]
        outputs = self.llm.generate(prompts, asked, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [
            Text([*o.prompt_token_ids], [*o.outputs[0].token_ids], o.outputs[0].trace or ())
            for o in outputs
        ]

    def ranked(self, params: SamplingParams, count: int) -> tuple[list[Text], torch.Tensor]:
        """Texts and the ranks of their tokens, [texts, LENGTH]."""
        texts = self.texts(params, count)
        self._p = self.reference.probabilities(texts, params)
        found = [
            ranks(p_RV, text.output, self.generator)
            for p_RV, text in zip(self._p, texts, strict=True)
        ]
        return texts, torch.stack(found)

    def subject(self, name: str) -> Subject:
        """Ranks of tokens, those of few outcomes, neighbours, and uniforms given ranks."""
        sampled = self.params.temperature > 0
        bugs = {} if self.drafted is None else {"residual_is_p": FLAT, "shared_noise": FLAT}
        rounds, rule = self._drafts_of_an_outcome()
        given = np.full(CELLS, 1 / SIDE)
        models = [
            Model("tokens", FLAT, bugs, rounds, together=LENGTH, usual_rule=rule),
            Model("neighbours", FLAT, {}, together=LENGTH // 2),
            Model("requests", FLAT, {}, together=LENGTH),
            Model("uniforms after ranks", given, {}, together=LENGTH, given=SIDE),
            Model("uniforms in turn", given, {}, together=LENGTH, given=SIDE),
            Model("two or three outcomes", FLAT, {}, together=LENGTH),
        ]
        models = [model._replace(shown=SHOWN[model.name]) for model in models]
        drawn = models if sampled else []
        return Subject(name, drawn, self._draw, self.checks, self.batch, DRAWS, drawn=DRAWN)

    def _draw(self, number: int, trials: int, wave: int) -> tuple[Any, ...]:
        if number == 0:
            self._texts, self._ranks = self.ranked(self.params, self.batch)
            return (cells(self._ranks), *self._decided())
        if number == 1:
            return (pairs(self._ranks[:, ::2], self._ranks[:, 1::2]),)
        if number == 2:
            return (pairs(self._ranks[::2], self._ranks[1::2]),)
        if number in (3, 4):
            return (self._uniforms()[number - 3],)
        return (cells(self.ranked(replace(self.params, **FEW), self.batch)[1]),)

    def _drafts_of_an_outcome(self) -> tuple[int, str]:
        """How many may be told as accepted with a token, and by which rule; see `_decided`."""
        speculation = self.llm.config.speculative_config
        if speculation is None:
            return 1, "standard"
        rule = self.params.rejection_sample_method or speculation.rejection_sample_method
        return (speculation.num_drafts, "block") if rule == "block" else (1, "standard")

    def _rounds(self) -> tuple[Any, Any]:
        """Accepted drafts and `block`'s expectation of them, with the last token of each round.

        p and q are computed along all of its drafts, also those after a rejected one. Where q is
        neither one-hot nor at hand, the chances are the engine's own.
        """
        seen, paths = np.zeros((len(self._texts), LENGTH), dtype=int), []
        chance = np.zeros(seen.shape)
        for number, text in enumerate(self._texts):
            for first, last, drafts in block_rounds(text.trace):
                seen[number, last] = sum(draft.origin == "accepted" for draft in drafts)
                ids = [draft.token_id for draft in drafts]
                path = Text(text.prompt, [*text.output[:first], *ids])
                if drafts[0].q is None or self.drafted is not None:
                    paths.append((number, first, last, drafts, path))
                else:
                    missed = 1 - np.array([draft.threshold for draft in drafts])
                    chance[number, last] = (1 - missed[::-1].cumprod()).sum()
        texts = [path for *_, path in paths]
        p = self.reference.probabilities(texts, self.params)
        q = self.drafted.probabilities(texts, self.params) if self.drafted else p
        for (number, first, last, drafts, _), p_RV, q_RV in zip(paths, p, q, strict=True):
            ids = [draft.token_id for draft in drafts]
            rows = np.maximum(q_RV[first:].numpy(), TINY)  # its own arithmetic may drop a draft
            if drafts[0].q is None:
                rows = one_hot(ids, rows.shape[1])
            chance[number, last] = block_keeps(p_RV[first:].numpy(), rows, ids)
        return seen.flatten(), chance.flatten()

    def _decided(self) -> tuple[Any, ...]:
        """Accepted drafts and `standard`'s chance of them, and likelihood ratios of two bugs.

        A draft without a q of its own was not drawn: its q is one-hot.

        `residual_is_p`: a token comes with min(p, q), or with p in place of another draft; without
        the bug with p, whatever the rule. `shared_noise` is about replacements alone, where the
        engine says that it verified with q: others replace from elsewhere.
        """
        if self._drafts_of_an_outcome()[1] == "block":
            return self._rounds()
        if self.drafted is None:
            return accepted(self._texts, self._p)
        seen, chance, plain, shared = [], [], [], []
        q = self.drafted.probabilities(self._texts, self.params)
        for text, p_RV, q_RV in zip(self._texts, self._p, q, strict=True):
            for p_V, q_V, record in zip(p_RV.numpy(), q_RV.numpy(), text.trace, strict=True):
                draft, taken, token = decided(record), record.origin == "accepted", record.token_id
                if draft is not None and draft.q is None:
                    q_V = one_hot([draft.token_id], len(q_V))[0]
                overlap = np.minimum(p_V, q_V).sum()
                seen.append(int(taken))
                chance.append(float(taken) if draft is None else overlap)
                wrong = min(p_V[token], q_V[token]) + (1 - overlap) * p_V[token]
                plain.append(wrong / p_V[token] if draft is not None and p_V[token] > 0 else 1.0)
                shared.append(1.0)
                if draft is not None and not taken and draft.q is not None:
                    rest_V, raced = residual(p_V, q_V), after_the_same_race(p_V, q_V)[token]
                    own = rest_V[token] / rest_V.sum()
                    shared[-1] = raced / max((1 - ODDS) * own + ODDS * raced, TINY)
        ratios = {"residual_is_p": np.array(plain), "shared_noise": np.array(shared)}
        return np.array(seen), np.array(chance), ratios

    def _uniforms(self) -> tuple[Any, Any]:
        """The uniform of each round's first draft, given the rank of the token before it, and given
        the uniform that decided last in the round before.

        Of the first one alone: whether `block` looks at a further one depends on that very number.
        Neither ranks nor uniforms are uniform where a round is known to have ended.
        """
        after_ranks: list[tuple[float, float]] = []
        in_turn: list[tuple[float, float]] = []
        for text, ranks_L in zip(self._texts, self._ranks.tolist(), strict=True):
            spent = None
            for i, record in enumerate(text.trace):
                looked_at = [x for x in (record, *record.dropped[:1]) if x.u is not None]
                for draft in looked_at:
                    if draft.draft_index == 0 and i > 0:
                        after_ranks.append((ranks_L[i - 1], draft.u))
                        in_turn += [(spent, draft.u)] if spent is not None else []
                spent = looked_at[-1].u if looked_at else spent
        found = (torch.tensor(pairs_).reshape(-1, 2) for pairs_ in (after_ranks, in_turn))
        first, second = (pairs(found_N2[:, 0], found_N2[:, 1]) for found_N2 in found)
        return first, second

    # What needs no draws --------------------------------------------------------------------------

    def checks(self) -> Checks:
        """Temperature 0, `coupled` again without drafts, every sampling parameter."""
        return checked(self.greedy, self._coupled, self._parameters)

    def greedy(self) -> tuple[str | None, str]:
        """Tokens at temperature 0; see `classify`."""
        params = replace(self.params, temperature=0.0)
        texts = self.texts(params, self.batch)
        return classify(texts, self.reference.logits(texts), params, self._ulp())

    def _ulp(self) -> float:
        """Relative spacing of the engine's numbers, or of the codes that products round to."""
        if rounds(self.llm):
            return 1 / 127
        return float(torch.finfo(self.llm.engine.runner.model.dtype).eps)

    def _coupled(self) -> tuple[str | None, str]:
        params = replace(self.params, rejection_sample_method="coupled", trace=False)
        if params.temperature == 0:
            params = replace(params, temperature=1.0)
        drafted = self.texts(params, self.batch, first=0)
        plain = self.texts(replace(params, num_speculative_tokens=0), self.batch, first=0)
        apart = sum(a.output != b.output for a, b in zip(drafted, plain, strict=True))
        line = (
            f"`coupled` again without drafts: {self.batch - apart} of {self.batch} texts are equal."
        )
        return ("replay_differs" if apart > self.batch // 8 else None), line

    def _parameters(self) -> tuple[str | None, str]:
        """Each probed next to the audited ones; refuted only if tokens tell that it is ignored.

        If one of n acts, exp(-gain) is a supermartingale of mean 1: it is above n/alpha *ever* with
        probability alpha/n at most.
        """
        acts_at = math.log(len(self.parameters) / ((1 - DRAWN) * self.alpha))
        found: dict[str, list[str]] = {"act": [], "ARE IGNORED": [], "cannot tell here": []}
        params = replace(self.params, temperature=self.params.temperature or 1.0)
        for name, change in self.parameters.items():
            other, gain = replace(params, **self._value(name, change)), 0.0
            for _ in range(self.waves):
                gain += self._gain(self.texts(other, self.batch // 2), other, params)
                if abs(gain) > acts_at:
                    break
            acts, ignored, open_ = found.values()
            (acts if gain > acts_at else ignored if gain < -acts_at else open_).append(name)
        said = "; ".join(f"{', '.join(names)} {told}" for told, names in found.items() if names)
        bug = "parameter_ignored" if found["ARE IGNORED"] else None
        return bug, f"Sampling parameters: {said}."

    def _value(self, name: str, change: dict[str, Any]) -> dict[str, Any]:
        if name == "allowed_token_ids":
            return {name: tuple(range(0, self.reference.vocabulary, 2))}
        if name == "logit_bias":
            (logits,) = self.reference.logits([Text(self.prompts[0], [0])])
            return {name: dict.fromkeys(logits[0].topk(8).indices.tolist(), 4.0)}
        return change

    def _gain(
        self, texts: Sequence[Text], params: SamplingParams, without: SamplingParams
    ) -> float:
        """Log-likelihood of all tokens under `params`, less that under `without`.

        Each is mixed with `MIXED` of the other, so that no token at the edge of a filter, which
        rounding may move, weighs more than log(1/MIXED). For probabilities f and g the ratio
        ((1 - m) g + m f) / ((1 - m) f + m g) is concave in g/f and 1 where that is 1: under f its
        mean is no more than 1, by Jensen.
        """
        gain = 0.0
        for text, raw in zip(texts, self.reference.logits(texts), strict=True):
            index_R1 = torch.tensor(text.output)[:, None]
            f, g = (
                filtered(edited(raw.double(), text, each), each).gather(1, index_R1).clamp(min=TINY)
                for each in (params, without)
            )
            mixed = torch.log((1 - MIXED) * f + MIXED * g) - torch.log((1 - MIXED) * g + MIXED * f)
            gain += float(mixed.sum())
        return gain


def check_lossless(llm: LLM, params: SamplingParams) -> None:
    """Raise `ConfigError` for an engine whose rule is not lossless by design."""
    speculation = llm.config.speculative_config
    own = speculation.rejection_sample_method if speculation is not None else "standard"
    if "synthetic" in (own, params.rejection_sample_method):
        field = "speculative_config.rejection_sample_method"
        bound = f"one of {', '.join(LOSSLESS_METHODS)} for an audit"
        remedy = "Synthetic acceptance is not lossless, by design."
        raise ConfigError(field, "synthetic", bound, remedy)


def classify(
    texts: Sequence[Text], logits: Sequence[torch.Tensor], params: SamplingParams, ulp: float
) -> tuple[str | None, str]:
    """Whether tokens at temperature 0 are the likeliest; a bug, if any, and a line.

    One that is not is a *numeric tie* where its logit is within `NEAR_TIE`, or 4 units in the last
    place of the subject's dtype, of the best; else a *bug*.
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
    """Sixteenths of ranks in [0, 1]."""
    return (rank.flatten() * CELLS).long().clamp(max=CELLS - 1).numpy()


def pairs(first: torch.Tensor, second: torch.Tensor) -> Any:
    """Quarters of two ranks together, for ranks that should not know of each other."""
    quarter = [(x.flatten() * SIDE).long().clamp(0, SIDE - 1) for x in (first, second)]
    return (quarter[0] * SIDE + quarter[1]).numpy()


def decided(record: Any) -> Any | None:
    """The draft that `standard` has accepted here, or replaced; None: there is none."""
    if record.rule != "standard" or record.origin not in ("accepted", "resampled"):
        return None
    draft = record if record.origin == "accepted" else next(iter(record.dropped), None)
    return draft if draft is not None and draft.threshold is not None else None


def one_hot(ids: Sequence[int], vocabulary: int) -> Any:
    """Rows of drafts that were not drawn."""
    rows = np.zeros((len(ids), vocabulary))
    rows[np.arange(len(ids)), ids] = 1
    return rows


def block_rounds(trace: Sequence[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """Index of the first and of the last token of each round of `block`, and its drafts up to the
    first that is none: a placeholder, say."""
    for _, numbered in groupby(enumerate(trace), key=lambda item: item[1].round):
        members = list(numbered)
        last, ending = members[-1]
        drafts = [record for _, record in members if record.draft_index is not None]
        drafts = list(takewhile(lambda x: x.threshold is not None, [*drafts, *ending.dropped]))
        if drafts and ending.rule == "block":
            yield members[0][0], last, drafts


def accepted(texts: Sequence[Text], p: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Per token whether an accepted draft stands there, and `standard`'s chance of that.

    Of a one-hot draft that is the target's probability of it, p [R, V]; of one whose q only the
    engine knows, what the engine says. Under other rules, whose chance is not that of a draft
    alone, both are what was seen.
    """
    seen, chance = [], []
    for text, p_RV in zip(texts, p, strict=True):
        for p_V, record in zip(p_RV, text.trace, strict=True):
            draft, taken = decided(record), record.origin == "accepted"
            seen.append(int(taken))
            if draft is None:
                chance.append(float(taken))
            else:
                chance.append(float(p_V[draft.token_id]) if draft.q is None else draft.threshold)
    return np.array(seen), np.array(chance)


def rounds(llm: LLM) -> bool:
    """Whether the target's products round what they read, since its weights are quantised."""
    network = llm.engine.runner.model.network
    return not isinstance(network, ModuleNetwork) and rounds_rows(network.stack)


def reference_of(llm: LLM) -> Reference:
    """The engine's target at hand."""
    network = llm.engine.runner.model.network
    has_plain_head = not isinstance(network, ModuleNetwork) and (
        isinstance(head := network.stack.head.weight, Dense) and not head.rounds
    )
    return Reference(
        llm.config.model, llm.config.revision, rounds=rounds(llm), plain_head=has_plain_head
    )


def draft_reference(llm: LLM, reference: Reference) -> Reference | None:
    """The draft model at hand; None: there is none, or its tokens are others than the target's."""
    speculation = llm.config.speculative_config
    drafter = speculation and speculation.members.get(str(speculation.method))
    if drafter is None or drafter.method != "draft_model":
        return None
    found = Reference(drafter.model or BUILT_IN_DRAFTS[llm.config.model], drafter.revision)
    return found if found.vocabulary == reference.vocabulary else None
