"""One request's way through the gateway: what is known of it, and how its head and body are read."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

from gateway.http.body import MultipartModel, body_at_hand, check_length, parse_json, read_body, requested_model
from gateway.http.errors import client_error, method_not_allowed
from gateway.http.headers import RequestHead, RequestIds, scan_request
from gateway.http.routes import Body, Route
from gateway.telemetry.metrics import Outcome
from policies.base import NO_MATCH

if TYPE_CHECKING:
    from aiohttp.http_parser import RawRequestMessage

    from gateway.config.schema import Limits
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.worker import Lease, Worker
    from gateway.http.server import Request
    from gateway.http.usage import Usage
    from gateway.http.watch import UsageWatch
    from gateway.prefix.lookup import Lookup
    from gateway.telemetry.spans import ServerSpan

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Journey:
    """What is known of one request; grows as it goes.

    Attributes:
        request: the client's, from aiohttp's parser.
        route: which API path.
        target: the request target with its query, as it goes to the worker.
        start: loop time when the head was there.
        ready: `perf_counter` seconds from which on all work is the gateway's own: the head was there or, where it was waited for, the
            body, or the attempt before had ended. (uvloop's time stands still within one turn of the loop.)
        head: the header fields, once read.
        body: the client's bytes.
        parsed: the JSON object in them; empty for other bodies.
        model: the name the client used, or None.
        fleet: who serves it.
        worker: of the latest attempt.
        lease: of the latest attempt's worker.
        lookup: the prompt and who holds it, where the fleet's policy wants to know.
        match: what the chosen worker was believed to hold of it.
        watch: sees the answer's usage, where there is a `lookup`.
        usage: what the answer said about its tokens, if it did and anybody wanted to know.
        attempts: how many have begun.
        retrying: it counts against the retry budget.
        status: of the answer that the client got, 0 when it got none.
        first_byte: seconds from `start` to the first byte of the answer, or None.
    """

    __slots__ = (
        "attempts",
        "body",
        "bytes_out",
        "error_type",
        "first_byte",
        "fleet",
        "head",
        "lease",
        "lookup",
        "match",
        "model",
        "multipart",
        "outcome",
        "parsed",
        "ready",
        "request",
        "retrying",
        "route",
        "span",
        "start",
        "status",
        "target",
        "usage",
        "watch",
        "worker",
    )

    def __init__(self, request: "Request", route: Route, target: str, start: float) -> None:
        self.request = request
        self.route = route
        self.target = target
        self.start = start
        self.ready = perf_counter()
        self.head: RequestHead | None = None
        self.body = b""
        self.parsed: dict[str, Any] = {}
        self.multipart: MultipartModel | None = None
        self.model: str | None = None
        self.fleet: Fleet | None = None
        self.worker: Worker | None = None
        self.lease: Lease | None = None
        self.lookup: Lookup | None = None
        self.match = NO_MATCH
        self.watch: UsageWatch | None = None
        self.usage: Usage | None = None
        self.span: ServerSpan | None = None
        self.attempts = 0
        self.retrying = False
        self.status = 0
        self.outcome = Outcome.FAILED
        self.error_type: str | None = None
        self.first_byte: float | None = None
        self.bytes_out = 0

    @property
    def request_id(self) -> bytes:
        """As sent back in ``x-request-id``; empty before the head was read."""
        return self.head.request_id if self.head is not None else b""

    async def read(self, ids: RequestIds, limits: "Limits") -> None:
        """Read head and body and find the model's name.

        Raises:
            GatewayError: what is wrong with the request.
        """
        request = self.request
        message = request.message
        self.head = head = scan_request(message.raw_headers, peer=request.connection.peer, ids=ids, limit=limits.header)
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
            self.ready = perf_counter()
        self.body = body
        if self.route.body is Body.JSON:
            self.parsed = parse_json(body)
            self.model = requested_model(self.parsed)
        else:
            self.multipart = MultipartModel(_content_type(message.raw_headers), body)
            self.model = self.multipart.model


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
