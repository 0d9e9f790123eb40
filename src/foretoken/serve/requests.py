"""A request's body as the engine takes it.

Charter: every honoured field of a body is read here, and nowhere else. `SamplingParams` and the
engine check its value, `protocol/` its type.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from foretoken.async_engine import AsyncEngine
from foretoken.config import LOSSLESS_METHODS, REJECTION_SAMPLE_METHODS
from foretoken.engine.boundary import Prompt
from foretoken.errors import CapacityError, RequestError
from foretoken.models.chat import ChatOptions
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.structured import ANY_OBJECT, FIELD, WHITE_SPACE, as_text
from foretoken.serve.errors import UnknownModelError, client_field_names
from foretoken.serve.options import ServeOptions
from foretoken.serve.parsers.formats import FORMATS, MessageFormat
from foretoken.serve.parsers.message import Parsing
from foretoken.serve.protocol.chat import (
    AllowedTools,
    ChatBody,
    CompletionBody,
    NamedTool,
    TokenizeBody,
)
from foretoken.serve.protocol.common import GenerationFields, Speculative

# Fields that `SamplingParams` and bodies have by the same name. Those of `logit_bias` and
# `prediction` have different types.
_SHARED_FIELDS = {field.name for field in fields(SamplingParams)} & set(
    GenerationFields.model_fields
)
_SHARED_FIELDS -= {"logit_bias", "prediction"}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_MAX_TEXTS = {"stop": 64, "bad_words": 1024}
"""The most texts of each field: every step, or the admission of a request, looks at all of them."""
_STRUCTURES = ("response_format", "structured_outputs", *_GUIDED)
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
# By parameter: the client's name for it.
_SPECULATIVE_NAMES = {
    "num_speculative_tokens": "speculative.num_speculative_tokens",
    "drafter": "speculative.drafter",
    "rejection_sample_method": "speculative.rule",
    "trace": "speculative.trace",
}


@dataclass(frozen=True, slots=True)
class Served:
    """The served model and the options of its server, fixed at start.

    Attributes:
        names: names of the model; answers use the first.
        root: the model, as the engine's option `model` names it.
        max_model_len: longest prompt and output together, in tokens.
        num_drafts: K of the engine, or its maximum where K is `auto`; 0: the engine drafts nothing.
        defaults: the values of fields that a request leaves out.
        predictors: names of the drafters that use a request's `prediction`.
        drafter: the drafter of requests that name none.
        format: how the model writes messages.
    """

    names: tuple[str, ...]
    root: str
    max_model_len: int
    num_drafts: int
    defaults: SamplingParams
    predictors: tuple[str, ...]
    drafter: str
    options: ServeOptions
    format: MessageFormat = field(default_factory=MessageFormat)

    @classmethod
    def from_engine(cls, engine: AsyncEngine, options: ServeOptions) -> Served:
        """What this engine serves.

        Raises:
            ConfigError: the engine's rule is `synthetic`, and the options do not allow it.
        """
        options.check_engine(engine.config)
        limits, root = engine.engine.limits, engine.config.model
        return cls(
            names=tuple(options.served_model_name) or (root,),
            root=root,
            max_model_len=limits.max_model_len,
            num_drafts=limits.num_speculative_tokens,
            defaults=engine.get_default_sampling_params(),
            predictors=limits.reads_prediction,
            drafter=limits.drafter,
            options=options,
            format=MessageFormat.from_options(
                engine.engine.tokenizer,
                options.chat_template,
                options.tool_call_parser,
                options.reasoning_parser,
            ),
        )

    def check_name(self, name: str | None) -> None:
        """Raise `UnknownModelError` unless this is a name of the served model, or None."""
        if name is not None and name not in self.names:
            raise UnknownModelError("model", name, f"one of {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request over HTTP, in the same form for all APIs.

    Attributes:
        params: the parameters of every prompt.
        prompts: prompts to complete; () in a chat.
        messages: a conversation to answer; None where there are prompts.
        template: options of the chat template.
        echo: put the prompt before its completion.
        num_top: how many of the likeliest tokens the answer shows next to each of its tokens; None:
            it shows no log-probabilities.
        num_drafts: K of the request, or its maximum where K changes.
        stream: whether the answer is streamed.
        include_usage, continuous_usage: whether the stream's end, or each chunk, has the usage.
        split_tokens: whether each token of the stream has a chunk of its own.
        parsing: which parts to look for in the answer's text; None: all of it is content.
        include_reasoning: whether the answer shows the model's reasoning.
        return_token_ids: whether the answer shows its token ids and those of the prompt.
        tokens_as_ids: whether log-probabilities show a token as `token_id:` and its number.
        add_special_tokens: whether a prompt's text gets special tokens at its start; None: yes.
        name: the client's name for the request; None: the answer gets a random name.
        written: the client's name of a parameter by ours, where they differ.
    """

    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    template: ChatOptions = field(default_factory=ChatOptions)
    echo: bool = False
    num_top: int | None = None
    num_drafts: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    split_tokens: bool = False
    parsing: Parsing | None = None
    include_reasoning: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    add_special_tokens: bool | None = None
    name: str | None = None
    written: Mapping[str, str] = field(default_factory=dict)

    def answer_id(self, prefix: str) -> str:
        """The `id` of the request's answer."""
        name = self.name or uuid.uuid4().hex
        return name if name.startswith(prefix) else prefix + name


