"""Output of commands: streamed text or JSON (docs/cli.md), and a line about the run."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from foretoken.cli.terminal import Note, console, is_utf8, say
from foretoken.engine.detokenizer import Detokenizer
from foretoken.errors import RequestError
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rich.text import Text

    from foretoken.llm import LLM
    from foretoken.models.chat import ChatPrompt
    from foretoken.outputs import CompletionOutput, Logprob, RequestOutput, TokenTrace

_STYLES = {"accepted": "green", "resampled": "bold red", "bonus": "cyan", "plain": ""}
_HEAD = ("round", "at", "token", "origin", "p", "q", "u", "u below", "rejected since")
_LINE = "{:>5} {:>5}  {:<14} {:<9} {:>8} {:>8} {:>8} {:>8}  {}"
_SYNTHETIC = "Synthetic acceptance: this text is meaningless by design."
_PATIENCE = 2.0  # seconds until a command that prints nothing shows a status line


def refuse_hidden_logprobs(params: SamplingParams, json_output: bool) -> None:
    """Refuse log-probabilities without `--json`: they would be computed, but not printed."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not json_output:
            raise RequestError(name, getattr(params, name), "left out without --json", "Add it.")


def complete(
    llm: LLM,
    prompt: str | ChatPrompt,
    params: SamplingParams,
    json_output: bool,
    note: Note,
    patience: float = _PATIENCE,
) -> RequestOutput:
    """Complete one prompt and print the samples, one after another; returns the last output.

    With `--trace` a terminal shows tokens coloured by origin, then a table of them. With
    `json_output` a status line appears after `patience` seconds.

    Raises:
        ForetokenError: the request was refused, or it failed after some text was printed.
    """
    start, output = time.perf_counter(), None
    coloured = params.trace and not json_output and sys.stdout.isatty()
    printer = _SamplePrinter(params.n, Painter(llm.tokenizer, params) if coloured else None)
    limit = f" of at most {params.n * params.max_tokens}" if params.max_tokens else ""
    progress = "no token was generated."
    note(progress)
    with _status_line(json_output, patience) as show:
        for output in llm.stream(prompt, params, on_interrupt="return"):
            if not json_output:
                printer.show(output)
            count = sum(len(sample.token_ids) for sample in output.outputs)
            progress = f"{count} tokens were generated in {time.perf_counter() - start:.1f} s."
            note(progress)
            show(f"{count}{limit} tokens")
    if output is None:
        raise RuntimeError("the stream ended before it began")
    if json_output:
        fields = as_json(output)
        _write(json.dumps(fields, ensure_ascii=not is_utf8(sys.stdout), allow_nan=False))
    _write("\n")
    if params.trace and not json_output:
        show_tables(output.outputs)
    if output.synthetic_acceptance:
        say(_SYNTHETIC, style="bold yellow")
    if output.error is not None:
        raise output.error
    if output.interrupted_by is not None:
        say(f"Interrupted: {progress}", interrupted=True)
    elif not json_output and sys.stderr.isatty():
        say(_summary(output), style="dim")
    return output


def exit_code(output: RequestOutput) -> int:
    """The exit code of a command that printed this output."""
    name = output.interrupted_by
    return 128 + signal.Signals[name] if name else 0


