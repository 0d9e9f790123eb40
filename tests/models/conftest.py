"""Settings that tests of models share."""

from __future__ import annotations

import pytest

from foretoken.ops.backends.torch import stack


@pytest.fixture
def packs_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are packed for oneDNN although the tests' models are too small to gain."""
    monkeypatch.setattr(stack, "MIN_BYTES", 0)
