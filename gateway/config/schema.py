"""What may stand in the configuration file, as frozen structs.

Durations are seconds as floats and sizes are bytes as integers once loaded; in YAML they may be written as ``300ms``,
``30s``, ``5m`` and ``64MiB`` (see `gateway.config.load`). Every field has a default except those without which there is
nothing to do.
"""

from typing import Annotated, Any, Literal

import msgspec

from backends import profiles
from gateway.config.base import Bytes, Count, Name, Port, Positive, Seconds, Share, Struct
from gateway.config.directory import L2
from gateway.config.residency import ResidencyConfig, WorkerHints

PROFILES = tuple(profiles.PROFILES)
"""Names of the built-in capability profiles; the simulator has an engine for each."""
DEFAULT_POLICY = "ttft"
"""Of a model that names none."""


class Address(Struct, frozen=True, kw_only=True):
    """Where a listener binds. Port 0 takes any free port (tests)."""

    host: str = "127.0.0.1"
    """The address to bind; 0.0.0.0 or :: for all interfaces."""
    port: Port = 8080
    """The port; 0 takes any free one."""


class Admin(Address, frozen=True, kw_only=True):
    """Where the admin listener binds, and who may use it."""

    secrets = frozenset({"token"})

    host: str = "127.0.0.1"
    """The address to bind; 0.0.0.0 or :: for all interfaces."""
    port: Port = 8081
    """The port; 0 takes any free one."""
    token: Annotated[str, msgspec.Meta(min_length=16)] | None = None
    """Asked for by the inspector and its API, as a bearer token or in a form; write it as ``${NAME_OF_A_VARIABLE}``. Without one they answer on loopback only."""
    token_file: Name | None = None
    """A file that holds the token, read at start; instead of `token`."""
    links: dict[str, str] = {}
    """Trace viewers that a request's page links to: name to URL, with ``{trace_id}`` and ``{span_id}`` in it."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long each phase of a request may last; 0 switches that limit off.

    The defaults let a prompt take minutes to prefill and a stream go on for hours as long as it moves.
    """

    connect: Seconds = 3.0
    """Until the TCP (and TLS) connection to the worker stands."""
    first_byte: Seconds = 300.0
    """From the last request byte sent to the first answer byte."""
    between_chunks: Seconds = 120.0
    """The longest silence inside an answer that has started."""
    total: Seconds = 900.0
    """The whole of a request whose answer is not a stream."""


class Retries(Struct, frozen=True, kw_only=True):
    """When a request may go to another worker. Never after a byte of an answer went to the client.

    A connection from the pool that dies as the request is sent is replaced by a fresh one to the same worker; that is no attempt of its own.
    """

    attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    """Attempts in all, the first included."""
    budget: Share = 0.2
    """Of each model: retries after an answer are at most this share of the requests of the last `budget_window` ..."""
    budget_min: Count = 10
    """... or this many, whichever is more."""
    budget_window: Seconds = 10.0
    """What the budget counts over."""
    statuses: tuple[Literal[429, 500, 502, 503, 504], ...] = (502, 503)
    """Answers of a worker that another worker may do better."""
    retry_after_max: Seconds = 60.0
    """A worker that answers 429 or 503 with `Retry-After` gets nothing new until then, at most this long, and another one is asked. 0: no."""


class Hedging(Struct, frozen=True, kw_only=True):
    """A second attempt at another worker for a request that still waits for its first token. The first byte of an answer's body wins, the other attempt is ended."""

    after: Literal["p50", "p90", "p95", "p99"] | Seconds = "p95"
    """So long without a first byte; `p95`: longer than 95 of the model's last 100 first bytes took."""
    budget: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    """Second attempts are at most this share of the model's requests of the last minute. 0: none are made."""
    max: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1
    """Further attempts of one request."""


