"""Options of vLLM's engine, by their names in Python; a command line has the same, and more."""

from __future__ import annotations

from foretoken.foreign.python import SAMPLING_FIELDS
from foretoken.foreign.table import (
    ANY,
    ANY_FLAG,
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

_SPECULATION = Foreign((), "Put it into `speculative_config`.")
_NO_GRAPHS = Foreign((8192,), "Leave it out: decode steps are captured at any length.")
_ONE_GRAMMAR = "Leave it out: llguidance reads all schemas, expressions and grammars here."
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
    "trust_remote_code": Foreign(
        (True, False),
        "Leave it out.",
        note="trust_remote_code=True changes nothing: code from a checkpoint is never run.",
    ),
    "quantization": Foreign((), "Weights are read as they are stored: docs/models.md."),
    "quantization_config": Foreign(({},), "Weights are read as they are stored."),
    **same_for("hf_overrides rope_scaling model_class_overrides", ({},), OWN_CONFIG),
    **same_for("rope_theta hf_config_path", (), OWN_CONFIG),
    "override_attention_dtype": Foreign((), "Write `dtype`."),
    "override_generation_config": Foreign(({},), "Set parameters in each request or call."),
    "served_model_name": Foreign((), "`foretoken serve` has --served-model-name."),
    "reasoning_parser": Foreign(("",), "`foretoken serve` has --reasoning-parser."),
    **same_for(
        "safetensors_load_strategy safetensors_prefetch_num_threads pt_load_map_location "
        "safetensors_prefetch_block_size model_loader_extra_config tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers",
        ANY, "",
    ),
    **same_for("ignore_patterns kv_cache_dtype_skip_layers", (..., []), ""),
    **same_for("allow_deprecated_quantization use_tqdm_on_load", ANY_FLAG, ""),
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
        "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend dcp_comm_backend "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold dp_sync_interval "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size all2all_backend eplb_config "
        "expert_placement_strategy ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold max_parallel_loading_workers fault_tolerance_config "
        "prefill_schedule_interval",
        ANY, "",
    ),
    **same_for(
        "enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb "
        "enable_dbo disable_nccl_for_dp_synchronization dcp_q_replicate ray_workers_use_nsight "
        "disable_custom_all_reduce",
        ANY_FLAG, "",
    ),
    **same_for(
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config "
        "weight_transfer_config",
        ({},), ONE_PROCESS.instead,
    ),
    "numa_bind": Foreign(OFF, "Start it by numactl."),
    **same_for("numa_bind_nodes numa_bind_cpus", ([],), "Start it by numactl."),
    "device_ids": Foreign((), "Set CUDA_VISIBLE_DEVICES."),
    # Memory.
    "kv_cache_memory_bytes": Foreign((), "Write `kv_cache_gib`."),
    "num_gpu_blocks_override": Foreign((), "Write `num_blocks`."),
    "kv_cache_dtype": Foreign(("auto",), "The cache has the dtype of the weights."),
    "swap_space": Foreign((0, 4), "Preempted requests compute their tokens again."),
    "swap_space_bytes": Foreign((0,), "Preempted requests compute their tokens again."),
    "kv_offloading_size": Foreign((0,), "Preempted requests compute their tokens again."),
    "cpu_offload_gb": Foreign((0,), "All weights are on one device."),
    "offload_backend": Foreign(("auto",), "All weights are on one device."),
    "preemption_mode": Foreign(("recompute",), "Preempted requests compute their tokens again."),
    "enable_sleep_mode": Foreign(OFF, "`LLM.close()` releases the memory."),
    **same_for(
        "prefix_caching_hash_algo prefix_cache_retention_interval kv_offloading_backend "
        "cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step "
        "offload_params num_lookahead_slots",
        ANY, "",
    ),
    # How steps are made up, and what is told of them.
    "compilation_config": Foreign((0, {}), "Leave it out: nothing is compiled."),
    **same_for("max_seq_len_to_capture max_context_len_to_capture", _NO_GRAPHS),
    **same_for("cudagraph_capture_sizes cuda_graph_sizes", ([],), _NO_GRAPHS.instead),
    "max_cudagraph_capture_size": Foreign((), _NO_GRAPHS.instead),
    "enable_chunked_prefill": Foreign((True,), "Long prompts are always computed in chunks."),
    **same_for("max_num_partial_prefills max_long_partial_prefills", ANY, ""),
    "long_prefill_token_threshold": Foreign((0,), "`max_step_seconds` bounds a step."),
    "max_num_scheduled_tokens": Foreign((), "Write `max_num_batched_tokens`."),
    "scheduling_policy": Foreign(("fcfs",), "Set `SamplingParams.priority`."),
    "watermark": Foreign((0,), "Requests are admitted with all blocks that they need."),
    "scheduler_delay_factor": Foreign((0,), "Requests are admitted at the next step."),
    "num_scheduler_steps": Foreign((1,), "Each step is scheduled."),
    "stream_interval": Foreign((1,), WHOLE_TEXT),
    "performance_mode": Foreign(("balanced",), "Set `max_num_seqs` and K."),
    "attention_backend": Foreign((), "`backend` chooses the kernels."),
    **same_for("moe_backend linear_backend", ("auto",), "`backend` chooses the kernels."),
    **same_for("attention_config kernel_config", ({},), "`backend` chooses the kernels."),
    "disable_sliding_window": Foreign(OFF, "Lower `max_model_len` to the window."),
    "max_logprobs": Foreign((20,), "A request gets at most 20."),
    "logprobs_mode": Foreign(("raw_logprobs",), "They are those of the raw logits."),
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
    **same_for(
        "optimization_level ir_op_priority jit_monitor_mode show_hidden_metrics_for_version "
        "kv_cache_metrics_sample",
        ANY, "",
    ),
    **same_for(
        "use_v2_block_manager disable_cascade_attn disable_hybrid_kv_cache_manager "
        "scheduler_reserve_full_isl calculate_kv_scales disable_async_output_proc "
        "multi_step_stream_outputs enable_flashinfer_autotune enable_bf16x3_router_gemm "
        "jit_monitor_verbose aggregate_engine_logging",
        ANY_FLAG, "",
    ),
    # Statistics are always counted, and never printed.
    **same_for("disable_log_stats disable_log_requests enable_log_requests", EITHER),
    **same_for(
        "scheduler_cls worker_cls worker_extension_cls io_processor_plugin",
        ("", "auto"), NO_PLUGIN,
    ),
    # Media, adapters, other kinds of models: nothing here reads what is set for them.
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
    **same_for(
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
        ANY, "",
    ),
    **same_for(
        "interleave_mm_strings skip_mm_profiling mm_device_do_normalize disable_chunked_mm_input "
        "disable_mm_preprocessor_cache enable_mm_processor_stats fully_sharded_loras "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras enable_lora_bias enable_mamba_cache_stochastic_rounding "
        "use_replayssm enable_flash_late_interaction enable_multimodal_encoder_data_parallel",
        ANY_FLAG, "",
    ),
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
}  # fmt: skip
"""Options of vLLM's engine that ours lacks."""

