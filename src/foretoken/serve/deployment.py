"""A fleet as an application of Ray Serve, for existing clusters: `serve deploy` calls `build`.

`fleet/config.py` defines a fleet. `fleet/command.py` deploys the same engines for our own server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken import __version__
from foretoken.config import from_environment
from foretoken.serve.errors import UnavailableError
from foretoken.serve.fleet.call import MESSAGE_BYTES, Call
from foretoken.serve.fleet.config import INGRESS, Fleet, FleetModel
from foretoken.serve.fleet.front import Front, Piece, ReplicaDiedError
from foretoken.serve.fleet.needs import Needs, check_cluster, compute_needs
from foretoken.serve.fleet.replica import Replica, without_causes
from foretoken.serve.logs import configure_logging
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import Lifetime

MAX_STARTS = 3  # failed starts of replicas; then Ray Serve gives the deployment up
ROUTER = "foretoken.serve.fleet.router:PrefixRouter"
_UNBOUNDED = 100_000  # the engine refuses instead (`max_num_waiting`), in OpenAI's form
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 10.0  # after three failures a replica is replaced
_log = logging.getLogger(__name__)
_DIED = (
    "The replica that answered has died, and another one is being started. Nothing is known to be "
    "wrong with the request: send it again."
)
_QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a file for `serve deploy`: engines, and an ingress that forwards to them.

    If the file has no key, FORETOKEN_API_KEY of the environment of the cluster's processes is the
    key. Without both, clients need no key.

    Raises:
        ConfigError: an option is unknown or out of bounds, or the cluster lacks resources.
    """
    with without_causes():
        fleet = Fleet.parse(args)
        needs = cluster_needs(fleet)
    if not fleet.server.keys and (key := from_environment("FORETOKEN_API_KEY")):
        fleet = replace(fleet, server=replace(fleet.server, api_key=key))
    engines = [
        engine_deployment(model, fleet.server, replica_needs)
        for model, replica_needs in zip(fleet.models, needs, strict=True)
    ]
    ingress = serve.deployment(Ingress).options(
        name=INGRESS,
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=fleet.server.request_timeout,  # streams pass through here
        logging_config=_QUIET,
    )
    return ingress.bind(fleet, *engines)


@serve.ingress()
class Ingress:
    """The application between Ray Serve's proxies and the `engines` of the fleet's models."""

    def __init__(self, fleet: Fleet, *engines: DeploymentHandle) -> None:
        configure_logging(fleet.server.log_level)
        if not fleet.server.keys:
            _log.warning("Whoever reaches the proxies can use this server: there is no api_key.")
        models = [
            RayReplicas(model.names, handle)
            for model, handle in zip(fleet.models, engines, strict=True)
        ]
        self._front = Front(fleet, models, Lifetime(fleet.server, lambda: None))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application for Ray Serve, without `x-request-id`, which the proxies add."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_unnamed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = [each for each in message["headers"] if each[0] != b"x-request-id"]
                    message = {**message, "headers": headers}
                await send(message)

            await self._front.app(scope, receive, send_unnamed)

        return app


def engine_deployment(model: FleetModel, server: ServeOptions, needs: Needs) -> serve.Application:
    """The Ray deployment of one model: a replica has one engine, and the resources in `needs`."""
    scale, config = model.scale, model.engine
    config = replace(config, device="cuda" if needs.gpus else "cpu")
    if not needs.gpus and config.threads is None:
        config = replace(config, threads=needs.threads)
    count = scale.replicas or 1
    replica_count: dict[str, Any] = {"num_replicas": count}
    if scale.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=count,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=scale.target_requests or config.max_num_seqs,
        )
        replica_count = {"num_replicas": "auto", "autoscaling_config": scaling}
    actor_options = {"num_cpus": needs.cpus, "num_gpus": needs.gpus}
    deployment = serve.deployment(Replica).options(
        name=model.deployment,
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options=actor_options | ({"memory": needs.memory} if needs.memory else {}),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        # For a replica that scaling removes. A front that ends has drained all replicas before.
        graceful_shutdown_timeout_s=server.request_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=MAX_STARTS,
        logging_config=_QUIET,
        **replica_count,
    )
    replica_server = replace(
        server, served_model_name=model.names, api_key=None, allowed_origins=(), host="0.0.0.0",
        allowed_hosts=(), ssl_keyfile=None, ssl_certfile=None, ssl_ca_certs=None, ssl_cert_reqs=0,
    )  # fmt: skip
    return deployment.bind(config, replica_server, __version__)


def cluster_needs(fleet: Fleet) -> list[Needs]:
    """What a replica of each model needs; `ConfigError` for wrong options or lack of resources."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    needs = [compute_needs(model, has_gpus=has_gpus) for model in fleet.models]
    if not fleet.grows:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        requested = {
            model.names[0]: (model.scale.replicas or 1, replica_needs)
            for model, replica_needs in zip(fleet.models, needs, strict=True)
        }
        check_cluster(requested, nodes)
    return needs


class RayReplicas:
    """All replicas of one model, called through a handle."""

    def __init__(self, names: Sequence[str], handle: DeploymentHandle) -> None:
        self.names, self._handle = names, handle
        # A message by gRPC takes a third of the CPU time of one through Ray's object store, but can
        # have at most 4 MiB.
        self._by_store = handle.options(method_name="answer", stream=True)
        self._by_grpc = handle.options(method_name="answer", stream=True, _by_reference=False)

    async def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Have one replica answer; see `Replicas.answer`."""
        handle = self._by_grpc if len(call.body) <= MESSAGE_BYTES else self._by_store
        response = handle.remote(call)
        try:
            async for piece in response:
                yield piece
        except RayActorError:
            raise ReplicaDiedError(_DIED) from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise UnavailableError(f"No replica can take the request: {error}") from None
        except Exception as error:  # raised in the replica; Ray passes it on
            _log.error("a replica failed by %s", type(error).__name__)
            _log.debug("details of the failure", exc_info=error)
            raise UnavailableError("The replica failed; its log has the error.") from None
        except BaseException as error:
            response.cancel()
            task = asyncio.current_task()
            if not isinstance(error, asyncio.CancelledError) or task is None or task.cancelling():
                raise  # this generator or its task ends early
            raise ReplicaDiedError(_DIED) from None  # the replica's task was cancelled

    async def call_all(self, method: str, seconds: float) -> list[Any]:
        try:
            async with asyncio.timeout(seconds):
                # `results_async` gives all results or none: one slow replica would hide the others.
                responses = await self._handle.broadcast(method)._fetch_replica_results_async()
        except (TimeoutError, RayError, RayServeException, RuntimeError):
            return []
        results = [asyncio.ensure_future(response.get_async()) for response in responses]
        if not results:
            return []
        done, unfinished = await asyncio.wait(results, timeout=seconds)
        for task in unfinished:
            task.cancel()
        return [task.result() for task in done if not task.cancelled() and not task.exception()]
