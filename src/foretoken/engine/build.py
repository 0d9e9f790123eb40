"""Puts an engine together from its options: backend, target, drafter, pools sized to memory."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretoken.cache.block_pool import BlockPool
from foretoken.cache.kv_pool import KVPool
from foretoken.config import EngineConfig
from foretoken.drafting.base import Drafter, DrafterSetup
from foretoken.drafting.registry import find_drafter
from foretoken.engine.engine import Engine
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory import check_fits, is_out_of_memory, memory_error
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import Sampler
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.threads import StepThreads
from foretoken.errors import CheckpointError, ConfigError, ForetokenError, RequestError
from foretoken.models import CausalLM, TargetView, load_model, load_tokenizer, resolve_checkpoint
from foretoken.ops import Backend, get_backend, unavailable
from foretoken.ops.steps import Steps
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.synthetic import joint_rates, rates_of
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.table import SlotTable

_log = logging.getLogger(__name__)

# What generation_config.json may set, besides `max_new_tokens`: the names that vLLM reads there.
_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def build_engine(config: EngineConfig) -> Engine:
    """Load models and allocate everything the engine will ever hold.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError, EngineMemoryError.
    """
    try:
        return _build(config)
    except Exception as error:
        if isinstance(error, ForetokenError) or not is_out_of_memory(error):
            raise
        raise memory_error("the engine was built", error) from error


def _build(config: EngineConfig) -> Engine:
    _check_token_budget(config)
    device = choose_device(config.device)
    view, on_host = None, is_on_host(device)
    if config.speculative_config is not None:  # a wrong name is refused before anything is loaded
        drafter_class = find_drafter(config.speculative_config, on_host=on_host)
        view = drafter_class.target_view(config)
    backend = _choose_backend(config, device)
    folder = resolve_checkpoint(
        config.model,
        revision=config.revision,
        local_files_only=config.local_files_only,
        weights=config.load_format == "auto",
    )
    model = load_model(
        folder,
        device=device,
        dtype=config.dtype,
        backend=backend,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        max_model_len=config.max_model_len,
        view=view,
    )
    native_target = model.fused is not None and device.type == "cpu"
    asked_threads = config.threads if device.type == "cpu" else 1
    threads = StepThreads(asked_threads, backend, native_target=native_target)
    _log.info(
        "Threads: %s, PyTorch's: %d; for the whole process.",
        f"{threads.most} or 1 by speed" if threads.chooses else threads.most,
        torch.get_num_threads(),
    )
    tokenizer = _tokenizer(config, folder)
    drafter = _build_drafter(config, backend, model, view, tokenizer)
    num_blocks = _num_blocks(config, model, drafter)
    most_tokens = min(model.max_model_len, num_blocks * config.block_size)
    slots = _slots(config, device, backend.steps, most_tokens, num_blocks)
    pool_blocks = num_blocks + (not on_host)  # one is for whatever is computed for nobody
    if drafter is not None:
        drafter.allocate(slots, pool_blocks)
        slots.register("drafts", drafter)
    kv = KVPool(
        model.layer_shapes, pool_blocks, config.block_size, dtype=model.dtype, device=device
    )
    sampler = Sampler(
        backend,
        slots,
        synthetic_rates=_synthetic_rates(config),
        fp64_noise=config.use_fp64_gumbel,
        decode=None if tokenizer is None else cache(lambda token: str(tokenizer.decode([token]))),
    )
    lookahead = int(drafter is not None and drafter.reads_next_token)
    scheduler = Scheduler(
        BlockPool(num_blocks, config.block_size, lookahead),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        num_behind=drafter.num_behind if drafter else 0,
    )
    runner = Runner(model, kv, sampler, drafter, _graphs(config, backend, device))
    eos_ids, defaults = _eos_ids(model, tokenizer), _default_params(config, model)
    return Engine(config, runner, scheduler, tokenizer, eos_ids, defaults, threads)


def _slots(
    config: EngineConfig, device: torch.device, steps: Steps, max_tokens: int, num_blocks: int
) -> SlotTable | DeviceSlotTable:
    """What is kept by slot, for requests of so many tokens in a pool of so many blocks."""
    columns = -(-max_tokens // config.block_size)
    sizes = {"max_tokens": max_tokens, "max_drafts": _engine_drafts(config), "blocks": columns}
    if is_on_host(device):
        return SlotTable(config.max_num_seqs, device, **sizes)
    return DeviceSlotTable(config.max_num_seqs, device, steps, **sizes, trash_block=num_blocks)


def _graphs(config: EngineConfig, backend: Backend, device: torch.device) -> Graphs:
    """Steps are captured on a GPU whose kernels wait for nothing, unless the user forbids it."""
    if device.type != "cuda" or backend.name != "triton" or config.enforce_eager:
        return Graphs()
    return Graphs(graph_sizes(config.max_num_seqs), _engine_drafts(config))


def _tokenizer(config: EngineConfig, folder: Path) -> Any | None:
    """The tokenizer that was asked for, or the model's own, if it has one."""
    if config.tokenizer is None:
        return load_tokenizer(folder)
    local_only = config.local_files_only
    folder = resolve_checkpoint(config.tokenizer, local_files_only=local_only, weights=False)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        bound = "a folder or hub id with tokenizer files"
        raise ConfigError("tokenizer", config.tokenizer, bound, "It has none.")
    return tokenizer