class Outliers(Struct, frozen=True, kw_only=True):
    """A worker whose success rate is far below its peers' is ejected: Envoy's rule, which finds what never fails in a row."""

    enabled: bool = True
    """Whether success rates are compared."""
    interval: Seconds = 10.0
    """What a rate is taken over."""
    min_workers: Annotated[int, msgspec.Meta(ge=3)] = 5
    """Fewer workers with `min_requests` are not compared."""
    min_requests: Positive = 100
    """A worker with fewer requests in the interval is not compared."""
    deviations: Annotated[float, msgspec.Meta(ge=0)] = 1.9
    """Ejected is who is below the mean of all rates by more than this many standard deviations ..."""
    min_gap: Share = 0.05
    """... and by more than this: where all do well, one failure is no outlier."""


class Hosts(Struct, frozen=True, kw_only=True):
    """Workers of one host fail together: when some are ejected at once, the others there are suspect until they have proved otherwise."""

    workers: Count = 2
    """So many workers of one host, ejected ... (0: hosts are not looked at)"""
    within: Seconds = 5.0
    """... in so short a time make the others suspect: checked at once, avoided where others are left."""
    suspect: Seconds = 15.0
    """For how long at most."""


class Ejection(Struct, frozen=True, kw_only=True):
    """Passive health: a worker whose requests fail is left out for a while."""

    consecutive_failures: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Failed requests in a row after which a worker is ejected."""
    base: Seconds = 5.0
    """The first ejection lasts this long, the n-th n times as long ..."""
    max: Seconds = 300.0
    """... but never longer than this."""
    max_share: Share = 0.5
    """At most this share of a fleet is ejected at once (but one worker always may be)."""
    panic_share: Share = 0.5
    """When more than this share of a fleet is out, those that were ejected for their requests are used all the same. 1: only when nobody is left."""
    failure_penalty: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """A failed request counts as so many slow ones in what a worker gets: failing fast must not look like being idle. 1: it does not count."""
    outliers: Outliers = Outliers()
    """Success rates far below the others'."""
    hosts: Hosts = Hosts()
    """Workers that stand on one host."""


class Health(Struct, frozen=True, kw_only=True):
    """Active checks of each worker, and what their outcome does."""

    interval: Seconds = 2.0
    """From one check of a worker to the next."""
    timeout: Seconds = 2.0
    """A check that takes longer has failed."""
    path: str | None = None
    """Overrides the path that the worker's driver would ask."""
    unhealthy_after: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Failed checks in a row after which a worker takes no new requests."""
    healthy_after: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Good checks in a row after which it does again."""
    slow_start: Seconds = 10.0
    """A worker that becomes ready takes its full share of load only after this long."""
    ejection: Ejection = Ejection()
    """Leaving out workers whose requests fail."""


class Pool(Struct, frozen=True, kw_only=True):
    """Connections to one worker."""

    idle: Seconds = 4.0
    """An idle connection is closed after this long; must be below `worker_keep_alive`. 0: no connection is reused."""
    worker_keep_alive: Seconds = 5.0
    """How long the workers themselves keep an idle connection (vLLM: ``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``, 5 s)."""
    max_idle: Count = 256
    """Idle connections kept per worker."""


class TierMemory(Struct, frozen=True, kw_only=True):
    """Memory behind the device's, from which a worker loads KV blocks."""

    capacity: Bytes | None = None
    """What it holds for this worker."""
    bandwidth: Annotated[int, msgspec.Meta(ge=1, extra_json_schema={"unit": "bytes"})] | None = None
    """Bytes per second into the device."""
    latency: Seconds | None = None
    """Of each transfer, whatever its size."""


