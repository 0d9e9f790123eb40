"""What `benchmarks.speed` compares: each case completes one prompt and says how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import llama_cpp, opponents
from benchmarks.common import DRAFT, TARGET
from benchmarks.gguf_export import export
from foretoken import LLM, SamplingParams

DRAFT_KS = (2, 3, 4, 5, 6, 7, 8)
NGRAM_KS = (3, 6)
ASSISTED_KS = (3, 5)
Ids = list[int]
Complete = Callable[[Ids, float, int], Ids]


@dataclass(frozen=True)
class Case:
    """One way to complete a prompt: token ids, temperature and seed to new tokens and seconds."""

    name: str
    labels: dict[str, Any]
    complete: Callable[[Ids, float, int], tuple[Ids, float]]


def timed(complete: Complete) -> Callable[[Ids, float, int], tuple[Ids, float]]:
    """`complete` with the seconds that the whole call took."""

    def timed_complete(ids: Ids, temperature: float, seed: int) -> tuple[Ids, float]:
        start = time.perf_counter()
        tokens = complete(ids, temperature, seed)
        return tokens, time.perf_counter() - start

    return timed_complete


def our_case(name: str, llm: LLM, method: str, k: int, max_tokens: int) -> Case:
    def complete(ids: Ids, temperature: float, seed: int) -> Ids:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            num_speculative_tokens=k,
            seed=seed,
        )
        return llm.generate(ids, params)[0].outputs[0].token_ids

    return Case(name, {"engine": "foretoken", "method": method, "k": k}, timed(complete))


def our_cases(max_tokens: int, threads: int, opened: ExitStack) -> list[Case]:
    """Plain decoding and every drafter at several K: K is a request's choice within one engine."""

    def load(speculation: dict[str, Any] | None) -> LLM:
        # Prompts are repeated: every repeat must compute its own, as the others do.
        llm = LLM(TARGET, speculation, max_num_seqs=1, enable_prefix_caching=False, threads=threads)
        return opened.enter_context(llm)

    drafted = {"method": "draft_model", "num_speculative_tokens": max(DRAFT_KS)}
    sampled = load(drafted)
    greedy = load({**drafted, "num_speculative_tokens": 4, "draft_sample_method": "greedy"})
    ngram = load({"method": "ngram", "num_speculative_tokens": max(NGRAM_KS)})
    plain = load(None)
    return [
        our_case("plain", plain, "plain", 0, max_tokens),
        *(our_case(f"draft model, K={k}", sampled, "draft_model", k, max_tokens) for k in DRAFT_KS),
        our_case("draft model, greedy, K=4", greedy, "draft_model_greedy", 4, max_tokens),
        *(our_case(f"n-gram, K={k}", ngram, "ngram", k, max_tokens) for k in NGRAM_KS),
    ]


def transformers_cases(target: Any, max_tokens: int, threads: int) -> list[Case]:
    """`generate` and assisted generation of Transformers, same weights, float32."""
    assistant = opponents.load(DRAFT)

    def case(name: str, k: int, options: dict[str, Any]) -> Case:
        def complete(ids: Ids, temperature: float, seed: int) -> Ids:
            torch.manual_seed(seed)
            if k:
                config = assistant.generation_config
                config.num_assistant_tokens = k
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            with opponents.torch_threads(threads):
                return opponents.generate(target, [ids], max_tokens, temperature, **options)[0]

        method = "assisted" if k else "generate"
        return Case(name, {"engine": "transformers", "method": method, "k": k}, timed(complete))

    assisted = {"assistant_model": assistant}
    return [
        *(case(f"Transformers generate{how}", 0, opts) for how, opts in opponents.CACHES.items()),
        *(case(f"Transformers assisted, K={k}", k, assisted) for k in ASSISTED_KS),
    ]


def llama_cpp_cases(
    binary: Path, max_tokens: int, threads: int, opened: ExitStack
) -> tuple[list[Case], list[int]]:
    """llama.cpp plain and with the same draft at the same Ks, and its servers' process ids."""
    folder = Path(opened.enter_context(TemporaryDirectory()))
    target, draft = (export(name, folder) for name in (TARGET, DRAFT))
    cases, processes = [], []
    for k in (0, *DRAFT_KS):
        model = llama_cpp.Model(target, draft if k else None, k)
        server = opened.enter_context(llama_cpp.serve(binary, model, threads, folder))
        processes.append(server.pid)

        def complete(
            ids: Ids, temperature: float, seed: int, server: llama_cpp.Server = server
        ) -> tuple[Ids, float]:
            return server.complete(ids, max_tokens, temperature, seed)

        name = f"llama.cpp draft model, K={k}" if k else "llama.cpp"
        method = "draft_model" if k else "plain"
        cases.append(Case(name, {"engine": "llama.cpp", "method": method, "k": k}, complete))
    return cases, processes
