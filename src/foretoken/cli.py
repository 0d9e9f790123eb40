"""The `foretoken` command. Heavy libraries load inside the commands, so that help is instant.

Charter: options and messages only; what a command does lives in `llm.py` and `lab/`. Errors become
one line on the error stream and an exit code: 2 for what the user can mend, 1 for our bugs, 130
after Ctrl-C, 143 after SIGTERM; what was generated until then is printed first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import __version__
from foretoken.config import check_int
from foretoken.errors import (
    ConfigError,
    ForetokenError,
    IntegrityError,
    ProcessingError,
    RequestError,
    StepError,
)
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.outputs import RequestOutput

Note = Callable[[str], None]
_EMBEDDED = "tiny-python"
_BUGS = (IntegrityError, ProcessingError, StepError)
_SYNTHETIC = "Synthetic acceptance: this text is meaningless by design."
_PATIENCE = 2.0  # seconds until what prints nothing shows that it is alive

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option(help="tiny-python, a checkpoint folder, or a hub id.")]
Speculative = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='How to draft, for example \'{"method": "ngram", "num_speculative_tokens": 4}\'. '
        "Default: tiny-python drafts with its own draft model, other models decode plainly.",
    ),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Decode one token per pass.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="In (0, 1]; 1 is off.")]
TopK = Annotated[int, typer.Option(help="0 is off.")]
MinP = Annotated[float, typer.Option(help="In [0, 1]; 0 is off.")]
Seed = Annotated[
    int | None, typer.Option(help="Fixes the noise. Default: the engine's, equal in every run.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="A text that ends the output; may be repeated.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")]
Device = Annotated[str, typer.Option(help="auto or cpu.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt + output. Default: the checkpoint's limit.")
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests running at once.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Most tokens in one pass; longer prompts take several.")
]
KvCacheGib = Annotated[float, typer.Option(help="Memory of the cache, in GiB.")]
LoadFormat = Annotated[
    str, typer.Option(help="auto reads safetensors; dummy makes random weights from config.json.")
]
Backend = Annotated[
    str, typer.Option(help="auto, native_cpu, torch_cpu, triton, or reference (the fp64 oracle).")
]
Threads = Annotated[
    int | None, typer.Option(help="Threads to compute with. Default: one per physical core.")
]
Fp64 = Annotated[bool, typer.Option("--use-fp64-gumbel", help="Draw all noise in FP64.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def main() -> None:
    """Entry point of the `foretoken` script; Ctrl-C before a command runs is quiet, too."""
    try:
        app()
    except KeyboardInterrupt:
        _say("Interrupted: nothing was started.", interrupted=True)
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretoken {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="And exit.")
    ] = False,
) -> None:
    """Exactly lossless speculative decoding for language models."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to complete; - reads standard input.")],
    model: Model = _EMBEDDED,
    speculative_config: Speculative = None,
    no_speculation: NoSpeculation = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    as_json: AsJson = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    kv_cache_gib: KvCacheGib = 0.5,
    load_format: LoadFormat = "auto",
    backend: Backend = "auto",
    threads: Threads = None,
    use_fp64_gumbel: Fp64 = False,
    debug: Debug = False,
) -> None:
    """Complete PROMPT and stream the text to the terminal."""
    with _reporting(debug) as note:
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
        )
        text = _read_prompt(prompt)
        llm = _load(
            model,
            _speculation(model, speculative_config, no_speculation),
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_gib=kv_cache_gib,
            load_format=load_format,
            backend=backend,
            threads=threads,
            use_fp64_gumbel=use_fp64_gumbel,
        )
        _complete(llm, text, params, as_json, note)


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(help="Held-out prompts to complete.")] = 4,
    max_tokens: MaxTokens = 80,
    samples: Annotated[int, typer.Option(help="Completions per side of the sampled check.")] = 1024,
    debug: Debug = False,
) -> None:
    """A guided first minute: drafting, acceptance, speed, losslessness."""
    with _reporting(debug) as note:
        for name, value in (("prompts", prompts), ("max-tokens", max_tokens), ("samples", samples)):
            check_int(name, value, 1)
        from rich.console import Console

        from foretoken.lab.demo import Demo

        # Timed prompts are repeated: each time must pay for its own prompt.
        llm = _load(_EMBEDDED, _speculation(_EMBEDDED, None, False), enable_prefix_caching=False)
        with _exit_on_sigterm():
            Demo(llm, Console(highlight=False), note).run(prompts, max_tokens, samples)


