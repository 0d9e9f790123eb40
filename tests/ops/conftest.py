"""Settings that tests of ops share."""

from __future__ import annotations

import pytest

from foretoken.ops import Backend, get_backend
from tests.support.cases import host_backends


@pytest.fixture(params=host_backends())
def ops(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)
