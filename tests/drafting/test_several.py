"""Several drafters at once: which drafts for a request, what each keeps, how `hybrid` chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.drafting.choice import Chooser
from foretoken.drafting.registry import DRAFTERS, find_drafter
from foretoken.drafting.several import Several, _members_with_q
from foretoken.errors import ConfigError, RequestError
from foretoken.lab.laws.chain import (
    Chain,
    MakePropose,
    Propose,
    Setting,
    emit,
    first_row,
    joint_p_value,
    random_chain,
)
from foretoken.lab.laws.findings import MUTANT_P
from foretoken.ops import DraftBlock, Rule, SlotParams, VerifyBatch, unavailable
from foretoken.slots.step import Admission, Outcome
from tests.drafting import test_law as laws
from tests.models.heads import drafter_options, head_of

OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "num_blocks": 64, "threads": 1}
PROMPTS = ["abcabcab", "def f(x):\n    return x\n\ndef g(x):\n", "import os\n", "x = 1\n" * 4]
LOOKUP = "ngram" if unavailable("native") else "suffix"


def build(
    target: Path, draft: Path, *methods: str, method: str | None = None, **options: Any
) -> LLM:
    given = drafter_options(target, draft)
    drafters = [{"method": one, **given.get(one, {})} for one in methods]
    return LLM(str(target), {"drafters": drafters, "method": method}, **OPTIONS | options)


def run(llm: LLM, prompts: list[str], **params: Any) -> list[Any]:
    """Outputs, after a check of the counts of each drafter."""
    asked = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
    outputs = llm.generate(prompts, asked)
    llm.engine.check_integrity()
    for output in outputs:
        metrics = output.metrics
        for count in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            parts = [getattr(one, count) for one in metrics.drafters.values()]
            assert sum(parts) == getattr(metrics, count)
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


ALL = (LOOKUP, "draft_model", "eagle3")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_drafter_that_a_request_names_drafts_as_if_it_were_alone(
    target: Path, draft: Path, temperature: float
) -> None:
    """Next to requests of other drafters, preempted, on blocks that other drafters have filled."""
    llm = build(target, draft, *ALL, num_blocks=24)
    order = [*ALL, "hybrid"] * 2
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=24, ignore_eos=True, drafter=name
        )
        for i, name in enumerate(order)
    ]
    prompts = [PROMPTS[i % 3] for i in range(len(order))]
    outputs = llm.generate(prompts, params)
    llm.engine.check_integrity()
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
    for i, output in enumerate(outputs):
        name = order[i]
        if name == "hybrid":
            assert {"eagle3"}.isdisjoint(output.metrics.drafters), "only the first model"
            continue
        assert output.metrics.drafters.keys() <= {name}
        if name == "suffix":
            continue  # outputs of finished requests are looked up
        alone = build(target, draft, name, method=name).generate(
            [prompts[i]], replace(params[i], drafter=None)
        )[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        mine, theirs = (o.metrics.accepted_per_position for o in (output, alone))
        assert mine == theirs


def test_a_model_has_its_kv_of_blocks_that_other_drafters_have_filled(
    target: Path, draft: Path
) -> None:
    """All drafts of a draft model equal to the target are accepted, also after looked-up drafts."""
    llm = build(target, target, "ngram", "draft_model")
    text = run(llm, [PROMPTS[0]], temperature=0.0, drafter="ngram")[0].outputs[0].token_ids
    for drafter in ("hybrid", "draft_model"):
        output = run(llm, [PROMPTS[0]], temperature=0.0, drafter=drafter)[0]
        assert output.outputs[0].token_ids == text
        counts = output.metrics.drafters["draft_model"]
        assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_seeded_text_by_hybrid_is_the_same_alone_and_in_a_crowd(
    target: Path, draft: Path, rule: str
) -> None:
    """Also after other requests have changed the means, and with preemptions."""

    def texts(llm: LLM, prompts: list[str]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0.9, seed=100 + PROMPTS.index(prompt), max_tokens=30, ignore_eos=True,
                rejection_sample_method=rule,
            )
            for prompt in prompts
        ]  # fmt: skip
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    alone = [texts(build(target, draft, LOOKUP, "draft_model"), [prompt])[0] for prompt in PROMPTS]
    llm = build(target, draft, LOOKUP, "draft_model", num_blocks=28)
    run(llm, ["zz zz zz zz", *PROMPTS], temperature=0.9)
    assert texts(llm, PROMPTS) == alone
    assert texts(llm, PROMPTS[::-1]) == alone[::-1]
    assert {LOOKUP, "draft_model"} <= llm.metrics.drafters.keys()


def outcome(*token_ids: int, num_accepted: int) -> Outcome:
    return Outcome(list(token_ids), 4, num_accepted)


def admission(slot: int, rule: Rule = Rule.STANDARD, **params: Any) -> Admission:
    return Admission(slot, 1, SamplingParams(**params), rule, [1], num_prompt=1, limit=99)


FREE = admission(1)
FOUND, MODEL = [5, 6, 7, 8], (1, 4)


def takes(choice: Chooser, request: Admission = FREE, expected: float = 4.0) -> bool:
    """Whether four drafts that drafter 0 looked up are taken, not those of drafter 1, a model."""
    return choice.takes(request, 0, FOUND, expected, MODEL)


def teach(choice: Chooser, accepted: int, rounds: int = 60) -> None:
    """Rounds of slot 1 in which `accepted` of four looked-up drafts, or two of a model's drafts,
    were accepted."""
    for _ in range(rounds):
        taken = takes(choice)
        if not taken:
            choice.leave_to_model(FREE, *MODEL)
        tokens = [*FOUND[:accepted], 9]
        choice.learn(1, outcome(*tokens, num_accepted=accepted if taken else 2))


def timed() -> Chooser:
    """A choice for which a model drafts as long as a pass takes, and a look-up takes no time."""
    choice = Chooser()
    choice._seconds, choice.pass_seconds = {0: 0.0, 1: 1.0}, 1.0
    return choice


def test_hybrid_weighs_what_past_rounds_accepted_by_what_they_cost() -> None:
    fixed, other = admission(2, seed=3), FREE._replace(slot=2)
    for accepted, taken in ((0, False), (1, True), (4, True)):  # (1 + a) / 1 or (1 + 2) / 2
        choice = timed()
        teach(choice, accepted)
        assert takes(choice, other) == taken, "of others, before it has any"
        assert takes(choice, fixed), "whatever was measured"
        greedy = admission(2, seed=3, temperature=0.0)
        assert takes(choice, greedy), "what those that draw have shown says nothing"
    assert not takes(choice, fixed, 3.0)
    choice.forget(1)
    choice.forget(2)
    assert not choice.held_slots()


def test_a_model_is_judged_by_rounds_of_the_same_kind() -> None:
    """Its rounds with four expected drafts had none accepted; this does not count elsewhere."""
    choice = timed()
    for _ in range(60):
        takes(choice)
        choice.leave_to_model(FREE, *MODEL)
        choice.learn(1, outcome(9, num_accepted=0))
    assert takes(choice), "either fails, and this one is cheaper"
    assert not takes(choice, expected=0.4)


def test_drafts_that_were_not_taken_change_the_mean_too() -> None:
    choice = timed()
    teach(choice, 0)
    assert not takes(choice)
    choice.forget(1)
    teach(choice, 4)
    assert takes(choice)


def test_memory_is_that_of_all_with_one_cache_of_q(target: Path, draft: Path) -> None:
    drafters = [build(target, draft, *names, method=names[0]) for names in ([n] for n in ALL)]
    members = [llm.engine.runner.drafter for llm in drafters]
    whole: Any = build(target, draft, *ALL).engine.runner.drafter
    parts: list[Any] = [one.members[0] for one in members]  # type: ignore[union-attr]
    assert whole.kv_bytes_per_block == sum(one.kv_bytes_per_block for one in parts)
    assert whole.bytes_shared == sum(one.bytes_shared for one in parts)
    together = sum(one.bytes_per_slot for one in parts)
    assert whole.bytes_per_slot == together - parts[1].cache_bytes
    assert whole.members[1].cache is whole.members[2].cache
    assert whole.reads_next_token


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "a list of objects"),
        ("ngram", "a list of objects"),
        ([{}], r"drafters\[0\].method` is None"),
        ([{"method": "ngram", "promt_lookup_min": 1}], "Did you mean `prompt_lookup_min`"),
        ([{"method": "ngram", "num_speculative_tokens": 2}], "set it next to `drafters`"),
        ([{"method": "ngram", "drafters": []}], r"drafters\[0\].drafters"),
        ([{"method": "ngram"}, {"method": "ngram"}], r"drafters\[1\].name` is 'ngram'"),
        ([{"method": "ngram", "name": "hybrid"}], "not `hybrid`"),
        ([{"method": "ngram", "prompt_lookup_min": 0}], r"drafters\[0\].prompt_lookup_min` is 0"),
    ],
)
def test_entries_that_cannot_be_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculativeConfig.parse({"drafters": given})


def test_options_of_one_drafter_are_not_those_of_all() -> None:
    with pytest.raises(ConfigError, match=r"`speculative_config.model` is 'x': must be left out"):
        SpeculativeConfig(drafters=[{"method": "ngram"}], model="x")
    with pytest.raises(ConfigError, match=r"must be one of a, hybrid\. With `drafters` it"):
        SpeculativeConfig(drafters=[{"method": "ngram", "name": "a"}], method="ngram")
    config = SpeculativeConfig(drafters=[{"method": "ngram"}], num_speculative_tokens=7)
    assert replace(config, num_speculative_tokens=3).members["ngram"].num_speculative_tokens == 3


def test_what_cannot_draft_together_is_refused(target: Path, draft: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafters\[1\].method` is 'ngrm'"):
        LLM(str(target), {"drafters": [{"method": "ngram"}, {"method": "ngrm"}]}, **OPTIONS)
    with pytest.raises(
        ConfigError, match=r"one of draft_model, eagle3\. `hybrid` needs a drafter that looks"
    ):
        build(target, draft, "draft_model", "eagle3")
    llm = build(target, draft, "draft_model", "eagle3", method="eagle3")
    half: Any = llm.engine.runner.drafter
    half.members[1].cache_shape = (*half.members[1].cache_shape[:2], torch.float16)
    with pytest.raises(ConfigError, match=r"is '.*': .* torch.float32 logits.* to `greedy`"):
        _members_with_q(half.members)
    drafters = [{"method": "ngram"}, {"method": "ngram", "name": "other"}]
    on_gpu = replace(laws.setup_for(2, laws.TORCH, drafters=drafters), on_host=False)
    with pytest.raises(ConfigError, match="`hybrid` runs only on a CPU"):
        Several(on_gpu)
    speculation = SpeculativeConfig(drafters=[{"method": "suffix"}, *drafters])
    with pytest.raises(ConfigError, match="use `ngram` there"):
        find_drafter(speculation, on_host=False)


def test_two_heads_that_read_other_states_are_refused(target: Path) -> None:
    heads = [head_of(target), head_of(target, name="other", aux_layers=(0, 0, 1))]
    drafters = [{"method": "eagle3", "model": str(h), "name": h.name} for h in heads]
    with pytest.raises(ConfigError, match="all drafters must read the same states"):
        LLM(str(target), {"drafters": drafters, "method": heads[0].name}, **OPTIONS)


def test_a_request_names_a_drafter_that_is_loaded(target: Path, draft: Path) -> None:
    llm = build(target, draft, "ngram", "draft_model", method="draft_model")
    with pytest.raises(RequestError, match="Did you mean `draft_model`"):
        llm.generate("a", SamplingParams(drafter="draftmodel"))
    with pytest.raises(RequestError, match="must be the name of a drafter"):
        SamplingParams(drafter=3)  # type: ignore[arg-type]
    single = LLM(str(target), {"method": "ngram"}, **OPTIONS)
    single.generate("a", SamplingParams(drafter="ngram"))
    with pytest.raises(RequestError, match="must be one of ngram"):
        single.generate("a", SamplingParams(drafter="hybrid"))
    with pytest.raises(RequestError, match="this engine drafts nothing"):
        LLM(str(target), **OPTIONS).generate("a", SamplingParams(drafter="ngram"))


def test_a_toy_drafter_takes_a_class_and_a_line(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other drafters, too, it observes only the outcomes of its own drafts as its own."""
    place = "tests.drafting.test_contract:Watching"
    monkeypatch.setitem(DRAFTERS, "Watching", place)
    drafters = [{"method": "Watching"}, {"method": "draft_model", "model": str(draft)}]
    llm = LLM(str(target), {"drafters": drafters, "method": "draft_model"}, **OPTIONS)
    run(llm, PROMPTS, temperature=0.0)
    drafter: Any = llm.engine.runner.drafter
    decided = [o for *_, result in drafter.members[0].seen for o in result.decisions.values()]
    assert decided
    assert not any(o.num_drafts for o in decided)
    run(llm, PROMPTS, temperature=0.0, drafter="Watching")
    assert llm.metrics.drafters["Watching"].num_drafts > 0


