"""What the machine has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int | None:
    """Memory of the machine or of the container, whichever is less; None where unknown."""
    limits = []
    with suppress(AttributeError, OSError, ValueError):  # not a POSIX system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such control group, or "max"
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min((limit for limit in limits if limit > 0), default=None)