class Tiers(Struct, frozen=True, kw_only=True):
    """The memories behind the device's."""

    l1: TierMemory | None = None
    """The worker's CPU memory."""
    l2: TierMemory | None = None
    """Shared: disk, Redis, tiered storage."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a worker can do, where it is known better than discovered. What is left out is taken from the profile, else discovered, else assumed."""

    profile: str | None = None
    """A built-in profile: trn2-70b, trn1-8b, inf2-8b, h100-8b, h100x2-32b."""
    block_size: Positive | None = None
    """Tokens per KV block."""
    kv_capacity_tokens: Positive | None = None
    """Tokens that the KV cache in device memory holds."""
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1, extra_json_schema={"unit": "bytes"})] | None = None
    """Size of one token's keys and values: 2 x layers x KV heads x head size x bytes per number."""
    max_model_len: Positive | None = None
    """Prompt and answer together, in tokens."""
    slots: Positive | None = None
    """Requests in the running batch (`--max-num-seqs`); fewer run at once where memory is reserved for the longest (Neuron)."""
    prefill: Literal["exclusive", "chunked"] | None = None
    """One prompt at a time while all decodes wait (Neuron), or in chunks that share each step with decodes."""
    max_num_batched_tokens: Positive | None = None
    """Tokens per step of a worker that prefills in chunks."""
    prefill_buckets: tuple[Positive, ...] | None = None
    """Token counts, rising, to which prompts are padded (Neuron)."""
    segments: bool | None = None
    """Whether a prompt above the largest bucket is prefilled in several runs, or ends in an error."""
    segment_size: Positive | None = None
    """A cached prefix counts in whole segments of this many tokens (Neuron)."""
    max_prefix_bucket: Positive | None = None
    """The longest cached prefix, in tokens, that the worker can use (Neuron)."""
    decode_context_buckets: tuple[Positive, ...] | None = None
    """Token counts, rising, to which a decode step pads its longest context (Neuron)."""
    prefill_rate: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Prompt tokens per second, padding counted: where learning starts."""
    overhead: Seconds | None = None
    """Of each prefill, whatever its length."""
    decoder: Literal["plain", "speculative", "medusa"] | None = None
    """How it decodes. Medusa on Neuron runs one request at a time."""
    tokens_per_step: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Output tokens per request and decode step, on average."""
    prefix_caching: bool | None = None
    """Whether the worker reuses prefixes at all."""
    tiers: Tiers = Tiers()
    """The memories behind the device's, and how fast they are."""
    role: Literal["both", "prefill", "decode"] | None = None
    """Its part where prefill and decode are done by different workers; both, unless it says otherwise."""
    lora_adapters: tuple[str, ...] | None = None
    """Names of the LoRA adapters that it has loaded."""


class EventSocket(Struct, frozen=True, kw_only=True):
    """Where KV events are published, if that can't be found out or is to be different."""

    endpoint: Name
    """ZMQ address of the PUB socket as seen from here, such as `tcp://10.0.0.7:5557`."""
    replay_endpoint: Name | None = None
    """ZMQ address of the socket that repeats what was missed; without it a gap or a restart forgets everything."""
    topic: Name | None = None
    """What to subscribe to, if not everything that is published there."""


class TierTimes(Struct, frozen=True, kw_only=True):
    """For memories whose removals a worker never reports: after this long without news its blocks there are forgotten."""

    l1: Seconds | None = None
    """Of the worker's CPU memory; LMCache's connector of before its multiprocess server needs it."""
    l2: Seconds | None = None
    """Of shared memory: disk, Redis, tiered storage."""


class WorkerLimits(Struct, frozen=True, kw_only=True):
    """How much is sent to one worker: HyperPod's `requestLimits`. What does not fit waits in the gateway."""

    max_concurrent: Positive | None = None
    """Requests at once, where that is less than its slots (`maxConcurrentRequests`)."""
    max_queue: Count | None = None
    """Requests that may wait for it (`maxQueueSize`): those of all workers of a model together are the bound of its line."""
    overflow_status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 429
    """The status of answers to requests beyond that (`overflowStatusCode`)."""


