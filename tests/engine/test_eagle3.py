"""EAGLE-3 end to end: whatever happens to a request, its drafts are those of the equations.

Every q that the engine hands over is compared with the published equations in float64, on the
hidden states that plain Transformers gives for the request's own text.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.heads import LAYOUTS
from foretoken import LLM, SamplingParams
from foretoken.engine.build import EngineParts
from foretoken.engine.request import RequestGroup
from foretoken.errors import ConfigError
from tests.engine.doubles import ON_HOST, llm_of
from tests.models.heads import SWITCHES, Checked, head_of
from tests.support.checkpoints import save_checkpoint

Plain = dict[tuple[str, float], list[list[int]]]  # texts by backend and temperature
VOCABULARY, K = 12, 3
TEXT = [5, 3, 8, 1, 1, 9, 0, 4, 7, 2, 11, 6, 3, 3, 10, 5, 8, 2, 0, 1, 6, 4]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens: by chance alone a random head is right now and then."""
    folder = tmp_path_factory.mktemp("few") / "target"
    return save_checkpoint(folder, vocabulary=VOCABULARY, tokenizer=False, layers=3, seed=2)


@pytest.fixture(scope="module")
def plain() -> Plain:
    return {}


@pytest.fixture(params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def build(
    target: Path, head: Path | None = None, parts: EngineParts = ON_HOST, **options: Any
) -> LLM:
    method = options.pop("draft_sample_method", "probabilistic")
    speculation: dict[str, Any] | None = None
    if head is not None:
        sizes = {"num_speculative_tokens": K, "draft_sample_method": method}
        speculation = {"method": "eagle3", "model": str(head), **sizes}
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return llm_of(parts, target, speculation, **defaults | options)


def finish(llm: LLM, *groups: RequestGroup) -> list[list[int]]:
    while not all(group.finished for group in groups):
        llm.engine.step()
        llm.engine.check_integrity()
    assert all(group.error is None for group in groups)
    return [group.samples[0].token_ids for group in groups]


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "ignore_eos": True, **given})


@pytest.mark.parametrize("drafted", [None, 5])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("slots", ["host, native", "host", "device, native", "device"])
def test_chunks_ragged_drafts_and_rejections(
    few: Path, slots: str, drafted: int | None, ahead: bool
) -> None:
    parts = EngineParts(on_host=lambda device: "device" not in slots)
    backend = "auto" if "native" in slots else "torch"
    head = head_of(few, drafted=drafted)
    llm = build(few, head, parts, backend=backend, async_scheduling=ahead)
    assert llm.engine.runner.slots.on_host == ("device" not in slots)
    checked = Checked(llm.engine.runner, few, head)
    asked = [
        params(seed=i, temperature=t, num_speculative_tokens=k, max_tokens=12 + i)
        for i, (t, k) in enumerate([(0.0, 3), (1.0, 2), (2.0, 3), (1.0, 0), (1.5, 1), (0.7, 3)])
    ]
    prompts = [TEXT, TEXT[:3], TEXT[5:], TEXT[2:9], [7], TEXT[::-1]]
    llm.generate(prompts, asked)
    checked.done(least=60)
    assert 0 < llm.metrics.num_accepted_tokens < llm.metrics.num_draft_tokens


# A layout is a prefix of names: every switch in one of them, all at once in each.
TURNS = {*zip(SWITCHES, itertools.cycle(LAYOUTS)), *itertools.product(["all at once"], LAYOUTS)}


@pytest.mark.parametrize(("switches", "layout"), sorted(TURNS))
def test_every_layout_and_switch_is_the_equations(few: Path, switches: str, layout: str) -> None:
    """Hidden states and logits to 1e-5 of the largest, over what is accepted and what is not."""
    head = head_of(few, name=switches, layout=layout, **SWITCHES[switches])
    llm = build(few, head)
    checked = Checked(llm.engine.runner, few, head, own_states=True)
    asked = [params(seed=i, temperature=t) for i, t in enumerate((0.7, 1.0, 2.0, 1.5))]
    llm.generate([TEXT, TEXT[:3], TEXT[2:9], [7]], asked)
    checked.done(least=60, most=1e-5)
    assert 0 < llm.metrics.num_accepted_tokens < llm.metrics.num_draft_tokens


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("drafted", [None, 5])
@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_text_is_that_of_plain_decoding(
    few: Path, plain: Plain, backend: str, rule: str, drafted: int | None, method: str
) -> None:
    """At T=0 under every rule, and with a seed under `coupled`."""
    prompts, temperature = [TEXT, TEXT[:3], [7], TEXT[::-1]], 0.0 if rule != "coupled" else 1.0
    llm = build(few, head_of(few, drafted=drafted), backend=backend, draft_sample_method=method)

    def texts(llm: LLM, **rules: Any) -> list[list[int]]:
        asked = [params(seed=i, temperature=temperature, max_tokens=60, **rules) for i in range(4)]
        return [o.outputs[0].token_ids for o in llm.generate(prompts, asked)]

    if (key := (backend, temperature)) not in plain:
        rules = {"rejection_sample_method": rule} if rule == "coupled" else {}
        plain[key] = texts(build(few, backend=backend), **rules)
    assert texts(llm, rejection_sample_method=rule) == plain[key]
    assert 0 < llm.metrics.num_accepted_tokens < llm.metrics.num_draft_tokens


