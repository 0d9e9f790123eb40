"""Fields, arguments, prompts' keys, methods and classes of vLLM's Python."""

from __future__ import annotations

from typing import Any, NoReturn

from foretoken.errors import AbsentError
from foretoken.foreign.table import (
    EITHER,
    GENERATES,
    NO_LORA,
    NO_MEDIA,
    NO_PLUGIN,
    OFF,
    ONE_PROCESS,
    OWN_CONFIG,
    WHOLE_TEXT,
    Foreign,
    same_for,
)

_STRUCTURED = Foreign((), "Write `SamplingParams(structured_outputs={'json': schema})`.")
_BEAM = "Beam search is not there: draw `n` samples with logprobs=0 and rank by cumulative_logprob."
SAMPLING_FIELDS = {
    "best_of": Foreign((1,), "Ask for `n` samples and rank them by cumulative_logprob."),
    "use_beam_search": Foreign(OFF, _BEAM),
    "length_penalty": Foreign((1.0,), _BEAM),
    "early_stopping": Foreign(OFF, _BEAM),
    "guided_decoding": _STRUCTURED,
    "logits_processors": Foreign(([],), "`logit_bias` and `bad_words` change single tokens."),
    "truncation_side": Foreign(("left",), "Cut the ids: {'prompt_token_ids': ids[:n]}."),
    "spaces_between_special_tokens": Foreign((True,), "Decode `token_ids` as you need them."),
    "output_kind": Foreign(("CUMULATIVE",), WHOLE_TEXT),
    "stream_interval": Foreign((1,), WHOLE_TEXT),
    "flat_logprobs": Foreign(OFF, "Log-probabilities are a list of dicts."),
    "logprob_token_ids": Foreign((), "Ask for `logprobs` of the likeliest tokens."),
    "prompt_logprob_token_ids": Foreign((), "Ask for `logprobs` of the likeliest tokens."),
    "prompt_logprob_start": Foreign((0,), "Cut the list `prompt_logprobs`."),
    "extra_args": Foreign(({},), NO_PLUGIN),
    "thinking_token_budget": Foreign((-1,), "Bound the answer by `max_tokens`."),
    "repetition_detection": Foreign((), "Use `frequency_penalty` or `repetition_penalty`."),
    "skip_clone": EITHER,
    "skip_reading_prefix_cache": Foreign(OFF, "Give the request a `cache_salt` of its own."),
    "watermarking": Foreign(OFF, "No text is watermarked here."),
    "routed_experts_prompt_start": Foreign((0,), "The routing of experts is not told."),
    "trace_decode_token_ids": Foreign((), "The drafter `forced` drafts given tokens."),
}

CALL_OPTIONS = {
    "lora_request": NO_LORA,
    "priority": Foreign((0,), "Set `SamplingParams.priority`."),
    "tokenization_kwargs": Foreign(({},), "Encode the text and pass `prompt_token_ids`."),
    "mm_processor_kwargs": NO_MEDIA,
    "guided_options_request": _STRUCTURED,
    "prompt_adapter_request": NO_LORA,
    "prompt_token_ids": Foreign((), "Pass them as the prompt: {'prompt_token_ids': ids}."),
    "pooling_params": Foreign((), GENERATES),
    # Requests keep what they hold, and no other finds it.
    **same_for("reset_running_requests reset_connector", EITHER),
}

PROMPT_KEYS = {
    **same_for("multi_modal_data multi_modal_uuids mm_processor_kwargs", NO_MEDIA),
    "prompt_embeds": Foreign((), "Pass `prompt` or `prompt_token_ids`."),
    "token_type_ids": Foreign((), "No model that is served here reads them."),
    **same_for("encoder_prompt decoder_prompt", Foreign((), "Decoders are served alone.")),
}

