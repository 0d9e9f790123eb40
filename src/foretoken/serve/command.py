"""`foretoken serve`: from options to a running server. Only functions import FastAPI and Ray."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from foretoken.config import EngineConfig
from foretoken.config.checks import set_in_environment
from foretoken.errors import ConfigError
from foretoken.serve.fleet.config import ReplicaOptions
from foretoken.serve.options import MAX_NUM_WAITING, MAX_STEP_SECONDS, ServeOptions, describe_model

if TYPE_CHECKING:
    from foretoken.async_engine import AsyncEngine

_RAY_VARIABLES = {
    # Ray's ports are open to the network. By default Ray runs all code that is sent there; with a
    # token it runs only the code that processes of this command send.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    # By default replicas run at low priority, so that tokens of a small model wait for the client
    # that reads them, and each message changes threads once more.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}


def with_defaults(engine: Mapping[str, Any], device_type: str) -> dict[str, Any]:
    """Options of a server's engine: by default a bounded queue and, on a CPU, short steps."""
    short_steps = {"max_step_seconds": MAX_STEP_SECONDS} if device_type == "cpu" else {}
    return {"max_num_waiting": MAX_NUM_WAITING, **short_steps, **engine}


def start(
    engine: Mapping[str, Any],
    options: ServeOptions,
    say: Callable[[str], None],
    load: Callable[..., AsyncEngine] | None = None,
) -> None:
    """Load the model and serve it until a signal; then end the process.

    Args:
        load: makes the engine from its options; None: `AsyncEngine`.

    Raises:
        ConfigError: an option is wrong, another program has the address, or a package of the extra
            `serve` is missing.
    """
    config = EngineConfig.parse(**engine)
    options.check_engine(config)
    try:
        from foretoken.serve.app import build_app
        from foretoken.serve.logs import configure_logging
        from foretoken.serve.server import bind, check_tls, collect_when_idle, exit_now, serve
    except ModuleNotFoundError as error:
        missing, remedy = f"foretoken[serve]: {error.name}", "Run: pip install 'foretoken[serve]'"
        raise ConfigError(missing, None, "installed to serve", remedy) from None
    check_tls(options)
    from foretoken.async_engine import AsyncEngine
    from foretoken.engine.devices import choose_device

    engine = with_defaults(engine, choose_device(config.device).type)
    configure_logging(options.log_level)
    with bind(options) as bound_socket:  # before the model, which may take minutes to load
        say(f"Loading {engine['model']}")
        app = build_app((load or AsyncEngine)(**engine), options)
        collect_when_idle()
        context = app.state.context
        lines = [describe_model(context.served.names, config), context.served.format.summary]
        serve(app, context.lifetime, bound_socket, lines, say)
    exit_now(0)


def start_replicas(
    engine: Mapping[str, Any],
    scale: ReplicaOptions,
    options: ServeOptions,
    address: str | None,
    say: Callable[[str], None],
) -> None:
    """Call `fleet.command.start`; `ConfigError` if a package of the extra `ray` is missing."""
    if address is None:
        prepare_own_cluster()
    try:
        from foretoken.serve.fleet.command import start as start_fleet
    except ModuleNotFoundError as error:
        missing, remedy = f"foretoken[ray]: {error.name}", "Run: pip install 'foretoken[ray]'"
        raise ConfigError(missing, None, "installed for replicas", remedy) from None
    start_fleet(engine, scale, options, address, say)


def prepare_own_cluster() -> None:
    """Set the variables that Ray reads at its import, for a Ray cluster of this command only."""
    set_in_environment(**_RAY_VARIABLES, RAY_AUTH_TOKEN=secrets.token_hex(32))
