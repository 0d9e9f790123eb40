"""Requests of all kinds, by number: prompts that share prefixes, parameters that differ."""

from __future__ import annotations

from typing import Any

SHARED = list(b"def shared(prefix, of, many):\n    ")
EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"bad_words": ["a", "th"], "logit_bias": {40: 2.0}, "logprobs": 2},
    {"min_tokens": 6, "stop_token_ids": list(range(0, 256, 11)), "stop": ["e", "(x"]},
    {"logprobs": 1, "prompt_logprobs": 1, "top_p": 0.9},
    {"structured_outputs": {"regex": "([a-h]{2,5} ?)*\\."}},
]
RULES = [None, "block", "coupled"]


def prompt_of(number: int) -> list[int]:
    return SHARED[: 3 + (7 * number) % 30] + [97 + number] * (number % 9)


def mixed(number: int, *, drafts: bool) -> dict[str, Any]:
    """Fields of `SamplingParams`: temperatures, rules, lengths, n, edits, and K if it `drafts`."""
    return {
        "temperature": (0.9, 0.0, 1.3)[number % 3],
        "rejection_sample_method": RULES[number // 2 % 3],
        "seed": 1000 + number,
        "max_tokens": 12 + (11 * number) % 36,
        "n": 1 + (number % 4 == 1),
        "num_speculative_tokens": (None, 0, 1, 4)[number % 4] if drafts else None,
        **EDITS[number % len(EDITS)],
    }
