"""`LLM`: prompts in, texts out, in the caller's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine import boundary
from foretoken.engine.boundary import Params, ParamsReader, Prompt, Submission
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
_Accepted = TypeVar("_Accepted", Submission, RequestGroup)
# A prompt once it is encoded, and once it is queued; `RequestOutput` if it was refused.
_Encoded = Submission | RequestOutput
_Queued = RequestGroup | RequestOutput
_ENCODED_PER_TURN = 16  # prompts that are encoded between two steps of other threads' requests


class LLM:
    """A loaded model and its engine.

    Threads may share an `LLM`: their requests run in one batch, because each call uses the engine
    in turns of one step (`Turns`). A forked child may not use the `LLM` of its parent
    (`UsageError`).

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
        """An `LLM` over an engine that `build_engine` made; only this `LLM` may use the engine."""
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
        """The engine, for one thread at a time; `UsageError` if closed, or in a forked child."""
        self._turns.owner_process.check()
        if self._engine is None:
            raise UsageError("this LLM was closed: make a new one")
        return self._engine

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, or None if it has none."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any | None:
        """`tokenizer`, under vLLM's name."""
        return self.tokenizer

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of prompts without `sampling_params`: `SamplingParams()` with the
        checkpoint's defaults (a copy)."""
        return replace(self._params.defaults)

    def reset_prefix_cache(self, **others: Any) -> bool:
        """Let later requests reuse no cached block; always returns True."""
        boundary.check_options(others, known=())
        with self._turns:
            self.engine.reset_prefix_cache()
        return True

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The engine's memory by part: `parts` are bytes by name, `table()` is a text."""
        return self.engine.runner.memory_plan

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far (a copy)."""
        if self._turns.inside:  # a signal handler during a call
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
            sampling_params: a `SamplingParams` or a dict of its fields for all prompts; a list with
                one of these per prompt; or None for `get_default_sampling_params()`.
            use_tqdm: show a progress bar if there is more than one prompt, the error stream is a
                terminal and the call takes more than two seconds.
            on_error: `raise` checks every prompt before anything runs and raises the error of the
                first bad prompt; `return` gives a bad prompt an output with its `error`, and the
                other prompts complete.
            on_interrupt: the effect of a signal in the main thread if the program has no handler
                for it. `raise`: Ctrl-C ends the call after the present step by KeyboardInterrupt,
                SIGTERM kills the process. `return`: both end the call after the present step, and
                outputs name the signal (`interrupted_by`); if all outputs are complete, the signal
                is raised. A second signal takes effect at once.
            others: options of vLLM that change nothing here (lora_request=None, ...).

        Returns:
            One `RequestOutput` per prompt. If a request fails while it runs, its output has the
            `error` and the tokens so far, and the other requests complete. The error of a single
            prompt (not in a list) is raised instead, unless `on_error` is `return`.

        Raises:
            RequestError, CapacityError, ProcessingError: a prompt or its parameters are refused.
            EngineBrokenError: the device failed in an earlier call; nothing is served any more.
            UsageError: after `close()`, in a forked child, or from a signal handler.
            KeyboardInterrupt: Ctrl-C. The attribute `outputs` of this exception holds all outputs;
                incomplete ones have the finish_reason `interrupted` and the tokens so far.
        """
        boundary.check_call(on_error, use_tqdm)
        known = ("sampling_params", "use_tqdm", "on_error", "on_interrupt")
        boundary.check_options(others, known)
        single, items = boundary.split_prompts(prompts)
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
        """As `generate`, for conversations, which the tokenizer's chat template turns into prompts.

        Args:
            messages: a conversation, or a list of conversations. A conversation is a list of dicts
                with `role` and `content` (a text, or a list of parts of type `text`), and optional
                `tool_calls`, `tool_call_id`, `name` or `reasoning_content`.
            template: inputs of the template: see `ChatOptions`.
        """
        boundary.check_call(on_error, use_tqdm)
        options = boundary.check_options(template, known=CHAT_OPTIONS)
        single, items = chat_prompts(ChatTemplate(self.tokenizer, **options), messages)
        return self._complete(single, items, sampling_params, use_tqdm, on_error, on_interrupt)

    def _complete(
        self, single: bool, items: Sequence[Any], sampling_params: Any, use_tqdm: bool,
        on_error: str, on_interrupt: str,
    ) -> list[RequestOutput]:  # fmt: skip
        """One output per prompt in `items`; all prompts are encoded before the first one runs.

        Args:
            single: whether the user passed a single prompt, not a list.
        """
        interrupt, engine = Interrupt(on_interrupt), self.engine
        params = self._params.read_per_prompt(sampling_params, len(items))
        encoded: deque[_Encoded] = deque()
        queued: list[_Queued] = []
        outputs = None
        # Grammars without references are dropped, and would be compiled again in each turn.
        _grammars = engine.grammars.wait(p.structured_outputs for p in params)

        def count_finished() -> int:
            return sum(item.finished for item in queued)

        try:
            with interrupt.caught(), progress_bar(count_finished, len(items), use_tqdm) as update:
                pairs = zip(items, params, strict=True)
                while len(encoded) < len(items):
                    with self._turns:
                        for prompt, prompt_params in islice(pairs, _ENCODED_PER_TURN):
                            self._num_requests += 1
                            name = str(self._num_requests)
                            accept = partial(boundary.prepare, engine, name, prompt, prompt_params)
                            request = name, prompt, prompt_params, interrupt
                            raises = on_error == "raise"
                            encoded.append(_accept_or_refuse(*request, accept, raises=raises))
                while outputs is None:
                    outputs = self._turn(encoded, queued, interrupt)
                    update()
        except BaseException as error:  # leave nothing in the engine
            self._turns.later(lambda: _abort(engine, queued))
            if isinstance(error, RequestError) and not single:
                index = len(encoded)
                error.add_note(f"Prompt {index} (from 0); on_error='return' runs the rest.")
            raise
        interrupt.deliver(outputs)
        if single and on_error == "raise" and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def _turn(
        self, encoded: deque[_Encoded], queued: list[_Queued], interrupt: Interrupt
    ) -> list[RequestOutput] | None:
        """Queue `encoded` prompts while the engine has room, and run one step, or end all requests
        if a signal came; returns the outputs once all requests have ended."""
        with self._turns:
            engine = self.engine
            while encoded and (engine.has_room or interrupt.name):
                item = encoded.popleft()
                if isinstance(item, RequestOutput):
                    queued.append(item)
                    continue
                prompt = {"prompt": item.prompt, "prompt_token_ids": item.prompt_ids}
                request = item.request_id, prompt, item.params, interrupt
                queued.append(_accept_or_refuse(*request, partial(engine.add, *item)))
            if interrupt.name:
                for result in queued:
                    _end_interrupted(engine, result, interrupt)
            if encoded or not all(result.finished for result in queued):
                engine.step()
                return None
            build = partial(boundary.build_output, engine)
            return [build(item) if isinstance(item, RequestGroup) else item for item in queued]

    def stream(
        self, prompt: Prompt | ChatPrompt, sampling_params: Params | None = None, *,
        on_interrupt: OnInterrupt = "raise",
    ) -> Iterator[RequestOutput]:  # fmt: skip
        """Complete one prompt; yields the output so far after every step, the last one finished.

        If the request fails while it runs, nothing is raised: its last output has the `error`.
        Closing the iterator early aborts the request. Other calls may run between two outputs; they
        advance this request, too. The caller handles signals between steps. During a step, Ctrl-C
        raises KeyboardInterrupt with the attribute `outputs`; under on_interrupt="return" Ctrl-C
        and SIGTERM make the next output the last, with finish_reason `interrupted`.
        """
        interrupt = Interrupt(on_interrupt)
        params = self._params.read(sampling_params)
        _grammars = self.engine.grammars.wait([params.structured_outputs])  # keeps a reference
        with self._turns:
            engine = self.engine
            self._num_requests += 1
            group = engine.add(*boundary.prepare(engine, str(self._num_requests), prompt, params))
        output, finished = None, False
        try:
            while not finished:
                with interrupt.caught(), self._turns:
                    if not (group.finished or interrupt.name):
                        self.engine.step()
                    _end_interrupted(self.engine, group, interrupt)
                    output = boundary.build_output(self.engine, group)
                finished = output.finished  # `build_output` may end the request
                if interrupt.name and not finished:
                    continue  # the signal came after the output was read
                interrupt.deliver([output])
                yield output
        except KeyboardInterrupt as error:  # from `deliver`, or between steps
            if output is not None:
                vars(error).setdefault("outputs", [output])
            raise
        finally:
            self._turns.later(lambda: engine.abort(group))

    def close(self) -> None:
        """End all requests and release models and caches; later calls raise `UsageError`.

        Running calls of other threads raise it, too. Does nothing in a forked child.
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


def _accept_or_refuse(
    name: str, prompt: Any, params: SamplingParams, interrupt: Interrupt,
    accept: Callable[[], _Accepted], *, raises: bool = False,
) -> _Accepted | RequestOutput:  # fmt: skip
    """The result of `accept()`, or an output that says why the prompt is refused.

    A prompt is refused if a signal has come, or if `accept()` raises a `ForetokenError`.

    Args:
        raises: whether that error is raised again, if no signal came during `accept()`.
    """
    error, samples = None, []
    if interrupt.name:
        reasons = "interrupted", interrupt.name
        samples = [CompletionOutput(j, [], "", *reasons) for j in range(params.n)]
    else:
        try:
            return accept()
        except ForetokenError as refusal:
            if raises and not interrupt.name:
                raise
            error = refusal
    text, ids = boundary.shown_parts(prompt)
    return RequestOutput(name, text, ids, samples, RequestMetrics(), error=error)


def _abort(engine: Engine, queued: Sequence[_Queued]) -> None:
    for result in queued:
        if isinstance(result, RequestGroup):
            engine.abort(result)


def _end_interrupted(engine: Engine, group: _Queued, interrupt: Interrupt) -> None:
    """If a signal came, end a request with the signal's name as its stop reason."""
    if interrupt.name is None or isinstance(group, RequestOutput) or group.finished:
        return
    running = [request for request in group.samples if request.finish_reason is None]
    engine.abort(group, "interrupted")
    for request in running:
        if request.finish_reason == "interrupted":
            request.stop_reason = interrupt.name
