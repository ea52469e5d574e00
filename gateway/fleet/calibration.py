"""How fast one worker computes prompts, learned from the requests that it answers.

A prefill takes ``overhead + padded tokens / rate`` seconds. Both are fitted to the latest prefills whose start is known well, robustly:
some of those times are something else (a prefix that had been evicted, a busy network, somebody else's request), and they are
not allowed to count. No clock, no I/O; everything is forgotten with a new `Calibration` when the worker restarts.
"""

from statistics import median
from typing import Final

WINDOW: Final = 48
"""Prefills that count; older ones are forgotten."""
REFIT: Final = 24
"""Prefills between two fits, once there were as many: a fit costs some 90 us of CPU, so 4 us a request. Before: at powers of two."""
FEWEST: Final = 4
"""Prefills before the first fit."""
BOUND: Final = 32.0
"""Learned speeds stay within this factor of the start, which may be a guess."""
MAX_OVERHEAD: Final = 2.0
"""Seconds that the learned overhead may exceed the start by; what is more is not the prefill."""
_SPREAD: Final = 1.5
"""Large over small prompts from which on overhead and rate can be told apart; below, both are scaled alike."""
_CUT: Final = 3.0
"""Residuals above this many times their median count as something else."""
_NOISE: Final = 0.02
"""Relative residuals below this are never cut: a worker without any noise has no median to compare with."""
_MEMORY: Final = 32
"""Requests that the mean of the time in a slot remembers."""


class Calibration:
    """What was learned of one worker.

    Attributes:
        rate: padded tokens per second.
        overhead: seconds per prefill, whatever its length.
        hold: mean seconds that a request holds a slot; 0 as long as none has ended.
        samples: prefills seen.
        start: rate and overhead that it started from.
    """

    __slots__ = ("_held", "_next", "_xs", "_ys", "hold", "overhead", "rate", "samples", "start")

    def __init__(self, rate: float, overhead: float) -> None:
        """`rate` and `overhead`: where to start from, as of the worker's capabilities. Both bound what is learned."""
        self.start = (rate, overhead)
        self.rate = rate
        self.overhead = overhead
        self.hold = 0.0
        self.samples = 0
        self._held = 0
        self._next = FEWEST
        self._xs: list[int] = []
        self._ys: list[float] = []

    def prefill(self, padded: int, seconds: float) -> bool:
        """One prefill of so many tokens took so long. Returns whether `rate` and `overhead` are new.

        What cannot be a prefill (no tokens, no time) is ignored.
        """
        if padded <= 0 or not 0 < seconds < 1e6:
            return False
        index = self.samples % WINDOW
        if self.samples < WINDOW:
            self._xs.append(padded)
            self._ys.append(seconds)
        else:
            self._xs[index] = padded
            self._ys[index] = seconds
        self.samples += 1
        if self.samples < self._next:
            return False
        self._next += min(self.samples, REFIT)
        self._fit()
        return True

    def held(self, seconds: float) -> None:
        """One request held a slot for so long."""
        if seconds >= 0:
            self._held = min(self._held + 1, _MEMORY)
            self.hold += (seconds - self.hold) / self._held

    def _fit(self) -> None:
        """Incomplete Theil-Sen for a start that a fifth of garbage cannot move far, then least squares of what lies near it.

        Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950; the second step is one of
        Rousseeuw and Leroy's reweighted least squares. Residuals are relative, as the noise of a time grows with it.
        """
        pairs = sorted(zip(self._xs, self._ys, strict=True))
        overhead, slope = self._rough(pairs)
        for _ in range(2):
            residuals = [abs(y / (overhead + slope * x) - 1) for x, y in pairs]
            cut = max(_CUT * median(residuals), _NOISE)
            near = [pair for pair, residual in zip(pairs, residuals, strict=True) if residual <= cut]
            overhead, slope = self._bounded(*self._squares(near, overhead, slope), near)
        self.overhead = overhead
        self.rate = 1 / slope

    def _rough(self, pairs: list[tuple[int, float]]) -> tuple[float, float]:
        """Overhead and seconds per token by medians."""
        half = len(pairs) // 2
        upper = pairs[len(pairs) - half :]
        if upper[half // 2][0] < _SPREAD * pairs[half // 2][0]:
            rate, start = self.start
            scale = median(y / (start + x / rate) for x, y in pairs)
            overhead, slope = scale * start, scale / rate
        else:
            slope = median(
                (high[1] - low[1]) / (high[0] - low[0])
                for low, high in zip(pairs[:half], upper, strict=True)
                if high[0] > low[0]
            )
            overhead = median(y - slope * x for x, y in pairs)
        return self._bounded(overhead, slope, pairs)

    def _squares(self, near: list[tuple[int, float]], overhead: float, slope: float) -> tuple[float, float]:
        """Least squares of relative residuals; where all prompts are about as long, of one factor for both."""
        weights = [(overhead + slope * x) ** -2 for x, _ in near]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, near, strict=True)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, near, strict=True)) / total
        if near[-1][0] >= _SPREAD * near[0][0]:
            across = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, near, strict=True))
            if across > 0:
                slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, near, strict=True)) / across
                return mean_y - slope * mean_x, slope
        scale = mean_y / (overhead + slope * mean_x)
        return scale * overhead, scale * slope

    def _bounded(self, overhead: float, slope: float, pairs: list[tuple[int, float]]) -> tuple[float, float]:
        """The two within their bounds: if one had to be moved, the other follows as far as it may."""
        rate, start = self.start
        steepest, flattest = BOUND / rate, 1 / (BOUND * rate)
        most = start + MAX_OVERHEAD
        kept = min(max(overhead, 0.0), most)
        if kept != overhead:
            slope = median((y - kept) / x for x, y in pairs)
        bounded = min(max(slope, flattest), steepest)
        if bounded != slope:
            kept = min(max(median(y - bounded * x for x, y in pairs), 0.0), most)
        return kept, bounded
