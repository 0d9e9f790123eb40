"""vLLM's options, classes and methods that Foretoken lacks, and what to write instead.

An option is accepted at values that change nothing here; any other value raises an error, so that
no option is silently ignored. Absent classes and methods raise an error when they are used.
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
    """An option of vLLM's that Foretoken lacks.

    Attributes:
        harmless: values that are accepted, besides None; `...` stands for any value.
        instead: the last sentence of the error about any other value: what to write instead.
        note: a warning that is logged if an accepted value is true; "": none.
    """

    harmless: tuple[Any, ...]
    instead: str
    note: str = ""


def same_for(names: str, *foreign: Any) -> dict[str, Foreign]:
    """{name: entry} for `names`, separated by spaces; `foreign`: the entry, or its fields."""
    entry = foreign[0] if isinstance(foreign[0], Foreign) else Foreign(*foreign)
    return dict.fromkeys(names.split(), entry)


OFF = (False,)
ONE_PROCESS = Foreign(
    (1,), "An engine is one process: start several by `foretoken serve --replicas N`."
)
NO_MEDIA = Foreign(({},), "This version takes text alone.")
NO_LORA = Foreign((False,), "Merge the adapter into the checkpoint's weights.")
WHOLE_TEXT = (
    "Outputs contain the whole text so far; `AsyncEngine` yields new text with deltas=True."
)
EITHER = Foreign((True, False), "Leave it out.")
OWN_CONFIG = "Edit config.json in a copy of the checkpoint."
NO_PLUGIN = "No plugin reads it here."
GENERATES = "This version generates text."
_STORED = "Weights are read as they are stored: docs/models.md."
ANY, ANY_FLAG = (...,), (..., True)  # any value; a bool marks options without a value

_STRUCTURED = Foreign((), "Write `SamplingParams(structured_outputs={'json': schema})`.")
_BEAM = "No beam search here: draw `n` samples with logprobs=0 and rank them by cumulative_logprob."
_LIKELIEST = "Ask for `logprobs` of the likeliest tokens."
SAMPLING_FIELDS = {
    "best_of": Foreign((1,), "Ask for `n` samples and rank them by cumulative_logprob."),
    **same_for("use_beam_search early_stopping", OFF, _BEAM),
    "length_penalty": Foreign((1.0,), _BEAM),
    "guided_decoding": _STRUCTURED,
    "logits_processors": Foreign(([],), "`logit_bias` and `bad_words` change single tokens."),
    "truncation_side": Foreign(("left",), "Cut the ids: {'prompt_token_ids': ids[:n]}."),
    "spaces_between_special_tokens": Foreign((True,), "Decode `token_ids` as you need them."),
    "output_kind": Foreign(("CUMULATIVE",), WHOLE_TEXT),
    "stream_interval": Foreign((1,), WHOLE_TEXT),
    "flat_logprobs": Foreign(OFF, "Log-probabilities are a list of dicts."),
    **same_for("logprob_token_ids prompt_logprob_token_ids", (), _LIKELIEST),
    "prompt_logprob_start": Foreign((0,), "Cut the list `prompt_logprobs`."),
    "extra_args": Foreign(({},), NO_PLUGIN),
    "thinking_token_budget": Foreign((-1,), "Bound the answer by `max_tokens`."),
    "repetition_detection": Foreign((), "Use `frequency_penalty` or `repetition_penalty`."),
    "skip_clone": EITHER,
    "skip_reading_prefix_cache": Foreign(OFF, "Give the request a `cache_salt` of its own."),
    "watermarking": Foreign(OFF, "No text is watermarked here."),
    "routed_experts_prompt_start": Foreign((0,), "The routing of experts is not reported."),
    "trace_decode_token_ids": Foreign((), "The drafter `forced` drafts given tokens."),
}

CALL_OPTIONS = {
    **same_for("lora_request prompt_adapter_request", NO_LORA),
    "priority": Foreign((0,), "Set `SamplingParams.priority`."),
    "tokenization_kwargs": Foreign(({},), "Encode the text and pass `prompt_token_ids`."),
    "mm_processor_kwargs": NO_MEDIA,
    "guided_options_request": _STRUCTURED,
    "prompt_token_ids": Foreign((), "Pass them as the prompt: {'prompt_token_ids': ids}."),
    "pooling_params": Foreign((), GENERATES),
    # Running requests keep their blocks, and no other request finds these.
    **same_for("reset_running_requests reset_connector", EITHER),
}

_NO_ENCODERS = "Models with an encoder are not served."
PROMPT_KEYS = {
    **same_for("multi_modal_data multi_modal_uuids mm_processor_kwargs", NO_MEDIA),
    "prompt_embeds": Foreign((), "Pass `prompt` or `prompt_token_ids`."),
    "token_type_ids": Foreign((), "No served model reads them."),
    **same_for("encoder_prompt decoder_prompt", (), _NO_ENCODERS),
}

SPECULATIVE_FIELDS = {
    **same_for("draft_tensor_parallel_size tensor_parallel_size", ONE_PROCESS),
    "disable_by_batch_size": Foreign((), "Set `num_speculative_tokens` to `auto`."),
    "disable_padded_drafter_batch": EITHER,
    **same_for("quantization draft_load_config load_config", (), _STORED),
    "max_model_len": Foreign((), "The draft's context is that of its checkpoint."),
    "enforce_eager": Foreign((), "Drafts are launched as the target is: `enforce_eager`."),
    **same_for("attention_backend moe_backend", (), "`backend` chooses kernels of both models."),
    "kv_cache_dtype": Foreign(("auto",), "The cache has the dtype of the weights."),
    "code_revision": Foreign((), "Code from a checkpoint is never run: docs/models.md."),
    "hf_overrides": Foreign(({},), OWN_CONFIG),
    "parallel_drafting": Foreign(OFF, "Drafts are made one after the other."),
    "use_local_argmax_reduction": Foreign(OFF, ONE_PROCESS.instead),
    "use_heterogeneous_vocab": Foreign(OFF, "`draft_text` drafts with another tokenizer."),
    "speculative_token_tree": Foreign((), "Drafts are a chain: `num_speculative_tokens`."),
    "disable_logprobs": Foreign(OFF, "Requests that ask for log-probabilities always get them."),
    "acceptance_method": Foreign((), "Write `rejection_sample_method`."),
    "num_draft_tokens": Foreign((), "Write `num_speculative_tokens`."),
    **same_for(
        "fly_window_size fly_entropy_threshold fly_entropy_top_k posterior_threshold "
        "posterior_alpha typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha",
        (),
        "Every rule here except `synthetic` is lossless: docs/verification.md.",
    ),
}

_UNSERVED = "{} are not served. Take `draft_model`, `eagle3`, `ngram` or `suffix`."
SPECULATIVE_METHODS = {
    "eagle": _UNSERVED.format("Heads of EAGLE and EAGLE-2 (`eagle3` takes heads of EAGLE-3 only)"),
    "eagle2": _UNSERVED.format("Heads of EAGLE-2"),
    "medusa": _UNSERVED.format("Heads of Medusa"),
    "mlp_speculator": _UNSERVED.format("MLP speculators"),
    "mtp": _UNSERVED.format("Layers of multi-token prediction"),
    **dict.fromkeys(("dflash", "dspark"), _UNSERVED.format("Block-diffusion drafters")),
    "extract_hidden_states": "It drafts nothing, and Foretoken does not output hidden states.",
    "custom_class": "A drafter of your own is one file: ARCHITECTURE.md, Recipes.",
    "ngram_gpu": "Write `ngram`: it runs on the device where there is one.",
    "[ngram]": "Write `method`: `ngram`.",
}
"""vLLM's drafting methods that are absent here, and what to use instead."""

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
"""Classes and functions that vLLM exports, and what to write instead."""

