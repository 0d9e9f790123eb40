"""Scripts as vLLM's users write them, after its documented examples: only the import changes."""

from __future__ import annotations

from pathlib import Path

import pytest

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
""",
    "log-probabilities": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_import_changed(name: str, model: Path) -> None:
    script = SCRIPTS[name].replace("from vllm import", "from foretoken import")
    assert script != SCRIPTS[name]
    exec(compile(script, name, "exec"), {"MODEL": str(model)})
