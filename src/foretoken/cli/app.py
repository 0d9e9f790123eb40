"""The commands. Heavy libraries load inside them, so that help is instant.

Charter: options only; what a command does lives in `llm.py`, `serve/` and `lab/`, what it prints in
`output.py`, what is said when it cannot in `terminal.py`.
"""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import __version__
from foretoken.cli.chat import Conversation, find_template, read_messages, read_template
from foretoken.cli.options import fields_given, with_fields
from foretoken.cli.output import check_shown, complete, exit_code
from foretoken.cli.terminal import (
    as_typed,
    as_utf8,
    console,
    exit_on_sigterm,
    read_input,
    reporting,
    say,
)
from foretoken.config import EngineConfig, check_int
from foretoken.errors import ConfigError
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.train_eagle3.options import TrainOptions
from foretoken.sampling.params import SamplingParams
from foretoken.serve.options import ServeOptions

if TYPE_CHECKING:
    from foretoken.llm import LLM

_EMBEDDED = "tiny-python"
_OWN_DRAFT = {"method": "draft_model"}
# `bench` has its own prompts and seed, and of how long an output is and what ends it the length
# alone.
# Options of the engine that a server has and other commands do not.
OF_SERVERS = {"seed", "max_num_waiting", "generation_config"}
SET_BY_BENCH = {
    *("seed", "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "prediction", "trace"),
}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Speculative = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='How to draft, for example \'{"method": "ngram", "num_speculative_tokens": 4}\'. '
        "Default: tiny-python drafts with its own draft model, other models decode plainly.",
    ),
]
SuffixCorpus = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Draft by suffix, also from this text. In place of --speculative-config "
        '\'{"method": "suffix", "suffix_corpus": FILE}\'.',
    ),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Decode one token per pass.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object when done (see docs/cli.md).")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


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
@with_fields(model=_EMBEDDED, max_tokens=128, temperature=0.8)
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to complete; - reads standard input.")],
    speculative_config: Speculative = None,
    suffix_corpus: SuffixCorpus = None,
    no_speculation: NoSpeculation = False,
    as_json: AsJson = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Complete PROMPT and stream the text to the terminal."""
    with reporting(debug) as note:
        params = SamplingParams(**fields_given(SamplingParams, options))
        check_shown(params, as_json)
        text = read_input("prompt") if prompt == "-" else as_utf8("prompt", prompt)
        llm = _start(options, speculative_config, no_speculation, suffix_corpus)
        raise SystemExit(exit_code(complete(llm, text, params, as_json, note)))


@app.command()
@with_fields(model=_EMBEDDED, max_tokens=512, temperature=0.8)
def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            help="A message; - reads one, or a JSON list of messages, from standard input. "
            "Default: a conversation, one message per line."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message to begin the conversation with.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A Jinja template, or the name of one of the tokenizer's. Default: its own.",
        ),
    ] = None,
    speculative_config: Speculative = None,
    suffix_corpus: SuffixCorpus = None,
    no_speculation: NoSpeculation = False,
    as_json: AsJson = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Talk with a model that has a chat template.

    In a conversation /reset forgets what was said, /exit or Ctrl-D ends it, and Ctrl-C ends an
    answer.
    """
    with reporting(debug) as note:
        params = SamplingParams(**fields_given(SamplingParams, options))
        check_shown(params, as_json)
        messages, given = read_messages(message, system), read_template(chat_template)
        typed = Conversation(messages, params, as_json) if message is None else None
        llm = _start(options, speculative_config, no_speculation, suffix_corpus)
        template = find_template(llm, given)
        if typed:
            typed.run(llm, template, note)
            return
        from foretoken.models.chat import ChatPrompt

        prompt = ChatPrompt(template, messages)
        raise SystemExit(exit_code(complete(llm, prompt, params, as_json, note)))


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(help="Held-out prompts to complete.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 80,
    samples: Annotated[int, typer.Option(help="Completions per side of the sampled check.")] = 1024,
    debug: Debug = False,
) -> None:
    """A guided first minute: drafting, acceptance, speed, losslessness."""
    with reporting(debug) as note:
        for name, value in (("prompts", prompts), ("max-tokens", max_tokens), ("samples", samples)):
            check_int(name, value, 1)
        from foretoken.lab.demo import Demo

        # Timed prompts are repeated: each time must pay for its own prompt.
        llm = _load(_EMBEDDED, _OWN_DRAFT, enable_prefix_caching=False)
        with exit_on_sigterm():
            Demo(llm, console(highlight=False), note).run(prompts, max_tokens, samples)


