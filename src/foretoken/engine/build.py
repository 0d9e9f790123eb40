"""Puts an engine together from its options: backend, target, drafter, pools sized to memory."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.cache.block_pool import BlockPool
from foretoken.config import BLOCK_SIZES, EngineConfig
from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.registry import find_drafter
from foretoken.engine.assembly import Assembly
from foretoken.engine.devices import choose_backend, choose_device
from foretoken.engine.engine import Engine
from foretoken.engine.faults import broken_engine, is_device_failure
from foretoken.engine.gauge import gauge_of
from foretoken.engine.memory_plan import reserving, shown
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.threads import StepThreads
from foretoken.errors import CheckpointError, ConfigError, ForetokenError, RequestError
from foretoken.models import CausalLM, TargetView, folder_of, load_model, load_tokenizer
from foretoken.models.checkpoint import check_weights
from foretoken.ops import RoundStack
from foretoken.sampling.params import SamplingParams

_log = logging.getLogger(__name__)

_HOST_CACHE_GIB = 0.5
_SMALLER_DRAFT = "Take a smaller draft model, `ngram`, which has none, or no `speculative_config`."

# What generation_config.json may set, besides `max_new_tokens`: the names that vLLM reads there.
_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def build_engine(config: EngineConfig) -> Engine:
    """Load models and allocate everything the engine will ever hold.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError, EngineMemoryError.
        EngineBrokenError: the device failed.
    """
    try:
        with reserving("the engine was built"):
            engine = _build(config)
    except RuntimeError as error:
        if is_device_failure(error) and not isinstance(error, ForetokenError):
            raise broken_engine(error) from error
        raise
    if not engine.runner.on_host:
        # A full collection looks at all that PyTorch and Transformers have loaded: a device that
        # decoded 512 requests stood still for 190 ms. What there is now is left out of it.
        gc.unfreeze()  # garbage of engines that are gone
        gc.collect()
        gc.freeze()
    return engine


def _build(config: EngineConfig) -> Engine:
    _check_token_budget(config)
    device = choose_device(config.device)
    config, on_host = _completed(config, device), is_on_host(device)
    speculation, view, drafter = config.speculative_config, TargetView(), None
    drafter_class = find_drafter(speculation, on_host=on_host) if speculation else None
    if drafter_class is not None:  # what is wrong with it is said before anything is loaded
        view = drafter_class.target_view(config)
    backend = choose_backend(config.backend, device, deterministic=config.deterministic)
    gauge = gauge_of(device)
    folder = folder_of(config, config.model, config.revision)
    free = gauge.budget(1).free if gauge else None
    with reserving("the weights were loaded", partial(_smaller_weights, folder, free)):
        model = load_model(
            folder, device=device, dtype=config.dtype, backend=backend,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
            max_model_len=config.max_model_len, view=view,
        )  # fmt: skip
    weights = gauge.taken() if gauge else 0
    native_target = isinstance(model.network, RoundStack)
    asked_threads = config.threads if device.type == "cpu" else 1
    threads = StepThreads(asked_threads, backend, native_target=native_target)
    most = f"{threads.most} or 1 by speed" if threads.chooses else threads.most
    _log.info("Threads: %s, PyTorch's: %d; for the whole process.", most, torch.get_num_threads())
    tokenizer = _tokenizer(config, folder)
    if drafter_class is not None and speculation is not None:
        setup = DrafterSetup(
            config=config, speculation=speculation, backend=backend, device=device,
            vocab_size=model.vocab_size, max_model_len=model.max_model_len,
            tokenizer=tokenizer, embedding=model.embedding, head=model.head if view.head else None,
            on_host=on_host,
        )  # fmt: skip
        with reserving("the drafter was loaded", _SMALLER_DRAFT):
            drafter = drafter_class(setup)
    assembly = Assembly(config, model, drafter, on_host=on_host)
    plan = assembly.plan(gauge, weights)
    _log.info("Memory:\n%s", plan.table())
    model.max_model_len = plan.max_model_len
    runner, control, pace = assembly.served(plan.num_blocks)
    runner.planned = plan
    lookahead = int(drafter is not None and drafter.reads_next_token)
    scheduler = Scheduler(
        BlockPool(plan.num_blocks, assembly.block_size, lookahead),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        num_behind=drafter.num_behind if drafter else 0,
        control=control,
        pace=pace,
    )
    eos_ids, defaults = _eos_ids(model, tokenizer), _default_params(config, model)
    return Engine(config, runner, scheduler, tokenizer, eos_ids, defaults, threads)


def _completed(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The options with what they leave to the device."""
    gib = config.kv_cache_gib or (_HOST_CACHE_GIB if device.type == "cpu" else None)
    block_size = config.block_size or BLOCK_SIZES[device.type]
    return replace(config, block_size=block_size, kv_cache_gib=gib)


