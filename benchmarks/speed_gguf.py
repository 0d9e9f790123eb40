"""What `benchmarks.speed` compares where the model is a GGUF file: greedy, with llama.cpp beside.

Both are libraries of this process, on the same file, and get the same token ids. Both quantise
what a product reads, each in its own way, so that their texts part at near-ties: how many are
equal is reported, and too few means that one of them computes another model.
"""

from __future__ import annotations

import argparse
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import llama_library
from benchmarks.speed_cases import Case, Ids, our_case, timed
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout, heldout_chats
from foretoken.models import load_tokenizer
from foretoken.models.chat import ChatTemplate
from foretoken.outputs import RequestMetrics

LOOKUPS = ((1, 3), (2, 5))  # known tokens, and how many are drafted
NGRAM_KS, HEAD_KS = (4,), (2, 3, 4)
HEADS = {"SmolLM2-135M-Instruct": "smollm2-135m-eagle3"}  # by what file names begin with
CONTEXT, LONG, SHORT, DECODED = 2048, 512, 48, 64  # tokens
ROWS, PASSES = 5, 12  # of a verification that is timed, and how many
NOTE = (
    "llama.cpp: a library of this process through ctypes, one llama_decode per step and argmax in "
    "NumPy (some 20 us), its own pool of threads asleep while others work; flash attention auto, "
    "keys and values in half precision, mmap, weights repacked where its backend can. Lookup is "
    "its rule ngram-simple at several lengths. At T=0, prompts_equal_to_plain: all tokens equal "
    "plain decoding's here; prompts_equal_to_llama_cpp: those of llama.cpp without drafts."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="in place of the pair")
    parser.add_argument(
        "--only-starts",
        action="store_true",
        help="no answers: loading, a prompt, decoding and verifying",
    )
    parser.add_argument(
        "--llama-library", type=Path, metavar="FOLDER", help="llama.cpp's shared libraries"
    )


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what does not go together, and name the results file after the model."""
    if (options.model is None) != (options.llama_library is None):
        parser.error("--model and --llama-library go together")
    if options.model is None:
        return
    if options.llama_cpp:
        parser.error("--llama-cpp is for the embedded pair: --model has --llama-library")
    for path in (options.model, options.llama_library):
        if not path.exists():
            parser.error(f"{path} does not exist")
    name = re.sub("[^a-z0-9]+", "_", options.model.stem.lower())
    options.machine = "_".join(filter(None, (name, options.machine)))


def prompts(model: Path, count: int) -> list[Ids]:
    """Held-out chats by the file's template, of each kind in turn; without one Python files."""
    tokenizer = load_tokenizer(model)
    if not getattr(tokenizer, "chat_template", None):
        return [list(tokenizer.encode(item.prompt)) for item in heldout(count)]
    template = ChatTemplate(tokenizer)
    return [template.render(item.messages)[1] for item in heldout_chats()[:count]]


def cases(
    options: argparse.Namespace, library: llama_library.Library, threads: int, opened: ExitStack
) -> list[Case]:
    """Ours and llama.cpp's, plain and speculative."""
    return [
        *ours(options.model, options.max_tokens, threads, opened),
        *theirs(library, options.model, options.max_tokens, threads, opened),
    ]


def head_of(model: Path) -> str | None:
    """The head that comes with the package for a model, if there is one."""
    return next((head for name, head in HEADS.items() if model.stem.startswith(name)), None)


def load(model: Path, speculation: dict[str, Any] | None, threads: int) -> LLM:
    return LLM(
        str(model),
        speculation,
        max_num_seqs=1,
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        threads=threads,
    )


def ours(model: Path, max_tokens: int, threads: int, opened: ExitStack) -> list[Case]:
    def case(name: str, k: int, method: str, llm: LLM) -> Case:
        return our_case(name, llm, method, k, max_tokens)

    def engine(**speculation: Any) -> LLM:
        return opened.enter_context(load(model, speculation or None, threads))

    found = [case("plain", 0, "plain", engine())]
    ngram = engine(method="ngram", num_speculative_tokens=max(NGRAM_KS))
    found += [case(f"n-gram, K={k}", k, "ngram", ngram) for k in NGRAM_KS]
    if (name := head_of(model)) is not None:
        head = engine(method="eagle3", model=name, num_speculative_tokens=max(HEAD_KS))
        found += [case(f"EAGLE-3 head, K={k}", k, "eagle3", head) for k in HEAD_KS]
        auto = engine(method="eagle3", model=name, num_speculative_tokens="auto")
        found.append(auto_case("EAGLE-3 head, K=auto", auto, max_tokens))
    return found


def auto_case(name: str, llm: LLM, max_tokens: int) -> Case:
    """The engine chooses K as it goes."""

    def complete(ids: Ids, temperature: float, seed: int) -> Ids:
        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed
        )
        return llm.generate(ids, params)[0].outputs[0].token_ids

    return Case(name, {"engine": "foretoken", "method": "auto", "k": "auto"}, timed(complete))