BRANCH = [*TEXT[:8], 9, 9, 2, 5, 5]
BRANCHES = [TEXT, BRANCH, [*BRANCH, 1, 1], [*TEXT[:16], 0], TEXT[:17]]


def branches(llm: LLM) -> list[int]:
    """Texts that differ after a common block; returns how many tokens of each were cached."""
    cached = []
    for i, text in enumerate(BRANCHES):
        group = llm.engine.add(str(i), text, params(seed=i, max_tokens=6))
        finish(llm, group)
        cached.append(group.metrics.num_cached_tokens)
    return cached


def test_shared_blocks_are_right_for_all_who_share_them(few: Path, backend: str) -> None:
    head = head_of(few)
    llm = build(few, head, backend=backend)
    checked = Checked(llm.engine.runner, few, head)
    # After TEXT[:8] the first text has 7, the others 9: the second block is computed for each.
    assert branches(llm) == [0, 4, 12, 12, 16]
    checked.done(least=30)


@pytest.mark.parametrize("left_out", [0, 1])
def test_blocks_found_by_their_own_tokens_alone_would_be_wrong(few: Path, left_out: int) -> None:
    """Mutants of the test above; it does not help to leave out the last block that is found."""
    head = head_of(few)
    llm = build(few, head)
    pool: Any = llm.engine.scheduler.pool
    match, pool.lookahead = pool.match, 0
    pool.match = lambda *given: (found := match(*given))[: len(found) - left_out]
    checked = Checked(llm.engine.runner, few, head)
    branches(llm)
    assert checked.worst > 1e-2


def test_what_the_last_owner_of_a_block_left_there_does_not_spread(few: Path) -> None:
    """Masked keys are multiplied with: a NaN among them would make every number one."""
    head = head_of(few)
    llm = build(few, head)
    checked = Checked(llm.engine.runner, few, head)
    for cache in (*checked.drafter.kv.keys, *checked.drafter.kv.values):
        cache.fill_(torch.nan)
    llm.generate([TEXT, TEXT[:5]], params(seed=1))
    checked.done(least=40)


def test_dummy_weights_of_both_need_their_configurations_alone(few: Path, tmp_path: Path) -> None:
    for name, source in (("target", few), ("head", head_of(few, drafted=5))):
        (tmp_path / name).mkdir()
        told = (source / "config.json").read_text()
        (tmp_path / name / "config.json").write_text(told)
    llm = build(tmp_path / "target", tmp_path / "head", load_format="dummy")
    [output] = llm.generate([TEXT], params(max_tokens=30))
    assert len(output.outputs[0].token_ids) == 30
    assert llm.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("layers", [(0, 1, 4), (0, 1, 3), (-1, 1, 2)])
def test_hidden_states_that_the_target_lacks(few: Path, layers: tuple[int, ...]) -> None:
    """The last is normed here, and is not what heads are trained on."""
    head = head_of(few, aux_layers=layers, layout="speculators")
    message = rf"in 0\.\.2 of its target\. It reads \[{layers[0]}.*; the target has 3 layers"
    with pytest.raises(ConfigError, match=message):
        build(few, head)


def test_a_head_without_an_output_layer_takes_the_target_s(few: Path, backend: str) -> None:
    head = head_of(few, name=f"borrows {backend}", layout="model")
    tensors = load_file(head / "model.safetensors")
    del tensors["model.lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    llm = build(few, head, backend=backend)
    runner, hidden_NC = llm.engine.runner, torch.randn(3, 32)
    own = runner.drafter.head
    normed_NC = F.rms_norm(hidden_NC, (32,), own.stack.norm_C, own.stack.eps)
    borrowed = F.linear(normed_NC, runner.model.head.values)
    torch.testing.assert_close(own.logits(hidden_NC), borrowed)
    llm.generate([TEXT], params(temperature=0.0))
    assert llm.metrics.num_draft_tokens > 0
