"""Header fields between client and worker, by RFC 9110 section 7.6 and RFC 9112 section 6.

Hop-by-hop fields and everything that `Connection` names are dropped, in both directions; `Transfer-Encoding` never travels, because each
side has framing of its own; `Via` and `X-Forwarded-*` are added. Fields by which a client could choose a worker are dropped.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import count
from types import MappingProxyType

import msgspec

from gateway.http.errors import client_error

RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = (
    b"alt-svc",
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
# Other routers let a client name the worker in a field; here routing is the policy's.
_WORKER_CHOICE = (
    b"x-data-parallel-host-port",
    b"x-data-parallel-rank",
    b"x-dp-rank",
    b"x-dynamo-dp-rank",
    b"x-dynamo-prefill-dp-rank",
    b"x-dynamo-prefill-instance-id",
    b"x-dynamo-worker-instance-id",
    b"x-encoder-hosts-ports",
    b"x-gateway-destination-endpoint",
    b"x-gateway-destination-endpoint-subset",
    b"x-kv-cache-source-host-port",
    b"x-prefill-dp-rank",
    b"x-prefill-instance-id",
    b"x-prefiller-host-port",
    b"x-smg-target-worker",
    b"x-worker",
    b"x-worker-instance-id",
    b"x-warmroute-worker",
)

# What clients may ask for, each only where their key allows it (`gateway.admission.tenants.Tenant.may_set`).
_ASKS: Mapping[bytes, str] = MappingProxyType(
    {b"x-warmroute-stage": "stage", b"x-warmroute-deadline-ms": "deadline", b"x-warmroute-priority": "priority"}
)
# What names a conversation, and what says that it is over (`gateway.http.hints`).
_SESSION_FIELD = b"x-warmroute-session"
_SESSION_FIELDS = (_SESSION_FIELD, b"x-session-id")
_SESSION_END_FIELD = b"x-warmroute-session-end"
_YES = frozenset({b"true", b"1", b"yes"})

(
    _DROP,
    _HOST,
    _CONNECTION,
    _LENGTH,
    _TRANSFER,
    _EXPECT,
    _ENCODING,
    _REQUEST_ID,
    _AUTH,
    _FORWARDED_FOR,
    _FORWARDED_PROTO,
    _VIA,
    _TRACE,
    _API_KEY,
    _ASKED,
    _SESSION,
    _SESSION_END,
) = range(17)
_REQUEST_FIELDS: Mapping[bytes, int] = MappingProxyType(
    dict.fromkeys(_HOP_BY_HOP + _WORKER_CHOICE, _DROP)
    | {
        b"host": _HOST,
        b"connection": _CONNECTION,
        b"content-length": _LENGTH,
        b"transfer-encoding": _TRANSFER,
        b"expect": _EXPECT,
        b"content-encoding": _ENCODING,
        b"x-request-id": _REQUEST_ID,
        b"authorization": _AUTH,
        b"x-forwarded-for": _FORWARDED_FOR,
        b"x-forwarded-proto": _FORWARDED_PROTO,
        b"via": _VIA,
        b"traceparent": _TRACE,
        b"tracestate": _TRACE,
        b"x-api-key": _API_KEY,
    }
    | dict.fromkeys(_ASKS, _ASKED)
    | dict.fromkeys(_SESSION_FIELDS, _SESSION)
    | {_SESSION_END_FIELD: _SESSION_END}
)
# `Server` tells an attacker what runs behind; `Set-Cookie` of a worker means nothing to the gateway's clients.
_RESPONSE_DROP = frozenset(_HOP_BY_HOP) | {
    b"content-length",
    b"server",
    b"set-cookie",
    b"x-request-id",
    b"x-warmroute-worker",
}

# RFC 3986 reg-name, IPv4 or IP-literal, with an optional port: no slash, question mark, hash, at sign or blank.
_HOST_GRAMMAR = re.compile(rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=%]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_REQUEST_ID_GRAMMAR = re.compile(rb"[A-Za-z0-9._~:/+=@|-]{1,128}")
_MAX_HOST = 260
"""The longest name that DNS knows and a port."""
_MAX_TRACE_LINE = 4096
_VIA_NAME = b"1.1 warmroute"


@lru_cache(maxsize=256)
def _well_formed_host(host: bytes) -> bool:
    """Whether a Host field is one; a client says the same one in each of its requests."""
    return len(host) <= _MAX_HOST and _HOST_GRAMMAR.fullmatch(host) is not None


class RequestIds:
    """Mints request ids: a random prefix of this process and a counter, cheaper than a UUID and as unique."""

    __slots__ = ("_counter", "_prefix")

    def __init__(self, prefix: str) -> None:
        """`prefix` should be random hex, at least 64 bits of it."""
        self._prefix = prefix.encode()
        self._counter = count(1)

    def mint(self) -> bytes:
        """A new id of letters and digits."""
        return b"%b%08x" % (self._prefix, next(self._counter))


class RequestHead(msgspec.Struct, eq=False):
    r"""What the gateway needs of a request's header fields, and the lines that travel on.

    Attributes:
        lines: ``name: value\r\n`` of each end-to-end field, ready for the worker.
        authorization: the client's Authorization and x-api-key lines, or empty; sent on only to workers without a key of their own,
            and only where the gateway asks for none itself.
        credentials: values of those fields as they came, whatever Connection names; an x-api-key has ``Bearer`` before it.
        asked: what the client asks for by fields of its own: ``stage``, ``deadline``, ``priority``.
        trace: the client's traceparent and tracestate lines, as they came.
        request_id: the client's, if it is well formed; else minted.
        content_length: declared length of the body; None for a chunked one or none.
        expects_continue: the client waits for a 100 before it sends its body.
        session: what ``x-warmroute-session``, else ``x-session-id`` says; empty: nothing.
        session_ends: ``x-warmroute-session-end`` says that this is the conversation's last request.
    """

    lines: list[bytes]
    authorization: bytes
    credentials: tuple[bytes, ...]
    asked: tuple[str, ...]
    trace: list[bytes]
    request_id: bytes
    content_length: int | None
    expects_continue: bool
    session: bytes = b""
    session_ends: bool = False

    def trace_lines(self, valid: Callable[[str], bool]) -> bytes:
        """The client's trace context for a worker when the gateway makes no spans: as it came, or nothing if it is malformed or repeated."""
        parents = [line for line in self.trace if line.startswith(b"traceparent:")]
        if len(parents) != 1 or not valid(parents[0][13:-2].decode("latin-1").strip()):
            return b""
        return b"".join(line for line in self.trace if len(line) < _MAX_TRACE_LINE)


