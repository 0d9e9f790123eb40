"""`LLM`: prompts in, texts out, in the caller's own thread.

Charter: whatever touches the engine does so in a turn (`engine/turns.py`), one step long, so that
the calls of several threads are batched together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from foretoken.engine.turns import Turns
from foretoken.errors import ForetokenError, RequestError, UsageError
from foretoken.interrupts import Interrupt, OnInterrupt
from foretoken.models.chat import ChatPrompt, ChatTemplate, split_conversations
from foretoken.outputs import CompletionOutput, RequestOutput, SpeculationMetrics
from foretoken.sampling.params import SamplingParams


class LLM:
    """An engine with a model in it.

    Threads may share one: their calls run together, in one batch. A forked child may not use its
    parent's (`UsageError`).

    Args:
        model: `tiny-python`, a checkpoint folder, or a hub id in the local cache.
        speculative_config: a dict, its JSON text, a `SpeculativeConfig`, or None.
        options: any other field of `EngineConfig`, for example device="auto", dtype="auto", seed=0.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError, EngineMemoryError.
    """

    def __init__(
        self,
        model: str = "tiny-python",
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.parse(model, speculative_config, **options)
        self._engine: Engine | None = build_engine(self.config)
        self._turns = Turns("LLM")
        self._num_requests = 0

    @property
    def engine(self) -> Engine:
        """The engine, for one thread; `UsageError` after `close()` and in a forked child."""
        self._turns.home.check()
        if self._engine is None:
            raise UsageError("this LLM was closed: make a new one")
        return self._engine

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, or None if it has none."""
        return self.engine.tokenizer

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far (a copy)."""
        if self._turns.inside:  # a signal handler in the midst of a call
            return self.engine.metrics.copy()
        with self._turns:
            return self.engine.metrics.copy()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        progress: bool = False,
        on_interrupt: OnInterrupt = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, one per prompt, or None for the defaults; each a
                `SamplingParams` or a dict of its fields.
            progress: show a progress bar on the terminal's error stream.
            on_interrupt: what a signal in the main thread does; a program's own signal handlers
                are left alone. `raise`: Ctrl-C ends the call after the present step by
                KeyboardInterrupt, SIGTERM ends the process at once. `return`: both end the call
                after the present step, and the outputs tell (`interrupted_by`); a signal that
                finds all of them complete is raised. A second signal is never held back.

        Returns:
            One `RequestOutput` per prompt. In a list, a prompt that cannot be served or fails
            carries its `error` and what it has, and the others complete; a single prompt raises it
            and drops the tokens it has: put it in a list to keep them.

        Raises:
            KeyboardInterrupt: Ctrl-C. Its attribute `outputs` is what would have been returned:
                what is done is complete, the rest has finish_reason `interrupted`, with the tokens
                it has.
        """
        single, items = _split(prompts)
        params = _params_per_prompt(sampling_params, len(items))
        return self._complete(single, items, params, progress, on_interrupt)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        progress: bool = False,
        on_interrupt: OnInterrupt = "raise",
    ) -> list[RequestOutput]:
        """Complete conversations, written as prompts by the tokenizer's chat template.

        Args:
            messages: a list of dicts with `role` and `content`, or a list of such lists.
            sampling_params, progress, on_interrupt: as in `generate`.
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
        return self._complete(single, items, params, progress, on_interrupt)

    def _complete(
        self,
        single: bool,
        items: Sequence[Prompt | ChatPrompt],
        params: list[SamplingParams],
        progress: bool,
        on_interrupt: str,
    ) -> list[RequestOutput]:
        """One output per item; the error of a single one is raised."""
        interrupt, engine = Interrupt(on_interrupt), self.engine
        left = deque(zip(items, params, strict=True))
        results: list[RequestGroup | RequestOutput] = []
        outputs = None
        try:
            with interrupt.noticed(), _progress_bar(results, len(items), progress) as update:
                while outputs is None:
                    outputs = self._turn(left, results, interrupt)
                    update()
        finally:  # whatever ends it, nothing is left behind in the engine
            self._turns.later(lambda: _abort(engine, results))
        interrupt.deliver(outputs)
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def _turn(
        self,
        left: deque[tuple[Prompt | ChatPrompt, SamplingParams]],
        results: list[RequestGroup | RequestOutput],
        interrupt: Interrupt,
    ) -> list[RequestOutput] | None:
        """Queue what fits and advance all requests by one step; the outputs when all are done."""
        with self._turns:
            engine = self.engine
            while left and (engine.has_room or interrupt.name):
                results.append(self._take(*left.popleft(), interrupt))
            for result in results if interrupt.name else ():
                _mark(engine, result, interrupt)
            if left or not all(result.finished for result in results):
                engine.step()
                return None
            return [build_output(engine, r) if isinstance(r, RequestGroup) else r for r in results]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        on_interrupt: OnInterrupt = "raise",
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what there is after every step, the last one finished.

        A request that fails while it runs is not raised: its last output has the `error` and what
        there is. Closing the iterator early aborts the request. Other calls may run in between:
        they advance this request, too. Between steps signals are the caller's; what one does during
        a step is said by `on_interrupt`, as in `generate`: `raise` raises KeyboardInterrupt with
        the output so far in its `outputs`; `return` makes the next output the last, with
        finish_reason `interrupted`.
        """
        interrupt = Interrupt(on_interrupt)
        with self._turns:
            engine, group = self.engine, self._add(prompt, one_params(sampling_params))
        try:
            finished = False
            while not finished:
                with interrupt.noticed(), self._turns:
                    if not (group.finished or interrupt.name):
                        self.engine.step()
                    _mark(self.engine, group, interrupt)
                    output = build_output(self.engine, group)
                finished = output.finished  # reading the text may be what ends it
                if interrupt.name and not finished:
                    continue  # the signal came when the output had been read
                interrupt.deliver([output])
                yield output
        finally:
            self._turns.later(lambda: engine.abort(group))

    def close(self) -> None:
        """End what runs and release models and caches; later calls raise `UsageError`.

        Calls that other threads are in end with that error, too. Does nothing in a forked child.
        """
        self._turns.later(self._release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _release(self) -> None:
        if self._engine is not None:
            self._engine.abort_all()
        self._engine = None

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


def _abort(engine: Engine, results: Sequence[RequestGroup | RequestOutput]) -> None:
    for result in results:
        if isinstance(result, RequestGroup):
            engine.abort(result)


def _mark(engine: Engine, group: RequestGroup | RequestOutput, interrupt: Interrupt) -> None:
    """End what a signal came in the way of, with its name."""
    if interrupt.name is None or isinstance(group, RequestOutput) or group.finished:
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
    results: Sequence[RequestGroup | RequestOutput], total: int, shown: bool
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
        yield lambda: bar.update(task, completed=sum(result.finished for result in results))
