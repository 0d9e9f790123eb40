"""What `benchmarks.ops` times: cases, and the goals that their medians are held against.

A case is one call of an op at one shape; which backend or baseline runs it is not its business.
Targets: V = 151 936 unless a curve says otherwise, float32 logits unless named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

VOCABULARY = 151_936
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
EXTRA_MEMORY = 0.02  # of the logits at fp32 size: group maxima, block masses
SEEN = 512  # tokens with penalties, per row

ROW_CURVE = (1, 4, 16, 64, 256, 1024, 4096)
REQUEST_CURVE = (1, 4, 16, 64, 256, 512)
VOCABULARY_CURVE = (4096, 16_384, 65_536, VOCABULARY, 262_144)
CPU_ROW_CURVE = (1, 4, 16, 64)
CPU_REQUEST_CURVE = (1, 4, 16)


@dataclass(frozen=True)
class Goal:
    """A bound on one value of a case.

    Attributes:
        value: a key of the row's values.
        least: the bound is to reach or exceed; else not to exceed.
        backend: only this backend's; None: every backend's.
        note: appended to what the report calls it.
    """

    value: str
    bound: float
    least: bool = False
    backend: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        op: sample, draft, verify or logprobs.
        name: unique; says what the fields say.
        requests: B; rows of sample, draft and logprobs.
        k: drafts per request, verify alone.
        logits: flat, peaked or mixed: see `inputs.rows_of`.
        rule: standard, block, one_hot (STANDARD without the real q) or synthetic; verify alone.
        blocks: how many requests of a batch are under `block` whatever `rule` says; verify alone.
        acceptance: usual or low: how far q is from p (`inputs.DRAFT_NOISE`); verify alone.
        penalties: SEEN tokens of every row carry repetition, frequency and presence penalties.
        against: the name of the case whose calls are timed in turns with this one's (`partner`);
            gives `ratio`.
        baselines: whether baseline modules are timed, too.
        curve, x: which growth curve this is a point of, and where on it.
    """

    op: str
    name: str
    requests: int
    k: int = 0
    vocabulary: int = VOCABULARY
    dtype: torch.dtype = FLOAT32
    logits: str = "flat"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    rule: str = ""
    blocks: int = 0
    acceptance: str = "usual"
    penalties: bool = False
    fp64_noise: bool = False
    against: str = ""
    baselines: bool = True
    curve: str = ""
    x: int = 0
    goals: tuple[Goal, ...] = ()

    @property
    def rows(self) -> int:
        """N, target rows (sample, draft, logprobs: of any model)."""
        return self.requests * (self.k + 1)

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p is on."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of logits."""
        return self.vocabulary * self.dtype.itemsize

    @property
    def partner(self) -> Case:
        """The case `against`, on the same inputs: without what this one adds to it."""
        rule = "standard" if self.rule else ""
        return replace(
            self, name=self.against, rule=rule, blocks=0, fp64_noise=False, against="", goals=()
        )

    def minimum_bytes(self, accepted: float = 0.0) -> int:
        """Bytes of logits that any implementation must move, each row read once for one purpose.

        Args:
            accepted: share of the requests whose drafts were all accepted.

        What each draft's q sums to is known from drafting. A rejected request reads a row of p
        again and a row of q (none if it is one-hot), to draw from the residual; at T = 0 there is
        none. `block` also reads every draft row, for its sum of max(w p - q, 0). A draft writes the
        row that it reads.
        """
        if self.op == "draft":
            return 2 * self.requests * self.row_bytes
        per_rejected = {"one_hot": 1}.get(self.rule, 2) if self.k and self.temperature else 0
        per_request = self.k + 1 + (self.k if self.rule == "block" else 0)
        rows = self.requests * (per_request + per_rejected * (1 - accepted))
        return round(rows * self.row_bytes)


def count(rows: int) -> str:
    """`1 row`, `8 rows`."""
    return f"{rows} row{'s' if rows > 1 else ''}"


def _sample(rows: int, *goals: Goal, dtype: torch.dtype = FLOAT32, fp64: bool = False) -> Case:
    name = f"sample, {count(rows)}, {DTYPES[dtype]}"
    case = Case("sample", name, rows, dtype=dtype, goals=goals)
    if fp64:
        case = replace(case, name=f"{name}, FP64 noise", fp64_noise=True, against=name)
    return case


