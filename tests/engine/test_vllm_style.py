"""Scripts as vLLM's users write them, after its documented examples: only the import changes."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken import (
    LLM,
    AbsentError,
    AsyncEngine,
    ConfigError,
    EngineConfig,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputsParams,
)
from foretoken.drafting.registry import find_drafter
from foretoken.foreign import (
    CALL_OPTIONS,
    ENGINE_OPTIONS,
    METHODS,
    NAMES,
    OUTPUTS,
    PROMPT_KEYS,
    SERVER_OPTIONS,
    SPECULATIVE_FIELDS,
    SPECULATIVE_METHODS,
    Foreign,
)
from foretoken.serve.options import ServeOptions
from tests.support.asynchronous import last
from tests.support.checkpoints import save_checkpoint

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | length }} {% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

SCRIPTS = {
    "basic": """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=MODEL)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [output.prompt for output in outputs] == prompts
assert all(len(output.outputs[0].token_ids) == 16 and output.finished for output in outputs)
""",
    "engine arguments": """
from vllm import LLM, SamplingParams

llm = LLM(
    MODEL, dtype="float", tensor_parallel_size=1, gpu_memory_utilization=0.9, enforce_eager=True,
    trust_remote_code=False, quantization=None, swap_space=4, disable_log_stats=True,
    task="generate", runner="auto", max_model_len=128, seed=None, enable_chunked_prefill=True,
    speculative_config={
        "model": MODEL, "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1
    },
)
outputs = llm.generate(
    "Hello", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False
)
assert len(outputs[0].outputs[0].token_ids) == 128 - len("Hello")
assert outputs[0].outputs[0].finish_reason == "length"
""",
    "default parameters": """
from vllm import LLM

args = {"model": MODEL, "generation_config": "auto"}
llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 5
sampling_params.temperature = 0.5
outputs = llm.generate(["Hello, my name is"], sampling_params)
assert len(outputs[0].outputs[0].token_ids) == 5
assert llm.get_default_sampling_params().max_tokens == 16, "a copy was changed"
""",
    "seeds": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
first, second, other = llm.generate(
    ["Hello"] * 3, [SamplingParams(seed=seed, max_tokens=8) for seed in (42, 42, 43)]
)
assert first.outputs[0].token_ids == second.outputs[0].token_ids
assert first.outputs[0].token_ids != other.outputs[0].token_ids
llm.generate("Hello", SamplingParams(seed=None, stop=None, stop_token_ids=None, n=2))
(some,) = llm.generate("Hello", SamplingParams(n=3, seed=-1, max_tokens=5))
assert len(some.outputs) == 3
""",
    "log-probabilities": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, seed=0, max_logprobs=20)
tokenizer = llm.get_tokenizer()
params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
(output,) = llm.generate("Hello", params)
(sample,) = output.outputs
total = 0.0
for token, step in zip(sample.token_ids, sample.logprobs):
    best = min(step.values(), key=lambda entry: entry.rank)
    assert step[token].rank == 1 and best.decoded_token == tokenizer.decode([token])
    total += step[token].logprob
assert abs(sample.cumulative_logprob - total) < 1e-9
assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len("Hello")
""",
    "dict prompts": """
from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model=MODEL)
ids = llm.get_tokenizer().encode("Hello")
params = SamplingParams(temperature=0.0, max_tokens=4)
outputs = llm.generate(
    [{"prompt": "Hello"}, {"prompt_token_ids": ids}, TokensPrompt(prompt_token_ids=ids)], params
)
assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
assert [output.prompt for output in outputs] == ["Hello", None, None]
assert all(output.prompt_token_ids == ids for output in outputs)
assert llm.generate({"prompt": "Hello"}, params)[0].prompt == "Hello"
""",
    "chat": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": [{"type": "text", "text": "Write an essay."}]},
]
sampling_params = SamplingParams(max_tokens=4)
(output,) = llm.chat(conversation, sampling_params, use_tqdm=False)
assert output.prompt.endswith("<user>Write an essay.\\n<assistant>")
assert len(llm.chat([conversation] * 3, sampling_params, use_tqdm=True)) == 3
(other,) = llm.chat(conversation, sampling_params, chat_template="{{ messages[1].content }}")
assert other.prompt == "Hello"
""",
    "chat with tools": """
from vllm import LLM
from vllm import SamplingParams

llm = LLM(model=MODEL)
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
messages = [{"role": "user", "content": "How warm is it in Dallas?"}]
outputs = llm.chat(messages, sampling_params=SamplingParams(max_tokens=4), tools=tools)
assert outputs[0].prompt.startswith("<tools>1 <user>")
call = {"name": "weather", "arguments": '{"city": "Dallas"}'}
messages += [
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "a", "type": "function", "function": call}]},
    {"role": "tool", "content": "85 degrees", "tool_call_id": "a", "name": "weather"},
]
outputs = llm.chat(messages, SamplingParams(max_tokens=4), tools=tools)
assert "<assistant>Dallas\\n<tool>85 degrees\\n<assistant>" in outputs[0].prompt
""",
}

