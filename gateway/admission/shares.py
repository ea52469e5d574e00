"""Who has more than its share of the slots. No clock, no I/O.

Fairness in the line says who is next; but while one tenant has all slots, whoever comes waits until one of them ends. So a few slots
(`headroom`) are kept from tenants that have their share already, as long as others have been seen lately.
"""

from typing import Final

LATELY: Final = 60.0
"""Seconds for which a tenant counts after its latest request."""


class _Tenant:
    __slots__ = ("running", "seen", "weight")

    def __init__(self) -> None:
        self.running = 0
        self.seen = 0.0
        self.weight = 1.0


class Shares:
    """The tenants of one fleet, by what they have running."""

    __slots__ = ("_looked", "_tenants", "_weights")

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._weights = 0.0
        self._looked = 0.0

    def seen(self, name: str, weight: float, now: float) -> None:
        """A request of this tenant has come."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
            self._looked = 0.0
        tenant.weight = weight
        tenant.seen = now
        if now - self._looked > 1:
            self._looked = now
            self._tenants = {
                name: each for name, each in self._tenants.items() if each.running or now - each.seen <= LATELY
            }
            self._weights = sum(each.weight for each in self._tenants.values())

    def started(self, name: str) -> None:
        """One of its requests has gone to a worker."""
        if (tenant := self._tenants.get(name)) is not None:
            tenant.running += 1

    def ended(self, name: str) -> None:
        """One of those has ended."""
        if (tenant := self._tenants.get(name)) is not None and tenant.running:
            tenant.running -= 1

    def has_its_share(self, name: str, slots: float) -> bool:
        """Whether it has as many slots running as its weight gives it beside the others; never true of the only one."""
        tenant = self._tenants.get(name)
        if tenant is None or len(self._tenants) < 2:
            return False
        return tenant.running >= slots * tenant.weight / max(self._weights, tenant.weight)
