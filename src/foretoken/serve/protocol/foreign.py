"""Fields of public APIs that are accepted with null or values without effect, and else refused."""

from __future__ import annotations

from foretoken.foreign import EITHER, NO_PLUGIN, OFF, SAMPLING_FIELDS, Foreign, same_for

_EMPTY: tuple[dict[str, object], ...] = ({},)
_TEXT_ALONE = "This server reads and writes text alone."
_ONE_SERVER = "This server computes prompts and answers by itself."
_KEEPS_NOTHING = "Nothing is kept here: send the whole conversation as `input`."
_FUNCTIONS = "Write `tools` and `tool_choice`."
_MODERATION = "Have another service look at the texts."

GENERATION = {
    **{
        name: SAMPLING_FIELDS[name]
        for name in (
            "best_of", "use_beam_search", "length_penalty", "early_stopping", "logits_processors",
            "truncation_side", "spaces_between_special_tokens", "logprob_token_ids",
            "thinking_token_budget", "repetition_detection", "skip_reading_prefix_cache",
            "watermarking", "routed_experts_prompt_start",
        )
    },
    "stream_interval": Foreign((1,), "A step's tokens come as one chunk."),
    **same_for(
        "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count", (0,),
        SAMPLING_FIELDS["repetition_detection"].instead,
    ),
    "documents": Foreign(([],), "Write `chat_template_kwargs`: {\"documents\": [...]}."),
    **same_for("mm_processor_kwargs media_io_kwargs", _EMPTY, _TEXT_ALONE),
    **same_for("kv_transfer_params ec_transfer_params", _EMPTY, _ONE_SERVER),
    "vllm_xargs": Foreign(_EMPTY, NO_PLUGIN),
    "return_prompt_text": Foreign(OFF, "`/tokenize` and `/detokenize` show a prompt."),
    "return_token_offsets": Foreign(OFF, "`logprobs` of a completion have `text_offset`."),
    **same_for("return_mm_kwargs disable_log_stats", EITHER),
    "guided_decoding_backend": Foreign(("auto", "guidance"), "llguidance reads all of them here."),
    "guided_whitespace_pattern": Foreign((), "Write `structured_outputs`."),
    "structural_tag": Foreign((), "Write `structured_outputs`, or `tools`."),
}  # fmt: skip

COMPLETION = GENERATION | {
    "suffix": Foreign(("",), "Write the prompt as the model was trained to fill it in."),
    "prompt_embeds": Foreign(([],), "Send `prompt`."),
}

CHAT = GENERATION | {
    "echo": Foreign(OFF, "Put the last message before the answer."),
    "functions": Foreign(([],), _FUNCTIONS),
    "function_call": Foreign(("none", "auto"), _FUNCTIONS),
    "modalities": Foreign((["text"],), _TEXT_ALONE),
    "audio": Foreign((), _TEXT_ALONE),
    "verbosity": Foreign(("medium",), "Say it in a message."),
    "web_search_options": Foreign((), "Give the model a tool that searches."),
    "moderation": Foreign((), _MODERATION),
}

RESPONSES = GENERATION | {
    "store": Foreign(OFF, _KEEPS_NOTHING),
    "background": Foreign(OFF, "Wait for the answer, or stream it."),
    "truncation": Foreign(
        ("disabled",), "Write `truncate_prompt_tokens`: -1, and `max_output_tokens`."
    ),
    **same_for("previous_response_id previous_response conversation", (), _KEEPS_NOTHING),
    "previous_input_messages": Foreign(([],), _KEEPS_NOTHING),
    "prompt": Foreign((), "Send `instructions` and `input`."),
    "top_logprobs": Foreign((0,), "/v1/chat/completions has log-probabilities."),
    "enable_response_messages": Foreign(OFF, "/v1/completions with `echo` shows a prompt."),
    "context_management": Foreign(([],), "Shorten the input yourself."),
    "moderation": Foreign((), _MODERATION),
    "access_programs": Foreign(_EMPTY, "Leave it out."),
}

COUNT = {
    "container": Foreign((), "Nothing is run here."),
    "mcp_servers": Foreign(([],), "Connect to the server yourself, and send its tools."),
    "context_management": Foreign(({}, {"edits": []}), "Shorten the conversation yourself."),
    "compaction": Foreign((), "Shorten the conversation yourself."),
    "speed": Foreign(("standard",), "Drafts make it fast: see `speculative`."),
    "inference_geo": Foreign((), "It is computed where this server is."),
    "diagnostics": Foreign(({}, {"previous_message_id": None}), "`usage` counts cached tokens."),
    "thread": Foreign((), "Nothing is kept here: send the whole conversation."),
    "fallbacks": Foreign(([],), "Ask another server yourself."),
    "fallback_credit_token": Foreign((), "Ask another server yourself."),
}

MESSAGES = GENERATION | COUNT

TOOL = {
    "defer_loading": Foreign(OFF, "Send the tools that the model shall see."),
    "allowed_callers": Foreign((["direct"],), "Calls are made by the model alone."),
    "async": Foreign(OFF, "Calls are answered in the next request."),
    "output_schema": Foreign(({},), "Say it in `description`."),
    "input_examples": Foreign(([],), "Write them into `description`."),
}

CACHE = {"prewarm": Foreign(OFF, "Send it with `max_tokens`: 1.")}
TEXT = {"verbosity": Foreign(("medium",), "Say it in the instructions.")}
REASONING = {
    **same_for(
        "summary generate_summary", ("auto",), "The reasoning itself is in the item's `content`."
    ),
    "context": Foreign(("auto",), "The template says which reasoning the model sees again."),
    "mode": Foreign(("standard",), "There is one way to reason."),
}
TOKENIZE = {
    "return_token_strs": Foreign(OFF, "`/detokenize` has their text."),
    "tools": Foreign(([],), "`usage` of /v1/chat/completions counts a prompt with tools."),
    "mm_processor_kwargs": Foreign(_EMPTY, _TEXT_ALONE),
}
