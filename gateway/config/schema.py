"""What may stand in the configuration file, as frozen structs.

Durations are seconds as floats and sizes are bytes as integers once loaded; in YAML they may be written as ``300ms``,
``30s``, ``5m`` and ``64MiB`` (see `gateway.config.load`). Every field has a default except those without which there is
nothing to do.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, extra_json_schema={"unit": "seconds"})]
Bytes = Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"unit": "bytes"})]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

PROFILES = ("trn2-70b", "trn1-8b", "inf2-8b", "h100-8b", "h100x2-32b")
"""Names of the built-in capability profiles; the simulator has an engine for each."""

REDACTED = "<redacted>"
"""What is shown in place of a secret."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every section: frozen, keywords only, unknown keys refused, secrets left out of its repr."""

    secrets: ClassVar[frozenset[str]] = frozenset()
    """Fields whose value (of a mapping: whose values) must never be shown."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.shown())})"

    def shown(self) -> list[tuple[str, Any]]:
        """Each field's name and value in their order, secrets replaced by `REDACTED`."""
        return [
            (name, _redacted(getattr(self, name)) if name in self.secrets else getattr(self, name))
            for name in self.__struct_fields__
        ]

    __rich_repr__ = shown


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, REDACTED)
    return value if value is None else REDACTED


class Address(Struct, frozen=True, kw_only=True):
    """Where a listener binds. Port 0 takes any free port (tests)."""

    host: str = "127.0.0.1"
    port: Port = 8080


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long each phase of a request may last; 0 switches that limit off.

    The defaults let a prompt take minutes to prefill and a stream go on for hours as long as it moves.
    """

    connect: Seconds = 3.0
    first_byte: Seconds = 300.0
    """From the last request byte sent to the first answer byte."""
    between_chunks: Seconds = 120.0
    """The longest silence inside an answer that has started."""
    total: Seconds = 900.0
    """The whole of a request whose answer is not a stream."""


class Retries(Struct, frozen=True, kw_only=True):
    """When a request may go to another worker. Never after a byte of an answer went to the client."""

    attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    """Attempts in all, the first included."""
    budget: Share = 0.2
    """Retries may be at most this share of the requests in flight ..."""
    budget_min: Count = 3
    """... or this many, whichever is more."""
    statuses: tuple[Literal[429, 500, 502, 503, 504], ...] = (502, 503)
    """Answers of a worker that another worker may do better."""


class Ejection(Struct, frozen=True, kw_only=True):
    """Passive health: a worker whose requests fail is left out for a while."""

    consecutive_failures: Annotated[int, msgspec.Meta(ge=1)] = 3
    base: Seconds = 5.0
    """The first ejection lasts this long, the n-th n times as long ..."""
    max: Seconds = 300.0
    """... but never longer than this."""
    max_share: Share = 0.5
    """At most this share of a fleet is ejected at once (but one worker always may be)."""


class Health(Struct, frozen=True, kw_only=True):
    """Active checks of each worker, and what their outcome does."""

    interval: Seconds = 2.0
    timeout: Seconds = 2.0
    path: str | None = None
    """Overrides the path that the worker's driver would ask."""
    unhealthy_after: Annotated[int, msgspec.Meta(ge=1)] = 2
    healthy_after: Annotated[int, msgspec.Meta(ge=1)] = 1
    slow_start: Seconds = 10.0
    """A worker that becomes ready takes its full share of load only after this long."""
    ejection: Ejection = Ejection()


class Pool(Struct, frozen=True, kw_only=True):
    """Connections to one worker."""

    idle: Seconds = 4.0
    """An idle connection is closed after this long; must be below `worker_keep_alive`. 0: no connection is reused."""
    worker_keep_alive: Seconds = 5.0
    """How long the workers themselves keep an idle connection (vLLM: ``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``, 5 s)."""
    max_idle: Count = 256
    """Idle connections kept per worker."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a worker can do, where it is known better than discovered. None means: discover or use the profile."""

    profile: str | None = None
    """A built-in profile: trn2-70b, trn1-8b, inf2-8b, h100-8b, h100x2-32b."""
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    kv_capacity_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    segment_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_prefix_bucket: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prefix_caching: bool | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    lora_adapters: tuple[str, ...] = ()


