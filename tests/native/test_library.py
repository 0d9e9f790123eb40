"""Which library is loaded, the reason when there is none, and that all compute the same."""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.models import load_model
from foretoken.ops import (
    DRAFT,
    TARGET,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    Rule,
    Stream,
    VerifyBatch,
    get_backend,
)
from foretoken.ops.backends.native import build, library
from foretoken.ops.backends.native.library import Machine
from foretoken.ops.backends.reference import noise as reference
from tests.models import families
from tests.models.walk import walk
from tests.native.libraries import built_variants, use_library
from tests.support.cases import drafts_of, make_params
from tests.support.kernels import needs_kernels, skip_or_fail

V3, V4 = "x86-64-v3", "x86-64-v4"
CPU = torch.device("cpu")
AVX2, BOTH = library.NEEDS[V3], library.NEEDS[V3] | library.NEEDS[V4]
BUILD = "run `python -m foretoken.ops.backends.native.build` (needs g++)"


def machine(folder: Path, features: set[str], *built: str, name: str = "x86_64") -> Machine:
    """A machine of these features, with empty files as libraries."""
    info = folder / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(features)}\nflags\t\t: x\n")
    made = Machine(name, library.cpu_features(info), folder / "lib")
    shutil.rmtree(made.libraries, ignore_errors=True)
    made.libraries.mkdir()
    for variant in built:
        made.path(variant).touch()
    return made


def chosen(*of: Any, **named: Any) -> tuple[str | None, str]:
    library.choose_variant.cache_clear()
    return library.choose_variant(machine(*of, **named))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(library.VARIANT, raising=False)
    yield tmp_path
    library.choose_variant.cache_clear()


def test_the_most_capable_variant_is_chosen(folder: Path) -> None:
    assert chosen(folder, BOTH, V3) == (V3, "")
    assert chosen(folder, BOTH, V3, V4) == (V4, "")
    every = (V3, f"{V3}-vnni", V4, f"{V4}-vnni")
    for features, variant in (
        (AVX2 | {"avx512f"}, V3),
        (AVX2 | {"avx512_vnni"}, V3),
        (AVX2 | {"avx_vnni"}, f"{V3}-vnni"),
        (BOTH | {"avx_vnni"}, V4),
        (BOTH | {"avx512_vnni", "avx_vnni"}, f"{V4}-vnni"),
    ):
        assert chosen(folder, features, *every) == (variant, "")


def test_the_environment_names_the_variant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in (V3, V4):
        monkeypatch.setenv(library.VARIANT, variant)
        assert chosen(folder, BOTH, V3, V4) == (variant, "")
    with pytest.raises(ConfigError, match=f"`{library.VARIANT}` is '{V4}': must be one of {V3}\\."):
        chosen(folder, AVX2, V3, V4)


def test_other_architectures_need_no_features(folder: Path) -> None:
    assert chosen(folder, set(), "aarch64", name="aarch64") == ("aarch64", "")


@pytest.mark.parametrize(
    ("name", "features", "reason"),
    [
        ("riscv64", AVX2, "they do not exist for `riscv64`"),
        ("x86_64", {"avx2"}, "this processor is older than x86-64-v3 (AVX2)"),
        ("x86_64", AVX2, f"they were not built: {BUILD}"),
    ],
)
def test_why_there_are_none(folder: Path, name: str, features: set[str], reason: str) -> None:
    lacking = machine(folder, features, name=name)
    assert library.missing(lacking) == reason
    with pytest.raises(OSError, match=re.escape(f"there are no native kernels: {reason}")):
        library.load(lacking)


@needs_kernels
@pytest.mark.parametrize("damage", ["empty", "half", "last bytes", "one bit"])
def test_a_damaged_library_is_found_before_it_is_mapped(tmp_path: Path, damage: str) -> None:
    """The system's loader does not notice: the first call into missing pages is a SIGBUS."""
    variant, _ = library.choose_variant(library.this_machine())
    assert variant is not None
    content = build.library_path(variant).read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    damaged = {
        "empty": b"", "half": content[:half], "last bytes": content[:-40], "one bit": flipped
    }[damage]  # fmt: skip
    copied = library.this_machine()._replace(libraries=tmp_path)
    path = copied.path(variant)
    path.write_bytes(damaged)
    reason = library.missing(copied)
    assert reason is not None
    assert reason.startswith(f"they cannot be loaded ({path} is damaged: ")
    assert reason.endswith(BUILD)
    path.write_bytes(content)
    assert library.missing(copied) is None


def test_a_library_of_another_system_cannot_be_loaded(folder: Path) -> None:
    here = machine(folder, AVX2, V3)
    here.path(V3).write_bytes(b"no library" + hashlib.sha256(b"no library").digest())
    assert f"they cannot be loaded ({here.path(V3)}: " in str(library.missing(here))


