"""Outputs match their grammar, and have the distribution that the masks make of the target's.

A target of five letters, so that drafts are often allowed, and strings that share prefixes, so that
there are six outcomes: their law is computed from Transformers' logits and from the strings alone.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foretoken import LLM, AsyncEngine, SamplingParams
from foretoken.errors import RequestError
from foretoken.lab.laws.findings import CORRECT_P, MUTANT_P, goodness_of_fit
from foretoken.ops import DraftBlock, DraftCache, Noise, Rows
from foretoken.ops.steps import DraftRequests
from foretoken.outputs import RequestOutput
from foretoken.sampling.grammar import fill_masks
from foretoken.sampling.history import Array
from tests.engine.doubles import double
from tests.models.heads import head_of
from tests.support.checkpoints import save_checkpoint

LETTERS, END, WIDTH = "abcde", 5, 8  # two more logits than tokens
CHOICES = ["ab", "abc", "abd", "ba", "bda", "eeee"]
PROMPT = "abdbabcab"
RULES = ("standard", "block", "coupled")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                  "additionalProperties": False},
    },
    "required": ["name", "size", "kinds", "inner"],
    "additionalProperties": False,
}  # fmt: skip


def save_letters(folder: Path, seed: int) -> Path:
    save_checkpoint(folder, seed=seed, vocabulary=WIDTH, tokenizer=False, spread=0.15)
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>").save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**told, "eos_token_id": END}))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("letters")
    return save_letters(root / "target", 1), save_letters(root / "draft", 2)


def build(pair: tuple[Path, Path], method: str | None, **options: Any) -> LLM:
    target, draft = pair
    paths = {"draft_model": draft, "eagle3": head_of(target)}
    spec: dict[str, Any] | None = None
    if method:
        spec = {"method": method, "num_speculative_tokens": 3}
        spec |= {"model": str(paths[method])} if method in paths else {}
        spec |= {"prompt_lookup_min": 1} if method == "ngram" else {}
    return LLM(str(target), spec, max_num_seqs=256, num_blocks=2000, **options)


@functools.cache
def law_of(folder: Path, temperature: float) -> dict[str, float]:
    """The probability of each choice: at every letter, softmax over what may stand there."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = dict.fromkeys(CHOICES, 0.0)

    def follow(text: str, weight: float) -> None:
        if CHOICES.count(text) and not any(c != text and c.startswith(text) for c in CHOICES):
            found[text] = weight  # nothing but the end may follow
            return
        ids = [LETTERS.index(letter) for letter in PROMPT + text]
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        ways = sorted({c[len(text)] for c in CHOICES if c.startswith(text) and c != text})
        allowed = [LETTERS.index(way) for way in ways] + [END] * (text in CHOICES)
        shares = torch.softmax(logits[allowed] / temperature, 0).tolist()
        for way, share in zip(ways, shares, strict=False):
            follow(text + way, weight * share)
        if text in CHOICES:
            found[text] = weight * shares[-1]

    with torch.no_grad():
        follow("", 1.0)
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) > 0.005, found
    return found


def p_value(llm: LLM, rule: str | None, law: dict[str, float], trials: int, **asked: Any) -> float:
    params = SamplingParams(
        n=128, max_tokens=8, temperature=0.8, rejection_sample_method=rule,
        structured_outputs={"choice": CHOICES}, **asked,
    )  # fmt: skip
    outputs = llm.generate([PROMPT] * (trials // 128), params)
    seen = Counter(c.text for output in outputs for c in output.outputs)
    if seen.keys() - law.keys():
        return 0.0
    return goodness_of_fit([seen[c] for c in CHOICES], list(law.values())).p_value


TRIALS = 128 * 24


FEW = {"draft_model": RULES, "eagle3": RULES[:1], "ngram": RULES[1:2], "forced": RULES[2:3]}


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        pytest.param(method, rule, marks=() if rule in few else pytest.mark.law)
        for method, few in FEW.items()
        for rule in RULES
    ],
)
def test_speculation_keeps_the_law_of_the_masked_target(
    pair: tuple[Path, Path], method: str, rule: str
) -> None:
    law = law_of(pair[0], 0.8)
    llm = build(pair, method)
    trials = TRIALS if (method, rule) != ("draft_model", "standard") else 2 * TRIALS
    assert p_value(llm, rule, law, trials) > CORRECT_P
    assert llm.metrics.num_accepted_tokens > 0
    if rule == "standard" and method == "draft_model":
        assert p_value(llm, None, law, TRIALS, num_speculative_tokens=0) > CORRECT_P