class Worker(Struct, frozen=True, kw_only=True):
    """One inference server process behind one URL."""

    secrets = frozenset({"api_key"})

    url: str
    """Base URL, http or https, without the /v1; a path before it is allowed."""
    driver: Name = "openai"
    """What kind of worker it is: vllm, neuron, sglang or openai."""
    id: Name | None = None
    """How it is called in headers, metrics and traces; default: host:port of the URL."""
    api_key: str | None = None
    """Sent to the worker as a bearer token; write it as ``${NAME_OF_A_VARIABLE}``."""
    model: Name | None = None
    """What this worker calls the model, if not by the fleet's name."""
    host: Name | None = None
    """The machine that it stands on, where the URL's host does not say so: workers of one machine fail together."""
    capabilities: Capabilities = Capabilities()
    """What it can do, as far as that is known better than it can be discovered."""
    kv_events: Literal["auto", "off"] | EventSocket = "auto"
    """How to learn what is in its cache: ask it where it publishes (auto), from this socket, or not at all (off)."""
    lmcache_events: EventSocket | None = None
    """The socket of the LMCache server that it uses, if that publishes events of its own (`--kv-events-endpoint`)."""
    forget_after: TierTimes = TierTimes()
    """For memories whose removals it never reports: when to forget what is there."""
    limits: WorkerLimits = WorkerLimits()
    """How much is sent to it at once, and how much may wait for it."""
    hints: WorkerHints = WorkerHints()
    """How it is told what to keep and what to fetch, where `residency` is on."""


class PolicyChoice(Struct, frozen=True, kw_only=True):
    """Clients may name the policy of a request in a header; what they name must be allowed here."""

    header: Name = "x-warmroute-policy"
    """The header field. A request without it goes by the model's policy; one that names anything else is answered 400."""
    allowed: tuple[Name, ...]
    """Presets, or names under `policies`."""


class Admission(Struct, frozen=True, kw_only=True):
    """Requests wait in the gateway, by priority, deadline and tenant, as long as no worker has a slot for them."""

    max_requests: Count = 1000
    """Requests that wait at once; beyond it those of the lowest priority are answered 429."""
    max_tokens: Count = 10_000_000
    """Tokens of their prompts, where known."""
    max_wait: Seconds = 60.0
    """A request that has waited so long is answered 429; 0: no limit."""
    prefill_ahead: Seconds = 1.0
    """A worker that computes one prompt at a time (Neuron) gets another one while less than so many seconds of prefill are before it."""
    headroom: Share = 0.1
    """Share of the slots that is kept from tenants which have their fair share of them already, as long as there are other tenants."""
    aging: Seconds = 10.0
    """One turn in eight goes to whoever has waited longest, if that is longer than this: nothing starves."""


class Model(Struct, frozen=True, kw_only=True):
    """A fleet: the workers that serve one model."""

    name: Name
    """What clients ask for and what the workers call it; unique in the file, with all aliases."""
    aliases: tuple[Name, ...] = ()
    """Other names that clients may use; rewritten to `name` on the way out."""
    policy: Name = DEFAULT_POLICY
    """Who chooses the worker: a preset (ttft, kvaware, prefixaware, lmetric, dynamo-cost, leastload, p2c, roundrobin, session, chwbl) or a name under `policies`."""
    stage_policies: dict[Name, Name] = {}
    """Other policies for some stages, by the stage's name."""
    policy_choice: PolicyChoice | None = None
    """Lets clients choose among policies, request by request."""
    workers: tuple[Worker, ...]
    """At least one."""
    tokenizer: str | None = None
    """A directory with tokenizer.json and the chat template, or a Hugging Face id; without it prompts are matched by their bytes."""
    oracle: Literal["auto", "on", "off"] = "auto"
    """Without a tokenizer: ask the workers for tokens always (on), where a hit is worth the question (auto), or never (off)."""
    l2: L2 | None = None
    """Storage that its workers load KV from, and who is asked what is in it; without it, what workers' own events say of it."""
    pass_token_ids: Literal["auto", "on", "off"] = "auto"  # noqa: S105 - tokens of a prompt
    """Send the ids along, so that the worker neither renders nor tokenizes: where it is proven to honour them (auto), always, or never."""
    admission: Admission | None = None
    """Requests wait in the gateway instead of in the workers; without it, and without any worker's `limits`, they never wait here."""
    hedging: Hedging | None = None
    """A second attempt for requests that wait long for their first token; without it there is none."""
    timeouts: Timeouts | None = None
    """Whole-section override of the top-level `timeouts` for this model."""
    retries: Retries | None = None
    """Whole-section override of the top-level `retries` for this model."""
    health: Health | None = None
    """Whole-section override of the top-level `health` for this model."""


