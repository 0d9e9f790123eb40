"""The audit of a live engine passes right engines, and refutes wrong ones."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.config import LOSSLESS_METHODS
from foretoken.drafting.registry import DRAFTERS
from foretoken.errors import ConfigError, ForetokenError, RequestError
from foretoken.lab.audit.engine import (
    PARAMETERS,
    EngineAudit,
    accepted,
    block_rounds,
    classify,
    draft_reference,
)
from foretoken.lab.audit.reference import Reference, Text, filtered, ranks
from foretoken.lab.audit.subjects import Checks
from foretoken.lab.audit.verdict import Finding, audit
from foretoken.lab.laws import mutants
from foretoken.lab.laws.mutants import RESIDUALS, batch_mutant, residual_mutant, shared_stream
from foretoken.ops import Backend, Rule, VerifyBatch, get_backend, rules
from tests.models import families
from tests.models.heads import head_of
from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("tiny-python")


class Small(EngineAudit):
    batch = 16
    parameters = {name: PARAMETERS[name] for name in ("top_p", "logit_bias")}


AuditOf = Callable[[type[EngineAudit]], EngineAudit]


@pytest.fixture(params=["standard"])
def audit_of(pair: LLM, reference: Reference, request: Any) -> AuditOf:
    params = SamplingParams(rejection_sample_method=request.param)
    return lambda kind: kind(pair, params, reference, 0, draft_reference(pair, reference))


@pytest.fixture
def asked(audit_of: AuditOf) -> EngineAudit:
    return audit_of(Small)


def accept_everything(x: rules.RuleInputs) -> torch.Tensor:
    """The mutant: every draft is kept, whatever the target thinks of it."""
    return (~x.log_q_BK.isneginf()).cumprod(dim=1).bool()


@contextmanager
def verified_by(llm: LLM, wrap: Callable[[Backend], Backend]) -> Iterator[None]:
    """The sampler verifies by the backend that `wrap` makes of its own."""
    runner, own = llm.engine.runner, llm.engine.runner.sampler
    runner.sampler = copy.copy(own)
    runner.sampler.backend = wrap(own.backend)
    try:
        yield
    finally:
        runner.sampler = own


@contextmanager
def accepting_everything(llm: LLM) -> Iterator[None]:
    """By stock operators, which read the rules where native kernels have their own."""
    broken = dict.fromkeys((Rule.STANDARD, Rule.BLOCK), accept_everything)
    with verified_by(llm, lambda own: get_backend("torch")), patch.dict(rules.RULES, broken):
        yield


@pytest.fixture
def broken(pair: LLM) -> Iterator[None]:
    with accepting_everything(pair):
        yield


def test_an_engine_passes(asked: EngineAudit) -> None:
    found = audit(asked.subject("x"), 800)
    assert not found.refuted, found.verdict
    assert "no difference in" in found.verdict
    greedy, coupled, parameters = found.exact
    assert "Temperature 0: 256 of 256 tokens are the target's likeliest, 0 numeric ties" in greedy
    assert "16 of 16 texts are equal" in coupled
    assert parameters == "Sampling parameters: top_p, logit_bias act."
    tokens = found.evidence.tallies[0]
    assert 0.3 < tokens.acceptance[0] < 0.8
    assert tokens.acceptance[0] == pytest.approx(tokens.acceptance[2], abs=0.1)


@pytest.mark.usefixtures("broken")
def test_a_broken_rule_is_refuted(asked: EngineAudit) -> None:
    found = audit(asked.subject("x")._replace(exact=None), 6000)
    assert found.evidence.refuted_at is not None
    assert found.evidence.refuted_at <= 3000
    bug, line = asked.greedy()
    assert bug == "greedy_differs"
    assert not line.endswith(" 0 bugs")


@pytest.mark.parametrize("audit_of", ["block"], indirect=True)
def test_block_accepts_what_is_expected_of_its_paths(asked: EngineAudit) -> None:
    found = tokens_alone(asked, 1024)
    assert not found.refuted, found.verdict
    (tokens,) = found.evidence.tallies
    accepted, _, expected = tokens.acceptance
    assert accepted == pytest.approx(expected, rel=0.1)  # of some 300 rounds
    assert 0.3 < accepted < 0.8


@pytest.mark.parametrize("audit_of", ["block"], indirect=True)
@pytest.mark.usefixtures("broken")
def test_more_accepted_than_block_could_is_refuted(asked: EngineAudit) -> None:
    found = tokens_alone(asked, 2000)
    assert found.bug == "accepts_too_much", found.verdict


def tokens_alone(asked: EngineAudit, draws: int) -> Finding:
    subject = asked.subject("x")
    return audit(subject._replace(exact=None, sources=subject.sources[:1]), draws)


@batch_mutant
def dropped_q(x: VerifyBatch) -> VerifyBatch:
    """Lossless, but slow: sampled drafts are verified as one-hot."""
    drafts = replace(x.drafts, real_q_B=torch.zeros_like(x.drafts.real_q_B))
    return x._replace(drafts=drafts)


def test_a_dropped_q_is_lossless_and_slow(pair: LLM, asked: EngineAudit) -> None:
    with verified_by(pair, dropped_q):
        found = tokens_alone(asked, 1500)
    assert not found.refuted
    assert re.search(
        r"not refuted, accepts less than it could \(0\.\d+ where `standard` accepts 0\.\d+\)",
        found.verdict,
    )


def test_noise_that_draft_and_residual_share_is_named(
    pair: LLM, asked: EngineAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter: Any = pair.engine.runner.drafter
    monkeypatch.setattr(drafter, "_round_stack", None)  # a native round draws by itself
    monkeypatch.setattr(drafter, "backend", shared_stream(drafter.backend))
    found = tokens_alone(asked, 8000)
    assert found.bug == "shared_noise", found.verdict


def test_a_wrong_residual_is_named(
    pair: LLM, asked: EngineAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(backend: Any, x: Any, p_NV: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(x.slot_B), x.drafts.token_BK.shape[1] + 1)

    monkeypatch.setattr(mutants, "_block_weights", ones)  # of rounds that are equally long
    with verified_by(pair, residual_mutant(RESIDUALS["no_subtraction"])):
        found = tokens_alone(asked, 3000)
    assert found.bug == "residual_is_p", found.verdict


def test_requests_that_share_their_noise_are_refuted(audit_of: AuditOf) -> None:
    """All of one prompt and one seed: each token by itself is right."""

    class Twins(Small):
        def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
            return [text for text in super().texts(params, count // 2) for _ in range(2)]

    asked = audit_of(Twins)
    asked.prompts = asked.prompts[:1]
    found = audit(asked.subject("x")._replace(exact=None), 6000)
    worst = min(found.evidence.tallies, key=lambda tally: tally.p_value)
    assert found.refuted
    assert worst.source.name == "requests"


# What is right ------------------------------------------------------------------------------------

GREEDY = {"draft_sample_method": "greedy"}
NULLS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in DRAFTERS},
    "greedy draft_model": {"method": "draft_model", **GREEDY},
    "greedy eagle3": {"method": "eagle3", **GREEDY},
    "hybrid": {"drafters": [{"method": "suffix"}, {"method": "draft_model"}]},
}
FEW_NULLS = (
    ("draft_model", "standard", 1.0),
    ("greedy draft_model", "standard", 1.0),
    ("eagle3", "block", 1.0),
    ("hybrid", "standard", 0.5),
)


class Large(EngineAudit):
    batch = 64


class DrawsAlone(Large):
    def checks(self) -> Checks:
        return [], []


@pytest.fixture
def null(target: Path, draft: Path) -> Callable[..., Finding]:
    """Audits a tiny engine as it is; 3 000 draws a second."""
    own = {"draft_model": draft, "draft_text": draft, "eagle3": head_of(target)}

    def with_model(given: dict[str, Any]) -> dict[str, Any]:
        model = own.get(given["method"])
        return given if model is None else {**given, "model": str(model)}

    def found(
        kind: type[EngineAudit], name: str, rule: str, temperature: float, draws: int
    ) -> Finding:
        given = dict(NULLS[name])
        if "drafters" in given:
            given["drafters"] = [*map(with_model, given["drafters"])]
        else:
            given = with_model(given)
        reference = Reference(str(target))
        with LLM(str(target), {**given, "num_speculative_tokens": 3}, max_num_seqs=64) as llm:
            params = SamplingParams(temperature=temperature, rejection_sample_method=rule)
            if name == "prediction":
                params.prediction = "abc" * 20
            if name == "forced":
                params.allowed_token_ids = range(200)
            audited = kind(llm, params, reference, 0, draft_reference(llm, reference))
            return audit(audited.subject("x"), draws)

    return found


def check_right(found: Finding) -> None:
    """No p-value of a source that is valid falls below 1e-5 by chance, nor is more accepted."""
    assert not found.refuted, (found.verdict, found.exact)
    for tally in found.evidence.tallies:
        assert tally.p_value > 1e-5, (tally.source.name, tally.counts)
    tokens = found.evidence.tallies[0]
    mean, half_width, best = tokens.acceptance
    assert abs(mean - best) <= half_width


@pytest.mark.parametrize(("drafter", "rule", "temperature"), FEW_NULLS)
def test_right_engines_pass(null: Any, drafter: str, rule: str, temperature: float) -> None:
    check_right(null(DrawsAlone, drafter, rule, temperature, 14_000))


@pytest.mark.law
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", LOSSLESS_METHODS)
@pytest.mark.parametrize("drafter", NULLS)
def test_every_right_engine_passes(null: Any, drafter: str, rule: str, temperature: float) -> None:
    found = null(Large, drafter, rule, temperature, 20_000)
    if temperature == 0:
        assert not found.refuted, (found.verdict, found.exact)
    else:
        check_right(found)


def test_a_uniform_that_is_used_again_in_the_next_round_is_refuted(audit_of: AuditOf) -> None:
    """The trace says that the one which rejects a draft also decides the next round's first."""

    class Reused(Small):
        def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
            made = super().texts(params, count)
            return [text._replace(trace=with_uniforms_again(text.trace)) for text in made]

    def with_uniforms_again(trace: Any) -> list[Any]:
        records, spent = [], None
        for record in trace:
            looked_at = [record, *record.dropped]
            if spent is not None and looked_at[0].draft_index != 0:
                looked_at = [record, *(replace(x, u=spent) for x in record.dropped[:1])]
            elif spent is not None and record.u is not None:
                looked_at[0] = replace(record, u=spent)
            records.append(replace(looked_at[0], dropped=tuple(looked_at[1:])))
            spent = record.dropped[0].u if record.dropped else None
        return records

    found = audit(audit_of(Reused).subject("x")._replace(exact=None), 6000)
    assert found.refuted
    worst = min(found.evidence.tallies, key=lambda tally: tally.p_value)
    assert worst.source.name == "uniforms in turn"


