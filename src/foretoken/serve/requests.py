"""Requests for the engine, read from the bodies of completions and chats.

Every field of a body that has an effect is read here. `protocol/` checks the types of fields,
`SamplingParams` and the engine the values.
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

# Fields with the same name and type in `SamplingParams` and in bodies.
_SHARED_FIELDS = {field.name for field in fields(SamplingParams)} & {*GenerationFields.model_fields}
_SHARED_FIELDS -= {"logit_bias", "prediction"}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_MAX_TEXTS = {"stop": 64, "bad_words": 1024}  # every step, or the admission, reads all texts
_STRUCTURES = ("response_format", "structured_outputs", *_GUIDED)
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
_SPECULATIVE_NAMES = {  # the client's names of parameters
    "num_speculative_tokens": "speculative.num_speculative_tokens",
    "drafter": "speculative.drafter",
    "rejection_sample_method": "speculative.rule",
    "trace": "speculative.trace",
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model and the options of its server, fixed at start.

    Attributes:
        names: names of the model; answers use the first.
        root: the engine's option `model`.
        max_model_len: most tokens of a prompt and its output together.
        num_drafts: K of the engine, or the maximum of K if it is `auto`; 0: nothing is drafted.
        defaults: parameters of a request that sets no parameters.
        predictors: names of the drafters that use a request's `prediction`.
        drafter: the drafter of requests that name no drafter.
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
    def from_engine(cls, engine: AsyncEngine, options: ServeOptions) -> ServedModel:
        """The model of this engine; `ConfigError` if `options` do not fit its rule or tokenizer."""
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
        """Raise `UnknownModelError` unless `name` is None or a name of the model."""
        if name is not None and name not in self.names:
            raise UnknownModelError("model", name, f"one of {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request over HTTP, in the same form for all APIs.

    Attributes:
        prompts: prompts to complete; () in a chat.
        messages: a conversation to answer; None if there are prompts.
        num_top: how many of the likeliest tokens the answer shows for each position; None: it shows
            no log-probabilities.
        num_drafts: K of the request, or the maximum of K if it is `auto`.
        include_usage, continuous_usage: whether the stream's end, or each chunk, has the usage.
        split_tokens: whether a chunk of the stream has only one token.
        parsing: how to find reasoning and calls in the answer; None: all text is content.
        tokens_as_ids: whether log-probabilities show a token as `token_id:` and its number.
        add_special_tokens: whether special tokens are put before a prompt's text; None: yes.
        name: the client's name for the request; None: the answer gets a random name.
        client_names: by our name of a parameter, the name that the client knows.
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
    client_names: Mapping[str, str] = field(default_factory=dict)

    def answer_id(self, prefix: str) -> str:
        name = self.name or uuid.uuid4().hex
        return name if name.startswith(prefix) else prefix + name


def read_completion(body: CompletionBody, served: ServedModel) -> GenerationRequest:
    """The request of a body of `/v1/completions`; raises `RequestError`."""
    prompt: Any = body.prompt
    is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = (prompt,) if is_single else tuple(prompt)
    if not prompts:
        raise RequestError("prompt", prompt, "at least one prompt")
    param_values: dict[str, Any] = {}
    if body.logprobs is not None:
        param_values["logprobs"] = body.logprobs
        if body.echo:
            param_values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    generation = _read_shared(body, served, param_values)
    return replace(generation, prompts=prompts, echo=bool(body.echo), num_top=body.logprobs)


def read_chat(body: ChatBody, served: ServedModel) -> GenerationRequest:
    """The request of a body of `/v1/chat/completions`; raises `RequestError`."""
    param_values: dict[str, Any] = {"max_tokens": body.max_tokens}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            bound = "left out if `max_completion_tokens`, its newer name, is given"
            raise RequestError("max_tokens", body.max_tokens, bound)
        param_values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "left out without `logprobs`: true")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if num_top is not None:
        param_values["logprobs"] = num_top
    template = chat_options(body, served)
    tools = read_tools(_with_allowed_tools(body), served.format)
    if tools.in_prompt is not None:
        template["tools"] = tools.in_prompt
    generation = replace(
        _read_shared(body, served, param_values),
        messages=body.messages,
        template=template,
        num_top=num_top,
        include_reasoning=body.include_reasoning is not False,
    )
    return _with_parsing(generation, tools, served.format)


def _with_allowed_tools(body: ChatBody) -> ChatBody:
    """The body without the tools that `allowed_tools` does not name.

    Without tools, `tool_choice` and `parallel_tool_calls` are removed, if no call is demanded.
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


