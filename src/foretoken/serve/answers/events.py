"""Events, which say what is new in each choice, and the usage; in the same form for all APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from foretoken.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from foretoken.serve.parsers.message import MessageParser, Part, PlainParser
from foretoken.serve.requests import GenerationRequest
from foretoken.serve.running import PromptDelta


class Event(NamedTuple):
    """What is new in one choice.

    Attributes:
        choice: the index of the choice: first the samples of the first prompt, then of the second.
        parts: the content, reasoning and calls in the new text.
        sample: the new tokens with their details, and why the sample ended, if it has.
        echo: with `echo`, the delta that has the prompt; only in a choice's first event.
        prompt_logprobs: log-probabilities of the prompt; only once, in its first choice.
        prompt_ids: with `return_token_ids`, the prompt's ids; only in a choice's first event.
    """

    choice: int
    parts: Sequence[Part]
    sample: CompletionDelta
    echo: RequestDelta | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    prompt_ids: Sequence[int] | None = None


class Usage:
    """Counts of one request over HTTP. Cached tokens are known only when a prompt has ended."""

    def __init__(self, generation: GenerationRequest) -> None:
        self._generation = generation
        self._num_prompt = self._num_output = self._num_accepted = 0
        self.metrics: list[RequestMetrics] = []
        self.num_reasoning = 0

    def count(self, delta: RequestDelta) -> None:
        if delta.prompt_token_ids is not None:
            self._num_prompt += len(delta.prompt_token_ids)
        for sample in delta.outputs:
            self._num_output += len(sample.token_ids)
            if self._generation.params.prediction is not None:
                self._num_accepted += sample.origins.count("accepted")
        if delta.metrics is not None:
            self.metrics.append(delta.metrics)

    def body(self) -> dict[str, Any]:
        """The value of `usage` in an answer in OpenAI's shape."""
        predictions = [metrics.drafters.get("prediction") for metrics in self.metrics]
        counts = [count for count in predictions if count is not None]
        # The engine also counts accepted drafts after the token that ended the answer.
        accepted = min(sum(count.num_accepted_tokens for count in counts), self._num_accepted)
        rejected = sum(count.num_draft_tokens for count in counts) - accepted
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(metrics.num_cached_tokens for metrics in self.metrics)
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def speculation(self) -> dict[str, Any]:
        """The value of `metrics` in an answer; null without drafts, or for several samples."""
        num_drafts, num_samples = self._generation.num_drafts, self._generation.params.n
        if len(self.metrics) != 1 or num_samples > 1 or not num_drafts:
            return {"speculative_decoding": None}
        metrics = self.metrics[0]
        # At i: the number of steps in which at least i drafts were accepted.
        steps_by_min_accepted = [metrics.num_drafts, *metrics.accepted_per_position]
        steps_by_min_accepted += [0] * (num_drafts + 2 - len(steps_by_min_accepted))
        return {
            "speculative_decoding": {
                "acceptance_histogram": [a - b for a, b in pairwise(steps_by_min_accepted)],
                "num_spec_steps": metrics.num_drafts,
                "mean_acceptance_length": metrics.mean_acceptance_length,
                "draft_acceptance_rate": metrics.acceptance_rate,
                "num_accepted_draft_tokens": metrics.num_accepted_tokens,
                "num_draft_tokens": metrics.num_draft_tokens,
                "num_spec_tokens": num_drafts,
                "synthetic_acceptance": metrics.synthetic_acceptance,
            }
        }


class EventReader:
    """Turns the deltas of one request over HTTP into events, and counts tokens in `usage`."""

    def __init__(self, generation: GenerationRequest) -> None:
        self.usage = Usage(generation)
        self._generation = generation
        self._parsers: dict[int, MessageParser | PlainParser] = {}  # by choice
        self._prompts: dict[int, RequestDelta] = {}  # by prompt: the delta that has the prompt
        self._unsent_logprobs: dict[int, Any] = {}  # by prompt

    def read(self, item: PromptDelta) -> list[Event]:
        """The events of a delta: one per choice with news, or with `split_tokens` one per token."""
        (prompt_index, delta), events = item, []
        self.usage.count(delta)
        if delta.prompt_token_ids is not None:
            self._prompts[prompt_index] = delta
        if delta.prompt_logprobs is not None:
            self._unsent_logprobs[prompt_index] = delta.prompt_logprobs
        for sample in delta.outputs:
            index = prompt_index * self._generation.params.n + sample.index
            parser = self._parsers.get(index)
            echo = logprobs = ids = None
            if parser is None:
                parser, prompt_delta = PlainParser(), self._prompts[prompt_index]
                if self._generation.parsing is not None:
                    parser = self._generation.parsing.new_parser(prompt_delta.prompt or "")
                self._parsers[index] = parser
                echo = prompt_delta if self._generation.echo else None
                ids = prompt_delta.prompt_token_ids if self._generation.return_token_ids else None
            if sample.index == 0:
                logprobs = self._unsent_logprobs.pop(prompt_index, None)
            for piece in split_tokens(sample) if self._generation.split_tokens else (sample,):
                events.append(Event(index, parser.feed(piece), piece, echo, logprobs, ids))
                echo = logprobs = ids = None
        self.usage.num_reasoning = sum(each.num_reasoning for each in self._parsers.values())
        return events


def split_tokens(sample: CompletionDelta) -> Iterator[CompletionDelta]:
    """A delta with log-probabilities as one delta per token; other deltas are not split.

    A token gets its decoded text if the delta's text continues with that. If not, for example
    within a character or a stop string, a later token gets this text.
    """
    remaining, last = sample.text, len(sample.token_ids) - 1
    if last < 1 or sample.logprobs is None:
        yield sample
        return
    for i, token in enumerate(sample.token_ids):
        token_text = sample.logprobs[i][token].decoded_token or ""
        if i == last:
            token_text = remaining
        elif not remaining.startswith(token_text):
            token_text = ""
        remaining = remaining[len(token_text) :]
        yield replace(
            sample,
            token_ids=[token],
            text=token_text,
            logprobs=[sample.logprobs[i]],
            origins=sample.origins[i : i + 1],
            trace=None if sample.trace is None else sample.trace[i : i + 1],
            finish_reason=sample.finish_reason if i == last else None,
            stop_reason=sample.stop_reason if i == last else None,
        )