class Outside(EngineAudit):
    """Texts of some token outside of the top 2, the others inside."""

    outside, max_batches = 0, 1
    parameters = {"top_k": {"top_k": 2}, **{str(i): {} for i in range(8)}}

    def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
        tokens = [2] * self.outside + [0] * (16 - self.outside)
        self.outside = 0
        return [Text([0], tokens)]


@pytest.mark.parametrize(
    ("alpha", "outside", "refuted"), [(1e-3, 2, False), (1e-3, 3, True), (0.1, 2, True)]
)
def test_parameters_share_alpha(pair: LLM, alpha: float, outside: int, refuted: bool) -> None:
    """A token that cannot be weighs log(99) = 4.6, and it takes log(18/alpha): 9.8, or 5.2."""
    row = torch.tensor([0.0, -20.0, -21.0])  # the top 2 are nearly all there is
    table: Any = SimpleNamespace(
        vocabulary=3, logits=lambda texts: [row.expand(len(t.output), -1) for t in texts]
    )
    audited = Outside(pair, SamplingParams(), table, alpha=alpha)
    audited.outside = outside
    bug, line = audited._parameters()
    assert bug == ("parameter_ignored" if refuted else None), line


# Its reference ------------------------------------------------------------------------------------


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "own.Own"}, "architectures": ["Own"]}
    (folder / "config.json").write_text(json.dumps(config))


