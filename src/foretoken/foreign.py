"""Names that vLLM's users type and that this version does not have.

Each is taken at the values at which it changes nothing here, and refused at any other with what to
write instead. So code moves over with its import changed, and no wish is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from foretoken.errors import ConfigError, RequestError


class Foreign(NamedTuple):
    """A name we do not have: where it is harmless, and what to write where it is not."""

    harmless: tuple[Any, ...]
    instead: str


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

SAMPLING_FIELDS = {
    "best_of": Foreign((None, 1), "Ask for `n` samples and rank them by cumulative_logprob."),
    "use_beam_search": Foreign(_OFF, _BEAM),
    "length_penalty": Foreign((None, 1.0), _BEAM),
    "early_stopping": Foreign(_OFF, _BEAM),
    "guided_decoding": _STRUCTURED,
    "logits_processors": Foreign((None, []), "`logit_bias` and `bad_words` change single tokens."),
    "truncate_prompt_tokens": Foreign((None,), "Cut the ids: {'prompt_token_ids': ids[-n:]}."),
    "detokenize": Foreign((True,), "Texts are made when they are read; ids are in `token_ids`."),
    "spaces_between_special_tokens": Foreign((True,), "Decode `token_ids` as you need them."),
    "output_kind": Foreign((None, "CUMULATIVE"), _WHOLE_TEXT),
    "stream_interval": Foreign((None, 1), _WHOLE_TEXT),
    "flat_logprobs": Foreign(_OFF, "Log-probabilities are a list of dicts."),
    "logprob_token_ids": Foreign((None,), _IDS),
    "prompt_logprob_token_ids": Foreign((None,), _IDS),
    "prompt_logprob_start": Foreign((None, 0), "Cut the list `prompt_logprobs`."),
    "extra_args": Foreign((None, {}), "No plugin reads them here."),
    "thinking_token_budget": Foreign((None, -1), "Bound the answer by `max_tokens`."),
    "repetition_detection": Foreign((None,), "Use `frequency_penalty` or `repetition_penalty`."),
    "skip_clone": _EITHER,
}

CALL_OPTIONS = {
    "lora_request": _NO_LORA,
    "priority": Foreign((None, 0), "Set `SamplingParams.priority`."),
    "tokenization_kwargs": Foreign((None, {}), "Encode the text and pass `prompt_token_ids`."),
    "mm_processor_kwargs": _NO_MEDIA,
    "guided_options_request": _STRUCTURED,
    "prompt_adapter_request": _NO_LORA,
}

PROMPT_KEYS = {
    "multi_modal_data": _NO_MEDIA,
    "multi_modal_uuids": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "prompt_embeds": Foreign((None,), "Pass `prompt` or `prompt_token_ids`."),
    "cache_salt": Foreign((None,), "An engine with enable_prefix_caching=False shares nothing."),
    "token_type_ids": Foreign((None,), "No model that is served here reads them."),
}

SPECULATIVE_FIELDS = {
    "draft_tensor_parallel_size": _ONE_PROCESS,
    "disable_by_batch_size": Foreign((None,), "Set `num_speculative_tokens` to `auto`."),
    "disable_padded_drafter_batch": _EITHER,
    "quantization": Foreign((None,), "Weights are read as they are stored."),
    "max_model_len": Foreign((None,), "The draft's context is that of its checkpoint."),
}

ENGINE_OPTIONS = {
    "task": Foreign((None, "auto", "generate"), "This version generates text."),
    "runner": Foreign((None, "auto", "generate"), "This version generates text."),
    "convert": Foreign((None, "auto", "none"), "This version generates text."),
    "tokenizer_mode": Foreign(("auto", "hf"), "Tokenizers are loaded by Transformers."),
    "config_format": Foreign(("auto", "hf"), "Checkpoints are read in Hugging Face layout."),
    "model_impl": Foreign(("auto", "transformers"), "Model code comes from Transformers."),
    "tokenizer_revision": Foreign((None,), "Name a folder of that revision as `tokenizer`."),
    "code_revision": Foreign((None,), "Code from a checkpoint is never run: docs/models.md."),
    "download_dir": Foreign((None,), "Set HF_HOME: checkpoints go to the hub's own cache."),
    "hf_token": Foreign((None,), "Set HF_TOKEN, or log in with `hf auth login`."),
    "skip_tokenizer_init": Foreign(_OFF, "Token ids are taken as they are, tokenizer or not."),
    "trust_remote_code": Foreign(_OFF, "Code from a checkpoint is never run: docs/models.md."),
    "tensor_parallel_size": _ONE_PROCESS,
    "pipeline_parallel_size": _ONE_PROCESS,
    "data_parallel_size": _ONE_PROCESS,
    "distributed_executor_backend": Foreign((None, "uni"), _ONE_PROCESS.instead),
    "disable_custom_all_reduce": _EITHER,
    "quantization": Foreign((None,), "Weights are read as they are stored: docs/models.md."),
    "gpu_memory_utilization": Foreign((None, 0.9, 0.92), "Write `memory_fraction`."),
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
    "disable_log_stats": Foreign((None, True), "Read `LLM.metrics`, or an output's `metrics`."),
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
}


def _all(names: str, foreign: Foreign) -> dict[str, Foreign]:
    """The same for each of these names."""
    return dict.fromkeys(names.split(), foreign)


# Any value, since it sets up a feature that is not here.
_INERT, _INERT_FLAG = Foreign((...,), ""), Foreign((..., True), "")
_NO_CODE = "No code from elsewhere is run."
_METRICS = "See /metrics, and the `trace` of a request."
_OWN_CALL = "Ask for it in each request."
SERVER_OPTIONS = {
    # What the server says, and to whom.
    **_all(
        "enable_auto_tool_choice exclude_tools_when_tool_choice_none enable_reasoning "
        "enable_request_id_headers enable_server_load_tracking enable_prompt_tokens_details "
        "enable_tokenizer_info_endpoint disable_log_requests enable_log_requests "
        "enable_offline_docs language_model_only",
        _EITHER,
    ),
    **_all("enable_log_deltas disable_frontend_multiprocessing", _INERT_FLAG),
    **_all("max_log_len cohere_format", _INERT),
    **_all("cohere_is_reasoning_model aggregate_engine_logging", _INERT_FLAG),
    "chat_template_content_format": Foreign(("auto", "string"), "Templates get texts."),
    "response_role": Foreign(("assistant",), "Answers have the role `assistant`."),
    "default_chat_template_kwargs": Foreign((None, {}), _OWN_CALL),
    "return_tokens_as_token_ids": Foreign(_OFF, _OWN_CALL),
    "enable_force_include_usage": Foreign(_OFF, "Ask by `stream_options.include_usage`."),
    "enable_per_request_metrics": Foreign(_OFF, "Answers have `metrics`; times are in /metrics."),
    "disable_uvicorn_access_log": Foreign(_OFF, "Write --log-level warning."),
    "enable_log_outputs": Foreign(_OFF, "Logs hold no text: docs/server.md."),
    "log_error_stack": Foreign(_OFF, "Write --log-level debug."),
    "log_config_file": Foreign((None,), "Logs are lines of JSON; --log-level says which."),
    "disable_access_log_for_endpoints": Foreign(
        (None, "/health", "/metrics", "/ping", "/health,/metrics", "/health,/metrics,/ping"),
        "Probes and scrapes are logged at --log-level debug alone.",
    ),
    "fingerprint_mode": Foreign((None, "none"), "Answers have no fingerprint."),
    "fingerprint_value": Foreign((None,), "Answers have no fingerprint."),
    **_all(
        "tool_parser_plugin reasoning_parser_plugin io_processor_plugin worker_cls "
        "worker_extension_cls scheduler_cls",
        Foreign((None, "", "auto"), _NO_CODE),
    ),
    "middleware": Foreign((None, []), _NO_CODE),
    "tool_server": Foreign((None,), "Tools are the client's: it runs them."),
    **_all(
        "allowed_methods allowed_headers",
        Foreign((None, ["*"]), "Origins decide: --allowed-origins."),
    ),
    "allow_credentials": Foreign(_OFF, "Clients send their key in `Authorization`."),
    "disable_fastapi_docs": Foreign(_OFF, "/docs and /openapi.json say nothing of this server."),
    "enable_ssl_refresh": Foreign(_OFF, "Start the server again with its new certificate."),
    "ssl_ciphers": Foreign((None,), "They are those of this machine's OpenSSL."),
    "uds": Foreign((None,), "Write --host and --port."),
    **_all(
        "h11_max_incomplete_event_size h11_max_header_count",
        Foreign((None,), "Write --max-header-bytes."),
    ),
    "config": Foreign((None,), "Write the options themselves."),
    **_all("grpc headless tokens_only", Foreign(_OFF, "This server speaks HTTP, and texts.")),
    "max_num_queued_reqs": Foreign((None,), "Write --max-num-waiting."),
    "max_num_queued_tokens": Foreign((None,), "Write --max-num-waiting."),
    # One process.
    **_all(
        "data_parallel_size_local nnodes decode_context_parallel_size "
        "prefill_context_parallel_size api_server_count",
        _ONE_PROCESS,
    ),
    **_all(
        "node_rank data_parallel_rank data_parallel_start_rank", Foreign((0,), _ONE_PROCESS.instead)
    ),
    **_all(
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "enable_elastic_ep enable_fault_tolerance worker_use_ray engine_use_ray",
        Foreign(_OFF, _ONE_PROCESS.instead),
    ),
    **_all(
        "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend dcp_comm_backend "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold dp_sync_interval "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size all2all_backend eplb_config "
        "expert_placement_strategy ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold max_parallel_loading_workers fault_tolerance_config "
        "prefill_schedule_interval",
        _INERT,
    ),
    **_all(
        "enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb "
        "enable_dbo disable_nccl_for_dp_synchronization dcp_q_replicate ray_workers_use_nsight",
        _INERT_FLAG,
    ),
    "numa_bind": Foreign(_OFF, "Start it by numactl."),
    **_all("numa_bind_nodes numa_bind_cpus", Foreign((None, []), "Start it by numactl.")),
    "device_ids": Foreign((None,), "Set CUDA_VISIBLE_DEVICES."),
    # Media, adapters, other kinds of models: nothing here reads what is set for them.
    **_all(
        "enable_mm_embeds mm_encoder_only enable_prompt_embeds", Foreign(_OFF, _NO_MEDIA.instead)
    ),
    **_all(
        "allowed_media_domains media_io_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate "
        "video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb "
        "max_loras max_lora_rank lora_dtype lora_target_modules max_cpu_loras default_mm_loras "
        "lora_extra_vocab_size long_lora_scaling_factors max_prompt_adapters "
        "max_prompt_adapter_token mamba_backend mamba_ssu_algorithm mamba_cache_philox_rounds "
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_config "
        "prefix_match_unit replayssm_buffer_len pooler_config override_pooler_config "
        "diffusion_config override_neuron_config gdn_prefill_backend kda_prefill_backend",
        _INERT,
    ),
    **_all(
        "interleave_mm_strings skip_mm_profiling mm_device_do_normalize disable_chunked_mm_input "
        "disable_mm_preprocessor_cache enable_mm_processor_stats fully_sharded_loras "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras enable_lora_bias enable_mamba_cache_stochastic_rounding "
        "use_replayssm enable_flash_late_interaction enable_multimodal_encoder_data_parallel",
        _INERT_FLAG,
    ),
    "lora_modules": Foreign((None, []), _NO_LORA.instead),
    "qlora_adapter_name_or_path": Foreign((None,), _NO_LORA.instead),
    "enable_prompt_adapter": _NO_LORA,
    # Weights and the cache.
    "hf_config_path": Foreign((None,), _OWN_CONFIG),
    "model_class_overrides": Foreign((None, {}), _OWN_CONFIG),
    "quantization_config": Foreign((None, {}), "Weights are read as they are stored."),
    **_all("override_attention_dtype", Foreign((None,), "Write `dtype`.")),
    **_all(
        "safetensors_load_strategy safetensors_prefetch_num_threads tokenizer_pool_size "
        "safetensors_prefetch_block_size model_loader_extra_config pt_load_map_location "
        "tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers "
        "prefix_caching_hash_algo prefix_cache_retention_interval kv_offloading_backend "
        "cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step "
        "offload_params num_lookahead_slots max_num_partial_prefills max_long_partial_prefills",
        _INERT,
    ),
    **_all("ignore_patterns kv_cache_dtype_skip_layers", Foreign((..., []), "")),
    **_all(
        "allow_deprecated_quantization use_tqdm_on_load disable_cascade_attn "
        "disable_hybrid_kv_cache_manager scheduler_reserve_full_isl calculate_kv_scales "
        "disable_async_output_proc multi_step_stream_outputs enable_flashinfer_autotune "
        "enable_bf16x3_router_gemm jit_monitor_verbose",
        _INERT_FLAG,
    ),
    "offload_backend": Foreign((None, "auto"), "All weights are on one device."),
    **_all(
        "kv_offloading_size", Foreign((None, 0), "Preempted requests compute their tokens again.")
    ),
    "preemption_mode": Foreign((None, "recompute"), "Preempted requests compute them again."),
    **_all(
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config "
        "weight_transfer_config",
        Foreign((None, {}), _ONE_PROCESS.instead),
    ),
    # How steps are made up, and what is told of them.
    "long_prefill_token_threshold": Foreign((None, 0), "`max_step_seconds` bounds such steps."),
    "max_num_scheduled_tokens": Foreign((None,), "Write --max-num-batched-tokens."),
    "watermark": Foreign((None, 0), "Requests are admitted with all blocks that they need."),
    "scheduler_delay_factor": Foreign((None, 0), "Requests are admitted at the next step."),
    "num_scheduler_steps": Foreign((None, 1), "Each step is scheduled."),
    "stream_interval": Foreign((None, 1), "Every step's tokens are sent."),
    "performance_mode": Foreign((None, "balanced"), "Set `max_num_seqs` and K."),
    **_all(
        "optimization_level ir_op_priority jit_monitor_mode show_hidden_metrics_for_version "
        "kv_cache_metrics_sample",
        _INERT,
    ),
    **_all("moe_backend linear_backend", Foreign((None, "auto"), "`backend` chooses the kernels.")),
    **_all("attention_config kernel_config", Foreign((None, {}), "`backend` chooses the kernels.")),
    **_all("cudagraph_capture_sizes cuda_graph_sizes", Foreign((None, []), _NO_GRAPHS.instead)),
    "max_cudagraph_capture_size": Foreign((None,), _NO_GRAPHS.instead),
    **_all(
        "kv_sharing_fast_prefill enable_sleep_mode enable_cumem_allocator enable_nccl_comm_suspend "
        "enable_return_routed_experts return_sampling_mask enable_trace_replay "
        "disable_logprobs_during_spec_decoding fail_on_environ_validation use_fp64_gumbel",
        Foreign(_OFF, "This version has nothing like it."),
    ),
    **_all(
        "reasoning_config additional_config",
        Foreign((None, {}), "This version has nothing like it."),
    ),
    **_all("otlp_traces_endpoint collect_detailed_traces", Foreign((None,), _METRICS)),
    "profiler_config": Foreign((None, {}), "Profile it by `foretoken bench`."),
    "per_request_spec_decode_metrics": Foreign((None, "none"), "Answers have `metrics`."),
    **_all(
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details",
        Foreign(_OFF, _METRICS),
    ),
    "logits_processor_pattern": Foreign((None,), "`logit_bias` and `bad_words` change tokens."),
    **_all(
        "spec_method spec_model spec_tokens speculative_model_quantization "
        "speculative_max_model_len speculative_draft_tensor_parallel_size "
        "speculative_disable_by_batch_size typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha",
        _SPECULATION,
    ),
    "speculative_disable_mqa_scorer": Foreign(_OFF, _SPECULATION.instead),
    "spec_decoding_acceptance_method": Foreign((None, "rejection_sampler"), _SPECULATION.instead),
}
"""Options of `vllm serve` that neither we nor `ENGINE_OPTIONS` have; read by `cli/foreign.py`."""


def without_foreign(
    given: Mapping[str, Any],
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
) -> dict[str, Any]:
    """What is given without the names of `table`.

    Raises:
        error: one of them has a value that would change something.
    """
    for name in [name for name in given if name in table]:
        harmless, instead = table[name]
        if not any(_is_same(given[name], value) for value in harmless):
            shown = " or ".join(repr(value) for value in harmless if value is not None)
            bound = f"left out, or {shown}" if shown else "left out"
            raise error(name, given[name], bound, instead)
    return {name: value for name, value in given.items() if name not in table}


def _is_same(given: Any, value: Any) -> bool:
    """Equal and of the same kind: True is not 1 here. A member of an enum goes by its name."""
    if value is ...:
        return True
    if value is None or isinstance(value, bool):
        return given is value
    if isinstance(value, str):
        return bool(getattr(given, "name", given) == value)
    kinds = (int, float) if isinstance(value, (int, float)) else type(value)
    return isinstance(given, kinds) and not isinstance(given, bool) and given == value