class Step(Struct, frozen=True, kw_only=True):
    """A filter, scorer or picker in a policy: a built-in type, an entry point's name or a dotted path."""

    type: Name
    """A built-in type, the name of an entry point, or `package.module:Class`."""
    name: Name | None = None
    """How it is called in traces; default: its type."""
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """The factor of a scorer's costs in the sum; scorers only."""
    parameters: dict[str, Any] = {}
    """What the type's constructor takes."""


class Policy(Struct, frozen=True, kw_only=True):
    """Filters, then scorers, then a picker; or a preset with other parameters than its defaults."""

    preset: Name | None = None
    """A preset (ttft, kvaware, prefixaware, lmetric, dynamo-cost, leastload, p2c, roundrobin, session, chwbl) instead of steps."""
    parameters: dict[str, Any] = {}
    """The preset's parameters."""
    filters: tuple[Step, ...] = ()
    """Remove candidates, in this order; default: those of the presets."""
    scorers: tuple[Step, ...] = ()
    """Give costs, which are weighted and added up."""
    picker: Step | None = None
    """Chooses among the candidates; default: lowest-cost."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one client may make the gateway hold."""

    body: Bytes = 64 * 1024 * 1024
    """The longest request body; longer ones are answered 413."""
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


class Overload(Struct, frozen=True, kw_only=True):
    """When new requests are refused because the process itself is at its limit: the lowest classes first, then all (docs/admission.md)."""

    lag: Seconds = 0.5
    """All are refused while the event loop runs this late, and the lowest class from half of it on; 0: never."""
    memory: Bytes | None = None
    """What the process may take; by default what its control group (container) may. 0: the same as the default."""
    memory_share: Share = 0.95
    """All are refused while this share of it is taken, and the lowest class a tenth before; 0: never."""
    descriptors: Share = 0.9
    """All are refused while this share of the file descriptors (`ulimit -n`) is taken, and the lowest class a little before; 0: never."""


class Tenant(Struct, frozen=True, kw_only=True):
    """Whoever an API key belongs to, and what it may do. With one tenant in the file, every request needs a key."""

    secrets = frozenset({"keys", "key", "cache_salt"})

    keys: tuple[str, ...] = ()
    """Hashes of its keys, as `warmroute key` prints them: `sha256:` and 64 hexadecimal digits."""
    key: Annotated[str, msgspec.Meta(min_length=20)] | None = None
    """A key itself; write it as ``${NAME_OF_A_VARIABLE}``."""
    keys_file: Name | None = None
    """A file with a key or its hash on each line; read again when it changes."""
    models: tuple[Name, ...] = ("*",)
    """Names of models and aliases that it may use; `*` and `?` stand for any characters. A model's name stands for its aliases too."""
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """So many requests; more are answered 429."""
    tokens_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """So many tokens: those of a prompt before it is sent, those of the answer when they are known."""
    concurrency: Positive | None = None
    """Requests at once."""
    burst: Seconds = 60.0
    """Of both limits a minute, what goes unused is kept for so long. 60 s: a minute's worth may come at once."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Its share of the tokens beside other tenants', when requests have to wait."""
    priority_ceiling: int = 0
    """The most urgent priority that it may ask for; smaller is sooner, as in vLLM."""
    may_set: tuple[Literal["stage", "deadline", "priority", "policy"], ...] = ()
    """Header fields that it may send: `x-warmroute-stage`, `-deadline-ms`, `-priority` and `policy_choice`'s. Others of them are answered 403."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=8)] | None = None
    """Keeps its cached prefixes apart from all others': goes into every request, over what the client sends. Write it as ``${NAME_OF_A_VARIABLE}``."""