class _SamplePrinter:
    """Prints the samples of a request in order: a sample while it grows, then the next sample."""

    def __init__(self, count: int, painter: Painter | None) -> None:
        self._painter = painter
        self._count, self._index = count, 0
        self._num_printed = 0  # characters of the sample at `_index`
        self._title = f"--- 1 of {count} ---\n" if count > 1 else ""

    def show(self, output: RequestOutput) -> None:
        for sample in output.outputs[self._index :]:
            if self._painter is None:
                _write(self._title + sample.text[self._num_printed :])
            elif self._title or len(sample.text) > self._num_printed:
                painted = self._painter.paint(output.prompt_token_ids, sample, self._num_printed)
                _write(self._title)
                console(soft_wrap=True, highlight=False).print(painted, end="")
            self._title, self._num_printed = "", len(sample.text)
            if sample.finish_reason is None or sample.index + 1 == self._count:
                break
            self._index, self._num_printed = sample.index + 1, 0
            self._title = f"\n--- {sample.index + 2} of {self._count} ---\n"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _status_line(enabled: bool, patience: float) -> Iterator[Callable[[str], None]]:
    """Show a status line after `patience` seconds; yields a function that sets the line's text."""
    terminal = console(stderr=True)
    if not (enabled and terminal.is_terminal):
        yield lambda text: None
        return
    status = terminal.status("Generating")
    timer = threading.Timer(patience, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def as_json(output: RequestOutput) -> dict[str, Any]:
    """A `RequestOutput` field by field, as docs/cli.md describes it."""
    fields = asdict(replace(output, error=None, prompt_logprobs=None, outputs=[]))
    derived = ("synthetic_acceptance", "mean_k", "mean_acceptance_length", "acceptance_rate")
    metrics = fields["metrics"] | {name: getattr(output.metrics, name) for name in derived}
    metrics["drafters"] = [{"name": k, **counts} for k, counts in metrics["drafters"].items()]
    return fields | {
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "outputs": [
            asdict(replace(sample, logprobs=None, trace=None))
            | {
                "trace": None if sample.trace is None else [*map(_trace_fields, sample.trace)],
                "logprobs": _logprobs(sample.logprobs),
                "cumulative_logprob": _finite(sample.cumulative_logprob),
            }
            for sample in output.outputs
        ],
        "synthetic_acceptance": output.synthetic_acceptance,
        "metrics": metrics,
        "error": None if output.error is None else str(output.error),
    }


def _trace_fields(token: TokenTrace) -> dict[str, Any]:
    """A token's trace as a dict, without the field `dropped` of drafts that were dropped."""
    fields = asdict(token)
    for draft in fields["dropped"]:
        del draft["dropped"]
    return fields


def _logprobs(
    rows: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[list[dict[str, Any]] | None] | None:
    """The log-probabilities of each position; infinity, which JSON lacks, becomes null."""
    if rows is None:
        return None
    return [
        None if row is None else [_logprob(token, entry) for token, entry in row.items()]
        for row in rows
    ]


def _logprob(token: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token, **asdict(entry), "logprob": _finite(entry.logprob)}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _summary(output: RequestOutput) -> str:
    metrics = output.metrics
    reasons = ", ".join(dict.fromkeys(str(sample.finish_reason) for sample in output.outputs))
    parts = [
        f"{sum(len(sample.token_ids) for sample in output.outputs)} tokens ({reasons})",
        f"{metrics.num_steps} passes",
        f"{metrics.tokens_per_second:.0f} tokens/s",
    ]
    if metrics.num_drafts:
        label = "configured " if metrics.synthetic_acceptance else ""  # by the rule `synthetic`
        parts.append(f"{label}mean acceptance length {metrics.mean_acceptance_length:.2f}")
    return " · ".join(parts)


class Painter:
    """Colours the tokens in the texts of samples by origin."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._detokenizers: dict[int, Detokenizer] = {}
        self._ends: dict[int, list[int]] = {}

    def paint(self, prompt_ids: list[int], sample: CompletionOutput, start: int) -> Text:
        """A sample's text from character `start` to its end, each token in its colour."""
        from rich.text import Text

        ends, painted = self._ends_of(prompt_ids, sample), Text()
        begin = 0
        for origin, end in zip(sample.origins, ends, strict=True):
            painted.append(sample.text[max(begin, start) : end], _STYLES[origin])
            begin = max(end, start)
        painted.append(sample.text[max(begin, start) :])  # bytes that form no character
        return painted

    def _ends_of(self, prompt_ids: list[int], sample: CompletionOutput) -> list[int]:
        """For each token of a sample, where its characters end in the text; 0 without tokenizer."""
        ends = self._ends.setdefault(sample.index, [])
        if self._tokenizer is None:
            return [0] * len(sample.token_ids)
        if sample.index not in self._detokenizers:
            skips = self._params.skip_special_tokens
            self._detokenizers[sample.index] = Detokenizer(
                self._tokenizer, prompt_ids, (), skip_special_tokens=skips
            )
        reader = self._detokenizers[sample.index]
        for token in sample.token_ids[len(ends) :]:
            reader.append(token)
            ends.append((ends[-1] if ends else 0) + len(reader.take()))
        return ends


def show_tables(samples: Iterable[CompletionOutput]) -> None:
    """Print a table for each sample: how each of the tokens was chosen."""
    from rich.text import Text

    terminal = console(highlight=False, soft_wrap=True)
    for sample in samples:
        for line, style in _table_lines(sample):
            terminal.print(Text(line, style), end="\n")


def _table_lines(sample: CompletionOutput) -> Iterator[tuple[str, str]]:
    """The lines of a sample's table, each with its style."""
    trace = sample.trace or []
    names = [*dict.fromkeys(token.drafter for token in trace if token.drafter)]
    heading = [f"trace of sample {sample.index + 1}", *(f"rule {t.rule}" for t in trace[:1])]
    heading += [f"drafts by {', '.join(names)}"] if names else []
    heading += ["acceptance was set: the text means nothing"] if sample.synthetic_acceptance else []
    yield "\n" + " · ".join(heading), "bold"
    yield _LINE.format(*_HEAD), "bold"
    for token in trace:
        yield _table_line(token, names), _STYLES[token.origin]
        for draft in token.dropped:
            yield _table_line(draft, names), "dim"


def _table_line(token: TokenTrace, drafters: list[str]) -> str:
    """A token or a dropped draft as a line, with the drafter's name if there are several."""
    text = f"<{token.token_id}>" if token.decoded_token is None else repr(token.decoded_token)
    numbers = (token.p, token.q, token.u, token.threshold)
    columns = ["-" if x is None else f"{x:.3g}" for x in numbers]
    notes = [token.reason, token.drafter if len(drafters) > 1 else None]
    note = " · ".join(filter(None, notes))
    return _LINE.format(token.round, token.position, text, token.origin, *columns, note).rstrip()