def _smaller_weights(folder: Path, free: int | None) -> str:
    """What to do if the weights do not fit, which no option makes smaller.

    Args:
        free: bytes that the GPU had free at the start, if there is one.
    """
    remedy = "Take a smaller checkpoint or `dtype`."
    with suppress(CheckpointError, OSError):  # random weights have no files
        stored = sum(file.stat().st_size for file in check_weights(folder, plain=False))
        remedy = f"The checkpoint's files hold {shown(stored)}. {remedy}"
    if free is not None:
        remedy += f" {shown(free)} of the GPU were free at the start."
    return remedy


def _tokenizer(config: EngineConfig, folder: Path) -> Any | None:
    """The tokenizer that was asked for, or the model's own, if it has one."""
    if config.tokenizer is None:
        return load_tokenizer(folder)
    folder = folder_of(config, config.tokenizer, None, weights=False)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        bound = "a folder or hub id with tokenizer files"
        raise ConfigError("tokenizer", config.tokenizer, bound, "It has none.")
    return tokenizer


def is_on_host(device: torch.device) -> bool:
    """Whether what is kept by slot is kept as numbers on the host."""
    return device.type == "cpu"


def _check_token_budget(config: EngineConfig) -> None:
    """Every running request must be able to verify its drafts in one step, whoever else runs."""
    least = config.max_num_seqs * (1 + config.num_drafts)
    if config.max_num_batched_tokens < least:
        speculation = config.speculative_config
        name = "max" if speculation is not None and speculation.is_auto else "num"
        bound = f"at least max_num_seqs x (1 + {name}_speculative_tokens) = {least}"
        remedy = f"Raise it, or lower `max_num_seqs` or `{name}_speculative_tokens`."
        raise ConfigError("max_num_batched_tokens", config.max_num_batched_tokens, bound, remedy)


def _default_params(config: EngineConfig, model: CausalLM) -> SamplingParams:
    """What `sampling_params=None` means: the checkpoint's defaults, or ours."""
    source = model.generation_config
    if config.generation_config == "vllm" or source is None:
        return SamplingParams()
    named = {name: getattr(source, name, None) for name in _GENERATION_FIELDS}
    named["max_tokens"] = getattr(source, "max_new_tokens", None)
    try:
        return SamplingParams(**{k: v for k, v in named.items() if v is not None})
    except RequestError as error:
        raise CheckpointError(
            f"{config.model}: generation_config.json: {error} generation_config='vllm' leaves "
            "the file's sampling defaults aside."
        ) from error


def _eos_ids(model: CausalLM, tokenizer: Any | None) -> frozenset[int]:
    """End-of-text ids: of the first that has them: generation, model, text config, tokenizer."""
    configs = (model.generation_config, model.config)
    for source in (*configs, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found = [ids] if isinstance(ids, int) else ids
            return frozenset(i for i in found if 0 <= i < model.vocab_size)
    return frozenset()
