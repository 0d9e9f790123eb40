"""The commands and their options. Heavy libraries load inside the commands: help is instant."""

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
from foretoken.cli.output import complete, exit_code, refuse_hidden_logprobs
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
    from foretoken.lab.reporter import Reporter

_EMBEDDED = "tiny-python"
# Models with a drafter of their own: the default of `speculative_config`.
_OWN_DRAFTERS: dict[str, dict[str, Any]] = {
    _EMBEDDED: {"method": "draft_model"},
    "smollm2-135m": {"method": "eagle3", "num_speculative_tokens": "auto"},
}
_DRAFTER_OF_ANY_MODEL = {"method": "ngram", "num_speculative_tokens": 4}
SERVER_OPTIONS = {"seed", "max_num_waiting", "generation_config"}  # fields of `EngineConfig`
# `bench` has its own prompts and seed, and only the length ends its outputs.
SET_BY_BENCH = {
    *("seed", "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "prediction", "trace"),
}
# None: sizes that fit the load. With cached prefixes, repeated runs would not be comparable.
BENCH_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "kv_cache_gib")),
    "enable_prefix_caching": False,
}
# For each audit without an engine: the options of engines and requests that the audit reads.
READ_BY_AUDIT: dict[tuple[str, ...], Set[str]] = {
    **dict.fromkeys([("callable",), ("gallery",)], frozenset[str]()),
    ("operators",): {"backend", "device"},
    ("server",): {"model", "revision", "local_files_only", "temperature"},
}
SET_BY_PLAN = SET_BY_BENCH | {"enable_prefix_caching"}
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


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"foretoken {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version."),
]


@app.callback()
def root(version: Version = False) -> None:
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
        refuse_hidden_logprobs(params, as_json)
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
            help="A Jinja template, or the name of one of the tokenizer's templates. Default: the "
            "tokenizer's own.",
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
        refuse_hidden_logprobs(params, as_json)
        messages = read_messages(message, system)
        template_source = read_template(chat_template)
        conversation = Conversation(messages, params, as_json) if message is None else None
        llm = ctx.ensure_object(Actions).load(**_engine_options(options))
        template = find_template(llm, template_source)
        if conversation:
            conversation.run(llm, template, note)
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
        actions = ctx.ensure_object(Actions)
        drafter = speculative_config or _OWN_DRAFTERS.get(model, _DRAFTER_OF_ANY_MODEL)
        # Timed prompts are repeated, and each run must compute the prompt again.
        llm = actions.load(model, drafter, enable_prefix_caching=False)
        with exit_on_sigterm():
            actions.demo(llm, note).run(prompts, max_tokens, samples)


@app.command()
@with_fields(BenchOptions, without=SET_BY_BENCH, model=_EMBEDDED, temperature=0.0, **BENCH_DEFAULTS)
def bench(ctx: typer.Context, debug: Debug = False, **options: Any) -> None:
    """Measure latency and throughput under load, and where the time goes.

    Measures an engine in this process, or a server. Runs with and without speculation alternate, to
    show whether speculation pays.
    """
    with reporting(debug) as note:
        bench_options = BenchOptions(**fields_given(BenchOptions, options))
        params = SamplingParams(**fields_given(SamplingParams, options))
        engine = _engine_options(options)
        if bench_options.url is None:
            engine = bench_options.sized(engine)
        else:
            defaults = {f.name: f.default for f in fields(EngineConfig)} | BENCH_DEFAULTS
            defaults |= {"model": _EMBEDDED, "speculative_config": _OWN_DRAFTERS[_EMBEDDED]}
            for name, value in engine.items():
                if value != defaults[name]:
                    raise ConfigError(name, value, "left out with --url: the server has its own")
        note("nothing was measured.")
        with _reporter(note, secret=bench_options.api_key) as reporter:
            ctx.ensure_object(Actions).bench(reporter, bench_options, params, engine)


@app.command()
@with_fields(AuditOptions, without={*SET_BY_AUDIT, "no_speculation"}, model=None, backend=None)
def audit(
    ctx: typer.Context, as_json: AsJson = False, debug: Debug = False, **options: Any
) -> None:
    """Is it lossless? Refute a verifier and name its bug, or state which deviations are ruled out.

    Without options: the operators of this machine's backend, then tiny-python with its draft model.
    --backend without --model audits only the operators, --model only an engine. Exits with 1 if
    anything is refuted.
    """
    with reporting(debug) as note:
        audit_options = AuditOptions(**fields_given(AuditOptions, options))
        params = SamplingParams(**fields_given(SamplingParams, options))
        parts = audit_options.parts(options["model"], options["backend"])
        # `--seed` fills the field of `AuditOptions`, not the field of `SamplingParams`.
        used = READ_BY_AUDIT.get(parts, options.keys()) | {"seed"}
        _refuse_unused(options, used, f"left out: the audit of the {parts[0]} does not use it")
        given_options = {name: value for name, value in options.items() if value is not None}
        engine = _engine_options({"model": _EMBEDDED, **given_options})
        note("nothing was audited.")
        with _reporter(note, as_json, audit_options.api_key) as reporter:
            actions = ctx.ensure_object(Actions)
            raise SystemExit(actions.audit(reporter, parts, audit_options, engine, params))


