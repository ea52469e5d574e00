"""What the gateway answers by itself: the list of models, the ping of load balancers, ends of conversations, and paths that do not exist."""

from typing import TYPE_CHECKING
from urllib.parse import unquote

import orjson

from gateway.errors import GatewayError
from gateway.http.body import read_body
from gateway.http.errors import client_error, error_answer, method_not_allowed, not_found
from gateway.http.headers import RequestIds, scan_request
from gateway.http.hints import session_name
from gateway.http.journey import check_version
from gateway.http.routes import MODELS_PATH, PING_PATH
from gateway.http.server import CLOSE, KEEP, Answered, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.tenants import Tenant, Tenants
    from gateway.config.schema import Limits
    from gateway.fleet.models import ModelCards

_MODEL_PREFIX = MODELS_PATH + "/"
_SESSION_PREFIX = "/v1/warmroute/sessions/"
_SESSION_END = "/end"
_MAX_SESSION = 512
_SMALL_BODY = 1024 * 1024


class LocalAnswers:
    """Answers requests that no worker needs to see.

    Errors here (unknown paths, mostly) are counted as refusals; they are no requests to a model.

    Attributes:
        limits: in use.
        session_ended: told of a conversation that its client has ended; says how many hints that gave.
    """

    __slots__ = ("_any_routable", "_cards", "_ids", "_refused", "limits", "session_ended")

    def __init__(
        self,
        cards: "ModelCards",
        *,
        ids: RequestIds,
        limits: "Limits",
        any_routable: "Callable[[], bool]",
        refused: "Callable[[GatewayError], None]",
    ) -> None:
        self._cards = cards
        self._ids = ids
        self._any_routable = any_routable
        self._refused = refused
        self.limits = limits
        self.session_ended: Callable[[str], int] = _nobody

    async def answer(self, request: Request, path: str, tenants: "Tenants | None" = None) -> Answered:
        """Answer one request whose path is not relayed. With `tenants` the list of models is theirs only, and each sees its own."""
        message = request.message
        head_only = message.method == "HEAD"
        keep_alive = not (message.should_close or message.upgrade) and message.version == (1, 1)
        request_id = b""
        try:
            head = scan_request(
                message.raw_headers, peer=request.connection.peer, ids=self._ids, limit=self.limits.header
            )
            request_id = head.request_id
            check_version(message)
            private = tenants is not None and path.startswith((MODELS_PATH, _SESSION_PREFIX))
            tenant = tenants.of(head.credentials) if tenants is not None and private else None
            body = self._body(path, message.method, tenant)
            if head.expects_continue and not request.payload.is_eof():
                keep_alive = False  # the client need not send what nobody will read
            else:
                # A body nobody asked for must not be taken for the next request.
                await read_body(request.payload, limit=_SMALL_BODY, rate=self.limits.body_rate)
        except GatewayError as error:
            self._refused(error)
            keep_alive = keep_alive and not error.close and request.payload.is_eof()
            answer = error_answer(error, request_id=request_id, close=not keep_alive, head_only=head_only)
        else:
            lines = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b\r\n"
            )
            connection = b"" if keep_alive else b"connection: close\r\n"
            answer = lines % (len(body), request_id, connection) + (b"" if head_only else body)
        if request.connection.transport is not None:
            request.connection.transport.write(answer)
        return KEEP if keep_alive else CLOSE

    def _body(self, path: str, method: str, tenant: "Tenant | None") -> bytes:
        if method == "CONNECT":  # its target is no path
            raise method_not_allowed("GET, POST")
        if path == PING_PATH:
            if method not in {"GET", "HEAD", "POST"}:
                raise method_not_allowed("GET, POST")
            if not self._any_routable():
                raise client_error(503, "no_healthy_worker", "No worker is ready.")
            return b"{}"
        if path == MODELS_PATH or path.startswith(_MODEL_PREFIX):
            if method not in {"GET", "HEAD"}:
                raise method_not_allowed("GET")
            if path == MODELS_PATH:
                return self._cards.models_payload(tenant.may_use if tenant is not None else None)
            name = unquote(path[len(_MODEL_PREFIX) :])
            card = self._cards.model_payload(name)
            if card is None or (tenant is not None and not tenant.may_use(name)):
                raise model_not_found()
            return card
        if path.startswith(_SESSION_PREFIX) and path.endswith(_SESSION_END):
            session = unquote(path[len(_SESSION_PREFIX) : -len(_SESSION_END)])
            if method != "POST":
                raise method_not_allowed("POST")
            if not 0 < len(session) <= _MAX_SESSION:
                raise not_found()
            hints = self.session_ended(session_name(session, tenant.name if tenant is not None else ""))
            return orjson.dumps({"session": session, "ended": True, "hints": hints})
        raise not_found()


def _nobody(_session: str) -> int:
    return 0


def model_not_found() -> GatewayError:
    """A model that no fleet serves."""
    return client_error(
        404,
        "model_not_found",
        "The model does not exist here; GET /v1/models lists what there is.",
        code="model_not_found",
        param="model",
    )
