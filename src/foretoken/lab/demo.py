"""The guided first minute behind `foretoken demo`.

Every figure on the screen is measured in the run that shows it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from foretoken.config import check_int
from foretoken.engine.detokenizer import Detokenizer
from foretoken.lab.audit.engine import EngineAudit, reference_of
from foretoken.lab.audit.verdict import audit
from foretoken.lab.workloads import heldout, heldout_chats
from foretoken.models.chat import ChatTemplate
from foretoken.models.locate import BUILT_IN
from foretoken.outputs import RequestMetrics, RequestOutput
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM

# Underline and bold tell the kinds apart where there is no colour.
STYLES = {"accepted": "green", "resampled": "yellow underline", "bonus": "cyan bold", "plain": ""}
MEANING = {
    "accepted": "drafted, and accepted by the target",
    "resampled": "drawn by the target in place of a rejected draft",
    "bonus": "drawn by the target after all drafts were accepted",
    "plain": "drawn by the target with nothing drafted",
}
_DRAFTERS = {
    "draft_model": "A small draft model",
    "eagle3": "A head on its hidden states",
    "ngram": "A look-up in the text so far",
}
TEMPERATURES = (0.0, 0.8)
# These read well; the others follow in their order.
SHOWN = ("heldout-001", "heldout-012", "heldout-013", "heldout-025")
ROUNDS = 5
BAR = 32
PROMPT_LINES = 6


class Shown(NamedTuple):
    """A prompt of the demo.

    prompt: what the engine is given
    text:   what is shown of it
    """

    title: str
    prompt: Any
    text: str


def _code() -> list[Shown]:
    """Beginnings of files, those that read well first."""
    items = sorted(heldout(), key=lambda item: item.id not in SHOWN)
    return [Shown(f"{i.package}, {i.file}", i.prompt, i.prompt) for i in items]


def _questions(template: ChatTemplate) -> list[Shown]:
    """Questions and tasks."""
    return [
        Shown(
            item.id,
            {"prompt_token_ids": template.render(item.messages)[1]},
            f"{item.messages[-1]['content']}\n\n",
        )
        for item in heldout_chats()
    ]


class Demo:
    """Runs the parts in order on one loaded engine.

    Args:
        llm: an engine with a drafter.
        console: where to write; colour and width are its business.
        note: called after each part with what has been done, which Ctrl-C reports.

    Attributes, of which a subclass may have others:
        rounds: timed rounds of each kind of decoding.
        audit: what checks the losslessness.
    """

    rounds: int = ROUNDS
    audit: type[EngineAudit] = EngineAudit

    def __init__(self, llm: LLM, console: Console, note: Callable[[str], None]) -> None:
        self.llm, self.console, self.note = llm, console, note
        has_template = getattr(llm.tokenizer, "chat_template", None) is not None
        self.is_chat = has_template and llm.config.model not in BUILT_IN
        self.items = _questions(ChatTemplate(llm.tokenizer)) if self.is_chat else _code()

    def run(self, prompts: int, max_tokens: int, samples: int) -> None:
        """Completions, acceptance, speed, losslessness: about a minute in all."""
        check_int("prompts", prompts, 1, len(self.items))
        chosen = self.items[:prompts]
        self.introduce()
        metrics = RequestMetrics()
        for number, item in enumerate(chosen):
            self.note(f"{number} of {len(chosen)} prompts were completed.")
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            metrics.add(self.complete(number, len(chosen), item, temperature, max_tokens).metrics)
        self.note("the prompts were completed; speed was not measured.")
        self.show_acceptance(metrics)
        self.show_speed(chosen, max_tokens)
        self.note("prompts and speed are shown; the losslessness check was not finished.")
        self.check_losslessness(samples)

    def introduce(self) -> None:
        """What runs here, and what the colours mean."""
        config, speculation = self.llm.config, self.llm.config.speculative_config
        drafts = speculation.num_drafts if speculation else 0
        done = "answers questions by" if self.is_chat else "completes Python files by"
        method = speculation.method if speculation else None
        drafter = _DRAFTERS.get(str(method), f"The drafter `{method}`")
        self.console.print(
            f"Foretoken {done} {config.model}. {drafter} proposes up to {drafts} tokens, the "
            "target checks them in one pass, and the text is distributed exactly as it would be "
            "without drafts."
        )
        for kind, meaning in MEANING.items():
            line = Text("  ").append(kind, STYLES[kind]).append(" " * (11 - len(kind)))
            self.console.print(line.append(meaning))

    def complete(
        self, number: int, count: int, item: Shown, temperature: float, max_tokens: int
    ) -> RequestOutput:
        """Stream one completion, each token in the style of its origin."""
        self._title(f"{number + 1} of {count}: {item.title}, temperature {temperature:g}")
        lines = item.text.splitlines(keepends=True)
        self._write("".join(lines[-PROMPT_LINES:]), "dim")
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
        detokenizer: Detokenizer | None = None
        done, output = 0, None
        for output in self.llm.stream(item.prompt, params):
            sample = output.outputs[0]
            if detokenizer is None:
                detokenizer = Detokenizer(self.llm.tokenizer, output.prompt_token_ids, ())
            for token, origin in zip(sample.token_ids[done:], sample.origins[done:], strict=True):
                before = len(detokenizer.text)
                detokenizer.append(token)
                self._write(detokenizer.text[before:], STYLES[origin])
            done = len(sample.token_ids)
        if output is None:
            raise RuntimeError("the stream ended before it began")
        self.console.print()
        counts = Counter(output.outputs[0].origins)
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in STYLES if counts[kind])
        passes = output.metrics.num_steps
        self._write(f"{done} tokens in {passes} passes of the target: {kinds}\n", "dim")
        return output

    def show_acceptance(self, metrics: RequestMetrics) -> None:
        """A bar per draft position, with the counts behind it."""
        self._title("Acceptance by position of the draft")
        full, empty = ("█", "░") if "utf" in self.console.encoding.lower() else ("#", ".")
        counts = zip(metrics.accepted_per_position, metrics.drafted_per_position, strict=True)
        for position, (accepted, drafted) in enumerate(counts, start=1):
            share = accepted / drafted
            filled = round(share * BAR)
            bar = Text(f"  {position}  ").append(full * filled, "green")
            bar.append(empty * (BAR - filled), "dim")
            self.console.print(bar.append(f"  {share:5.1%}  {accepted} of {drafted}"))
        self._say(
            f"A position counts as accepted when all before it were, too. Mean acceptance length "
            f"(accepted + 1 per pass): {metrics.mean_acceptance_length:.2f}"
        )

    def show_speed(self, chosen: list[Shown], max_tokens: int) -> None:
        """Plain and speculative decoding of the same prompts in turn, medians."""
        self._title("Speed, batch 1, plain and speculative in turn")
        ratios = []
        for temperature in TEMPERATURES:
            speculative = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=0
            )
            plain = replace(speculative, num_speculative_tokens=0)
            slow: list[float] = []
            fast: list[float] = []
            with self._progress("measuring", self.rounds) as advance:
                for done in range(self.rounds):
                    advance(done)
                    slow.append(self._speed(chosen, plain))
                    fast.append(self._speed(chosen, speculative))
            ratios.append(statistics.median(fast) / statistics.median(slow))
            self.console.print(
                f"  temperature {temperature:<4g} plain {_span(slow)}   speculative {_span(fast)}"
                f"   {ratios[-1]:.2f}x"
            )
        self._say(f"Tokens per second: median of {self.rounds} rounds (least to most).")
        if min(ratios) < 1.0:
            self._say(
                "Speculation is slower than plain decoding here: at this acceptance, drafting "
                "and checking cost more than the passes they save."
            )

    def _speed(self, chosen: list[Shown], params: SamplingParams) -> float:
        """Tokens per second over all prompts, one after another."""
        start = time.perf_counter()
        outputs = [self.llm.generate(item.prompt, params)[0].outputs[0] for item in chosen]
        return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - start)

    def check_losslessness(self, draws: int) -> None:
        """The likeliest tokens at T=0, the target's distribution at T>0, and what is excluded."""
        self._title("Is it lossless?")
        config = self.llm.config
        reference = reference_of(self.llm)
        asked = self.audit(self.llm, SamplingParams(temperature=1.0), reference)
        self._say(asked.greedy()[1])
        subject = asked.subject(config.model)._replace(exact=None)
        with self._progress("drawing", draws) as advance:
            found = audit(subject, draws, advance)
        self._say(f"Temperature 1, each token's rank among the target's: {found.verdict}")
        self._say("More: `foretoken audit`.")

    def _title(self, text: str) -> None:
        self.console.print()
        self.console.print(text, style="bold", markup=False)

    def _say(self, text: str) -> None:
        """A paragraph, indented, wrapped at words."""
        width = max(self.console.width - 2, 20)
        self._write(indent(fill(text, width, break_on_hyphens=False), "  ") + "\n", "")

    def _write(self, text: str, style: str) -> None:
        self.console.print(Text(text, style), end="", soft_wrap=True)

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar that vanishes when done; on anything but a terminal nothing is written.

        Yields a function that takes how many of `total` are done.
        """
        columns = (TextColumn("  {task.description}"), BarColumn(), TimeRemainingColumn())
        shown = self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)


def _span(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
