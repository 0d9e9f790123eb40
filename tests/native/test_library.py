"""Which library is loaded, what is said without one, and that all of them compute the same."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable
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
    checks,
    get_backend,
)
from foretoken.ops.backends.native import build, library
from foretoken.ops.backends.reference import noise as reference
from tests.models import families
from tests.models.walk import walk
from tests.support.cases import drafts_of, make_params
from tests.support.kernels import needs_kernels, require_kernels

V3, V4 = "x86-64-v3", "x86-64-v4"
CPU = torch.device("cpu")
LOAD = library.load.__wrapped__  # afresh, whatever was loaded before
Machine = Callable[[str, set[str], tuple[str, ...]], tuple[str | None, str]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What `missing` and `load` decide on a machine of these features and libraries."""

    monkeypatch.delenv(library.VARIANT, raising=False)

    def variant(name: str, features: set[str], built: tuple[str, ...]) -> tuple[str | None, str]:
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(features)}\nflags\t\t: x\n")
        monkeypatch.setattr(library, "_CPUINFO", info)
        monkeypatch.setattr(library.platform, "machine", lambda: name)
        monkeypatch.setattr(build, "LIBRARIES", tmp_path)
        for found in built:
            build.library_path(found).touch()
        chosen: tuple[str | None, str] = library._variant.__wrapped__()
        return chosen

    return variant


def test_the_most_capable_variant_is_chosen(machine: Machine) -> None:
    both = library._NEEDS[V3] | library._NEEDS[V4]
    assert machine("x86_64", both, (V3,)) == (V3, "")
    assert machine("x86_64", both, (V3, V4)) == (V4, "")
    assert machine("x86_64", library._NEEDS[V3], ()) == (V3, "")
    assert machine("x86_64", library._NEEDS[V3] | {"avx512f"}, ()) == (V3, "")
    every = (V3, f"{V3}-vnni", V4, f"{V4}-vnni")
    vnni = {f"{V4}-vnni": {"avx512_vnni", "avx_vnni"}, V4: {"avx_vnni"}}
    for chosen, added in vnni.items():
        assert machine("x86_64", both | added, every) == (chosen, "")
    assert machine("x86_64", library._NEEDS[V3] | {"avx_vnni"}, every) == (f"{V3}-vnni", "")
    assert machine("x86_64", library._NEEDS[V3] | {"avx512_vnni"}, every) == (V3, "")


