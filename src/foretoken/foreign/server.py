"""Options of `vllm serve` that its engine does not have."""

from __future__ import annotations

from foretoken.foreign.table import (
    ANY,
    ANY_FLAG,
    EITHER,
    NO_PLUGIN,
    OFF,
    ONE_PROCESS,
    Foreign,
    same_for,
)

_OWN_CALL = "Ask for it in each request."
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
    **same_for("max_log_len cohere_format", ANY, ""),
    **same_for("cohere_is_reasoning_model", ANY_FLAG, ""),
    "chat_template_content_format": Foreign(("auto", "string"), "Templates get texts."),
    "response_role": Foreign(("assistant",), "Answers have the role `assistant`."),
    "default_chat_template_kwargs": Foreign(({},), "Send `chat_template_kwargs` with requests."),
    "return_tokens_as_token_ids": Foreign(OFF, _OWN_CALL),
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
    "max_num_queued_reqs": Foreign((), "Write --max-num-waiting."),
    "max_num_queued_tokens": Foreign((), "Write --max-num-waiting."),
    "api_server_count": ONE_PROCESS,
}  # fmt: skip
"""Options of `vllm serve` that ours lacks, and that are not the engine's."""
