"""The worker's own time: seconds that pass `speed` times as fast as real ones."""

from collections.abc import Callable


class Clock:
    """Maps a real monotonic clock to the worker's, from 0 at construction on; its pace can change at any moment."""

    __slots__ = ("_base", "_now", "_since", "pace")

    def __init__(self, now: Callable[[], float], pace: float) -> None:
        """`now` gives real seconds; `pace` is how many seconds pass here in a real one."""
        self._now = now
        self._since = now()
        self._base = 0.0
        self.pace = pace

    def now(self) -> float:
        """Seconds on the worker's clock."""
        return self._base + (self._now() - self._since) * self.pace

    def real_delay(self, time: float) -> float:
        """Real seconds until `time` on the worker's clock; negative when it has passed."""
        return (time - self.now()) / self.pace

    def set_pace(self, pace: float) -> None:
        """Go on from the present moment at another pace."""
        self._base, self._since = self.now(), self._now()
        self.pace = pace
