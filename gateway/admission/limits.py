"""How much one tenant may use: token buckets and a count of requests at once. No clock: time is passed in, in monotonic seconds.

A bucket fills at a steady rate up to its capacity. What is taken only when it is there is, over any stretch of `t` seconds,
never more than ``capacity + rate * t``. What is known only afterwards (the tokens of an answer) is taken whether it is there or
not: the bucket is then in debt, and everything else waits until that is paid.
"""

import math
from typing import Final

MINUTE: Final = 60.0
NEVER: Final = math.inf


class Bucket:
    """One allowance.

    Attributes:
        rate: units per second that flow in.
        capacity: units that it holds at most.
    """

    __slots__ = ("_at", "_level", "capacity", "rate")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        """Full at `now`. Both numbers must be above 0."""
        self.rate = rate
        self.capacity = capacity
        self._level = capacity
        self._at = now

    @classmethod
    def per_minute(cls, amount: float, burst: float, now: float) -> "Bucket":
        """`amount` units a minute; what is unused is kept for `burst` seconds, and never less than one unit of it."""
        return cls(amount / MINUTE, capacity_of(amount, burst), now)

    def level(self, now: float) -> float:
        """Units that are there; negative while in debt."""
        passed = now - self._at
        if passed > 0:
            self._at = now
            level = self._level + passed * self.rate
            self._level = level if level < self.capacity else self.capacity  # noqa: FURB136 - half of the call
        return self._level

    def has(self, amount: float, now: float) -> bool:
        """Whether `amount` units are there."""
        return self.level(now) >= amount

    def take(self, amount: float, now: float) -> None:
        """Take `amount` units, there or not. A negative amount gives back; more than fits is lost."""
        self._level = min(self.capacity, self.level(now) - amount)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` units are there, if nobody takes any before; `NEVER` when the bucket is too small for them."""
        if amount > self.capacity:
            return NEVER
        return max(0.0, amount - self.level(now)) / self.rate

    def configure(self, amount: float, burst: float, now: float) -> None:
        """Go on with other limits, as of `per_minute`. What is there stays there, as far as it fits; a debt stays too."""
        level = self.level(now)
        self.rate = amount / MINUTE
        self.capacity = capacity_of(amount, burst)
        self._level = min(level, self.capacity)


def capacity_of(amount: float, burst: float) -> float:
    """Units that a bucket of `amount` a minute holds when it keeps `burst` seconds of them."""
    return max(1.0, amount / MINUTE * burst)


def bucket(before: Bucket | None, amount: float | None, burst: float, now: float) -> Bucket | None:
    """The bucket for a limit of `amount` a minute, None for none; `before` goes on if there was one."""
    if amount is None:
        return None
    if before is None:
        return Bucket.per_minute(amount, burst, now)
    before.configure(amount, burst, now)
    return before


def in_words(seconds: float) -> str:
    """A time as OpenAI's ``x-ratelimit-reset-*`` write it: ``6m0s``, ``1.5s``, ``20ms``, ``0s``."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    whole, rest = divmod(milliseconds, 1000)
    fraction = f".{rest:03d}".rstrip("0") if rest else ""
    if whole < MINUTE:
        return f"{whole}{fraction}s"
    hours, whole = divmod(whole, 3600)
    minutes, whole = divmod(whole, 60)
    return f"{f'{hours}h' if hours else ''}{minutes}m{whole}{fraction}s"