@contextmanager
def shifted(llm: LLM) -> Iterator[None]:
    """Every row has the mask of the one before it."""

    def shifted(*given: Any) -> list[Array]:
        return [mask_RW[[0, *range(len(mask_RW) - 1)]] for mask_RW in fill_masks(*given)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.sampling.edits.fill_masks", shifted)
        yield


@contextmanager
def ends_at_invalid(llm: LLM) -> Iterator[None]:
    """Drafts end before the first one that was sampled and is not allowed."""
    runner, running = llm.engine.runner, llm.engine.scheduler.running

    def cut(propose: Callable[[DraftRequests], DraftBlock], asked: DraftRequests) -> DraftBlock:
        block = propose(asked)
        for row, slot in enumerate(asked.slot_B.tolist()):
            drafts = block.token_BK[row, : block.num_B[row]].tolist()
            (history,) = [request.history for request in running if request.slot == slot]
            assert history is not None
            matcher = history.matcher
            assert matcher is not None
            size = matcher.state.validate_tokens(drafts)
            block.num_B[row], block.token_BK[row, size:] = size, -1
        return block

    with double(runner, "drafter", propose=cut), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.drafter.real, "_mask", lambda logits, *given: logits)
        yield


def keeps_unmasked_q(llm: LLM) -> AbstractContextManager[Any]:
    """Drafts are drawn from the masked q, and weighed by the one without the mask."""

    def unmasked(
        draft: Callable[..., torch.Tensor], rows: Rows, noise: Noise, cache: DraftCache | None
    ) -> torch.Tensor:
        drawn = draft(rows, noise, cache)
        if cache is not None:
            index = (rows.slot_N, noise.draft_index_N)
            raw_NV = rows.logits_NV.masked_fill(rows.logits_NV.isinf(), 0.0)
            cache.logits_SKV[index] = raw_NV
            temperature_N = rows.params.temperature_S[rows.slot_N, None]
            cache.lse_SK[index] = (raw_NV.double() / temperature_N).logsumexp(1)
        return drawn

    return double(llm.engine.runner.drafter, "backend", draft=unmasked)


@pytest.mark.parametrize("mutant", [shifted, ends_at_invalid, keeps_unmasked_q])
def test_mutants_of_the_masks_are_rejected(
    pair: tuple[Path, Path], mutant: Callable[[LLM], AbstractContextManager[Any]]
) -> None:
    law, llm = law_of(pair[0], 0.8), build(pair, "draft_model")
    trials = 2 * TRIALS if mutant is ends_at_invalid else TRIALS  # that one is hard to tell
    with mutant(llm):
        assert p_value(llm, "standard", law, trials) < MUTANT_P


