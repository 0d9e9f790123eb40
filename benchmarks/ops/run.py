"""Microseconds of every op: sampling, drafting, verification; our backends and plain PyTorch.

    python -m benchmarks.ops                          the triton backend on a GPU, else the CPU ones
    python -m benchmarks.ops --only verify --quick    cases with a goal whose name holds `verify`
    python -m benchmarks.ops --baseline my.adapter    times another library too: see baseline.py

Writes ops_gpu.json, ops_cpu.json or, on a CPU with 512-bit vectors, ops_avx512.json. A GPU is timed
twice, replaying a CUDA graph of many calls and eagerly, on logits that no cache holds; a CPU
eagerly, with `--cores` threads.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shlex
import statistics
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.common import CODE, RESULTS, QuietTimer, use_cores, whole_commit
from benchmarks.ops import baseline, timing
from benchmarks.ops.backends import Module, Ours, counts
from benchmarks.ops.cases import VOCABULARY, Case, chosen, cpu_cases, gpu_cases
from benchmarks.ops.inputs import ROTATED, Inputs, Pools, make
from benchmarks.ops.report import goal_notes, labels, report
from benchmarks.ops.timing import Call, Shot
from foretoken.lab.results import Row, Spread, Value, collect, write
from foretoken.ops import BACKENDS, get_backend, unavailable

NOTES = [
    "Timed logits are slices of a pool of 192 MiB or more, at least two inputs in turn, so that "
    "none is found in a cache. A timed pass makes up to 256 calls; repeats are such passes.",
    "graph_us: replay of one CUDA graph of all calls of a pass, by events. eager_us: the same "
    "calls in a row by the host's clock, waiting for the last alone. CPU: eager_us, after 10 ms of "
    "untimed calls.",
    "read_floor_us: the bytes of logits that must move (`cases.Case.minimum_bytes`) at the "
    "speed of reading 2 GiB (CPU: 256 MiB) once, measured in this run; share_of_floor: that over "
    "the median.",
    "flat: normal logits; peaked: 3 times normal and 16 dominating tokens, as a trained model; "
    "mixed: peaked, every sixteenth row flat. Drafts are drawn from q = softmax of the target's "
    "logits and 1.2 T times normal noise.",
    "ratio: to the same backend's other case, shot by shot in turns: FP64 noise to FP32, "
    "`synthetic` to `standard`, a batch with a `block` request to one without. Synthetic rates are "
    "those at which `standard` accepted, and every request has noise at which it accepts as many "
    "drafts as under `standard`.",
    "extra_memory_share: the allocator's peak during a first call, results included, over the "
    "logits at 4 bytes each. draft_cache_bytes: of q, for these requests.",
]
PAIRED = 8  # times the repeats for what is compared with another case: a ratio is bound to 3 %
EAGER_US = 200_000.0  # calls slower than that in all are timed on two inputs, eagerly


@dataclass
class Session:
    """What all cases of a run share.

    Attributes:
        ours: our backends; the first one drafts for the baselines too.
        floor_gb_per_s: the speed of reading once.
        failed: what could not be timed, for the notes.
    """

    options: argparse.Namespace
    device: torch.device
    ours: list[Ours]
    modules: list[Module]
    cases: list[Case]
    floor_gb_per_s: float = 0.0
    quiet: QuietTimer | None = None
    failed: list[str] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Repeats of one shot."""
        return int(self.options.repeats)

    @property
    def seconds(self) -> float:
        """What the repeats of one shot may take."""
        return 0.1 if self.options.quick else 0.25


def measure(session: Session, cases: list[Case], pools: Pools) -> list[Row]:
    """All implementations of some cases, all timed in turns; a row for each."""
    shots: dict[str, Shot] = {}
    extra = {case.name: prepare_shots(session, case, pools, shots) for case in cases}
    took = timed(session, shots) if not cases[0].against else timed_in_pairs(session, shots)
    shots.clear()
    return [row for case in cases for row in rows_of(session, case, took, extra[case.name])]