def read_completion(body: CompletionBody, served: Served) -> GenerationRequest:
    """The request of a body of `/v1/completions`; raises `RequestError`."""
    prompt: Any = body.prompt
    is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = (prompt,) if is_single else tuple(prompt)
    if not prompts:
        raise RequestError("prompt", prompt, "at least one")
    param_values: dict[str, Any] = {}
    if body.logprobs is not None:
        param_values["logprobs"] = body.logprobs
        if body.echo:
            param_values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    generation = _read(body, served, param_values)
    return replace(generation, prompts=prompts, echo=bool(body.echo), num_top=body.logprobs)


def read_chat(body: ChatBody, served: Served) -> GenerationRequest:
    """The request of a body of `/v1/chat/completions`; raises `RequestError`."""
    param_values: dict[str, Any] = {"max_tokens": body.max_tokens}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            bound = "left out beside `max_completion_tokens`, which is its newer name"
            raise RequestError("max_tokens", body.max_tokens, bound)
        param_values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "left out without `logprobs`: true")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if num_top is not None:
        param_values["logprobs"] = num_top
    template = chat_options(body, served)
    tools = read_tools(_chosen_tools(body), served.format)
    if tools.shown is not None:
        template["tools"] = tools.shown
    generation = replace(
        _read(body, served, param_values),
        messages=body.messages,
        template=template,
        num_top=num_top,
        include_reasoning=body.include_reasoning is not False,
    )
    return _with_message(generation, tools, served.format)


def _chosen_tools(body: ChatBody) -> ChatBody:
    """The body with only the tools that `allowed_tools` names.

    A choice that means nothing, since the body has no tools, is removed.

    Raises:
        RequestError: `allowed_tools` names a tool that the body does not have.
    """
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        field_name = "tool_choice.allowed_tools"
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        by_name = {tool.function.name: tool for tool in body.tools or ()}
        if not by_name:
            raise RequestError(field_name, sorted(allowed), "left out without `tools`")
        if not allowed or not allowed <= by_name.keys():
            wrong = sorted(allowed - by_name.keys())
            raise RequestError(field_name, wrong, f"some of {', '.join(by_name)}")
        tools = [tool for name, tool in by_name.items() if name in allowed]
        return body.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode})
    if not body.tools and choice in (None, "auto", "none"):
        return body.model_copy(update={"tool_choice": None, "parallel_tool_calls": None})
    return body


