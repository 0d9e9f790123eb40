"""What stands around loaded models, as large as memory allows: slots, cache, sampler, runner.

Charter: sizes. On a GPU a first runner with hardly any cache runs the largest steps, so that their
memory is known; on a CPU the options alone decide.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from foretoken.cache.kv_pool import KVPool
from foretoken.config import BLOCK_SIZES, EngineConfig
from foretoken.drafting.base import Drafter
from foretoken.drafting.control import StepTable, draft_widths
from foretoken.engine.control import DraftControl
from foretoken.engine.gauge import Gauge, measure_steps
from foretoken.engine.graphs import Graphs
from foretoken.engine.memory_plan import (
    Costs,
    Demand,
    MemoryPlan,
    Sizes,
    blocks_within,
    check_fits,
    fitting_plan,
    graph_sizes,
)
from foretoken.engine.pace import Pace, PromptCosts
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import Sampler
from foretoken.engine.step_costs import BLOCK_TOKENS, measure, measure_prompts
from foretoken.models import CausalLM
from foretoken.ops import Rule
from foretoken.sampling.synthetic import joint_rates, rates_of
from foretoken.slots.table import SlotSizes, SlotTable

_log = logging.getLogger(__name__)

_GRAPH = 4 << 20  # bytes of a captured step besides its tensors: some hundred kernels
_ROUNDING = 2 << 20  # PyTorch takes memory for large tensors in multiples of this


class Assembly:
    """Loaded models, and what an engine over them is made of; `on_host`: by slots on the host."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        drafter: Drafter | None,
        *,
        on_host: bool,
    ) -> None:
        self.config, self.model, self.drafter, self.on_host = config, model, drafter, on_host
        self.block_size = config.block_size or BLOCK_SIZES[model.device.type]
        self.captures = (
            model.device.type == "cuda"
            and model.backend.name == "triton"
            and not config.enforce_eager
        )
        speculation = config.speculative_config
        self.adapts = speculation is not None and speculation.is_auto
        self._rates = _synthetic_rates(config)

    def plan(self, gauge: Gauge | None, weights: int) -> MemoryPlan:
        """How many blocks the cache has, and all else that takes memory.

        Args:
            gauge: of the GPU; None: nothing is measured.
            weights: bytes of the target's.

        Raises:
            EngineMemoryError: memory does not suffice.
            ConfigError: `kv_cache_gib` holds no block.
        """
        config, costs = self.config, self._costs()
        sizes = Sizes(
            config.max_num_seqs, config.max_num_batched_tokens, self.model.max_model_len,
            config.num_drafts, config.num_blocks, self.adapts,
        )  # fmt: skip
        if sizes.num_blocks is None and config.kv_cache_gib is not None:
            sizes = replace(sizes, num_blocks=blocks_within(config.kv_cache_gib, costs, sizes))
        if gauge is None:
            num_blocks = sizes.num_blocks or 0
            plan = MemoryPlan(costs.parts(sizes, num_blocks), num_blocks, sizes.max_model_len)
            check_fits(plan.total)
            return plan
        draft_weights = gauge.taken() - weights
        steps = measure_steps(self.runner(1, measuring=True), sizes, gauge)
        costs = replace(
            costs, weights=weights, draft_weights=draft_weights, steps=steps,
            libraries=gauge.libraries() + 2 * len(self.model.layer_shapes) * _ROUNDING,
        )  # fmt: skip
        demand = Demand(costs, sizes, gauge.budget(config.memory_fraction))
        plan = fitting_plan(demand, may_shorten=config.max_model_len is None)
        if plan.max_model_len < sizes.max_model_len:
            said = "`max_model_len` is %d, not the checkpoint's %d: memory suffices for no more."
            _log.warning(said, plan.max_model_len, sizes.max_model_len)
        return plan

    def runner(self, num_blocks: int, *, measuring: bool = False) -> Runner:
        """A runner with a cache of so many blocks.

        Args:
            measuring: it serves no request; contexts are as long as can be, whatever the cache.
        """
        config, model, drafter = self.config, self.model, self.drafter
        device, block_size, most = model.device, self.block_size, model.max_model_len
        if not measuring:
            most = min(most, num_blocks * block_size)
        count, blocks = config.max_num_seqs, -(-most // block_size)
        pool_blocks = num_blocks + 1  # the last one is the spare's
        sizes = SlotSizes(count, most, config.num_drafts, blocks, num_blocks)
        slots = SlotTable(sizes, device, model.backend.steps, on_host=self.on_host)
        if drafter is not None:
            drafter.allocate(slots, pool_blocks)
            slots.register("drafts", drafter)
        kv = KVPool(model.layer_shapes, pool_blocks, block_size, dtype=model.dtype, device=device)
        fp64 = config.use_fp64_gumbel
        sampler = Sampler(model.backend, slots, synthetic_rates=self._rates, fp64_noise=fp64)
        graphs = None
        if self.captures and not measuring:
            graphs = Graphs(graph_sizes(count), draft_widths(config.num_drafts, adapts=self.adapts))
        return Runner(model, kv, sampler, drafter, graphs)

    def served(self, num_blocks: int) -> tuple[Runner, DraftControl | None, Pace | None]:
        """The engine's runner; who chooses K where that is `auto`, and who keeps steps within
        `max_step_seconds`, both from what steps take here.

        On a host they are measured with slots and blocks of their own, so that the drafter forgets
        them; on a device in the runner's own, since that is where graphs are kept.
        """
        measured = None
        if self.on_host and self._needs_costs:
            own_blocks = min(num_blocks, BLOCK_TOKENS // self.block_size)
            measured = self._measure(self.runner(own_blocks, measuring=True))
        runner, control, pace = self.runner(num_blocks), None, None
        if self._needs_costs:
            table, prompts = measured or self._measure(runner)
            config, bound = self.config, self.config.max_step_seconds
            if self.adapts:
                _log.info("Measured for K = `auto`:\n%s", table.shown())
                control = DraftControl(table, config.max_num_seqs, config.num_drafts, self._widths)
            if prompts is not None and bound is not None:
                _log.info("Measured for `max_step_seconds`: %s", prompts.shown())
                pace = Pace(table, prompts, bound, lockstep=not self.on_host)
        return runner, control, pace

    @property
    def _needs_costs(self) -> bool:
        return self.adapts or self.config.max_step_seconds is not None

    @property
    def _widths(self) -> tuple[int, ...]:
        """Numbers of drafts that a captured step may have."""
        return () if self.on_host else draft_widths(self.config.num_drafts, adapts=self.adapts)

    def _measure(self, runner: Runner) -> tuple[StepTable, PromptCosts | None]:
        """What steps take in this runner; those of prompts where steps have a longest time."""
        config, bound, prompts = self.config, self.config.max_step_seconds, None
        method = config.speculative_config and config.speculative_config.rejection_sample_method
        rule = Rule[(method or "standard").upper()]
        sizes = config.max_num_seqs, config.num_drafts
        table = measure(runner, *sizes, self._widths, rule, adapts=self.adapts)
        if bound is not None:
            prompts = measure_prompts(runner, rule, bound, config.max_num_batched_tokens)
        return table, prompts

    def _costs(self) -> Costs:
        """What follows from shapes."""
        model, size, drafter = self.model, self.block_size, self.drafter
        block = KVPool.bytes_per_block(model.layer_shapes, size, model.dtype)
        copies = model.device.type != "cpu" and model.backend.name != "triton"
        return Costs(
            block_size=size,
            block=block,
            draft_block=drafter.kv_bytes_per_block if drafter else 0,
            slot_block=SlotTable.bytes_per_slot(size, size),
            draft=drafter.bytes_per_slot / self.config.num_drafts if drafter else 0.0,
            draft_texts=drafter.bytes_shared if drafter else 0,
            spare=1,
            # A layer's keys and values, padded to twice their length at most.
            copied=2 * block // len(model.layer_shapes) if copies else 0,
            graph=_GRAPH if self.captures else 0,
        )


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
