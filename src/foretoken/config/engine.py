"""Options of the engine."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from foretoken.config.speculative import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.foreign import ENGINE_OPTIONS, RENAMED, names_checked

from foretoken.config.checks import (  # isort: skip
    check_choice, check_int, check_model, check_number, check_revision, make_plain, plain,
)  # fmt: skip

DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
"""Default of `block_size`, by type of device."""
HOST_CACHE_GIB = 0.5
"""Default of `kv_cache_gib` on a CPU."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@names_checked(ENGINE_OPTIONS, ConfigError, "engine option")
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine.

    Attributes:
        model: `tiny-python`, `smollm2-135m` (a package of its own), a checkpoint folder or a GGUF
            file (a text or a `Path`), or a hub id, which is downloaded if it is not in the local
            cache. A hub id of a GGUF file is `owner/name/file.gguf` or `owner/name:Q4_K_M`.
        speculative_config: drafting and verification; None decodes one token per step.
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one that PyTorch can use.
        dtype: `float32` or `float`, `bfloat16`, `float16` or `half`, a torch dtype, or `auto`,
            which is float32 on a CPU. Native kernels keep weights in this type and compute in
            float32. On a CPU, weights in special formats (GGUF, compressed-tensors) keep their
            format. Where native kernels run the target, a request with a seed gets the same tokens
            in every batch. Results of PyTorch's kernels are rounded differently in each batch: in
            float32 this changes only near-ties (1e-5 in a logit), in half types many choices.
        seed: the engine's seed. A request without a seed gets one that is derived from this seed
            and the request's number; None: 0.
        max_model_len: longest prompt + output; None: the checkpoint's own limit, or on a GPU the
            longest for which its memory suffices.
        max_num_seqs: most requests running at once; each owns one permanent slot.
        max_num_batched_tokens: most tokens in one forward pass; longer prompts are prefilled in
            chunks.
        max_step_seconds: longest time, 0.001 to 1e6 s, of a step in which prompts are computed
            while other requests decode. Prompts are computed in chunks that fit, by costs measured
            at start. They get at least half of a step, so a step may take twice as long as its
            decoding. None: 0.15 in `foretoken serve` on a CPU, else no bound. If no request
            decodes, chunks are as large as `max_num_batched_tokens` allows.
        max_num_waiting: refuse requests while this many wait; None takes any number.
        enable_prefix_caching: reuse the cache blocks of earlier requests that begin with the same
            tokens.
        block_size: tokens per cache block; None: 16 on a CPU, 64 on a GPU. Prefixes are reused by
            whole blocks, and a request's last block is half empty on average.
        memory_fraction: largest part of a GPU's memory that the engine takes. The cache gets what
            weights, steps and graphs leave of it. Plays no part on a CPU, or if the size of the
            cache is given.
        num_blocks: blocks in the pool; None: enough for `kv_cache_gib`.
        kv_cache_gib: memory of the target's and the drafter's cache and of the drafts'
            probabilities together when `num_blocks` is None. Never more than `max_num_seqs`
            requests of `max_model_len` need. None: 0.5 on a CPU; on a GPU what `memory_fraction`
            leaves.
        generation_config: what a request without sampling parameters gets: `auto`, the defaults of
            the checkpoint's generation_config.json; `vllm`, those of `SamplingParams`, whatever the
            file says.
        tokenizer: name, folder or hub id of another tokenizer; None: the model's own.
        revision: branch, tag or commit of a model that is a hub id; None: `main`.
        local_files_only: take hub ids from the local cache, and never look at the network.
        load_format: `auto` or `safetensors` reads safetensors; `dummy` makes random weights and
            reads only config.json.
        backend: `native`, `torch`, `triton`, `reference` (the fp64 oracle), or `auto`: the
            fastest for the device.
        threads: number of computing threads. None: one, or one per physical core that the process
            may use (no more than `OMP_NUM_THREADS`), whichever is faster: steps of every size are
            timed now and then. Every step sets the number for the whole process; where native
            kernels run the target, PyTorch gets one thread. Native kernels give the same bits with
            any number. PyTorch may not: with PyTorch, set the number to get the same bits for a
            request with a seed.
        enforce_eager: launch every step operator by operator, and capture no CUDA graphs.
        async_scheduling: launch each step before the results of the last one are read, so that a
            GPU never waits for the host. None: only on a GPU. On a CPU, True changes the order of
            work but no token.
        use_fp64_gumbel: draw all noise in FP64.
        deterministic: give a token the same logits, to the bit, in every batch, so that greedy text
            is equal with and without speculation. Only on a GPU where Triton kernels run the whole
            model in bfloat16, in steps of up to 16 tokens, which then take 1 to 4 % longer.
    """

    model: str
    speculative_config: SpeculativeConfig | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_step_seconds: float | None = None
    max_num_waiting: int | None = None
    enable_prefix_caching: bool = True
    block_size: int | None = None
    memory_fraction: float = 0.9
    num_blocks: int | None = None
    kv_cache_gib: float | None = None
    generation_config: str = "auto"
    tokenizer: str | None = None
    revision: str | None = None
    local_files_only: bool = False
    load_format: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    use_fp64_gumbel: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        object.__setattr__(self, "model", check_model("model", self.model))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", check_model("tokenizer", self.tokenizer))
        check_revision("revision", self.revision)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", self.device, "one of auto, cpu, cuda, cuda:N")
        dtype = str(self.dtype).removeprefix("torch.")
        aliases = {"half": "float16", "float": "float32"}
        object.__setattr__(self, "dtype", aliases.get(dtype, dtype))
        check_choice("dtype", self.dtype, DTYPES)
        if self.seed is None:
            object.__setattr__(self, "seed", 0)
        check_int("seed", self.seed, 0, 2**64 - 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_step_seconds is not None:
            check_number("max_step_seconds", self.max_step_seconds, 0.001, 1e6)
        if self.max_num_waiting is not None:
            check_int("max_num_waiting", self.max_num_waiting, 1, remedy="None takes any number.")
        if self.block_size is not None:
            check_int("block_size", self.block_size, 1, 1024)
        check_number("memory_fraction", self.memory_fraction, 0.01, 1)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, 1)
        if self.threads is not None:
            check_int("threads", self.threads, 1, 1024)
        if self.async_scheduling not in (None, True, False):
            raise ConfigError("async_scheduling", self.async_scheduling, "None, true or false")
        gib = self.kv_cache_gib
        is_number = isinstance(gib, (int, float)) and not isinstance(gib, bool)
        if gib is not None and not (is_number and 0 < gib < 2**40):
            raise ConfigError("kv_cache_gib", gib, "a finite number > 0")
        speculation = SpeculativeConfig.parse(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculation)
        if self.load_format in ("hf", "safetensors"):
            object.__setattr__(self, "load_format", "auto")
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        own_file = "Put a `generation_config.json` of your own into the checkpoint's folder."
        check_choice("generation_config", self.generation_config, ("auto", "vllm"), own_file)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(field.name, value, "true or false")

    @property
    def num_drafts(self) -> int:
        """`SpeculativeConfig.num_drafts`; 0 without speculation."""
        return self.speculative_config.num_drafts if self.speculative_config else 0

    @classmethod
    def parse(cls, **options: Any) -> EngineConfig:
        """Build from a user's options, which may have vLLM's names, and None for defaults."""
        for vllm_name, name in RENAMED.items():
            if (value := plain(options.pop(vllm_name, None))) is None:
                continue
            check_number(vllm_name, value, 0.01, 1, f"It is `{name}` here.")
            if options.setdefault(name, value) != value:
                bound = f"left out, or equal to `{name}`, which is its name here"
                raise ConfigError(vllm_name, value, bound)
        # None means the default of a field that has a default other than None.
        with_default = {f.name for f in fields(cls) if f.default not in (None, MISSING)}
        return cls(**{k: v for k, v in options.items() if v is not None or k not in with_default})
