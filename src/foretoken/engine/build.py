"""Builds an engine from its options: backend, target, drafter, pools sized to memory.

On a GPU a temporary runner with hardly any cache runs the largest steps, to measure their memory.
On a CPU the sizes follow from the options.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.cache.block_pool import BlockPool
from foretoken.cache.kv_pool import KVPool
from foretoken.config import BLOCK_SIZES, HOST_CACHE_GIB, EngineConfig
from foretoken.drafting.base import Drafter, DrafterSetup
from foretoken.drafting.control import StepTable, draft_widths
from foretoken.drafting.registry import find_drafter
from foretoken.engine import memory_plan, step_costs
from foretoken.engine.control import DraftControl
from foretoken.engine.devices import choose_backend, choose_device
from foretoken.engine.engine import Engine
from foretoken.engine.faults import broken_engine, is_device_failure
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory_plan import MemoryCosts, MemoryPlan, Sizes, explaining_memory_errors
from foretoken.engine.pace import Pace, PromptCosts
from foretoken.engine.runner import Runner, Sampler
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.step_costs import Gauge
from foretoken.engine.threads import StepThreads, usable_cores
from foretoken.errors import CheckpointError, ConfigError, ForetokenError, RequestError
from foretoken.models import CausalLM, TargetView, folder_of, load_model, load_tokenizer
from foretoken.models.checkpoint import check_weights
from foretoken.ops import RoundStack, Rule
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.synthetic import joint_rates, rates_of
from foretoken.slots.table import SlotSizes, SlotTable

_log = logging.getLogger(__name__)

_GRAPH_BYTES = 4 << 20  # a captured step without its tensors: some hundred kernels
_RESERVED_UNIT = 2 << 20  # PyTorch reserves memory for large tensors in multiples of this
_SMALLER_DRAFT = "Take a smaller draft model, or `ngram`, or leave `speculative_config` out."

# Fields that are read from generation_config.json, with `max_new_tokens`: the same as in vLLM.
_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def is_on_host(device: torch.device) -> bool:
    """Whether the slots of this device are in the host's memory and can be read without waiting."""
    return device.type == "cpu"


@dataclass(frozen=True)
class EngineParts:
    """Replaceable parts of an engine.

    Attributes:
        on_host: as `is_on_host`; with False for a CPU, the engine works as on an async device.
        load_model: loads the target and the draft model, as `models.load_model` does.
        gauge_of: returns the gauge of a device's memory, or None to measure nothing.
        graphs: the class that captures steps. None: `Graphs`, if `Assembly.captures` is True.
    """

    on_host: Callable[[torch.device], bool] = is_on_host
    load_model: Callable[..., CausalLM] = load_model
    gauge_of: Callable[[torch.device], Gauge | None] = step_costs.gauge_of
    slot_table: type[SlotTable] = SlotTable
    graphs: type[Graphs] | None = None
    step_threads: Callable[..., StepThreads] = StepThreads


def build_engine(config: EngineConfig, parts: EngineParts = EngineParts()) -> Engine:
    """Load models and allocate everything the engine will ever hold.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError, EngineMemoryError.
        EngineBrokenError: the device failed.
    """
    try:
        with explaining_memory_errors("the engine was built"):
            engine = _build(config, parts)
    except RuntimeError as error:
        if is_device_failure(error) and not isinstance(error, ForetokenError):
            raise broken_engine(error) from error
        raise
    if not engine.runner.on_host:
        # A full garbage collection visits everything that PyTorch and Transformers have loaded: a
        # device that decoded 512 requests waited 190 ms. So later collections skip these objects.
        gc.unfreeze()  # to collect former engines
        gc.collect()
        gc.freeze()
    return engine


