"""`Replicas` by Ray Serve: one handle for each model.

Charter: calls through a handle, and Ray's errors as ours.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from foretoken.serve.errors import UnavailableError
from foretoken.serve.fleet.call import Call
from foretoken.serve.fleet.front import Piece, ReplicaDiedError

_DIED = (
    "The replica that answered has died, and another one is being started. Nothing is known to be "
    "wrong with the request: send it again."
)


class RayReplicas:
    """All replicas of one model, behind a handle."""

    def __init__(self, names: Sequence[str], handle: DeploymentHandle) -> None:
        self.names, self._handle = names, handle
        # A message by gRPC takes 0.15 ms of all cores, through Ray's object store 0.48 ms.
        self._streaming = handle.options(method_name="answer", stream=True, _by_reference=False)

    async def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """As `Replicas.answer`: a request that has left is sent to no other replica."""
        response = self._streaming.remote(call)
        is_over = False
        try:
            async for piece in response:
                yield piece
            is_over = True
        except RayActorError:
            is_over = True
            raise ReplicaDiedError(_DIED) from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            is_over = True
            raise UnavailableError(f"No replica can take the request: {error}") from None
        except (RayTaskError, RayError, RayServeException) as error:
            is_over = True
            raise UnavailableError("The replica failed by an error: its log has it.") from error
        finally:
            if not is_over:
                response.cancel()

    async def ask(self, what: str, seconds: float) -> list[Any]:
        """As `Replicas.ask`."""
        try:
            asked = self._handle.broadcast(what)
            found = await asked.results_async(timeout_s=seconds, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return []
        return [each for each in found if not isinstance(each, BaseException)]