def test_the_environment_names_the_variant(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = library._NEEDS[V3] | library._NEEDS[V4]
    monkeypatch.setenv(library.VARIANT, V3)
    assert machine("x86_64", both, (V3, V4)) == (V3, "")
    monkeypatch.setenv(library.VARIANT, V4)
    assert machine("x86_64", both, (V3, V4)) == (V4, "")
    with pytest.raises(ConfigError, match=f"`{library.VARIANT}` is '{V4}': must be one of {V3}\\."):
        machine("x86_64", library._NEEDS[V3], (V3, V4))


def test_other_architectures_need_no_features(
    machine: Machine,
) -> None:
    assert machine("aarch64", set(), ("aarch64",)) == ("aarch64", "")


@pytest.mark.parametrize(
    ("name", "features", "reason"),
    [
        ("riscv64", library._NEEDS[V3], "there are none for `riscv64`"),
        ("x86_64", {"avx2"}, "this processor is older than x86-64-v3 (AVX2)"),
        (
            "x86_64",
            library._NEEDS[V3],
            "they were not built: run `python -m foretoken.ops.backends.native.build` (needs g++)",
        ),
    ],
)
def test_why_there_are_none(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    features: set[str],
    reason: str,
) -> None:
    found = machine(name, features, ())
    assert found == (None, reason)
    monkeypatch.setattr(library, "_variant", lambda: found)
    assert library.missing() == reason
    with pytest.raises(OSError, match="there are no native kernels: ") as caught:
        LOAD()
    assert reason in str(caught.value)


@needs_kernels
@pytest.mark.parametrize("damage", ["empty", "half", "last bytes", "one bit"])
def test_a_damaged_library_is_found_before_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The system's loader does not notice: the first call into missing pages is a SIGBUS."""
    variant, _ = library._variant()
    assert variant is not None
    content = build.library_path(variant).read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    damaged = {
        "empty": b"", "half": content[:half], "last bytes": content[:-40], "one bit": flipped
    }[damage]  # fmt: skip
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    path = build.library_path(variant)
    path.write_bytes(damaged)
    monkeypatch.setattr(library, "load", LOAD)
    reason = library.missing()
    assert reason is not None
    assert reason.startswith(f"they cannot be loaded ({path} is damaged: ")
    assert reason.endswith("run `python -m foretoken.ops.backends.native.build` (needs g++)")
    path.write_bytes(content)
    assert library.missing() is None


def test_a_library_of_another_system_is_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine("x86_64", library._NEEDS[V3], (V3,))
    path = build.library_path(V3)
    path.write_bytes(b"no library" + hashlib.sha256(b"no library").digest())
    monkeypatch.setattr(library, "_variant", lambda: found)
    monkeypatch.setattr(library, "load", LOAD)
    assert f"they cannot be loaded ({path}: " in str(library.missing())


NOT_BUILT = "they were not built: run `python -m foretoken.ops.backends.native.build`"


@pytest.mark.parametrize(
    ("reason", "compiler", "outcome"),
    [
        (
            "they were not built: run `python -m foretoken.ops.backends.native.build`",
            "g++",
            pytest.fail,
        ),
        (
            "they were not built: run `python -m foretoken.ops.backends.native.build`",
            "clang++",
            pytest.fail,
        ),
        (
            "they were not built: run `python -m foretoken.ops.backends.native.build`",
            None,
            pytest.skip,
        ),
        ("this processor is older than x86-64-v3 (AVX2)", "g++", pytest.skip),
    ],
)
def test_tests_of_kernels_fail_where_only_the_build_is_missing(
    monkeypatch: pytest.MonkeyPatch, reason: str, compiler: str | None, outcome: Any
) -> None:
    monkeypatch.setattr(library, "missing", lambda: reason)
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
        require_kernels()
    assert caught.type is outcome.Exception
    assert reason in str(caught.value)


def test_memory_that_runs_out_is_an_exception() -> None:
    def foretoken_sample() -> None: ...

    library.check(0, foretoken_sample, ())
    with pytest.raises(MemoryError, match="foretoken_sample could not allocate"):
        library.check(2, foretoken_sample, ())


def results(folder: Path, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Logits, tokens and verdicts by one library."""
    monkeypatch.setattr(library, "load", lambda: kernels)
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
def test_every_instruction_set_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [
        variant
        for variant in build.VARIANTS[build.platform.machine()]
        if library._NEEDS.get(variant, set()) <= library._cpu_features()
        and build.library_path(variant).exists()
    ]
    if len(variants) < 2:
        pytest.skip(f"this machine runs {variants} only")
    folder = families.save_model(tmp_path, "qwen3", {"head_dim": 16, "intermediate_size": 53})
    found = []
    for variant in variants:
        monkeypatch.setattr(library, "_variant", lambda chosen=variant: (chosen, ""))
        kernels = LOAD()
        assert kernels._name.endswith(f"{variant}.so")
        found.append(results(folder, kernels, monkeypatch))
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
    verdict = get_backend("native").verify(
        VerifyBatch(
            torch.zeros(len(rates) + 1, 3),
            params,
            zero,
            zero + position,
            drafts,
            synthetic_rate_K=torch.tensor(rates, dtype=torch.float64),
            fp64_noise=fp64,
        )
    )
    return int(verdict.n_accept_B)


@needs_kernels
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.integers(0, 2**32 - 9),
            st.integers(1, 5),
        ),
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


@needs_kernels
def test_a_rule_that_the_kernels_do_not_state_fails_loudly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ops/types.py` may have one more; it must not be decided by another."""
    monkeypatch.setattr(checks, "RULES", checks.RULES | {9})
    params = replace(make_params(2, rule=[0, 9]), rules=frozenset({0, 9}))  # type: ignore[arg-type]
    slot_B = torch.arange(2)
    with pytest.raises(NotImplementedError, match="verify lacks a rule"):
        get_backend("native").verify(
            VerifyBatch(torch.zeros(2, 3), params, slot_B, slot_B, drafts_of([[], []]))
        )