def _synthetic_rates(config: EngineConfig) -> tuple[float, ...]:
    """c_i of the rule `synthetic`, with a warning; () under any other."""
    rates = rates_of(config.speculative_config) if config.speculative_config else ()
    if rates:
        _log.warning(
            "Rule `synthetic`: drafts are accepted with the set probabilities %s (mean acceptance "
            "length %.3f), and the text is meaningless by design.",
            ", ".join(f"{rate:.4g}" for rate in rates),
            1 + sum(joint_rates(rates)),
        )
    return rates


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is the GPU that PyTorch takes by itself, or the CPU.

    Raises:
        ConfigError: there is no such GPU, or PyTorch cannot use it.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(name.partition(":")[2] or 0) if name != "auto" else torch.cuda.current_device()
    if index >= count:
        found = f"PyTorch finds {count} GPUs" if count else "PyTorch finds no GPU that it can use"
        remedy = f"{found} ({_why_no_gpu()}). Choose `cpu`, or leave it out."
        raise ConfigError("device", name, "a device of this machine", remedy)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch, {torch.__version__}, was built for CPUs"
    return "no GPU, or a driver that is too old for this PyTorch: `nvidia-smi` says which"


def is_on_host(device: torch.device) -> bool:
    """Whether what is kept by slot is kept as numbers on the host."""
    return device.type == "cpu"


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests that decode steps are padded to when they are captured."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 1025, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def _choose_backend(config: EngineConfig, device: torch.device) -> Backend:
    """The backend asked for, or the fastest that this machine has."""
    name = config.backend
    if name == "auto":
        name = "native" if device.type == "cpu" else "triton"
        if (reason := unavailable(name)) is not None:
            _log.warning("Backend `torch`, which is slower: `%s` cannot run: %s.", name, reason)
            name = "torch"
    _log.info("Backend `%s`.", name)
    return get_backend(name, deterministic=config.deterministic)


def _check_token_budget(config: EngineConfig) -> None:
    """Every running request must be able to verify its drafts in one step, whoever else runs."""
    least = config.max_num_seqs * (1 + _engine_drafts(config))
    if config.max_num_batched_tokens < least:
        bound = f"at least max_num_seqs x (1 + num_speculative_tokens) = {least}"
        remedy = "Raise it, or lower `max_num_seqs` or `num_speculative_tokens`."
        raise ConfigError("max_num_batched_tokens", config.max_num_batched_tokens, bound, remedy)


def _engine_drafts(config: EngineConfig) -> int:
    speculation = config.speculative_config
    return speculation.num_speculative_tokens if speculation else 0


def _build_drafter(
    config: EngineConfig,
    backend: Backend,
    model: CausalLM,
    view: TargetView | None,
    tokenizer: Any | None,
) -> Drafter | None:
    if config.speculative_config is None or view is None:
        return None
    setup = DrafterSetup(
        config=config,
        speculation=config.speculative_config,
        backend=backend,
        device=model.device,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        target_tokens=tokenizer.get_vocab() if tokenizer is not None else None,
        embedding=model.embedding,
        head=model.head if view.head else None,
    )
    found = find_drafter(setup.speculation, on_host=is_on_host(model.device))
    return found(setup)


def _num_blocks(config: EngineConfig, model: CausalLM, drafter: Drafter | None) -> int:
    """Blocks of the pool: as asked, or what the memory holds, never more than can be used."""
    per_block = KVPool.bytes_per_block(model.layer_shapes, config.block_size, model.dtype)
    per_slot = SlotTable.bytes_per_slot(model.max_model_len, config.block_size)
    if drafter is not None:
        per_block += drafter.kv_bytes_per_block
        per_slot += drafter.bytes_per_slot
    slots_bytes = config.max_num_seqs * per_slot
    num_blocks = config.num_blocks
    if num_blocks is None:
        most = config.max_num_seqs * -(-model.max_model_len // config.block_size)
        num_blocks = min(most, int((config.kv_cache_gib * 2**30 - slots_bytes) / per_block))
        if num_blocks < 1:
            least = f"at least {(per_block + slots_bytes) / 2**30:.3g}"
            bound = f"{least}: one block of this model, and the draft probabilities of every slot"
            remedy = "Raise it, or lower `max_num_seqs` or `block_size`."
            raise ConfigError("kv_cache_gib", config.kv_cache_gib, bound, remedy)
    check_fits(num_blocks * per_block + slots_bytes)
    return num_blocks


def _default_params(config: EngineConfig, model: CausalLM) -> SamplingParams:
    """What `sampling_params=None` means: the checkpoint's defaults, or ours."""
    source = getattr(model.module, "generation_config", None)
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
    configs = (getattr(model.module, "generation_config", None), model.config)
    for source in (*configs, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found = [ids] if isinstance(ids, int) else ids
            return frozenset(i for i in found if 0 <= i < model.vocab_size)
    return frozenset()