def scan_request(raw: RawHeaders, *, peer: bytes, ids: RequestIds, limit: int) -> RequestHead:
    """Read a request's fields once.

    Raises:
        GatewayError: 400 for a missing, repeated or malformed Host or a bad Content-Length; 415 for an encoded body; 417
            for an unknown expectation; 431 when the fields are larger than `limit` bytes together; 501 for a transfer
            coding other than chunked.
    """
    lines: list[bytes] = []
    trace: list[bytes] = []
    host = connection = forwarded_for = via = length = None
    authorization = api_key = request_id = b""
    credentials: tuple[bytes, ...] = ()
    asked: tuple[str, ...] = ()
    proto = b"http"
    expects_continue = session_ends = False
    session = b""
    size = 0
    for name, value in raw:
        size += len(name) + len(value) + 4
        lower = name.lower()
        kind = _REQUEST_FIELDS.get(lower)
        if kind is None:
            lines.append(b"%b: %b\r\n" % (name, value))
        elif kind == _HOST:
            if host is not None:
                raise client_error(400, "invalid_request", "A request has exactly one Host field.", close=True)
            host = value
        elif kind == _LENGTH:
            length = _content_length(value, length)
        elif kind == _TRANSFER:
            # llhttp also takes `gzip, chunked` and an empty value; a coding that is not taken off would reach nobody who could.
            if value.lower() != b"chunked":
                raise client_error(
                    501, "transfer_coding", "The only transfer coding that is understood is chunked.", close=True
                )
        elif kind == _CONNECTION:
            connection = value if connection is None else connection + b"," + value
        elif kind == _REQUEST_ID:
            request_id = value
        elif kind == _AUTH:
            authorization = b"authorization: %b\r\n" % value
            credentials += (value,)
        elif kind == _API_KEY:
            api_key = b"x-api-key: %b\r\n" % value
            credentials += (b"Bearer " + value,)
        elif kind == _ASKED:
            lines.append(b"%b: %b\r\n" % (name, value))
            asked += (_ASKS[lower],)
        elif kind == _SESSION:
            lines.append(b"%b: %b\r\n" % (name, value))
            session = value if lower == _SESSION_FIELD or not session else session
        elif kind == _SESSION_END:
            lines.append(b"%b: %b\r\n" % (name, value))
            session_ends = value.lower() in _YES
        elif kind == _FORWARDED_FOR:
            forwarded_for = value if forwarded_for is None else forwarded_for + b", " + value
        elif kind == _FORWARDED_PROTO:
            proto = b"https" if value.lower() == b"https" else b"http"
        elif kind == _TRACE:
            trace.append(b"%b: %b\r\n" % (lower, value))
        elif kind == _VIA:
            via = value if via is None else via + b", " + value
        elif kind == _EXPECT:
            if value.lower() != b"100-continue":
                raise client_error(
                    417, "expectation_failed", "The only expectation that is met is 100-continue.", close=True
                )
            expects_continue = True
        elif kind == _ENCODING and value.lower() != b"identity":
            raise client_error(415, "unsupported_encoding", "Send the body without Content-Encoding.", close=True)
    if size > limit:
        raise client_error(431, "headers_too_large", f"The header fields are larger than {limit} bytes.", close=True)
    if host is None or not _well_formed_host(host):
        raise client_error(400, "invalid_request", "The Host field is missing or malformed.", close=True)
    if connection is not None and connection.lower() not in _PLAIN_CONNECTION:
        lines = _without_named(lines, connection)
        trace = _without_named(trace, connection)
        named = _tokens(connection)
        authorization = b"" if b"authorization" in named else authorization
        api_key = b"" if b"x-api-key" in named else api_key
    if not request_id or _REQUEST_ID_GRAMMAR.fullmatch(request_id) is None:
        request_id = ids.mint()
    lines.append(
        b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\nvia: %b\r\nx-request-id: %b\r\n"
        % (
            peer if forwarded_for is None else forwarded_for + b", " + peer,
            proto,
            _VIA_NAME if via is None else via + b", " + _VIA_NAME,
            request_id,
        )
    )
    authorization += api_key
    return RequestHead(
        lines,
        authorization,
        credentials,
        asked,
        trace,
        request_id,
        length,
        expects_continue,
        session,
        session_ends,
    )


