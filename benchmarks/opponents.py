"""Transformers on the same weights, as fast as it goes here: what the others are compared with.

`LLM` sets the whole process's threads: where the native decoder runs, PyTorch gets one. Each call
here gives PyTorch all cores first, and puts back what was set, so that both sides have the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from foretoken.models import resolve_checkpoint

Ids = list[int]
TIE = 1e-3  # logits closer than this are a tie: float32 in another order of summation parts there


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """PyTorch's thread count inside; what it was comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load(name: str) -> Any:
    """A float32 model of Transformers whose generation never ends early."""
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(name), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(
    model: Any, prompts: list[Ids], max_tokens: int, temperature: float, **options: Any
) -> list[Ids]:
    """`generate` on a static batch of prompts of one length; the new tokens.

    Args:
        options: more arguments of `generate`: an assistant, the kind of cache.
    """
    batch = torch.tensor(prompts)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    tokens = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=max_tokens,
        **(sampling if temperature else {"do_sample": False}),
        **options,
    )
    return tokens[:, batch.shape[1] :].tolist()


# Two caches of `generate`; the static one without compilation, which takes minutes at first.
CACHES: dict[str, dict[str, Any]] = {
    "": {},
    ", static cache": {"cache_implementation": "static", "disable_compile": True},
}


class ContinuousBatching:
    """Transformers' continuous batching, sized to the batch, its set-up paid once.

    Its manager's thread polls while it has nothing to do, so it runs inside `running` only.
    """

    def __init__(self, model: Any, batch: int, tokens_per_request: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.model = model
        page = 32
        known = inspect.signature(ContinuousBatchingConfig).parameters
        page_size = "page_size" if "page_size" in known else "block_size"  # Transformers 5.17
        self.options = {
            "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            "continuous_batching_config": ContinuousBatchingConfig(
                num_blocks=(batch + 1) * (tokens_per_request // page + 2),
                max_batch_tokens=256,  # the fastest of 128 to 4096: its masks are dense
                max_requests_per_batch=batch,
                allow_block_sharing=False,  # prompts are repeated: no prefix reuse, as with ours
                **{page_size: page},
            ),
        }

    @contextmanager
    def running(self) -> Iterator[Any]:
        """The manager with its thread started; it and its cache are kept for the next time."""
        with self.model.continuous_batching_context_manager(
            persistent_manager=True, **self.options
        ) as manager:
            yield manager

    @staticmethod
    def complete(manager: Any, prompts: list[Ids], max_tokens: int) -> list[Ids]:
        """Greedy completions of all prompts, queued at once."""
        asked = manager.add_requests(inputs=prompts, max_new_tokens=max_tokens)
        found: dict[str, Ids] = {}
        while len(found) < len(asked):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the continuous batching thread of Transformers ended")
                continue
            if result.error is not None:
                raise RuntimeError(f"continuous batching of Transformers failed: {result.error}")
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
        return [found[name] for name in asked]


def parted_at_tie(model: Any, prompt: Ids, one: Ids, other: Ids) -> bool:
    """Whether two completions part where the model's logits of both tokens are nearly equal."""
    first = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    with torch.inference_mode():
        logits_V = model(torch.tensor([prompt + one[:first]])).logits[0, -1]
    return abs(float(logits_V[one[first]] - logits_V[other[first]])) < TIE


def agreement(
    target: Any, prompts: list[Ids], tokens: list[Ids], plain: list[Ids]
) -> dict[str, int]:
    """How many prompts have the tokens of plain decoding, part at a near-tie, or differ."""
    counts = {"prompts_equal_to_plain": 0, "near_ties": 0, "differ": 0}
    for prompt, mine, other in zip(prompts, tokens, plain, strict=True):
        if mine == other:
            counts["prompts_equal_to_plain"] += 1
        elif parted_at_tie(target, prompt, mine, other):
            counts["near_ties"] += 1
        else:
            counts["differ"] += 1
    return counts
