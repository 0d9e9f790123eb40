"""Names that vLLM's users type and that this version does not have.

Each is taken at the values at which it changes nothing here, and refused at any other with what to
write instead. So code moves over with its import changed, and no wish is dropped in silence.
Classes and methods that are absent say the same when they are used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn, TypeVar

from foretoken.errors import AbsentError, ConfigError, RequestError, check_known_keys

_Class = TypeVar("_Class")
_log = logging.getLogger(__name__)


class Foreign(NamedTuple):
    """A name we do not have: where it is harmless, and what to write where it is not.

    Attributes:
        note: what is logged where its value is true and harmless.
    """

    harmless: tuple[Any, ...]
    instead: str
    note: str = ""


def _all(names: str, foreign: Foreign) -> dict[str, Foreign]:
    """The same for each of these names."""
    return dict.fromkeys(names.split(), foreign)


_OFF = (None, False)
_ONE_PROCESS = Foreign((None, 1), "This version computes in one process.")
_NO_MEDIA = Foreign((None, {}), "This version takes text alone.")
_STRUCTURED = Foreign((None,), "Write `SamplingParams(structured_outputs={'json': schema})`.")
_NO_LORA = Foreign((None, False), "Merge the adapter into the checkpoint's weights.")
_BEAM = "Beam search is not there: draw `n` samples with logprobs=0 and rank by cumulative_logprob."
_WHOLE_TEXT = (
    "Every output holds the whole text so far: print what is new in it, or have `AsyncEngine` "
    "yield what is new by deltas=True."
)
_IDS = "Ask for `logprobs` of the likeliest tokens."
_SPECULATION = Foreign((None,), "Put it into `speculative_config`.")
_NO_GRAPHS = Foreign((None, 8192), "Leave it out: decode steps are captured at any length.")
_EITHER = Foreign((None, True, False), "Leave it out.")
_OWN_CONFIG = "Edit config.json in a copy of the checkpoint."
_NO_PLUGIN = "No plugin reads it here."
_REPETITION = "Use `frequency_penalty` or `repetition_penalty`."
_GENERATES = "This version generates text."
_ABSENT = "Leave it out: this version has nothing that it would change."

SAMPLING_FIELDS = {
    "best_of": Foreign((None, 1), "Ask for `n` samples and rank them by cumulative_logprob."),
    "use_beam_search": Foreign(_OFF, _BEAM),
    "length_penalty": Foreign((None, 1.0), _BEAM),
    "early_stopping": Foreign(_OFF, _BEAM),
    "guided_decoding": _STRUCTURED,
    "logits_processors": Foreign((None, []), "`logit_bias` and `bad_words` change single tokens."),
    "truncation_side": Foreign((None, "left"), "Cut the ids: {'prompt_token_ids': ids[:n]}."),
    "spaces_between_special_tokens": Foreign((None, True), "Decode `token_ids` as you need them."),
    "output_kind": Foreign((None, "CUMULATIVE"), _WHOLE_TEXT),
    "stream_interval": Foreign((None, 1), _WHOLE_TEXT),
    "flat_logprobs": Foreign(_OFF, "Log-probabilities are a list of dicts."),
    "logprob_token_ids": Foreign((None,), _IDS),
    "prompt_logprob_token_ids": Foreign((None,), _IDS),
    "prompt_logprob_start": Foreign((None, 0), "Cut the list `prompt_logprobs`."),
    "extra_args": Foreign((None, {}), _NO_PLUGIN),
    "thinking_token_budget": Foreign((None, -1), "Bound the answer by `max_tokens`."),
    "repetition_detection": Foreign((None,), _REPETITION),
    "skip_clone": _EITHER,
    "skip_reading_prefix_cache": Foreign(_OFF, "Give the request a `cache_salt` of its own."),
    "watermarking": Foreign(_OFF, "No text is watermarked here."),
    "routed_experts_prompt_start": Foreign((None, 0), "The routing of experts is not told."),
    "trace_decode_token_ids": Foreign((None,), "The drafter `forced` drafts given tokens."),
}

CALL_OPTIONS = {
    "lora_request": _NO_LORA,
    "priority": Foreign((None, 0), "Set `SamplingParams.priority`."),
    "tokenization_kwargs": Foreign((None, {}), "Encode the text and pass `prompt_token_ids`."),
    "mm_processor_kwargs": _NO_MEDIA,
    "guided_options_request": _STRUCTURED,
    "prompt_adapter_request": _NO_LORA,
    "prompt_token_ids": Foreign((None,), "Pass them as the prompt: {'prompt_token_ids': ids}."),
    "pooling_params": Foreign((None,), _GENERATES),
    "reset_running_requests": _EITHER,  # they keep what they hold, and nobody finds it
    "reset_connector": _EITHER,
}

PROMPT_KEYS = {
    "multi_modal_data": _NO_MEDIA,
    "multi_modal_uuids": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "prompt_embeds": Foreign((None,), "Pass `prompt` or `prompt_token_ids`."),
    "token_type_ids": Foreign((None,), "No model that is served here reads them."),
    **_all("encoder_prompt decoder_prompt", Foreign((None,), "Decoders are served alone.")),
}

SPECULATIVE_FIELDS = {
    "draft_tensor_parallel_size": _ONE_PROCESS,
    "disable_by_batch_size": Foreign((None,), "Set `num_speculative_tokens` to `auto`."),
    "disable_padded_drafter_batch": _EITHER,
    "quantization": Foreign((None,), "Weights are read as they are stored."),
    "max_model_len": Foreign((None,), "The draft's context is that of its checkpoint."),
    "tensor_parallel_size": _ONE_PROCESS,
    "enforce_eager": Foreign((None,), "Drafts are launched as the target is: `enforce_eager`."),
    "attention_backend": Foreign((None,), "`backend` chooses the kernels of both models."),
    "moe_backend": Foreign((None,), "`backend` chooses the kernels of both models."),
    "kv_cache_dtype": Foreign((None, "auto"), "The cache has the dtype of the weights."),
    "code_revision": Foreign((None,), "Code from a checkpoint is never run: docs/models.md."),
    "hf_overrides": Foreign((None, {}), _OWN_CONFIG),
    "draft_load_config": Foreign((None,), "Weights are read as they are stored."),
    "load_config": Foreign((None,), "Weights are read as they are stored."),
    "parallel_drafting": Foreign(_OFF, "Drafts are made one after the other."),
    "use_local_argmax_reduction": Foreign(_OFF, _ONE_PROCESS.instead),
    "use_heterogeneous_vocab": Foreign(_OFF, "`draft_text` drafts with another tokenizer."),
    "speculative_token_tree": Foreign((None,), "Drafts are a chain: `num_speculative_tokens`."),
    "disable_logprobs": Foreign(_OFF, "Log-probabilities are told wherever they are asked for."),
    "acceptance_method": Foreign((None,), "Write `rejection_sample_method`."),
    "num_draft_tokens": Foreign((None,), "Write `num_speculative_tokens`."),
    **_all(
        "fly_window_size fly_entropy_threshold fly_entropy_top_k posterior_threshold "
        "posterior_alpha typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha",
        Foreign((None,), "Every rule here is lossless but `synthetic`: docs/verification.md."),
    ),
}

_NO_HEADS = "{} are not served. Take `draft_model`, `eagle3`, `ngram` or `suffix`."
SPECULATIVE_METHODS = {
    "eagle": _NO_HEADS.format("Heads of EAGLE and EAGLE-2 (`eagle3` takes those of EAGLE-3 alone)"),
    "eagle2": _NO_HEADS.format("Heads of EAGLE-2"),
    "medusa": _NO_HEADS.format("Heads of Medusa"),
    "mlp_speculator": _NO_HEADS.format("MLP speculators"),
    "mtp": _NO_HEADS.format("Layers of multi-token prediction"),
    "dflash": _NO_HEADS.format("Block-diffusion drafters"),
    "dspark": _NO_HEADS.format("Block-diffusion drafters"),
    "extract_hidden_states": "It drafts nothing: this version has no such side output.",
    "custom_class": "A drafter of your own is one file: ARCHITECTURE.md, Four recipes.",
    "ngram_gpu": "Write `ngram`: it runs on the device where there is one.",
    "[ngram]": "Write `method`: `ngram`.",
}
"""Methods of vLLM that are none here, and what to take instead."""

ENGINE_OPTIONS = {
    "task": Foreign((None, "auto", "generate"), _GENERATES),
    "runner": Foreign((None, "auto", "generate"), _GENERATES),
    "convert": Foreign((None, "auto", "none"), _GENERATES),
    "tokenizer_mode": Foreign(("auto", "hf"), "Tokenizers are loaded by Transformers."),
    "config_format": Foreign(("auto", "hf"), "Checkpoints are read in Hugging Face layout."),
    "model_impl": Foreign(("auto", "transformers"), "Model code comes from Transformers."),
    "tokenizer_revision": Foreign((None,), "Name a folder of that revision as `tokenizer`."),
    "code_revision": Foreign((None,), "Code from a checkpoint is never run: docs/models.md."),
    "download_dir": Foreign((None,), "Set HF_HOME: checkpoints go to the hub's own cache."),
    "hf_token": Foreign((None,), "Set HF_TOKEN, or log in with `hf auth login`."),
    "skip_tokenizer_init": Foreign(_OFF, "Token ids are taken as they are, tokenizer or not."),
    "trust_remote_code": Foreign(
        (None, False, True),
        "Leave it out.",
        note="trust_remote_code=True changes nothing: code from a checkpoint is never run.",
    ),
    "tensor_parallel_size": _ONE_PROCESS,
    "pipeline_parallel_size": _ONE_PROCESS,
    "data_parallel_size": _ONE_PROCESS,
    "distributed_executor_backend": Foreign((None, "uni"), _ONE_PROCESS.instead),
    "disable_custom_all_reduce": _EITHER,
    "quantization": Foreign((None,), "Weights are read as they are stored: docs/models.md."),
    "kv_cache_memory_bytes": Foreign((None,), "Write `kv_cache_gib`."),
    "num_gpu_blocks_override": Foreign((None,), "Write `num_blocks`."),
    "kv_cache_dtype": Foreign(("auto",), "The cache has the dtype of the weights."),
    "swap_space": Foreign((None, 0, 4), "Preempted requests compute their tokens again."),
    "cpu_offload_gb": Foreign((None, 0), "All weights are on one device."),
    "compilation_config": Foreign((None, 0, {}), "Leave it out: nothing is compiled."),
    "max_seq_len_to_capture": _NO_GRAPHS,
    "max_context_len_to_capture": _NO_GRAPHS,
    "enable_chunked_prefill": Foreign((None, True), "Long prompts are always computed in chunks."),
    "use_v2_block_manager": _EITHER,
    "scheduling_policy": Foreign(("fcfs",), "Set `SamplingParams.priority`."),
    "attention_backend": Foreign((None,), "`backend` chooses the kernels."),
    "disable_sliding_window": Foreign(_OFF, "Lower `max_model_len` to the window."),
    "max_logprobs": Foreign((None, 20), "A request gets at most 20."),
    "logprobs_mode": Foreign((None, "raw_logprobs"), "They are those of the raw logits."),
    "logits_processors": SAMPLING_FIELDS["logits_processors"],
    "guided_decoding_backend": Foreign((None, "auto", "guidance"), _STRUCTURED.instead),
    "structured_outputs_config": Foreign((None, {}), _STRUCTURED.instead),
    "disable_log_stats": _EITHER,  # they are always counted, and never printed
    "enable_lora": _NO_LORA,
    "allowed_local_media_path": Foreign((None, ""), _NO_MEDIA.instead),
    "limit_mm_per_prompt": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "hf_overrides": Foreign((None, {}), _OWN_CONFIG),
    "rope_scaling": Foreign((None, {}), _OWN_CONFIG),
    "rope_theta": Foreign((None,), _OWN_CONFIG),
    "override_generation_config": Foreign((None, {}), "Pass `SamplingParams` with each call."),
    "speculative_model": _SPECULATION,
    "num_speculative_tokens": _SPECULATION,
    "ngram_prompt_lookup_max": _SPECULATION,
    "ngram_prompt_lookup_min": _SPECULATION,
    "model_loader_extra_config": Foreign((None, {}), "Weights are read as they are stored."),
    "ignore_patterns": Foreign((None,), "Weights are read as they are stored."),
    "safetensors_load_strategy": Foreign((None, "lazy"), "Weights are read as they are stored."),
    "pt_load_map_location": Foreign((None, "cpu"), "Weights are read as they are stored."),
    "use_tqdm_on_load": _EITHER,
    "served_model_name": Foreign((None,), "`foretoken serve` has --served-model-name."),
    "reasoning_parser": Foreign((None, ""), "`foretoken serve` has --reasoning-parser."),
    "hf_config_path": Foreign((None,), _OWN_CONFIG),
    "prefix_caching_hash_algo": Foreign(
        (None, "builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        "Leave it out: prefixes are compared, not hashed.",
    ),
    "enable_sleep_mode": Foreign(_OFF, "`LLM.close()` releases the memory."),
    "enable_prompt_embeds": Foreign(_OFF, "Pass `prompt` or `prompt_token_ids`."),
    "stream_interval": Foreign((None, 1), _WHOLE_TEXT),
    "max_num_partial_prefills": Foreign((None, 1), "`max_step_seconds` bounds a step."),
    "max_long_partial_prefills": Foreign((None, 1), "`max_step_seconds` bounds a step."),
    "long_prefill_token_threshold": Foreign((None, 0), "`max_step_seconds` bounds a step."),
    "optimization_level": Foreign((None, 0, 1, 2, 3), "Leave it out: nothing is compiled."),
    "performance_mode": Foreign((None, "balanced"), "Leave it out."),
    "additional_config": Foreign((None, {}), _NO_PLUGIN),
    "scheduler_cls": Foreign((None,), _NO_PLUGIN),
    "worker_cls": Foreign((None, "auto"), _NO_PLUGIN),
    "worker_extension_cls": Foreign((None, ""), _NO_PLUGIN),
    "io_processor_plugin": Foreign((None,), _NO_PLUGIN),
    "logits_processor_pattern": Foreign((None,), SAMPLING_FIELDS["logits_processors"].instead),
    "pooler_config": Foreign((None,), _GENERATES),
    "override_pooler_config": Foreign((None,), _GENERATES),
    "swap_space_bytes": Foreign((None, 0), "Preempted requests compute their tokens again."),
    "preemption_mode": Foreign((None, "recompute"), "Preempted requests compute anew."),
    "calculate_kv_scales": Foreign(_OFF, "The cache has the dtype of the weights."),
    "kv_offloading_size": Foreign((None, 0), "The cache is on one device."),
    "profiler_config": Foreign((None, {}), "`foretoken bench` shows where the time goes."),
    "nnodes": _ONE_PROCESS,
    "node_rank": Foreign((None, 0), _ONE_PROCESS.instead),
    **_all(
        "prefill_context_parallel_size decode_context_parallel_size data_parallel_size_local "
        "max_parallel_loading_workers",
        _ONE_PROCESS,
    ),
    **_all(
        "enable_expert_parallel enable_eplb enable_dbo ray_workers_use_nsight worker_use_ray "
        "engine_use_ray data_parallel_hybrid_lb data_parallel_external_lb",
        Foreign(_OFF, _ONE_PROCESS.instead),
    ),
    **_all(
        "data_parallel_rank data_parallel_address data_parallel_rpc_port data_parallel_backend "
        "data_parallel_start_rank master_addr master_port all2all_backend",
        Foreign((None,), _ONE_PROCESS.instead),
    ),
    **_all(
        "disable_async_output_proc disable_cascade_attn disable_chunked_mm_input "
        "disable_hybrid_kv_cache_manager enable_log_requests disable_log_requests "
        "kv_cache_metrics aggregate_engine_logging allow_deprecated_quantization",
        _EITHER,
    ),
    **_all(
        "max_loras max_lora_rank lora_dtype max_cpu_loras fully_sharded_loras default_mm_loras "
        "lora_extra_vocab_size enable_prompt_adapter",
        _NO_LORA,
    ),
    **_all(
        "allowed_media_domains enable_mm_embeds interleave_mm_strings media_io_kwargs "
        "mm_processor_cache_gb mm_processor_cache_type mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend skip_mm_profiling video_pruning_rate "
        "disable_mm_preprocessor_cache",
        Foreign((None, False, {}), _NO_MEDIA.instead),
    ),
    **_all(
        "kv_transfer_config kv_events_config ec_transfer_config attention_config kernel_config "
        "cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes mamba_cache_dtype "
        "mamba_ssm_cache_dtype mamba_block_size otlp_traces_endpoint collect_detailed_traces "
        "show_hidden_metrics_for_version override_attention_dtype num_lookahead_slots",
        Foreign((None,), _ABSENT),
    ),
}

RENAMED = {"gpu_memory_utilization": "memory_fraction"}
"""Options of vLLM's that are ours by another name."""

