"""What the clients' modules share; it imports nothing of ours, which their environments lack."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny-python"
MESSAGES: Any = [{"role": "user", "content": "def area(width, height):"}]
PROMPT = "def fibonacci(n):\n"
GREEDY: Any = {"model": MODEL, "max_tokens": 40, "temperature": 0}
FORCED: Any = {"model": MODEL, "max_tokens": 200, "seed": 3}
NO_CALL = {"28": -4}
"""A bias against `<`, with which calls begin: the embedded model repeats calls that it has seen."""
Check = Callable[[str], dict[str, Any]]


class Area(BaseModel):
    """What answers are bound to: small enough that no model can write past `max_tokens`."""

    model_config = ConfigDict(extra="forbid")

    w: Annotated[int, Field(ge=0, le=99)]
    of: Literal["a", "b"]


def must(holds: bool, what: str) -> None:
    """Fail by name."""
    if not holds:
        raise AssertionError(f"not as expected: {what}")


def run(*checks: Check) -> None:
    """Try each check on the server that the command line names, and print what came of it.

    One line of JSON for each: `check`, `seconds`, and `found` or `error`.
    """
    (url,) = sys.argv[1:]
    for check in checks:
        name = check.__name__.replace("_", " ")
        start = time.perf_counter()
        try:
            told: dict[str, Any] = {"found": check(url)}
        except Exception as error:  # whatever a client raises
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"[:500]}
        told |= {"check": name, "seconds": round(time.perf_counter() - start, 2)}
        print(json.dumps(told), flush=True)