def prepare_shots(
    session: Session, case: Case, pools: Pools, shots: dict[str, Shot]
) -> dict[str, dict[str, Value]]:
    """Add a case's shots to `shots`; returns what each implementation's first calls showed."""
    inputs = make(case, pools)
    extra: dict[str, dict[str, Value]] = {}
    for ours in session.ours:
        name = f"{case.name}: {ours.name}"
        with attempt(session, name) as tried:
            calls = ours.calls(case, inputs)
            extra[ours.name] = first_calls(session, case, calls, inputs)
            if case.k:
                found = torch.cat(counts(calls))
                extra[ours.name]["all_accepted"] = (found == case.k).double().mean().item()
                extra[ours.name]["accepted_per_request"] = found.double().mean().item()
            add_shots(session, shots, name, calls, case)
            if case.against:
                other = case.partner
                add_shots(session, shots, f"{name} against", ours.calls(other, inputs), other)
        if tried.failed:
            forget(shots, name)
    for module in session.modules if case.baselines and not case.curve else ():
        name = f"{case.name}: {module.name}"
        with attempt(session, name) as tried:
            add_shots(session, shots, name, module.calls(case, inputs), case)
        if tried.failed:
            forget(shots, name)
    return extra


def groups(cases: list[Case]) -> list[list[Case]]:
    """Cases that are timed in turns: the points of a curve, so that no drift bends it; else one."""
    by_curve: dict[str, list[Case]] = {}
    for case in cases:
        by_curve.setdefault(case.curve or case.name, []).append(case)
    return [*by_curve.values()]


class attempt:
    """Goes on after an error, and keeps it for the notes; a missing function is not one."""

    def __init__(self, session: Session, what: str) -> None:
        self.session, self.what, self.failed = session, what, False

    def __enter__(self) -> attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> bool:
        self.failed = kind is not None
        if kind is None or issubclass(kind, NotImplementedError):
            return True
        if not issubclass(kind, Exception) or self.session.options.raise_errors:
            return False
        traceback.print_exc()
        message = str(error).strip().splitlines()[:1]
        self.session.failed.append(f"{self.what} failed: {kind.__name__} {' '.join(message)}")
        return True


def forget(shots: dict[str, Shot], name: str) -> None:
    """Drop what was prepared of an implementation that failed."""
    for key in [key for key in shots if key.startswith(f"{name} ")]:
        del shots[key]


def first_calls(
    session: Session, case: Case, calls: list[Call], inputs: Inputs
) -> dict[str, Value]:
    """What a first call shows: memory taken on a GPU, and tokens that are possible at all."""
    values: dict[str, Value] = {}
    if session.device.type == "cuda":
        logits = 4 * case.rows * case.vocabulary
        values["extra_memory_share"] = timing.extra_bytes(calls[0]) / logits
    if case.op == "verify" and case.rule != "one_hot":
        values["draft_cache_bytes"] = case.requests * case.k * case.row_bytes
    if case.op in ("sample", "draft"):
        check_tokens(case, inputs.logits[0], calls[0]())
    return values


def check_tokens(case: Case, logits_NV: torch.Tensor, token_N: torch.Tensor) -> None:
    """A fast wrong kernel must not pass for a fast one: ids in range, and within top-k."""
    if bool(((token_N < 0) | (token_N >= case.vocabulary)).any()):
        raise RuntimeError("a token is outside the vocabulary")
    if case.top_k:
        least_N = logits_NV.float().topk(case.top_k).values[:, -1]
        if bool((logits_NV.float().gather(1, token_N[:, None])[:, 0] < least_N).any()):
            raise RuntimeError(f"a token is not among the top {case.top_k}")


