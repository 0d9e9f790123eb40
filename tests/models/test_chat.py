"""Conversations: rendered by the checkpoint's template, or refused with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import RequestError
from tests.support.checkpoints import save_checkpoint

# Begins with the end-of-text token, as templates begin with their beginning-of-text token.
TEMPLATE = """{{ eos_token }}{% for m in messages -%}
{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System comes first') }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
USER = {"role": "user", "content": "abc"}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a template, and a tokenizer that puts a token before every text."""
    folder = save_checkpoint(tmp_path_factory.mktemp("chat"), seed=1)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_blocks=64)


def test_a_conversation_is_its_rendered_text(llm: LLM) -> None:
    system = {"role": "system", "content": "Be brief."}
    (output,) = llm.chat([system, USER], GREEDY)
    text = "<|end|><system>Be brief.\n<user>abc\n<assistant>"
    assert output.prompt == text
    encode = llm.tokenizer.encode  # type: ignore[union-attr]
    assert output.prompt_token_ids == encode(text, add_special_tokens=False)
    assert encode(text)[:2] == [256, 256], "the tokenizer itself would double the token"
    (same,) = llm.generate([output.prompt_token_ids], GREEDY)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert output.outputs[0].text


def test_options_reach_the_template(llm: LLM) -> None:
    (plain,) = llm.chat([USER], GREEDY, add_generation_prompt=False)
    assert plain.prompt == "<|end|><user>abc\n"
    (other,) = llm.chat([USER], GREEDY, chat_template="[{{ messages[0].content }}]")
    assert other.prompt == "[abc]"


def test_parts_are_joined_or_kept_as_the_template_reads_them(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    talk = [{"role": "user", "content": parts}]
    assert "<user>a\nb\nc\n" in str(llm.chat(talk, GREEDY)[0].prompt)
    template = (
        "{% for m in messages %}{% for part in m['content'] %}"
        "[{{ part.text }}]{% endfor %}{% endfor %}"
    )
    assert llm.chat(talk, GREEDY, chat_template=template)[0].prompt == "[a][b][c]"
    assert llm.chat([USER], GREEDY, chat_template=template)[0].prompt == "[abc]"
    shown = "{{ messages[0].content is string }}"
    for kind, said in (("auto", "True"), ("string", "True"), ("openai", "False")):
        (output,) = llm.chat(talk, GREEDY, chat_template=shown, chat_template_content_format=kind)
        assert output.prompt == said


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    talk = [USER, {"role": "assistant", "content": "It is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(talk, GREEDY, **options)
    assert str(output.prompt).endswith("<assistant>It is")


def test_tools_that_the_template_does_not_show_are_refused(llm: LLM) -> None:
    template = "{% if think %}+{% endif %}{{ tools[0].name }} {{ messages[0].content }}"
    given = {"tools": [{"name": "f"}], "chat_template_kwargs": {"think": True}}
    assert llm.chat([USER], GREEDY, chat_template=template, **given)[0].prompt == "+f abc"
    with pytest.raises(RequestError, match="this chat template does not use it"):
        llm.chat([USER], GREEDY, tools=given["tools"])  # type: ignore[arg-type]
    plain = llm.chat([USER], GREEDY)[0].prompt
    (output,) = llm.chat([USER], GREEDY, chat_template_kwargs={"think": True, "nowhere": 1})
    assert output.prompt == plain, "what is a variable of some templates changes nothing in others"
    for name in ("tokenize", "return_dict", "chat_template", "sanitize_control_tokens", "messages",
                 "conversation", "conversations", "self"):  # fmt: skip
        with pytest.raises(RequestError, match=rf"chat_template_kwargs\.{name}.*argument"):
            llm.chat([USER], GREEDY, chat_template_kwargs={name: True})


def test_fields_of_clients_reach_the_template(llm: LLM) -> None:
    template = """{% for m in messages %}{{ m.name }}|{{ m.reasoning_content }}|{{ m.content }}|
{{ m.tool_call_id }}|{{ m.tool_calls[0].function.arguments.x if m.tool_calls }}{% endfor %}"""
    function = {"name": "f", "arguments": '{"x": 5}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    asked = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    (output,) = llm.chat([{**asked, "reasoning_content": "hm"}], GREEDY, chat_template=template)
    assert output.prompt == "|hm||\n|5"
    assert calls[0]["function"] is function, "the caller's own is left as it was"
    for text in ("{x", "[" * 100_000, f'{{"x": {"1" * 5000}}}'):  # no JSON, too deep, too long
        function["arguments"] = text
        with pytest.raises(RequestError, match=r"tool_calls\[0\].function.arguments.*parser says"):
            llm.chat([asked], GREEDY, chat_template=template)


def test_a_template_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    path = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "d{{ 1 }}"}, {"name": "rag", "template": "r{{ 2 }}"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    llm = LLM(str(folder), num_blocks=64)
    assert llm.chat([USER], GREEDY)[0].prompt == "d1"
    assert llm.chat([USER], GREEDY, chat_template="rag")[0].prompt == "r2"
    with pytest.raises(RequestError, match="Jinja template, or one of default, rag"):
        llm.chat([USER], GREEDY, chat_template="rga")
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named[1:]}))
    with pytest.raises(RequestError, match="no chat template named `default`, only rag"):
        LLM(str(folder), num_blocks=64).chat([USER])


def test_a_bad_conversation_fails_alone(llm: LLM) -> None:
    late = [USER, {"role": "system", "content": "x"}]
    params = [SamplingParams(temperature=0, max_tokens=i) for i in (1, 2, 3, 4)]
    outputs = llm.chat([[USER], late, [], [USER]], params, on_error="return")
    lengths = [len(o.outputs[0].token_ids) if o.outputs else None for o in outputs]
    assert lengths == [1, None, None, 4]
    assert "it says: System comes first" in str(outputs[1].error)
    assert "at least one message" in str(outputs[2].error)
    assert (outputs[1].prompt, outputs[1].prompt_token_ids) == (None, [])
    with pytest.raises(RequestError, match="System comes first"):
        llm.chat(late)


BAD: dict[str, tuple[Any, str]] = {
    "a text": ("abc", "`messages` is 'abc': must be a list of dicts"),
    "one message": (USER, "must be a list of dicts"),
    "nothing": ([], "at least one message"),
    "a list of texts": (["abc"], r"`messages\[0\]` is 'abc': must be a dict"),
    "a misspelt field": ([{"role": "user", "contnt": "a"}], "contnt.*Did you mean `content`"),
    "another field": ([{**USER, "cost": 3}], r"messages\[0\].cost` is 3: .*Known are content, n"),
    "no content": ([USER, {"role": "user"}], r"`messages\[1\].content` is None: must be a text"),
    "no role": ([{"content": "a"}], r"`messages\[0\].role` is None"),
    "an image": ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url': .*Images"),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "must be a text"),
    "a surrogate": ([{"role": "user", "content": "a\udcff"}], r"content.*surrogate '\\udcff'"),
    "calls the template drops": ([{**USER, "tool_calls": [{}]}], "template does not use it"),
    "an unknown role": ([{"role": "usr", "content": "a"}], "'usr': must be one of system,"),
    "lists and messages": ([[USER], USER], "must be a list of dicts"),
}


@pytest.mark.parametrize("case", BAD)
def test_messages_that_are_no_conversation(llm: LLM, case: str) -> None:
    messages, message = BAD[case]
    try:
        errors = [output.error for output in llm.chat(messages, GREEDY)]
    except RequestError as error:
        errors = [error]
    assert re.search(message, str(errors[-1]))
    llm.engine.check_integrity()


def test_a_role_that_only_the_template_knows(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    critic = [{"role": "critic", "content": "abc"}]
    assert llm.chat(critic, GREEDY, chat_template=template)[0].prompt == "abc"
    with pytest.raises(RequestError, match="critic"):
        llm.chat(critic, GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": "{% if %}"}, "must be a Jinja template; line 1: Expected an expression"),
        ({"chat_template": "chatml"}, "must be the text of a Jinja template"),
        ({"chat_template": {}}, "must be the text of a Jinja template"),
        ({"chat_template": "{{ messages[0].content.nothing() }}"}, "it says: 'str object'"),
        ({"chat_template": "{{ messages[0].none }}"}, "at least one token"),
        ({"add_generation_prompt": 1}, "must be true or false"),
        ({"continue_final_message": 1}, "must be true or false"),
        ({"continue_final_message": True}, "Pass add_generation_prompt=False"),
        ({"chat_template_content_format": "json"}, "one of auto, string, openai"),
        ({"tools": {}}, "a list of JSON schemas"),
        ({"chat_template_kwargs": [1]}, "a dict of template variables"),
        ({"chat_template_kwargs": {"tools": []}}, "an argument of its own"),
        ({"chat_templat": "x"}, "Did you mean `chat_template`"),
        ({"mm_processor_kwargs": {"a": 1}}, "takes text alone"),
        ({"sampling_params": [GREEDY] * 2}, "one for all, or a list of 1"),
    ],
)
def test_bad_options(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([USER], **options)


def test_checkpoints_that_cannot_chat(tmp_path: Path) -> None:
    bare = LLM(str(save_checkpoint(tmp_path / "bare", tokenizer=False)), num_blocks=64)
    with pytest.raises(RequestError, match=r"no tokenizer\. Use `generate` with token ids"):
        bare.chat([USER])
    plain = LLM(str(save_checkpoint(tmp_path / "plain")), num_blocks=64)
    with pytest.raises(RequestError, match=r"no chat template\. Use `generate`, or a checkpoint"):
        plain.chat([USER])
