"""How much hints may ask of each worker: so many calls a second, a share of its bandwidth, a share of its memory pinned.

No clock, no I/O. What is asked inside a request that is sent anyway costs no call and is not asked about here.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.hints.model import Action, Hint

if TYPE_CHECKING:
    from backends.hints.model import TierName
    from gateway.config.residency import ResidencyBudget
    from gateway.residency.ledger import Entry
    from policies.base import WorkerView

BURST: Final = 2.0
"""Seconds' worth of calls, and of transfers, that may come at once."""
SHARED: Final = ""
"""Whose pins in l2 are: everybody's together."""


class Bucket:
    """A token bucket that may go below zero by one take: what is larger than all of it must be possible, too."""

    __slots__ = ("_at", "_level", "most", "rate")

    def __init__(self, rate: float, most: float, now: float) -> None:
        """Full at `now`; refilled by `rate` a second up to `most`."""
        self.rate = rate
        self.most = most
        self._level = most
        self._at = now

    def level(self, now: float) -> float:
        """What is in it."""
        if now > self._at:
            self._level = min(self.most, self._level + self.rate * (now - self._at))
            self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take it out; the caller has looked at `level`."""
        self._level -= amount


class Pin(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a conversation's prompt that are pinned in a memory until a time (0: until unpinned)."""

    worker: str
    tier: "TierName"
    session: str
    start: int
    stop: int
    until: float

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


class _Account:
    """One worker's."""

    __slots__ = ("calls", "moved", "refused", "transfers")

    def __init__(self, config: "ResidencyBudget", now: float) -> None:
        self.calls = Bucket(config.hints_per_second, max(1.0, BURST * config.hints_per_second), now)
        self.transfers = Bucket(config.bandwidth_share, BURST * config.bandwidth_share, now)
        self.moved = 0
        self.refused = 0