def _filtered(
    rows: int, logits: str, *goals: Goal, dtype: torch.dtype = FLOAT32, **law: float
) -> Case:
    """`law`: fields of Case; without any, T=0.6, top-k 20, top-p 0.95."""
    if law:
        said = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in law.items())
    else:
        said, law = "T 0.6, top-k 20, top-p 0.95", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    name = f"sample, {said}, {logits}, {count(rows)}, {DTYPES[dtype]}"
    return Case("sample", name, rows, dtype=dtype, logits=logits, goals=goals, **law)  # type: ignore[arg-type]


def _verify(requests: int, rule: str, *goals: Goal, dtype: torch.dtype = FLOAT32) -> Case:
    shape = f"{requests} x K=4, {DTYPES[dtype]}"
    against = f"verify standard, {shape}" if rule == "synthetic" else ""
    return Case(
        "verify",
        f"verify {rule.replace('_', '-')}, {shape}",
        requests,
        k=4,
        dtype=dtype,
        logits="peaked",
        rule=rule,
        against=against,
        goals=goals,
    )


def _parity(requests: int) -> Iterator[Case]:
    """`synthetic` next to `standard` at equal counts: T = 0 and 1, usual and low acceptance."""
    bounds = (Goal("ratio", 1.03), Goal("ratio", 0.97, least=True))
    goals = tuple(replace(goal, backend="native") for goal in bounds)
    for temperature in (0.0, 1.0):
        for acceptance in ("usual", "low"):
            case = _verify(requests, "synthetic", *goals)
            said = f", T={temperature:g}, {acceptance} acceptance"
            yield replace(
                case,
                name=case.name + said,
                against=case.against + said,
                temperature=temperature,
                acceptance=acceptance,
                baselines=False,
            )


def _one_block(requests: int) -> Case:
    """A batch of `standard` in which one request is under `block`, next to one without it."""
    case = _verify(requests, "standard", Goal("ratio", 1.1, backend="native"))
    name = f"{case.name}, one of them block"
    return replace(case, name=name, blocks=1, against=case.name, baselines=False)


def _chain(requests: int, *goals: Goal, dtype: torch.dtype = BFLOAT16, rule: str) -> Case:
    """From raw logits: penalties, T, top-k, top-p, verification, resampling, bonus."""
    case = _verify(requests, rule, *goals, dtype=dtype)
    name = f"whole chain, {rule}, {requests} x K=4, {DTYPES[dtype]}"
    law = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "penalties": True}
    return replace(case, name=name, **law)


def _draft(rows: int, dtype: torch.dtype, *, filters: bool = False) -> Case:
    case = Case(
        "draft", f"draft, {count(rows)}, {DTYPES[dtype]}", rows, dtype=dtype, logits="peaked"
    )
    if filters:
        said = f"draft, T 0.6, top-k 20, top-p 0.95, {count(rows)}, {DTYPES[dtype]}"
        case = replace(case, name=said, temperature=0.6, top_k=20, top_p=0.95)
    return case


