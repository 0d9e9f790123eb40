"""What prefix reuse saves: the first token of a long prompt, cold and after one like it.

Each repeat has a prompt of its own. It comes three times: cold, with another short tail, and
exactly as before. A second part measures what the drafter pays for tokens that the target cached
without it: requests with K=0 fill the target's blocks alone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.common import (
    DRAFT,
    TARGET,
    QuietTimer,
    goal,
    heldout_tokens,
    parse,
    progress,
    record,
    use_cores,
)
from foretoken import LLM, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.lab.results import Row, Spread, Value
from foretoken.outputs import RequestOutput

TEMPERATURES = (0.0, 0.8)
WARM = ("another tail", "the same prompt")
GOAL = 0.2
Ids = list[int]


class Prompts:
    """Held-out texts that share no beginning; a repeated timing takes new ones."""

    def __init__(self, length: int, tail: int) -> None:
        self.stream = heldout_tokens()
        self.length, self.tail = length, tail
        self.taken = 0

    def take(self) -> tuple[Ids, Ids, Ids]:
        """A prompt and two tails."""
        span = len(self.stream) - self.length - 2 * self.tail
        start = self.taken * 997 % span  # prime: no start comes twice within `span` prompts
        self.taken += 1
        ends = [start + self.length + i * self.tail for i in range(3)]
        first, *tails = zip([start, *ends], ends, strict=False)
        return self.stream[slice(*first)], *(self.stream[slice(*t)] for t in tails)


def ask(llm: LLM, ids: Ids, params: SamplingParams) -> RequestOutput:
    return llm.generate(ids, params)[0]


def first_token_row(
    llm: LLM, plain: LLM, prompts: Prompts, temperature: float, options: Any, timer: QuietTimer
) -> Row:
    """Times to first token of the three visits; their tokens next to those without reuse."""
    seconds: dict[str, list[float]] = defaultdict(list)
    cached: dict[str, list[float]] = defaultdict(list)
    equal = asked = 0
    for repeat in range(options.repeats):
        params = SamplingParams(
            temperature=temperature, max_tokens=options.max_tokens, ignore_eos=True, seed=repeat
        )

        def work(params: SamplingParams = params) -> dict[str, RequestOutput]:
            shared, tail, other = prompts.take()
            return {
                "cold": ask(llm, shared + tail, params),
                "another tail": ask(llm, shared + other, params),
                "the same prompt": ask(llm, shared + tail, params),
            }

        _, outputs = timer(work)
        if outputs["cold"].metrics.num_cached_tokens:
            raise RuntimeError("a prompt that should be new was in the cache")
        for name, output in outputs.items():
            seconds[name].append(1000 * (output.metrics.time_to_first_token or 0.0))
            cached[name].append(output.metrics.num_cached_tokens)
            without = ask(plain, output.prompt_token_ids, params)
            equal += without.outputs[0].token_ids == output.outputs[0].token_ids
            asked += 1
    values: dict[str, Value] = {
        f"first_token, {name}": Spread.of(ms, "ms") for name, ms in seconds.items()
    }
    for name in WARM:
        ratios = [a / b for a, b in zip(seconds[name], seconds["cold"], strict=True)]
        values[f"ratio, {name}"] = Spread.of(ratios, "x")
        values[f"cached_tokens, {name}"] = Spread.of(cached[name], "tokens")
    values |= {"outputs_equal_to_uncached": equal, "outputs": asked}
    return Row(f"first token, T={temperature:g}", {"temperature": temperature}, values)


def catch_up_row(llm: LLM, prompts: Prompts, options: Any, timer: QuietTimer) -> Row:
    """Milliseconds of a request's first drafting: what of its prompt the drafter has decides."""
    traces: list[StepTrace] = []

    def first(ids: Ids, k: int) -> float:
        traces.clear()
        params = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, num_speculative_tokens=k
        )
        ask(llm, ids, params)
        return next((1000 * trace.seconds["draft"] for trace in traces if trace.num_drafts), 0.0)

    def work() -> dict[str, float]:
        fresh, tail, other = prompts.take()
        found = {
            "fresh prompt": first(fresh + tail, options.k),
            "prompt that the drafter has": first(fresh + other, options.k),
        }
        skipped, tail, other = prompts.take()
        first(skipped + tail, 0)
        found["prompt cached by a request with K=0"] = first(skipped + other, options.k)
        return found

    llm.engine.on_step = traces.append
    runs = [timer(work)[1] for _ in range(options.repeats)]
    llm.engine.on_step = None
    values: dict[str, Value] = {
        name: Spread.of([run[name] for run in runs], "ms") for name in runs[0]
    }
    return Row(f"first drafting, K={options.k}", {"k": options.k}, values)


def main() -> None:
    options = parse(__doc__, prompt_tokens=1000, tail=16, max_tokens=16, repeats=7, k=4, cores=2)
    use_cores(options.cores)
    prompts = Prompts(options.prompt_tokens, options.tail)
    size = {"max_num_seqs": 1, "threads": options.cores}
    speculation = {"method": "draft_model", "num_speculative_tokens": options.k}
    timer, rows = QuietTimer(), []
    with (
        LLM(TARGET, None, **size) as llm,
        LLM(TARGET, None, enable_prefix_caching=False, **size) as plain,
        LLM(TARGET, speculation, **size) as drafted,
    ):
        for each in (llm, plain, drafted):  # warms up
            ask(each, prompts.take()[0], SamplingParams(max_tokens=8, ignore_eos=True))
        for temperature in progress(TEMPERATURES, "prefix"):
            rows.append(first_token_row(llm, plain, prompts, temperature, options, timer))
        rows.append(catch_up_row(drafted, prompts, options, timer))
    for row in rows:
        print(row.case, {k: round(getattr(v, "median", v), 3) for k, v in row.values.items()})
    record(
        "prefix",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "batch": 1,
            "prompt_tokens": options.prompt_tokens,
            "tail_tokens": options.tail,
            "max_tokens": options.max_tokens,
            "dtype": "float32",
            "cores": options.cores,
            "repeats": options.repeats,
        },
        rows,
        [
            "Every repeat has its own prompt; the cold visit computes all of it. Ratios are taken "
            "repeat by repeat.",
            "outputs_equal_to_uncached: outputs with the tokens of the same request, seed "
            "included, with prefix caching off.",
            "first drafting: the first proposal of a request, which computes what the drafter "
            "lacks of the prompt, then K drafts.",
            timer.note(),
            *(
                goal(f"{row.case}: {name} to cold", row, f"ratio, {name}", GOAL, least=False)
                for row in rows[: len(TEMPERATURES)]
                for name in WARM
            ),
        ],
    )


if __name__ == "__main__":
    main()
