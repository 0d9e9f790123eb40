"""Options of `foretoken audit`: names, defaults, bounds. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.config import check_int, check_number
from foretoken.config.checks import check_outputs
from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What `foretoken audit` examines, and where it writes.

    Attributes:
        callable: `module:function`, a function verifier(p, q, drafts, rng) that returns tokens.
        url: an OpenAI-compatible server of the model that `model` names, such as
            `http://localhost:8000/v1`.
        api_key: the server's API key, sent as a bearer token.
        gallery: audit the published bugs; each of them must be refuted and named.
        draws: upper bound of the number of outcomes of each subject; None: 60,000, for an engine
            12,000 tokens, for a server 6,000 texts.
        alpha: upper bound of the probability that a lossless subject is refuted.
        seed: seed of everything that is drawn.
        output: a file for the results: *.json, *.csv, *.svg or *.html.
    """

    callable: str | None = None
    url: str | None = None
    api_key: str | None = None
    gallery: bool = False
    draws: int | None = None
    alpha: float = 1e-3
    seed: int = 0
    output: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        subjects = [name for name in ("callable", "url", "gallery") if getattr(self, name)]
        if len(subjects) > 1:
            bound = f"left out with --{subjects[0]}"
            raise ConfigError(
                subjects[1], getattr(self, subjects[1]), bound, "Audit one at a time."
            )
        if self.draws is not None:
            check_int("draws", self.draws, 1)
        if self.api_key is not None and self.url is None:
            raise ConfigError("api_key", "...", "left out without --url")
        check_number("alpha", self.alpha, 1e-12, 0.5)
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_outputs(self.output)

    def parts(self, model: str | None, backend: str | None) -> tuple[str, ...]:
        """The kinds of subjects to audit; `model` and `backend` are options of the engine."""
        if self.callable is not None:
            return ("callable",)
        if self.url is not None:
            return ("server",)
        if self.gallery:
            return ("gallery",)
        if model is not None:
            return ("engine",)
        return ("operators",) if backend is not None else ("operators", "engine")
