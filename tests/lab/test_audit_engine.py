"""The audit of a live engine passes on the engine as it is, and fails on one that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.config import LOSSLESS_METHODS
from foretoken.drafting.registry import DRAFTERS
from foretoken.errors import ConfigError, ForetokenError, RequestError
from foretoken.lab.audit import engine
from foretoken.lab.audit.engine import (
    EngineAudit,
    accepted,
    block_rounds,
    classify,
    draft_reference,
)
from foretoken.lab.audit.reference import Reference, Text, filtered, ranks
from foretoken.lab.audit.verdict import Finding, audit
from foretoken.lab.laws import mutants
from foretoken.lab.laws.mutants import RESIDUALS, asking, residual, shared_stream
from foretoken.ops import Rule, VerifyBatch, get_backend, rules
from tests.models import families
from tests.models.heads import head_of
from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("tiny-python")


@pytest.fixture(params=["standard"])
def asked(
    pair: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch, request: Any
) -> EngineAudit:
    monkeypatch.setattr(engine, "BATCH", 16)
    monkeypatch.setattr(
        engine, "PARAMETERS", {name: engine.PARAMETERS[name] for name in ("top_p", "logit_bias")}
    )
    params = SamplingParams(rejection_sample_method=request.param)
    return EngineAudit(pair, params, reference, 0, draft_reference(pair, reference))


def accept_everything(x: rules.RuleInputs) -> torch.Tensor:
    """The mutant: every draft is kept, whatever the target thinks of it."""
    return (~x.log_q_BK.isneginf()).cumprod(dim=1).bool()


@pytest.fixture
def broken(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In stock operators, which read the rules where native kernels have their own."""
    for rule in (Rule.STANDARD, Rule.BLOCK):
        monkeypatch.setitem(rules.RULES, rule, accept_everything)
    monkeypatch.setattr(pair.engine.runner.sampler, "backend", get_backend("torch"))


def test_an_engine_passes(asked: EngineAudit) -> None:
    found = audit(asked.subject("x"), 800)
    assert not found.refuted, found.verdict
    assert "no difference in" in found.verdict
    greedy, coupled, parameters = found.exact
    assert "Temperature 0: 256 of 256 tokens are the target's likeliest, 0 numeric ties" in greedy
    assert "16 of 16 texts are equal" in coupled
    assert parameters == "Sampling parameters: top_p, logit_bias act."
    tokens = found.evidence.sources[0]
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


@pytest.mark.parametrize("asked", ["block"], indirect=True)
def test_block_accepts_what_is_expected_of_its_paths(asked: EngineAudit) -> None:
    found = tokens_alone(asked, 1024)
    assert not found.refuted, found.verdict
    (tokens,) = found.evidence.sources
    accepted, _, expected = tokens.acceptance
    assert accepted == pytest.approx(expected, rel=0.1)  # of some 300 rounds
    assert 0.3 < accepted < 0.8


@pytest.mark.parametrize("asked", ["block"], indirect=True)
@pytest.mark.usefixtures("broken")
def test_more_accepted_than_block_could_is_refuted(asked: EngineAudit) -> None:
    found = tokens_alone(asked, 2000)
    assert found.bug == "accepts_too_much", found.verdict


def tokens_alone(asked: EngineAudit, draws: int) -> Finding:
    subject = asked.subject("x")
    return audit(subject._replace(exact=None, models=subject.models[:1]), draws)


@asking
def dropped_q(x: VerifyBatch) -> VerifyBatch:
    """Lossless, but slow: sampled drafts are verified as one-hot."""
    drafts = replace(x.drafts, real_q_B=torch.zeros_like(x.drafts.real_q_B))
    return x._replace(drafts=drafts)