_PROFILE = "`foretoken bench` shows where the time goes; any profiler of Python or CUDA works."
_SLEEP = "`close()` releases models and caches; make a new `LLM` or `AsyncEngine` to go on."
_NO_WORKERS = "There are no workers: the engine computes in this process."
_ANY_TIME = "Use `AsyncEngine`: it takes requests at any time."
_FIXED_WEIGHTS = "Weights cannot be changed: make a new `LLM` from another checkpoint."
METHODS = {
    **dict.fromkeys("embed encode classify score reward token_classify plugin".split(), GENERATES),
    **dict.fromkeys("start_profile stop_profile".split(), _PROFILE),
    **dict.fromkeys("sleep wake_up is_sleeping".split(), _SLEEP),
    **dict.fromkeys("collective_rpc apply_model get_world_size".split(), _NO_WORKERS),
    **dict.fromkeys("add_lora remove_lora list_loras pin_lora".split(), NO_LORA.instead),
    "beam_search": _BEAM,
    "get_metrics": "Read `metrics`, or the `metrics` of an output.",
    "set_tokenizer": "Pass `tokenizer` to `LLM` or `AsyncEngine`.",
    "from_engine_args": "Pass the options to `LLM` or `AsyncEngine`.",
    "llm_engine": "The engine is `engine`; it has other methods.",
    **dict.fromkeys(("model_config", "vllm_config"), "Read `config` and `engine.limits`."),
    "preprocess_chat": "`get_tokenizer().apply_chat_template` renders a conversation.",
    **dict.fromkeys("enqueue enqueue_chat wait_for_completion add_request".split(), _ANY_TIME),
    "reset_mm_cache": NO_MEDIA.instead,
    **dict.fromkeys("init_weight_transfer_engine update_weights".split(), _FIXED_WEIGHTS),
    "pause_generation": "`abort` ends a request.",
    "check_health": "`status.failure` is None, or says why nothing is served.",
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
    **dict.fromkeys("encoder_prompt encoder_prompt_token_ids".split(), _NO_ENCODERS),
    "lora_request": NO_LORA.instead,
    "kv_transfer_params": ONE_PROCESS.instead,
    "routed_experts": "The routing of experts is not reported.",
    "multi_modal_placeholders": NO_MEDIA.instead,
    "num_generation_tokens": "Count `token_ids`.",
    "sampling_type": "Read `temperature` and `seed`.",
    "all_stop_token_ids": "Read `stop_token_ids`, and the checkpoint's end-of-text tokens.",
    "update_from_generation_config": "`LLM.get_default_sampling_params` has the values.",
}
"""Attributes of vLLM's parameters and outputs, and what to use instead."""

