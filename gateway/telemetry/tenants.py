"""What each tenant has used, as Prometheus families."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client.core import Metric

from gateway.telemetry.families import counter, gauge

MAX_TENANTS: Final = 256
"""Tenants with a label of their own, in the order of the configuration; all others share one."""
OTHERS: Final = "_other"


class TenantReading(Protocol):
    """What is read of a tenant's account."""

    @property
    def admitted(self) -> int:
        """Requests that were let in."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Requests that a limit refused, by limit."""

    @property
    def in_flight(self) -> int:
        """Requests under way."""

    @property
    def prompt_tokens(self) -> int:
        """Of requests that have ended."""

    @property
    def output_tokens(self) -> int:
        """Of requests that have ended."""


def tenant_families(tenants: Iterable[tuple[str, TenantReading]]) -> Iterator[Metric]:
    """Requests, refusals, tokens and requests under way, by tenant. Without tenants the families are there, and empty."""
    admitted = counter("warmroute_tenant_requests", "Requests that a tenant was let in with", "tenant")
    refused = counter("warmroute_tenant_refused", "Requests over a limit of their tenant", "tenant limit")
    tokens = counter("warmroute_tenant_tokens", "Tokens of requests that have ended", "tenant kind")
    under_way = gauge("warmroute_tenant_requests_in_flight", "Let in and not ended", "tenant")
    sums: dict[tuple[str, ...], int] = {}
    for position, (name, account) in enumerate(tenants):
        label = name if position < MAX_TENANTS else OTHERS
        for key, value in (
            ((label, "admitted"), account.admitted),
            ((label, "in_flight"), account.in_flight),
            ((label, "prompt"), account.prompt_tokens),
            ((label, "output"), account.output_tokens),
            *(((label, "refused", limit), count) for limit, count in account.refused.items()),
        ):
            sums[key] = sums.get(key, 0) + value
    for (label, kind, *limit), total in sums.items():
        if kind == "admitted":
            admitted.add_metric([label], total)
        elif kind == "in_flight":
            under_way.add_metric([label], total)
        elif limit:
            refused.add_metric([label, *limit], total)
        else:
            tokens.add_metric([label, kind], total)
    yield from (admitted, refused, tokens, under_way)
