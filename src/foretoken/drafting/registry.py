"""Names of drafters. A new drafter is one file in this folder and one line in `DRAFTERS`."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import cast

from foretoken.config import HYBRID, SpeculativeConfig, check_choice, errors_of_drafter
from foretoken.drafting.base import Drafter
from foretoken.errors import ConfigError
from foretoken.foreign import SPECULATIVE_METHODS

DRAFTERS = {
    "draft_model": "foretoken.drafting.stacks:DraftModel",
    "draft_text": "foretoken.drafting.draft_text:DraftText",
    "eagle3": "foretoken.drafting.stacks:Eagle3",
    "forced": "foretoken.drafting.forced:Forced",
    "ngram": "foretoken.drafting.ngram:NGram",
    "prediction": "foretoken.drafting.forced:Prediction",
    "suffix": "foretoken.drafting.suffix:Suffix",
}

ON_DEVICE = {"draft_model": "foretoken.drafting.stacks:LockstepDraftModel"}
"""Drafters that have a different class on an asynchronous device."""

ON_HOST_ALONE = {
    name: f"`{name}` reads tokens on the host, too late for a GPU: use `ngram` there."
    for name in ("draft_text", "forced", "prediction", "suffix")
}
"""Drafters that cannot run on an asynchronous device, and the remedy."""

_COMMON_OPTIONS = (  # prefixes of options that every drafter accepts
    "method", "num_speculative_tokens", "max_speculative_tokens", "rejection_sample_method",
    "synthetic_",
)  # fmt: skip


def find_drafter(speculation: SpeculativeConfig, *, on_host: bool = True) -> type[Drafter]:
    """The class for these options: that of `method`, or `Several` if there are `drafters`;
    `ConfigError` if `method` is unknown, cannot run here, or does not read a set option."""
    if speculation.drafters is not None:
        for i, member in enumerate(speculation.members.values()):
            with errors_of_drafter(i):
                find_drafter(member, on_host=on_host)
        return _import_class("foretoken.drafting.several:Several")
    method = speculation.method or ""
    classes, remedy = DRAFTERS, ""
    if not on_host:
        on_device = DRAFTERS | ON_DEVICE
        classes = {name: place for name, place in on_device.items() if name not in ON_HOST_ALONE}
        remedy = ON_HOST_ALONE.get(method, "")
    if method == HYBRID:
        example = '[{"method": "ngram"}, {"method": "draft_model"}]'
        remedy = f"It needs `drafters`, for example {example}."
    vllm_remedy = SPECULATIVE_METHODS.get("mtp" if method.endswith("_mtp") else method)
    if vllm_remedy is not None:  # a method of vLLM: its remedy helps more than a similar name
        bound = f"one of {', '.join(classes)}"
        raise ConfigError("speculative_config.method", method, bound, vllm_remedy)
    check_choice("speculative_config.method", method, tuple(classes), remedy)
    drafter = _import_class(classes[method])
    for field in fields(speculation):
        option, value = field.name, getattr(speculation, field.name)
        is_allowed = option.startswith(_COMMON_OPTIONS) or option in drafter.options
        if value != field.default and not is_allowed:
            bound = f"left out with method `{method}`"
            remedy = f"`{method}` takes {', '.join(sorted(drafter.options)) or 'no options'}."
            raise ConfigError(f"speculative_config.{option}", value, bound, remedy)
    return drafter


def _import_class(place: str) -> type[Drafter]:
    module, name = place.split(":")
    return cast(type[Drafter], getattr(import_module(module), name))
