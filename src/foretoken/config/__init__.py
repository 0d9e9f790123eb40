"""Options of the engine and of speculation: names, defaults, bounds. No torch.

Every default is set and documented here, and every value is checked here. Only this package reads
the environment.
"""

from foretoken.config.checks import check_choice, check_int, check_number, from_environment, plain
from foretoken.config.engine import BLOCK_SIZES, DTYPES, HOST_CACHE_GIB, EngineConfig

from foretoken.config.speculative import (  # isort: skip
    AUTO, HYBRID, LOSSLESS_METHODS, MAX_SPECULATIVE_TOKENS, REJECTION_SAMPLE_METHODS,
    SpeculativeConfig, check_synthetic, errors_of_drafter,
)  # fmt: skip

__all__ = [
    "AUTO", "BLOCK_SIZES", "DTYPES", "HOST_CACHE_GIB", "HYBRID", "LOSSLESS_METHODS",
    "MAX_SPECULATIVE_TOKENS", "REJECTION_SAMPLE_METHODS", "EngineConfig", "SpeculativeConfig",
    "check_choice", "check_int", "check_number", "check_synthetic", "errors_of_drafter",
    "from_environment", "plain",
]  # fmt: skip
