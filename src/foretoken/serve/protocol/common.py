"""Names and types of the fields that APIs share; `SamplingParams` checks the values.

A field has an effect, is `Inert` (accepted, but without effect), or is in the table `foreign` of
the object: accepted with values that would have no effect, and refused with other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from foretoken.errors import RequestError
from foretoken.foreign import Foreign, without_foreign
from foretoken.serve.protocol.foreign import CACHE, GENERATION

Inert = Annotated[Any, "inert"]  # a field of a public API that has no effect here
REQUEST_ID = r"^[A-Za-z0-9_.:+/=@-]{1,128}$"
RequestId = Annotated[str, Field(pattern=REQUEST_ID)]
Item = TypeVar("Item")


class _First(FailFast):
    """`FailFast` for use in unions, which hash their members."""

    __hash__ = object.__hash__


Items = Annotated[list[Item], _First()]  # checked up to the first error: many items can be wrong
_MAX_KEYS = 256


class Fields(BaseModel):
    """A JSON object with exact keys and types: unknown keys and texts for numbers are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    foreign: ClassVar[Mapping[str, Foreign]] = {}

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, value: Any) -> Any:
        # Without the limit, each of many unknown keys would be an error of its own.
        if not isinstance(value, dict):
            return value
        if len(value) > _MAX_KEYS:
            raise ValueError(f"an object of at most {_MAX_KEYS} keys")
        return without_foreign(value, cls.foreign, RequestError) if cls.foreign else value


class StreamOptions(Fields):
    """What the chunks of a stream hold."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    split_tokens: bool | None = None
    include_obfuscation: Inert = None


class Speculative(Fields):
    """How this request drafts and verifies, and whether its answer has a trace."""

    enabled: bool | None = None
    num_speculative_tokens: int | Literal["auto"] | None = None
    drafter: str | None = None
    rule: str | None = None
    trace: bool | None = None


class TextPart(Fields):
    """A piece of a text."""

    type: Literal["text"]
    text: str


class Prediction(Fields):
    """A text that the answer is likely to resemble."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class JsonSchema(Fields):
    """A schema that the answer must satisfy; `name` and `strict` have no effect."""

    name: Inert = None
    description: Inert = None
    strict: Inert = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Fields):
    """The format of the answer: a text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(Fields):
    """Fields of all APIs that generate, with meanings as in `SamplingParams`."""

    foreign = GENERATION
    model: str | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    detokenize: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    request_id: RequestId | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=2**15)] | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Annotated[Items[int], Field(max_length=2**18)] | None = None
    priority: int | None = None
    speculative: Speculative | None = None
    stream: bool | None = None


class CacheOptions(Fields):
    """Options of OpenAI's prompt cache. This server always looks for equal prefixes."""

    foreign = CACHE
    mode: Inert = None
    ttl: Inert = None
    comparison_response_id: Inert = None


class InertFields(Fields):
    """Fields about OpenAI's accounts and caches, which have no effect here."""

    user: Inert = None
    metadata: Inert = None
    service_tier: Inert = None
    safety_identifier: Inert = None
    prompt_cache_key: Inert = None
    prompt_cache_options: Annotated[CacheOptions | None, "inert"] = None
    prompt_cache_retention: Inert = None
    session_id: Inert = None


class TemplateFields(Fields):
    """Options of the chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class GenerationFields(SamplingFields, InertFields):
    """Further fields of completions and chats."""

    max_tokens: int | None = None
    n: int | None = None
    stop: str | Items[str] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    prediction: Prediction | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    store: Inert = None


def by_type(*kinds: type[Fields]) -> dict[str, type[Any]]:
    """The classes of objects, by the only value that their field `type` may have."""
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}
