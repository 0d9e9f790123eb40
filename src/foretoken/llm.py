"""`LLM`: prompts in, texts out, in the caller's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.boundary import (
    Submission,
    build_output,
    not_begun,
    prepare,
    submit,
    unserved,
)
from foretoken.engine.build import build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.prompts import (
    Params,
    ParamsReader,
    Prompt,
    check_call,
    check_options,
    split_prompts,
)
from foretoken.engine.request import RequestGroup
from foretoken.errors import ForetokenError, UsageError
from foretoken.interrupts import Interrupt, noticed
from foretoken.models.chat import (
    CHAT_OPTIONS,
    ChatOptions,
    ChatPrompt,
    ChatTemplate,
    split_conversations,
)
from foretoken.outputs import RequestOutput, SpeculationMetrics
from foretoken.progress import progress_bar
from foretoken.sampling.params import SamplingParams

OnError = Literal["raise", "return"]


class LLM:
    """An engine with a model in it.

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
        self._params = ParamsReader(self._engine.default_params)
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

    def get_tokenizer(self) -> Any | None:
        """`tokenizer`, by the name that vLLM's users type."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means (a copy): the checkpoint's own defaults over ours."""
        return replace(self._params.defaults)

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far."""
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
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
            others: names that vLLM takes and that change nothing here (lora_request=None, ...).

        Returns:
            One `RequestOutput` per prompt. A request that fails while it runs carries its `error`
            and what it has, and the others complete; one that was given alone raises it and drops
            the tokens it has, unless `on_error` is `return`.

            Ctrl-C or SIGTERM in the main thread ends the call after the present step: what is done
            is complete, the rest has finish_reason `interrupted`, with the tokens it has (see
            `outputs.uninterrupted`). A second signal does what it does without us. A
            program's own signal handlers are left alone.

        Raises:
            RequestError, CapacityError, ProcessingError: a prompt or its parameters.
        """
        check_call(on_error, use_tqdm)
        check_options(others, known=("sampling_params", "use_tqdm", "on_error"))
        single, items = split_prompts(prompts)
        submissions = self._prepare(single, items, sampling_params, on_error)
        return self._complete(single and on_error == "raise", submissions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
        **template: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Complete conversations, written as prompts by the tokenizer's chat template.

        Args:
            messages: a list of dicts with `role` and `content` (a text, or a list of parts of type
                `text`), and `tool_calls`, `tool_call_id`, `name` or `reasoning_content` if they
                have them; or a list of such lists.
            sampling_params, use_tqdm, on_error: as in `generate`.
            template: what the template is given: see `ChatOptions`.

        Returns:
            One `RequestOutput` per conversation, its `prompt` the rendered text.
        """
        check_call(on_error, use_tqdm)
        options = check_options(template, known=CHAT_OPTIONS)
        chat_template = ChatTemplate(self.tokenizer, **options)
        single, conversations = split_conversations(messages)
        items = [ChatPrompt(chat_template, conversation) for conversation in conversations]
        submissions = self._prepare(single, items, sampling_params, on_error)
        return self._complete(single and on_error == "raise", submissions, use_tqdm)

    def _prepare(
        self, single: bool, items: Sequence[Any], sampling_params: Any, on_error: OnError
    ) -> list[Submission | RequestOutput]:
        """Every prompt, checked, or the output that tells what is wrong with it."""
        params = self._params.read_per_prompt(sampling_params, len(items))
        found: list[Submission | RequestOutput] = []
        for i, (item, its_params) in enumerate(zip(items, params, strict=True)):
            try:
                found.append(prepare(self.engine, self._next_id(), item, its_params))
            except ForetokenError as error:
                if on_error == "raise":
                    if not single:
                        error.add_note(
                            f"Prompt {i} of the list; on_error='return' runs the others."
                        )
                    raise
                found.append(unserved(str(self._num_requests), item, error))
        return found

    def _complete(
        self, raises: bool, submissions: Sequence[Submission | RequestOutput], use_tqdm: bool
    ) -> list[RequestOutput]:
        """One output per submission; `raises`: the error of the only one is raised."""
        engine = self.engine
        results: list[RequestGroup | RequestOutput] = []
        groups: list[RequestGroup] = []

        def count() -> int:
            return sum(group.finished for group in groups)

        try:
            with noticed() as interrupt, progress_bar(count, len(submissions), use_tqdm) as update:
                left = deque(submissions)
                while True:
                    while left and (engine.has_room or interrupt.name):
                        results.append(self._take(left.popleft(), interrupt))
                        if isinstance(results[-1], RequestGroup):
                            groups.append(results[-1])
                    if not left and (interrupt.name or not _unfinished(groups)):
                        break
                    engine.step()
                    update()
                for group in groups:
                    _mark(engine, group, interrupt)
        finally:  # whatever ends it, nothing is left behind in the engine
            for group in groups:
                engine.abort(group)
        outputs = [build_output(engine, r) if isinstance(r, RequestGroup) else r for r in results]
        if raises and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what there is after every step, the last one finished.

        A request that fails while it runs is not raised: its last output has the `error` and what
        there is. Closing the iterator early aborts the request. Other calls may run in between:
        they advance this request, too. A signal during a step makes the next output the last, with
        finish_reason `interrupted`; between steps signals are the caller's.
        """
        engine = self.engine
        params = self._params.read(sampling_params)
        group = submit(engine, prepare(engine, self._next_id(), prompt, params))
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

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)

    def _take(
        self, item: Submission | RequestOutput, interrupt: Interrupt
    ) -> RequestGroup | RequestOutput:
        """Queue one of several prompts, or its output if it cannot or need not be queued."""
        if isinstance(item, RequestOutput):
            return item
        if interrupt.name:
            return not_begun(item, "interrupted", interrupt.name)
        try:
            return submit(self.engine, item)
        except ForetokenError as error:
            return unserved(item.request_id, item.prompt or item.prompt_ids, error)


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
