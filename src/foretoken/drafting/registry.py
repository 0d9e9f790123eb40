"""Names of drafters. A new drafter is one file in this folder and one line in `DRAFTERS`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from foretoken.config import SpeculativeConfig, check_choice
from foretoken.drafting.base import Drafter, DrafterSetup
from foretoken.errors import ConfigError

DRAFTERS = {
    "draft_model": "foretoken.drafting.draft_model:DraftModel",
    "ngram": "foretoken.drafting.ngram:NGram",
}


_OPTIONAL = ("model", "revision", "prompt_lookup_min", "prompt_lookup_max", "draft_sample_method")


def find_drafter(speculation: SpeculativeConfig) -> type[Drafter]:
    """The class that `method` names; `ConfigError` for a name or an option it does not know."""
    method = speculation.method or ""
    check_choice("speculative_config.method", method, tuple(DRAFTERS))
    module, name = DRAFTERS[method].split(":")
    found = cast(type[Drafter], getattr(import_module(module), name))
    for option in _OPTIONAL:
        value = getattr(speculation, option)
        if value is not None and option not in found.options:
            raise ConfigError(
                f"speculative_config.{option}",
                value,
                f"left out with method `{method}`",
                f"`{method}` takes {', '.join(sorted(found.options)) or 'no options'}.",
            )
    return found


def build_drafter(setup: DrafterSetup) -> Drafter:
    """Build the drafter that `setup.speculation` describes."""
    return find_drafter(setup.speculation)(setup)
