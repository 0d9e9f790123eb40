"""Settings that every test shares."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tokenizers warn when a process forks after they ran in parallel; tests start subprocesses.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing from threads, and on a busy machine every parallel region waits for the
# scheduler: the model tests took 24 s with one thread and 260 s with two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A name that is no model is not looked up on the network; tests of the hub serve their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A process that a script starts in its background ignores Ctrl-C, and so does all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support import interpreter as interpreter

settings.register_profile(
    "foretoken",
    deadline=None,  # a shared machine: time limits fail by chance
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("foretoken")


# Files that take longest, 15 to 45 s of a core, in order: the last to begin decides when all ends.
LONGEST = (
    "ops/test_law.py", "serve/test_page_browser.py", "ops/test_triton.py",
    "ops/test_triton_head.py", "ops/test_triton_attention.py", "engine/test_structured.py",
    "engine/test_device_slots.py", "ops/test_oracle.py", "drafting/test_law.py",
    "lab/test_audit_engine.py", "cli/test_audit.py", "engine/test_eagle3.py",
    "ops/test_triton_decoder.py", "engine/test_compile_ahead.py",
    "ops/test_law_noise.py", "serve/test_lifetime.py", "ops/test_triton_types.py",
    "project/test_trial.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; what `trial.txt` names is marked."""
    files = Path(__file__).parent
    place = {files / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    lines = (files / "trial.txt").read_text(encoding="utf-8").splitlines()
    rare = re.compile("|".join(line for line in lines if line and not line.startswith("#")))
    for item in items:
        if rare.fullmatch(item.nodeid.removeprefix("tests/")):
            item.add_marker("trial")


@pytest.fixture(scope="session")
def kernels() -> None:
    from tests.support.kernels import require_kernels

    require_kernels()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that the test starts have imported PyTorch and Transformers before."""
    from tests.support.forked import Forked

    monkeypatch.setattr(subprocess, "Popen", Forked)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that tests compare does not depend on the terminal they run in."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a grammar may take longer than a server would wait for."""
    if "foretoken.sampling.grammar" in sys.modules:
        monkeypatch.setattr("foretoken.sampling.grammar.COMPILE_SECONDS", 300)


@pytest.fixture(scope="module")
def known_memory() -> Iterator[None]:
    """Memory reads 40 GB/s: every results file would measure it, for a second and a half."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.lab.results.read_bandwidth", lambda device="cpu": 40.0)
        yield


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.checkpoints import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights, slightly moved: drafts are sometimes accepted, sometimes not."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.support.checkpoints import save_checkpoint

    folder = save_checkpoint(tmp_path_factory.mktemp("draft"), seed=1)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: w + 0.03 * torch.randn(w.shape, generator=generator)
        for name, w in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
