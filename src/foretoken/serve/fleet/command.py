"""`foretoken serve --replicas`: starts Ray and the replicas, and serves them until a signal.

The front runs in this process, with the same server as a single engine. So TLS, deadlines of
connections, signals and the drain are the same.
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
from foretoken.serve.deployment import MAX_STARTS, RayReplicas, cluster_needs, engine_deployment
from foretoken.serve.fleet.config import Fleet, FleetModel, ReplicaOptions, fleet_model
from foretoken.serve.fleet.front import Front
from foretoken.serve.fleet.needs import cores_per_replica, with_absolute_paths
from foretoken.serve.logs import configure_logging
from foretoken.serve.options import ServeOptions, describe_model
from foretoken.serve.running import Lifetime
from foretoken.serve.server import bind, check_tls, exit_now, serve

_STORE_BYTES = 256 * 2**20  # Ray's object store holds requests over 1 MiB, but no answers
_POLL_S = 0.5
_CONNECT_S = 5.0
_NOTICE_S = 60.0  # if no replica comes up for so long, the user learns what is free
_MAX_FAILED_POLLS = 20  # in a row; then the cluster counts as lost
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*", re.MULTILINE)
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
        address: address of a Ray cluster; None: a new cluster on this machine only, which ends with
            the process.

    Raises:
        ConfigError: an option is wrong, the server's address is in use, or the cluster lacks
            resources.
        CheckpointError: there is no such model.
        FleetError: replicas failed to start `MAX_STARTS` times; Ray did not start, or was lost.
    """
    model = fleet_model(engine_options, options.served_model_name, scale)
    model = replace(model, engine=with_absolute_paths(model.engine))
    options.check_engine(model.engine)
    check_tls(options)
    configure_logging(options.log_level)
    if address is None:  # a cluster's replicas may find the files on their own machines only
        folder_of(model.engine, model.engine.model, model.engine.revision, weights=False)
    with bind(options) as bound_socket, ExitStack() as contexts:
        say("Starting Ray" if address is None else f"Joining the Ray cluster at {address}")
        contexts.enter_context(_cluster(address))
        if address is None and scale.replica_cpus is None and model.engine.threads is None:
            max_replicas = scale.max_replicas or scale.replicas or 1
            cpus = cores_per_replica(ray.cluster_resources()["CPU"], max_replicas)
            model = replace(model, scale=replace(scale, replica_cpus=cpus))
        fleet = Fleet((model,), options)
        (needs,) = cluster_needs(fleet)
        count = "1 replica" if scale.replicas == 1 else f"{scale.replicas} replicas"
        say(f"Starting {count} of {model.names[0]}, with {needs.described()} each")
        watch = Watch(model, say)
        if address is not None:
            say(f"Ray Serve's application is {watch.application}.")
        handle = contexts.enter_context(
            _deploy(engine_deployment(model, options, needs), watch, ends_cluster=address is None)
        )
        life = Lifetime(options, lambda: watch.failure)
        front = Front(fleet, [RayReplicas(model.names, handle)], life)
        threading.Thread(target=watch.follow, daemon=True).start()
        lines = [describe_model(model.names, model.engine), _ROUTING_LINE]
        serve(front.app, life, bound_socket, lines, say, is_front=True)
    exit_now(0)


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at `address`; None: start a cluster on this machine."""
    new_options = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    options = new_options if address is None else {}
    if address not in (None, "auto"):
        _check_address(str(address))
    try:
        ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=True, **options)
    except Exception as error:  # Ray raises many types
        if address is None:
            raise FleetError(f"Ray did not start on this machine: {error}") from error
        raise _unreachable(address, error) from None
    # Ray's own handler prints a stack. This handler works until the server sets another one.
    signal.signal(signal.SIGTERM, _exit_at_signal)
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _exit_at_signal(number: int, frame: object) -> None:
    """Raise `SystemExit`, so that context managers end what they have started."""
    raise SystemExit(128 + number)


def _check_address(address: str) -> None:
    """Raise `ConfigError` if nothing listens at `address`: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        bound = "`auto`, or HOST:PORT of the head of a Ray cluster"
        remedy = "This machine must be part of that cluster (`ray start --address HOST:PORT`)."
        raise ConfigError("ray_address", address, bound, remedy)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str | None, error: Exception) -> ConfigError:
    first_line = str(error).strip().partition("\n")[0]
    bound = f"the address of a running Ray cluster ({first_line})"
    remedy = "Start a cluster with `ray start --head`, or leave --ray-address out."
    return ConfigError("ray_address", address, bound, remedy)


