"""`LLM`: prompts in, texts out, in the caller's own thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.build import build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.request import Request, RequestGroup
from foretoken.errors import ForetokenError, RequestError, UsageError
from foretoken.models.chat import ChatPrompt, ChatTemplate, split_conversations
from foretoken.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from foretoken.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


class LLM:
    """An engine with a model in it.

    Args:
        model: `tiny-python`, a checkpoint folder, or a hub id in the local cache.
        speculative_config: a dict, its JSON text, a `SpeculativeConfig`, or None.
        options: any other field of `EngineConfig`, for example device="auto", dtype="auto", seed=0.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError.
    """

    def __init__(
        self,
        model: str = "tiny-python",
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.parse(model, speculative_config, **options)
        self._engine: Engine | None = build_engine(self.config)
        self._num_requests = 0

    @property
    def engine(self) -> Engine:
        """The engine; `UsageError` after `close()`."""
        if self._engine is None:
            raise UsageError("this LLM was closed: make a new one")
        return self._engine

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, or None if it has none."""
        return self.engine.tokenizer

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far."""
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, one per prompt, or None for the defaults; each a
                `SamplingParams` or a dict of its fields.
            progress: show a progress bar on the terminal's error stream.

        Returns:
            One `RequestOutput` per prompt. In a list, a prompt that cannot be served carries its
            `error` and the others complete; a single prompt that cannot be served raises it.
        """
        single, items = _split(prompts)
        params = _params_per_prompt(sampling_params, len(items))
        return self._complete(single, items, params, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete conversations, written as prompts by the tokenizer's chat template.

        Args:
            messages: a list of dicts with `role` and `content`, or a list of such lists.
            sampling_params, progress: as in `generate`.
            chat_template: Jinja text, or the name of one of the tokenizer's templates; None: its
                own.
            add_generation_prompt: end the prompt with what opens the assistant's answer.

        Returns:
            One `RequestOutput` per conversation, its `prompt` the rendered text. In a list, a
            conversation that cannot be served carries its `error` and the others complete.
        """
        template = ChatTemplate(self.tokenizer, chat_template, add_generation_prompt)
        single, conversations = split_conversations(messages)
        params = _params_per_prompt(sampling_params, len(conversations))
        items = [ChatPrompt(template, conversation) for conversation in conversations]
        return self._complete(single, items, params, progress)

    def _complete(
        self,
        single: bool,
        items: Sequence[Prompt | ChatPrompt],
        params: list[SamplingParams],
        progress: bool,
    ) -> list[RequestOutput]:
        """One output per item; the error of a single one is raised."""
        engine = self.engine
        results: list[RequestGroup | RequestOutput] = []
        try:
            for item, item_params in zip(items, params, strict=True):
                try:
                    results.append(self._add(item, item_params))
                except RequestError as error:
                    if single:
                        raise
                    results.append(self._refusal(item, error))
            groups = [r for r in results if isinstance(r, RequestGroup)]
            with _progress_bar(groups, progress) as update:
                while not all(group.finished for group in groups):
                    engine.step()
                    update()
        finally:  # whatever interrupts it, nothing is left behind in the engine
            for result in results:
                if isinstance(result, RequestGroup):
                    engine.abort(result)
        return [self._output(r) if isinstance(r, RequestGroup) else r for r in results]

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what there is after every step, the last one finished.

        Closing the iterator early aborts the request. Other calls may run in between: they
        advance this request, too.
        """
        engine, group = self.engine, self._add(prompt, _one_params(sampling_params))
        try:
            finished = False
            while not finished:
                if not group.finished:
                    engine.step()
                finished = group.finished
                yield self._output(group)
        finally:
            engine.abort(group)

    def close(self) -> None:
        """End what runs and release models and caches; later calls raise `UsageError`."""
        if self._engine is not None:
            self._engine.abort_all()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add(self, prompt: Prompt | ChatPrompt, params: SamplingParams) -> RequestGroup:
        text, ids = self._encode(prompt)
        self._num_requests += 1
        return self.engine.add(str(self._num_requests), ids, params, text)

    def _encode(self, prompt: Prompt | ChatPrompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, ChatPrompt):
            return prompt.encode()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt",
                    prompt,
                    "token ids: this checkpoint has no tokenizer",
                    "Encode it first.",
                )
            return prompt, list(self.tokenizer.encode(prompt)) if prompt else []
        ids = _as_list(prompt)
        if ids is None:
            raise RequestError("prompt", prompt, "a text or a list of token ids")
        return None, ids

    def _output(self, group: RequestGroup) -> RequestOutput:
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_ids,
            outputs=[self._completion(request) for request in group.samples],
            metrics=copy.deepcopy(group.metrics),
            prompt_logprobs=None if group.prompt_logprobs is None else [*group.prompt_logprobs],
            error=group.error,
        )

    def _completion(self, request: Request) -> CompletionOutput:
        return CompletionOutput(
            index=request.index,
            token_ids=request.output_ids,
            text=self.engine.text(request),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            seed=request.key,
            logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
            origins=list(request.origins),
        )

    def _refusal(self, prompt: Prompt | ChatPrompt, error: ForetokenError) -> RequestOutput:
        self._num_requests += 1
        text = prompt if isinstance(prompt, str) else None
        ids = [] if text is not None else _as_list(prompt) or []
        return RequestOutput(str(self._num_requests), text, ids, [], RequestMetrics(), error=error)


def _as_list(value: Any) -> list[Any] | None:
    """A sequence, array or tensor as a list; None for anything else, texts and bytes included."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        return None
    return list(value)


def _split(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and the prompts as a list; [] is no prompts at all."""
    if isinstance(prompts, str):
        return True, [prompts]
    items = _as_list(prompts)
    if items is None:
        raise RequestError("prompts", prompts, "a text, a list of token ids, or a list of either")
    if items and isinstance(items[0], int):
        return True, [items]
    return False, items


def _params_per_prompt(given: Any, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, (SamplingParams, Mapping)):
        return [_one_params(given)] * count
    if not isinstance(given, Sequence) or len(given) != count:
        shown = f"a list of {len(given)}" if isinstance(given, Sequence) else given
        raise RequestError("sampling_params", shown, f"one, or a list of {count}")
    return [_one_params(one) for one in given]


def _one_params(given: Any) -> SamplingParams:
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    if isinstance(given, Mapping):
        return SamplingParams.parse(given)
    raise RequestError("sampling_params", given, "a SamplingParams or a dict of its fields")


@contextmanager
def _progress_bar(groups: Sequence[RequestGroup], shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over finished requests; the caller invokes what it yields after every step."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=len(groups))
        yield lambda: bar.update(task, completed=sum(group.finished for group in groups))