@pytest.mark.parametrize(
    ("reason", "has_compiler", "outcome"),
    [
        (f"they were not built: {BUILD}", True, pytest.fail),
        (f"they were not built: {BUILD}", False, pytest.skip),
        ("this processor is older than x86-64-v3 (AVX2)", True, pytest.skip),
    ],
)
def test_tests_of_kernels_fail_where_only_the_build_is_missing(
    reason: str, has_compiler: bool, outcome: Any
) -> None:
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
        skip_or_fail(reason, has_compiler)
    assert caught.type is outcome.Exception
    assert reason in str(caught.value)


def test_memory_that_runs_out_is_an_exception() -> None:
    def foretoken_sample() -> None: ...

    library.check(0, foretoken_sample, ())
    with pytest.raises(MemoryError, match="foretoken_sample could not allocate"):
        library.check(2, foretoken_sample, ())


def results(folder: Path) -> list[Tensor]:
    """Logits, tokens and verdicts by the library that is used."""
    model, ops = load_model(folder, device="cpu", backend="native"), get_backend("native")
    assert model.runs_in_kernels
    text = list(range(3, 25))
    seen = walk(model, [text, text[::-1]], 1, 16, fill=torch.nan)
    rows = [row for rows in seen for _, row in sorted(rows.items())]
    random = torch.Generator().manual_seed(2)
    raw = torch.randn(40, 3001, generator=random) * 3
    params, slot = (
        make_params(40, [0.0, 0.7, 1.0, 1.0, 1.3] * 8, top_p=[1.0, 0.9] * 20),
        torch.arange(40),
    )
    processed = ops.process_logits(Rows(raw, params, slot))
    zero, cache = torch.zeros(40).long(), DraftCache.empty(40, 1, 3001, torch.float32, CPU)
    tokens = ops.draft(Rows(raw, params, slot), Noise(slot, zero, DRAFT), cache)
    block = DraftBlock(tokens[:10, None], torch.ones(10).long(), cache, torch.ones(10).bool())
    verdict = ops.verify(VerifyBatch(raw[:20].flip(0), params, slot[:10], slot[:10], block))
    halves = [
        ops.sample(Rows(raw.to(dtype), params, slot), Noise(slot, zero, TARGET, fp64=True))
        for dtype in (torch.bfloat16, torch.float16)
    ]
    found = [torch.stack(rows), processed, cache.lse_SK, cache.threshold_SK, tokens, *halves]
    return [*found, verdict.token_BK1, verdict.n_accept_B]


@needs_kernels
def test_every_instruction_set_gives_the_same(tmp_path: Path) -> None:
    folder = families.save_model(tmp_path, "qwen3", {"head_dim": 16, "intermediate_size": 53})
    found = []
    for variant in built_variants():
        with use_library(variant):
            found.append(results(folder))
    for ours, *others in zip(*found, strict=True):
        for other in others:
            if ours.dtype is torch.int64:
                assert torch.equal(ours, other)
            else:
                torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)


def accepted(key: int, position: int, rates: list[float], fp64: bool) -> int:
    """Drafts that SYNTHETIC accepts, of as many as there are rates."""
    params = replace(make_params(1, rule=Rule.SYNTHETIC), key_S=torch.tensor([key]))
    drafts, zero = drafts_of([[0] * len(rates)]), torch.zeros(1, dtype=torch.int64)
    rows_NV, rate_K = torch.zeros(len(rates) + 1, 3), torch.tensor(rates, dtype=torch.float64)
    batch = VerifyBatch(rows_NV, params, zero, zero + position, drafts, synthetic_rate_K=rate_K)
    verdict = get_backend("native").verify(batch._replace(fp64_noise=fp64))
    return int(verdict.n_accept_B)


@needs_kernels
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 9), st.integers(1, 5)),
        min_size=1,
        max_size=8,
    )
)
def test_uniforms_are_the_bits_of_the_definition(rows: list[tuple[int, int, int]]) -> None:
    """Seen through the rates at which SYNTHETIC begins to accept."""
    for (key, position, num), fp64 in itertools.product(rows, (False, True)):
        uniform_K = [
            reference.uniform_of(0, key, position + i, i, Stream.ACCEPT, fp64) for i in range(num)
        ]
        above = [min(1.0, u * (1 + 1e-13)) for u in uniform_K]
        assert accepted(key, position, above, fp64) == num
        for i, u in enumerate(uniform_K):
            below = [*above[:i], u * (1 - 1e-13), *above[i + 1 :]]
            assert accepted(key, position, below, fp64) == i