def acceptance(model: Path, count: int, threads: int) -> list[Row]:
    """Accepted drafts + 1 per verification on held-out chats, by kind, ended as in use."""
    if (name := head_of(model)) is None:
        return []
    rows, template = [], None
    for k in HEAD_KS:
        speculation = {"method": "eagle3", "model": name, "num_speculative_tokens": k}
        with load(model, speculation, threads) as llm:
            template = template or ChatTemplate(llm.tokenizer)
            for temperature in (0.0, 0.8):
                for kind in ("chat", "code"):
                    asked = [c for c in heldout_chats() if c.kind == kind][:count]
                    ids = [template.render(c.messages)[1] for c in asked]
                    params = [
                        SamplingParams(temperature=temperature, max_tokens=256, seed=seed)
                        for seed in range(len(ids))
                    ]
                    total = RequestMetrics()
                    for output in llm.generate(ids, params):
                        total.add(output.metrics)
                    labels = {"k": k, "temperature": temperature, "kind": kind}
                    values: dict[str, Value] = {
                        "mean_acceptance_length": total.mean_acceptance_length or 0.0,
                        "verifications": total.num_steps,
                    }
                    rows.append(
                        Row(f"acceptance, K={k}, {kind}, T={temperature:g}", labels, values)
                    )
    return rows


def starts(library: llama_library.Library, model: Path, threads: int, repeats: int) -> list[Row]:
    """In turns: seconds to load, of a prompt of 512 tokens, of a token; ours also of a pass that
    verifies drafts."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats + 1):
        for engine, measured in (
            ("foretoken", our_start(model, threads)),
            ("llama.cpp", their_start(library, model, threads)),
        ):
            for what, found in measured.items():
                if repeat:  # the first warms up
                    seconds.setdefault((engine, what), []).append(found)
    return [
        Row(
            f"{engine}, {what}, {threads} thread{'s' if threads > 1 else ''}",
            {"engine": engine, "method": what, "threads": threads},
            {"seconds": Spread.of(found, "s")},
        )
        for (engine, what), found in seconds.items()
    ]


def long_prompt(start: int) -> Ids:
    return [(7919 * i) % 40_000 + 100 for i in range(start, start + LONG)]


def our_start(model: Path, threads: int) -> dict[str, float]:
    start = time.perf_counter()
    with load(model, None, threads) as llm:
        loaded = time.perf_counter() - start

        def seconds(ids: Ids, count: int) -> float:
            begun = time.perf_counter()
            llm.generate(ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
            return time.perf_counter() - begun

        ids = long_prompt(0)
        seconds(ids[:SHORT], 8)
        decoding = seconds(ids[:SHORT], DECODED + 1) - seconds(ids[:SHORT], 1)
        return {
            "load": loaded,
            "prompt of 512": min(seconds(long_prompt(turn), 1) for turn in range(2)),
            "token": decoding / DECODED,
        } | verification(model, ids[:SHORT], threads)


def verification(model: Path, ids: Ids, threads: int) -> dict[str, float]:
    """Seconds of a pass that verifies `ROWS` - 1 drafts, all of them right and drafted for nothing.

    Raises:
        RuntimeError: a draft was wrong, so that passes had other numbers of rows.
    """
    speculation = {"method": "prediction", "num_speculative_tokens": ROWS - 1}
    with load(model, speculation, threads) as llm:

        def complete(count: int, prediction: Ids | None) -> tuple[Ids, int, float]:
            params = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, prediction=prediction
            )
            begun = time.perf_counter()
            output = llm.generate(ids, params)[0]
            seconds = time.perf_counter() - begun
            return output.outputs[0].token_ids, output.metrics.num_steps, seconds

        expected, _, _ = complete(1 + ROWS * PASSES, None)
        _, _, first = complete(1, None)
        found, steps, seconds = complete(1 + ROWS * PASSES, expected)
    if found != expected or steps != 1 + PASSES:
        raise RuntimeError(f"{steps} passes verified what {1 + PASSES} should")
    return {f"pass of {ROWS} rows": (seconds - first) / PASSES}


def their_start(library: llama_library.Library, model: Path, threads: int) -> dict[str, float]:
    start = time.perf_counter()
    with llama_library.opened(library, model, threads, CONTEXT) as other:
        loaded = time.perf_counter() - start
        ids, prompts = long_prompt(0), []
        llama_library.complete(other, ids[:SHORT], 8)
        decoded = llama_library.complete(other, ids[:SHORT], DECODED + 1)
        for turn in range(2):
            other.forget()
            start = time.perf_counter()
            other.step(long_prompt(turn))
            prompts.append(time.perf_counter() - start)
        other.rest()
        return {
            "load": loaded,
            "prompt of 512": min(prompts),
            "token": decoded.decode_seconds / DECODED,
        }


def theirs(
    library: llama_library.Library, path: Path, max_tokens: int, threads: int, opened: ExitStack
) -> list[Case]:
    model = opened.enter_context(llama_library.opened(library, path, threads, CONTEXT))

    def case(name: str, lookup: llama_library.Lookup | None) -> Case:
        def complete(ids: Ids, temperature: float, seed: int) -> Ids:
            if temperature:
                raise ValueError("the loop over llama.cpp's library is greedy")
            return llama_library.complete(model, ids, max_tokens, lookup).tokens

        method, k = ("lookup", lookup.k) if lookup else ("plain", 0)
        return Case(name, {"engine": "llama.cpp", "method": method, "k": k}, timed(complete))

    lookups = [llama_library.Lookup(size, k) for size, k in LOOKUPS]
    return [
        case("llama.cpp", None),
        *(case(f"llama.cpp lookup of {each.size}, K={each.k}", each) for each in lookups),
    ]


def agreement(tokens: dict[str, list[Ids]]) -> dict[str, dict[str, int]]:
    """Per case, on how many prompts all tokens are those of plain decoding, ours and theirs."""
    return {
        name: {
            f"prompts_equal_to_{short}": sum(map(list.__eq__, mine, tokens[other]))
            for short, other in (("plain", "plain"), ("llama_cpp", "llama.cpp"))
        }
        for name, mine in tokens.items()
    }