def not_finite(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = {name: w * torch.nan for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (pickled, "Convert them to safetensors"),
        (with_code, "brings its own code"),
        (not_finite, "not finite"),
    ],
)
def test_a_reference_is_loaded_under_guard(tmp_path: Path, broken: Any, said: str) -> None:
    broken(save_checkpoint(tmp_path))
    with pytest.raises(ForetokenError, match=said):
        Reference(str(tmp_path))


@pytest.mark.parametrize("family", ["bert", "bloom", "llama4_text", "mamba"])
def test_a_reference_is_what_an_engine_could_run(tmp_path: Path, family: str) -> None:
    overrides, _ = families.REFUSED[family]
    families.save_model(tmp_path, family, overrides)
    with pytest.raises(ForetokenError, match="not causal" if family == "bert" else family):
        Reference(str(tmp_path))


# Parameters, ties, drafts -------------------------------------------------------------------------


def test_a_parameter_that_is_ignored_is_named(audit_of: AuditOf) -> None:
    class Ignoring(Small):
        max_batches = 1

        def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
            return super().texts(replace(params, top_p=1.0), count)

    bug, line = audit_of(Ignoring)._parameters()
    assert bug == "parameter_ignored"
    assert line == "Sampling parameters: logit_bias act; top_p ARE IGNORED."


