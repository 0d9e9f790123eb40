"""`--trace` on a terminal: the text coloured by where its tokens came from, and a table of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from foretoken.cli.terminal import console
from foretoken.engine.detokenizer import Detokenizer
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rich.text import Text

    from foretoken.outputs import CompletionOutput, TokenTrace

_STYLES = {"accepted": "green", "resampled": "bold red", "bonus": "cyan", "plain": ""}
_HEAD = ("round", "at", "token", "origin", "p", "q", "u", "u below", "rejected since")
_LINE = "{:>5} {:>5}  {:<14} {:<9} {:>8} {:>8} {:>8} {:>8}  {}"


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
    """One token or draft; of several drafters which one is said behind it."""
    text = f"<{token.token_id}>" if token.decoded_token is None else repr(token.decoded_token)
    numbers = (token.p, token.q, token.u, token.threshold)
    shown = ["-" if x is None else f"{x:.3g}" for x in numbers]
    notes = [token.reason, token.drafter if len(drafters) > 1 else None]
    note = " · ".join(filter(None, notes))
    return _LINE.format(token.round, token.position, text, token.origin, *shown, note).rstrip()
