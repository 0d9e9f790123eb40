"""Settings that every test shares."""

from __future__ import annotations

import os
import signal

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

settings.register_profile(
    "foretoken",
    deadline=None,  # a shared machine: time limits fail by chance
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("foretoken")


@pytest.fixture(scope="session")
def kernels() -> None:
    """Behind `needs_kernels`."""
    from tests.support.kernels import require_kernels

    require_kernels()


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that tests compare does not depend on the terminal they run in."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
