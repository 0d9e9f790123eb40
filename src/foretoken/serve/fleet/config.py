"""Options of a fleet, from a command line or a YAML file: models and their replicas."""

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

INGRESS = "foretoken-ingress"  # name of the deployment that receives the requests
IMPORT_PATH = "foretoken.serve.deployment:build"
PROXY_OPTIONS = {
    "host": "host", "port": "port", "ssl_keyfile": "ssl_keyfile", "ssl_certfile": "ssl_certfile",
    "ssl_ca_certs": "ssl_ca_certs", "ssl_cert_reqs": "ssl_ca_certs", "max_header_bytes": "",
    "io_timeout": "request_timeout_s", "root_path": "route_prefix", "allowed_hosts": "",
}  # fmt: skip
"""Options of our own server that have no effect where Ray Serve's proxies receive the requests. The
value is the name of the same option in Ray Serve's file; empty: Ray Serve has no such option."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How many replicas a model has, and what each needs.

    Attributes:
        replicas: number of engines with this model, each in its own process, at one address
            (docs/scale.md); needs the extra `ray`. None: one engine, in this process, without Ray.
        max_replicas: the largest number of replicas; their number grows from `replicas` with the
            number of requests. None: the number of replicas is fixed.
        target_requests: with `max_replicas`, the mean number of queued and running requests per
            replica at which scaling aims; None: `max_num_seqs`.
        replica_cpus: cores of a replica, also less than 1. None: the engine's `threads`; without
            `threads` an equal share of this machine's cores, and on a cluster 1.
        replica_gpus: GPUs of a replica; 0.5 lets two replicas share a GPU. None: 1, or 1/N where
            `memory_fraction` lets N engines share a GPU; on a CPU 0.
        replica_memory_gib: the machine's memory for a replica. None: the memory of its weights and
            its cache, and 1.5 GiB.
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
                bound = "given with `max_replicas`"
                raise ConfigError("target_requests", self.target_requests, bound)
        for name, limit in (("replica_cpus", 4096), ("replica_gpus", 64)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, limit)
        gpus = self.replica_gpus
        if gpus is not None and gpus > 1:
            remedy = "An engine computes on one GPU: give 1, or less to share the GPU."
            raise ConfigError("replica_gpus", gpus, "at most 1", remedy)
        if self.replica_memory_gib is not None:
            check_number("replica_memory_gib", self.replica_memory_gib, 0.001, 2**20)


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model of a fleet; `names` are the model's names in requests."""

    engine: EngineConfig
    names: tuple[str, ...]
    scale: ReplicaOptions

    @property
    def deployment(self) -> str:
        """The model's name in Ray Serve, where slashes and colons separate names."""
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in self.names[0])


@dataclass(frozen=True, slots=True)
class Fleet:
    """All models of one application.

    Attributes:
        models: the first one answers requests that name no model.
        grows: whether the cluster adds machines by itself. Then missing resources are no error.
    """

    models: tuple[FleetModel, ...]
    server: ServeOptions = field(default_factory=ServeOptions)
    grows: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models", [], "a list with at least one model")
        index_by_name = {INGRESS: -1}
        for index, model in enumerate(self.models):
            with error_place(f"models[{index}].engine"):
                self.server.check_engine(model.engine)
            for name in {*model.names, model.deployment}:
                if index_by_name.setdefault(name, index) != index:
                    remedy = "Give each model another `served_model_name`."
                    bound = "a name that no other model has"
                    raise ConfigError(f"models[{index}]", name, bound, remedy)

    @classmethod
    def parse(cls, args: Any) -> Fleet:
        """A fleet from the `args` in a file for `serve deploy`, or else `ConfigError`."""
        options = _checked_map("args", args)
        check_known_keys("args", options, ("models", "server", "grows"))
        items = options.get("models")
        if not isinstance(items, list):
            raise ConfigError("models", items, "a list of models", "See docs/scale.md.")
        models = tuple(_read_model(f"models[{i}]", item) for i, item in enumerate(items))
        grows = options.get("grows", False)
        if not isinstance(grows, bool):
            raise ConfigError("grows", grows, "true or false")
        server_options = options.get("server")
        server_options = {} if server_options is None else server_options
        return cls(models, _read_server(_checked_map("server", server_options)), grows)

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """The fleet of Foretoken's application in a YAML file, or else `ConfigError`."""
        import yaml  # type: ignore[import-untyped]

        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError("fleet", str(path), f"a YAML file ({error})") from None
        applications = document.get("applications") if isinstance(document, Mapping) else None
        applications = applications if isinstance(applications, list) else []
        maps = [each for each in applications if isinstance(each, Mapping)]
        fleets = [each for each in maps if each.get("import_path") == IMPORT_PATH]
        if len(fleets) != 1:
            bound = f"a file with one application with `import_path`: {IMPORT_PATH}"
            remedy = f"It has {len(fleets)} such applications. See docs/scale.md."
            raise ConfigError("fleet", str(path), bound, remedy)
        return cls.parse(fleets[0].get("args"))


