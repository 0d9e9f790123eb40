"""What commands print: streamed text, or JSON (docs/cli.md), and a line about the run.

With `--trace` the text is coloured by where its tokens came from, and a table of them follows.
"""

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
_PATIENCE = 2.0  # seconds until what prints nothing shows that it is alive


def check_shown(params: SamplingParams, json_output: bool) -> None:
    """Refuse what would be computed and not printed: log-probabilities without `--json`."""
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
    """Complete one prompt and print what comes, the samples one after another.

    Returns the last output, maybe `interrupted_by` a signal; raises the error of a request that
    was refused, or that failed after what is printed.
    """
    start, output = time.perf_counter(), None
    coloured = params.trace and not json_output and sys.stdout.isatty()
    text = _Text(params.n, Painter(llm.tokenizer, params) if coloured else None)
    most = f" of at most {params.n * params.max_tokens}" if params.max_tokens else ""
    done = "no token was generated."
    note(done)
    with _sign_of_life(json_output, patience) as show:
        for output in llm.stream(prompt, params, on_interrupt="return"):
            if not json_output:
                text.show(output)
            count = sum(len(sample.token_ids) for sample in output.outputs)
            done = f"{count} tokens were generated in {time.perf_counter() - start:.1f} s."
            note(done)
            show(f"{count}{most} tokens")
    if output is None:
        raise RuntimeError("the stream ended before it began")
    if json_output:
        escaped = not is_utf8(sys.stdout)
        _write(json.dumps(as_json(output), ensure_ascii=escaped, allow_nan=False))
    _write("\n")
    if params.trace and not json_output:
        show_tables(output.outputs)
    if output.synthetic_acceptance:
        say(_SYNTHETIC, style="bold yellow")
    if output.error is not None:
        raise output.error
    if output.interrupted_by is not None:
        say(f"Interrupted: {done}", interrupted=True)
    elif not json_output and sys.stderr.isatty():
        say(_summary(output), style="dim")
    return output


def exit_code(output: RequestOutput) -> int:
    """What a shell expects of a command that prints this output."""
    name = output.interrupted_by
    return 128 + signal.Signals[name] if name else 0


class _Text:
    """Prints samples in their order: one as it grows, the next when it has ended."""

    def __init__(self, count: int, painter: Painter | None) -> None:
        self._painter = painter
        self._count, self._index, self._shown = count, 0, 0
        self._title = f"--- 1 of {count} ---\n" if count > 1 else ""

    def show(self, output: RequestOutput) -> None:
        """Print what is new."""
        for sample in output.outputs[self._index :]:
            if self._painter is None:
                _write(self._title + sample.text[self._shown :])
            elif self._title or len(sample.text) > self._shown:
                painted = self._painter.paint(output.prompt_token_ids, sample, self._shown)
                _write(self._title)
                console(soft_wrap=True, highlight=False).print(painted, end="")
            self._title, self._shown = "", len(sample.text)
            if sample.finish_reason is None or sample.index + 1 == self._count:
                break
            self._index, self._shown = sample.index + 1, 0
            self._title = f"\n--- {sample.index + 2} of {self._count} ---\n"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _sign_of_life(wanted: bool, patience: float) -> Iterator[Callable[[str], None]]:
    """A status line for what prints nothing and takes long; on anything but a terminal, nothing.

    Yields a function that sets the line's text.
    """
    shown = console(stderr=True)
    if not (wanted and shown.is_terminal):
        yield lambda text: None
        return
    status = shown.status("Generating")
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
                "trace": None if sample.trace is None else [*map(_traced, sample.trace)],
                "logprobs": _logprobs(sample.logprobs),
                "cumulative_logprob": _finite(sample.cumulative_logprob),
            }
            for sample in output.outputs
        ],
        "synthetic_acceptance": output.synthetic_acceptance,
        "metrics": metrics,
        "error": None if output.error is None else str(output.error),
    }


def _traced(token: TokenTrace) -> dict[str, Any]:
    """Field by field; what was dropped dropped nothing itself."""
    fields = asdict(token)
    for draft in fields["dropped"]:
        del draft["dropped"]
    return fields


def _logprobs(
    given: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[list[dict[str, Any]] | None] | None:
    """Per token a list, the token itself first; JSON has no infinity, which becomes null."""
    if given is None:
        return None
    return [
        None if place is None else [_logprob(token, entry) for token, entry in place.items()]
        for place in given
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
        label = "set " if metrics.synthetic_acceptance else ""
        parts.append(f"{label}mean acceptance length {metrics.mean_acceptance_length:.2f}")
    return " · ".join(parts)


class Painter:
    """Pieces of samples' texts, token by token in the colours of their origins."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._readers: dict[int, Detokenizer] = {}
        self._ends: dict[int, list[int]] = {}

    def paint(self, prompt_ids: list[int], sample: CompletionOutput, start: int) -> Text:
        """The text from `start` on. What a stop string cut off was no token's."""
        from rich.text import Text

        ends, painted = self._ends_of(prompt_ids, sample), Text()
        begin = 0
        for origin, end in zip(sample.origins, ends, strict=True):
            painted.append(sample.text[max(begin, start) : end], _STYLES[origin])
            begin = max(end, start)
        painted.append(sample.text[max(begin, start) :])  # bytes that are no character
        return painted

    def _ends_of(self, prompt_ids: list[int], sample: CompletionOutput) -> list[int]:
        """Where the text of each token ends; that of a character is its last one's."""
        ends = self._ends.setdefault(sample.index, [])
        if self._tokenizer is None:
            return [0] * len(sample.token_ids)
        if sample.index not in self._readers:
            skips = self._params.skip_special_tokens
            self._readers[sample.index] = Detokenizer(
                self._tokenizer, prompt_ids, (), skip_special_tokens=skips
            )
        reader = self._readers[sample.index]
        for token in sample.token_ids[len(ends) :]:
            reader.append(token)
            ends.append((ends[-1] if ends else 0) + len(reader.take()))
        return ends


def show_tables(samples: Iterable[CompletionOutput]) -> None:
    """Print how each token of each sample came about; plain where no terminal reads it."""
    from rich.text import Text

    shown = console(highlight=False, soft_wrap=True)
    for sample in samples:
        for line, style in _lines(sample):
            shown.print(Text(line, style), end="\n")


def _lines(sample: CompletionOutput) -> Iterator[tuple[str, str]]:
    trace = sample.trace or []
    names = [*dict.fromkeys(token.drafter for token in trace if token.drafter)]
    about = [f"trace of sample {sample.index + 1}", *(f"rule {token.rule}" for token in trace[:1])]
    about += [f"drafts by {', '.join(names)}"] if names else []
    about += ["acceptance was set: the text means nothing"] if sample.synthetic_acceptance else []
    yield "\n" + " · ".join(about), "bold"
    yield _LINE.format(*_HEAD), "bold"
    for token in trace:
        yield _line(token, names), _STYLES[token.origin]
        for draft in token.dropped:
            yield _line(draft, names), "dim"


def _line(token: TokenTrace, drafters: list[str]) -> str:
    """One token or draft; of several drafters, which one follows it."""
    text = f"<{token.token_id}>" if token.decoded_token is None else repr(token.decoded_token)
    numbers = (token.p, token.q, token.u, token.threshold)
    shown = ["-" if x is None else f"{x:.3g}" for x in numbers]
    notes = [token.reason, token.drafter if len(drafters) > 1 else None]
    note = " · ".join(filter(None, notes))
    return _LINE.format(token.round, token.position, text, token.origin, *shown, note).rstrip()
