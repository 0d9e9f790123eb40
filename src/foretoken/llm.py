"""`LLM`: prompts in, texts out, in the caller's own thread.

Charter: whatever touches the engine does so in a turn (`engine/worker.py`), one step long, so that
the calls of several threads are batched together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.boundary import (
    Params,
    ParamsReader,
    Prompt,
    Submission,
    build_output,
    check_call,
    check_options,
    prepare,
    shown_parts,
    split_prompts,
)
from foretoken.engine.build import build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.memory_plan import MemoryPlan
from foretoken.engine.request import RequestGroup
from foretoken.engine.worker import Turns
from foretoken.errors import ForetokenError, RequestError, UsageError
from foretoken.foreign import absent_attribute
from foretoken.interrupts import Interrupt, OnInterrupt
from foretoken.models.chat import CHAT_OPTIONS, ChatOptions, ChatPrompt, ChatTemplate, chat_prompts
from foretoken.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from foretoken.progress import progress_bar
from foretoken.sampling.params import SamplingParams

OnError = Literal["raise", "return"]
_Prepared = Submission | RequestOutput  # what can be queued, or the output of what cannot
_Done = TypeVar("_Done", Submission, RequestGroup)
_Begun = RequestGroup | RequestOutput  # what runs or has ended, or such an output
_PREPARED_PER_TURN = 16  # prompts that threads with running requests wait for between two steps


class LLM:
    """An engine with a model in it.

    Threads may share one: their calls run together, in one batch. A forked child may not use its
    parent's (`UsageError`).

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
        config = EngineConfig.parse(model=model, speculative_config=speculative_config, **options)
        self._serve(config, build_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """An `LLM` over an engine that `build_engine` made, for example with other parts.

        Nothing else may use the engine after that.
        """
        llm = cls.__new__(cls)
        llm._serve(engine.config, engine)
        return llm

    def _serve(self, config: EngineConfig, engine: Engine) -> None:
        self.config = config
        self._engine: Engine | None = engine
        self._params = ParamsReader(engine.default_params)
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

    def get_tokenizer(self) -> Any | None:
        """`tokenizer`, by the name that vLLM's users type."""
        return self.tokenizer

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means (a copy): the checkpoint's own defaults over ours."""
        return replace(self._params.defaults)

    def reset_prefix_cache(self, **others: Any) -> bool:
        """Have no later request reuse what earlier ones computed; True: it has happened."""
        check_options(others, known=())
        with self._turns:
            self.engine.reset_prefix_cache()
        return True

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What takes memory, by part: `parts` are bytes by name, `table()` is a text."""
        return self.engine.runner.memory_plan

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far (a copy)."""
        if self._turns.inside:  # a signal handler in the midst of a call
            return self.engine.metrics.copy()
        with self._turns:
            return self.engine.metrics.copy()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
        on_interrupt: OnInterrupt = "raise",
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in order.

        Args:
            prompts: a text, token ids (a list, an array, a tensor), a dict with `prompt` or
                `prompt_token_ids`, or a list of such.
            sampling_params: one for all prompts, one per prompt, or None for
                `get_default_sampling_params()`; each a `SamplingParams` or a dict of its fields.
            use_tqdm: show a progress bar if there is more than one prompt, the error stream is a
                terminal and the call takes more than two seconds.
            on_error: `raise` checks every prompt before anything runs and raises what is wrong
                with the first bad one; `return` gives a bad prompt an output with its `error`, and
                the others complete.
            on_interrupt: what a signal in the main thread does; a program's own signal handlers
                are left alone. `raise`: Ctrl-C ends the call after the present step by
                KeyboardInterrupt, SIGTERM ends the process at once. `return`: both end the call
                after the present step, and the outputs say so (`interrupted_by`); if all of them
                are complete, the signal is raised. A second signal is never held back.
            others: names that vLLM takes and that change nothing here (lora_request=None, ...).

        Returns:
            One `RequestOutput` per prompt. A request that fails while it runs carries its `error`
            and what it has, and the others complete; one that was given alone raises it and drops
            the tokens it has, unless `on_error` is `return`.

        Raises:
            RequestError, CapacityError, ProcessingError: a prompt or its parameters.
            EngineBrokenError: the device failed, in an earlier call; nothing is served any more.
            KeyboardInterrupt: Ctrl-C. Its attribute `outputs` is what would have been returned:
                what is done is complete, the rest has finish_reason `interrupted`, with the tokens
                it has.
        """
        check_call(on_error, use_tqdm)
        check_options(others, known=("sampling_params", "use_tqdm", "on_error", "on_interrupt"))
        single, items = split_prompts(prompts)
        return self._complete(single, items, sampling_params, use_tqdm, on_error, on_interrupt)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
        on_interrupt: OnInterrupt = "raise",
        **template: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Complete conversations, written as prompts by the tokenizer's chat template.

        Args:
            messages: a list of dicts with `role` and `content` (a text, or a list of parts of type
                `text`), and `tool_calls`, `tool_call_id`, `name` or `reasoning_content` if they
                have them; or a list of such lists.
            sampling_params, use_tqdm, on_error, on_interrupt: as in `generate`.
            template: what the template is given: see `ChatOptions`.

        Returns:
            One `RequestOutput` per conversation, its `prompt` the rendered text.
        """
        check_call(on_error, use_tqdm)
        options = check_options(template, known=CHAT_OPTIONS)
        single, items = chat_prompts(ChatTemplate(self.tokenizer, **options), messages)
        return self._complete(single, items, sampling_params, use_tqdm, on_error, on_interrupt)

    def _complete(
        self,
        single: bool,
        items: Sequence[Any],
        sampling_params: Any,
        use_tqdm: bool,
        on_error: str,
        on_interrupt: str,
    ) -> list[RequestOutput]:
        """One output per item; all are prepared before the first one runs."""
        interrupt, engine = Interrupt(on_interrupt), self.engine
        params = self._params.read_per_prompt(sampling_params, len(items))
        left: deque[_Prepared] = deque()
        results: list[_Begun] = []
        outputs = None

        # Grammars that no variable holds are dropped, and would be compiled again in each turn.
        _kept = engine.grammars.wait(one.structured_outputs for one in params)

        def count() -> int:
            return sum(result.finished for result in results)

        try:
            with interrupt.noticed(), progress_bar(count, len(items), use_tqdm) as update:
                asked = zip(items, params, strict=True)
                while len(left) < len(items):
                    with self._turns:
                        for item, its_params in islice(asked, _PREPARED_PER_TURN):
                            self._num_requests += 1
                            name = str(self._num_requests)
                            work = partial(prepare, engine, name, item, its_params)
                            given = name, item, its_params, interrupt
                            left.append(_attempt(*given, work, raises=on_error == "raise"))
                while outputs is None:
                    outputs = self._turn(left, results, interrupt)
                    update()
        except BaseException as error:  # whatever ends it, nothing is left in the engine
            self._turns.later(lambda: _abort(engine, results))
            if isinstance(error, RequestError) and not single:
                error.add_note(f"Prompt {len(left)} of the list; on_error='return' runs the rest.")
            raise
        interrupt.deliver(outputs)
        if single and on_error == "raise" and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def _turn(
        self, left: deque[_Prepared], results: list[_Begun], interrupt: Interrupt
    ) -> list[RequestOutput] | None:
        """Queue what fits and advance all requests by one step; the outputs when all are done."""
        with self._turns:
            engine = self.engine
            while left and (engine.has_room or interrupt.name):
                item = left.popleft()
                if isinstance(item, RequestOutput):
                    results.append(item)
                    continue
                shown = {"prompt": item.prompt, "prompt_token_ids": item.prompt_ids}
                given = item.request_id, shown, item.params, interrupt
                results.append(_attempt(*given, partial(engine.add, *item)))
            for result in results if interrupt.name else ():
                _mark(engine, result, interrupt)
            if left or not all(result.finished for result in results):
                engine.step()
                return None
            return [build_output(engine, r) if isinstance(r, RequestGroup) else r for r in results]

    def stream(
        self,
        prompt: Prompt | ChatPrompt,
        sampling_params: Params | None = None,
        *,
        on_interrupt: OnInterrupt = "raise",
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what there is after every step, the last one finished.

        A request that fails while it runs is not raised: its last output has the `error` and what
        there is. Closing the iterator early aborts the request. Other calls may run in between:
        they advance this request, too. Between steps, signals are the caller's. During a step
        `on_interrupt` decides, as in `generate`: `raise` raises KeyboardInterrupt with the output
        so far in its `outputs`; `return` makes the next output the last, marked `interrupted`.
        """
        interrupt = Interrupt(on_interrupt)
        params = self._params.read(sampling_params)
        _kept = self.engine.grammars.wait([params.structured_outputs])
        with self._turns:
            engine = self.engine
            self._num_requests += 1
            group = engine.add(*prepare(engine, str(self._num_requests), prompt, params))
        output, finished = None, False
        try:
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
        except KeyboardInterrupt as error:  # also one that came just after a step
            if output is not None:
                vars(error).setdefault("outputs", [output])
            raise
        finally:
            self._turns.later(lambda: engine.abort(group))

    def close(self) -> None:
        """End what runs and release models and caches; later calls raise `UsageError`.

        Calls that other threads are in end with that error, too. Does nothing in a forked child.
        """
        self._turns.later(self._release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _release(self) -> None:
        if self._engine is not None:
            self._engine.abort_all()
        self._engine = None


def _attempt(
    name: str,
    prompt: Any,
    params: SamplingParams,
    interrupt: Interrupt,
    work: Callable[[], _Done],
    *,
    raises: bool = False,
) -> _Done | RequestOutput:
    """What `work` makes of a prompt, or the output of one that it refuses or a signal came before.

    Args:
        raises: raise what refuses it instead.
    """
    error, samples = None, []
    if interrupt.name:
        reason = "interrupted", interrupt.name
        samples = [CompletionOutput(j, [], "", *reason) for j in range(params.n)]
    else:
        try:
            return work()
        except ForetokenError as refusal:
            if raises and not interrupt.name:
                raise
            error = refusal
    text, ids = shown_parts(prompt)
    return RequestOutput(name, text, ids, samples, RequestMetrics(), error=error)


def _abort(engine: Engine, results: Sequence[_Begun]) -> None:
    for result in results:
        if isinstance(result, RequestGroup):
            engine.abort(result)


def _mark(engine: Engine, group: _Begun, interrupt: Interrupt) -> None:
    """End what a noticed signal interrupts, with its name as the reason."""
    if interrupt.name is None or isinstance(group, RequestOutput) or group.finished:
        return
    running = [request for request in group.samples if request.finish_reason is None]
    engine.abort(group, "interrupted")
    for request in running:
        if request.finish_reason == "interrupted":
            request.stop_reason = interrupt.name
