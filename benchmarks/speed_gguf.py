"""What `benchmarks.speed` compares where the model is a GGUF file: greedy, with llama.cpp beside.

Both are libraries of this process, on the same file, and get the same token ids. Both quantise
what a product reads, each in its own way, so that their texts part at near-ties: how many are
equal is reported, and too few means that one of them computes another model.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import llama_library
from benchmarks.speed_cases import NGRAM_KS, Case, Ids, our_case, timed
from foretoken import LLM
from foretoken.lab.workloads import heldout

LOOKUPS = ((1, 3), (2, 3), (2, 5), (2, 8), (3, 5))  # known tokens, and how many are drafted
TEXT_DRAFTERS = {"ngram": "n-gram", "suffix": "suffix"}  # ours that need no second model
CONTEXT = 2048
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
    options.machine = "_".join(filter(None, (options.model.stem, options.machine)))


def prompts(library: llama_library.Library, model: Path, count: int) -> list[Ids]:
    """The held-out prompts, in the ids of the file's own vocabulary."""
    with llama_library.opened(library, model, threads=1, length=64) as opened:
        return [opened.tokenize(item.prompt) for item in heldout(count)]


def cases(
    options: argparse.Namespace, library: llama_library.Library, threads: int, opened: ExitStack
) -> list[Case]:
    """Ours and llama.cpp's: plain, and what drafts without a second model."""
    return [
        *ours(options.model, options.max_tokens, threads, opened),
        *theirs(library, options.model, options.max_tokens, threads, opened),
    ]


def ours(model: Path, max_tokens: int, threads: int, opened: ExitStack) -> list[Case]:
    def load(speculation: dict[str, Any] | None) -> LLM:
        llm = LLM(
            str(model),
            speculation,
            max_num_seqs=1,
            max_model_len=CONTEXT,
            enable_prefix_caching=False,
            threads=threads,
        )
        return opened.enter_context(llm)

    found = [our_case("plain", load(None), "plain", 0, max_tokens)]
    for method, title in TEXT_DRAFTERS.items():
        llm = load({"method": method, "num_speculative_tokens": max(NGRAM_KS)})
        found += [our_case(f"{title}, K={k}", llm, method, k, max_tokens) for k in NGRAM_KS]
    return found


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
