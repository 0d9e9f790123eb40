"""`foretoken serve --replicas`: Ray, the engines, and our own server in front of them.

Charter: starting replicas from options, telling the user of their state, and ending them. The front
runs in this process, with the same server as a single engine. So TLS, deadlines of connections,
signals and the drain are the same, and a request passes only one process on its way to a replica.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from foretoken.errors import ConfigError, ForetokenError
from foretoken.models import folder_of
from foretoken.serve.deployment import STARTS, RayReplicas, cluster_needs, engine_deployment
from foretoken.serve.fleet.config import Fleet, FleetModel, ReplicaOptions, fleet_model
from foretoken.serve.fleet.front import Front
from foretoken.serve.fleet.needs import equal_part, with_absolute_paths
from foretoken.serve.logs import set_up
from foretoken.serve.options import ServeOptions, describe_model
from foretoken.serve.running import Lifetime
from foretoken.serve.server import bind, check_tls, leave, serve

_STORE_BYTES = 256 * 2**20  # for requests over 1 MiB; answers do not pass through the store
_POLL_S = 0.5
_CONNECT_S = 5.0
_PATIENCE_S = 60.0  # then the user learns what is missing; a large model may take longer
_MAX_MISSED = 20  # polls in a row without an answer; then the cluster counts as lost
_REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*", re.MULTILINE)
_ROUTING_LINE = "Requests go to the replica that has seen most of their prompt."
Say = Callable[[str], None]


class FleetError(ForetokenError):
    """Replicas do not serve: they failed to start, or the cluster is lost."""


def start(
    engine_options: Mapping[str, Any],
    scale: ReplicaOptions,
    options: ServeOptions,
    address: str | None,
    say: Say,
) -> None:
    """Start the replicas and serve them until a signal; then end the process.

    Args:
        engine_options: options of the engines, by name.
        address: address of a Ray cluster; None: a new cluster on this machine only, which ends with
            the process.

    Raises:
        ConfigError: an option is wrong, the address is taken, or the cluster lacks resources.
        CheckpointError: there is no such model.
        FleetError: replicas failed to start three times; Ray did not start, or was lost.
    """
    model = fleet_model(engine_options, options.served_model_name, scale)
    # Replicas have another working folder than this process.
    model = replace(model, engine=with_absolute_paths(model.engine))
    options.check_engine(model.engine)
    check_tls(options)
    set_up(options.log_level)
    if address is None:  # on a cluster, only other machines may have the files
        folder_of(model.engine, model.engine.model, model.engine.revision, weights=False)
    with bind(options) as bound_socket, ExitStack() as contexts:
        say("Starting Ray" if address is None else f"Joining the Ray cluster at {address}")
        contexts.enter_context(_cluster(address))
        if address is None and scale.replica_cpus is None and model.engine.threads is None:
            max_replicas = scale.max_replicas or scale.replicas or 1
            cpus = equal_part(ray.cluster_resources()["CPU"], max_replicas)
            model = replace(model, scale=replace(scale, replica_cpus=cpus))
        fleet = Fleet((model,), options)
        (needs,) = cluster_needs(fleet)
        count = "1 replica" if scale.replicas == 1 else f"{scale.replicas} replicas"
        say(f"Starting {count} of {model.names[0]}, with {needs.described()} each")
        watch = Watch(model, say)
        if address is not None:
            say(f"Ray Serve's application is {watch.application}.")
        handle = contexts.enter_context(
            _deploy(engine_deployment(model, options, needs), watch, is_own=address is None)
        )
        life = Lifetime(options, lambda: watch.failure)
        front = Front(fleet, [RayReplicas(model.names, handle)], life)
        threading.Thread(target=watch.follow, daemon=True).start()
        lines = [describe_model(model.names, model.engine), _ROUTING_LINE]
        serve(front.app, life, bound_socket, lines, say, is_front=True)
    leave(0)


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at `address`, or to a new one on this machine if that is None."""
    own_options = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    if address not in (None, "auto"):
        _check_address(str(address))
    try:
        ray.init(
            address or "local",
            logging_level=logging.ERROR,
            log_to_driver=True,
            **(own_options if address is None else {}),
        )
    except Exception as error:  # Ray raises many types; the message keeps its text
        if address is None:
            raise FleetError(f"Ray did not start on this machine: {error}") from error
        raise _no_cluster(address, error) from None
    # Ray's handler prints a stack. This one holds until the server sets its own.
    signal.signal(signal.SIGTERM, _leave)
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _leave(number: int, frame: object) -> None:
    """End the process by `SystemExit`, so that contexts end what they have started."""
    raise SystemExit(128 + number)


