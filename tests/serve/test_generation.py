"""What is served is what `LLM.generate` returns: streamed or not, with drafts or without."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from foretoken import LLM
from tests.serve.running import PROMPT, Running, choices, chunks, post

GREEDY = {"temperature": 0, "max_tokens": 40}
COUPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 40}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OFF, ON = {"enabled": False}, {"num_speculative_tokens": 5}
MESSAGES = [{"role": "user", "content": "def area(width, height):"}]
CHAT_PROMPT = "# def area(width, height):\n"


def expected(llm: LLM, prompt: str = PROMPT, **params: Any) -> Any:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("speculative", [OFF, ON], ids=["K=0", "K=5"])
@pytest.mark.parametrize(
    ("params", "rule"), [(GREEDY, None), (COUPLED, "coupled")], ids=["greedy", "coupled"]
)
def test_the_text_is_that_of_llm(
    http: httpx.Client, llm: LLM, params: dict[str, Any], rule: str | None, speculative: Any
) -> None:
    whole = expected(llm, num_speculative_tokens=0, rejection_sample_method=rule, **params)
    asked = {"prompt": PROMPT, "speculative": {**speculative, "rule": rule}, **params}
    answer = post(http, COMPLETIONS, **asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole.text, whole.finish_reason)
    assert answer["usage"]["completion_tokens"] == len(whole.token_ids)
    said = choices(chunks(http, COMPLETIONS, **asked))
    assert len(said) > 3
    assert "".join(c["text"] for c in said) == whole.text
    assert [c["finish_reason"] for c in said] == [None] * (len(said) - 1) + [whole.finish_reason]


@pytest.mark.parametrize("speculative", [OFF, ON], ids=["K=0", "K=5"])
def test_a_conversation_is_its_templates_prompt(
    http: httpx.Client, llm: LLM, speculative: dict[str, Any]
) -> None:
    whole = expected(llm, CHAT_PROMPT, num_speculative_tokens=0, **GREEDY)
    asked = {"messages": MESSAGES, "speculative": speculative, **GREEDY}
    (choice,) = post(http, CHAT, **asked)["choices"]
    assert choice["message"] == {"role": "assistant", "content": whole.text, "refusal": None}
    first, *said = choices(chunks(http, CHAT, **asked))
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(c["delta"].get("content", "") for c in said) == whole.text
    assert said[-1]["finish_reason"] == whole.finish_reason == "length"


def test_logprobs_are_those_without_drafts(http: httpx.Client, llm: LLM) -> None:
    whole = expected(llm, logprobs=3, num_speculative_tokens=0, **GREEDY)
    own = [row[token] for row, token in zip(whole.logprobs, whole.token_ids, strict=True)]
    logprobs = pytest.approx([entry.logprob for entry in own], abs=1e-5)
    tokens = [entry.decoded_token for entry in own]
    asked = {"prompt": PROMPT, "logprobs": 3, "speculative": ON, **GREEDY}
    (choice,) = post(http, COMPLETIONS, **asked)["choices"]
    found = choice["logprobs"]
    assert (found["tokens"], found["token_logprobs"]) == (tokens, logprobs)
    assert found["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for row, top in zip(whole.logprobs, found["top_logprobs"], strict=True):
        assert top == {e.decoded_token: pytest.approx(e.logprob, abs=1e-5) for e in row.values()}
    parts = [c["logprobs"] for c in choices(chunks(http, COMPLETIONS, **asked))]
    assert {k: [x for part in parts for x in part[k]] for k in found} == found


def test_logprobs_of_a_chat(http: httpx.Client, llm: LLM) -> None:
    whole = expected(llm, CHAT_PROMPT, logprobs=2, num_speculative_tokens=0, **GREEDY)
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}
    (choice,) = post(http, CHAT, **asked)["choices"]
    content = choice["logprobs"]["content"]
    for row, token, found in zip(whole.logprobs, whole.token_ids, content, strict=True):
        assert found["token"] == row[token].decoded_token
        assert found["logprob"] == pytest.approx(row[token].logprob, abs=1e-5)
        assert bytes(found["bytes"]).decode() == found["token"]
        best = sorted(row.values(), key=lambda entry: entry.rank)[:2]
        assert [t["token"] for t in found["top_logprobs"]] == [e.decoded_token for e in best]
    said = choices(chunks(http, CHAT, **asked))
    assert [x for c in said if c["logprobs"] for x in c["logprobs"]["content"]] == content


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens_and_steps(http: httpx.Client, llm: LLM, include: bool) -> None:
    text = expected(llm, **GREEDY).text
    stop = text[20:27]
    params = {**GREEDY, "stop": ["never there", stop], "include_stop_str_in_output": include}
    end = text.index(stop) + (len(stop) if include else 0)
    said = choices(chunks(http, COMPLETIONS, prompt=PROMPT, **params))
    assert "".join(c["text"] for c in said) == text[:end]
    assert (said[-1]["finish_reason"], said[-1]["stop_reason"]) == ("stop", stop)
    assert post(http, COMPLETIONS, prompt=PROMPT, stop=None, **GREEDY)["choices"][0]["text"] == text


def test_characters_of_several_tokens_come_whole(http: httpx.Client) -> None:
    ids = post(http, "/tokenize", prompt="é漢字🙂")["tokens"]
    assert len(ids) > 6
    forced = {"logit_bias": {str(i): 100 for i in set(ids)}, "max_tokens": 60, "seed": 3}
    asked = {"prompt": "x", "speculative": ON, **forced}
    whole = post(http, COMPLETIONS, **asked)["choices"][0]["text"]
    for options in ({}, {"split_tokens": True}):
        found = chunks(http, COMPLETIONS, stream_options=options, **asked)
        assert "".join(c["text"] for c in choices(found)) == whole != ""


def test_split_tokens_gives_each_token_its_chunk(http: httpx.Client, llm: LLM) -> None:
    whole = expected(llm, **GREEDY)
    asked = {"prompt": PROMPT, "speculative": ON, **GREEDY}
    options = {"split_tokens": True, "continuous_usage_stats": True}
    found = chunks(http, COMPLETIONS, stream_options=options, **asked)
    assert "".join(c["text"] for c in choices(found)) == whole.text
    assert len(found) == len(whole.token_ids)
    assert choices(found)[0]["logprobs"] is None
    assert found[-1]["usage"]["completion_tokens"] == len(whole.token_ids)


def test_samples_and_prompts_are_numbered(http: httpx.Client, llm: LLM) -> None:
    prompts, params = [PROMPT, "import os\n"], {"n": 2, "seed": 5, "max_tokens": 12}
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [sample.text for output in outputs for sample in output.outputs]
    answer = post(http, COMPLETIONS, prompt=prompts, **params)
    assert [c["text"] for c in answer["choices"]] == texts
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 48
    assert answer["metrics"] == {"speculative_decoding": None}
    found = chunks(http, COMPLETIONS, prompt=prompts, **params)
    streamed = ["".join(c["text"] for c in choices(found, i)) for i in range(4)]
    assert streamed == texts


def test_prompts_as_token_ids(http: httpx.Client, llm: LLM) -> None:
    whole, ids = expected(llm, **GREEDY), post(http, "/tokenize", prompt=PROMPT)["tokens"]
    assert post(http, COMPLETIONS, prompt=ids, **GREEDY)["choices"][0]["text"] == whole.text
    both = post(http, COMPLETIONS, prompt=[ids, ids], **GREEDY)["choices"]
    assert [c["text"] for c in both] == [whole.text] * 2


def test_rows_of_a_prompt_are_told_once(http: httpx.Client) -> None:
    said = {"messages": [{"role": "user", "content": "for i in range("}]}
    for path, body in (
        ("completions", {"prompt": [PROMPT, "import os"]}),
        ("chat/completions", said),
    ):
        asked = {**body, "prompt_logprobs": 3, "max_tokens": 2, "seed": 1}
        alone, *others = post(http, f"/v1/{path}", **asked)["choices"]
        several = post(http, f"/v1/{path}", n=3, **asked)["choices"]
        rows = [choice.get("prompt_logprobs") for choice in several]
        wanted = [choice["prompt_logprobs"] for choice in (alone, *others)]
        assert rows == [told for one in wanted for told in (one, None, None)]


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_begins_with_the_prompt(http: httpx.Client, llm: LLM, as_ids: bool) -> None:
    prompt: Any = post(http, "/tokenize", prompt=PROMPT)["tokens"] if as_ids else PROMPT
    whole = expected(llm, prompt_logprobs=1, **GREEDY)
    rows = llm.generate(PROMPT, {"prompt_logprobs": 1, **GREEDY}, use_tqdm=False)[0]
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, **GREEDY}
    (choice,) = post(http, COMPLETIONS, **asked)["choices"]
    assert choice["text"] == PROMPT + whole.text == "".join(choice["logprobs"]["tokens"])
    listed = [
        row and row[token].logprob
        for row, token in zip(rows.prompt_logprobs or (), rows.prompt_token_ids, strict=True)
    ]
    found = choice["logprobs"]["token_logprobs"][: len(listed)]
    assert found[0] is listed[0] is None
    assert found[1:] == pytest.approx(listed[1:], abs=1e-5)
    said = choices(chunks(http, COMPLETIONS, **asked))
    assert "".join(c["text"] for c in said) == choice["text"]
    offsets = [offset for c in said for offset in c["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]


def test_usage_and_metrics_of_a_stream(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(http, COMPLETIONS, prompt=PROMPT, stream_options=options, **GREEDY)
    *before, last = found
    counts = [chunk["usage"]["completion_tokens"] for chunk in before]
    assert counts == sorted(counts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == counts[-1] == 40
    metrics = last["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 == 6
    assert sum(histogram) == metrics["num_spec_steps"] > 0
    accepted = sum(i * count for i, count in enumerate(histogram))
    assert accepted == metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
    assert metrics["mean_acceptance_length"] == 1 + accepted / metrics["num_spec_steps"]
    plain = chunks(http, COMPLETIONS, prompt=PROMPT, stream_options={"include_usage": True},
                   speculative=OFF, **GREEDY)  # fmt: skip
    assert plain[-1]["metrics"] == {"speculative_decoding": None}
    assert {chunk["usage"] is None for chunk in plain[:-1]} == {True}


def test_a_prediction_is_counted(http: httpx.Client, llm: LLM) -> None:
    whole = expected(llm, CHAT_PROMPT, **GREEDY)
    asked = {"messages": MESSAGES, "prediction": {"type": "content", "content": whole.text}}
    answer = post(http, CHAT, **asked, **GREEDY)
    assert answer["choices"][0]["message"]["content"] == whole.text
    details = answer["usage"]["completion_tokens_details"]
    assert 20 < details["accepted_prediction_tokens"] <= 40
    other = {"type": "content", "content": [{"type": "text", "text": "x = 1\n" * 9}]}
    details = post(http, CHAT, **{**asked, "prediction": other}, **GREEDY)["usage"]
    assert details["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_a_trace_tells_how_each_token_came(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "speculative": {"trace": True}, **GREEDY}
    trace = post(http, COMPLETIONS, **asked)["choices"][0]["trace"]
    assert len(trace) == 40
    assert {"accepted", "bonus"} < {token["origin"] for token in trace} | {"bonus"}
    said = choices(chunks(http, COMPLETIONS, **asked))
    assert [t["token_id"] for c in said for t in c["trace"]] == [t["token_id"] for t in trace]


def test_the_official_client(client: openai.OpenAI, llm: LLM) -> None:
    whole = expected(llm, **GREEDY)
    done = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert done.choices[0].text == whole.text
    usage = {"include_usage": True}
    stream = client.chat.completions.create(
        model="other", messages=MESSAGES, stream=True, stream_options=usage, **GREEDY
    )
    *said, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in said)
    assert text == expected(llm, CHAT_PROMPT, **GREEDY).text
    assert last.usage is not None
    assert last.usage.completion_tokens == 40
    assert [model.id for model in client.models.list()] == ["tiny", "other"]


def test_the_official_client_in_many_tasks(server: Running, llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    prompts = [f"def f{i}(x):\n" for i in range(24)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert asyncio.run(main()) == [output.outputs[0].text for output in outputs]