SPECULATIVE_FIELDS = {
    **same_for("draft_tensor_parallel_size tensor_parallel_size", ONE_PROCESS),
    "disable_by_batch_size": Foreign((), "Set `num_speculative_tokens` to `auto`."),
    "disable_padded_drafter_batch": EITHER,
    **same_for(
        "quantization draft_load_config load_config", (), "Weights are read as they are stored."
    ),
    "max_model_len": Foreign((), "The draft's context is that of its checkpoint."),
    "enforce_eager": Foreign((), "Drafts are launched as the target is: `enforce_eager`."),
    "attention_backend": Foreign((), "`backend` chooses the kernels of both models."),
    "moe_backend": Foreign((), "`backend` chooses the kernels of both models."),
    "kv_cache_dtype": Foreign(("auto",), "The cache has the dtype of the weights."),
    "code_revision": Foreign((), "Code from a checkpoint is never run: docs/models.md."),
    "hf_overrides": Foreign(({},), OWN_CONFIG),
    "parallel_drafting": Foreign(OFF, "Drafts are made one after the other."),
    "use_local_argmax_reduction": Foreign(OFF, ONE_PROCESS.instead),
    "use_heterogeneous_vocab": Foreign(OFF, "`draft_text` drafts with another tokenizer."),
    "speculative_token_tree": Foreign((), "Drafts are a chain: `num_speculative_tokens`."),
    "disable_logprobs": Foreign(OFF, "Log-probabilities are told wherever they are asked for."),
    "acceptance_method": Foreign((), "Write `rejection_sample_method`."),
    "num_draft_tokens": Foreign((), "Write `num_speculative_tokens`."),
    **same_for(
        "fly_window_size fly_entropy_threshold fly_entropy_top_k posterior_threshold "
        "posterior_alpha typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha",
        Foreign((), "Every rule here is lossless but `synthetic`: docs/verification.md."),
    ),
}

_NO_HEADS = "{} are not served. Take `draft_model`, `eagle3`, `ngram` or `suffix`."
SPECULATIVE_METHODS = {
    "eagle": _NO_HEADS.format("Heads of EAGLE and EAGLE-2 (`eagle3` takes those of EAGLE-3 alone)"),
    "eagle2": _NO_HEADS.format("Heads of EAGLE-2"),
    "medusa": _NO_HEADS.format("Heads of Medusa"),
    "mlp_speculator": _NO_HEADS.format("MLP speculators"),
    "mtp": _NO_HEADS.format("Layers of multi-token prediction"),
    **dict.fromkeys(("dflash", "dspark"), _NO_HEADS.format("Block-diffusion drafters")),
    "extract_hidden_states": "It drafts nothing: this version has no such side output.",
    "custom_class": "A drafter of your own is one file: ARCHITECTURE.md, Recipes.",
    "ngram_gpu": "Write `ngram`: it runs on the device where there is one.",
    "[ngram]": "Write `method`: `ngram`.",
}
"""Methods of vLLM that are none here, and what to take instead."""

NAMES = {
    "EngineArgs": "Pass its options to `LLM`.",
    "AsyncEngineArgs": "Pass its options to `AsyncEngine`.",
    "LLMEngine": "Use `LLM.generate` or `LLM.stream`; `AsyncEngine` takes requests at any time.",
    **dict.fromkeys(("AsyncLLMEngine", "AsyncLLM"), "Write `AsyncEngine(model, **options)`."),
    "GuidedDecodingParams": "Write `SamplingParams(structured_outputs={'json': schema})`.",
    "BeamSearchParams": _BEAM,
    "LoRARequest": NO_LORA.instead,
    "ModelRegistry": "Models come from Transformers: docs/models.md says which are served.",
    "initialize_ray_cluster": ONE_PROCESS.instead,
    "PromptType": "A prompt is a text, token ids, a `TextPrompt` or a `TokensPrompt`.",
    "EmbedsPrompt": "Pass `prompt` or `prompt_token_ids`.",
    **dict.fromkeys(
        "PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput "
        "ClassificationOutput ClassificationRequestOutput ScoringOutput "
        "ScoringRequestOutput".split(),
        GENERATES,
    ),
}
"""Classes and functions that vLLM exports and Foretoken lacks, and what to write instead."""