def _checked_map(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, value, "a map of options by name")
    return dict(value)


def _read_model(place: str, value: Any) -> FleetModel:
    """A model from an item of the file's list `models`; `place` names the item in errors."""
    options = _checked_map(place, value)
    scale_names = {f.name for f in fields(ReplicaOptions)}
    check_known_keys(place, options, ("engine", "served_model_name", *sorted(scale_names)))
    engine = _checked_map(f"{place}.engine", options.get("engine"))
    check_known_keys(f"{place}.engine", engine, [f.name for f in fields(EngineConfig)])
    if "model" not in engine:
        raise ConfigError(f"{place}.engine.model", None, "given")
    names = options.get("served_model_name", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{place}.served_model_name", names, "a name, or a list of names")
    with error_place(place):
        scale_values = {name: options[name] for name in scale_names & options.keys()}
        scale = ReplicaOptions(**{"replicas": 1, **scale_values})
    with error_place(f"{place}.engine"):
        return fleet_model(engine, names, scale)


def fleet_model(engine: Mapping[str, Any], names: Any, scale: ReplicaOptions) -> FleetModel:
    """A model from a user's options; `ConfigError` if an option is out of bounds."""
    config = EngineConfig.parse(**{"max_num_waiting": MAX_NUM_WAITING, **engine})
    return FleetModel(config, tuple(names) or (config.model,), scale)


def _read_server(options: dict[str, Any]) -> ServeOptions:
    """The server's options from the file's map `server`, which must have no `PROXY_OPTIONS`."""
    names = [option.name for option in fields(ServeOptions) if option.name != "served_model_name"]
    check_known_keys("server", options, names)
    for name in PROXY_OPTIONS.keys() & options.keys():
        bound = "left out: clients connect to Ray Serve's proxies, not to this server"
        remedy = "Ray Serve has no such option."
        if ray_name := PROXY_OPTIONS[name]:
            remedy = f"Set `{ray_name}` in the part of the file that is Ray Serve's."
        raise ConfigError(f"server.{name}", options[name], bound, remedy)
    for option in fields(ServeOptions):
        if option.name in options:
            _check_type(option, options[option.name])
    tuples = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    if options.get("chat_template") is not None:
        name = "server.chat_template"
        options = options | {"chat_template": template_text(name, options["chat_template"])}
    with error_place("server"):
        # With this host `Host` is not checked: the proxies' addresses are not known here.
        return ServeOptions(**{**options, **tuples, "host": "0.0.0.0"})


def _check_type(option: Field[Any], value: Any) -> None:
    """Raise `ConfigError` for a wrong type: "no" would be true, and an origin a list of letters."""
    annotation, place = str(option.type), f"server.{option.name}"
    if annotation == "bool" and not isinstance(value, bool):
        raise ConfigError(place, value, "true or false")
    is_text, is_list = isinstance(value, str), isinstance(value, list)
    if is_list and (not value or not all(isinstance(item, str) for item in value)):
        raise ConfigError(place, value, "a list of at least one text")
    if "tuple" in annotation and not is_list and not (is_text and annotation.startswith("str")):
        raise ConfigError(place, value, "a list of texts")
    if annotation.startswith("str") and "tuple" not in annotation and not is_text:
        raise ConfigError(place, value, "a text")


@contextmanager
def error_place(place: str) -> Iterator[None]:
    """Put `place` before the field of a `ConfigError`; make a `TypeError` a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        field_place = f"{place}.{error.field}"
        raise ConfigError(field_place, error.value, error.bound, error.remedy) from None
    except TypeError as error:
        raise ConfigError(place, str(error), "options of the right types") from None
