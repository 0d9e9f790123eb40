"""The commands. Heavy libraries load inside them, so that help is instant.

Charter: options only; what a command does lives in `llm.py`, `serve/` and `lab/`, what it prints in
`output.py`, what is said when it cannot in `terminal.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import __version__
from foretoken.cli.actions import Actions
from foretoken.cli.chat import Conversation, find_template, read_messages, read_template
from foretoken.cli.foreign import ServeCommand, foreign_options
from foretoken.cli.options import SPECULATION, fields_given, with_fields
from foretoken.cli.output import check_shown, complete, exit_code
from foretoken.cli.terminal import (
    Note,
    as_typed,
    as_utf8,
    console,
    exit_on_sigterm,
    read_input,
    reporting,
    say,
)
from foretoken.config import EngineConfig, check_int, from_environment
from foretoken.errors import ConfigError
from foretoken.lab.audit.options import AuditOptions
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.plan.options import PlanOptions
from foretoken.lab.train_eagle3.options import TrainOptions
from foretoken.sampling.params import SamplingParams
from foretoken.serve.fleet.config import ReplicaOptions
from foretoken.serve.options import ServeOptions

if TYPE_CHECKING:
    from foretoken.lab.desk import Desk

_EMBEDDED = "tiny-python"
_OWN_DRAFTS: dict[str, dict[str, Any]] = {
    _EMBEDDED: {"method": "draft_model"},
    "smollm2-135m": {"method": "eagle3", "num_speculative_tokens": "auto"},
}
_ANY_DRAFT = {"method": "ngram", "num_speculative_tokens": 4}
# `bench` has its own prompts and seed, and of how long an output is and what ends it the length
# alone.
# Options of the engine that a server has and other commands do not.
OF_SERVERS = {"seed", "max_num_waiting", "generation_config"}
SET_BY_BENCH = {
    *("seed", "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "prediction", "trace"),
}
# Left open for the load to decide, and what would spoil a comparison.
BENCH_DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("max_num_seqs", "max_num_batched_tokens", "kv_cache_gib")
)
BENCH_DEFAULTS |= {"enable_prefix_caching": False}

# Of the engine's options and the parameters, what has a meaning where no engine is audited.
TAKEN_BY_AUDIT: dict[tuple[str, ...], Set[str]] = {
    **dict.fromkeys([("callable",), ("gallery",)], frozenset[str]()),
    ("operators",): {"backend", "device"},
    ("server",): {"model", "revision", "local_files_only", "temperature"},
}
SET_BY_AUDIT = SET_BY_BENCH | {"logprobs", "prompt_logprobs", "structured_outputs", "bad_words"}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")]
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
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to complete; - reads standard input.")],
    as_json: AsJson = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Complete PROMPT and stream the text to the terminal."""
    with reporting(debug) as note:
        params = SamplingParams(**fields_given(SamplingParams, options))
        check_shown(params, as_json)
        text = read_input("prompt") if prompt == "-" else as_utf8("prompt", prompt)
        llm = ctx.ensure_object(Actions).load(**_engine_options(options))
        raise SystemExit(exit_code(complete(llm, text, params, as_json, note)))


