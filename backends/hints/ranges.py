"""Hints about ranges of one prompt as directives that do not overlap, with priorities that never rise along the prompt."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from backends.hints.model import Action, Hint


class Directive(msgspec.Struct, frozen=True, gc=False):
    """Tokens ``[start, stop)`` are to be kept by `priority` (0 to 100) for `ttl` seconds (0: until further notice)."""

    start: int
    stop: int
    priority: int
    ttl: float


def directives(hints: Sequence[Hint], most: int) -> list[Directive]:
    """What RETAIN and DEMOTE hints about one prompt come to, first token first.

    Where hints overlap the higher priority counts, and a token is never worth more than one before it, because a block is of no use
    without those before it: what is before is raised. At most `most` of them: the last are dropped, they are worth least.

    Args:
        hints: at least one, about one prompt; a DEMOTE counts as at most priority 0.
        most: directives.
    """
    if len(hints) == 1:
        (hint,) = hints
        return [Directive(hint.start, hint.stop, _priority(hint), hint.ttl)]
    edges = sorted({edge for hint in hints for edge in (hint.start, hint.stop)})
    runs: list[Directive] = []
    for start, stop in pairwise(edges):
        over = [hint for hint in hints if hint.start <= start and hint.stop >= stop]
        if not over:
            continue
        best = max(over, key=lambda hint: (_priority(hint), hint.ttl or float("inf")))
        runs.append(Directive(start, stop, _priority(best), best.ttl))
    raised: list[Directive] = []
    floor, ttl = 0, 0.0
    for run in reversed(runs):
        if run.priority < floor:
            raised.append(Directive(run.start, run.stop, floor, ttl))
        else:
            floor, ttl = run.priority, run.ttl
            raised.append(run)
    return _joined(raised[::-1])[:most]


def _priority(hint: Hint) -> int:
    return 0 if hint.action is Action.DEMOTE else min(100, max(0, hint.priority))


def _joined(runs: Sequence[Directive]) -> list[Directive]:
    """Neighbours that say the same as one."""
    joined: list[Directive] = []
    for run in runs:
        if joined and (last := joined[-1]).stop == run.start and (last.priority, last.ttl) == (run.priority, run.ttl):
            joined[-1] = Directive(last.start, run.stop, run.priority, run.ttl)
        else:
            joined.append(run)
    return joined