@app.command()
@with_fields(PlanOptions, without=SET_BY_PLAN, model=None, temperature=0.0, max_num_seqs=None)
def plan(
    ctx: typer.Context,
    model_name: Model = None,
    as_json: AsJson = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Predict the speed that drafts would give, by K and load, and the acceptance that they need.

    Times a few steps of the engine, then simulates the scheduler with these times. Without MODEL:
    tiny-python.
    """
    with reporting(debug) as note:
        plan_options = PlanOptions(**fields_given(PlanOptions, options))
        if plan_options.fleet is not None:
            given_options = options | {"model": _model_of(model_name, options["model"], False)}
            used = {f.name for f in fields(SamplingParams)}
            _refuse_unused(given_options, used, "left out with --fleet: the file has it")
        options["model"] = _model_of(model_name, options["model"], plan_options.stored is None)
        params = SamplingParams(**fields_given(SamplingParams, options))
        engine = fields_given(EngineConfig, options)
        if plan_options.fleet is None and plan_options.stored is None:
            engine = _engine_options(options)
        elif plan_options.fleet is None:
            given_speculation = filter(None, map(options.get, SPECULATION))
            engine["speculative_config"] = next(given_speculation, None)
        note("nothing was predicted.")
        with _reporter(note, as_json) as reporter:
            ctx.ensure_object(Actions).plan(reporter, engine, plan_options, params)


@app.command(cls=ServeCommand)
@with_fields(ServeOptions, ReplicaOptions, sampling=False, also=SERVER_OPTIONS, model=None)
def serve(
    ctx: typer.Context,
    model_name: Model = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Ray cluster on which replicas run, or auto for the one of this machine. "
            "Default: a new cluster on this machine, for this command only.",
        ),
    ] = None,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Serve a model by OpenAI's API (see docs/server.md). Without MODEL: tiny-python."""
    with reporting(debug) as note:
        vllm_options, without_effect = foreign_options(ctx)
        if not options["api_key"]:
            key = from_environment("FORETOKEN_API_KEY")
            options["api_key"] = None if key is None else [key]
        server_options = ServeOptions(**fields_given(ServeOptions, options))
        options["model"] = _model_of(model_name, options["model"])
        engine = _engine_options(options, SERVER_OPTIONS) | vllm_options
        template = read_template(server_options.chat_template)
        server_options = replace(server_options, chat_template=template)
        scale = ReplicaOptions(**fields_given(ReplicaOptions, options))
        if scale.replicas is None and ray_address is not None:
            raise ConfigError("ray_address", ray_address, "given with `replicas`")
        note("nothing was served.")
        if without_effect:
            say(f"Without effect here: {', '.join(without_effect)}.")
        actions = ctx.ensure_object(Actions)
        if scale.replicas is None:
            actions.serve(engine, server_options, say)
        else:
            actions.serve_replicas(engine, scale, server_options, ray_address, say)


@app.command("train-eagle3")
@with_fields(TrainOptions, engine=False)
def train_eagle3(ctx: typer.Context, debug: Debug = False, **options: Any) -> None:
    """Train an EAGLE-3 head for a model, on texts that the model writes itself.

    Ctrl-C keeps the head as trained so far, and a checkpoint from which --resume continues.
    """
    with reporting(debug) as note:
        train_options = TrainOptions(**fields_given(TrainOptions, options))
        note("nothing was trained.")
        error_console = console(stderr=True, highlight=False, soft_wrap=True)
        actions = ctx.ensure_object(Actions)
        actions.train(train_options, lambda line: error_console.print(line, markup=False), note)


@contextmanager
def _reporter(note: Note, as_json: bool = False, secret: str | None = None) -> Iterator[Reporter]:
    """The output of a lab command. Output works even after SIGTERM, which raises `SystemExit`.

    secret: an API key, which the quoted command line shows as `KEY`
    """
    from foretoken.lab.reporter import Reporter

    command_line = as_typed() if secret is None else as_typed().replace(secret, "KEY")
    tables, errors = console(highlight=False), console(stderr=True, highlight=False)
    with exit_on_sigterm():
        yield Reporter(command_line, tables, errors, note, as_json)


def _refuse_unused(options: dict[str, Any], used: Set[str], bound: str) -> None:
    """Raise `ConfigError` with this bound for an option of engine or request outside of `used`."""
    defaults = {f.name: f.default for cls in (EngineConfig, SamplingParams) for f in fields(cls)}
    for name, default_value in (defaults | {"suffix_corpus": None}).items():
        value = options.get(name)
        if name not in used and value not in (None, default_value, [], ()):
            raise ConfigError(name, value, bound)


def _model_of(argument: str | None, option: str | None, embedded: bool = True) -> str | None:
    """The model from MODEL or --model, not both; else the embedded model, or None."""
    if argument is not None and option is not None:
        raise ConfigError("model", option, "left out beside MODEL", "Give one of the two.")
    return argument or option or (_EMBEDDED if embedded else None)


def _engine_options(options: dict[str, Any], also: Set[str] = frozenset()) -> dict[str, Any]:
    """The engine's options. At most one option of `SPECULATION` may be given, else `ConfigError`;
    without any, `speculative_config` is the model's own drafter, if any. also: see `with_fields`.
    """
    engine = fields_given(EngineConfig, options, also)
    config, corpus = options.get("speculative_config"), options.get("suffix_corpus")
    is_off = options.get("no_speculation") or None
    values = {"no-speculation": is_off, "suffix-corpus": corpus, "speculative-config": config}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        bound = f"left out with --{given[0]}"
        raise ConfigError(given[-1], values[given[-1]], bound, "Give one of the two.")
    if corpus is not None:
        config = {"method": "suffix", "suffix_corpus": corpus}
    elif config is None and not is_off:
        config = _OWN_DRAFTERS.get(engine["model"])
    return {**engine, "speculative_config": config}