def add_shots(
    session: Session, shots: dict[str, Shot], name: str, calls: list[Call], case: Case
) -> None:
    """The ways to time these calls, under `name mode`."""
    slow_us = timing.host_shot(calls[:2], session.device)()
    if session.device.type == "cuda" or slow_us < EAGER_US:  # without what a first call compiles
        slow_us = timing.host_shot(calls[:8], session.device)()
    least_us = case.minimum_bytes() / session.floor_gb_per_s / 1e3
    many = timing.enough(calls, slow_us, least_us)
    if session.device.type == "cuda":
        shots[f"{name} graph_us"] = timing.graph_shot(many)
    if not case.curve or session.device.type != "cuda":
        few = calls if slow_us * len(calls) < EAGER_US else calls[:2]
        many = [*many, *few][: max(len(few), int(EAGER_US / slow_us / 10))]
        shots[f"{name} eager_us"] = timing.host_shot(many, session.device)


def timed(session: Session, shots: dict[str, Shot], times: int = 1) -> dict[str, list[float]]:
    """Repeats of all shots, in turns; on a CPU again if others disturbed them."""

    def work() -> dict[str, list[float]]:
        return timing.in_turns(shots, times * session.most, times * session.seconds)

    return work() if session.quiet is None else session.quiet(work)[1]


def timed_in_pairs(session: Session, shots: dict[str, Shot]) -> dict[str, list[float]]:
    """Repeats of what is compared with another case: each pair alone, both behind either.

    Behind a shot of PyTorch's the same calls took up to 1.16 times as long.
    """
    took: dict[str, list[float]] = {}
    for name in [one.name for one in (*session.ours, *session.modules)]:
        pair = {key: shot for key, shot in shots.items() if f": {name} " in key}
        took |= timed(session, pair, PAIRED)
    return took


def rows_of(
    session: Session,
    case: Case,
    took: dict[str, list[float]],
    extra: dict[str, dict[str, Value]],
) -> list[Row]:
    """From microseconds per shot to one row per implementation."""
    mode = "graph_us" if session.device.type == "cuda" else "eager_us"
    accepted = [values.pop("all_accepted", 0.0) for values in extra.values()]
    moved = case.minimum_bytes(accepted[-1] if accepted else 0.0)
    floor_us = moved / session.floor_gb_per_s / 1e3
    rows = []
    for name in [one.name for one in (*session.ours, *session.modules)]:
        own = f"{case.name}: {name}"
        if f"{own} {mode}" not in took:
            continue
        mine = took[f"{own} {mode}"]
        values: dict[str, Value] = {
            each: Spread.of(took[f"{own} {each}"], "us")
            for each in ("graph_us", "eager_us")
            if f"{own} {each}" in took
        }
        per_logit = 1000 / (case.rows * case.vocabulary)
        values["ns_per_logit"] = Spread.of([us * per_logit for us in mine], "ns")
        values["bytes"] = moved
        values["read_floor_us"] = floor_us
        values["share_of_floor"] = floor_us / statistics.median(mine)
        against = took.get(f"{own} against {mode}")
        if against:
            pairs = zip(mine, against, strict=False)
            values["ratio"] = Spread.of([a / b for a, b in pairs], "x")
        theirs = took.get(f"{case.name}: {baseline.NAME} {mode}")
        if theirs and name != baseline.NAME:
            ratios = [b / a for a, b in zip(mine, theirs, strict=False)]
            values[f"speedup_over_{baseline.NAME}"] = Spread.of(ratios, "x")
        values |= extra.get(name, {})
        rows.append(Row(own, labels(case, name), values))
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--backend", action="append", choices=[*BACKENDS], help="again for more; default by device")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--baseline", action="append", default=[], help="module of another implementation")
    add("--only", default="", help="cases whose name holds this")
    add("--quick", action="store_true", help="cases with a goal alone, fewer repeats")
    add("--repeats", type=int, default=0, help="of each timed pass: 20, on a CPU or --quick 7")
    add("--cores", type=int, default=2, help="threads on a CPU")
    add("--commit", type=whole_commit, help="of this code, where it runs outside its repository")
    add("--raise-errors", action="store_true", help="stop at a case that fails")
    add("--out", type=Path, default=RESULTS, help="folder of the results file")
    options = parser.parse_args()
    cpu = torch.device(options.device).type != "cuda"
    options.repeats = options.repeats or (7 if options.quick or cpu else 20)
    if options.backend is None:
        wanted = ["native", "torch"] if cpu else ["triton"]
        options.backend = [name for name in wanted if unavailable(name) is None]
    return options


