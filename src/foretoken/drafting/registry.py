"""Names of drafters. A new drafter is one file in this folder and one line in `DRAFTERS`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from foretoken.config import check_choice
from foretoken.drafting.base import Drafter, DrafterSetup

DRAFTERS = {
    "draft_model": "foretoken.drafting.draft_model:DraftModel",
    "ngram": "foretoken.drafting.ngram:NGram",
}


def build_drafter(setup: DrafterSetup) -> Drafter:
    """Import and build the drafter that `setup.speculation.method` names."""
    method = setup.speculation.method or ""
    check_choice("speculative_config.method", method, tuple(DRAFTERS))
    module, name = DRAFTERS[method].split(":")
    return cast(Drafter, getattr(import_module(module), name)(setup))