EMBEDDED = {
    "a batch of parameters": """
from vllm import LLM, SamplingParams

llm = LLM(
    model=MODEL, max_num_seqs=None, gpu_memory_utilization=0.5, trust_remote_code=True,
    disable_log_stats=False, max_num_batched_tokens=None, enable_prefix_caching=None, dtype="auto",
)
base = SamplingParams.from_optional(temperature=0.0, max_tokens=6, top_k=None, seed=None)
longer = base.clone()
longer.max_tokens = 12
one, two = llm.generate(["def area(a, b):"] * 2, [base, longer], use_tqdm=False)
assert two.outputs[0].token_ids[:6] == one.outputs[0].token_ids
assert base.max_tokens == 6 and len(two.outputs[0].token_ids) == 12
""",
    "prefix caching": """
from vllm import LLM, SamplingParams

prefix = "def area(width, height):\\n    # the area of a rectangle is a product\\n    return " * 2
prompts = [prefix + "width", prefix + "height", prefix + "a * b"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=4)
regular = LLM(model=MODEL, enable_prefix_caching=False)
expected = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
llm = LLM(model=MODEL, enable_prefix_caching=True)
llm.generate(prompts[0], sampling_params)
outputs = llm.generate(prompts, sampling_params)
assert [output.outputs[0].text for output in outputs] == expected
assert all(output.num_cached_tokens >= 32 for output in outputs)
(salted,) = llm.generate({"prompt": prompts[0], "cache_salt": "tenant"}, sampling_params)
assert salted.num_cached_tokens == 0 and salted.outputs[0].text == expected[0]
assert llm.reset_prefix_cache()
assert llm.generate(prompts[0], sampling_params)[0].num_cached_tokens == 0
""",
    "structured outputs": """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL, max_model_len=256)


def answer(prompt, **structure):
    sampling_params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**structure), max_tokens=60, temperature=0.0
    )
    return llm.generate(prompt, sampling_params=sampling_params)[0].outputs[0].text


assert answer("# Is it so?", choice=["Yes", "No"]) in ("Yes", "No")
assert len(answer("# A year:", regex="[0-9]{4}")) == 4
schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}
assert answer("# JSON:", json=schema).startswith("{")
""",
    "speculative decoding": """
from vllm import LLM, SamplingParams

prompts = ["def area(width, height):\\n    return width * height\\n\\n\\ndef area2(width, height):"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
expected = LLM(model=MODEL).generate(prompts, sampling_params)[0].outputs[0].token_ids
for speculative_config in (
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    {"method": "draft_model", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1},
    {"method": "suffix", "num_speculative_tokens": 4},
):
    llm = LLM(model=MODEL, tensor_parallel_size=1, speculative_config=speculative_config)
    (output,) = llm.generate(prompts, sampling_params)
    assert output.outputs[0].token_ids == expected
    assert output.metrics.num_drafts > 0
    llm.close()
for method in ("mtp", "deepseek_mtp", "eagle", "medusa", "dflash"):
    try:
        LLM(model=MODEL, speculative_config={"method": method, "num_speculative_tokens": 2})
    except ValueError as error:
        assert "not served. Take `draft_model`, `eagle3`" in str(error)
        assert "Did you mean" not in str(error)
    else:
        assert False, method
""",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(script: str, model: str) -> None:
    changed = re.sub("^from vllm[.a-z_]* import", "from foretoken import", script, flags=re.M)
    assert "vllm" not in changed
    exec(compile(changed, "script", "exec"), {"MODEL": model})


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_import_changed(name: str, model: Path) -> None:
    run(SCRIPTS[name], str(model))


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_script_runs_on_the_embedded_model(name: str) -> None:
    run(EMBEDDED[name], "tiny-python")


@pytest.mark.parametrize("name", NAMES)
def test_a_class_that_is_absent_says_what_to_write_when_it_is_used(name: str) -> None:
    given: dict[str, Any] = {}
    exec(f"from foretoken import {name}", given)
    absent, told = given[name], re.escape(NAMES[name])
    assert not isinstance(1, absent)
    assert absent | None  # as annotations have it
    for use in (lambda: absent("model", tensor_parallel_size=1), lambda: absent.from_engine_args):
        with pytest.raises(AbsentError, match=rf"Foretoken has no `{name}.*{told}"):
            use()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_absent_says_what_to_write(name: str, llm: LLM) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AbsentError, match=f"`LLM` has no attribute `{name}`") as caught:
        getattr(llm, name)
    assert METHODS[name] in str(caught.value)