class StageMatch(Struct, frozen=True, kw_only=True):
    """Requests that are of a stage without naming it. All that is given must hold; with nothing given, the stage is only taken by name."""

    models: tuple[Name, ...] = ()
    """They ask for one of these models."""
    tenants: tuple[Name, ...] = ()
    """They are one of these tenants'."""
    headers: dict[str, str] = {}
    """They have these header fields, with these values."""


class Stage(Struct, frozen=True, kw_only=True):
    """A class of work with a deadline and a priority of its own, at models with `admission`."""

    kind: Literal["ttft", "completion"] = "ttft"
    """What must have happened by the deadline: the first token, or the last one."""
    deadline: Seconds | None = None
    """From the request's arrival; what is predicted to miss it is answered 429 at once. Clients may ask for another by `x-warmroute-deadline-ms`."""
    priority: int = 0
    """Smaller is sooner, as in vLLM. What a request asks for itself is added."""
    reserve: Share = 0.0
    """Share of a model's slots that no other stage gets."""
    max_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Share of a model's slots that it gets at most."""
    workers: tuple[Name, ...] = ()
    """Ids of workers that serve this stage only, and it them only."""
    after: Name | None = None
    """The stage that precedes it in a conversation (`x-warmroute-session`, metadata.session_id or prompt_cache_key): when that starts, a slot is reserved for it."""
    hold: Seconds = 2.0
    """For how long, from the start of that stage's request on."""
    hedging: Hedging | None = None
    """Of this stage's requests; null: as their model has it. `{budget: 0}`: not at all."""
    match: StageMatch = StageMatch()
    """Requests that belong to it without saying so."""


class Headers(Struct, frozen=True, kw_only=True):
    """What the gateway adds to answers."""

    worker: bool = True
    """`x-warmroute-worker` names the worker that answered."""


class Traces(Struct, frozen=True, kw_only=True):
    """OpenTelemetry spans. Off (`none`) costs nothing."""

    secrets = frozenset({"headers"})

    exporter: Literal["none", "otlp", "otlp-grpc", "console", "file"] = "none"
    """Where spans go: to a collector by OTLP over HTTP (`otlp`) or gRPC, to standard error, to a file."""
    endpoint: str | None = None
    """The collector's URL; default: `http://127.0.0.1:4318/v1/traces`, for `otlp-grpc` `http://127.0.0.1:4317`."""
    file: str | None = None
    """Where the exporter `file` writes them, one JSON object a line."""
    headers: dict[str, str] = {}
    """Sent to the collector; their values are never shown."""
    sample: Share = 0.1
    """Of the requests that come without a trace context; with one, its sampled flag is followed."""
    inbound: Literal["continue", "link", "ignore"] = "continue"
    """What a client's trace context does: its trace is continued, linked to, or ignored."""


