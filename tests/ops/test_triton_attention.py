"""Paged attention on a GPU: fused with norms, RoPE and the K/V write; and the plan of its work.

Without a GPU all of this, and `test_attention.py` for this backend, runs in Triton's interpreter,
in a process of its own. Products of bfloat16 are wrong there: all is float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops import AttentionBatch, AttentionOptions, get_backend
from tests.support.interpreter import INTERPRETED, interpret_tests

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
runs = pytest.mark.skipif(
    not INTERPRETED and DEVICE.type == "cpu", reason="no GPU, nor Triton's interpreter"
)

H, H_KV, D, PAGE, POSITIONS = 4, 2, 16, 16, 700
W = (H + 2 * H_KV) * D
PLAIN = AttentionOptions(0.3)
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 40},
    "all": {"sliding_window": 33, "softcap": 2.0, "sinks_H": torch.linspace(-2, 3, H)},
}
# (Tokens in the cache, new tokens): pieces have 256 tokens or 576, tiles 64.
STEPS = {
    "decode": [(300, 1), (0, 1), (127, 1), (128, 1)],
    "verify": [(126, 5), (0, 5), (62, 3), (300, 1)],
    "more than 16 rows": [(380, 6), (0, 1), (127, 8), (60, 7)],
}
TRIED = "triton and (mixed and (gqa or plain or all) or argument or long)"
CUTS = {
    "usual": {},
    "few pieces": {"size": 64, "count": 2},
    "window": {"size": 64, "count": 2, "window": 40},
    "warps share keys": {"size": 64, "count": 2, "groups": 1, "keys": 64, "rows": 64},
}


def attention_package(*module: str) -> Any:
    return importlib.import_module(".".join(["foretoken.ops.backends.triton.attention", *module]))


class Step(NamedTuple):
    """New tokens of requests; positions of no request are NaN."""

    qkv_TW: Tensor
    heads: Any
    key: Tensor
    value: Tensor
    batch: AttentionBatch


def make_step(
    requests: list[tuple[int, int]], *, norm: bool = False, rotary: int = D, page: int = PAGE
) -> Step:
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    needed = [-(-(start + new) // page) for start, new in requests]
    table = torch.full((len(requests), max(needed) + 1), sum(needed))
    for row, ids in zip(table, torch.randperm(sum(needed)).split(needed), strict=True):
        row[: len(ids)] = ids
    starts = torch.tensor([0, *(new for _, new in requests)]).cumsum(0)
    lengths = torch.tensor([start + new for start, new in requests])
    key, value = (random(sum(needed) + 1, page, H_KV, D) for _ in range(2))
    cached = torch.zeros(sum(needed) + 1, page, dtype=torch.bool)
    for blocks, (start, _) in zip(table, requests, strict=True):
        at = torch.arange(start)
        cached[blocks[at // page], at % page] = True
    key[~cached], value[~cached] = torch.nan, torch.nan
    angle = torch.outer(torch.arange(POSITIONS), 0.3 ** torch.arange(rotary // 2))
    weights = [random(D).to(DEVICE) if norm else None for _ in range(2)]
    heads = attention_package().HeadInputs(angle.cos().to(DEVICE), angle.sin().to(DEVICE), *weights)
    most = max(new for _, new in requests)
    batch = AttentionBatch(starts.to(DEVICE), lengths.to(DEVICE), table.to(DEVICE), page, most)
    qkv_TW = random(int(starts[-1]), W).to(DEVICE)
    return Step(qkv_TW, heads, key.to(DEVICE), value.to(DEVICE), batch)


def expected(step: Step, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [T, H, D], the caches, and the attended values, by the definition in float64."""
    starts, lengths = step.batch.query_start_B1.tolist(), step.batch.length_B.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    request_T = torch.repeat_interleave(torch.tensor(counts)).to(DEVICE)
    position_T = torch.cat(
        [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    ).to(DEVICE)
    page = step.batch.block_size
    tokens = step.qkv_TW[: starts[-1]].double().unflatten(1, (-1, D))
    query, new_key, new_value = tokens.split([H, H_KV, H_KV], 1)
    query = rotated(query, position_T, step.heads, step.heads.q_norm_D)
    new_key = rotated(new_key, position_T, step.heads, step.heads.k_norm_D)
    block_T = step.batch.block_BL[request_T, position_T // page]
    key, value = step.key.clone(), step.value.clone()
    key[block_T, position_T % page] = new_key.float()
    value[block_T, position_T % page] = new_value.float()
    oracle = get_backend("reference").attention
    return query, key, value, oracle(query.float(), key, value, step.batch, options)


def rotated(x: Tensor, position_T: Tensor, heads: Any, norm_D: Tensor | None) -> Tensor:
    if norm_D is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + heads.eps) * norm_D
    half = heads.cos_PR.shape[1]
    cos, sin = heads.cos_PR[position_T, None], heads.sin_PR[position_T, None]
    a, b, rest = x.split([half, half, D - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def close(actual: Tensor, wanted: Tensor) -> None:
    """Equal except for float32 rounding, with NaN in the same places."""
    torch.testing.assert_close(actual.float(), wanted.float(), atol=3e-6, rtol=2e-5, equal_nan=True)


def attend_new(step: Step, options: AttentionOptions = PLAIN, **config: int) -> Tensor:
    """Attended values of a step, [T, H * D]; `config` changes that of the kernel."""
    out_TC = torch.full((len(step.qkv_TW), H * D), torch.nan, device=DEVICE)
    ops, configs = attention_package(), attention_package("configs")
    if config:

        def decoding(*sizes: Any) -> Any:
            return configs.decoding(*sizes)._replace(**config)

        caches = step.key, step.value
        ops.prepare(step.batch, len(step.qkv_TW), H, *caches, options, decoding)
    ops.attend_new(*step, options, out_TC)
    return out_TC


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it would start")
@pytest.mark.parametrize(
    ("file", "few"),
    [
        (Path(__file__).name, "new_tokens_are_written and all and (verify or more) or plan_covers"),
        ("test_attention.py", "triton and mixed and gqa and all"),
        pytest.param(Path(__file__).name, "triton", marks=pytest.mark.trial),
        pytest.param("test_attention.py", TRIED, marks=pytest.mark.trial),
    ],
)
def test_in_the_interpreter(file: str, few: str) -> None:
    interpret_tests(str(Path(__file__).with_name(file)), f"({few}) and not half")


@needs_triton
@runs
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_new_tokens_are_written_and_attend(requests: list, features: dict) -> None:
    # Pages shorter and as long as a tile
    step = make_step(requests, norm=True, rotary=8, page=64) if features else make_step(requests)
    options = PLAIN._replace(**features)
    if options.sinks_H is not None:
        options = options._replace(sinks_H=options.sinks_H.to(DEVICE))
    _, key, value, attended = expected(step, options)
    close(attend_new(step, options).unflatten(1, (H, D)), attended)
    close(step.key, key)
    assert torch.equal(step.value.nan_to_num(), value.nan_to_num())


@needs_triton
@runs
@pytest.mark.parametrize("norm", [False, True])
def test_many_new_tokens_are_written(norm: bool) -> None:
    step = make_step([(100, 40), (0, 1), (7, 30)], norm=norm, rotary=8)
    query, key, value, attended = expected(step, PLAIN)
    ops, batch = attention_package(), replace(step.batch, most_queries=0)
    query_THD = ops.write_new(*step[:4], batch)
    close(query_THD, query)
    close(step.key, key)
    assert torch.equal(step.value.nan_to_num(), value.nan_to_num())
    close(ops.attention(query_THD, step.key, step.value, batch, PLAIN), attended)


@needs_triton
@runs
def test_rows_of_no_request_are_not_written() -> None:
    step = make_step([(130, 2), (0, 1)])
    alone = attend_new(step)
    padded = step._replace(qkv_TW=torch.cat([step.qkv_TW, step.qkv_TW[:2]]))
    out_TC = attend_new(padded._replace(batch=replace(step.batch)))
    assert torch.equal(out_TC[:3], alone)
    assert out_TC[3:].isnan().all()


@pytest.fixture
def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, products by sums: those of BLAS depend on where a row is."""
    if INTERPRETED:
        interpreter = importlib.import_module("triton.runtime.interpreter")

        def products(a: Any, b: Any, dtype: Any) -> Any:
            return (a[..., None] * b[..., None, :, :]).sum(-2).astype(dtype)

        replaced = {**vars(np), "matmul": products}
        monkeypatch.setattr(interpreter, "np", SimpleNamespace(**replaced))


@needs_triton
@runs
@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("norm", [False, True])
def test_a_row_of_a_small_step_depends_only_on_its_context(norm: bool, cut: dict[str, int]) -> None:
    """To the bit: tokens verified together, next to others, are those decoded one at a time.
    Two pieces of 64 tokens are outgrown between the tokens of the first request, and two of 128
    between those of the last.
    """
    requests = [(125, 5), (190, 4), (0, 3), (255, 2)]
    options = PLAIN._replace(sliding_window=cut.get("window"))
    config = {name: value for name, value in cut.items() if name != "window"}
    step = make_step(requests, norm=norm, page=64 if norm else PAGE)
    key, value = step.key.clone(), step.value.clone()
    *_, attended = expected(step, options)
    together, row = attend_new(step, options, **config), 0
    close(together.unflatten(1, (H, D)), attended)
    for b, (start, new) in enumerate(requests):
        for position in range(start, start + new):
            batch = AttentionBatch(
                torch.tensor([0, 1], device=DEVICE), torch.tensor([position + 1], device=DEVICE),
                step.batch.block_BL[b : b + 1].contiguous(), step.batch.block_size, 1,
            )  # fmt: skip
            one = Step(step.qkv_TW[row : row + 1], step.heads, key, value, batch)
            assert torch.equal(attend_new(one, options, **config)[0], together[row]), (b, position)
            row += 1
    assert torch.equal(key.nan_to_num(), step.key.nan_to_num())


@needs_triton
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_settings_that_change_bits_are_the_same_for_up_to_16_rows(
    dtype: torch.dtype, size: int
) -> None:
    configs = attention_package("configs")
    depend = ("size", "count", "groups", "keys", "merged_heads", "merged_pieces", "merged_warps")
    steps = [(rows, n) for n in range(1, 17) for rows in range(1, 17) if rows * n <= 16]
    used = {
        tuple(getattr(configs.decoding(rows * n, n, 8, rows * 4, size, dtype), x) for x in depend)
        for rows, n in steps
    }
    assert len(used) == 1


@needs_triton
@pytest.mark.parametrize("rows", [20, 32, 64])
def test_a_step_reads_keys_once_for_up_to_64_rows_of_a_request(rows: int) -> None:
    """In two tiles, eight requests with 16 384 tokens and K = 4 took a fifth longer."""
    configs = attention_package("configs")
    for requests in (1, 2, 5, 6, 16, 17, 64, 256):
        found = configs.decoding(requests * rows // 4, requests, 8, rows, 128, torch.bfloat16)
        assert found.rows >= rows
        assert found.size % (found.groups * found.keys) == 0


@needs_triton
@runs
@pytest.mark.parametrize("most", [0, 17])
def test_too_many_new_tokens_are_refused(most: int) -> None:
    step = make_step([(3, 2)])
    with pytest.raises(ConfigError, match="most_queries"):
        attend_new(step._replace(batch=replace(step.batch, most_queries=most)))


@needs_triton
@runs
def test_rows_of_broken_heads_are_refused() -> None:
    step = make_step([(3, 2)])
    with pytest.raises(ConfigError, match="qkv_TW"):
        attend_new(step._replace(qkv_TW=step.qkv_TW[:, :-1]))


@needs_triton
@runs
@pytest.mark.parametrize("window", [0, 50])
def test_the_plan_covers_each_context_once(window: int) -> None:
    """Pieces of 16 tokens, at most four, or of a multiple; a step that outgrows four is split."""
    records, plan = attention_package("records"), attention_package("plan")
    counts, lengths, rows_of_tile, groups = [1, 5, 16, 40, 1, 9], [1, 64, 700, 300, 257, 67], 16, 2
    starts = torch.tensor([0, *counts]).cumsum(0)
    size_of = lambda n: 16 * max(1, math.ceil((min(n, window) if window else n) / 64))  # noqa: E731
    new = lambda count: torch.full((count,), -7, dtype=torch.int32, device=DEVICE)  # noqa: E731
    work = records.Work(new(100 * 16), new(100 * 4), new(100 * 16), new(4))
    cut = records.Cut(groups, window, 16, 4, 16, FEW_ROWS=rows_of_tile, MANY_ROWS=64)
    plan.plan_kernel[(len(counts) + 1,)](
        starts.to(DEVICE), torch.tensor(lengths).to(DEVICE), work, len(counts), CUT=cut, CHUNK=4
    )
    few, rows, many, _ = work.totals.tolist()
    slots = torch.tensor([0, *(n if n <= 16 else 0 for n in counts)]).cumsum(0)
    items = work.few_I.view(-1, 16)[:few, :9].tolist()
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        mine, start = [item for item in items if item[0] == b], length - count
        assert all(item[5:7] == [int(starts[b]), start] for item in mine)
        for row in range(count * groups) if count <= 16 else ():
            position = start + row // groups
            size, oldest = size_of(position + 1), max(0, position - window + 1) if window else 0
            # Tiles end with their segment: no row is in two tiles.
            tiles = [i for i in mine if 0 <= row - i[1] < rows_of_tile and row < i[7] * groups]
            assert {item[1] for item in tiles} == {tiles[0][1]}
            spans = sorted((item[2], item[3], item[4]) for item in tiles)
            assert spans[0][0] <= max(0, start + tiles[0][1] // groups - window + 1) * bool(window)
            assert spans[0][0] <= oldest
            assert all(begin % size == 0 and end - begin <= size for begin, end, _ in spans)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
            assert spans[-1][1] == start + tiles[0][7] > position
            assert len(spans) <= plan.most_pieces(16, 4, max(lengths), window)
            numbers = [piece for *_, piece in spans]
            assert numbers == ([-1] if len(spans) == 1 else list(range(len(spans))))
            of_row = [n for n, span in enumerate(spans) if span[0] <= position and span[1] > oldest]
            place = int(slots[b]) + row // groups
            merged = work.merge_F.view(-1, 4)[place, :3].tolist()
            assert merged[0] == int(starts[b]) + row // groups
            if len(spans) == 1:
                assert merged[2] < merged[1]
            else:
                assert merged[1:] == [of_row[0], of_row[-1]]
    assert rows == sum(count for count in counts if count <= 16)
    assert [item[:2] for item in work.many_I.view(-1, 16)[:many].tolist()] == [[3, 64], [3, 0]]