_SPECULATION = Foreign((), "Put it into `speculative_config`.")
_NO_GRAPHS = Foreign((8192,), "Leave it out: decode steps are captured at any length.")
_ONE_GRAMMAR = "Leave it out: llguidance reads all schemas, expressions and grammars here."
_PREEMPTED = "Preempted requests compute their tokens again."
_METRICS = "Outputs have `metrics` and a `trace`; a server has /metrics."

ENGINE_OPTIONS = {
    # The model and its weights.
    **same_for("task runner", ("auto", "generate"), GENERATES),
    "convert": Foreign(("auto", "none"), GENERATES),
    "tokenizer_mode": Foreign(("auto", "hf"), "Tokenizers are loaded by Transformers."),
    "config_format": Foreign(("auto", "hf"), "Checkpoints are read in Hugging Face layout."),
    "model_impl": Foreign(("auto", "transformers"), "Model code comes from Transformers."),
    "tokenizer_revision": Foreign((), "Name a folder of that revision as `tokenizer`."),
    "code_revision": Foreign((), "Code from a checkpoint is never run: docs/models.md."),
    "download_dir": Foreign((), "Set HF_HOME: checkpoints go to the hub's own cache."),
    "hf_token": Foreign((), "Set HF_TOKEN, or log in with `hf auth login`."),
    "skip_tokenizer_init": Foreign(OFF, "Token ids are taken as they are, tokenizer or not."),
    "trust_remote_code": EITHER._replace(
        note="trust_remote_code=True changes nothing: code from a checkpoint is never run."
    ),
    "quantization": Foreign((), _STORED),
    "quantization_config": Foreign(({},), _STORED),
    **same_for("hf_overrides rope_scaling model_class_overrides", ({},), OWN_CONFIG),
    **same_for("rope_theta hf_config_path", (), OWN_CONFIG),
    "override_attention_dtype": Foreign((), "Write `dtype`."),
    "override_generation_config": Foreign(({},), "Set parameters in each request or call."),
    "served_model_name": Foreign((), "`foretoken serve` has --served-model-name."),
    "reasoning_parser": Foreign(("",), "`foretoken serve` has --reasoning-parser."),
    **same_for("ignore_patterns kv_cache_dtype_skip_layers", (..., []), ""),
    # Several processes, several machines.
    **same_for(
        "tensor_parallel_size pipeline_parallel_size data_parallel_size nnodes "
        "data_parallel_size_local decode_context_parallel_size prefill_context_parallel_size",
        ONE_PROCESS,
    ),
    **same_for("node_rank data_parallel_rank data_parallel_start_rank", (0,), ONE_PROCESS.instead),
    "distributed_executor_backend": Foreign(("uni",), ONE_PROCESS.instead),
    **same_for(
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "enable_elastic_ep enable_fault_tolerance worker_use_ray engine_use_ray",
        OFF, ONE_PROCESS.instead,
    ),
    **same_for(
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config "
        "weight_transfer_config",
        ({},), ONE_PROCESS.instead,
    ),
    "numa_bind": Foreign(OFF, "Start Foretoken with numactl."),
    **same_for("numa_bind_nodes numa_bind_cpus", ([],), "Start Foretoken with numactl."),
    "device_ids": Foreign((), "Set CUDA_VISIBLE_DEVICES."),
    # Memory.
    "kv_cache_memory_bytes": Foreign((), "Write `kv_cache_gib`."),
    "num_gpu_blocks_override": Foreign((), "Write `num_blocks`."),
    "kv_cache_dtype": Foreign(("auto",), "The cache has the dtype of the weights."),
    "swap_space": Foreign((0, 4), _PREEMPTED),
    **same_for("swap_space_bytes kv_offloading_size", (0,), _PREEMPTED),
    "cpu_offload_gb": Foreign((0,), "All weights are on one device."),
    "offload_backend": Foreign(("auto",), "All weights are on one device."),
    "preemption_mode": Foreign(("recompute",), _PREEMPTED),
    "enable_sleep_mode": Foreign(OFF, "`LLM.close()` releases the memory."),
    # Steps, and reports about them.
    "compilation_config": Foreign((0, {}), "Leave it out: nothing is compiled."),
    **same_for("max_seq_len_to_capture max_context_len_to_capture", _NO_GRAPHS),
    **same_for("cudagraph_capture_sizes cuda_graph_sizes", ([],), _NO_GRAPHS.instead),
    "max_cudagraph_capture_size": Foreign((), _NO_GRAPHS.instead),
    "enable_chunked_prefill": Foreign((True,), "Long prompts are always computed in chunks."),
    "long_prefill_token_threshold": Foreign((0,), "`max_step_seconds` bounds a step."),
    "max_num_scheduled_tokens": Foreign((), "Write `max_num_batched_tokens`."),
    "scheduling_policy": Foreign(("fcfs",), "Set `SamplingParams.priority`."),
    "watermark": Foreign((0,), "Requests are admitted with all blocks that they need."),
    "scheduler_delay_factor": Foreign((0,), "Requests are admitted at the next step."),
    "num_scheduler_steps": Foreign((1,), "The scheduler runs before every step."),
    "stream_interval": Foreign((1,), WHOLE_TEXT),
    "performance_mode": Foreign(("balanced",), "Set `max_num_seqs` and K."),
    "attention_backend": Foreign((), "`backend` chooses the kernels."),
    **same_for("moe_backend linear_backend", ("auto",), "`backend` chooses the kernels."),
    **same_for("attention_config kernel_config", ({},), "`backend` chooses the kernels."),
    "disable_sliding_window": Foreign(OFF, "Lower `max_model_len` to the window."),
    "max_logprobs": Foreign((20,), "A request gets at most 20 log-probabilities per token."),
    "logprobs_mode": Foreign(("raw_logprobs",), "Log-probabilities come from the raw logits."),
    "logits_processors": SAMPLING_FIELDS["logits_processors"],
    "logits_processor_pattern": Foreign((), SAMPLING_FIELDS["logits_processors"].instead),
    "guided_decoding_backend": Foreign(("auto", "guidance"), _ONE_GRAMMAR),
    "structured_outputs_config": Foreign(
        ({}, {"backend": "auto"}, {"backend": "guidance"}), _ONE_GRAMMAR
    ),
    **same_for(
        "kv_sharing_fast_prefill enable_cumem_allocator enable_nccl_comm_suspend "
        "enable_return_routed_experts return_sampling_mask enable_trace_replay "
        "disable_logprobs_during_spec_decoding fail_on_environ_validation",
        OFF, "This version has nothing like it.",
    ),
    **same_for("reasoning_config additional_config", ({},), "This version has nothing like it."),
    **same_for("otlp_traces_endpoint collect_detailed_traces", (), _METRICS),
    "profiler_config": Foreign(({},), "`foretoken bench` shows where the time goes."),
    "per_request_spec_decode_metrics": Foreign(("none",), "Outputs have `metrics`."),
    **same_for(
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details",
        OFF, _METRICS,
    ),
    # Statistics are always counted, and never printed.
    **same_for("disable_log_stats disable_log_requests enable_log_requests", EITHER),
    **same_for(
        "scheduler_cls worker_cls worker_extension_cls io_processor_plugin",
        ("", "auto"), NO_PLUGIN,
    ),
    # Media and adapters.
    "mm_processor_kwargs": NO_MEDIA,
    "limit_mm_per_prompt": Foreign(
        ({}, {"image": 0}, {"image": 0, "video": 0}, {"image": 0, "video": 0, "audio": 0}),
        NO_MEDIA.instead,
    ),
    "allowed_local_media_path": Foreign(("",), NO_MEDIA.instead),
    **same_for("enable_mm_embeds mm_encoder_only enable_prompt_embeds", OFF, NO_MEDIA.instead),
    **same_for("enable_lora enable_prompt_adapter", NO_LORA),
    "lora_modules": Foreign(([],), NO_LORA.instead),
    "qlora_adapter_name_or_path": Foreign((), NO_LORA.instead),
    # Speculation.
    **same_for(
        "speculative_model num_speculative_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min "
        "spec_method spec_model spec_tokens speculative_model_quantization "
        "speculative_max_model_len speculative_draft_tensor_parallel_size "
        "speculative_disable_by_batch_size typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha",
        _SPECULATION,
    ),
    "speculative_disable_mqa_scorer": Foreign(OFF, _SPECULATION.instead),
    "spec_decoding_acceptance_method": Foreign(("rejection_sampler",), _SPECULATION.instead),
    # Settings of features that are absent here change nothing at any value.
    **same_for(
        "safetensors_load_strategy safetensors_prefetch_num_threads pt_load_map_location "
        "safetensors_prefetch_block_size model_loader_extra_config tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers master_addr "
        "master_port distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend dcp_comm_backend "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold dp_sync_interval "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size all2all_backend eplb_config "
        "expert_placement_strategy ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold max_parallel_loading_workers fault_tolerance_config "
        "prefill_schedule_interval prefix_caching_hash_algo prefix_cache_retention_interval "
        "kv_offloading_backend cpu_offload_params offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params num_lookahead_slots max_num_partial_prefills "
        "max_long_partial_prefills optimization_level ir_op_priority jit_monitor_mode "
        "show_hidden_metrics_for_version kv_cache_metrics_sample allowed_media_domains "
        "media_io_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb max_loras max_lora_rank lora_dtype "
        "lora_target_modules max_cpu_loras default_mm_loras lora_extra_vocab_size "
        "long_lora_scaling_factors max_prompt_adapters max_prompt_adapter_token mamba_backend "
        "mamba_ssu_algorithm mamba_cache_philox_rounds mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode mamba_config prefix_match_unit replayssm_buffer_len "
        "pooler_config override_pooler_config diffusion_config override_neuron_config "
        "gdn_prefill_backend kda_prefill_backend",
        ANY, "",
    ),
    **same_for(
        "allow_deprecated_quantization use_tqdm_on_load enable_expert_parallel "
        "enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb enable_dbo "
        "disable_nccl_for_dp_synchronization dcp_q_replicate ray_workers_use_nsight "
        "disable_custom_all_reduce use_v2_block_manager disable_cascade_attn "
        "disable_hybrid_kv_cache_manager scheduler_reserve_full_isl calculate_kv_scales "
        "disable_async_output_proc multi_step_stream_outputs enable_flashinfer_autotune "
        "enable_bf16x3_router_gemm jit_monitor_verbose aggregate_engine_logging "
        "interleave_mm_strings skip_mm_profiling mm_device_do_normalize disable_chunked_mm_input "
        "disable_mm_preprocessor_cache enable_mm_processor_stats fully_sharded_loras "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras enable_lora_bias enable_mamba_cache_stochastic_rounding "
        "use_replayssm enable_flash_late_interaction enable_multimodal_encoder_data_parallel",
        ANY_FLAG, "",
    ),
}  # fmt: skip
"""Options of vLLM's engine that this engine lacks."""

