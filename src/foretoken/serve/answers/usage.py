"""Tokens that an answer cost, and how speculation went in it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from foretoken.outputs import RequestDelta, RequestMetrics
from foretoken.serve.requests import Asked


class Usage:
    """Counts of one request over HTTP, in OpenAI's shape; those of the cache come at the end.

    Attributes:
        metrics: of the prompts that have ended.
        num_reasoning: tokens of reasoning, which the output's include.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._num_prompt = self._num_output = self._num_accepted = 0
        self.metrics: list[RequestMetrics] = []
        self.num_reasoning = 0

    def count(self, delta: RequestDelta) -> None:
        """Add what a delta brings."""
        if delta.prompt_token_ids is not None:
            self._num_prompt += len(delta.prompt_token_ids)
        for sample in delta.outputs:
            self._num_output += len(sample.token_ids)
            if self._asked.params.prediction is not None:
                self._num_accepted += sample.origins.count("accepted")
        if delta.metrics is not None:
            self.metrics.append(delta.metrics)

    def body(self) -> dict[str, Any]:
        """`usage` of an answer."""
        drafters = [m.drafters.get("prediction") for m in self.metrics]
        counts = [c for c in drafters if c is not None]
        # What was accepted behind the token that ended the answer is no part of it.
        accepted = min(sum(c.num_accepted_tokens for c in counts), self._num_accepted)
        rejected = sum(c.num_draft_tokens for c in counts) - accepted
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(m.num_cached_tokens for m in self.metrics)
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def speculation(self) -> dict[str, Any]:
        """`metrics` of an answer, as load generators read them; null for several samples."""
        if len(self.metrics) != 1 or self._asked.params.n > 1 or not self._asked.num_drafts:
            return {"speculative_decoding": None}
        metrics, num_drafts = self.metrics[0], self._asked.num_drafts
        at_least = [metrics.num_drafts, *metrics.accepted_per_position]
        at_least += [0] * (num_drafts + 2 - len(at_least))
        return {
            "speculative_decoding": {
                "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
                "num_spec_steps": metrics.num_drafts,
                "mean_acceptance_length": metrics.mean_acceptance_length,
                "draft_acceptance_rate": metrics.acceptance_rate,
                "num_accepted_draft_tokens": metrics.num_accepted_tokens,
                "num_draft_tokens": metrics.num_draft_tokens,
                "num_spec_tokens": num_drafts,
                "synthetic_acceptance": metrics.synthetic_acceptance,
            }
        }