class Logs(Struct, frozen=True, kw_only=True):
    """structlog JSON lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""
    format: Literal["json", "console"] = "json"
    """`json` for machines, `console` for eyes."""
    requests: Share = 0.0
    """Share of successful requests that get a line; failed ones always do."""


class Decisions(Struct, frozen=True, kw_only=True):
    """What is kept of finished requests in memory, for the admin listener. Errors and slow ones have a quarter of it to themselves."""

    count: Count = 2000
    """So many requests at most; 0: none."""
    per_second: Count = 200
    """Of more requests a second than this (once `count` came at once) a sample is kept, and all errors and slow ones; 0: of all."""
    bytes: Bytes = 16 * 1024 * 1024
    """So much memory at most."""
    slow: Seconds = 2.0
    """A first byte that takes longer makes a request one of the slow ones."""


class RequestLogFile(Struct, frozen=True, kw_only=True):
    """A file with one JSON line per request: what was decided and what became of it, no text. `replay` reads it."""

    file: str | None = None
    """Where it is written; null: nowhere."""
    rotate: Bytes = 64 * 1024 * 1024
    """A file of this size is set aside as `.1` and a new one begun."""
    files: Count = 5
    """So many that were set aside are kept."""


class Capture(Struct, frozen=True, kw_only=True):
    """Request bodies, prompts included, kept in memory with the requests that the admin listener shows."""

    enabled: bool = False
    """Switch it on only where whoever reads the admin listener may read prompts."""
    bytes: Bytes = 64 * 1024
    """Longer bodies are not kept."""
    redact: tuple[str, ...] = ("api_key", "authorization", "cache_salt", "password", "secret", "token", "user")
    """Members of these names, at any depth, are shown without their value."""


class MetricsExport(Struct, frozen=True, kw_only=True):
    """What becomes of the counters besides `/metrics`, which is always there on the admin listener."""

    secrets = frozenset({"headers"})

    exporter: Literal["none", "otlp"] = "none"
    """Whether they are sent somewhere as well."""
    endpoint: str = "http://127.0.0.1:4318/v1/metrics"
    """Where the exporter `otlp` sends them (OTLP over HTTP)."""
    headers: dict[str, str] = {}
    """Sent to the collector; their values are never shown."""
    interval: Annotated[float, msgspec.Meta(ge=1, extra_json_schema={"unit": "seconds"})] = 30.0
    """From one export to the next."""
    hyperpod: bool = False
    """Show requests, errors, load and latencies under HyperPod's `model_*` names too."""
    labels: dict[str, str] = {}
    """Labels of those, such as cluster_name, namespace or instance_type."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """Traces and logs; `/metrics` is always there on the admin listener."""

    service_name: str = "warmroute"
    """`service.name` of the telemetry."""
    traces: Traces = Traces()
    """OpenTelemetry spans."""
    logs: Logs = Logs()
    """Log lines."""
    metrics: MetricsExport = MetricsExport()
    """Where the counters go besides `/metrics`."""
    decisions: Decisions = Decisions()
    """Finished requests in memory."""
    request_log: RequestLogFile = RequestLogFile()
    """Finished requests in a file."""
    capture: Capture = Capture()
    """Request bodies beside them."""


class Prefix(Struct, frozen=True, kw_only=True):
    """What is kept about which worker holds which prefix."""

    budget: Annotated[int, msgspec.Meta(ge=1024 * 1024, extra_json_schema={"unit": "bytes"})] = 256 * 1024 * 1024
    """Memory for each block size in use; beyond it the blocks used least lately are forgotten. Not reloadable."""


class Config(Struct, frozen=True, kw_only=True):
    """The whole file."""

    models: tuple[Model, ...]
    """The fleets; at least one."""
    listen: Address = Address(port=8080)
    """Where clients connect. Not reloadable."""
    admin: Admin = Admin()
    """Where health, readiness, metrics and the inspector are. The first three ask for no token: keep clients away. Not reloadable."""
    tenants: dict[Name, Tenant] = {}
    """Who may use the gateway, by name; without any, everybody."""
    stages: dict[Name, Stage] = {}
    """Classes of work, by name (docs/admission.md)."""
    policies: dict[str, Policy] = {}
    """Policies of one's own, by name; one that is called like a preset replaces it."""
    timeouts: Timeouts = Timeouts()
    """How long each phase of a request may last."""
    retries: Retries = Retries()
    """When a request may go to another worker."""
    health: Health = Health()
    """How workers are checked and left out."""
    pool: Pool = Pool()
    """Connections to the workers."""
    limits: Limits = Limits()
    """What one client may make the gateway hold."""
    overload: Overload = Overload()
    """When the process itself is at its limit."""
    headers: Headers = Headers()
    """What is added to answers."""
    prefix: Prefix = Prefix()
    """What is kept about which worker holds which prefix."""
    residency: ResidencyConfig | None = None
    """What workers are told about what to keep and what to fetch (docs/residency.md); null: nothing, `{}`: by the defaults."""
    telemetry: Telemetry = Telemetry()
    """Traces and logs."""
    grace: Seconds = 30.0
    """On SIGTERM, how long running requests may go on before they are ended with an error."""