_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})


def _content_length(value: bytes, before: int | None) -> int:
    if not value.isdigit() or len(value) > 18 or before is not None:
        raise client_error(400, "invalid_request", "The Content-Length is malformed or repeated.", close=True)
    return int(value)


def _tokens(connection: bytes) -> set[bytes]:
    return {token.strip().lower() for token in connection.split(b",")}


def _without_named(lines: list[bytes], connection: bytes) -> list[bytes]:
    named = _tokens(connection)
    return [line for line in lines if line.split(b":", 1)[0].lower() not in named]


def response_line(lower: bytes, name: bytes, value: bytes) -> bytes:
    """A worker's field as a line for the client, or nothing for those that stay on their hop; `lower` is `name` in lower case."""
    return b"" if lower in _RESPONSE_DROP else b"%b: %b\r\n" % (name, value)


def response_head(
    status: int, reason: bytes, lines: list[bytes], *, framing: bytes, own: bytes, connection: bytes | None
) -> bytes:
    r"""The head of a relayed answer, up to and with the empty line.

    Args:
        status: the worker's.
        reason: the worker's reason phrase.
        lines: the worker's fields as of `response_line`; those that `connection` names are left out.
        framing: our own framing lines (Content-Length, Transfer-Encoding or Connection).
        own: lines of ours, such as ``x-request-id: ...\r\n``.
        connection: the value of the worker's Connection field, if it named anything but close and keep-alive.
    """
    if connection is not None:
        lines = _without_named(lines, connection)
    return b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (status, reason, b"".join(lines), own, framing)