def _with_message(
    generation: GenerationRequest, tools: ToolUse, form: MessageFormat
) -> GenerationRequest:
    """The request with `parsing` set, and with a grammar for its calls if they need one.

    A grammar begins at the first token, so an answer under a grammar has no reasoning.
    """
    params, written = generation.params, generation.written
    if not params.detokenize:
        if tools.names:
            bound = "true beside `tools`: calls are read from the text"
            raise RequestError("detokenize", False, bound)
        return generation
    with client_field_names(written):
        grammar = tools.grammar(form, params.structured_outputs)
    if grammar is not None:
        params = replace(params, structured_outputs={"grammar": grammar})
        # An error of this grammar may be due to the client's structure or to its tools.
        names = ("structured_outputs", "structured_outputs.grammar")
        structure_name = written.get(names[0], names[0])
        client_names = "tools" if tools.forced else f"{structure_name}, tools"
        written = {**written, **dict.fromkeys(names, client_names)}
    reasons = form.reasons and params.structured_outputs is None
    parsing = Parsing.for_format(form, tools.names, reasons=reasons, parallel=tools.parallel)
    if not (parsing.names or parsing.reasons):
        return generation
    if not params.skip_special_tokens:
        parsing = replace(parsing, hidden=())
    elif parsing.hidden:
        params = replace(params, skip_special_tokens=False)
    decode = partial(form.decode, skip_special_tokens=params.skip_special_tokens)
    is_forced = bool(tools.forced)
    is_either = grammar is not None and not is_forced
    parsing = replace(parsing, is_forced=is_forced, is_either=is_either, decode=decode)
    return replace(generation, params=params, parsing=parsing, written=written)


def check_size(generation: GenerationRequest, served: Served) -> None:
    """Raise `RequestError` for a request that would keep the engine's thread busy for too long."""
    params, limit = generation.params, served.options.max_samples
    num_samples = max(len(generation.prompts), 1) * params.n
    if num_samples > limit:
        bound = f"at most {limit}: every prompt gets `n` of them"
        raise RequestError("n", f"{num_samples} samples", bound, "Send several requests.")
    for prompt in generation.prompts:
        check_text("prompt", prompt, served)
    check_text("messages", generation.messages or "", served)
    for name in ("prediction", "bad_words", "stop"):  # the engine encodes or searches all of them
        check_text(name, getattr(params, name), served)
    for name, value in generation.template.items():
        if name != "chat_template":  # of the server, or of a client that it trusts
            check_text(name, value, served)
    for name, limit in _MAX_TEXTS.items():
        if (count := len(getattr(params, name))) > limit:
            raise RequestError(name, f"{count} texts", f"at most {limit}", "Leave some out.")


def check_text(name: str, text: Any, served: Served) -> None:
    """Raise `RequestError` if a text has more characters, or token ids, than a context can hold."""
    count, limit = _size(text), served.options.max_prompt_chars or 64 * served.max_model_len
    if count > limit:
        bound = f"at most {limit}, for a context of {served.max_model_len} tokens"
        kind = CapacityError if name in ("prompt", "messages") else RequestError
        raise kind(name, f"{count} characters", bound, "Shorten it.")


def _size(value: Any) -> int:
    """The number of characters in all texts of a value, keys included; a token id counts as one."""
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        is_ids = set(map(type, value)) == {int}  # fast, since lists may be long
        return len(value) if is_ids else sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


def chat_options(body: ChatBody | TokenizeBody, served: Served) -> ChatOptions:
    """Options of the chat template: all that it gets except messages and tools."""
    options: ChatOptions = {"chat_template": served.options.chat_template}
    if body.chat_template is not None:
        if not served.options.trust_request_chat_template:
            bound = "left out: this server runs its own template alone"
            remedy = "See --trust-request-chat-template."
            raise RequestError("chat_template", body.chat_template, bound, remedy)
        options["chat_template"] = body.chat_template
    elif not served.format.has_template:
        bound = "a `prompt` to /v1/completions: this model has no chat template, or no tokenizer"
        remedy = "Or start the server with --chat-template."
        raise RequestError("messages", "a conversation", bound, remedy)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    if body.add_special_tokens is not None:
        options["add_special_tokens"] = body.add_special_tokens
    variables = body.chat_template_kwargs
    if isinstance(body, ChatBody) and (effort := body.reasoning_effort) is not None:
        thinks = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        variables = thinks | (variables or {})
    if variables is not None:
        options["chat_template_kwargs"] = variables
    return options


