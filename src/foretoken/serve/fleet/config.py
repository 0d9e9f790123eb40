"""A fleet: models, the number of their replicas, and what a replica needs. No Ray, no torch.

Charter: options and their bounds, from a command line or from the `args` of a YAML file. Where the
options do not say what a replica needs of a machine, `needs.py` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from foretoken.config import EngineConfig, check_int, check_number
from foretoken.config.checks import template_text
from foretoken.errors import ConfigError, check_known_keys
from foretoken.serve.options import MAX_NUM_WAITING, ServeOptions

INGRESS = "foretoken-ingress"
"""The deployment in front of the engines."""
IMPORT_PATH = "foretoken.serve.deployment:build"
OF_PROXIES = {
    "host": "host", "port": "port", "ssl_keyfile": "ssl_keyfile", "ssl_certfile": "ssl_certfile",
    "ssl_ca_certs": "ssl_ca_certs", "ssl_cert_reqs": "ssl_ca_certs", "max_header_bytes": "",
    "io_timeout": "request_timeout_s", "root_path": "route_prefix", "allowed_hosts": "",
}  # fmt: skip
"""Options of a server that Ray Serve's proxies have instead, with their name there or empty."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How many replicas a model has, and what each needs.

    Attributes:
        replicas: engines with this model, each in a process of its own, at one address
            (docs/scale.md); needs the extra `ray`. None: one engine, in this process, without Ray.
        max_replicas: the most replicas; their number follows the requests, from `replicas` up.
            None: their number is fixed.
        target_requests: the mean number of queued and running requests per replica that scaling
            aims at; None: `max_num_seqs`.
        replica_cpus: cores of a replica; a part of one is possible. None: `threads`; without them
            an equal share of this machine's cores, and on a cluster 1.
        replica_gpus: GPUs of a replica; 0.5 lets two share one. None: 1, or 1/N where
            `memory_fraction` lets N engines share one; on a CPU 0.
        replica_memory_gib: the machine's memory for a replica. None: that of its weights and its
            cache, and 1.5 GiB.
    """

    replicas: int | None = None
    max_replicas: int | None = None
    target_requests: float | None = None
    replica_cpus: float | None = None
    replica_gpus: float | None = None
    replica_memory_gib: float | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None:
            check_int("replicas", self.replicas, 1, 10_000)
        for name in (f.name for f in fields(self) if f.name != "replicas"):
            if getattr(self, name) is not None and self.replicas is None:
                raise ConfigError(name, getattr(self, name), "given with `replicas`")
        if self.max_replicas is not None:
            check_int("max_replicas", self.max_replicas, self.replicas or 1, 10_000)
        if self.target_requests is not None:
            check_number("target_requests", self.target_requests, 0.01, 1e6)
            if self.max_replicas is None:
                bound = "given with max_replicas"
                raise ConfigError("target_requests", self.target_requests, bound)
        for name, most in (("replica_cpus", 4096), ("replica_gpus", 64)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, most)
        gpus = self.replica_gpus
        if gpus is not None and gpus > 1:
            remedy = "An engine computes on one GPU: give 1, or a part of one."
            raise ConfigError("replica_gpus", gpus, "at most 1", remedy)
        if self.replica_memory_gib is not None:
            check_number("replica_memory_gib", self.replica_memory_gib, 0.001, 2**20)


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model of a fleet.

    Attributes:
        engine: options of its engines.
        names: names by which requests may call it.
        scale: the number of its replicas, and what each needs.
    """

    engine: EngineConfig
    names: tuple[str, ...]
    scale: ReplicaOptions

    @property
    def deployment(self) -> str:
        """Its name in Ray Serve, without slashes and colons, which separate names there."""
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in self.names[0])


