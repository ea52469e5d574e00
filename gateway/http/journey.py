"""One request's way through the gateway: what is known of it, and how its head and body are read."""

from time import monotonic
from typing import TYPE_CHECKING, Any

from gateway.http.body import MultipartModel, body_at_hand, check_length, parse_json, read_body, requested_model
from gateway.http.errors import client_error, method_not_allowed
from gateway.http.headers import RequestHead, RequestIds, scan_request
from gateway.http.routes import Body, Route
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.record import RUNNING, Attempt, Decided, RequestRecord
from gateway.telemetry.spans import seen
from policies.base import NO_MATCH

if TYPE_CHECKING:
    from aiohttp.http_parser import RawRequestMessage

    from gateway.admission.gate import Gate
    from gateway.admission.queue import Ticket
    from gateway.admission.stages import Stage
    from gateway.admission.tenants import Tenant, Tenants
    from gateway.config.schema import Limits
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.worker import Lease, Worker
    from gateway.http.hints import Hinted
    from gateway.http.server import Request
    from gateway.http.usage import Usage
    from gateway.http.watch import UsageWatch
    from gateway.prefix.lookup import Lookup
    from gateway.telemetry.capture import Captured
    from gateway.telemetry.pace import Pace
    from gateway.telemetry.spans import Trace, Tracing
    from policies.base import RouteRequest

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Journey:
    """What is known of one request; grows as it goes.

    Marks are seconds of the monotonic clock, 0 where it never came to that.

    Attributes:
        request: the client's, from aiohttp's parser.
        route: which API path.
        target: the request target with its query, as it goes to the worker.
        start: mark: the head was there.
        read_at: mark: the body was there.
        ready: mark from which on all work is the gateway's own: the head was there or, where it was waited for, the body, or the
            attempt before had ended. (Of uvloop's time there is one value in each turn of the loop, in whole milliseconds.)
        looked_up: mark: it is known what workers hold of the prompt.
        first_byte_at: mark: the first byte of the answer's body.
        end: mark: it is over.
        head: the header fields, once read.
        tenant: whose key it brought; None where no keys are asked for.
        stage: its class of work, or None.
        gate, ticket: where it waits for its turn, and as what; None where nobody waits.
        charged: tokens of its prompt, once its tenant has let it in; None: it has not.
        body: the client's bytes, with its tenant's salt where there is one.
        bytes_in: how many the client sent.
        parsed: the JSON object in them; empty for other bodies.
        model: the name the client used, or None.
        fleet: who serves it.
        route_request: what its policy is told.
        worker: of the latest attempt.
        lease: of the latest attempt's worker.
        lookup: the prompt and who holds it, where the fleet's policy wants to know.
        match: what the chosen worker was believed to hold of it.
        hinted: what is wished of the workers' caches because of it; None: nothing is.
        watch: sees the answer's usage, where there is a `lookup` or somebody wants to know.
        wants_usage: somebody does.
        usage: what the worker says that it cost.
        pace: the moments at which a stream's reads came.
        decisions: of its policy, where they are kept.
        attempts: in their order, the one under way included.
        status: of the answer that the client got, 0 when it got none.
        tracing, trace: who traces it, and its place in the trace; None where nothing is.
        error_type, error_message: what went wrong.
        captured: its body, where bodies are kept.
    """

    __slots__ = (
        "attempts",
        "body",
        "bytes_in",
        "bytes_out",
        "captured",
        "charged",
        "decisions",
        "end",
        "error_message",
        "error_type",
        "first_byte_at",
        "fleet",
        "gate",
        "head",
        "hinted",
        "lease",
        "looked_up",
        "lookup",
        "match",
        "model",
        "multipart",
        "outcome",
        "pace",
        "parsed",
        "read_at",
        "ready",
        "request",
        "route",
        "route_request",
        "stage",
        "start",
        "status",
        "target",
        "tenant",
        "ticket",
        "trace",
        "tracing",
        "usage",
        "wants_usage",
        "watch",
        "worker",
    )

    def __init__(self, request: "Request", route: Route, target: str, start: float) -> None:
        self.request = request
        self.route = route
        self.target = target
        self.start = self.ready = start
        self.read_at = self.looked_up = self.first_byte_at = self.end = 0.0
        self.head: RequestHead | None = None
        self.tenant: Tenant | None = None
        self.charged: int | None = None
        self.stage: Stage | None = None
        self.gate: Gate | None = None
        self.ticket: Ticket | None = None
        self.body = b""
        self.bytes_in = 0
        self.parsed: dict[str, Any] = {}
        self.multipart: MultipartModel | None = None
        self.model: str | None = None
        self.fleet: Fleet | None = None
        self.route_request: RouteRequest | None = None
        self.worker: Worker | None = None
        self.lease: Lease | None = None
        self.lookup: Lookup | None = None
        self.match = NO_MATCH
        self.hinted: Hinted | None = None
        self.watch: UsageWatch | None = None
        self.wants_usage = False
        self.usage: Usage | None = None
        self.pace: Pace | None = None
        self.decisions: list[Decided] = []
        self.attempts: list[Attempt] = []
        self.status = 0
        self.outcome = Outcome.FAILED
        self.error_type: str | None = None
        self.error_message: str | None = None
        self.bytes_out = 0
        self.tracing: Tracing | None = None
        self.trace: Trace | None = None
        self.captured: Captured | None = None

    @property
    def request_id(self) -> bytes:
        """As sent back in ``x-request-id``; empty before the head was read."""
        return self.head.request_id if self.head is not None else b""

    @property
    def first_byte(self) -> float | None:
        """Seconds from `start` to the first byte of the answer's body, or None."""
        return self.first_byte_at - self.start if self.first_byte_at else None

    @property
    def duration(self) -> float:
        """Seconds from head to end, or until now."""
        return (self.end or monotonic()) - self.start

    @property
    def stream(self) -> bool:
        """The client asked for a stream."""
        return self.parsed.get("stream") is True

    def record(self) -> RequestRecord:
        """What is known of it by now. References and floats only: see `gateway.telemetry.record`."""
        fleet, lookup, head, pace = self.fleet, self.lookup, self.head, self.pace
        prompt = lookup.prompt if lookup is not None else None
        decision = self.decisions[-1].decision if self.decisions else None
        policy = decision.policy if decision is not None else fleet.policy_name if fleet is not None else ""
        trace = self.trace
        if trace is None and head is not None and head.trace:
            trace = seen(self.request.message.headers.get("traceparent"))
        return RequestRecord(
            head.request_id if head is not None else b"",
            trace,
            self.request.message.method,
            self.route.path,
            fleet.name if fleet is not None else "",
            policy,
            self.parsed.get("stream") is True,
            self.start,
            self.read_at,
            self.looked_up,
            self.ticket.waited if self.ticket is not None else 0.0,
            self.first_byte_at,
            self.end,
            prompt.token_count if prompt is not None else 0,
            prompt.how if prompt is not None else None,
            prompt.reason if prompt is not None else "",
            prompt.seconds if prompt is not None else 0.0,
            prompt.off_loop if prompt is not None else False,
            # Tuples of structs are none of the garbage collector's business, lists are.
            tuple(self.decisions),
            tuple(self.attempts),
            pace.gaps() if pace is not None else None,
            self.usage,
            self.bytes_in,
            self.bytes_out,
            self.status,
            self.outcome if self.end else RUNNING,
            self.error_type,
            self.error_message,
            stage=self.stage.name if self.stage is not None else None,
            tenant=self.tenant.label if self.tenant is not None else None,
            captured=self.captured,
            hints=tuple(self.hinted.notes) if self.hinted is not None else (),
        )

    async def read(self, ids: RequestIds, limits: "Limits", tenants: "Tenants | None" = None) -> None:
        """Read head and body and find the model's name. With `tenants` a body is read only of a request that belongs to one.

        Raises:
            GatewayError: what is wrong with the request.
        """
        request = self.request
        message = request.message
        self.head = head = scan_request(message.raw_headers, peer=request.connection.peer, ids=ids, limit=limits.header)
        if tenants is not None:
            self.tenant = tenants.of(head.credentials, head.asked)
        if message.method != "POST":
            raise method_not_allowed("POST")
        if message.version != (1, 1):
            check_version(message)
        check_length(head.content_length, limits.body)
        if head.expects_continue and not request.payload.is_eof() and message.version == (1, 1):
            transport = request.connection.transport
            if transport is not None:
                transport.write(_CONTINUE)
        payload = request.payload
        if payload.is_eof():
            body = body_at_hand(payload, limits.body)
        else:
            body = await read_body(payload, limit=limits.body, rate=limits.body_rate)
            self.ready = monotonic()
        self.body = body
        self.bytes_in = len(body)
        if self.route.body is Body.JSON:
            self.parsed = parse_json(body)
            self.model = requested_model(self.parsed)
        else:
            self.multipart = MultipartModel(_content_type(message.raw_headers), body)
            self.model = self.multipart.model
        self.read_at = monotonic()


def check_version(message: "RawRequestMessage") -> None:
    """Refuse what is neither HTTP/1.1 nor a proper HTTP/1.0.

    Raises:
        GatewayError: 505; 400 for an HTTP/1.0 request with Transfer-Encoding, whose framing is not to be trusted (RFC 9112, section 6.1).
    """
    if message.version not in {(1, 1), (1, 0)}:
        raise client_error(505, "http_version", "The HTTP version is not supported; use HTTP/1.1.", close=True)
    if message.chunked and message.version == (1, 0):
        raise client_error(400, "invalid_request", "HTTP/1.0 has no Transfer-Encoding.", close=True)


def _content_type(raw: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return next((value for name, value in raw if name.lower() == b"content-type"), b"")
