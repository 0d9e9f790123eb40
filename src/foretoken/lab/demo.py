"""`foretoken demo`: a guided first minute. Every figure is measured in the run that shows it."""

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

# Underline and bold distinguish the origins of tokens where there is no colour.
STYLES = {"accepted": "green", "resampled": "yellow underline", "bonus": "cyan bold", "plain": ""}
MEANING = {
    "accepted": "drafted, and accepted by the target",
    "resampled": "drawn by the target in place of a rejected draft",
    "bonus": "drawn by the target after all drafts were accepted",
    "plain": "drawn by the target with nothing drafted",
}
_DRAFTERS = {
    "draft_model": "A small draft model",
    "eagle3": "A head on the model's hidden states",
    "ngram": "A look-up in the prompt and the generated text",
}
TEMPERATURES = (0.0, 0.8)
FIRST = ("heldout-001", "heldout-012", "heldout-013", "heldout-025")  # shown first: easy to read
ROUNDS = 5
BAR_WIDTH = 32
PROMPT_LINES = 6


class DemoPrompt(NamedTuple):
    """A prompt: a title, the engine's input, and the text to show."""

    title: str
    prompt: Any
    text: str


def _code_prompts() -> list[DemoPrompt]:
    items = sorted(heldout(), key=lambda item: item.id not in FIRST)
    return [DemoPrompt(f"{i.package}, {i.file}", i.prompt, i.prompt) for i in items]


def _chat_prompts(template: ChatTemplate) -> list[DemoPrompt]:
    prompts = []
    for chat in heldout_chats():
        prompt = {"prompt_token_ids": template.render(chat.messages)[1]}
        prompts.append(DemoPrompt(chat.id, prompt, f"{chat.messages[-1]['content']}\n\n"))
    return prompts