@dataclass(frozen=True, slots=True)
class Fleet:
    """All models of one application.

    Attributes:
        models: requests that name no model get the first.
        server: options of the server.
        grows: whether the cluster adds machines by itself, so that missing resources are no error.
    """

    models: tuple[FleetModel, ...]
    server: ServeOptions = field(default_factory=ServeOptions)
    grows: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models", [], "a list with at least one model")
        seen = {INGRESS: -1}
        for number, model in enumerate(self.models):
            with placed(f"models[{number}].engine"):
                self.server.check_engine(model.engine)
            for name in {*model.names, model.deployment}:
                if seen.setdefault(name, number) != number:
                    remedy = "Give each a `served_model_name` of its own."
                    raise ConfigError(f"models[{number}]", name, "a name of no other", remedy)

    @classmethod
    def parse(cls, args: Any) -> Fleet:
        """A fleet from the `args` of an application in a file for `serve deploy`.

        Raises:
            ConfigError: a field is unknown or out of bounds; it names the field.
        """
        given = _mapping("args", args)
        check_known_keys("args", given, ("models", "server", "grows"))
        listed = given.get("models")
        if not isinstance(listed, list):
            raise ConfigError("models", listed, "a list of models", "See docs/scale.md.")
        models = tuple(_model(f"models[{i}]", each) for i, each in enumerate(listed))
        grows = given.get("grows", False)
        if not isinstance(grows, bool):
            raise ConfigError("grows", grows, "true or false")
        server = given.get("server")
        return cls(models, _server(_mapping("server", {} if server is None else server)), grows)

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """The fleet of Foretoken's application in a YAML file for `serve deploy`.

        Raises:
            ConfigError: there is no such file, or it has no such application, or several.
        """
        import yaml  # type: ignore[import-untyped]

        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError("fleet", str(path), f"a YAML file ({error})") from None
        listed = found.get("applications") if isinstance(found, Mapping) else None
        listed = listed if isinstance(listed, list) else []
        apps = [each for each in listed if isinstance(each, Mapping)]
        ours = [each for each in apps if each.get("import_path") == IMPORT_PATH]
        if len(ours) != 1:
            bound = f"a file with one application whose `import_path` is {IMPORT_PATH}"
            raise ConfigError("fleet", str(path), bound, f"It has {len(ours)}. See docs/scale.md.")
        return cls.parse(ours[0].get("args"))


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, value, "a map of options by name")
    return dict(value)


def _model(where: str, given: Any) -> FleetModel:
    """A model of a list; errors name its place `where`."""
    options = _mapping(where, given)
    scales = {f.name for f in fields(ReplicaOptions)}
    check_known_keys(where, options, ("engine", "served_model_name", *sorted(scales)))
    engine = _mapping(f"{where}.engine", options.get("engine"))
    check_known_keys(f"{where}.engine", engine, [f.name for f in fields(EngineConfig)])
    if "model" not in engine:
        raise ConfigError(f"{where}.engine.model", None, "given")
    names = options.get("served_model_name", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise ConfigError(f"{where}.served_model_name", names, "a name, or a list of names")
    with placed(where):
        named = {name: options[name] for name in scales & options.keys()}
        scale = ReplicaOptions(**{"replicas": 1, **named})
    with placed(f"{where}.engine"):
        return fleet_model(engine, names, scale)


def fleet_model(engine: Mapping[str, Any], names: Any, scale: ReplicaOptions) -> FleetModel:
    """A model from a user's options; `ConfigError` for those out of bounds."""
    config = EngineConfig.parse(**{"max_num_waiting": MAX_NUM_WAITING, **engine})
    return FleetModel(config, tuple(names) or (config.model,), scale)


def _server(given: dict[str, Any]) -> ServeOptions:
    """Options of a server that Ray Serve's proxies stand in front of."""
    names = [f.name for f in fields(ServeOptions) if f.name != "served_model_name"]
    check_known_keys("server", given, names)
    for name in OF_PROXIES.keys() & given.keys():
        theirs = OF_PROXIES[name]
        remedy = f"Write `{theirs}` of Ray Serve's." if theirs else "Its proxies have their own."
        raise ConfigError(f"server.{name}", given[name], "left out: proxies listen", remedy)
    for f in fields(ServeOptions):
        if f.name in given:
            _check_type(f, given[f.name])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    if given.get("chat_template") is not None:
        name = "server.chat_template"
        given = given | {"chat_template": template_text(name, given["chat_template"])}
    with placed("server"):
        # Proxies listen where their `http_options` say, so `Host` cannot be checked here.
        return ServeOptions(**{**given, **lists, "host": "0.0.0.0"})


def _check_type(f: Field[Any], value: Any) -> None:
    """Raise `ConfigError` for a value of the wrong type: the text "no" would count as true, and one
    origin as a list of its letters."""
    kinds, place = str(f.type), f"server.{f.name}"
    if kinds == "bool" and not isinstance(value, bool):
        raise ConfigError(place, value, "true or false")
    is_text, is_list = isinstance(value, str), isinstance(value, list)
    if is_list and (not value or not all(isinstance(each, str) for each in value)):
        raise ConfigError(place, value, "a list of texts, with one at least")
    if "tuple" in kinds and not is_list and not (is_text and kinds.startswith("str")):
        raise ConfigError(place, value, "a list of texts")
    if kinds.startswith("str") and "tuple" not in kinds and not is_text:
        raise ConfigError(place, value, "a text")


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Have errors name their place in the file."""
    try:
        yield
    except ConfigError as error:
        place = f"{where}.{error.field}"
        raise ConfigError(place, error.value, error.bound, error.remedy) from None
    except TypeError as error:
        raise ConfigError(where, str(error), "options of the right types") from None