RENAMED = {"gpu_memory_utilization": "memory_fraction"}
"""Options of vLLM's that we have under another name."""

SERVER_OPTIONS = {
    # The server's reports.
    **same_for(
        "enable_request_id_headers enable_server_load_tracking enable_prompt_tokens_details "
        "enable_offline_docs language_model_only",
        EITHER,
    ),
    # Features that are always on; to switch one off is refused.
    "enable_auto_tool_choice": Foreign((True,), "Write --tool-call-parser none."),
    "exclude_tools_when_tool_choice_none": Foreign((True,), "`none` always hides the tools."),
    "enable_reasoning": Foreign((True,), "Write --reasoning-parser none."),
    "enable_tokenizer_info_endpoint": Foreign((True,), "/tokenizer_info asks for the API key."),
    **same_for("enable_log_deltas disable_frontend_multiprocessing", ANY_FLAG, ""),
    **same_for("cohere_is_reasoning_model", ANY_FLAG, ""),
    **same_for("max_log_len cohere_format", ANY, ""),
    "chat_template_content_format": Foreign(("auto", "string"), "Templates get texts."),
    "response_role": Foreign(("assistant",), "Answers have the role `assistant`."),
    "default_chat_template_kwargs": Foreign(({},), "Send `chat_template_kwargs` with requests."),
    "return_tokens_as_token_ids": Foreign(OFF, "Ask for it in each request."),
    "enable_force_include_usage": Foreign(OFF, "Set `stream_options.include_usage` in requests."),
    "enable_per_request_metrics": Foreign(OFF, "Answers have `metrics`; times are in /metrics."),
    "disable_uvicorn_access_log": Foreign(OFF, "Write --log-level warning."),
    "enable_log_outputs": Foreign(OFF, "Logs hold no text: docs/server.md."),
    "log_error_stack": Foreign(OFF, "Write --log-level debug."),
    "log_config_file": Foreign((), "Logs are lines of JSON; --log-level sets the least level."),
    "disable_access_log_for_endpoints": Foreign(
        ("/health", "/metrics", "/ping", "/health,/metrics", "/health,/metrics,/ping"),
        "Probes and scrapes are logged only at --log-level debug.",
    ),
    "fingerprint_mode": Foreign(("none",), "Answers have no fingerprint."),
    "fingerprint_value": Foreign((), "Answers have no fingerprint."),
    **same_for("tool_parser_plugin reasoning_parser_plugin", ("", "auto"), NO_PLUGIN),
    "middleware": Foreign(([],), NO_PLUGIN),
    "tool_server": Foreign((), "Clients run their tools themselves."),
    **same_for("allowed_methods allowed_headers", (["*"],), "Write --allowed-origins."),
    "allow_credentials": Foreign(OFF, "Clients send their key in `Authorization`."),
    "disable_fastapi_docs": Foreign(OFF, "/docs and /openapi.json say nothing of this server."),
    "enable_ssl_refresh": Foreign(OFF, "Start the server again with its new certificate."),
    "ssl_ciphers": Foreign((), "This machine's OpenSSL chooses the ciphers."),
    "uds": Foreign((), "Write --host and --port."),
    **same_for("h11_max_incomplete_event_size h11_max_header_count", (), "Use --max-header-bytes."),
    "config": Foreign((), "Write the options on the command line."),
    **same_for("grpc headless tokens_only", OFF, "This server speaks HTTP, in texts."),
    **same_for("max_num_queued_reqs max_num_queued_tokens", (), "Write --max-num-waiting."),
    "api_server_count": ONE_PROCESS,
}  # fmt: skip
"""Options of `vllm serve`, other than `ENGINE_OPTIONS`, that `foretoken serve` lacks."""