def _read_prompt(given: str) -> str:
    """The prompt itself, or standard input for `-`; bytes that are no text are refused."""
    try:
        if given == "-":
            return typer.get_text_stream("stdin", encoding="utf-8", errors="strict").read()
        given.encode()  # fails where the shell handed over bytes that are not UTF-8
        return given
    except UnicodeDecodeError as error:
        wrong = error.object[max(error.start - 10, 0) : error.end + 10]
        raise RequestError("prompt", wrong, "UTF-8 text") from None
    except UnicodeEncodeError:
        raise RequestError("prompt", os.fsencode(given), "UTF-8 text") from None


def _speculation(model: str, given: str | None, off: bool) -> str | dict[str, Any] | None:
    if off and given is not None:
        raise ConfigError(
            "speculative-config", given, "left out with --no-speculation", "Give one of the two."
        )
    if off or (given is None and model != _EMBEDDED):
        return None
    return {"method": "draft_model"} if given is None else given


def _load(model: str, speculative_config: Any, **options: Any) -> LLM:
    """Import the engine and load the models, with a sign of life on a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"Loading {model}"):
        from foretoken.llm import LLM

        return LLM(model, speculative_config, **options)


def _complete(llm: LLM, text: str, params: SamplingParams, as_json: bool, note: Note) -> None:
    start, shown, output = time.perf_counter(), 0, None
    done = "no token was generated."
    note(done)
    with _sign_of_life(as_json) as show:
        for output in llm.stream(text, params, on_interrupt="return"):
            sample = output.outputs[0]
            if not as_json:
                sys.stdout.write(sample.text[shown:])
                sys.stdout.flush()
            shown = len(sample.text)
            took = time.perf_counter() - start
            done = f"{len(sample.token_ids)} tokens were generated in {took:.1f} s."
            note(done)
            show(f"{len(sample.token_ids)} of at most {params.max_tokens} tokens")
    if output is None:
        return
    if as_json:
        sys.stdout.write(json.dumps(_as_json(output), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n")
    sys.stdout.flush()
    if output.synthetic_acceptance:
        _say(_SYNTHETIC, style="bold yellow")
    if output.error is not None:
        raise output.error
    if output.interrupted_by is not None:
        _say(f"Interrupted: {done}", interrupted=True)
        raise typer.Exit(128 + signal.Signals[output.interrupted_by])
    if not as_json and sys.stderr.isatty():
        _say(_summary(output), style="dim")


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """End by an exception instead of at once, so that progress bars give the cursor back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _sign_of_life(wanted: bool) -> Iterator[Callable[[str], None]]:
    """A status line for what prints nothing and takes long; on anything but a terminal, nothing.

    Yields a function that sets the line's text.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield lambda text: None
        return
    status = console.status("Generating")
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _as_json(output: RequestOutput) -> dict[str, Any]:
    sample, metrics = output.outputs[0], output.metrics
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": sample.token_ids,
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "seed": sample.seed,
        "origins": sample.origins,
        "synthetic_acceptance": sample.synthetic_acceptance,
        "metrics": asdict(metrics)
        | {
            "synthetic_acceptance": metrics.synthetic_acceptance,
            "mean_acceptance_length": metrics.mean_acceptance_length,
            "acceptance_rate": metrics.acceptance_rate,
        },
        "error": None if output.error is None else str(output.error),
    }


def _summary(output: RequestOutput) -> str:
    sample, metrics = output.outputs[0], output.metrics
    parts = [
        f"{len(sample.token_ids)} tokens ({sample.finish_reason})",
        f"{metrics.num_steps} passes",
        f"{metrics.tokens_per_second:.0f} tokens/s",
    ]
    if metrics.num_drafts:
        label = "set " if metrics.synthetic_acceptance else ""
        parts.append(f"{label}mean acceptance length {metrics.mean_acceptance_length:.2f}")
    return " · ".join(parts)


@contextmanager
def _reporting(debug: bool) -> Iterator[Note]:
    """Turn what goes wrong into one message and an exit code.

    Yields a function that the command tells what it has done so far, for Ctrl-C to report.
    """
    done = ["nothing was generated."]

    def note(text: str) -> None:
        done[0] = text

    try:
        yield note
    except KeyboardInterrupt:
        _say(f"\nInterrupted: {done[0]}", interrupted=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output went away: leave without a complaint at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        if isinstance(error, ForetokenError) and not isinstance(error, _BUGS):
            _say(f"Error: {error}", style="bold red")
            raise typer.Exit(2) from None
        _say(f"Unexpected {type(error).__name__}: {error}", style="bold red")
        _say("This is a bug in Foretoken; --debug shows where it happened.")
        raise typer.Exit(1) from None


def _say(text: str, style: str = "", interrupted: bool = False) -> None:
    """One message on the error stream, coloured where the terminal takes it."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if interrupted:
        console.show_cursor()  # a progress bar may have been hiding it
    console.print(text, style=style, markup=False)
