"""An `LLM` with given texts, and actions of the commands that use an `LLM` of the test's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from foretoken.cli.actions import Actions
from foretoken.outputs import CompletionOutput, RequestMetrics, RequestOutput

PIECES = ["a", " +", " b", "\n"]


class FakeLLM:
    """Streams `pieces`; raises `error` after `fail_after` of them."""

    def __init__(
        self,
        fail_after: int | None = None,
        error: BaseException | None = None,
        synthetic: bool = False,
        pieces: Sequence[str] = PIECES,
    ) -> None:
        self.pieces = pieces
        self.fail_after, self.error, self.synthetic = fail_after, error, synthetic
        self.calls: list[tuple[str, Any]] = []

    def stream(self, prompt: str, params: Any, *, on_interrupt: str) -> Iterator[RequestOutput]:
        assert on_interrupt == "return"  # so that the text is printed first
        self.calls.append((prompt, params))
        for count in range(1, len(self.pieces) + 1):
            if self.error is not None and count - 1 == self.fail_after:
                raise self.error
            ended = "length" if count == len(self.pieces) else None
            sample = CompletionOutput(
                index=0, token_ids=list(range(count)), text="".join(self.pieces[:count]),
                finish_reason=ended, seed=7, origins=["plain"] * count,
                synthetic_acceptance=self.synthetic,
            )  # fmt: skip
            metrics = RequestMetrics()
            metrics.observe(2, 1, synthetic=self.synthetic)
            yield RequestOutput("1", prompt, [5, 6], [sample], metrics)


class WithLLM(Actions):
    def __init__(self, llm: Any) -> None:
        self.llm, self.loaded = llm, dict[str, Any]()

    def load(self, model: str, speculative_config: Any, **options: Any) -> Any:
        self.loaded = {"model": model, "speculative_config": speculative_config, **options}
        return self.llm