def check_json(output: RequestOutput) -> int:
    """How many samples were not cut by length; every one of them must be right."""
    assert output.error is None
    whole = [c.text for c in output.outputs if c.finish_reason != "length"]
    for text in whole:
        told = json.loads(text)
        assert list(told) == ["name", "size", "kinds", "inner"]
        assert isinstance(told["name"], str)
        assert len(told["name"]) <= 12
        assert told["size"] in range(100)
        assert len(told["kinds"]) <= 3
        assert set(told["kinds"]) <= {"a", "bb", "ccc"}
        assert list(told["inner"]) == ["ok"]
        assert isinstance(told["inner"]["ok"], bool)
    return len(whole)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(
        "tiny-python", {"method": "draft_model", "num_speculative_tokens": 5}, num_blocks=2000
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_the_embedded_pair_is_valid(tiny: LLM, temperature: float) -> None:
    prompts = [f"def f{i}(x):\n" for i in range(50)]
    asked = SamplingParams(
        temperature=temperature, max_tokens=120, structured_outputs={"json": SCHEMA}
    )
    outputs = tiny.generate(prompts, [replace(asked, seed=i) for i in range(len(prompts))])
    assert sum(map(check_json, outputs)) >= 48
    plain = tiny.generate(prompts[:8], replace(asked, num_speculative_tokens=0, seed=3))
    again = tiny.generate(prompts[:8], replace(asked, seed=3))
    if temperature == 0:
        assert [o.outputs[0].text for o in plain] == [o.outputs[0].text for o in again]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_grammar_in_the_batch_changes_no_other_text(pair: tuple[Path, Path], method: str) -> None:
    llm = build(pair, method)
    plain = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True) for i in range(6)]
    guided = [replace(one, structured_outputs={"regex": "[a-d]{9,20}e"}) for one in plain]
    both = [one for two in zip(guided, plain, strict=True) for one in two]
    together = llm.generate([PROMPT] * 12, both)
    apart = [llm.generate(PROMPT, one)[0] for one in both]
    for one, other in zip(together, apart, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.metrics.accepted_per_position == other.metrics.accepted_per_position
    assert sum(output.metrics.num_accepted_tokens for output in together[::2]) > 0


def one(llm: LLM, asked: dict[str, Any], **params: Any) -> RequestOutput:
    given = SamplingParams(structured_outputs=asked, **{"max_tokens": 30, "seed": 1, **params})
    (output,) = llm.generate(["def f"], given, on_error="return")
    return output


def test_white_space_is_what_is_asked_for(tiny: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    found = {}
    for name, asked in {
        "compact": {},
        "pattern": {"whitespace_pattern": "\n? ?"},
        "any": {"disable_any_whitespace": False},
    }.items():
        params = SamplingParams(structured_outputs={"json": schema, **asked}, max_tokens=30, n=16,
                                seed=1, temperature=1.5)  # fmt: skip
        (output,) = tiny.generate(["x = "], params)
        done = [one.text for one in output.outputs if one.finish_reason == "stop"]
        assert all(json.loads(text).keys() == {"a", "b"} for text in done)
        found[name] = [re.sub(r'[{}":,a-z]+', "|", text) for text in done]
    assert set(found["compact"]) == {"|"}
    assert len(found["compact"]) == 16, "none is cut"
    assert all(re.fullmatch(r"(\|(\n? ?))*", text) for text in found["pattern"])
    assert any(" " in text for text in found["pattern"])
    assert len(found["any"]) < 16


GBNF = r"""# a list of expressions
root ::= expr ("; " expr){2}
expr ::= term ([-+] term)?  # of terms
term ::= [1-9] [0-9]{0,2} | "(" expr ")"
"""


def test_gbnf_is_translated(tiny: LLM) -> None:
    output = one(tiny, {"grammar": GBNF}, n=32, max_tokens=60)
    done = [each.text for each in output.outputs if each.finish_reason == "stop"]
    assert done
    for text in done:
        assert len(text.split("; ")) == 3
        assert re.fullmatch(r"[-+0-9(); ]+", text)
        assert all(isinstance(eval(term), int) for term in text.split("; "))


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (r'"\u0041bcd\x21"', ["Abcd!"]),
        (r'"\u00e9\U0001F600"', ["\u00e9\U0001f600"]),
        (r'"\u0022\x5C\u000a\"" # "[\u0041', ['"\\\n"']),
        (r"[\u00e0-\u00e1]", ["\u00e0", "\u00e1"]),
        (r"[\x5d\x2d\x5ea-\u0062\\]", ["]", "-", "^", "a", "b", "\\"]),
        (r"[^\u0000-\x40B-\U0010FFFF]", ["A"]),
        ("[a-b&&b-c/]", ["a", "b", "&", "c", "/"]),
    ],
)
def test_characters_of_gbnf_are_those_that_it_means(
    tiny: LLM, grammar: str, texts: list[str]
) -> None:
    output = one(tiny, {"grammar": f"root ::= {grammar}"}, n=16, max_tokens=12)
    assert {each.text for each in output.outputs} <= {*texts}
    for text in texts:
        only = {"allowed_token_ids": tiny.get_tokenizer().encode(text)}  # type: ignore[union-attr]
        assert one(tiny, {"grammar": f"root ::= {grammar}"}, **only).outputs[0].text == text