_PROFILE = "`foretoken bench` shows where the time goes; any profiler of Python or CUDA works."
_SLEEP = "`close()` releases models and caches; make a new one to go on."
_NO_WORKERS = "There are no workers: the engine computes in this process."
_ANY_TIME = "Use `AsyncEngine`: it takes requests at any time."
_KEPT = "Weights are those of the checkpoint: make a new `LLM`."
METHODS = {
    **dict.fromkeys("embed encode classify score reward token_classify plugin".split(), GENERATES),
    **dict.fromkeys("start_profile stop_profile".split(), _PROFILE),
    **dict.fromkeys("sleep wake_up is_sleeping".split(), _SLEEP),
    **dict.fromkeys("collective_rpc apply_model get_world_size".split(), _NO_WORKERS),
    **dict.fromkeys("add_lora remove_lora list_loras pin_lora".split(), NO_LORA.instead),
    "beam_search": _BEAM,
    "get_metrics": "Read `metrics`, or the `metrics` of an output.",
    "set_tokenizer": "Pass `tokenizer` when it is built.",
    "from_engine_args": "Pass the options when it is built.",
    "llm_engine": "The engine is `engine`; its methods are other ones.",
    "model_config": "Options are in `config`, limits in `engine.limits`.",
    "vllm_config": "Options are in `config`, limits in `engine.limits`.",
    "preprocess_chat": "`get_tokenizer().apply_chat_template` renders a conversation.",
    **dict.fromkeys("enqueue enqueue_chat wait_for_completion add_request".split(), _ANY_TIME),
    "reset_mm_cache": NO_MEDIA.instead,
    **dict.fromkeys("init_weight_transfer_engine update_weights".split(), _KEPT),
    "pause_generation": "`abort` ends a request.",
    "check_health": "`status.failure` says why nothing is served, if so.",
    "do_log_stats": "Read `metrics` and `status`.",
    "shutdown": "Write `close()`.",
    "get_model_config": "Options are in `config`.",
    "get_supported_tasks": GENERATES,
}
"""Methods and attributes of vLLM's engines, and what to write instead."""

_TIMES = "`metrics` has `time_to_first_token` and `tokens_per_second`."
OUTPUTS = {
    **dict.fromkeys(
        "arrival_time first_token_time first_scheduled_time last_token_time time_in_queue "
        "finished_time queued_ts scheduled_ts first_token_ts last_token_ts".split(),
        _TIMES,
    ),
    **dict.fromkeys(
        "encoder_prompt encoder_prompt_token_ids".split(), "Decoders are served alone."
    ),
    "lora_request": NO_LORA.instead,
    "kv_transfer_params": ONE_PROCESS.instead,
    "routed_experts": "The routing of experts is not told.",
    "multi_modal_placeholders": NO_MEDIA.instead,
    "num_generation_tokens": "Count `token_ids`.",
    "sampling_type": "`temperature` and `seed` say it.",
    "all_stop_token_ids": "The checkpoint's end of text, and `stop_token_ids`.",
    "update_from_generation_config": "`LLM.get_default_sampling_params` has them.",
}
"""The same of what a request is given, and of what it returns."""


def absent_attribute(owner: object, name: str) -> NoReturn:
    """What `__getattr__` raises: of a name in these tables what to write instead."""
    kind = type(owner).__name__
    told = METHODS.get(name) or OUTPUTS.get(name)
    remedy = f" {told}" if told else ""
    raise AbsentError(f"`{kind}` has no attribute `{name}`.{remedy}")


class _Absent(type):
    """The type of what can be imported and not be used: calls and attributes say why."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AbsentError(f"Foretoken has no `{cls.__name__}`. {cls.__doc__}")

    def __getattr__(cls, name: str) -> Any:
        raise AbsentError(f"Foretoken has no `{cls.__name__}.{name}`. {cls.__doc__}")


def absent_name(name: str) -> Any:
    """A class for one of `NAMES`: annotations may hold it, and whoever uses it is told."""
    return _Absent(name, (), {"__doc__": NAMES[name], "__module__": "foretoken"})