class Worker(Struct, frozen=True, kw_only=True):
    """One inference server process behind one URL."""

    secrets = frozenset({"api_key"})

    url: str
    driver: Name = "openai"
    id: Name | None = None
    """How it is called in headers, metrics and traces; default: host:port of the URL."""
    api_key: str | None = None
    """Sent to the worker as a bearer token; write it as ``${NAME_OF_A_VARIABLE}``."""
    model: Name | None = None
    """What this worker calls the model, if not by the fleet's name."""
    capabilities: Capabilities = Capabilities()


class Model(Struct, frozen=True, kw_only=True):
    """A fleet: the workers that serve one model."""

    name: Name
    aliases: tuple[Name, ...] = ()
    """Other names that clients may use; rewritten to `name` on the way out."""
    policy: Name = "leastload"
    workers: tuple[Worker, ...]
    tokenizer: str | None = None
    """A directory with tokenizer.json and the chat template, or a Hugging Face id; None: match on bytes."""
    timeouts: Timeouts | None = None
    """Whole-section override of the top-level `timeouts` for this model."""
    retries: Retries | None = None
    health: Health | None = None


class Step(Struct, frozen=True, kw_only=True):
    """A filter, scorer or picker in a policy: a built-in type, an entry point's name or a dotted path."""

    type: Name
    name: Name | None = None
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    parameters: dict[str, Any] = {}


class Policy(Struct, frozen=True, kw_only=True):
    """Filters, then scorers, then a picker; or a preset with other parameters than its defaults."""

    preset: Name | None = None
    parameters: dict[str, Any] = {}
    filters: tuple[Step, ...] = ()
    scorers: tuple[Step, ...] = ()
    picker: Step | None = None


class Limits(Struct, frozen=True, kw_only=True):
    """What one client may make the gateway hold."""

    body: Bytes = 64 * 1024 * 1024
    header: Bytes = 32 * 1024
    """All header fields of a request together."""
    header_read: Seconds = 10.0
    """From the first byte of a request (or the accept) to the end of its head."""
    body_rate: Bytes = 1024
    """A request body that comes slower than this many bytes a second (over any 5 s) is refused with 408."""
    keep_alive: Seconds = 75.0
    """An idle client connection is closed after this long."""
    connections: Count = 20_000
    """Client connections at once; more are answered 503 and closed."""


class Headers(Struct, frozen=True, kw_only=True):
    """What the gateway adds to answers."""

    worker: bool = True
    """`x-warmroute-worker` names the worker that answered."""


class Traces(Struct, frozen=True, kw_only=True):
    """OpenTelemetry spans. Off (`none`) costs nothing."""

    secrets = frozenset({"headers"})

    exporter: Literal["none", "otlp", "console", "file"] = "none"
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    file: str | None = None
    headers: dict[str, str] = {}
    sample: Share = 0.1
    """Of the requests that come without a trace context; with one, its sampled flag is followed."""
    inbound: Literal["continue", "link", "ignore"] = "continue"


class Logs(Struct, frozen=True, kw_only=True):
    """structlog JSON lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"
    requests: Share = 0.0
    """Share of successful requests that get a line; failed ones always do."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """Traces and logs; `/metrics` is always there on the admin listener."""

    service_name: str = "warmroute"
    traces: Traces = Traces()
    logs: Logs = Logs()


class Config(Struct, frozen=True, kw_only=True):
    """The whole file."""

    models: tuple[Model, ...]
    listen: Address = Address(port=8080)
    admin: Address = Address(port=8081)
    policies: dict[str, Policy] = {}
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    health: Health = Health()
    pool: Pool = Pool()
    limits: Limits = Limits()
    headers: Headers = Headers()
    telemetry: Telemetry = Telemetry()
    grace: Seconds = 30.0
    """On SIGTERM, how long running requests may go on before they are ended with an error."""
