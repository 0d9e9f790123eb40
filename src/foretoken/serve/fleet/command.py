"""`foretoken serve --replicas`: Ray, the engines, and our own server in front of them.

Charter: from options to replicas that are up, what a user is told until then, and how it ends. The
front runs in this process, behind the server that one engine has, too: TLS, deadlines of
connections, signals and the drain are the same, and a request passes one process, not two.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from foretoken.errors import ConfigError, ForetokenError
from foretoken.serve.command import drafting
from foretoken.serve.deployment import STARTS, cluster_needs, engine
from foretoken.serve.fleet.config import Fleet, FleetModel, ReplicaOptions, fleet_model
from foretoken.serve.fleet.front import Front
from foretoken.serve.fleet.handles import RayReplicas
from foretoken.serve.fleet.needs import equal_part
from foretoken.serve.logs import set_up
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import Lifetime
from foretoken.serve.server import bind, check_tls, leave, serve

_STORE_BYTES = 512 * 2**20  # of messages over 100 KB: an answer with many log-probabilities
_POLL_S = 0.5
_CONNECT_S = 5.0
_MOST_MISSED = 20  # polls in a row without an answer: the cluster is lost
_REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*", re.MULTILINE)
_ROUTED = "Requests go to the replica that has seen most of their prompt."
Say = Callable[[str], None]


class FleetError(ForetokenError):
    """Replicas do not serve: they failed when they started, or the cluster is lost."""


def start(
    given: Mapping[str, Any],
    scale: ReplicaOptions,
    options: ServeOptions,
    address: str | None,
    say: Say,
) -> None:
    """Start the replicas and serve them until a signal ends that, and the process with it.

    Args:
        given: options of the engines.
        address: of a Ray cluster; None: one of this machine alone, which ends with the process.

    Raises:
        ConfigError: an option, an address that is taken, or resources that the cluster lacks.
        FleetError: a replica failed three times when it started; the cluster was lost.
    """
    model = fleet_model(given, options.served_model_name, scale)
    options.check_engine(model.engine)
    check_tls(options)
    set_up(options.log_level)
    with bind(options) as bound, ExitStack() as ends:
        say("Starting Ray" if address is None else f"Joining the Ray cluster at {address}")
        ends.enter_context(_cluster(address))
        if address is None and scale.replica_cpus is None:
            part = equal_part(ray.cluster_resources()["CPU"], scale.replicas or 1)
            model = replace(model, scale=replace(scale, replica_cpus=part))
        fleet = Fleet((model,), options)
        (needs,) = cluster_needs(fleet)
        say(f"Starting {scale.replicas} replicas of {model.names[0]}: {needs.described()} each")
        watch = Watch(model, say)
        handle = ends.enter_context(
            _deployed(engine(model, options, needs), watch, is_own=address is None)
        )
        life = Lifetime(options, lambda: watch.failure)
        front = Front(fleet, [RayReplicas(model.names, handle)], life)
        threading.Thread(target=watch.follow, daemon=True).start()
        told = [drafting(model.names, model.engine), _ROUTED]
        serve(front.app, life, bound, told, say, lifespan="on")
    leave(0)


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A connection to a Ray cluster, or one of its own."""
    own = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    if address not in (None, "auto"):
        _check_address(str(address))
    try:
        ray.init(
            address or "local",
            logging_level=logging.ERROR,
            log_to_driver=True,
            **(own if address is None else {}),
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise _no_cluster(address, error) from None
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise `ConfigError` where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        bound = "`auto`, or HOST:PORT of a Ray cluster's head, which this machine is part of"
        raise ConfigError("ray_address", address, bound)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    told = str(error).strip().partition("\n")[0]
    remedy = "Start one (`ray start --head`), or leave it out for one of this machine alone."
    return ConfigError("ray_address", address, f"the address of a Ray cluster ({told})", remedy)


@contextmanager
def _deployed(target: ray_serve.Application, watch: Watch, *, is_own: bool) -> Iterator[Any]:
    """The engines' handle, once all of them are up; they are gone afterwards.

    Args:
        is_own: whether the cluster ends with this process, and they with it.
    """
    ray_serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        run = ray_serve.RunTarget(target, watch.application, route_prefix=None)
        (handle,) = ray_serve.run_many([run], wait_for_applications_running=False)
        watch.until_up()
        yield handle
    finally:
        watch.is_over = True
        if not is_own:
            ray_serve.delete(watch.application)


class Watch:
    """What becomes of the replicas, told as it changes.

    Attributes:
        num_up: replicas that are up.
        failure: what made it impossible to go on, if anything did.
        is_over: set it to end `follow`.
    """

    def __init__(self, model: FleetModel, say: Say) -> None:
        self.application = f"foretoken-{uuid.uuid4().hex[:8]}"
        self._model, self._say = model, say
        self.num_up, self.is_over, self._told = 0, False, ""
        self.failure: ForetokenError | None = None

    def until_up(self) -> None:
        """Return when as many replicas are up as were asked for.

        Raises:
            FleetError: one failed as often as it may; the reason is that of its last start.
        """
        while True:
            status = self._look()
            if status is not None and status.status == ApplicationStatus.RUNNING:
                return
            if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
                raise FleetError(_told(self._model.names[0], status))
            time.sleep(_POLL_S)

    def follow(self) -> None:
        """Say what changes until it is over; a thread's work."""
        missed = 0
        while not self.is_over:
            try:
                missed = 0 if self._look() is not None else missed + 1
            except (RayError, RuntimeError, OSError):
                missed += 1
            if missed >= _MOST_MISSED and not self.is_over:
                self.failure = FleetError("The Ray cluster is lost: it answers no more.")
                return
            time.sleep(_POLL_S)

    def _look(self) -> ApplicationStatusOverview | None:
        status = ray_serve.status().applications.get(self.application)
        if status is None or self.is_over:
            return None
        deployment = status.deployments.get(self._model.deployment)
        states = {} if deployment is None else deployment.replica_states
        num_up = states.get("RUNNING", 0)
        if num_up != self.num_up:
            self.num_up = num_up
            self._say(f"Replicas that are up: {num_up} of {sum(states.values())}")
        message = "" if deployment is None else deployment.message
        if message != self._told:
            self._told = message
            if message:
                self._say(f"Ray Serve: {_reason(message)}")
        return status


def _told(name: str, status: ApplicationStatusOverview) -> str:
    """Why a deployment failed: the last error in what Ray Serve says."""
    said = "\n".join(each.message for each in status.deployments.values()) or status.message
    return f"A replica of {name} failed {STARTS} times when it started: {_reason(said)}"


def _reason(said: str) -> str:
    """The last error in a text with tracebacks, or its first line."""
    found = _REASON.findall(said)
    return found[-1].strip() if found else said.strip().partition("\n")[0]