def _with_parsing(
    generation: GenerationRequest, tools: ToolUse, form: MessageFormat
) -> GenerationRequest:
    """The request with `parsing`, and with a grammar if its calls need a grammar.

    A grammar holds from the first token, so an answer under a grammar has no reasoning.
    """
    params, client_names = generation.params, generation.client_names
    if not params.detokenize:
        if tools.names:
            bound = "true or left out with `tools`: calls are read from the text"
            raise RequestError("detokenize", False, bound)
        return generation
    with client_field_names(client_names):
        grammar = tools.grammar(form, params.structured_outputs)
    if grammar is not None:
        params = replace(params, structured_outputs={"grammar": grammar})
        # An error of this grammar may be due to the client's structure or to the tools.
        names = ("structured_outputs", "structured_outputs.grammar")
        cause = client_names.get(names[0], names[0])
        cause = "tools" if tools.required else f"{cause}, tools"
        client_names = {**client_names, **dict.fromkeys(names, cause)}
    has_reasoning = form.has_reasoning and params.structured_outputs is None
    parsing = Parsing.for_format(
        form, tools.names, has_reasoning=has_reasoning, parallel=tools.parallel
    )
    if not (parsing.names or parsing.has_reasoning):
        return generation
    if not params.skip_special_tokens:
        parsing = replace(parsing, hidden=())
    elif parsing.hidden:
        params = replace(params, skip_special_tokens=False)
    decode = partial(form.decode, skip_special_tokens=params.skip_special_tokens)
    only_calls = bool(tools.required)
    calls_or_text = grammar is not None and not only_calls
    parsing = replace(parsing, only_calls=only_calls, calls_or_text=calls_or_text, decode=decode)
    return replace(generation, params=params, parsing=parsing, client_names=client_names)


def check_size(generation: GenerationRequest, served: ServedModel) -> None:
    """Raise `RequestError` for a request that would keep the engine's thread busy for too long."""
    params, limit = generation.params, served.options.max_samples
    num_samples = max(len(generation.prompts), 1) * params.n
    if num_samples > limit:
        bound = f"at most {limit}: `n` for every prompt"
        raise RequestError("n", f"{num_samples} samples", bound, "Send several requests.")
    for prompt in generation.prompts:
        check_text("prompt", prompt, served)
    check_text("messages", generation.messages or "", served)
    for name in ("prediction", "bad_words", "stop"):
        check_text(name, getattr(params, name), served)
    for name, value in generation.template.items():
        if name != "chat_template":  # a trusted text: see `chat_options`
            check_text(name, value, served)
    for name, max_texts in _MAX_TEXTS.items():
        if (count := len(getattr(params, name))) > max_texts:
            raise RequestError(name, f"{count} texts", f"at most {max_texts}", "Leave some out.")


def check_text(name: str, text: Any, served: ServedModel) -> None:
    """Raise `RequestError` if a text has more characters, or token ids, than the options allow."""
    count, limit = _num_chars(text), served.options.max_prompt_chars or 64 * served.max_model_len
    if count > limit:
        bound = f"at most {limit}, for a context of {served.max_model_len} tokens"
        error_type = CapacityError if name in ("prompt", "messages") else RequestError
        raise error_type(name, f"{count} characters", bound, "Shorten it.")