def _build(config: EngineConfig, parts: EngineParts) -> Engine:
    _check_token_budget(config)
    device = choose_device(config.device)
    config, on_host = _completed(config, device), parts.on_host(device)
    speculation, view, drafter = config.speculative_config, TargetView(), None
    drafter_class = find_drafter(speculation, on_host=on_host) if speculation else None
    if drafter_class is not None:  # wrong options of the drafter raise before anything is loaded
        view = drafter_class.target_view(config)
    backend = choose_backend(config.backend, device, deterministic=config.deterministic)
    gauge = parts.gauge_of(device)
    folder = folder_of(config, config.model, config.revision)
    free = gauge.budget(1).free if gauge else None
    if device.type == "cpu":  # loading rearranges weights in these threads
        backend.set_num_threads(config.threads or usable_cores())
    remedy = partial(_weights_remedy, folder, free)
    with explaining_memory_errors("the weights were loaded", remedy):
        model = parts.load_model(
            folder, device=device, dtype=config.dtype, backend=backend,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
            max_model_len=config.max_model_len, view=view,
        )  # fmt: skip
    weights = gauge.taken() if gauge else 0
    native_target = isinstance(model.network, RoundStack)
    thread_count = config.threads if device.type == "cpu" else 1
    threads = parts.step_threads(thread_count, backend, native_target=native_target)
    shown = f"{threads.max_threads} or 1, the faster" if threads.chooses else threads.max_threads
    _log.info("Threads of the process: %s; of PyTorch: %d.", shown, torch.get_num_threads())
    tokenizer = _tokenizer(config, folder)
    if drafter_class is not None and speculation is not None:
        setup = DrafterSetup(
            config=config, speculation=speculation, backend=backend, device=device,
            vocab_size=model.vocab_size, max_model_len=model.max_model_len,
            tokenizer=tokenizer, embedding=model.embedding, head=model.head if view.head else None,
            on_host=on_host, load_model=parts.load_model,
        )  # fmt: skip
        with explaining_memory_errors("the drafter was loaded", _SMALLER_DRAFT):
            drafter = drafter_class(setup)
    assembly = Assembly(config, model, drafter, parts, on_host=on_host)
    plan = assembly.plan(gauge, weights)
    _log.info("Memory:\n%s", plan.table())
    model.max_model_len = plan.max_model_len
    runner, control, pace = assembly.serving_parts(plan.num_blocks)
    runner.planned = plan
    lookahead = int(drafter is not None and drafter.reads_next_token)
    scheduler = Scheduler(
        BlockPool(plan.num_blocks, assembly.block_size, lookahead),
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        num_behind=drafter.num_behind if drafter else 0, control=control, pace=pace,
    )  # fmt: skip
    eos_ids, defaults = _eos_ids(model, tokenizer), _default_params(config, model)
    return Engine(config, runner, scheduler, tokenizer, eos_ids, defaults, threads)


