"""Memory: what does not fit, and what to say then. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foretoken.config.machine import machine_bytes
from foretoken.errors import EngineMemoryError, ForetokenError

REMEDY = (
    "Lower `kv_cache_gib` (or `num_blocks`), `max_num_seqs`, `max_num_batched_tokens` or "
    "`max_model_len`."
)
_GPU_REMEDY = (
    "Lower `memory_fraction`, so that the cache leaves more to steps, `max_num_batched_tokens` or "
    "`max_num_seqs`; and see that no other process takes the GPU's memory."
)
_SAID = (  # how PyTorch, its libraries and the C++ library say it, all as RuntimeError
    "alloc_failed",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "size calculation overflowed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had."""
    says_so = any(said in str(error).lower() for said in _SAID)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_so)


@contextmanager
def reserving(doing: str, remedy: str | Callable[[], str] = "") -> Iterator[None]:
    """What runs out of memory inside says so by an `EngineMemoryError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ForetokenError) or not is_out_of_memory(error):
            raise
        said = remedy if isinstance(remedy, str) else remedy()
        raise memory_error(doing, error, said) from error


def memory_error(doing: str, cause: BaseException, remedy: str = "") -> EngineMemoryError:
    """The typed form of an allocation that failed while `doing` something."""
    said = str(cause).partition(" Including non-PyTorch memory")[0].rstrip(". \n")
    remedy = remedy or (_GPU_REMEDY if "cuda" in said.lower() else REMEDY)
    error = EngineMemoryError(f"Out of memory while {doing}: {said}. {remedy}")
    error.__cause__ = cause
    return error


def check_fits(num_bytes: int) -> None:
    """Raise `EngineMemoryError` for a cache that this machine can never hold.

    Linux grants memory that it does not have, and kills the process once it is used.
    """
    limit = machine_bytes()
    if limit is not None and num_bytes > limit:
        raise EngineMemoryError(
            f"The cache asked for takes {num_bytes / 2**30:.3g} GiB, and this machine has "
            f"{limit / 2**30:.3g} GiB of memory. {REMEDY}"
        )