def test_what_else_is_absent_is_absent_as_in_any_module(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nowhere'"):
        foretoken.Nowhere  # noqa: B018
    with pytest.raises(AbsentError, match=r"`LLM` has no attribute `nowhere`\.$"):
        llm.nowhere()
    with pytest.raises(RequestError, match=r"as the prompt: \{'prompt_token_ids': ids\}"):
        llm.generate(prompt_token_ids=[[1, 2]])
    with pytest.raises(RequestError, match="given as keyword arguments"):
        SamplingParams(0.8, 0.95)


def test_no_option_of_ours_is_foreign() -> None:
    assert not ENGINE_OPTIONS.keys() & EngineConfig.__dataclass_fields__.keys()
    assert not SERVER_OPTIONS.keys() & {*ServeOptions.__dataclass_fields__, *ENGINE_OPTIONS}
    assert not SPECULATIVE_FIELDS.keys() & SpeculativeConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize(("name", "foreign"), ENGINE_OPTIONS.items())
def test_an_engine_option_is_taken_where_it_changes_nothing(name: str, foreign: Foreign) -> None:
    plain = EngineConfig.parse(model="x")
    for value in (None, *foreign.harmless):
        assert EngineConfig.parse(model="x", **{name: value}) == plain
    if ... in foreign.harmless:
        assert EngineConfig.parse(model="x", **{name: ["?"]}) == plain
        return
    with pytest.raises(ConfigError, match=re.escape(f"`{name}` is ['?']: must be left out")) as got:
        EngineConfig.parse(model="x", **{name: ["?"]})
    assert got.value.remedy == foreign.instead


@pytest.mark.parametrize(("name", "foreign"), SPECULATIVE_FIELDS.items())
def test_a_speculative_option_is_named_as_one(name: str, foreign: Foreign) -> None:
    for value in (None, *foreign.harmless):
        assert EngineConfig.parse(model="x", speculative_config={"method": "ngram", name: value})
    for given in ({"method": "ngram", name: ["?"]}, {"drafters": [{"method": "ngram", name: 5.5}]}):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.parse(model="x", speculative_config=given)
        assert caught.value.field.endswith(f".{name}")
        assert caught.value.field.startswith("speculative_config.")
        assert caught.value.remedy == foreign.instead


@pytest.mark.parametrize(("name", "foreign"), CALL_OPTIONS.items())
def test_an_option_of_a_call_is_taken_where_it_changes_nothing(
    name: str, foreign: Foreign, llm: LLM
) -> None:
    for value in (None, *foreign.harmless):
        assert llm.generate([], **{name: value}) == []
    with pytest.raises(RequestError, match=re.escape(f"`{name}` is ['?']: must be left")) as got:
        llm.generate([], **{name: ["?"]})
    assert got.value.remedy == foreign.instead


@pytest.mark.parametrize(("name", "foreign"), PROMPT_KEYS.items())
def test_a_key_of_a_prompt_is_taken_where_it_changes_nothing(
    name: str, foreign: Foreign, llm: LLM
) -> None:
    one = SamplingParams(max_tokens=1)
    for value in (None, *foreign.harmless):
        (output,) = llm.generate({"prompt": "a", name: value}, one)
        assert output.prompt == "a"
    with pytest.raises(RequestError, match=re.escape(f"`{name}` is ['?']: must be left")) as got:
        llm.generate({"prompt": "a", name: ["?"]}, one)
    assert got.value.remedy == foreign.instead


@pytest.mark.parametrize("name", [*SPECULATIVE_METHODS, "qwen3_next_mtp"])
def test_a_method_that_is_none_here_says_what_to_take(name: str) -> None:
    told = re.escape(f"`speculative_config.method` is '{name}': must be one of draft_model")
    with pytest.raises(ConfigError, match=told) as got:
        find_drafter(SpeculativeConfig(method=name))
    assert got.value.remedy == SPECULATIVE_METHODS.get(name, SPECULATIVE_METHODS["mtp"])


def test_what_outputs_lack_says_what_to_read(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(max_tokens=2))
    owners = {"metrics": output.metrics, "output": output, "sample": output.outputs[0]}
    assert output.outputs[0].finished()
    for name, told in OUTPUTS.items():
        for owner in (*owners.values(), SamplingParams()):
            with pytest.raises(AbsentError, match=f"`{name}`") as caught:
                getattr(owner, name)
            assert told in str(caught.value)
            assert not hasattr(owner, name)
    assert copy.deepcopy(output) == pickle.loads(pickle.dumps(output)) == output


def test_options_of_our_classes_are_checked_when_they_are_built() -> None:
    assert EngineConfig("x", tensor_parallel_size=1) == EngineConfig("x")
    for build in (lambda: EngineConfig("x", nowhere=1), lambda: SpeculativeConfig(nowhere=1)):
        with pytest.raises(ConfigError, match="nowhere` is 1: must be left out: there is no such"):
            build()
    with pytest.raises(RequestError, match=r"structured_outputs\.jsn` is .*Did you mean `json`"):
        StructuredOutputsParams(jsn={})
    with pytest.raises(ConfigError, match=r"`speculative_config\.fly_window_size` is 6: must"):
        SpeculativeConfig(method="ngram", fly_window_size=6)
    with pytest.raises(ConfigError, match="there is no such name"):
        SpeculativeConfig.parse({"method": "ngram", 5: 6})  # type: ignore[dict-item]
    nothing = {f.name: None for f in fields(SpeculativeConfig)}
    assert SpeculativeConfig.parse({**nothing, "method": "ngram"}) == SpeculativeConfig("ngram")
    assert SamplingParams(output_kind=RequestOutputKind.CUMULATIVE) == SamplingParams()
    with pytest.raises(RequestError, match=r"`output_kind` is .*DELTA: 1.*deltas=True"):
        SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert StructuredOutputsParams({"type": "object"}).given == {"json": {"type": "object"}}
    loose = StructuredOutputsParams(json={}, disable_any_whitespace=False)
    as_map = {"json": {}, "disable_any_whitespace": False}
    assert SamplingParams(structured_outputs=loose) == SamplingParams(structured_outputs=as_map)
    assert SamplingParams(structured_outputs=loose) != SamplingParams(
        structured_outputs={"json": {}}
    )
    with pytest.raises(RequestError, match="exactly one of json"):
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"], regex="a"))


def test_an_async_engine_says_the_same(model: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(str(model)) as engine:
            for name in ("do_log_stats", "check_health", "add_lora", "sleep"):
                with pytest.raises(AbsentError, match=f"`AsyncEngine` has no attribute `{name}`"):
                    getattr(engine, name)
            prompt, asked = list(b"abcdefgh" * 8), SamplingParams(temperature=0, max_tokens=2)
            cached = [(await last(engine, prompt, asked)).num_cached_tokens for _ in range(2)]
            assert await engine.reset_prefix_cache(reset_running_requests=True)
            cached.append((await last(engine, prompt, asked)).num_cached_tokens)
            assert cached == [0, 48, 0]

    asyncio.run(main())


def test_what_is_unknown_is_named_with_its_value() -> None:
    with pytest.raises(ConfigError, match=r"`speculative_config.window` is 6: must be left out: "):
        EngineConfig.parse(model="x", speculative_config={"method": "ngram", "window": 6})
    with pytest.raises(RequestError, match=r"`sampling_params.top_q` is 0.5: .* `top_p`\? Known"):
        SamplingParams.parse({"top_q": 0.5})


def test_the_share_of_a_gpus_memory_has_two_names() -> None:
    assert EngineConfig.parse(model="x", gpu_memory_utilization=0.5).memory_fraction == 0.5
    both = {"gpu_memory_utilization": 0.5, "memory_fraction": 0.5}
    assert EngineConfig.parse(model="x", **both).memory_fraction == 0.5
    with pytest.raises(ConfigError, match="left out, or equal to `memory_fraction`"):
        EngineConfig.parse(model="x", **{**both, "memory_fraction": 0.6})
    with pytest.raises(ConfigError, match=r"`gpu_memory_utilization` is 1.5: .* \[0.01, 1\]"):
        EngineConfig.parse(model="x", gpu_memory_utilization=1.5)


def test_names_of_what_is_read_anyway() -> None:
    for name in ("safetensors", "hf"):
        assert EngineConfig.parse(model="x", load_format=name) == EngineConfig("x")
    with pytest.raises(ConfigError, match="`load_format` is 'gguf': must be one of auto, dummy"):
        EngineConfig.parse(model="x", load_format="gguf")


def test_none_is_the_default_of_every_option() -> None:
    for field in fields(EngineConfig):
        if field.name != "model":
            assert EngineConfig.parse(model="x", **{field.name: None}) == EngineConfig(model="x")


def test_code_of_a_checkpoint_is_not_run_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.parse(model="x", trust_remote_code=False)
    assert caplog.messages == []
    EngineConfig.parse(model="x", trust_remote_code=True)
    assert "code from a checkpoint is never run" in caplog.text
