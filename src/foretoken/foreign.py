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
    if value is None or isinstance(value, bool):
        return given is value
    if isinstance(value, str):
        return bool(getattr(given, "name", given) == value)
    kinds = (int, float) if isinstance(value, (int, float)) else type(value)
    return isinstance(given, kinds) and not isinstance(given, bool) and given == value
