"""`foretoken serve --replicas`: Ray, the engines, and our own server in front of them.

Charter: from options to replicas that are up, the messages to the user meanwhile, and the end. The
front runs in this process, with the same server as a single engine: TLS, deadlines of connections,
signals and the drain are the same, and a request passes one process, not two.
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
from foretoken.serve.deployment import STARTS, RayReplicas, cluster_needs, engine
from foretoken.serve.fleet.config import Fleet, FleetModel, ReplicaOptions, fleet_model
from foretoken.serve.fleet.front import Front
from foretoken.serve.fleet.needs import equal_part, with_absolute_paths
from foretoken.serve.logs import set_up
from foretoken.serve.options import ServeOptions, described
from foretoken.serve.running import Lifetime
from foretoken.serve.server import bind, check_tls, leave, serve

_STORE_BYTES = 256 * 2**20  # for requests over 1 MiB; answers do not pass through the store
_POLL_S = 0.5
_CONNECT_S = 5.0
_PATIENCE_S = 60.0  # then the user learns what is missing; a large model may take longer
_MOST_MISSED = 20  # polls in a row without an answer; then the cluster counts as lost
_REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*", re.MULTILINE)
_ROUTED = "Requests go to the replica that has seen most of their prompt."
Say = Callable[[str], None]


class FleetError(ForetokenError):
    """Replicas do not serve: they failed to start, or the cluster is lost."""


def start(
    given: Mapping[str, Any],
    scale: ReplicaOptions,
    options: ServeOptions,
    address: str | None,
    say: Say,
) -> None:
    """Start the replicas and serve them until a signal; then end the process.

    Args:
        given: options of the engines.
        address: of a Ray cluster; None: one on this machine only, which ends with the process.

    Raises:
        ConfigError: an option is wrong, the address is taken, or the cluster lacks resources.
        CheckpointError: there is no such model.
        FleetError: replicas failed to start three times; Ray did not start, or was lost.
    """
    model = fleet_model(given, options.served_model_name, scale)
    # A replica has another working folder.
    model = replace(model, engine=with_absolute_paths(model.engine))
    options.check_engine(model.engine)
    check_tls(options)
    set_up(options.log_level)
    if address is None:  # else other machines have the files
        folder_of(model.engine, model.engine.model, model.engine.revision, weights=False)
    with bind(options) as bound, ExitStack() as ends:
        say("Starting Ray" if address is None else f"Joining the Ray cluster at {address}")
        ends.enter_context(_cluster(address))
        if address is None and scale.replica_cpus is None and model.engine.threads is None:
            most = scale.max_replicas or scale.replicas or 1
            part = equal_part(ray.cluster_resources()["CPU"], most)
            model = replace(model, scale=replace(scale, replica_cpus=part))
        fleet = Fleet((model,), options)
        (needs,) = cluster_needs(fleet)
        count = "1 replica" if scale.replicas == 1 else f"{scale.replicas} replicas"
        say(f"Starting {count} of {model.names[0]}, with {needs.described()} each")
        watch = Watch(model, say)
        if address is not None:
            say(f"Ray Serve's application is {watch.application}.")
        handle = ends.enter_context(
            _deployed(engine(model, options, needs), watch, is_own=address is None)
        )
        life = Lifetime(options, lambda: watch.failure)
        front = Front(fleet, [RayReplicas(model.names, handle)], life)
        threading.Thread(target=watch.follow, daemon=True).start()
        lines = [described(model.names, model.engine), _ROUTED]
        serve(front.app, life, bound, lines, say, is_front=True)
    leave(0)


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A connection to a Ray cluster, or to a new one on this machine."""
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
    except Exception as error:  # Ray raises many types; the message keeps its text
        if address is None:
            raise FleetError(f"Ray did not start on this machine: {error}") from error
        raise _no_cluster(address, error) from None
    # Until the server sets its own handler; Ray's prints a stack.
    signal.signal(signal.SIGTERM, _leave)
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _leave(number: int, frame: object) -> None:
    """Leave by an exception, so that contexts end what they started."""
    raise SystemExit(128 + number)