class Budget:
    """One fleet's.

    Attributes:
        pins: those in force, by the id of their hint.
    """

    __slots__ = ("_accounts", "_config", "_known", "_pinned", "_views", "_wanted", "pins")

    def __init__(
        self,
        config: "ResidencyBudget",
        workers: "Callable[[], Sequence[WorkerView]]",
        wanted: Callable[[int], bool] = lambda _id: True,
    ) -> None:
        """`workers`: the fleet's. `wanted`: whether the hint of that id has not ended yet."""
        self._config = config
        self._views = workers
        self._wanted = wanted
        self._known: dict[str, WorkerView] = {}
        self._accounts: dict[str, _Account] = {}
        self._pinned: dict[tuple[str, TierName], int] = {}
        self.pins: dict[int, Pin] = {}

    def allow(self, hint: Hint, moved: int, now: float) -> bool:
        """Whether `hint` may be said in a call of its own now; if so, it is charged.

        Args:
            hint: what.
            moved: bytes that it makes the worker move, 0: none. How long that takes is what is charged, by what is known of the worker.
            now: seconds.

        Taking pins back is always allowed; a hint that has ended in the meantime never is.
        """
        if not self._wanted(hint.id):
            return False
        account = self._accounts.get(hint.worker)
        if account is None:
            account = self._accounts[hint.worker] = _Account(self._config, now)
        if hint.action is Action.UNPIN:
            self._unpin(hint)
            return True
        seconds = self._transfer(hint) if moved > 0 and hint.action is Action.PREFETCH else 0.0
        pin = self._pin(hint, now) if hint.action is Action.PIN else None
        if (
            account.calls.level(now) < 1.0
            or (seconds > 0.0 and account.transfers.level(now) <= 0.0)
            or (hint.action is Action.PIN and pin is None)
        ):
            account.refused += 1
            return False
        account.calls.take(1.0)
        if seconds:
            account.transfers.take(seconds)
            account.moved += moved
        if pin is not None:
            self.pins[hint.id] = pin
            key = _owner(pin.worker, pin.tier)
            self._pinned[key] = self._pinned.get(key, 0) + pin.tokens
        return True

    def pinned(self, worker_id: str, tier: "TierName") -> int:
        """Tokens that are pinned there; in l2 by all workers together."""
        return self._pinned.get(_owner(worker_id, tier), 0)

    def ended(self, entry: "Entry") -> None:
        """A hint has ended: a pin that was refused or failed pins nothing."""
        if entry.id in self.pins and entry.fate in {"refused", "failed", "skipped"}:
            self._release(entry.id)

    def tick(self, now: float) -> None:
        """Forget pins whose time is over, and workers that are gone."""
        for number in [number for number, pin in self.pins.items() if 0.0 < pin.until <= now]:
            self._release(number)
        self._known = {view.id: view for view in self._views()}
        if len(self._accounts) > 2 * len(self._known) + 16:
            self._accounts = {name: each for name, each in self._accounts.items() if name in self._known}
            for number in [number for number, pin in self.pins.items() if pin.worker not in self._known]:
                self._release(number)

    def document(self) -> dict[str, Any]:
        """For the admin API: per worker what was moved and refused, and what is pinned by tier."""
        return {
            "workers": {
                name: {"moved_bytes": account.moved, "refused": account.refused}
                for name, account in self._accounts.items()
            },
            "pinned": [
                {"worker": worker, "tier": tier, "tokens": tokens}
                for (worker, tier), tokens in self._pinned.items()
                if tokens
            ],
        }

    def view(self, worker_id: str) -> "WorkerView | None":
        """The worker of that id."""
        found = self._known.get(worker_id)
        if found is None:
            self._known = {view.id: view for view in self._views()}
            found = self._known.get(worker_id)
        return found

    def _transfer(self, hint: Hint) -> float:
        """Seconds of the worker's bandwidth that it takes."""
        view = self.view(hint.worker)
        if view is None:
            return 0.0
        tokens = hint.stop - hint.start
        # What comes from a peer, or from who knows where, goes over a network: as slow as shared storage.
        near = hint.source == "l1" and hint.peer is None
        return view.capabilities.load_seconds(tokens, 0) if near else view.capabilities.load_seconds(0, tokens)

    def _pin(self, hint: Hint, now: float) -> Pin | None:
        """The pin that `hint` would be; None: there is no room, or nobody knows how much there is."""
        capacity = self._capacity(hint.worker, hint.target)
        tokens = hint.stop - hint.start
        if capacity is None or self.pinned(hint.worker, hint.target) + tokens > self._config.pinned_share * capacity:
            return None
        return Pin(
            hint.worker, hint.target, hint.subject.session, hint.start, hint.stop, now + hint.ttl if hint.ttl else 0.0
        )

    def _capacity(self, worker_id: str, tier: "TierName") -> int | None:
        """Tokens that a memory holds. Where that is not known of a slower one, it is taken to be as large as the device's."""
        view = self.view(worker_id)
        if view is None:
            return None
        capabilities = view.capabilities
        profile = getattr(capabilities, "profile", None)
        blocks: int = getattr(profile, f"{tier}_blocks", 0) if tier != "device" and profile is not None else 0
        return blocks * profile.block_size if blocks and profile is not None else capabilities.kv_capacity_tokens

    def _unpin(self, hint: Hint) -> None:
        """Take back the conversation's pins that `hint` covers."""
        session = hint.subject.session
        over = [
            number
            for number, pin in self.pins.items()
            if pin.worker == hint.worker
            and pin.tier == hint.target
            and pin.session == session
            and hint.start <= pin.start
            and pin.stop <= hint.stop
        ]
        for number in over:
            self._release(number)

    def _release(self, number: int) -> None:
        pin = self.pins.pop(number)
        self._pinned[_owner(pin.worker, pin.tier)] -= pin.tokens


def _owner(worker_id: str, tier: "TierName") -> "tuple[str, TierName]":
    return (SHARED if tier == "l2" else worker_id), tier
