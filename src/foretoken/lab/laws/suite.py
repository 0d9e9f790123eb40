"""The whole suite: every law, case and mutant is a task, and several processes can share tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch

from foretoken.lab.laws import acceptance, drawing
from foretoken.lab.laws.chain import TRIALS, Setting
from foretoken.lab.laws.findings import Finding
from foretoken.lab.laws.joint import Case, check_case, extra_cases, matrix, pairwise, several_rounds
from foretoken.lab.laws.mutants import READ_RULES, Mutant, check_mutant, mutants, rule_mutants
from foretoken.ops import Backend, Rule, get_backend

NOISE = {"fp32": Setting(), "fp64": Setting(fp64_noise=True), "flat": Setting(rule=Rule.COUPLED)}
Law = Callable[[Backend, torch.device, int], list[Finding]]
"""(backend, device, trials) -> findings."""


def vocabularies(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Findings of ties, of rows with whole blocks masked, and of vocabularies of many sizes."""
    findings = drawing.ties(backend, device, trials)
    findings += drawing.masked_blocks(backend, device, 20_000)
    for vocabulary in drawing.VOCABULARIES:
        rows = max(100, min(5000, 2**24 // vocabulary)) if device.type == "cpu" else 20_000
        findings += drawing.vocabulary_law(backend, device, vocabulary, rows)
    return findings


def noise(name: str, backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Findings of nearly uniform rows and far tails, with the noise `name` of `NOISE`.

    A CPU takes 0.3 ns per logit, and 20 ns per token of flat noise: it gets fewer draws and smaller
    vocabularies than a GPU.
    """
    gpu = device.type == "cuda"
    draw = drawing.sampler(backend, NOISE[name])
    vocabulary, draws = (200_000, 400_000) if gpu else (10_000, 20_000)
    if gpu and name == "fp32":
        draws = 4_000_000
    findings = drawing.near_uniform(draw, device, vocabulary, draws, f"near_uniform-{name}")
    for vocabulary in (1024, 200_000) if gpu else (1024,):
        draws = (32 if gpu else 1) * 2**31 // vocabulary
        if gpu or name == "fp32":
            findings += drawing.tail(draw, device, vocabulary, draws, f"tail-{name}")
    return findings


def synthetic_rates(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Findings of the synthetic rule: rates per position, mean rates, rejections at T = 0."""
    findings = acceptance.per_position(backend, device) + acceptance.mean_rates(backend, device)
    return findings + acceptance.greedy_rejections(backend, device)


LAWS: dict[str, Law] = {
    "several_rounds": lambda backend, device, trials: several_rounds(backend, device),
    "mean_accepted": acceptance.mean_accepted,
    "overlap": acceptance.overlap,
    "always_and_never": acceptance.always_and_never,
    "nucleus": acceptance.outside_the_nucleus,
    "ends_of_u": lambda backend, device, trials: acceptance.ends_of_u(backend, device),
    "vocabularies": vocabularies,
    **{f"noise-{name}": partial(noise, name) for name in NOISE},
    "synthetic": synthetic_rates,
}
"""name -> law. A law with a fixed or costly number of trials ignores `trials`."""


class Task(NamedTuple):
    """One law on a backend; for "joint" and "mutants" only the case or mutant at index `number`."""

    law: str
    number: int
    backend: str
    device: torch.device
    trials: int


def tasks(
    backend: str, device: torch.device, *, trials: int = TRIALS, quick: bool = False
) -> list[Task]:
    """All tasks: the longest first, cases of the joint distribution last.

    Args:
        quick: of the cases, only the pairwise selection and the extra cases.
    """
    common = (backend, device, trials)
    result = [Task(law, 0, *common) for law in reversed(LAWS)]
    if device.type == "cuda":  # this law takes 10 GB of memory
        result.insert(0, Task("far_rows", 0, *common))
    result += [Task("mutants", i, *common) for i in range(len(_mutants_of(backend)))]
    num_cases = len(_few_cases() if quick else _joint_cases())
    return [*result, *(Task("joint", i, *common) for i in range(num_cases))]


def find(task: Task) -> list[Finding]:
    """Run a task, which may come from another process."""
    backend = get_backend(task.backend)
    if task.law == "mutants":
        return [check_mutant(_mutants_of(task.backend)[task.number], backend, task.device)]
    if task.law == "joint":
        return check_case(_joint_cases()[task.number], backend, task.device, task.trials)
    if task.law == "far_rows":
        return drawing.far_rows(backend, task.device)
    return LAWS[task.law](backend, task.device, task.trials)


@cache
def _few_cases() -> list[Case]:
    return [*pairwise(matrix()), *extra_cases()]


@cache
def _joint_cases() -> list[Case]:
    """All cases; the cases of a quick run come first."""
    return [*_few_cases(), *(case for case in matrix() if case not in _few_cases())]


@cache
def _mutants_of(backend: str) -> list[Mutant]:
    return [*mutants(), *(rule_mutants() if backend in READ_RULES else ())]
