"""Which hosts are in doubt: workers of one machine that are ejected within seconds have a common cause. No clock.

A machine that loses its network, its power or its accelerator's driver takes all of its workers with it. The first two say so; the others would
be found one by one, each at the price of failed requests.
"""

from collections import deque
from typing import Final

MAX_HOSTS: Final = 1024
"""Hosts whose ejections are remembered; beyond it the oldest are forgotten."""


class HostWatch:
    """Ejections by host."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, str]]] = {}

    def ejected(self, host: str, worker: str, now: float, *, workers: int, within: float) -> bool:
        """A worker was ejected; whether that puts its host's others in doubt.

        Args:
            host: on which it stands.
            worker: its address: one process that stands in several fleets counts once.
            now: seconds.
            workers: so many different ones ...
            within: ... in so many seconds; what is older is forgotten.
        """
        seen = self._seen.pop(host, None) or deque()
        self._seen[host] = seen  # the latest at the end
        seen.append((now, worker))
        while seen and seen[0][0] < now - within:
            seen.popleft()
        if len(self._seen) > MAX_HOSTS:
            del self._seen[next(iter(self._seen))]
        return len({name for _, name in seen}) >= workers
