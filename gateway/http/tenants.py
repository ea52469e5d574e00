"""What a request's tenant has to do with it: before it is sent, in its body, and when it has ended.

Nothing here is called for requests without a tenant.
"""

from time import monotonic
from typing import TYPE_CHECKING

from gateway.http.errors import client_error
from gateway.http.routes import Body
from gateway.http.splice import with_cache_salt
from gateway.prompt.blocks import worker_salt
from gateway.telemetry.metrics import Outcome

if TYPE_CHECKING:
    from gateway.admission.tenants import Tenant
    from gateway.fleet.fleet import Fleet
    from gateway.http.journey import Journey

PRIORITY_HEADER = "x-warmroute-priority"
_BYTES_PER_TOKEN = 4
"""Of English text and of code; used where nobody counts."""


def admit(journey: "Journey", tenant: "Tenant", fleet: "Fleet") -> None:
    """Let a request in whose body was read. `settle` must follow.

    Raises:
        GatewayError: 403 for a model, a policy or a priority that is not its tenant's to ask for; 429 over its limits; 400 for
            a `cache_salt` or a priority that no worker takes.
    """
    name = journey.model or fleet.name
    if name not in tenant.models:
        tenant.check_model(name)
    headers = journey.request.message.headers
    if fleet.choice is not None and "policy" not in tenant.may_set and fleet.choice.header in headers:
        raise tenant.header_not_allowed()
    _check_priorities(journey, tenant)
    tenant.admit(monotonic())
    journey.charged = 0
    if tenant.limits_tokens:
        journey.wants_usage = True
    if tenant.cache_salt is not None and journey.route.body is Body.JSON:
        _set_salt(journey, tenant.cache_salt)


def charge(journey: "Journey", tenant: "Tenant", fleet: "Fleet", prompt_tokens: int) -> None:
    """Take the prompt's tokens from the tenant's allowance; 0: nobody has counted them.

    Raises:
        GatewayError: 429.
    """
    if tenant.limits_tokens:
        tokens = prompt_tokens or _estimate(journey, fleet)
        tenant.charge(tokens, monotonic())
        journey.charged = tokens
    elif prompt_tokens:
        journey.charged = prompt_tokens


def settle(journey: "Journey", tenant: "Tenant") -> None:
    """Count a request out, with the tokens that it came to. Does nothing for one that was not let in."""
    charged, usage = journey.charged, journey.usage
    if charged is None:
        return
    journey.charged = None
    taken = charged if tenant.limits_tokens else 0
    if usage is not None:
        tenant.done(taken, usage.prompt_tokens, usage.completion_tokens, journey.end)
    elif not journey.attempts or (journey.outcome is not Outcome.CLIENT_GONE and not 0 < journey.status < 400):
        # No worker was asked, or it was not the client that kept one from answering.
        tenant.done(taken, 0, 0, journey.end)
    else:
        tenant.done(taken, charged, _answered(journey), journey.end)


def _check_priorities(journey: "Journey", tenant: "Tenant") -> None:
    """The body's own field, which goes on to the worker as well, and the header field that takes its place."""
    priority = journey.parsed.get("priority")
    if priority is not None:
        if type(priority) is not int:
            # Workers turn texts and fractions into numbers, each in its way.
            raise client_error(400, "invalid_request", "`priority` must be a whole number.", param="priority")
        tenant.check_priority(priority)
    assert journey.head is not None
    if "priority" in journey.head.asked:
        try:
            asked = int(journey.request.message.headers[PRIORITY_HEADER])
        except ValueError:
            raise client_error(
                400, "invalid_request", f"{PRIORITY_HEADER} must be a whole number.", param=PRIORITY_HEADER
            ) from None
        tenant.check_priority(asked)


def _set_salt(journey: "Journey", tenant_salt: str) -> None:
    """Put the tenant's salt into body and parsed body, so that workers and look-up have the same."""
    parsed = journey.parsed
    given = parsed.get("cache_salt")
    salt = worker_salt(tenant_salt, given if isinstance(given, str) else None)
    assert salt is not None
    body = with_cache_salt(journey.body, parsed, salt)
    if body is None:
        raise client_error(400, "invalid_request", "`cache_salt` is too long.", param="cache_salt")
    journey.body = body
    parsed["cache_salt"] = salt


def _estimate(journey: "Journey", fleet: "Fleet") -> int:
    """About how many tokens a prompt has: by its body, but never more than a worker takes (images are long in bytes only)."""
    if journey.route.body is not Body.JSON:
        return 0
    tokens = len(journey.body) // _BYTES_PER_TOKEN
    lengths = [length for worker in fleet.workers if (length := worker.capabilities.max_model_len) is not None]
    return min([tokens, *lengths])


def _answered(journey: "Journey") -> int:
    """About how many tokens have been sent of an answer that did not say: one a read of a stream, else by its bytes."""
    if not journey.route.generates or not journey.first_byte_at:
        return 0
    if journey.pace is not None:
        gaps = journey.pace.gaps()
        return 1 if gaps is None else gaps.count + 1
    return journey.bytes_out // _BYTES_PER_TOKEN