def test_a_dropped_q_is_lossless_and_slow(
    pair: LLM, asked: EngineAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = pair.engine.runner.sampler
    monkeypatch.setattr(sampler, "backend", dropped_q(sampler.backend))
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
    monkeypatch.setattr(drafter, "_rounds", None)  # a native round draws by itself
    monkeypatch.setattr(drafter, "backend", shared_stream(drafter.backend))
    found = tokens_alone(asked, 8000)
    assert found.bug == "shared_noise", found.verdict


def test_a_wrong_residual_is_named(
    pair: LLM, asked: EngineAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(backend: Any, x: Any, p_NV: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(x.slot_B), x.drafts.token_BK.shape[1] + 1)

    sampler = pair.engine.runner.sampler
    monkeypatch.setattr(mutants, "_block_weights", ones)  # of rounds that are equally long
    broken = residual(RESIDUALS["no_subtraction"])(sampler.backend)
    monkeypatch.setattr(sampler, "backend", broken)
    found = tokens_alone(asked, 3000)
    assert found.bug == "residual_is_p", found.verdict


def test_requests_that_share_their_noise_are_refuted(
    asked: EngineAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one prompt and one seed: each token alone is right."""
    texts = asked.texts
    asked.prompts = asked.prompts[:1]

    def twins(params: SamplingParams, count: int) -> list[Text]:
        return [text for text in texts(params, count // 2) for _ in range(2)]

    monkeypatch.setattr(asked, "texts", twins)
    found = audit(asked.subject("x")._replace(exact=None), 6000)
    worst = min(found.evidence.sources, key=lambda source: source.p_value)
    assert found.refuted
    assert worst.model.name == "requests"


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


@pytest.fixture
def null(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """Audits a tiny engine as it is; 3 000 draws a second."""
    monkeypatch.setattr(engine, "BATCH", 64)
    own = {"draft_model": draft, "draft_text": draft, "eagle3": head_of(target)}

    def with_model(given: dict[str, Any]) -> dict[str, Any]:
        model = own.get(given["method"])
        return given if model is None else {**given, "model": str(model)}

    def found(name: str, rule: str, temperature: float, draws: int) -> Finding:
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
            audited = EngineAudit(llm, params, reference, 0, draft_reference(llm, reference))
            return audit(audited.subject("x"), draws)

    return found


def check_right(found: Finding) -> None:
    """No p-value of a source that is valid falls below 1e-5 by chance, nor is more accepted."""
    assert not found.refuted, (found.verdict, found.exact)
    for source in found.evidence.sources:
        assert source.p_value > 1e-5, (source.model.name, source.counts)
    tokens = found.evidence.sources[0]
    mean, reach, most = tokens.acceptance
    assert abs(mean - most) <= reach


@pytest.mark.parametrize(("drafter", "rule", "temperature"), FEW_NULLS)
def test_right_engines_pass(
    null: Any, monkeypatch: Any, drafter: str, rule: str, temperature: float
) -> None:
    monkeypatch.setattr(EngineAudit, "checks", lambda asked: ([], []))
    check_right(null(drafter, rule, temperature, 14_000))


@pytest.mark.law
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", LOSSLESS_METHODS)
@pytest.mark.parametrize("drafter", NULLS)
def test_every_right_engine_passes(null: Any, drafter: str, rule: str, temperature: float) -> None:
    found = null(drafter, rule, temperature, 20_000)
    if temperature == 0:
        assert not found.refuted, (found.verdict, found.exact)
    else:
        check_right(found)


def test_a_uniform_that_is_used_again_in_the_next_round_is_refuted(
    asked: EngineAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trace tells it, the one that rejects a draft also decides the next round's first."""
    texts = asked.texts

    def reused(params: SamplingParams, count: int) -> list[Text]:
        return [
            text._replace(trace=with_uniforms_again(text.trace)) for text in texts(params, count)
        ]

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

    monkeypatch.setattr(asked, "texts", reused)
    found = audit(asked.subject("x")._replace(exact=None), 6000)
    assert found.refuted
    worst = min(found.evidence.sources, key=lambda source: source.p_value)
    assert worst.model.name == "uniforms in turn"


class Outside(EngineAudit):
    """Texts of some token outside of the top 2, the others inside."""

    outside = 0

    def texts(self, params: SamplingParams, count: int, first: int | None = None) -> list[Text]:
        tokens = [2] * self.outside + [0] * (16 - self.outside)
        self.outside = 0
        return [Text([0], tokens)]


@pytest.mark.parametrize(
    ("alpha", "outside", "refuted"), [(1e-3, 2, False), (1e-3, 3, True), (0.1, 2, True)]
)
def test_parameters_share_alpha(
    pair: LLM, reference: Reference, monkeypatch: Any, alpha: float, outside: int, refuted: bool
) -> None:
    """A token that cannot be weighs log(99) = 4.6, and it takes log(18/alpha): 9.8, or 5.2."""
    kept = {"top_k": {"top_k": 2}}
    monkeypatch.setattr(engine, "PARAMETERS", kept | {str(i): {} for i in range(8)})
    monkeypatch.setattr(engine, "MOST_WAVES", 1)
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


def test_a_parameter_that_is_ignored_is_named(asked: EngineAudit, monkeypatch: Any) -> None:
    texts = asked.texts
    monkeypatch.setattr(engine, "MOST_WAVES", 1)
    monkeypatch.setattr(asked, "texts", lambda params, n: texts(replace(params, top_p=1.0), n))
    bug, line = asked._parameters()
    assert bug == "parameter_ignored"
    assert line == "Sampling parameters: logit_bias act; top_p ARE IGNORED."


def test_a_replay_that_differs_is_named(asked: EngineAudit, monkeypatch: Any) -> None:
    texts = asked.texts

    def other(params: SamplingParams, count: int, first: int) -> list[Text]:
        return texts(params, count, first if params.num_speculative_tokens is None else 99)

    monkeypatch.setattr(asked, "texts", other)
    assert asked._coupled()[0] == "replay_differs"


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
    """Written once more, not shared: both must say the same of rows with ties."""
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
    """A drafter whose q the engine alone knows, and one without: neither has a q there."""

    def record(origin: str, round_: int, height: float | None = None, *dropped: Any) -> Any:
        made = {"origin": origin, "round": round_, "rule": "block", "threshold": height}
        index = None if origin in ("bonus", "resampled") else 0
        q = 0.5 if real and height is not None else None
        return SimpleNamespace(**made, draft_index=index, q=q, token_id=5, dropped=dropped)

    hole, behind = record("rejected", 0), record("unread", 0, 0.5)
    first = record("resampled", 0, None, hole, behind)
    second = [record("accepted", 1, 0.75), record("resampled", 1, None, hole, behind)]
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