def test_a_dot_of_gbnf_is_any_character(tiny: LLM) -> None:
    line = tiny.get_tokenizer().encode("\n")  # type: ignore[union-attr]
    output = one(tiny, {"grammar": "root ::= . . ."}, allowed_token_ids=line)
    assert output.outputs[0].text == "\n\n\n"


def test_the_end_of_a_grammar_ends_the_request(tiny: LLM) -> None:
    done = one(tiny, {"choice": ["yes"]}).outputs[0]
    assert (done.text, done.finish_reason) == ("yes", "stop")
    kept = one(tiny, {"choice": ["yes"]}, ignore_eos=True).outputs[0]
    assert (kept.text, kept.finish_reason) == ("yes", "stop")
    cut = one(tiny, {"regex": "[0-9]{40}"}, max_tokens=5).outputs[0]
    assert cut.finish_reason == "length"
    stopped = one(tiny, {"choice": ["one, two"]}, stop=[","]).outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("one", "stop", ",")
    long = one(tiny, {"regex": "a+"}, min_tokens=6).outputs[0]
    assert len(long.token_ids) >= 6
    assert set(long.text) == {"a"}


@pytest.mark.parametrize(
    ("asked", "params", "named"),
    [
        ({"choice": ["yes"]}, {"min_tokens": 20}, "structured_outputs, min_tokens"),
        ({"choice": ["yes"]}, {"bad_words": ["yes", "y", "ye"]}, "structured_outputs, bad_words"),
        ({"choice": ["yes"]}, {"allowed_token_ids": [91]}, "structured_outputs, allowed_token_ids"),
    ],
)
def test_parameters_that_leave_no_token_are_blamed_alone(
    tiny: LLM, asked: dict[str, Any], params: dict[str, Any], named: str
) -> None:
    bad = SamplingParams(max_tokens=30, structured_outputs=asked, **params)
    good = SamplingParams(max_tokens=30, structured_outputs={"choice": ["no"]})
    first, second = tiny.generate(["x", "y"], [bad, good])
    assert isinstance(first.error, RequestError)
    assert first.error.field == named
    assert second.outputs[0].text == "no"


def test_async_engine_and_synthetic(pair: tuple[Path, Path]) -> None:
    async def ask() -> None:
        spec = {"model": str(pair[1]), "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rate": 0.5}  # fmt: skip
        async with AsyncEngine(str(pair[0]), spec, num_blocks=100) as engine:
            asked: dict[str, Any] = {"structured_outputs": {"choice": CHOICES}}
            with pytest.raises(RequestError, match="synthetic"):
                _ = [o async for o in engine.generate("a", asked)]
            asked["rejection_sample_method"] = "standard"
            outputs = [o async for o in engine.generate("a", asked)]
            assert outputs[-1].outputs[0].text in CHOICES
            asked["structured_outputs"] = {"json": {"oneOf": [{}, {}]}}
            with pytest.raises(RequestError, match="oneOf constraints"):
                _ = [o async for o in engine.generate("a", asked)]

    asyncio.run(ask())
