"""`foretoken generate`: streaming, JSON, and one clear message for each error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli import app as cli
from foretoken.cli.actions import Actions
from foretoken.cli.output import complete
from foretoken.config import EngineConfig
from foretoken.errors import (
    CheckpointError,
    EngineMemoryError,
    ForetokenError,
    IntegrityError,
    NonFiniteLogitsError,
    ProcessingError,
    StepError,
)
from foretoken.outputs import RequestOutput
from foretoken.sampling.params import SamplingParams
from tests.cli.fake_llm import FakeLLM, WithLLM


def invoke(llm: FakeLLM, *args: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(cli.app, ["generate", *args], obj=WithLLM(llm), **kwargs)


def loaded(*args: str) -> dict[str, Any]:
    actions = WithLLM(FakeLLM())
    CliRunner().invoke(cli.app, ["generate", "x", *args], obj=actions)
    return actions.loaded


def test_text_goes_to_standard_output_alone() -> None:
    result = invoke(FakeLLM(), "def f():")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "a + b\n\n", "")


def test_json() -> None:
    result = invoke(FakeLLM(), "def f():", "--json")
    data = json.loads(result.stdout)
    (sample,) = data["outputs"]
    assert sample["token_ids"] == [0, 1, 2, 3]
    assert (sample["text"], sample["finish_reason"], sample["seed"]) == ("a + b\n", "length", 7)
    assert data["metrics"]["mean_acceptance_length"] == 2.0
    assert data["metrics"]["accepted_per_position"] == [1, 0]
    assert not data["synthetic_acceptance"]
    assert not data["metrics"]["synthetic_acceptance"]


def test_synthetic_output_is_labelled() -> None:
    llm = FakeLLM(synthetic=True)
    shown = invoke(llm, "def f():")
    assert (shown.exit_code, shown.stdout) == (0, "a + b\n\n")
    assert "meaningless by design" in shown.stderr
    result = invoke(llm, "def f():", "--json")
    data = json.loads(result.stdout)
    assert data["synthetic_acceptance"]
    assert data["metrics"]["synthetic_acceptance"]
    assert data["metrics"]["num_synthetic_drafts"] == 1


def test_prompt_from_standard_input() -> None:
    llm = FakeLLM()
    invoke(llm, "-", input="def g():\n")
    assert llm.calls[0][0] == "def g():\n"


def test_options_reach_the_request() -> None:
    llm = FakeLLM()
    invoke(
        llm, "x", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "20",
        "--min-p", "0.1", "--max-tokens", "9", "--min-tokens", "2", "--seed", "3", "--stop", "ä",
        "--stop", "b", "--stop-token-ids", "7", "--stop-token-ids", "8", "--ignore-eos", "--n", "2",
        "--presence-penalty", "0.1", "--frequency-penalty", "0.2", "--repetition-penalty", "1.5",
        "--logit-bias", '{"4": -1.5}', "--bad-words", "c", "--allowed-token-ids", "4", "--json",
        "--logprobs", "1", "--prompt-logprobs", "0", "--include-stop-str-in-output",
        "--prediction", "pä",
    )  # fmt: skip
    assert llm.calls[0][1] == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, max_tokens=9, min_tokens=2, seed=3,
        stop=["ä", "b"], stop_token_ids=[7, 8], ignore_eos=True, n=2, presence_penalty=0.1,
        frequency_penalty=0.2, repetition_penalty=1.5, logit_bias={4: -1.5}, bad_words=["c"],
        allowed_token_ids=[4], logprobs=1, prompt_logprobs=0, include_stop_str_in_output=True,
        prediction="pä",
    )  # fmt: skip


def test_without_options_a_request_has_the_defaults() -> None:
    llm = FakeLLM()
    invoke(llm, "x")
    assert llm.calls[0][1] == SamplingParams(max_tokens=128, temperature=0.8)


def test_options_reach_the_engine() -> None:
    assert loaded()["speculative_config"] == {"method": "draft_model"}
    for args, fields in [
        (["--model", "elsewhere", "--max-num-seqs", "2"],
         {"speculative_config": None, "max_num_seqs": 2}),
        (["--max-num-batched-tokens", "512", "--kv-cache-gib", "0.25"],
         {"max_num_batched_tokens": 512, "kv_cache_gib": 0.25}),
        (["--no-speculation", "--use-fp64-gumbel"],
         {"speculative_config": None, "use_fp64_gumbel": True}),
        (["--speculative-config", '{"method": "ngram"}'],
         {"speculative_config": '{"method": "ngram"}'}),
        (["--suffix-corpus", "y"],
         {"speculative_config": {"method": "suffix", "suffix_corpus": "y"}}),
    ]:  # fmt: skip
        assert loaded(*args).items() >= fields.items()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--temperature", "-1"], "`temperature` is -1.0: must be a"),
        (["--top-p", "0"], "`top_p`"),
        (["--max-tokens", "0"], "`max_tokens` is 0: must be an integer >= 1."),
        (["--no-speculation", "--speculative-config", "{}"], "`speculative-config`"),
        (["--no-speculation", "--suffix-corpus", "x"], "`suffix-corpus` is 'x': must be left out"),
        (["--logit-bias", "[1]"], "`logit_bias` is '[1]': must be a JSON object of token ids"),
        (["--logit-bias", '{"a": 1}'], "`logit_bias`"),
        (["--logit-bias", '{"1": 500}'], "`logit_bias[1]` is 500: must be in [-100, 100]."),
        (["--logprobs", "2"], "`logprobs` is 2: must be left out without --json."),
        (["--prediction", "\udcff"], "`prediction` is b'\\xff': must be UTF-8 text."),
        (["--stop", "def \udcff():"], "`stop` is b'def \\xff():': must be UTF-8 text."),
    ],
)
def test_bad_values_are_one_message(args: list[str], said: str) -> None:
    result = invoke(FakeLLM(), "x", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {said}")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_typed_error_from_loading() -> None:
    class Fails(Actions):
        def load(self, *args: Any, **options: Any) -> Any:
            raise CheckpointError("no such folder: [nowhere]")

    result = CliRunner().invoke(cli.app, ["generate", "x", "--model", "nowhere"], obj=Fails())
    assert (result.exit_code, result.stderr) == (2, "Error: no such folder: [nowhere]\n")


def test_what_the_command_does_not_say_is_the_engines_default() -> None:
    assert EngineConfig(**loaded("--no-speculation")) == EngineConfig("tiny-python")


class EndingLLM(FakeLLM):
    """Ends after its pieces, by an error or for another reason than `length`."""

    def __init__(self, error: ForetokenError | None = None, **fields: Any) -> None:
        super().__init__()
        self.ended, self.fields = error, fields

    def stream(self, prompt: str, params: Any, **options: Any) -> Iterator[RequestOutput]:
        *before, last = super().stream(prompt, params, **options)
        yield from before
        yield replace(last, outputs=[replace(last.outputs[0], **self.fields)], error=self.ended)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("as_json", [True, False])
def test_an_interrupted_stream_is_printed_first(name: str, code: int, as_json: bool) -> None:
    llm = EndingLLM(finish_reason="interrupted", stop_reason=name)
    result = invoke(llm, "x", *(["--json"] if as_json else []))
    assert result.exit_code == code
    text = json.loads(result.stdout)["outputs"][0]["text"] if as_json else result.stdout[:-1]
    assert text == "a + b\n"
    assert "Interrupted: 4 tokens were generated in" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(StepError("wires"), 1), (ProcessingError("one"), 1), (EngineMemoryError("too much"), 2)],
)
def test_a_request_that_failed_is_printed_first(error: ForetokenError, code: int) -> None:
    result = invoke(EndingLLM(error, finish_reason="error"), "x")
    assert (result.exit_code, result.stdout) == (code, "a + b\n\n")
    assert str(error) in result.stderr
    assert ("bug in Foretoken" in result.stderr) == (code == 1)


def test_ctrl_c_says_what_was_done() -> None:
    result = invoke(FakeLLM(2, KeyboardInterrupt()), "x")
    assert result.exit_code == 130
    assert result.stdout == "a +"
    assert "Interrupted: 2 tokens were generated in" in result.stderr


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), IntegrityError("two owners")])
def test_unknown_errors_hide_the_traceback_and_are_called_bugs(error: Exception) -> None:
    result = invoke(FakeLLM(1, error), "x")
    assert result.exit_code == 1
    assert f"Unexpected {type(error).__name__}: {error}" in result.stderr
    assert "This is a bug in Foretoken; --debug" in result.stderr


def test_debug_shows_the_traceback() -> None:
    error = NonFiniteLogitsError("row 3")
    result = invoke(FakeLLM(1, error), "x", "--debug")
    assert result.exception is error


@pytest.mark.parametrize(("prompt", "given"), [("-", b"def \xff():"), ("def \udcff():", None)])
def test_a_prompt_that_is_no_text(prompt: str, given: bytes | None) -> None:
    llm = FakeLLM()
    result = invoke(llm, prompt, input=given)
    assert (result.exit_code, llm.calls) == (2, [])
    assert result.stderr == "Error: `prompt` is b'def \\xff():': must be UTF-8 text.\n"


class SlowLLM(FakeLLM):
    """Begins when timers without a delay have run."""

    def stream(self, prompt: str, params: Any, **options: Any) -> Iterator[RequestOutput]:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and not thread.interval:
                thread.join()
        yield from super().stream(prompt, params, **options)


@pytest.mark.parametrize(
    ("terminal", "patience", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_json_shows_a_sign_of_life_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    patience: float,
    shown: bool,
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    llm, params = SlowLLM(), SamplingParams(max_tokens=128)
    complete(llm, "x", params, json_output=True, note=str, patience=patience)  # type: ignore[arg-type]
    said = capsys.readouterr()
    assert json.loads(said.out)["outputs"][0]["text"] == "a + b\n"
    assert ("of at most 128 tokens" in said.err) == shown
    assert shown or said.err == ""