def prepare(options: argparse.Namespace) -> Session:
    """Threads, backends and baselines, and how fast memory is read here."""
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    if not gpu:
        use_cores(options.cores)
        torch.set_num_threads(options.cores)
        for name in options.backend:
            get_backend(name).set_num_threads(options.cores)
    elif device.index is not None:
        torch.cuda.set_device(device)
    modules: list[ModuleType] = [baseline, *map(importlib.import_module, options.baseline)]
    cases = gpu_cases() if gpu else cpu_cases()
    return Session(
        options,
        device,
        [Ours(name, get_backend(name)) for name in options.backend],
        [Module(getattr(m, "NAME", m.__name__.rpartition(".")[2]), m) for m in modules],
        cases,
        timing.read_gb_per_s(device),
        None if gpu else QuietTimer(patience=120.0),
    )


def shapes(session: Session) -> dict[str, object]:
    """What stays equal over the rows, and what else explains them."""
    options = session.options
    found: dict[str, object] = {
        "vocabulary": VOCABULARY,
        "device": str(session.device),
        "backends": options.backend,
        "baselines": [module.name for module in session.modules],
        "repeats": session.most,
        "rotated_bytes": ROTATED,
        "read_floor_gb_per_s": round(session.floor_gb_per_s, 1),
    }
    if session.device.type == "cuda":
        properties = torch.cuda.get_device_properties(session.device)
        found |= {
            "cuda": str(torch.version.cuda),
            "l2_bytes": getattr(properties, "L2_cache_size", 0),
        }
        try:
            found["triton"] = importlib.import_module("triton").__version__
        except ImportError:
            found["triton"] = "absent"
    else:
        found["cores"] = options.cores
    return found


def main() -> None:
    options = parse()
    session = prepare(options)
    cases = chosen(session.cases, options.only, options.quick)
    pools, rows = Pools(session.device), []
    print(f"{len(cases)} cases; reading: {session.floor_gb_per_s:.0f} GB/s", flush=True)
    for group in groups(cases):
        with torch.inference_mode(), attempt(session, group[0].name):
            found = measure(session, group, pools)
            report(found)
            rows += found
        gc.collect()
        if session.device.type == "cuda":
            torch.cuda.empty_cache()  # the pools of the graphs that are gone
        if rows:
            path = save(session, cases, rows)
    if not rows:
        sys.exit("nothing was measured")
    print("\n".join(["", *goal_notes(cases, rows, session.ours), *session.failed]))
    print(f"wrote {path}")
    if session.failed:
        sys.exit(1)


def results_name(device: torch.device) -> str:
    """The results file of a machine's kind, without its suffix."""
    if device.type == "cuda":
        return "ops_gpu"
    return "ops_avx512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "ops_cpu"


def save(session: Session, cases: list[Case], rows: list[Row]) -> Path:
    """Write what there is, after every case: a run that is cut short keeps it, and says so."""
    done = {row.labels["case"] for row in rows}
    cut = [f"{len(done)} of {len(cases)} cases."] if len(done) < len(cases) else []
    notes = [*NOTES, *goal_notes(cases, rows, session.ours), *session.failed, *cut]
    notes += [session.quiet.note()] if session.quiet else []
    name = results_name(session.device)
    command = shlex.join(["python", "-m", "benchmarks.ops", *sys.argv[1:]])
    code = (session.options.commit, False) if session.options.commit else CODE
    return write(collect(name, command, shapes(session), rows, notes, code), session.options.out)