def _check_address(address: str) -> None:
    """Raise `ConfigError` if no process listens there: Ray itself would try for minutes."""
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
def _deployed(target: ray_serve.Application, watch: Watch, *, is_own: bool) -> Iterator[Any]:
    """The engines' handle, once all of them are up; on leaving they are deleted.

    Args:
        is_own: whether the cluster ends with this process, and the engines with it.
    """
    ray_serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if not is_own and not ray_serve.status().proxies:
        watch.say("Ray Serve has no proxies here: `serve shutdown` before a `serve deploy`.")
    try:
        run = ray_serve.RunTarget(target, watch.application, route_prefix=None)
        (handle,) = ray_serve.run_many([run], wait_for_applications_running=False)
        watch.until_up()
        yield handle
    finally:
        watch.is_over = True
        if not is_own and watch.failure is None:
            with suppress(Exception):  # the user should see the error that ended the work
                ray_serve.delete(watch.application, _blocking=False)


class Watch:
    """Watches the replicas and tells the user of changes.

    Attributes:
        num_up: replicas that are up.
        failure: the error that made it impossible to go on, if any.
        is_over: set it to end `follow`.
    """

    def __init__(self, model: FleetModel, say: Say) -> None:
        self.application = f"foretoken-{uuid.uuid4().hex[:8]}"
        self._model, self.say = model, say
        self.num_up, self.is_over, self._message = 0, False, ""
        self._missed, self._changed = 0, time.monotonic()
        self.failure: ForetokenError | None = None

    def until_up(self) -> None:
        """Return when all replicas are up, or when some are and no more come for a minute.

        Raises:
            FleetError: they failed `STARTS` times; with the reason of the last start.
        """
        while self.failure is None:
            status = self._look()
            if status is not None and status.status == ApplicationStatus.RUNNING:
                return
            if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
                raise FleetError(_why_failed(self._model.names[0], status))
            if time.monotonic() - self._changed > _PATIENCE_S:
                self._changed = time.monotonic()
                left = ", ".join(f"{k} {v:g}" for k, v in ray.available_resources().items()
                                 if k in ("CPU", "GPU"))  # fmt: skip
                self.say(f"Still waiting. What the cluster has left: {left or 'nothing'}.")
                if self.num_up:
                    self.say(f"Serving with the {self.num_up} that are up.")
                    return
            time.sleep(_POLL_S)
        raise self.failure

    def follow(self) -> None:
        """Tell of changes until `is_over`; runs in a thread."""
        while not self.is_over and self.failure is None:
            self._look()
            time.sleep(_POLL_S)

    def _look(self) -> ApplicationStatusOverview | None:
        """Ray Serve's status; sets `failure` after too many polls without one."""
        try:
            status = ray_serve.status().applications.get(self.application)
        except Exception:  # Ray raises many types when a part of it is gone
            status = None
        self._missed = self._missed + 1 if status is None else 0
        if self._missed >= _MOST_MISSED and not self.is_over:
            self.failure = FleetError("The Ray cluster is lost: it answers no more.")
        if status is None or self.is_over:
            return None
        deployment = status.deployments.get(self._model.deployment)
        states = {} if deployment is None else deployment.replica_states
        num_up = states.get("RUNNING", 0)
        if num_up != self.num_up:
            self.num_up, self._changed = num_up, time.monotonic()
            self.say(f"Replicas that are up: {num_up} of {sum(states.values())}")
        message = "" if deployment is None else deployment.message
        if message != self._message and _REASON.search(message):
            self.say(f"A replica failed when it started: {_reason(message)}")
        self._message = message
        return status


def _why_failed(name: str, status: ApplicationStatusOverview) -> str:
    """Why a deployment failed: the last error in Ray Serve's messages."""
    said = "\n".join(each.message for each in status.deployments.values()) or status.message
    return f"Replicas of {name} failed {STARTS} times when they started: {_reason(said)}"


def _reason(said: str) -> str:
    """The last error in a text with tracebacks, or its first line."""
    found = _REASON.findall(said)
    last = found[-1].strip() if found else said.strip().partition("\n")[0]
    return last.removeprefix("foretoken.errors.")