@app.command()
@with_fields(
    BenchOptions,
    without=SET_BY_BENCH,
    model=_EMBEDDED,
    temperature=0.0,
    max_num_seqs=None,
    max_num_batched_tokens=None,
    kv_cache_gib=None,
    enable_prefix_caching=False,
)
def bench(
    speculative_config: Speculative = None,
    suffix_corpus: SuffixCorpus = None,
    no_speculation: NoSpeculation = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Measure latency and throughput of whole batches, and where the time goes.

    With --compare it measures plain decoding in turns with the speculative: does it pay here?
    """
    with reporting(debug) as note:
        asked = BenchOptions(**fields_given(BenchOptions, options))
        params = SamplingParams(**fields_given(SamplingParams, options))
        given = (speculative_config, no_speculation, suffix_corpus)
        engine = asked.sized(_engine_options(options, *given))
        note("nothing was measured.")
        start = time.perf_counter()
        llm = _load(**engine)
        loading = f"Loading took {time.perf_counter() - start:.1f} s."
        from foretoken.lab.bench.command import Command

        tables, errors = console(highlight=False), console(stderr=True, highlight=False)
        command = Command(as_typed(), tables, errors, note)
        with exit_on_sigterm():
            command.run(llm, asked, params, [loading])


@app.command()
@with_fields(ServeOptions, sampling=False, also=OF_SERVERS, model=None)
def serve(
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")
    ] = None,
    speculative_config: Speculative = None,
    suffix_corpus: SuffixCorpus = None,
    no_speculation: NoSpeculation = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Serve a model by OpenAI's API (see docs/server.md). Without MODEL: tiny-python."""
    with reporting(debug) as note:
        asked = ServeOptions(**fields_given(ServeOptions, options))
        given = [name for name in (model_name, options["model"]) if name is not None]
        if len(given) > 1:
            raise ConfigError("model", given[1], "left out beside MODEL", "Give one of the two.")
        options["model"] = given[0] if given else _EMBEDDED
        ways = (speculative_config, no_speculation, suffix_corpus)
        engine = _engine_options(options, *ways, also=OF_SERVERS)
        template = read_template(asked.chat_template)
        note("nothing was served.")
        from foretoken.serve.command import start

        start(engine, replace(asked, chat_template=template), say)


@app.command("train-eagle3")
@with_fields(TrainOptions, engine=False)
def train_eagle3(debug: Debug = False, **options: Any) -> None:
    """Train an EAGLE-3 head for a model, on texts that the model writes itself.

    Ctrl-C keeps the head as it is by then, and a checkpoint from which --resume goes on.
    """
    with reporting(debug) as note:
        asked = TrainOptions(**fields_given(TrainOptions, options))
        note("nothing was trained.")
        from foretoken.lab.train_eagle3.command import Training

        shown = console(stderr=True, highlight=False, soft_wrap=True)
        Training(asked, lambda line: shown.print(line, markup=False), note).run()


def _start(options: dict[str, Any], given: str | None, off: bool, corpus: str | None) -> LLM:
    return _load(**_engine_options(options, given, off, corpus))


def _engine_options(
    options: dict[str, Any],
    given: str | None,
    off: bool,
    corpus: str | None,
    also: Set[str] = frozenset(),
) -> dict[str, Any]:
    engine = fields_given(EngineConfig, options, also)
    ways = {"no-speculation": off or None, "suffix-corpus": corpus, "speculative-config": given}
    asked = [name for name, value in ways.items() if value is not None]
    if len(asked) > 1:
        bound = f"left out with --{asked[0]}"
        raise ConfigError(asked[-1], ways[asked[-1]], bound, "Give one of the two.")
    if corpus is not None:
        return {**engine, "speculative_config": {"method": "suffix", "suffix_corpus": corpus}}
    own_draft = None if off or engine["model"] != _EMBEDDED else _OWN_DRAFT
    return {**engine, "speculative_config": own_draft if given is None else given}


def _load(model: str, speculative_config: Any, **options: Any) -> LLM:
    """Import the engine and load the models, with a sign of life on a terminal."""
    with console(stderr=True).status(f"Loading {model}"):
        from foretoken.llm import LLM

        return LLM(model, speculative_config, **options)
