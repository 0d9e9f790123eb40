"""`LLM`: prompts in, texts out, in the caller's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

from foretoken.config import EngineConfig
from foretoken.engine.build import build_engine
from foretoken.engine.request import Request, RequestGroup
from foretoken.errors import ForetokenError, RequestError, UsageError
from foretoken.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foretoken.sampling.params import SamplingParams

Prompt = str | Sequence[int]


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
        speculative_config: Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.parse(model, speculative_config, **options)
        self.engine = build_engine(self.config)
        self._num_requests = 0
        self._closed = False

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, or None if it has none."""
        return self.engine.tokenizer

    @property
    def metrics(self) -> RequestMetrics:
        """Counts summed over all requests so far."""
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, one per prompt, or None for the defaults.
            progress: show a progress bar on the terminal's error stream.

        Returns:
            One `RequestOutput` per prompt. In a list, a prompt that cannot be served carries its
            `error` and the others complete; a single prompt that cannot be served raises it.
        """
        self._check_open()
        single, items = _split(prompts)
        params = _params_per_prompt(sampling_params, len(items))
        groups: list[RequestGroup | RequestOutput] = []
        for item, item_params in zip(items, params, strict=True):
            try:
                groups.append(self._add(item, item_params))
            except RequestError as error:
                if single:
                    raise
                groups.append(self._refusal(item, error))
        queued = [g for g in groups if isinstance(g, RequestGroup)]
        for _ in self._run(queued, progress):
            pass
        return [self._output(g) if isinstance(g, RequestGroup) else g for g in groups]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what there is after every step, the last one finished.

        Closing the iterator early aborts the request.
        """
        self._check_open()
        group = self._add(prompt, sampling_params or SamplingParams())
        for changed in self._run([group]):
            if group in changed:
                yield self._output(group)

    def close(self) -> None:
        """Release the models and caches; later calls raise `UsageError`."""
        self._closed = True
        self.__dict__.pop("engine", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this LLM was closed: make a new one")

    def _add(self, prompt: Prompt, params: SamplingParams) -> RequestGroup:
        text, ids = self._encode(prompt)
        self._num_requests += 1
        return self.engine.add(str(self._num_requests), ids, params, text)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence):
                raise RequestError("prompt", prompt, "a text or a list of token ids")
            return None, list(cast(Sequence[int], prompt))
        if self.tokenizer is None:
            raise RequestError(
                "prompt", prompt, "token ids: this checkpoint has no tokenizer", "Encode it first."
            )
        return prompt, list(self.tokenizer.encode(prompt)) if prompt else []

    def _run(
        self, groups: Sequence[RequestGroup], progress: bool = False
    ) -> Iterator[list[RequestGroup]]:
        """Step until all groups have ended; whatever interrupts it, they are aborted."""
        try:
            with _progress_bar(groups, progress) as update:
                while not all(group.finished for group in groups):
                    changed = self.engine.step()
                    update()
                    yield changed
        finally:
            for group in groups:
                self.engine.abort(group)

    def _output(self, group: RequestGroup) -> RequestOutput:
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_ids,
            outputs=[self._completion(request) for request in group.samples],
            metrics=group.metrics,
            prompt_logprobs=group.prompt_logprobs,
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

    def _refusal(self, prompt: Prompt, error: ForetokenError) -> RequestOutput:
        self._num_requests += 1
        text = prompt if isinstance(prompt, str) else None
        ids: list[int] = []
        if not isinstance(prompt, str) and isinstance(prompt, Sequence):
            ids = list(cast(Sequence[int], prompt))
        return RequestOutput(str(self._num_requests), text, ids, [], RequestMetrics(), error=error)


def _split(prompts: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    """Whether it is one prompt, and the prompts as a list; [] is no prompts at all."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return True, [cast(Prompt, prompts)]
    return False, list(cast(Sequence[Prompt], prompts))


def _params_per_prompt(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise RequestError("sampling_params", f"a list of {len(given)}", f"one, or {count}")
    return list(given)


@contextmanager
def _progress_bar(groups: Sequence[RequestGroup], shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over the tokens still to come; the caller invokes what it yields after every step."""
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