@app.command()
@with_fields(model=_EMBEDDED, max_tokens=512, temperature=0.8)
def chat(
    ctx: typer.Context,
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
        llm = ctx.ensure_object(Actions).load(**_engine_options(options))
        template = find_template(llm, given)
        if typed:
            typed.run(llm, template, note)
            return
        from foretoken.models.chat import ChatPrompt

        prompt = ChatPrompt(template, messages)
        raise SystemExit(exit_code(complete(llm, prompt, params, as_json, note)))


@app.command()
def demo(
    ctx: typer.Context,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to complete.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 80,
    samples: Annotated[int, typer.Option(help="Tokens that the sampled check examines.")] = 4096,
    model: Annotated[
        str, typer.Option(help="As for `generate`; one with a chat template answers questions.")
    ] = _EMBEDDED,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="As for `generate`. Default: a drafter of the model's own, else `ngram`.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """A guided first minute: drafting, acceptance, speed, losslessness."""
    with reporting(debug) as note:
        for name, value in (("prompts", prompts), ("max-tokens", max_tokens), ("samples", samples)):
            check_int(name, value, 1)
        # Timed prompts are repeated: each time must pay for its own prompt.
        drafter = speculative_config or _OWN_DRAFTS.get(model, _ANY_DRAFT)
        actions = ctx.ensure_object(Actions)
        llm = actions.load(model, drafter, enable_prefix_caching=False)
        with exit_on_sigterm():
            actions.demo(llm, note).run(prompts, max_tokens, samples)


@app.command()
@with_fields(BenchOptions, without=SET_BY_BENCH, model=_EMBEDDED, temperature=0.0, **BENCH_DEFAULTS)
def bench(
    ctx: typer.Context,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Measure latency and throughput under load, here or of a server, and where the time goes.

    Plain decoding takes turns with the speculative: does speculation pay here?
    """
    with reporting(debug) as note:
        asked = BenchOptions(**fields_given(BenchOptions, options))
        params = SamplingParams(**fields_given(SamplingParams, options))
        engine = _engine_options(options)
        if asked.url is None:
            engine = asked.sized(engine)
        else:
            unset = {f.name: f.default for f in fields(EngineConfig)} | BENCH_DEFAULTS
            unset |= {"model": _EMBEDDED, "speculative_config": _OWN_DRAFTS[_EMBEDDED]}
            for name, value in engine.items():
                if value != unset[name]:
                    raise ConfigError(name, value, "left out with --url: the server has its own")
        note("nothing was measured.")
        with _desk(note, secret=asked.api_key) as desk:
            ctx.ensure_object(Actions).bench(desk, asked, params, engine)


@app.command()
@with_fields(AuditOptions, without={*SET_BY_AUDIT, "no_speculation"}, model=None, backend=None)
def audit(
    ctx: typer.Context,
    as_json: AsJson = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Is it lossless? Refute a verifier, and name its bug, or say what is excluded.

    Without options: the operators of this machine's backend, then tiny-python with its draft model.
    --backend without --model audits the operators alone, --model an engine alone. Exits with 1 if
    anything is refuted.
    """
    with reporting(debug) as note:
        asked = AuditOptions(**fields_given(AuditOptions, options))
        params = SamplingParams(**fields_given(SamplingParams, options))
        parts = asked.parts(options["model"], options["backend"])
        taken = TAKEN_BY_AUDIT.get(parts, options.keys()) | {"seed"}  # an audit's own
        _refuse_others(options, taken, f"left out: of no use to {parts[0]}")
        given = {"model": _EMBEDDED, **{k: v for k, v in options.items() if v is not None}}
        engine = _engine_options(given)
        note("nothing was audited.")
        with _desk(note, as_json, asked.api_key) as desk:
            audit_parts = ctx.ensure_object(Actions).audit
            raise SystemExit(audit_parts(desk, parts, asked, engine, params))


@app.command()
@with_fields(
    PlanOptions,
    without={*SET_BY_BENCH, "enable_prefix_caching"},
    model=None,
    temperature=0.0,
    max_num_seqs=None,
)
def plan(
    ctx: typer.Context,
    model_name: Model = None,
    as_json: AsJson = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Predict what drafts would buy: speed by K and load, and the acceptance that pays.

    Times a few steps, then lets the scheduler run by their costs. Without MODEL: tiny-python.
    """
    with reporting(debug) as note:
        asked = PlanOptions(**fields_given(PlanOptions, options))
        if asked.fleet is not None:
            given = options | {"model": _one_model(model_name, options["model"], False)}
            parameters = {f.name for f in fields(SamplingParams)}
            _refuse_others(given, parameters, "left out with --fleet: its file says it")
        options["model"] = _one_model(model_name, options["model"], asked.stored is None)
        params = SamplingParams(**fields_given(SamplingParams, options))
        engine = fields_given(EngineConfig, options)
        if asked.fleet is None and asked.stored is None:
            engine = _engine_options(options)
        elif asked.fleet is None:
            drafting = filter(None, map(options.get, SPECULATION))
            engine["speculative_config"] = next(drafting, None)
        note("nothing was predicted.")
        with _desk(note, as_json) as desk:
            ctx.ensure_object(Actions).plan(desk, engine, asked, params)


@app.command(cls=ServeCommand)
@with_fields(ServeOptions, ReplicaOptions, sampling=False, also=OF_SERVERS, model=None)
def serve(
    ctx: typer.Context,
    model_name: Model = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Ray cluster that replicas run on, or auto for the one of this machine. "
            "Default: one of their own, on this machine.",
        ),
    ] = None,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Serve a model by OpenAI's API (see docs/server.md). Without MODEL: tiny-python."""
    with reporting(debug) as note:
        given, inert = foreign_options(ctx)
        if not options["api_key"]:
            key = from_environment("FORETOKEN_API_KEY")
            options["api_key"] = None if key is None else [key]
        asked = ServeOptions(**fields_given(ServeOptions, options))
        options["model"] = _one_model(model_name, options["model"])
        engine = _engine_options(options, OF_SERVERS) | given
        asked = replace(asked, chat_template=read_template(asked.chat_template))
        scale = ReplicaOptions(**fields_given(ReplicaOptions, options))
        if scale.replicas is None and ray_address is not None:
            raise ConfigError("ray_address", ray_address, "given with `replicas`")
        note("nothing was served.")
        if inert:
            say(f"Without effect here: {', '.join(inert)}.")
        actions = ctx.ensure_object(Actions)
        if scale.replicas is None:
            actions.serve(engine, asked, say)
        else:
            actions.serve_replicas(engine, scale, asked, ray_address, say)


@app.command("train-eagle3")
@with_fields(TrainOptions, engine=False)
def train_eagle3(ctx: typer.Context, debug: Debug = False, **options: Any) -> None:
    """Train an EAGLE-3 head for a model, on texts that the model writes itself.

    Ctrl-C keeps the head as it is by then, and a checkpoint from which --resume goes on.
    """
    with reporting(debug) as note:
        asked = TrainOptions(**fields_given(TrainOptions, options))
        note("nothing was trained.")
        shown = console(stderr=True, highlight=False, soft_wrap=True)
        actions = ctx.ensure_object(Actions)
        actions.train(asked, lambda line: shown.print(line, markup=False), note)


@contextmanager
def _desk(note: Note, as_json: bool = False, secret: str | None = None) -> Iterator[Desk]:
    """Where a command of the laboratory reports; SIGTERM lets it report what it has."""
    from foretoken.lab.desk import Desk

    typed = as_typed() if secret is None else as_typed().replace(secret, "KEY")
    tables, errors = console(highlight=False), console(stderr=True, highlight=False)
    with exit_on_sigterm():
        yield Desk(typed, tables, errors, note, as_json)


def _refuse_others(options: dict[str, Any], taken: Set[str], bound: str) -> None:
    """`ConfigError` for an option of an engine or its requests that would be ignored."""
    known = {f.name: f.default for cls in (EngineConfig, SamplingParams) for f in fields(cls)}
    for name, default in (known | {"suffix_corpus": None}).items():
        value = options.get(name)
        if name not in taken and value not in (None, default, [], ()):
            raise ConfigError(name, value, bound)


def _one_model(first: str | None, second: str | None, embedded: bool = True) -> str | None:
    """Of MODEL and --model the one that was given; else the embedded one, or None."""
    if first is not None and second is not None:
        raise ConfigError("model", second, "left out beside MODEL", "Give one of the two.")
    return first or second or (_EMBEDDED if embedded else None)


def _engine_options(options: dict[str, Any], also: Set[str] = frozenset()) -> dict[str, Any]:
    engine = fields_given(EngineConfig, options, also)
    given, corpus = options.get("speculative_config"), options.get("suffix_corpus")
    off = options.get("no_speculation") or None
    ways = {"no-speculation": off, "suffix-corpus": corpus, "speculative-config": given}
    asked = [name for name, value in ways.items() if value is not None]
    if len(asked) > 1:
        bound = f"left out with --{asked[0]}"
        raise ConfigError(asked[-1], ways[asked[-1]], bound, "Give one of the two.")
    if corpus is not None:
        return {**engine, "speculative_config": {"method": "suffix", "suffix_corpus": corpus}}
    own_draft = None if off else _OWN_DRAFTS.get(engine["model"])
    return {**engine, "speculative_config": own_draft if given is None else given}