NAMES = {
    "EngineArgs": "Pass its options to `LLM`.",
    "AsyncEngineArgs": "Pass its options to `AsyncEngine`.",
    "LLMEngine": "Use `LLM.generate` or `LLM.stream`; `AsyncEngine` takes requests at any time.",
    "AsyncLLMEngine": "Write `AsyncEngine(model, **options)`.",
    "AsyncLLM": "Write `AsyncEngine(model, **options)`.",
    "GuidedDecodingParams": "Write `SamplingParams(structured_outputs={'json': schema})`.",
    "BeamSearchParams": _BEAM,
    "LoRARequest": _NO_LORA.instead,
    "ModelRegistry": "Models come from Transformers: docs/models.md says which are served.",
    "initialize_ray_cluster": _ONE_PROCESS.instead,
    "PromptType": "A prompt is a text, token ids, a `TextPrompt` or a `TokensPrompt`.",
    "EmbedsPrompt": "Pass `prompt` or `prompt_token_ids`.",
    **dict.fromkeys(
        "PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput "
        "ClassificationOutput ClassificationRequestOutput ScoringOutput "
        "ScoringRequestOutput".split(),
        _GENERATES,
    ),
}
"""Classes and functions that vLLM exports and Foretoken lacks, and what to write instead."""

_PROFILE = "`foretoken bench` shows where the time goes; any profiler of Python or CUDA works."
_SLEEP = "`close()` releases models and caches; make a new one to go on."
_NO_WORKERS = "There are no workers: the engine computes in this process."
METHODS = {
    **dict.fromkeys("embed encode classify score reward token_classify plugin".split(), _GENERATES),
    **dict.fromkeys("start_profile stop_profile".split(), _PROFILE),
    **dict.fromkeys("sleep wake_up is_sleeping".split(), _SLEEP),
    **dict.fromkeys("collective_rpc apply_model get_world_size".split(), _NO_WORKERS),
    **dict.fromkeys("add_lora remove_lora list_loras pin_lora".split(), _NO_LORA.instead),
    "beam_search": _BEAM,
    "get_metrics": "Read `metrics`, or the `metrics` of an output.",
    "set_tokenizer": "Pass `tokenizer` when it is built.",
    "from_engine_args": "Pass the options when it is built.",
    "llm_engine": "The engine is `engine`; its methods are other ones.",
    "model_config": "Options are in `config`, limits in `engine.limits`.",
    "vllm_config": "Options are in `config`, limits in `engine.limits`.",
    "preprocess_chat": "`get_tokenizer().apply_chat_template` renders a conversation.",
    "enqueue": "Use `AsyncEngine`: it takes requests at any time.",
    "enqueue_chat": "Use `AsyncEngine`: it takes requests at any time.",
    "wait_for_completion": "Use `AsyncEngine`: it takes requests at any time.",
    "add_request": "Use `AsyncEngine`: it takes requests at any time.",
    "reset_mm_cache": _NO_MEDIA.instead,
    "init_weight_transfer_engine": "Weights are those of the checkpoint: make a new `LLM`.",
    "update_weights": "Weights are those of the checkpoint: make a new `LLM`.",
    "pause_generation": "`abort` ends a request.",
    "check_health": "`status.failure` says why nothing is served, if so.",
    "do_log_stats": "Read `metrics` and `status`.",
    "shutdown": "Write `close()`.",
    "get_model_config": "Options are in `config`.",
    "get_supported_tasks": _GENERATES,
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
    "lora_request": _NO_LORA.instead,
    "kv_transfer_params": _ONE_PROCESS.instead,
    "routed_experts": "The routing of experts is not told.",
    "multi_modal_placeholders": _NO_MEDIA.instead,
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


def without_foreign(
    given: Mapping[str, Any],
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
    where: str = "",
) -> dict[str, Any]:
    """What is given without the names of `table`.

    Args:
        where: stands before a name in an error.

    Raises:
        error: one of them has a value that would change something.
    """
    for name in [name for name in given if name in table]:
        harmless, instead, note = table[name]
        if given[name] is not None and not any(_is_same(given[name], v) for v in harmless):
            shown = " or ".join(repr(value) for value in harmless if value is not None)
            bound = f"left out, or {shown}" if shown else "left out"
            raise error(where + name, given[name], bound, instead)
        if note and given[name]:
            _log.warning(note)
    return {name: value for name, value in given.items() if name not in table}


def names_checked(
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
    where: str,
    prefix: str = "",
) -> Callable[[type[_Class]], type[_Class]]:
    """A decorator: names that a dataclass lacks are refused by an error of ours, not `TypeError`.

    Args:
        where: what the class is called in errors.
        prefix: stands before a name of `table` in one.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        initialise: Any = cls.__init__
        first, *others = fields(cls)  # type: ignore[arg-type]
        names = [first.name, *(field.name for field in others)]

        @functools.wraps(initialise)
        def checked(self: _Class, *unnamed: Any, **given: Any) -> None:
            if unnamed and first.kw_only:
                remedy = f"Write {cls.__name__}({first.name}=...), and so on."
                raise error(where, unnamed, "given by their names", remedy)
            given = without_foreign(given, table, error, prefix)
            check_known_keys(where, given, names, error)
            initialise(self, *unnamed, **given)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


def _is_same(given: Any, value: Any) -> bool:
    """Equal and of the same kind: True is not 1 here. A member of an enum goes by its name."""
    if value is None or isinstance(value, bool):
        return given is value
    if isinstance(value, str):
        return bool(getattr(given, "name", given) == value)
    kinds = (int, float) if isinstance(value, (int, float)) else type(value)
    return isinstance(given, kinds) and not isinstance(given, bool) and given == value
