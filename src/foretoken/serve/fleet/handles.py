"""`Replicas` over Ray Serve: one handle for each model.

Charter: calls through a handle, and Ray's errors as ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from foretoken.serve.errors import UnavailableError
from foretoken.serve.fleet.call import MESSAGE_BYTES, Call
from foretoken.serve.fleet.front import Piece, ReplicaDiedError

_log = logging.getLogger(__name__)
_DIED = (
    "The replica that answered has died, and another one is being started. Nothing is known to be "
    "wrong with the request: send it again."
)


class RayReplicas:
    """All replicas of one model, called through a handle."""

    def __init__(self, names: Sequence[str], handle: DeploymentHandle) -> None:
        self.names, self._handle = names, handle
        # A message by gRPC takes a third of the CPU time of one through Ray's object store, but
        # may have at most 4 MiB.
        self._by_store = handle.options(method_name="answer", stream=True)
        self._by_grpc = handle.options(method_name="answer", stream=True, _by_reference=False)

    async def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """As `Replicas.answer`; a request once sent is not sent to another replica."""
        handle = self._by_grpc if len(call.body) <= MESSAGE_BYTES else self._by_store
        response = handle.remote(call)
        is_over = False
        try:
            async for piece in response:
                yield piece
            is_over = True
        except RayActorError:
            is_over = True
            raise ReplicaDiedError(_DIED) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ReplicaDiedError(_DIED) from None  # the replica's task was cancelled, not ours
        except (BackPressureError, DeploymentUnavailableError) as error:
            is_over = True
            raise UnavailableError(f"No replica can take the request: {error}") from None
        except Exception as error:  # raised in the replica; Ray passes it on
            is_over = True
            _log.error("a replica failed by %s", type(error).__name__)
            _log.debug("what it failed by", exc_info=error)
            raise UnavailableError("The replica failed by an error: its log has it.") from None
        finally:
            if not is_over:
                response.cancel()

    async def ask(self, what: str, seconds: float) -> list[Any]:
        """As `Replicas.ask`."""
        try:
            async with asyncio.timeout(seconds):
                # `results_async` gives all results or none: one slow replica would hide the others.
                found = await self._handle.broadcast(what)._fetch_replica_results_async()
        except (TimeoutError, RayError, RayServeException, RuntimeError):
            return []
        results = [asyncio.ensure_future(each.get_async()) for each in found]
        if not results:
            return []
        done, late = await asyncio.wait(results, timeout=seconds)
        for task in late:
            task.cancel()
        return [task.result() for task in done if not task.cancelled() and not task.exception()]
