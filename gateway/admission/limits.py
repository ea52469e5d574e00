"""How much one tenant may use: token buckets and a count of requests at once. No clock: time is passed in, in monotonic seconds.

A bucket fills at a steady rate up to its capacity. What is taken only when it is there is, over any stretch of `t` seconds,
never more than ``capacity + rate * t``. What is known only afterwards (the tokens of an answer) is taken whether it is there or
not: the bucket is then in debt, and everything else waits until that is paid.
"""

import math
from math import ceil
from typing import Final, Literal, NamedTuple, Protocol

MINUTE: Final = 60.0
NEVER: Final = math.inf
RETRY_CONCURRENCY: Final = 1.0
"""Seconds after which to try again when too many requests are under way: nobody knows when one ends."""


class Bucket:
    """One allowance.

    Attributes:
        limit: units a minute, as it is shown.
        rate: units per second that flow in.
        capacity: units that it holds at most.
    """

    __slots__ = ("_at", "_level", "capacity", "limit", "rate")

    def __init__(self, amount: float, burst: float, now: float) -> None:
        """Full at `now`. `amount` (above 0) units a minute; what is unused is kept for `burst` seconds, but at least one unit."""
        self._at = now
        self._level = math.inf
        self.configure(amount, burst, now)

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

    def take_if_there(self, amount: float, now: float) -> bool:
        """Take `amount` units, or nothing; whether they were there."""
        level = self.level(now)
        if level < amount:
            return False
        self._level = level - amount
        return True

    def take(self, amount: float, now: float) -> None:
        """Take `amount` units, there or not. A negative amount gives back; more than fits is lost."""
        self._level = min(self.capacity, self.level(now) - amount)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` units are there, if nobody takes any before; `NEVER` when the bucket is too small for them."""
        if amount > self.capacity:
            return NEVER
        return max(0.0, amount - self.level(now)) / self.rate

    def configure(self, amount: float, burst: float, now: float) -> None:
        """Go on with other limits, as of the constructor. What is there stays there, as far as it fits; a debt stays too."""
        level = self.level(now) if self._level < math.inf else math.inf
        self.limit = max(1, round(amount))
        self.rate = amount / MINUTE
        self.capacity = max(1.0, amount * burst / MINUTE)
        self._level = min(level, self.capacity)


def bucket(before: Bucket | None, amount: float | None, burst: float, now: float) -> Bucket | None:
    """The bucket for a limit of `amount` a minute, None for none; `before` goes on if there was one."""
    if amount is None:
        return None
    if before is None:
        return Bucket(amount, burst, now)
    before.configure(amount, burst, now)
    return before


def in_words(seconds: float) -> str:
    """A time as OpenAI's ``x-ratelimit-reset-*`` write it: ``6m0s``, ``1.5s``, ``20ms``, ``0s``."""
    milliseconds = ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    whole, rest = divmod(milliseconds, 1000)
    fraction = f".{rest:03d}".rstrip("0") if rest else ""
    if whole < MINUTE:
        return f"{whole}{fraction}s"
    hours, whole = divmod(whole, 3600)
    minutes, whole = divmod(whole, 60)
    return f"{f'{hours}h' if hours else ''}{minutes}m{whole}{fraction}s"


class Allowed(Protocol):
    """The limits of one tenant, as the configuration has them."""

    @property
    def requests_per_minute(self) -> float | None:
        """Requests; None: any number."""

    @property
    def tokens_per_minute(self) -> float | None:
        """Tokens of prompts and answers; None: any number."""

    @property
    def concurrency(self) -> int | None:
        """Requests at once; None: any number."""

    @property
    def burst(self) -> float:
        """Seconds for which what goes unused is kept."""


class Refusal(NamedTuple):
    """Why a request may not go on.

    Attributes:
        limit: which one it met.
        wait: seconds until it may be tried again; `NEVER`: it is too large.
    """

    limit: Literal["requests", "tokens", "concurrency"]
    wait: float


class Account:
    """What one tenant has used and may still use. It outlives reloads: a tenant can't get a fresh minute by one.

    Attributes:
        requests, tokens: the allowances; None: no limit.
        concurrency: requests at once; None: no limit.
        in_flight: requests that `enter` let in and that have not left.
        admitted: requests that were let in.
        refused: how often each limit refused one.
        prompt_tokens, output_tokens: of requests that have left.
    """

    __slots__ = (
        "admitted",
        "concurrency",
        "in_flight",
        "output_tokens",
        "prompt_tokens",
        "refused",
        "requests",
        "tokens",
    )

    def __init__(self) -> None:
        """Without any limits; see `configure`."""
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.concurrency: int | None = None
        self.in_flight = self.admitted = self.prompt_tokens = self.output_tokens = 0
        self.refused: dict[str, int] = {}

    def configure(self, limits: Allowed, now: float) -> None:
        """Go by other limits from now on; what was used stays used."""
        self.requests = bucket(self.requests, limits.requests_per_minute, limits.burst, now)
        self.tokens = bucket(self.tokens, limits.tokens_per_minute, limits.burst, now)
        self.concurrency = limits.concurrency

    def enter(self, now: float) -> Refusal | None:
        """Let a request in; each that comes in must `leave` once. One that is refused uses nothing.

        Its tokens are not known yet. It is refused already when they could not be had however few they are, so that a
        flood is not even tokenized.
        """
        requests, tokens = self.requests, self.tokens
        if self.concurrency is not None and self.in_flight >= self.concurrency:
            return self._refusal("concurrency", RETRY_CONCURRENCY)
        if tokens is not None and not tokens.has(1, now):
            return self._refusal("tokens", tokens.wait(1, now))
        if requests is not None and not requests.take_if_there(1, now):
            return self._refusal("requests", requests.wait(1, now))
        self.in_flight += 1
        self.admitted += 1
        return None

    def charge(self, tokens: int, now: float) -> Refusal | None:
        """Take the prompt's tokens, if they are there."""
        bucket = self.tokens
        if bucket is not None and not bucket.take_if_there(tokens, now):
            return self._refusal("tokens", bucket.wait(tokens, now))
        return None

    def leave(self, charged: int, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A request has ended.

        Args:
            charged: what `charge` took for it.
            prompt_tokens: what its prompt really came to.
            output_tokens: what its answer came to.
            now: monotonic seconds.
        """
        self.in_flight -= 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if self.tokens is not None:
            self.tokens.take(prompt_tokens + output_tokens - charged, now)

    def _refusal(self, limit: Literal["requests", "tokens", "concurrency"], wait: float) -> Refusal:
        self.refused[limit] = self.refused.get(limit, 0) + 1
        return Refusal(limit, wait)