def _read(
    body: GenerationFields, served: Served, param_values: dict[str, Any]
) -> GenerationRequest:
    """A request from the fields that completions and chats share.

    Args:
        param_values: parameters that completions and chats read in different ways.
    """
    served.check_name(body.model)
    if body.priority and not served.options.allow_priority:
        bound = "0, or left out: this server serves requests in the order in which they come"
        raise RequestError("priority", body.priority, bound, "See --allow-priority.")
    structure, written = read_structure(body)
    written |= _SPECULATIVE_NAMES
    if isinstance(body, ChatBody):
        written["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            written["max_tokens"] = "max_completion_tokens"
    if structure is not None:
        param_values["structured_outputs"] = structure
    stream, options = bool(body.stream), body.stream_options
    if stream and body.prompt_logprobs is not None:
        bound = "left out where the answer is streamed"
        raise RequestError("prompt_logprobs", body.prompt_logprobs, bound)
    given_options = {} if options is None else options.model_dump(exclude={"include_obfuscation"})
    if not stream and any(given_options.values()):
        set_options = {name: value for name, value in given_options.items() if value is not None}
        raise RequestError("stream_options", set_options, "left out without `stream`: true")
    splits_tokens = bool(options and options.split_tokens)
    if splits_tokens and "logprobs" not in param_values:
        param_values["logprobs"] = 0  # log-probabilities bring each token's text
    with client_field_names(written):
        params = _sampling_params(body, served, param_values)
    num_drafts = params.num_speculative_tokens
    return GenerationRequest(
        params,
        num_drafts=num_drafts if isinstance(num_drafts, int) else served.num_drafts,
        stream=stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        split_tokens=splits_tokens,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids) or not params.detokenize,
        add_special_tokens=body.add_special_tokens,
        name=body.request_id,
        written=written,
    )


def _sampling_params(
    body: GenerationFields, served: Served, values: dict[str, Any]
) -> SamplingParams:
    """The request's parameters: from `values`, else the body, else the server's defaults."""
    body_values = {name: getattr(body, name) for name in _SHARED_FIELDS}
    values = {**{name: value for name, value in body_values.items() if value is not None}, **values}
    if body.logit_bias is not None:
        values["logit_bias"] = _token_keys(body.logit_bias)
    values |= _speculation(body.speculative, served)
    if body.prediction is not None:
        values["prediction"] = body.prediction.text
        if values.get("num_speculative_tokens") == 0:
            raise RequestError("prediction", "a text", "left out where K is 0: nothing reads it")
        if served.drafter not in served.predictors:
            # If no drafter reads `prediction`, admission refuses the request and says which would.
            values.setdefault("drafter", next(iter(served.predictors), None))
        if served.predictors and values.get("drafter", served.drafter) not in served.predictors:
            bound = f"one that reads `prediction`: {', '.join(served.predictors)}"
            raise RequestError("drafter", values["drafter"], bound)
    return replace(served.defaults, **values)


def _token_keys(bias: Mapping[str, float]) -> dict[int, float]:
    """`logit_bias` by token id. Python's `int` would also accept keys that are no token ids."""
    by_token = {int(token): value for token, value in bias.items() if _TOKEN_ID.fullmatch(token)}
    if len(by_token) < len(bias):
        raise RequestError("logit_bias", dict(bias), 'keyed by token ids in decimal, as in "42"')
    return by_token


def _speculation(speculative: Speculative | None, served: Served) -> dict[str, Any]:
    """The parameters that `speculative` sets, by the names of `SamplingParams`."""
    if speculative is None:
        return {}
    if speculative.rule not in (None, *LOSSLESS_METHODS) and not served.options.allow_synthetic:
        bound = f"one of {', '.join(LOSSLESS_METHODS)}"
        remedy = "This server does not allow it: see --allow-synthetic."
        is_known = speculative.rule in REJECTION_SAMPLE_METHODS
        raise RequestError(
            "rejection_sample_method", speculative.rule, bound, remedy if is_known else ""
        )
    num_drafts = speculative.num_speculative_tokens
    if speculative.enabled is False:
        if num_drafts not in (None, 0):
            bound = "left out, or 0, beside `enabled`: false"
            raise RequestError("num_speculative_tokens", num_drafts, bound)
        num_drafts = 0
    if num_drafts == 0 and speculative.drafter is not None:
        raise RequestError("drafter", speculative.drafter, "left out where K is 0: nothing drafts")
    if speculative.enabled and (num_drafts == 0 or not served.num_drafts):
        bound = "false or left out: " + (
            "K is 0" if num_drafts == 0 else "this engine drafts nothing"
        )
        raise RequestError("speculative.enabled", True, bound)
    values = {
        name: getattr(speculative, client_name.partition(".")[2])
        for name, client_name in _SPECULATIVE_NAMES.items()
    }
    values["num_speculative_tokens"] = num_drafts
    return {name: value for name, value in values.items() if value is not None}