RENAMED = {"gpu_memory_utilization": "memory_fraction"}
"""Options of vLLM's that are ours by another name."""

SERVER_OPTIONS = {
    # What the server says, and to whom.
    **same_for(
        "enable_request_id_headers enable_server_load_tracking enable_prompt_tokens_details "
        "enable_offline_docs language_model_only",
        EITHER,
    ),
    # What is always so, and would be missed where it is to be off.
    "enable_auto_tool_choice": Foreign((True,), "Write --tool-call-parser none."),
    "exclude_tools_when_tool_choice_none": Foreign((True,), "With `none` no tools are shown."),
    "enable_reasoning": Foreign((True,), "Write --reasoning-parser none."),
    "enable_tokenizer_info_endpoint": Foreign((True,), "/tokenizer_info is there, under the key."),
    **same_for("enable_log_deltas disable_frontend_multiprocessing", ANY_FLAG, ""),
    **same_for("cohere_is_reasoning_model", ANY_FLAG, ""),
    **same_for("max_log_len cohere_format", ANY, ""),
    "chat_template_content_format": Foreign(("auto", "string"), "Templates get texts."),
    "response_role": Foreign(("assistant",), "Answers have the role `assistant`."),
    "default_chat_template_kwargs": Foreign(({},), "Send `chat_template_kwargs` with requests."),
    "return_tokens_as_token_ids": Foreign(OFF, "Ask for it in each request."),
    "enable_force_include_usage": Foreign(OFF, "Ask by `stream_options.include_usage`."),
    "enable_per_request_metrics": Foreign(OFF, "Answers have `metrics`; times are in /metrics."),
    "disable_uvicorn_access_log": Foreign(OFF, "Write --log-level warning."),
    "enable_log_outputs": Foreign(OFF, "Logs hold no text: docs/server.md."),
    "log_error_stack": Foreign(OFF, "Write --log-level debug."),
    "log_config_file": Foreign((), "Logs are lines of JSON; --log-level says which."),
    "disable_access_log_for_endpoints": Foreign(
        ("/health", "/metrics", "/ping", "/health,/metrics", "/health,/metrics,/ping"),
        "Probes and scrapes are logged at --log-level debug alone.",
    ),
    "fingerprint_mode": Foreign(("none",), "Answers have no fingerprint."),
    "fingerprint_value": Foreign((), "Answers have no fingerprint."),
    **same_for("tool_parser_plugin reasoning_parser_plugin", ("", "auto"), NO_PLUGIN),
    "middleware": Foreign(([],), NO_PLUGIN),
    "tool_server": Foreign((), "Tools are the client's: it runs them."),
    **same_for(
        "allowed_methods allowed_headers", (["*"],), "Origins decide: --allowed-origins."
    ),
    "allow_credentials": Foreign(OFF, "Clients send their key in `Authorization`."),
    "disable_fastapi_docs": Foreign(OFF, "/docs and /openapi.json say nothing of this server."),
    "enable_ssl_refresh": Foreign(OFF, "Start the server again with its new certificate."),
    "ssl_ciphers": Foreign((), "They are those of this machine's OpenSSL."),
    "uds": Foreign((), "Write --host and --port."),
    **same_for(
        "h11_max_incomplete_event_size h11_max_header_count", (), "Write --max-header-bytes."
    ),
    "config": Foreign((), "Write the options themselves."),
    **same_for("grpc headless tokens_only", OFF, "This server speaks HTTP, and texts."),
    **same_for("max_num_queued_reqs max_num_queued_tokens", (), "Write --max-num-waiting."),
    "api_server_count": ONE_PROCESS,
}  # fmt: skip
"""Options of `vllm serve` that ours lacks, and that are not the engine's."""