def seeing(target: Chain, make: MakePropose, looked: MakePropose, seen: set[int]) -> MakePropose:
    """Before each round `seen` gets the slots where the first looked-up draft will be accepted."""

    def mutant(params: SlotParams) -> Propose:
        propose, look_up = make(params), looked(params)

        def foreseen(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
            found = look_up(prefix_BL, slot_B, position_B)
            wide_BL = torch.cat([prefix_BL, found.token_BK], dim=1)
            place_BK = position_B[:, None] + torch.arange(found.token_BK.shape[1])
            wide_BL.scatter_(1, place_BK, found.token_BK.clamp(min=0))
            b_N = torch.arange(len(slot_B)).repeat_interleave(found.num_B + 1)
            i_N = torch.arange(len(b_N)) - first_row(found)[b_N]
            rows_NV = target.logits_CV[target.context(wide_BL[b_N], position_B[b_N] + i_N)]
            batch = VerifyBatch(rows_NV, params, slot_B, position_B, found)
            accepted_B = laws.one_later(laws.BACKEND).verify(batch).n_accept_B > 0
            seen.clear()
            seen.update(slot_B[accepted_B].tolist())
            return propose(prefix_BL, slot_B, position_B)

        return foreseen

    return mutant


class TakesIn(Chooser):
    """Takes all looked-up drafts of the requests in some slots, and no others."""

    def __init__(self, slots: Container[int]) -> None:
        super().__init__()
        self.slots = slots

    def takes(self, request: Admission, *_: Any) -> bool:
        return request.slot in self.slots


def test_a_choice_that_has_seen_the_sampled_token_is_rejected() -> None:
    """The same path without foresight is `hybrid` in `test_law.py`."""
    target, draft = random_chain(laws.VOCABULARY, seed=3)
    seen: set[int] = set()
    hybrid = laws.drafter("hybrid", draft, chooser=TakesIn(seen))
    make = seeing(target, hybrid, laws.drafter("suffix", draft), seen)
    setting = Setting(1.0)
    backend, trials = laws.one_later(laws.BACKEND), laws.QUICK
    emission = emit(backend, target, make, setting, length=4, trials=trials)
    assert joint_p_value(emission.token_SL, setting.next_token(target)) < MUTANT_P


def test_the_trace_names_the_drafter_of_each_token(target: Path, draft: Path) -> None:
    llm = build(target, draft, "ngram", "draft_model")
    drafter: Any = llm.engine.runner.drafter
    drafter.chooser = TakesIn(range(OPTIONS["max_num_seqs"]))
    outputs = run(llm, PROMPTS, temperature=0.0, trace=True)
    for output in outputs:
        named = Counter(t.drafter for t in output.outputs[0].trace if t.origin == "accepted")
        for name, counts in output.metrics.drafters.items():
            assert named[name] <= counts.num_accepted_tokens
    traced = {token.drafter for output in outputs for token in output.outputs[0].trace}
    assert {"ngram", "draft_model"} <= traced


def test_a_greedy_drafter_stays_greedy_next_to_one_that_draws(target: Path, draft: Path) -> None:
    model = {"method": "draft_model", "model": str(draft)}
    greedy, text = model | {"draft_sample_method": "greedy"}, {"seed": 3, "temperature": 1.0}
    alone = run(LLM(str(target), greedy, **OPTIONS), PROMPTS, **text)
    drafters = [model | {"name": "drawn"}, greedy | {"name": "greedy"}]
    both = LLM(str(target), {"drafters": drafters, "method": "drawn"}, **OPTIONS)
    beside = run(both, PROMPTS, **text, drafter="greedy", trace=True)
    assert tokens_of(beside) == tokens_of(alone)
    assert {record.q for output in beside for record in output.outputs[0].trace} == {None}
    assert tokens_of(run(both, PROMPTS, **text)) != tokens_of(alone)


def test_a_prediction_is_refused_where_the_drafter_of_its_request_does_not_read_it(
    target: Path, draft: Path
) -> None:
    llm = build(target, draft, "ngram", "prediction", "draft_model")
    for drafter in ("ngram", "draft_model"):
        remedy = f"`{drafter}` does not read it. Set `drafter` to one of prediction, hybrid"
        with pytest.raises(RequestError, match=remedy):
            run(llm, ["abc"], prediction="abc", drafter=drafter)
    for drafter in ("prediction", "hybrid", None):
        run(llm, ["abc"], prediction="abc", drafter=drafter)


def test_what_is_measured_at_start_is_the_default(target: Path, draft: Path) -> None:
    methods = ("ngram", "draft_model")
    for method, number in (("ngram", 0), ("draft_model", 1), ("hybrid", 1)):
        drafter = build(target, draft, *methods, method=method).engine.runner.drafter
        assert drafter is not None
        assert drafter.measured == number


@pytest.mark.parametrize(
    ("rule", "temperature", "shows"),
    [
        (Rule.STANDARD, 0.0, False),
        (Rule.STANDARD, 0.8, True),
        (Rule.BLOCK, 0.8, True),
        (Rule.COUPLED, 0.8, False),
        (Rule.SYNTHETIC, 0.0, True),
    ],
)
def test_which_texts_depend_on_what_is_drafted(rule: Rule, temperature: float, shows: bool) -> None:
    assert admission(0, rule, temperature=temperature, seed=1).depends_on_drafts is shows
