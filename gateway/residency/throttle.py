"""Whether a rule may speak: one whose hints mostly turn out to be of no use is held back, but for a few that show when that changes."""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config.residency import Throttle


class RuleRecord:
    """How one rule does.

    Attributes:
        throttled: it is held back.
        held: hints that it would have given since it was, and did not.
        useful: how many of the latest hints that ended were of use.
    """

    __slots__ = ("_config", "_latest", "_turn", "held", "throttled", "useful")

    def __init__(self, config: "Throttle") -> None:
        """`config`: the limits."""
        self._config = config
        self._latest: deque[bool] = deque()
        self._turn = 0
        self.throttled = False
        self.held = 0
        self.useful = 0

    @property
    def looked_at(self) -> int:
        """Hints that `share` is about."""
        return len(self._latest)

    @property
    def share(self) -> float:
        """Of the latest hints that ended, how many were of use; 1 when none has."""
        return self.useful / len(self._latest) if self._latest else 1.0

    def passes(self) -> bool:
        """Whether the next hint may be given. To be asked once for each."""
        if not self.throttled:
            return True
        self._turn += 1
        if self._turn % self._config.one_in == 0:
            return True
        self.held += 1
        return False

    def resolved(self, useful: bool) -> bool:
        """A hint has ended. Returns whether `throttled` has changed.

        It takes as many outcomes as are looked at to be held back, and a larger share to be let go than to be held: the state does not
        flutter around one limit.
        """
        latest, config = self._latest, self._config
        latest.append(useful)
        self.useful += useful
        if len(latest) > config.of:
            self.useful -= latest.popleft()
        before = self.throttled
        if len(latest) == config.of:
            share = self.useful / len(latest)
            if not before and share < config.below:
                self.throttled = True
                self._turn = self.held = 0
            elif before and share >= max(config.until, config.below):
                self.throttled = False
        return self.throttled is not before
