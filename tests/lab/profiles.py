"""A profile that tests of `foretoken plan` share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretoken.engine.pace import PromptCosts
from foretoken.lab.plan.profile import EngineLimits, Profile
from tests.project.source import ROOT

SHAPES = ROOT / "benchmarks" / "shapes"
LIMITS = EngineLimits(8, 64, 512, 16, 200)
PROFILE = Profile(
    "a-target", "draft_model", "measured", (0, 1, 4), (1, 8),
    rest=((4e-3, 4.5e-3, 5e-3), (6e-3, 12e-3, 30e-3)),
    draft=((0.0, 0.5e-3, 2e-3), (0.0, 0.7e-3, 3e-3)),
    context=(1e-6, 1e-6, 1e-6), missed=2e-6,
    prompts=PromptCosts((1, 64, 512), (4e-3, 8e-3, 40e-3), 1e-8),
    limits=LIMITS, block_bytes=1 << 20, memory={"weights": 1 << 28},
    acceptance=(0.8, 0.6, 0.4, 0.3),
)  # fmt: skip


def changed(**values: Any) -> Profile:
    return replace(PROFILE, **values)