@contextmanager
def _deploy(target: ray_serve.Application, watch: Watch, *, ends_cluster: bool) -> Iterator[Any]:
    """Deploy the engines and yield a handle; at the end delete them, if the cluster goes on."""
    ray_serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if not ends_cluster and not ray_serve.status().proxies:
        watch.say("Ray Serve runs without proxies: run `serve shutdown` before `serve deploy`.")
    try:
        run = ray_serve.RunTarget(target, watch.application, route_prefix=None)
        (handle,) = ray_serve.run_many([run], wait_for_applications_running=False)
        watch.wait_until_up()
        yield handle
    finally:
        watch.is_over = True
        if not ends_cluster and watch.failure is None:
            with suppress(Exception):  # an error here would hide the one that ended the context
                ray_serve.delete(watch.application, _blocking=False)


class Watch:
    """Watches the replicas and tells the user of changes.

    Attributes:
        failure: the error that made serving impossible, or None.
        is_over: set by the caller to end `follow`.
    """

    def __init__(self, model: FleetModel, say: Say) -> None:
        self.application = f"foretoken-{uuid.uuid4().hex[:8]}"
        self._model, self.say = model, say
        self.num_up, self.is_over, self._message = 0, False, ""
        self._num_failed_polls, self._last_change = 0, time.monotonic()
        self.failure: ForetokenError | None = None

    def wait_until_up(self) -> None:
        """Wait until all replicas are up, or until some are and no more came up for `_NOTICE_S`.

        Raises `FleetError` if replicas failed to start `MAX_STARTS` times, or the cluster is lost.
        """
        while self.failure is None:
            status = self._poll()
            if status is not None and status.status == ApplicationStatus.RUNNING:
                return
            if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
                deployments = status.deployments.values()
                messages = "\n".join(each.message for each in deployments) or status.message
                raise FleetError(
                    f"Replicas of {self._model.names[0]} failed {MAX_STARTS} times when they "
                    f"started: {_last_error(messages)}"
                )
            if time.monotonic() - self._last_change > _NOTICE_S:
                self._last_change = time.monotonic()
                free = ", ".join(f"{k} {v:g}" for k, v in ray.available_resources().items()
                                 if k in ("CPU", "GPU"))  # fmt: skip
                self.say(f"Still waiting. Free in the cluster: {free or 'nothing'}.")
                if self.num_up:
                    self.say(f"Serving with {self.num_up} replicas, which are up.")
                    return
            time.sleep(_POLL_S)
        raise self.failure

    def follow(self) -> None:
        """Tell the user of changes until `is_over` is set; runs in a thread."""
        while not self.is_over and self.failure is None:
            self._poll()
            time.sleep(_POLL_S)

    def _poll(self) -> ApplicationStatusOverview | None:
        """The application's status, or None; tells the user of changes, and may set `failure`."""
        try:
            status = ray_serve.status().applications.get(self.application)
        except Exception:  # Ray raises many types when a part of it is gone
            status = None
        self._num_failed_polls = self._num_failed_polls + 1 if status is None else 0
        if self._num_failed_polls >= _MAX_FAILED_POLLS and not self.is_over:
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
        if message != self._message and _ERROR_LINE.search(message):
            self.say(f"A replica failed when it started: {_last_error(message)}")
        self._message = message
        return status


def _last_error(text: str) -> str:
    """The last error in a text with tracebacks; the text's first line if it has no error."""
    errors = _ERROR_LINE.findall(text)
    last = errors[-1].strip() if errors else text.strip().partition("\n")[0]
    return last.removeprefix("foretoken.errors.")
