"""How many more attempts a fleet can bear: a share of the requests of a window, and never less than a floor. No clock.

Retries of a fleet that is overloaded make it more so. Counted over requests in flight, as Envoy does, a budget grows just when answers
become slow; counted over a window, as Finagle and linkerd do, it is a bound on what retries can add to the load: `share` of it.
"""

from typing import Final

SLICES: Final = 10
"""Parts of a window: requests leave it a tenth at a time."""


class Budget:
    """One fleet's, for one purpose.

    Attributes:
        share: of the window's requests.
        floor: what may be spent whatever the requests were.
        window: seconds.
        spent: how often it was spent, ever.
        refused: how often there was nothing left, ever.
        refused_at: when that was last; 0: never.
    """

    __slots__ = (
        "_asked",
        "_asked_before",
        "_ends",
        "_past",
        "_spent",
        "_spent_before",
        "floor",
        "refused",
        "refused_at",
        "share",
        "spent",
        "window",
    )

    def __init__(self, share: float, floor: float, window: float) -> None:
        self.share = share
        self.floor = floor
        self.window = window
        self.spent = 0
        self.refused = 0
        self.refused_at = 0.0
        self._asked = self._spent = 0
        self._asked_before = self._spent_before = 0  # in the slices before the one under way
        self._past: list[tuple[int, int]] = []
        self._ends = 0.0

    def asked(self, now: float) -> None:
        """A request has come at `now`, in seconds. 0.1 us."""
        if now >= self._ends:
            self._turn(now)
        self._asked += 1

    def spend(self, now: float) -> bool:
        """Whether one more attempt may be made at `now`; if so it counts."""
        if not self.left(now):
            self.refused += 1
            self.refused_at = now
            return False
        self.spent += 1
        self._spent += 1
        return True

    def left(self, now: float) -> bool:
        """Whether `spend` would say yes."""
        if now >= self._ends:
            self._turn(now)
        allowed = max(self.floor, self.share * (self._asked_before + self._asked))
        return self._spent_before + self._spent + 1 <= allowed + 1e-9

    def exhausted(self, now: float) -> bool:
        """Whether an attempt was refused within the last window."""
        return bool(self.refused_at) and now - self.refused_at < self.window

    def _turn(self, now: float) -> None:
        """Close the slice that is over, and forget those that have left the window."""
        length = self.window / SLICES
        passed = int((now - self._ends) / length) + 1 if self._ends else SLICES
        past = self._past
        past.append((self._asked, self._spent))
        past.extend([(0, 0)] * min(passed - 1, SLICES))
        del past[: -(SLICES - 1)]
        self._asked = self._spent = 0
        self._asked_before = sum(asked for asked, _ in past)
        self._spent_before = sum(spent for _, spent in past)
        self._ends = self._ends + passed * length if self._ends else now + length