def without_foreign(
    options: Mapping[str, Any],
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
    where: str = "",
) -> dict[str, Any]:
    """The options that are not in `table`, a table of foreign options.

    Args:
        where: prefix of the option's name in the error.

    Raises:
        error: an option that is in `table` has a value that is not harmless.
    """
    for name, value in options.items():
        if value is None or name not in table:
            continue
        harmless, instead, note = table[name]
        if not any(_is_same(value, allowed) for allowed in harmless):
            shown = " or ".join(map(repr, harmless))
            bound = f"left out, or {shown}" if shown else "left out"
            raise error(where + name, value, bound, instead)
        if note and value:
            _log.warning(note)
    return {name: value for name, value in options.items() if name not in table}


def names_checked(
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
    where: str,
    prefix: str = "",
) -> Callable[[type[_Class]], type[_Class]]:
    """A decorator for a dataclass: unknown arguments raise `error`, not `TypeError`; so do
    positional arguments if the first field is keyword-only.

    Arguments in `table` are checked and dropped by `without_foreign`.

    Args:
        where: name of the class in errors.
        prefix: prefix of the names from `table` in errors.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        original_init: Any = cls.__init__
        first = fields(cls)[0]  # type: ignore[arg-type]
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]

        @functools.wraps(original_init)
        def checked_init(self: _Class, *args: Any, **kwargs: Any) -> None:
            if args and first.kw_only:
                remedy = f"Write {cls.__name__}({first.name}=...)."
                raise error(where, args, "given as keyword arguments", remedy)
            kwargs = without_foreign(kwargs, table, error, prefix)
            check_known_keys(where, kwargs, names, error)
            original_init(self, *args, **kwargs)

        cls.__init__ = checked_init  # type: ignore[assignment]
        return cls

    return decorate


def _is_same(value: Any, harmless: Any) -> bool:
    """Whether a value equals a harmless one: `...` equals everything, True does not equal 1, and a
    member of an enum equals its name."""
    if harmless is ...:
        return True
    if isinstance(harmless, bool):
        return value is harmless
    if isinstance(harmless, str):
        return bool(getattr(value, "name", value) == harmless)
    types = (int, float) if isinstance(harmless, (int, float)) else type(harmless)
    return isinstance(value, types) and not isinstance(value, bool) and value == harmless


def absent_attribute(owner: object, name: str) -> NoReturn:
    """A `__getattr__` that raises `AbsentError`; for a name of vLLM's it says what to write."""
    instead = METHODS.get(name) or OUTPUTS.get(name)
    remedy = f" {instead}" if instead else ""
    raise AbsentError(f"`{type(owner).__name__}` has no attribute `{name}`.{remedy}")


class _Absent(type):
    """Metaclass of absent classes: they can be imported; a call or an attribute raises."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AbsentError(f"Foretoken has no `{cls.__name__}`. {cls.__doc__}")

    def __getattr__(cls, name: str) -> Any:
        raise AbsentError(f"Foretoken has no `{cls.__name__}.{name}`. {cls.__doc__}")


def absent_name(name: str) -> Any:
    """A class for one of `NAMES`, for use in annotations; any other use raises `AbsentError`."""
    return _Absent(name, (), {"__doc__": NAMES[name], "__module__": "foretoken"})
