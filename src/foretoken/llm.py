"""`LLM`: prompts in, texts out, in the caller's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any, Self

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.boundary import (
    Params,
    Prompt,
    as_list,
    build_output,
    one_params,
    submit,
    unserved,
)
from foretoken.engine.build import build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.errors import ForetokenError, RequestError, UsageError
from foretoken.interrupts import Interrupt, noticed
from foretoken.models.chat import ChatPrompt, ChatTemplate, split_conversations
from foretoken.outputs import CompletionOutput, RequestOutput, SpeculationMetrics
from foretoken.sampling.params import SamplingParams


class LLM:
    """An engine with a model in it.

    Args:
        model: `tiny-python`, a checkpoint folder, or a hub id, downloaded if it is missing.
        speculative_config: a dict, its JSON text, a `SpeculativeConfig`, or None.
        options: any other field of `EngineConfig`, for example device="auto", dtype="auto", seed=0.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError, EngineMemoryError.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "tiny-python",
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
            One `RequestOutput` per prompt. In a list, a prompt that cannot be served or fails
            carries its `error` and what it has, and the others complete; a single prompt raises it
            and drops the tokens it has: put it in a list to keep them.

            Ctrl-C or SIGTERM in the main thread ends the call after the present step: what is done
            is complete, the rest has finish_reason `interrupted`, with the tokens it has (see
            `outputs.uninterrupted`). A second signal does what it does without us. A
            program's own signal handlers are left alone.
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
            with noticed() as interrupt:
                left = deque(zip(items, params, strict=True))
                groups: list[RequestGroup] = []
                with _progress_bar(groups, len(items), progress) as update:
                    while True:
                        while left and (engine.has_room or interrupt.name):
                            results.append(self._take(*left.popleft(), interrupt))
                            if isinstance(results[-1], RequestGroup):
                                groups.append(results[-1])
                        if not left and (interrupt.name or not _unfinished(groups)):
                            break
                        engine.step()
                        update()
                for group in groups:
                    _mark(engine, group, interrupt)
        finally:  # whatever ends it, nothing is left behind in the engine
            for result in results:
                if isinstance(result, RequestGroup):
                    engine.abort(result)
        outputs = [build_output(engine, r) if isinstance(r, RequestGroup) else r for r in results]
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def stream(
        self, prompt: Prompt | ChatPrompt, sampling_params: Params | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what there is after every step, the last one finished.

        A request that fails while it runs is not raised: its last output has the `error` and what
        there is. Closing the iterator early aborts the request. Other calls may run in between:
        they advance this request, too. A signal during a step makes the next output the last, with
        finish_reason `interrupted`; between steps signals are the caller's.
        """
        engine, group = self.engine, self._add(prompt, one_params(sampling_params))
        try:
            finished = False
            while not finished:
                with noticed() as interrupt:
                    if not group.finished:
                        engine.step()
                    _mark(engine, group, interrupt)
                output = build_output(self.engine, group)
                finished = output.finished  # reading the text may be what ends it
                yield output
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
        self._num_requests += 1
        return submit(self.engine, str(self._num_requests), prompt, params)

    def _take(
        self, prompt: Prompt | ChatPrompt, params: SamplingParams, interrupt: Interrupt
    ) -> RequestGroup | RequestOutput:
        """Queue one of several prompts, or its output if it cannot or need not be queued."""
        if not interrupt.name:
            try:
                return self._add(prompt, params)
            except ForetokenError as error:
                return unserved(str(self._num_requests), prompt, error)
        self._num_requests += 1
        output = unserved(str(self._num_requests), prompt)
        output.outputs.extend(
            CompletionOutput(j, [], "", "interrupted", interrupt.name) for j in range(params.n)
        )
        return output


def _unfinished(groups: Sequence[RequestGroup]) -> bool:
    return not all(group.finished for group in groups)


def _mark(engine: Engine, group: RequestGroup, interrupt: Interrupt) -> None:
    """End what a signal came in the way of, with its name."""
    if interrupt.name is None or group.finished:
        return
    running = [request for request in group.samples if request.finish_reason is None]
    engine.abort(group, "interrupted")
    for request in running:
        if request.finish_reason == "interrupted":
            request.stop_reason = interrupt.name


def _split(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and the prompts as a list; [] is no prompts at all."""
    if isinstance(prompts, str):
        return True, [prompts]
    items = as_list(prompts)
    if items is None:
        raise RequestError("prompts", prompts, "a text, a list of token ids, or a list of either")
    if items and isinstance(items[0], int):
        return True, [items]
    return False, items


def _params_per_prompt(given: Any, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, (SamplingParams, Mapping)):
        return [one_params(given)] * count
    if not isinstance(given, Sequence) or len(given) != count:
        shown = f"a list of {len(given)}" if isinstance(given, Sequence) else given
        raise RequestError("sampling_params", shown, f"one, or a list of {count}")
    return [one_params(one) for one in given]


@contextmanager
def _progress_bar(
    groups: Sequence[RequestGroup], total: int, shown: bool
) -> Iterator[Callable[[], None]]:
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
        task = bar.add_task("requests", total=total)
        yield lambda: bar.update(task, completed=sum(group.finished for group in groups))