def read_structure(body: GenerationFields) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """`SamplingParams.structured_outputs` of a body, and the client's names for its fields.

    Raises:
        RequestError: the body states two structures, or no schema.
    """
    values = {name: getattr(body, name) for name in _STRUCTURES}
    names = [name for name, value in values.items() if value is not None]
    if not names:
        return None, {}
    spaces: dict[str, Any] = {}
    # `structured_outputs` may have only options of white space, for the structure of another field.
    if len(names) > 1 and {*(body.structured_outputs or ("",))} <= {*WHITE_SPACE}:
        names.remove("structured_outputs")
        spaces = dict(body.structured_outputs or {})
    name = names[0]
    value: Any = values[name]
    if len(names) > 1:
        second = names[1]
        raise RequestError(second, values[second], f"left out beside `{name}`")
    if name == "structured_outputs":
        return dict(value), {}
    kind, client_name = name.removeprefix("guided_"), name
    if name == "response_format":
        if value.type == "text":
            return None, {}
        kind, value, schema = value.type, True, value.json_schema
        if kind == "json_schema":
            kind, client_name = "json", "response_format.json_schema.schema"
            value = schema and schema.schema_
            if value is None:
                raise RequestError(client_name, None, "a JSON schema")
    written = {f"structured_outputs.{option}": f"structured_outputs.{option}" for option in spaces}
    written |= {"structured_outputs": name, f"structured_outputs.{kind}": client_name}
    return {kind: value, **spaces}, written


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an answer may use tools.

    Attributes:
        shown: tools that the template gets; None: it gets no tools.
        names: functions that the answer may call; (): it may call none.
        forced: tools of which the answer must call one; (): the model decides.
        parallel: whether the answer may hold several calls.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()
    forced: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True

    def grammar(self, form: MessageFormat, structure: Any) -> str | None:
        """A grammar of the answer, in Lark; None if the answer needs none.

        The grammar allows only calls if they are forced, and else calls or a text.

        Args:
            structure: `SamplingParams.structured_outputs`, which a text must satisfy; None: a text
                is free, so only forced calls need a grammar.

        Raises:
            RequestError: `structure` is neither a JSON schema nor any JSON object.
        """
        if form.calls is None or not (self.forced or (self.names and structure)):
            return None
        answer = None
        if not self.forced and structure is not None:
            [(kind, value)] = structure.items()
            answer = {"json": value, "json_object": as_text(kind, ANY_OBJECT)}.get(kind)
            if answer is None:
                bound = "a JSON schema: next to `tools` an answer is a call or JSON"
                raise RequestError(FIELD, {kind: value}, bound)
        tools = self.forced or self.shown or ()
        return form.grammar(form.calls, tools, parallel=self.parallel, answer=answer)


def read_tools(body: ChatBody, form: MessageFormat) -> ToolUse:
    """The tool use that `tools`, `tool_choice` and `parallel_tool_calls` of a body describe.

    With a `tool_choice` of `none` the model sees no tools.

    Raises:
        RequestError: these fields contradict each other, or the format of the model's calls is not
            known.
    """
    choice = body.tool_choice
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if (value := getattr(body, name)) is not None and value != "none":
                shown = value.model_dump() if isinstance(value, NamedTool) else value
                raise RequestError(name, shown, "left out without `tools`")
        return ToolUse()
    tools = [
        tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools
    ]
    names = tuple(tool.function.name for tool in body.tools)
    try:
        json.dumps(tools, allow_nan=False)
    except ValueError as error:
        raise RequestError("tools", names, f"JSON: {error}") from None
    if len({*names}) < len(names):
        raise RequestError("tools", names, "functions of different names")
    if choice == "none":
        return ToolUse()
    if form.calls is None:
        format_names, bound = (
            ", ".join(FORMATS),
            "left out: how this model writes calls is not known",
        )
        raise RequestError("tools", names, bound, f"See --tool-call-parser: {format_names}.")
    parallel = body.parallel_tool_calls is not False
    forced = tools if choice == "required" else []
    if isinstance(choice, NamedTool):
        name, parallel = choice.function.name, False
        forced = [tool for tool in tools if tool["function"]["name"] == name]
        if not forced:
            raise RequestError("tool_choice.function.name", name, f"one of {', '.join(names)}")
    return ToolUse(tools, names, forced, parallel)