def _check_address(address: str) -> None:
    """Raise `ConfigError` if no process listens at `address`: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        bound = "`auto`, or HOST:PORT of a Ray cluster's head, which this machine is part of"
        raise ConfigError("ray_address", address, bound)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0]
    remedy = "Start one (`ray start --head`), or leave it out for one of this machine alone."
    return ConfigError("ray_address", address, f"the address of a Ray cluster ({reason})", remedy)


@contextmanager
def _deploy(target: ray_serve.Application, watch: Watch, *, is_own: bool) -> Iterator[Any]:
    """Deploy the engines; yields their handle when they are up, and deletes them in the end.

    Args:
        is_own: whether the cluster ends with this process. Then the engines need not be deleted.
    """
    ray_serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if not is_own and not ray_serve.status().proxies:
        watch.say("Ray Serve has no proxies here: `serve shutdown` before a `serve deploy`.")
    try:
        run = ray_serve.RunTarget(target, watch.application, route_prefix=None)
        (handle,) = ray_serve.run_many([run], wait_for_applications_running=False)
        watch.wait_until_up()
        yield handle
    finally:
        watch.is_over = True
        if not is_own and watch.failure is None:
            with suppress(Exception):  # it would hide the error that ended the context
                ray_serve.delete(watch.application, _blocking=False)


class Watch:
    """Watches the replicas and tells the user of changes.

    Attributes:
        application: the name of Ray Serve's application.
        num_up: the number of replicas that are up.
        failure: the error that made serving impossible; None: there is none.
        is_over: set it to end `follow`.
    """

    def __init__(self, model: FleetModel, say: Say) -> None:
        self.application = f"foretoken-{uuid.uuid4().hex[:8]}"
        self._model, self.say = model, say
        self.num_up, self.is_over, self._message = 0, False, ""
        self._num_missed, self._last_change = 0, time.monotonic()
        self.failure: ForetokenError | None = None

    def wait_until_up(self) -> None:
        """Wait until all replicas are up, or until some are and no other has come up for a minute.

        Raises:
            FleetError: the replicas failed to start `STARTS` times, with the last start's error; or
                the cluster is lost.
        """
        while self.failure is None:
            status = self._poll()
            if status is not None and status.status == ApplicationStatus.RUNNING:
                return
            if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
                raise FleetError(_why_failed(self._model.names[0], status))
            if time.monotonic() - self._last_change > _PATIENCE_S:
                self._last_change = time.monotonic()
                free = ", ".join(f"{k} {v:g}" for k, v in ray.available_resources().items()
                                 if k in ("CPU", "GPU"))  # fmt: skip
                self.say(f"Still waiting. What the cluster has left: {free or 'nothing'}.")
                if self.num_up:
                    self.say(f"Serving with the {self.num_up} that are up.")
                    return
            time.sleep(_POLL_S)
        raise self.failure

    def follow(self) -> None:
        """Tell the user of changes until `is_over` is set; runs in a thread."""
        while not self.is_over and self.failure is None:
            self._poll()
            time.sleep(_POLL_S)

    def _poll(self) -> ApplicationStatusOverview | None:
        """Get Ray Serve's status, and tell the user of changes.

        Returns None if there is no status. After `_MAX_MISSED` polls without a status in a row,
        `failure` is set.
        """
        try:
            status = ray_serve.status().applications.get(self.application)
        except Exception:  # Ray raises many types when a part of it is gone
            status = None
        self._num_missed = self._num_missed + 1 if status is None else 0
        if self._num_missed >= _MAX_MISSED and not self.is_over:
            self.failure = FleetError("The Ray cluster is lost: it answers no more.")
        if status is None or self.is_over:
            return None
        deployment = status.deployments.get(self._model.deployment)
        states = {} if deployment is None else deployment.replica_states
        num_up = states.get("RUNNING", 0)
        if num_up != self.num_up:
            self.num_up, self._last_change = num_up, time.monotonic()
            self.say(f"Replicas that are up: {num_up} of {sum(states.values())}")
        message = "" if deployment is None else deployment.message
        if message != self._message and _REASON.search(message):
            self.say(f"A replica failed when it started: {_reason(message)}")
        self._message = message
        return status


def _why_failed(name: str, status: ApplicationStatusOverview) -> str:
    """The message for a deployment that failed, with the last error in Ray Serve's messages.

    Args:
        name: the model's name.
    """
    deployments = status.deployments.values()
    messages = "\n".join(deployment.message for deployment in deployments) or status.message
    return f"Replicas of {name} failed {STARTS} times when they started: {_reason(messages)}"


def _reason(text: str) -> str:
    """The last error in a text with tracebacks, or its first line."""
    errors = _REASON.findall(text)
    last = errors[-1].strip() if errors else text.strip().partition("\n")[0]
    return last.removeprefix("foretoken.errors.")
