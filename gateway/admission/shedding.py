"""What will not be in time is refused at once: what requests take, how fast the line moves, and what a refusal says.

A prediction is the wait in the line, then what the chosen worker is predicted to need to the first token
(`policies.scorers.ttft.predicted_ttft`), then for stages that promise a whole answer what answers of the stage take, and a margin:
what predictions of this stage have been short of lately, but for the worst few. A stop of a worker or of the whole machine makes all of that useless for
a moment; what is learned of it must be gone soon after, or nearly everybody would be refused long after it is over. No clock, no I/O.
"""

from collections import deque
from math import ceil, exp, inf
from typing import Final, Literal

from gateway.errors import GatewayError, Source

Reason = Literal["deadline_unreachable", "deadline_missed", "queue_full", "queue_timeout", "shed"]

WINDOW: Final = 128
"""Predictions that the margin looks back on."""
SHORT: Final = 0.98
"""Share of them that must have been long enough."""
LATELY: Final = 10.0
"""Seconds that it looks back, too: but never on fewer than `_RESORT` predictions."""
LARGEST: Final = 0.5
"""Of a stage's deadline: a larger margin would refuse everybody, and teach nothing."""
_RESORT: Final = 16
"""Predictions between two looks at the margin."""
_OUTLIER: Final = 4.0
"""A request that took so many times the mean counts as that: a stop is not what requests take."""
_SHORT: Final = 0.01
"""Seconds that are no stop, however short requests are."""
_MEMORY: Final = 64
"""Requests that means remember."""
_HORIZON: Final = 5.0
"""Seconds over which the line's speed is measured."""
_LONGEST_RETRY: Final = 60
"""Seconds that a client is told to wait, at most: more says that nobody knows."""


class Estimate:
    """What requests of one stage took at one fleet.

    Attributes:
        first: mean seconds from the decision to the first byte of the answer.
        rest: mean seconds from there to its end.
        margin: seconds by which predictions are to be longer.
        most: what the margin may be at most.
        samples: requests seen.
    """

    __slots__ = ("_misses", "_next", "first", "margin", "most", "rest", "samples")

    def __init__(self) -> None:
        self.first = self.rest = self.margin = 0.0
        self.most = inf
        self.samples = 0
        self._misses: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._next = _RESORT

    def took(self, first: float, rest: float) -> None:
        """One request took so many seconds to its first byte, and so many more to its end."""
        self.samples += 1
        weight = 1 / min(self.samples, _MEMORY)
        if self.samples > _RESORT and first + rest > (usual := max(_SHORT, _OUTLIER * (self.first + self.rest))):
            first, rest = first * usual / (first + rest), rest * usual / (first + rest)
        self.first += (first - self.first) * weight
        self.rest += (rest - self.rest) * weight

    def missed(self, seconds: float, now: float) -> None:
        """A prediction, without margin, was so many seconds too short, as turned out at `now`; negative: too long."""
        misses = self._misses
        misses.append((now, seconds))
        self._next -= 1
        if self._next <= 0:
            self._next = _RESORT
            while len(misses) > _RESORT and now - misses[0][0] > LATELY:
                misses.popleft()
            latest = sorted(miss for _, miss in misses)
            worst = latest[min(len(latest) - 1, int(SHORT * len(latest)))]
            self.margin = max(0.0, min(worst, self.most))

    def needs(self, ttft: float | None, kind: str) -> float:
        """Seconds that a request sent now takes to what its stage promises; `ttft`: to its first token, None: as others."""
        first = self.first if ttft is None else ttft
        return first + self.margin + (self.rest if kind == "completion" else 0.0)


class Speed:
    """How many requests a second leave the line, measured while there is one."""

    __slots__ = ("_at", "_count", "_time")

    def __init__(self) -> None:
        self._count = self._time = self._at = 0.0

    def turn(self, now: float) -> None:
        """One has left the line, and others wait still."""
        if self._at:
            passed = max(0.0, now - self._at)
            fade = exp(-passed / _HORIZON)
            self._count = self._count * fade + 1
            self._time = self._time * fade + passed
        self._at = now

    def pause(self) -> None:
        """Nobody waits any more: what passes until somebody does says nothing."""
        self._at = 0.0

    def rate(self, now: float, prior: float) -> float:
        """Requests per second; `prior` as long as too few were seen. A line that has come to a stop gets slower and slower."""
        if self._count < 4:
            return prior
        stopped = max(0.0, now - self._at) if self._at else 0.0
        return self._count / max(self._time, self._time * exp(-stopped / _HORIZON) + stopped, 1e-9)


def refusal(reason: Reason, wait: float, *, status: int = 429) -> GatewayError:
    """The answer to a request that is not sent to any worker; `wait`: seconds after which another try makes sense."""
    return GatewayError(
        status,
        reason,
        _MESSAGES[reason],
        source=Source.CLIENT if status == 429 else Source.GATEWAY,
        code=reason,
        retry_after=retry_after(wait),
    )


def retry_after(wait: float) -> int:
    """Whole seconds, at least one."""
    return max(1, min(_LONGEST_RETRY, ceil(wait)))


_MESSAGES: Final[dict[Reason, str]] = {
    "deadline_unreachable": "Too busy: this request would not be answered by its deadline.",
    "deadline_missed": "Too busy: this request's deadline can be met no more.",
    "queue_full": "Too busy: too many requests wait already.",
    "queue_timeout": "Too busy: this request has waited too long for its turn.",
    "shed": "Too busy: this request had to make room for more urgent ones.",
}