def _num_chars(value: Any) -> int:
    """The number of characters in all texts of a value, keys included; a token id counts as one."""
    if isinstance(value, Mapping):
        return sum(_num_chars(key) + _num_chars(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        are_ids = set(map(type, value)) == {int}  # fast, since lists may be long
        return len(value) if are_ids else sum(map(_num_chars, value))
    return len(value) if isinstance(value, str) else 1


def chat_options(body: ChatBody | TokenizeBody, served: ServedModel) -> ChatOptions:
    """Options of the chat template; `RequestError` without a template, or for a forbidden one."""
    options: ChatOptions = {"chat_template": served.options.chat_template}
    if body.chat_template is not None:
        if not served.options.trust_request_chat_template:
            bound = "left out: this server does not run templates of clients"
            remedy = "See --trust-request-chat-template."
            raise RequestError("chat_template", body.chat_template, bound, remedy)
        options["chat_template"] = body.chat_template
    elif not served.format.has_template:
        bound = "a `prompt` to /v1/completions: this model has no chat template, or no tokenizer"
        remedy = "Or start the server with --chat-template."
        raise RequestError("messages", "a conversation", bound, remedy)
    for name in ("add_generation_prompt", "continue_final_message", "add_special_tokens"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    variables = body.chat_template_kwargs
    if isinstance(body, ChatBody) and (effort := body.reasoning_effort) is not None:
        effort_variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        variables = effort_variables | (variables or {})
    if variables is not None:
        options["chat_template_kwargs"] = variables
    return options


def _read_shared(
    body: GenerationFields, served: ServedModel, param_values: dict[str, Any]
) -> GenerationRequest:
    """A request from the fields of a body that completions and chats share.

    The caller has read `param_values`, the parameters in which completions and chats differ.
    """
    served.check_name(body.model)
    if body.priority and not served.options.allow_priority:
        bound = "0 or left out: this server serves requests in order of arrival"
        raise RequestError("priority", body.priority, bound, "See --allow-priority.")
    structure, client_names = _read_structure(body)
    client_names |= _SPECULATIVE_NAMES
    if isinstance(body, ChatBody):
        client_names["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            client_names["max_tokens"] = "max_completion_tokens"
    if structure is not None:
        param_values["structured_outputs"] = structure
    stream, options = bool(body.stream), body.stream_options
    if stream and body.prompt_logprobs is not None:
        bound = "left out with `stream`: true"
        raise RequestError("prompt_logprobs", body.prompt_logprobs, bound)
    if options is not None and not stream:
        given_options = options.model_dump(exclude={"include_obfuscation"}, exclude_none=True)
        if any(given_options.values()):
            raise RequestError("stream_options", given_options, "left out without `stream`: true")
    splits_tokens = bool(options and options.split_tokens)
    if splits_tokens and "logprobs" not in param_values:
        param_values["logprobs"] = 0  # each token's text comes with its log-probability
    with client_field_names(client_names):
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
        client_names=client_names,
    )


def _sampling_params(
    body: GenerationFields, served: ServedModel, values: dict[str, Any]
) -> SamplingParams:
    """Parameters from `values`, else from the body, else the server's defaults."""
    body_values = {name: getattr(body, name) for name in _SHARED_FIELDS}
    values = {**{name: value for name, value in body_values.items() if value is not None}, **values}
    if body.logit_bias is not None:
        values["logit_bias"] = _bias_by_token(body.logit_bias)
    values |= _speculation(body.speculative, served)
    if body.prediction is not None:
        values["prediction"] = body.prediction.text
        if values.get("num_speculative_tokens") == 0:
            raise RequestError("prediction", "a text", "left out if K is 0: nothing reads it")
        if served.drafter not in served.predictors:
            # If no drafter reads `prediction`, the engine's error names drafters that would.
            values.setdefault("drafter", next(iter(served.predictors), None))
        if served.predictors and values.get("drafter", served.drafter) not in served.predictors:
            bound = f"one that reads `prediction`: {', '.join(served.predictors)}"
            raise RequestError("drafter", values["drafter"], bound)
    return replace(served.defaults, **values)


def _bias_by_token(bias: Mapping[str, float]) -> dict[int, float]:
    # Python's `int` would also accept keys that are no token ids.
    by_token = {int(token): value for token, value in bias.items() if _TOKEN_ID.fullmatch(token)}
    if len(by_token) < len(bias):
        raise RequestError("logit_bias", dict(bias), 'keyed by token ids in decimal, as in "42"')
    return by_token


def _speculation(speculative: Speculative | None, served: ServedModel) -> dict[str, Any]:
    """The parameters that `speculative` sets, by the names of `SamplingParams`."""
    if speculative is None:
        return {}
    if speculative.rule not in (None, *LOSSLESS_METHODS) and not served.options.allow_synthetic:
        bound = f"one of {', '.join(LOSSLESS_METHODS)}"
        is_known = speculative.rule in REJECTION_SAMPLE_METHODS
        remedy = "This server does not allow this rule: see --allow-synthetic." if is_known else ""
        raise RequestError("rejection_sample_method", speculative.rule, bound, remedy)
    num_drafts = speculative.num_speculative_tokens
    if speculative.enabled is False:
        if num_drafts not in (None, 0):
            bound = "0 or left out with `enabled`: false"
            raise RequestError("num_speculative_tokens", num_drafts, bound)
        num_drafts = 0
    if num_drafts == 0 and speculative.drafter is not None:
        raise RequestError("drafter", speculative.drafter, "left out if K is 0: nothing drafts")
    if speculative.enabled and (num_drafts == 0 or not served.num_drafts):
        cause = "K is 0" if num_drafts == 0 else "this engine drafts nothing"
        raise RequestError("speculative.enabled", True, f"false or left out: {cause}")
    values = {
        name: getattr(speculative, client_name.partition(".")[2])
        for name, client_name in _SPECULATIVE_NAMES.items()
    }
    values["num_speculative_tokens"] = num_drafts
    return {name: value for name, value in values.items() if value is not None}


def _read_structure(body: GenerationFields) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """The structure of the answer as `structured_outputs`, and the client's names of its fields."""
    values = {name: getattr(body, name) for name in _STRUCTURES}
    names = [name for name, value in values.items() if value is not None]
    if not names:
        return None, {}
    space_options: dict[str, Any] = {}
    # `structured_outputs` can have options of white space for the structure of another field.
    if len(names) > 1 and {*(body.structured_outputs or ("",))} <= {*WHITE_SPACE}:
        names.remove("structured_outputs")
        space_options = dict(body.structured_outputs or {})
    name = names[0]
    value: Any = values[name]
    if len(names) > 1:
        second = names[1]
        raise RequestError(second, values[second], f"left out with `{name}`")
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
    option_names = [f"structured_outputs.{option}" for option in space_options]
    client_names = dict(zip(option_names, option_names, strict=True))
    client_names |= {"structured_outputs": name, f"structured_outputs.{kind}": client_name}
    return {kind: value, **space_options}, client_names


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an answer may use tools.

    Attributes:
        in_prompt: the tools that the chat template gets; None: it gets no tools.
        names: the functions that the answer may call.
        required: the tools of which the answer must call one; (): the model decides.
        parallel: whether the answer may hold several calls.
    """

    in_prompt: Sequence[Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()
    required: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True

    def grammar(self, form: MessageFormat, structure: Any) -> str | None:
        """A Lark grammar of the answer: only calls if one is required, else calls or a text.

        `structure` is that of a text; `RequestError` unless it is a JSON schema or any JSON object.
        None: no call is required, and there are no functions to call or no structure.
        """
        if form.calls is None or not (self.required or (self.names and structure)):
            return None
        answer = None
        if not self.required and structure is not None:
            [(kind, value)] = structure.items()
            answer = {"json": value, "json_object": as_text(kind, ANY_OBJECT)}.get(kind)
            if answer is None:
                bound = "a JSON schema: with `tools` an answer is a call or JSON"
                raise RequestError(FIELD, {kind: value}, bound)
        tools = self.required or self.in_prompt or ()
        return form.grammar(form.calls, tools, parallel=self.parallel, answer=answer)


def read_tools(body: ChatBody, form: MessageFormat) -> ToolUse:
    """How the answer to a body may use tools. With `tool_choice` `none` the model sees no tools."""
    choice = body.tool_choice
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if (value := getattr(body, name)) is not None and value != "none":
                value = value.model_dump() if isinstance(value, NamedTool) else value
                raise RequestError(name, value, "left out without `tools`")
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
        bound = "left out: how this model writes calls is not known"
        remedy = f"See --tool-call-parser: {', '.join(FORMATS)}."
        raise RequestError("tools", names, bound, remedy)
    parallel = body.parallel_tool_calls is not False
    required = tools if choice == "required" else []
    if isinstance(choice, NamedTool):
        name, parallel = choice.function.name, False
        required = [tool for tool in tools if tool["function"]["name"] == name]
        if not required:
            raise RequestError("tool_choice.function.name", name, f"one of {', '.join(names)}")
    return ToolUse(tools, names, required, parallel)