def test_a_replay_that_differs_is_named(audit_of: AuditOf) -> None:
    class Differing(Small):
        def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
            seed = first if params.num_speculative_tokens is None else 99
            return super().texts(params, count, seed)

    assert audit_of(Differing)._coupled()[0] == "replay_differs"


def test_ties_are_told_from_bugs() -> None:
    logits = torch.tensor([[5.0, 4.99999, 1.0], [1.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0.0)
    for output, bug, said in (
        ([0, 1], None, "2 of 2 tokens are the target's likeliest, 0 numeric ties, 0 bugs"),
        ([1, 1], None, "1 of 2 tokens are the target's likeliest, 1 numeric ties, 0 bugs"),
        ([0, 2], "greedy_differs", "1 of 2 tokens are the target's likeliest, 0 numeric ties, 1 "),
    ):
        found, line = classify([Text([0], output)], [logits], params, 2**-23)
        assert found == bug
        assert said in line


def test_ranks_are_uniform_and_what_cannot_be_is_last() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    drawn = torch.multinomial(p, 20_000, replacement=True, generator=generator)
    rank = ranks(p.expand(20_000, -1), drawn.tolist(), generator)
    assert rank.histc(10, 0, 1) / 20_000 == pytest.approx([0.1] * 10, abs=0.01)
    assert ranks(p[None], [3], generator).item() == 1.0


def test_filters_are_the_oracles() -> None:
    """Two implementations agree on rows with ties."""
    from foretoken.lab.laws.chain import Chain, Setting

    logits = (torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 2).round()
    for given in ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}):
        setting = Setting(temperature=0.7, **given)
        expected = setting.next_token(Chain(logits))
        params = SamplingParams(temperature=0.7, **given)
        assert filtered(logits.double(), params) == pytest.approx(expected, abs=1e-6)


def test_drafts_count_where_one_was_decided_about() -> None:
    def record(
        origin: str, threshold: float | None, *dropped: Any, q: float | None = 0.5, rule: str = ""
    ) -> Any:
        made = {"origin": origin, "rule": rule or "standard", "threshold": threshold, "q": q}
        return SimpleNamespace(**made, dropped=dropped, token_id=1)

    records = [
        record("accepted", 0.9),
        record("resampled", None, record("rejected", 0.4)),
        record("bonus", None),
        record("accepted", 0.2, rule="block"),
        record("accepted", 1.0, q=None),  # one-hot: the engine's own number is not asked for
        record("resampled", None, record("rejected", 1.0, q=None)),
    ]
    p_RV = torch.tensor([[0.75, 0.25]] * 6)
    seen, chance = accepted([Text([], [], records)], [p_RV])
    assert seen.tolist() == [1, 0, 0, 1, 1, 0]
    assert chance.tolist() == [0.9, 0.4, 0.0, 1.0, 0.25, 0.25]


@pytest.mark.parametrize("real", [True, False])
def test_no_draft_counts_from_a_placeholder_on(pair: LLM, reference: Reference, real: bool) -> None:
    """A drafter with a q that only the engine knows, and one without: neither has a q there."""

    def record(origin: str, round_: int, height: float | None = None, *dropped: Any) -> Any:
        made = {"origin": origin, "round": round_, "rule": "block", "threshold": height}
        index = None if origin in ("bonus", "resampled") else 0
        q = 0.5 if real and height is not None else None
        return SimpleNamespace(**made, draft_index=index, q=q, token_id=5, dropped=dropped)

    hole, unread = record("rejected", 0), record("unread", 0, 0.5)
    first = record("resampled", 0, None, hole, unread)
    second = [record("accepted", 1, 0.75), record("resampled", 1, None, hole, unread)]
    trace = [first, *second]
    assert [(a, b, len(drafts)) for a, b, drafts in block_rounds(trace)] == [(1, 2, 1)]
    audited = EngineAudit(pair, SamplingParams(rejection_sample_method="block"), reference)
    audited._texts = [Text([3, 4], [5, 5, 5], trace)]
    seen, chance = audited._block_acceptance()
    assert [*seen.nonzero()[0]] == [*chance.nonzero()[0]] == [2]
    assert not real or chance[2] == 0.75


def test_what_cannot_be_audited_is_refused(pair: LLM, reference: Reference) -> None:
    with pytest.raises(RequestError, match="`bad_words`"):
        EngineAudit(pair, SamplingParams(bad_words=["x"]), reference)
    with pytest.raises(ConfigError, match="for an audit"):
        EngineAudit(pair, SamplingParams(rejection_sample_method="synthetic"), reference)