def _completed(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The options, with the device's defaults filled in."""
    gib = config.kv_cache_gib or (HOST_CACHE_GIB if device.type == "cpu" else None)
    block_size = config.block_size or BLOCK_SIZES[device.type]
    return replace(config, block_size=block_size, kv_cache_gib=gib)


def _weights_remedy(folder: Path, free: int | None) -> str:
    """The remedy for weights that do not fit; `free`: free bytes of the GPU, None on a CPU."""
    remedy = "Take a smaller checkpoint or `dtype`."
    with suppress(CheckpointError, OSError):  # random weights have no files
        stored = sum(file.stat().st_size for file in check_weights(folder, plain=False))
        remedy = f"The checkpoint's files hold {memory_plan.format_bytes(stored)}. {remedy}"
    if free is not None:
        remedy += f" {memory_plan.format_bytes(free)} of the GPU were free at the start."
    return remedy


def _tokenizer(config: EngineConfig, folder: Path) -> Any | None:
    """The tokenizer that `config.tokenizer` names (`ConfigError` if there is none), or without that
    option the model's own; None if the model has none."""
    if config.tokenizer is None:
        return load_tokenizer(folder)
    folder = folder_of(config, config.tokenizer, None, weights=False)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        bound = "a folder or hub id with tokenizer files"
        raise ConfigError("tokenizer", config.tokenizer, bound)
    return tokenizer


def _check_token_budget(config: EngineConfig) -> None:
    """Raise `ConfigError` unless all running requests can verify their drafts in one step."""
    least = config.max_num_seqs * (1 + config.num_drafts)
    if config.max_num_batched_tokens < least:
        speculation = config.speculative_config
        prefix = "max" if speculation is not None and speculation.is_auto else "num"
        bound = f"at least max_num_seqs x (1 + {prefix}_speculative_tokens) = {least}"
        remedy = f"Raise it, or lower `max_num_seqs` or `{prefix}_speculative_tokens`."
        raise ConfigError("max_num_batched_tokens", config.max_num_batched_tokens, bound, remedy)


def _default_params(config: EngineConfig, model: CausalLM) -> SamplingParams:
    """The parameters for requests without any: the checkpoint's defaults, or `SamplingParams()`.

    Raises:
        CheckpointError: the checkpoint's generation_config.json has a bad value.
    """
    source = model.generation_config
    if config.generation_config == "vllm" or source is None:
        return SamplingParams()
    values = {name: getattr(source, name, None) for name in _GENERATION_FIELDS}
    values["max_tokens"] = getattr(source, "max_new_tokens", None)
    try:
        return SamplingParams(**{name: v for name, v in values.items() if v is not None})
    except RequestError as error:
        raise CheckpointError(
            f"{config.model}: generation_config.json: {error} To ignore the file's sampling "
            "defaults, set generation_config='vllm'."
        ) from error


def _eos_ids(model: CausalLM, tokenizer: Any | None) -> frozenset[int]:
    """End-of-text ids of the vocabulary, from the first source that names any ids."""
    config = model.config
    for source in (model.generation_config, config, config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            listed = [ids] if isinstance(ids, int) else ids
            return frozenset(i for i in listed if 0 <= i < model.vocab_size)
    return frozenset()


class Assembly:
    """Makes the parts of an engine from its loaded models.

    Attributes:
        on_host: as in `SlotTable`.
        captures: whether decode steps are captured as CUDA graphs.
        adapts: whether K is `auto`.
    """

    def __init__(
        self, config: EngineConfig, model: CausalLM, drafter: Drafter | None, parts: EngineParts,
        *, on_host: bool,
    ) -> None:  # fmt: skip
        self.config, self.model, self.drafter, self.on_host = config, model, drafter, on_host
        self.parts = parts
        self.block_size = config.block_size or BLOCK_SIZES[model.device.type]
        self.captures = parts.graphs is not None or (
            model.device.type == "cuda"
            and model.backend.name == "triton"
            and not config.enforce_eager
        )
        speculation = config.speculative_config
        self.adapts = speculation is not None and speculation.is_auto
        self._rates = _synthetic_rates(config)

    def plan(self, gauge: Gauge | None, weights: int) -> MemoryPlan:
        """Plan the blocks of the cache, and everything else that takes memory.

        Args:
            gauge: measures the memory of steps; None on a CPU.
            weights: bytes of the target's weights, if there is a gauge.

        Raises:
            EngineMemoryError: memory does not suffice.
            ConfigError: no block fits into `kv_cache_gib`.
        """
        config, costs = self.config, self._costs()
        sizes = Sizes(
            config.max_num_seqs, config.max_num_batched_tokens, self.model.max_model_len,
            config.num_drafts, config.num_blocks, self.adapts,
        )  # fmt: skip
        if sizes.num_blocks is None and config.kv_cache_gib is not None:
            num_blocks = memory_plan.blocks_within(config.kv_cache_gib, costs, sizes)
            sizes = replace(sizes, num_blocks=num_blocks)
        if gauge is None:
            num_blocks = sizes.num_blocks or 0
            plan = MemoryPlan(costs.parts(sizes, num_blocks), num_blocks, sizes.max_model_len)
            memory_plan.check_fits(plan.total)
            return plan
        draft_weights = gauge.taken() - weights
        steps = step_costs.measure_step_bytes(self.runner(1, measuring=True), sizes, gauge)
        costs = replace(
            costs, weights=weights, draft_weights=draft_weights, steps=steps,
            libraries=gauge.libraries() + 2 * len(self.model.layer_shapes) * _RESERVED_UNIT,
        )  # fmt: skip
        demand = memory_plan.Demand(costs, sizes, gauge.budget(config.memory_fraction))
        plan = memory_plan.fitting_plan(demand, may_shorten=config.max_model_len is None)
        if plan.max_model_len < sizes.max_model_len:
            _log.warning(
                "`max_model_len` is %d, not the checkpoint's %d: memory suffices for no more.",
                plan.max_model_len, sizes.max_model_len,
            )  # fmt: skip
        return plan

    def runner(self, num_blocks: int, *, measuring: bool = False) -> Runner:
        """A new runner with slots and a cache of `num_blocks`. With `measuring`,
        contexts may exceed the cache, and no step is captured."""
        config, model, drafter = self.config, self.model, self.drafter
        device, block_size, max_tokens = model.device, self.block_size, model.max_model_len
        if not measuring:
            max_tokens = min(max_tokens, num_blocks * block_size)
        count, columns = config.max_num_seqs, -(-max_tokens // block_size)
        pool_blocks = num_blocks + 1  # the last block is the spare slot's
        sizes = SlotSizes(count, max_tokens, config.num_drafts, columns, spare_block=num_blocks)
        slots = self.parts.slot_table(sizes, device, model.backend.steps, on_host=self.on_host)
        if drafter is not None:
            drafter.allocate(slots, pool_blocks)
            slots.register("drafts", drafter)
        kv = KVPool(model.layer_shapes, pool_blocks, block_size, dtype=model.dtype, device=device)
        fp64 = config.use_fp64_gumbel
        sampler = Sampler(model.backend, slots, synthetic_rates=self._rates, fp64_noise=fp64)
        graphs = None
        if self.captures and not measuring:
            widths = draft_widths(config.num_drafts, adapts=self.adapts)
            graphs = (self.parts.graphs or Graphs)(memory_plan.graph_sizes(count), widths)
        return Runner(model, kv, sampler, drafter, graphs)

    def serving_parts(self, num_blocks: int) -> tuple[Runner, DraftControl | None, Pace | None]:
        """The engine's runner, its control of K if K is `auto`, and its pace if `max_step_seconds`
        is set. Control and pace need measured times of steps (see `step_costs.py`)."""
        config, bound, control, pace = self.config, self.config.max_step_seconds, None, None
        if not self.adapts and bound is None:
            return self.runner(num_blocks), None, None
        measured = None
        if self.on_host:
            few_blocks = min(num_blocks, step_costs.BLOCK_TOKENS // self.block_size)
            measured = self._measure(self.runner(few_blocks, measuring=True))
        runner = self.runner(num_blocks)
        table, prompts = measured or self._measure(runner)
        if self.adapts:
            _log.info("Measured for K = `auto`:\n%s", table.shown())
            control = DraftControl(table, config.max_num_seqs, config.num_drafts, self._widths)
        if prompts is not None and bound is not None:
            _log.info("Measured for `max_step_seconds`: %s", prompts.shown())
            pace = Pace(table, prompts, bound, lockstep=not self.on_host)
        return runner, control, pace

    @property
    def _widths(self) -> tuple[int, ...]:
        """As `widths` of `DraftControl`."""
        return () if self.on_host else draft_widths(self.config.num_drafts, adapts=self.adapts)

    def _measure(self, runner: Runner) -> tuple[StepTable, PromptCosts | None]:
        config, bound, prompts = self.config, self.config.max_step_seconds, None
        method = config.speculative_config and config.speculative_config.rejection_sample_method
        rule = Rule[(method or "standard").upper()]
        table = step_costs.measure_step_seconds(
            runner, config.max_num_seqs, config.num_drafts, self._widths, rule, adapts=self.adapts
        )
        if bound is not None:
            max_tokens = config.max_num_batched_tokens
            prompts = step_costs.measure_prompt_seconds(runner, rule, bound, max_tokens)
        return table, prompts

    def _costs(self) -> MemoryCosts:
        """The costs of memory that follow from shapes, without measuring."""
        model, size, drafter = self.model, self.block_size, self.drafter
        block = KVPool.bytes_per_block(model.layer_shapes, size, model.dtype)
        copies = model.device.type != "cpu" and model.backend.name != "triton"
        # A layer's keys and values, padded to twice their length at most.
        copied = 2 * block // len(model.layer_shapes) if copies else 0
        costs = MemoryCosts(
            block_size=size, block=block, slot_block=SlotTable.bytes_per_slot(size, size), spare=1,
            copied=copied, graph=_GRAPH_BYTES if self.captures else 0,
        )  # fmt: skip
        if drafter is None:
            return costs
        return replace(
            costs, draft_block=drafter.kv_bytes_per_block, draft_texts=drafter.bytes_shared,
            draft=drafter.bytes_per_slot / self.config.num_drafts,
        )  # fmt: skip


def _synthetic_rates(config: EngineConfig) -> tuple[float, ...]:
    """Conditional acceptance rates of the rule `synthetic`, one per draft; () under other rules.
    Rates are logged as a warning."""
    rates = rates_of(config.speculative_config) if config.speculative_config else ()
    if rates:
        _log.warning(
            "Rule `synthetic`: drafts are accepted at the configured rates %s (mean acceptance "
            "length %.3f), and the text is meaningless by design.",
            ", ".join(f"{rate:.4g}" for rate in rates),
            1 + sum(joint_rates(rates)),
        )
    return rates