class Demo:
    """Runs the parts of the demo in order, on one loaded engine with a drafter.

    `note` takes a line about the work done, which Ctrl-C reports.
    """

    # A subclass may set both.
    rounds: int = ROUNDS  # number of timed runs of each kind of decoding
    audit: type[EngineAudit] = EngineAudit

    def __init__(self, llm: LLM, console: Console, note: Callable[[str], None]) -> None:
        self.llm, self.console, self.note = llm, console, note
        has_template = getattr(llm.tokenizer, "chat_template", None) is not None
        self.is_chat = has_template and llm.config.model not in BUILT_IN
        self.items = _chat_prompts(ChatTemplate(llm.tokenizer)) if self.is_chat else _code_prompts()

    def run(self, prompts: int, max_tokens: int, samples: int) -> None:
        check_int("prompts", prompts, 1, len(self.items))
        items = self.items[:prompts]
        self.introduce()
        metrics = RequestMetrics()
        for number, item in enumerate(items):
            self.note(f"{number} of {len(items)} prompts were completed.")
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            metrics.add(self.complete(number, len(items), item, temperature, max_tokens).metrics)
        self.note("the prompts were completed; speed was not measured.")
        self.show_acceptance(metrics)
        self.show_speed(items, max_tokens)
        self.note("prompts and speed are shown; the losslessness check was not finished.")
        self.check_losslessness(samples)

    def introduce(self) -> None:
        """Print what the demo does, and what the styles of tokens mean."""
        config, speculation = self.llm.config, self.llm.config.speculative_config
        drafts = speculation.num_drafts if speculation else 0
        task = "answers questions by" if self.is_chat else "completes Python files by"
        method = speculation.method if speculation else None
        drafter = _DRAFTERS.get(str(method), f"The drafter `{method}`")
        self.console.print(
            f"Foretoken {task} {config.model}. {drafter} proposes up to {drafts} tokens, the "
            "target checks them in one pass, and the text is distributed exactly as it would be "
            "without drafts."
        )
        for origin, meaning in MEANING.items():
            line = Text("  ").append(origin, STYLES[origin]).append(" " * (11 - len(origin)))
            self.console.print(line.append(meaning))

    def complete(
        self, number: int, count: int, item: DemoPrompt, temperature: float, max_tokens: int
    ) -> RequestOutput:
        """Stream one completion, each token in the style of the token's origin."""
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
            raise RuntimeError("the engine's stream gave no output")
        self.console.print()
        counts = Counter(output.outputs[0].origins)
        numbers = ", ".join(f"{counts[origin]} {origin}" for origin in STYLES if counts[origin])
        passes = output.metrics.num_steps
        self._write(f"{done} tokens in {passes} passes of the target: {numbers}\n", "dim")
        return output

    def show_acceptance(self, metrics: RequestMetrics) -> None:
        """Print a bar for each draft position: the share of accepted drafts."""
        self._title("Acceptance by position of the draft")
        full, empty = ("█", "░") if "utf" in self.console.encoding.lower() else ("#", ".")
        counts = zip(metrics.accepted_per_position, metrics.drafted_per_position, strict=True)
        for position, (accepted, drafted) in enumerate(counts, start=1):
            share = accepted / drafted
            filled = round(share * BAR_WIDTH)
            bar = Text(f"  {position}  ").append(full * filled, "green")
            bar.append(empty * (BAR_WIDTH - filled), "dim")
            self.console.print(bar.append(f"  {share:5.1%}  {accepted} of {drafted}"))
        self._say(
            f"A draft is accepted only if all drafts before it are. Mean acceptance length "
            f"(accepted + 1 per pass): {metrics.mean_acceptance_length:.2f}"
        )

    def show_speed(self, items: list[DemoPrompt], max_tokens: int) -> None:
        """Show median speeds of plain and speculative decoding of the same prompts."""
        self._title("Speed, batch 1, plain and speculative in turn")
        ratios = []
        for temperature in TEMPERATURES:
            speculative = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=0
            )
            plain = replace(speculative, num_speculative_tokens=0)
            plain_speeds, speculative_speeds = list[float](), list[float]()
            with self._progress("measuring", self.rounds) as advance:
                for done in range(self.rounds):
                    advance(done)
                    plain_speeds.append(self._speed(items, plain))
                    speculative_speeds.append(self._speed(items, speculative))
            medians = statistics.median(plain_speeds), statistics.median(speculative_speeds)
            ratios.append(medians[1] / medians[0])
            self.console.print(
                f"  temperature {temperature:<4g} plain {_median_and_range(plain_speeds)}"
                f"   speculative {_median_and_range(speculative_speeds)}   {ratios[-1]:.2f}x"
            )
        self._say(f"Tokens per second: median (least to most) of {self.rounds} runs.")
        if min(ratios) < 1.0:
            self._say(
                "Speculation is slower than plain decoding here: at this acceptance, drafting "
                "and checking cost more than the passes they save."
            )

    def _speed(self, items: list[DemoPrompt], params: SamplingParams) -> float:
        """Tokens per second over all prompts, one after another."""
        start = time.perf_counter()
        outputs = [self.llm.generate(item.prompt, params)[0].outputs[0] for item in items]
        return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - start)

    def check_losslessness(self, draws: int) -> None:
        """Audit tokens at T=0, and the ranks of tokens at T=1."""
        self._title("Is it lossless?")
        reference = reference_of(self.llm)
        engine = self.audit(self.llm, SamplingParams(temperature=1.0), reference)
        self._say(engine.greedy()[1])
        subject = engine.subject(self.llm.config.model)._replace(exact=None)
        with self._progress("drawing", draws) as advance:
            finding = audit(subject, draws, advance)
        self._say(f"Temperature 1, ranks of tokens in the target's distribution: {finding.verdict}")
        self._say("More: `foretoken audit`.")

    def _title(self, text: str) -> None:
        self.console.print()
        self.console.print(text, style="bold", markup=False)

    def _say(self, text: str) -> None:
        width = max(self.console.width - 2, 20)
        self._write(indent(fill(text, width, break_on_hyphens=False), "  ") + "\n", "")

    def _write(self, text: str, style: str) -> None:
        self.console.print(Text(text, style), end="", soft_wrap=True)

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar on a terminal; yields a function that takes the amount of work done."""
        columns = (TextColumn("  {task.description}"), BarColumn(), TimeRemainingColumn())
        shown = self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)


def _median_and_range(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
