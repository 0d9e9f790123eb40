"""Options of `foretoken serve` beside the engine's. No fastapi."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.config import EngineConfig, check_int
from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and to whom a model is served.

    Attributes:
        host: address to listen on; `0.0.0.0` is every network that the machine has.
        port: its port; 0 takes one that is free.
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        served_model_name: names by which requests may call the model, and answers by the first of
            them; by default the one that `model` has.
        allow_synthetic: let the rule `synthetic` decide what is accepted, for measurements: no
            model stands behind such a text.
        chat_template: a Jinja template, or the name of one of the tokenizer's; None: its own.
        tool_call_parser: how the model writes tool calls: `hermes`, `llama3_json`, `mistral`,
            `none` (no tools are taken), or `auto`: as its template shows.
        reasoning_parser: `think` reads `<think>` and `</think>`, `none` leaves them in the text,
            `auto`: as its template shows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: tuple[str, ...] = ()
    allow_synthetic: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        for name in ("host", "api_key"):
            if getattr(self, name) == "":
                raise ConfigError(name, "", "left out, or not empty")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name", "", "not empty")

    def check_engine(self, config: EngineConfig) -> None:
        """Raise `ConfigError` for an engine whose texts would be meaningless unnoticed."""
        speculation = config.speculative_config
        rule = speculation.rejection_sample_method if speculation else None
        if rule == "synthetic" and not self.allow_synthetic:
            where, bound = "speculative_config.rejection_sample_method", "a lossless rule"
            raise ConfigError(where, rule, bound, "--allow-synthetic serves such texts.")
