"""Options of `foretoken serve`, except those of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from foretoken.config import EngineConfig, check_int, check_number
from foretoken.errors import ConfigError

MAX_NUM_WAITING = 1024  # the default of `max_num_waiting` of a server
_HOST_NAME = re.compile(r"\*|[\w.-]+|[0-9A-Fa-f:]+:[0-9A-Fa-f:.]*", re.ASCII)
_ROOT_PATH = re.compile(r"(/[^/\s?#]+)*")
_OWN_PATHS = {
    *("v1", "tokenize", "detokenize", "health", "ping", "load", "metrics", "version"),
    *("server_info", "tokenizer_info", "docs", "openapi.json", "page"),
}
"""First parts of the server's own paths. `RootPath` could not tell whether a path already has a
`root_path` with the same first part."""
MAX_STEP_SECONDS = 0.15  # the default of `max_step_seconds` of a server on a CPU
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        host: address to listen on; `0.0.0.0` is every network of the machine.
        port: port to listen on; 0 takes a free one.
        api_key: key that clients must send as `Authorization: Bearer KEY`; of several keys, clients
            send any one. None: no key is needed. Other users of this machine can read a command
            line: FORETOKEN_API_KEY in the environment does the same.
        allowed_hosts: names that a client's `Host` may have, without a port, besides `localhost`
            and the loopback's addresses; `*` is any. Requests with other names are refused: see
            docs/server.md. Names are checked only if `host` is an address of the loopback and there
            is no key.
        served_model_name: names of the model in requests; answers use the first. Default: `model`.
        root_path: path under which a proxy has this server, such as `/llm`. Requests are answered
            with and without it.
        ssl_keyfile: a private key in PEM. With it and `ssl_certfile` the server speaks TLS.
        ssl_certfile: the certificate of that key, and the intermediate certificates up to a root,
            in PEM.
        ssl_ca_certs: CA certificates by which clients' certificates are checked, in PEM; see
            `ssl_cert_reqs`.
        ssl_cert_reqs: whether clients send certificates: 0 no, 1 optional, 2 required.
        allow_synthetic: let the rule `synthetic` decide what is accepted, for measurements: such a
            text means nothing.
        chat_template: a Jinja template, or the name of one of the tokenizer's templates; None: the
            tokenizer's own.
        trust_request_chat_template: let a request bring a `chat_template`. A template is a program
            that runs in the engine's thread: Jinja's sandbox keeps it from files, but not from
            running long.
        allow_priority: let requests set their `priority`. The request with the lowest number is
            served first, and can keep all others waiting.
        allowed_origins: origins, other than the server's own, of web pages that may call it from a
            browser; `*` is any. Default: none.
        queue_timeout: seconds until a request must have its first token; then it is refused by 503.
        request_timeout: seconds until an answer must be complete; then it ends with its text so
            far, with `finish_reason` `length` and `stop_reason` `timeout`.
        io_timeout: seconds for a client to send a request, head and body, or to read data that
            waits to be sent; then its connection is closed.
        drain_timeout: seconds for requests under way after SIGTERM or Ctrl-C; answers not complete
            by then end as at `request_timeout`, with `stop_reason` `shutdown`. The process ends up
            to 7 s later: Kubernetes, by default, kills it 30 s after SIGTERM.
        max_body_bytes: longest body of a request.
        max_header_bytes: longest head of a request: its path and its headers.
        max_json_depth: deepest nesting of lists and objects in a body.
        max_json_values: most commas and opening brackets in a body, including those in texts, since
            nothing else runs while JSON is decoded (at most 0.05 s for 2**17). None: 2**17, or two
            for each token of the context if that is more.
        max_prompt_chars: most characters of a prompt or conversation, so that the engine's thread
            does not encode a text that cannot fit; None: 64 for each token of the context.
        max_samples: most samples of one request: its prompts times `n`.
        max_answer_logprobs: most log-probabilities in one answer. A prompt counts as its tokens
            times `prompt_logprobs` + 1, with `echo` once for each sample. A sample counts as its
            `max_tokens` (by default the rest of the context) times `logprobs` + 1. A token's trace
            counts as K + 1.
        log_level: level of the log, which is lines of JSON on standard error: `debug`, `info`,
            `warning` or `error`. `info` has a line for each request. `debug` also has lines for
            probes, and details of failures, which may quote a request.
        tool_call_parser: how the model writes tool calls: `hermes`, `llama3_json` or `mistral`.
            With `none` tools are refused; `auto` finds the format in the chat template.
        reasoning_parser: how reasoning in an answer is read: `think` (by vLLM's names `qwen3`,
            `deepseek_r1`) reads `<think>` and `</think>`, `none` leaves them in the text, `auto`
            finds out from the chat template.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    allow_synthetic: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    allow_priority: bool = False
    allowed_origins: tuple[str, ...] = ()
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    io_timeout: float = 30.0
    drain_timeout: float = 20.0
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 32 * 2**10
    max_json_depth: int = 64
    max_json_values: int | None = None
    max_prompt_chars: int | None = None
    max_samples: int = 128
    max_answer_logprobs: int = 2**18
    log_level: str = "info"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        for name in ("queue_timeout", "request_timeout", "io_timeout"):
            check_number(name, getattr(self, name), 0.001, 1e6)
        check_number("drain_timeout", self.drain_timeout, 0, 1e6)
        for name in self.__slots__:
            if name.startswith("max_") and getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.host == "":
            raise ConfigError("host", "", "left out, or not empty")
        if "" in self.keys:
            raise ConfigError("api_key", "", "left out, or not empty")
        self._check_tls()
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError("root_path", self.root_path, "a path such as `/llm`, or empty")
        if self.root_path and self.root_path.split("/")[1] in _OWN_PATHS:
            remedy = "Paths of the server begin in this way: begin with another name."
            raise ConfigError("root_path", self.root_path, "a path such as `/llm`", remedy)
        formats: dict[str, Iterable[str]] = {"tool_call_parser": (), "reasoning_parser": ()}
        if any(getattr(self, name) not in ("auto", "none") for name in formats):
            from foretoken.serve.parsers.formats import FORMATS, REASONING_PARSERS

            formats = {"tool_call_parser": FORMATS, "reasoning_parser": REASONING_PARSERS}
        # By default the formats are not imported, since that loads torch.
        for name, format_names in formats.items():
            if (value := getattr(self, name)) not in (names := ("auto", "none", *format_names)):
                remedy = "With `auto` the chat template decides; other formats are not supported."
                raise ConfigError(name, value, f"one of {', '.join(names)}", remedy)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError("log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name", "", "not empty")
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError("allowed_hosts", name, "a name without scheme, port and path")
        if self.allowed_hosts and not self.checks_host:
            bound = "left out with a key, or if `host` is not an address of the loopback"
            remedy = "In these cases `Host` is not checked: requests with any name are answered."
            raise ConfigError("allowed_hosts", self.allowed_hosts, bound, remedy)

    def _check_tls(self) -> None:
        check_int("ssl_cert_reqs", self.ssl_cert_reqs, 0, 2)
        pair = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        if None in pair.values() and (self.has_tls or self.ssl_ca_certs or self.ssl_cert_reqs):
            missing = min(name for name, value in pair.items() if value is None)
            raise ConfigError(missing, None, "a PEM file, given with the other --ssl options")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_ca_certs", None, "given with `ssl_cert_reqs`")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that clients may send; empty: no key is needed."""
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key or ())

    @property
    def has_tls(self) -> bool:
        return self.ssl_keyfile is not None or self.ssl_certfile is not None

    @property
    def is_exposed(self) -> bool:
        """Whether clients on other machines can call the server without a key."""
        return not self.keys and not self._is_loopback

    @property
    def checks_host(self) -> bool:
        """Whether `Host` is checked: without a key nothing else refuses requests of web sites."""
        return not self.keys and self._is_loopback

    @property
    def _is_loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check_engine(self, config: EngineConfig) -> None:
        """Raise `ConfigError` if the engine's rule is `synthetic`, unless `allow_synthetic`."""
        speculation = config.speculative_config
        rule = speculation.rejection_sample_method if speculation else None
        if rule == "synthetic" and not self.allow_synthetic:
            place, bound = "speculative_config.rejection_sample_method", "a lossless rule"
            raise ConfigError(place, rule, bound, "--allow-synthetic allows this rule.")


def describe_model(names: Sequence[str], config: EngineConfig) -> str:
    """A line with the model's names, its drafters, K and the rule."""
    speculation, summary = config.speculative_config, "nothing drafts"
    if speculation is not None:
        drafters, max_drafts = ", ".join(speculation.members), speculation.num_speculative_tokens
        rule = speculation.rejection_sample_method
        summary = f"drafts by {drafters}, K = {max_drafts}, rule {rule}"
    return f"{', '.join(names)}: {summary}."