def _curve(rows: tuple[int, ...], requests: tuple[int, ...], rows_at: int) -> Iterator[Case]:
    """Points of growth: plain and filtered sampling, and standard verification."""
    for rows_of_point in rows:
        yield replace(_sample(rows_of_point), curve="sample, rows", x=rows_of_point)
        filtered = _filtered(rows_of_point, "peaked")
        yield replace(filtered, curve="sample filtered, rows", x=rows_of_point)
    for most in requests:
        case = _verify(most, "standard")
        yield replace(case, curve="verify standard, rows", x=case.rows)
    for vocabulary in VOCABULARY_CURVE:
        for case, what in (
            (_sample(rows_at), "sample"),
            (_filtered(rows_at, "peaked"), "sample filtered"),
            (_verify(rows_at // 4, "standard"), "verify standard"),
        ):
            yield replace(case, vocabulary=vocabulary, curve=f"{what}, vocabulary", x=vocabulary)


def _named(points: Iterator[Case]) -> list[Case]:
    return [replace(case, name=f"{case.curve}, x={case.x}", goals=()) for case in points]


def gpu_cases() -> list[Case]:
    """The list for one GPU, with the goals for one H200.

    Those with a goal on memory come first: what an earlier case left allocated is not seen again.
    """
    memory = Goal("extra_memory_share", EXTRA_MEMORY)
    graph = "graph_us"
    single = [Goal(graph, 12), Goal("eager_us", 100), Goal("eager_us", 70, note="stretch")]
    ratio = [Goal("ratio", 1.03), Goal("ratio", 0.97, least=True)]
    noise = Goal("ratio", 1.05)
    return [
        _verify(64, "standard", Goal(graph, 80), memory),
        _filtered(1024, "peaked", Goal(graph, 220), memory),
        _sample(1024, Goal(graph, 180), memory),
        *(_sample(rows) for rows in (1, 32, 320)),
        _sample(8, Goal(graph, 11)),
        _sample(128, Goal(graph, 32)),
        *(_sample(rows, dtype=BFLOAT16) for rows in (8, 128)),
        _sample(1024, Goal(graph, 110), dtype=BFLOAT16),
        *(_sample(rows, noise, fp64=True) for rows in (8, 128, 1024)),
        *(_filtered(rows, "peaked") for rows in (8, 32, 128)),
        *(_filtered(1, logits, Goal(graph, 25)) for logits in ("peaked", "flat")),
        *(_filtered(320, logits, Goal(graph, 85)) for logits in ("peaked", "flat")),
        _filtered(1024, "flat", Goal(graph, 220)),
        _filtered(320, "peaked", dtype=BFLOAT16),
        _filtered(320, "peaked", Goal(graph, 110), top_p=0.95),
        _filtered(320, "flat", Goal(graph, 600), top_p=0.95),
        *(_filtered(rows, logits, top_p=0.95) for rows, logits in ((320, "mixed"), (1, "flat"))),
        _filtered(320, "peaked", min_p=0.05),
        _verify(1, "standard", *single),
        _verify(128, "standard", Goal(graph, 155)),
        _verify(64, "block", Goal(graph, 130)),
        _verify(64, "one_hot", Goal(graph, 65)),
        *(_verify(requests, "synthetic", *ratio) for requests in (64, 128)),
        *(_verify(1, rule) for rule in ("block", "one_hot", "synthetic")),
        *(_verify(64, rule, dtype=BFLOAT16) for rule in ("standard", "block")),
        _chain(64, Goal(graph, 150), rule="standard"),
        _chain(64, rule="block"),
        _chain(1, rule="standard"),
        *(_draft(rows, dtype) for rows, dtype in ((64, FLOAT32), (64, BFLOAT16), (1, BFLOAT16))),
        _draft(64, BFLOAT16, filters=True),
        Case("logprobs", "logprobs of a token and the top 5, 64 rows, fp32", 64, logits="peaked"),
        *_named(_curve(ROW_CURVE, REQUEST_CURVE, 256)),
    ]


def cpu_cases() -> list[Case]:
    """The list for a CPU, with the goals for 2 threads."""
    native, ns = {"backend": "native"}, "ns_per_logit"
    stock, stock_filtered = Goal(ns, 4, backend="torch"), Goal(ns, 8, backend="torch")
    filtered = (Goal(ns, 0.6, **native), stock_filtered)
    tenfold = Goal("speedup_over_pytorch", 10, least=True, **native)
    return [
        _sample(32, Goal(ns, 0.25, **native), stock),
        *(_sample(rows) for rows in (1, 8)),
        _sample(32, dtype=BFLOAT16),
        _sample(32, fp64=True),
        *(_filtered(32, kind, *filtered) for kind in ("peaked", "flat")),
        *(_filtered(32, kind, stock_filtered, top_p=0.95) for kind in ("peaked", "flat", "mixed")),
        _filtered(32, "peaked", min_p=0.05),
        _verify(8, "standard", tenfold, stock),
        *(_verify(8, rule) for rule in ("block", "one_hot", "synthetic")),
        *(case for requests in (1, 16, 64) for case in _parity(requests)),
        _one_block(64),
        _verify(1, "standard"),
        _verify(8, "standard", dtype=BFLOAT16),
        _chain(8, rule="standard"),
        _draft(8, FLOAT32),
        _draft(8, BFLOAT16, filters=True),
        Case("logprobs", "logprobs of a token and the top 5, 8 rows, fp32", 8, logits="peaked"),
        *_named(_curve(CPU_ROW_CURVE, CPU_REQUEST_CURVE, 16)),
    ]


def chosen(cases: list[Case], only: str, quick: bool) -> list[Case]:
    """Those whose name holds `only`; `quick`: of these, the ones with a goal."""
    return [case for case in cases if only in case.name and (case.goals or not quick)]
