"""For how long each part of a prompt should be kept: until keeping it is worth less than the room could bring elsewhere.

Strict priorities do worse than least recently used unless they are all said again every few seconds, for the worth of a part falls with
its age by far more than parts differ (docs/adr/0019). So nothing here ranks. Each part is claimed, at one priority, for its *lifetime*: the
time until its worth (`hazard.values`, hits per second of room) falls below the price of room. Whatever is not claimed, or no longer,
goes first, and among equals the worker's own order decides. The price is that at which the parts worth more just fill the fleet's
device memory; it is read off the parts that are remembered, those evicted long ago included. If all are alike, that is LRU.

No clock, no I/O. `key_of` says what is learned from.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import ceil, exp, log
from typing import Final

import msgspec

from bench.keeping_model.hazard import BINS, EDGES, Hazard, age_bin
from bench.keeping_model.parts import Part, Parts

KEPT: Final = 60
"""The priority of what is claimed; 50 is that of what is not."""
MARK_TOKENS: Final = 512
"""Prompts are looked at once in so many tokens, or once a block where those are longer."""
MOST_DIRECTIVES: Final = 16
TICK: Final = 5.0
"""Seconds between two looks at the price."""
REBUILD: Final = 4
"""Ticks from one working out of values to the next."""
SMOOTH: Final = 0.1
"""Weight of the newest price."""
ALIKE: Final = 1.25
"""Neighbours whose lifetimes differ by less than this factor are claimed together."""
SAMPLE: Final = 2
LOOKED_AT: Final = 512
"""Parts, about, by which the price is found."""

USES, LENGTHS, OUTPUTS, SHARES = 8, 16, 16, 6
_LENGTH: Final = USES
_OUTPUT: Final = _LENGTH + LENGTHS
_SHARE: Final = _OUTPUT + OUTPUTS
_LENGTH_OUTPUT: Final = _SHARE + SHARES
_USES_OUTPUT: Final = _LENGTH_OUTPUT + LENGTHS * OUTPUTS
FACTS: Final = _USES_OUTPUT + USES * OUTPUTS


class Directive(msgspec.Struct, frozen=True, gc=False):
    """Keep blocks ``[start, stop)`` of the prompt at `priority` for `ttl` seconds."""

    start: int
    stop: int
    priority: int
    ttl: float


class Kept(msgspec.Struct, eq=False):
    """One prompt that was asked about: to be given back when its answer has ended.

    Attributes:
        path: its parts, last one first, with the stamp of their use.
        known: of its marks, were seen before.
        blocks: that it has.
        marks: that it has.
        directives: what was said of it.
    """

    path: list[tuple[Part, int]]
    known: int
    blocks: int
    marks: int
    directives: list[Directive]


class KeepingModel:
    """One fleet's, for prompts of one block size.

    Attributes:
        hazard: what was learned.
        price: hits per second that room must be worth; 0 until the fleet's memory has been filled once.
    """

    __slots__ = ("_capacity", "_lifetimes", "_next", "_parts", "_stride", "_ticks", "_waiting", "hazard", "price")

    def __init__(self, block_size: int, capacity_tokens: int, most_bytes: int = 32 << 20, sample: int = SAMPLE) -> None:
        """Nothing is known yet.

        Args:
            block_size: tokens per block.
            capacity_tokens: device memory of the whole fleet; may be changed by `resize`.
            most_bytes: of state; what was asked for longest ago is forgotten beyond.
            sample: one part in so many is learned from.
        """
        self._stride = max(1, MARK_TOKENS // block_size)
        self._parts = Parts(most_bytes, sample)
        self._waiting: list[deque[tuple[float, int, Part]]] = [deque() for _ in range(BINS)]
        self._next = 0.0
        self._ticks = 0
        self._lifetimes: dict[int, float] = {}
        self._capacity = 0
        self.hazard = Hazard(FACTS)
        self.price = 0.0
        self.resize(block_size, capacity_tokens)

    def resize(self, block_size: int, capacity_tokens: int) -> None:
        """The fleet's memory has changed."""
        self._capacity = capacity_tokens // (block_size * self._stride)

    @property
    def bytes(self) -> int:
        """Of state, as estimated from counts; the notes of what is waited for are at most as many as the parts' latest uses."""
        return self._parts.bytes

    def asked(self, hashes: Sequence[int], now: float) -> Kept:
        """A prompt is sent to a worker.

        Args:
            hashes: its chain, first block first.
            now: seconds; never falls.

        Returns:
            With `directives`: disjoint, in order, at most `MOST_DIRECTIVES`, of falling ttl; empty while nothing is short of room.
        """
        if now >= self._next:
            self._tick(now)
        marks = hashes[self._stride - 1 :: self._stride]
        if not marks:
            return Kept([], 0, len(hashes), 0, [])
        parts, known = self._parts.path(marks)
        kept = Kept([], known, len(hashes), len(marks), [])
        path = kept.path
        length = len(marks).bit_length()
        share = 0 if not known else 4 if known == len(marks) else 2
        for part in parts:
            if part.uses and part.sampled:
                self._came(part, now)
            part.uses += 1
            part.last = now
            part.stamp += 1
            path.append((part, part.stamp))
            part.key = key_of(part.uses, length, 0, share + 1 if part.uses > 1 else share)
            if part.sampled:
                part.watched = 0
                self._waiting[0].append((now, part.stamp, part))
        if self.price > 0.0:
            kept.directives = self._directives(kept, now, now)
        return kept

    def answered(self, kept: Kept, output_tokens: int, now: float) -> list[Directive]:
        """The answer to a prompt has ended: its length tells what kind of request it was.

        Returns:
            What to say anew, for the whole prompt; empty where what was said still does.
        """
        output = min(OUTPUTS - 1, 1 + output_tokens.bit_length())
        for part, stamp in kept.path:
            if part.stamp == stamp:
                part.key = with_output(part.key, output)
        if self.price <= 0.0 or not kept.path:
            return []
        asked = kept.path[0][0].last if kept.path[0][0].stamp == kept.path[0][1] else now
        directives = self._directives(kept, asked, now)
        before = [(run.stop, round(2 * log(max(1.0, run.ttl)))) for run in kept.directives]
        if before == [(run.stop, round(2 * log(max(1.0, run.ttl)))) for run in directives]:
            return []
        if kept.directives and not directives:
            # A claim that should not have been made is taken back by one that is as good as none.
            directives = [Directive(0, kept.directives[-1].stop, 50, 1.0)]
        kept.directives = directives
        return directives

    def _came(self, part: Part, now: float) -> None:
        """A part that is learned from was asked for again."""
        age = age_bin(now - part.last)
        size = len(part.marks)
        while part.watched < age:
            self._learn(part.key, part.watched, False, size)
            part.watched += 1
        self._learn(part.key, age, True, size)

    def _learn(self, key: int, age: int, came: bool, size: int) -> None:
        """Both for what is known when a prompt is sent and, once its answer has ended, for what is known then.

        A part whose answer runs is hardly ever asked for. Were it learned from as one of unknown output only, as long as it is that, all that is
        known at sending would seem never to come back.
        """
        unknown = with_output(key, 0)
        self.hazard.saw(facts_of(unknown), age, came, size)
        if key != unknown:
            self.hazard.saw(facts_of(key), age, came, size)

    def _directives(self, kept: Kept, asked: float, now: float) -> list[Directive]:
        """What to say of a prompt that came at `asked`."""
        runs: list[Directive] = []
        until = 0.0
        stop = kept.blocks
        for part, stamp in kept.path:
            if part.stamp == stamp:
                lifetime = self._lifetimes.get(part.key)
                if lifetime is None:
                    row = self.hazard.row(facts_of(part.key))
                    lifetime = self._lifetimes[part.key] = self.hazard.lifetime(row, self.price)
                until = max(until, asked + lifetime)
            ttl = until - now
            start = part.start * self._stride
            if ttl >= 1.0 and start < stop:
                if runs and (ttl < ALIKE * runs[-1].ttl or len(runs) == MOST_DIRECTIVES):
                    runs[-1] = Directive(start, runs[-1].stop, KEPT, ttl)
                else:
                    runs.append(Directive(start, stop, KEPT, ttl))
            stop = min(stop, start)
        runs.reverse()
        return runs

    def _tick(self, now: float) -> None:
        """Count what did not come, and find the price."""
        self._next = now + TICK
        hazard = self.hazard
        for age in range(BINS - 1):
            waiting = self._waiting[age]
            over = now - EDGES[age + 1]
            while waiting and waiting[0][0] <= over:
                note = waiting.popleft()
                _, stamp, part = note
                if part.stamp != stamp:
                    continue
                self._learn(part.key, age, False, len(part.marks))
                part.watched = age + 1
                self._waiting[age + 1].append(note)
        last = self._waiting[-1]
        while last and last[0][0] <= now - EDGES[-1]:
            last.popleft()
        self._ticks += 1
        if self._ticks % REBUILD == 1:
            hazard.rebuild()
        self._lifetimes.clear()
        self._find_price(now)

    def _find_price(self, now: float) -> None:
        """At which those worth more just fill the memory; by some of the parts, spread over all."""
        hazard = self.hazard
        worths: list[tuple[float, int]] = []
        rows: dict[int, int] = {}
        size = 0
        for part in islice(self._parts, 0, None, 1 + len(self._parts) // LOOKED_AT):
            row = rows.get(part.key)
            if row is None:
                row = rows[part.key] = hazard.row(facts_of(part.key))
            worths.append((hazard.value(row, now - part.last), len(part.marks)))
            size += len(part.marks)
        room = self._capacity * size / max(1, self._parts.marks)
        if self._parts.marks <= self._capacity:
            self.price = 0.0
            return
        worths.sort(reverse=True)
        for worth, marks in worths:
            room -= marks
            if room < 0:
                self.price = exp((1 - SMOOTH) * log(self.price) + SMOOTH * log(worth)) if self.price else worth
                return


def key_of(uses: int, length: int, output: int, share: int) -> int:
    """What is known of a part in one number.

    Args:
        uses: prompts that had it.
        length: bits of the number of marks of the latest.
        output: the same of its answer's tokens, and one; 0: it has not ended.
        share: of the latest prompt was known: 0 nothing, 2 a part, 4 all; and one if this part was.
    """
    level = uses if uses < 5 else 5 if uses < 9 else 6
    return ((level * LENGTHS + min(length, LENGTHS - 1)) * OUTPUTS + output) * SHARES + share


def with_output(key: int, output: int) -> int:
    """The same part when the answer has ended."""
    return (key // (OUTPUTS * SHARES) * OUTPUTS + output) * SHARES + key % SHARES


def facts_of(key: int) -> tuple[int, ...]:
    """What `Hazard` has weights for, from a key."""
    key, share = divmod(key, SHARES)
    key, output = divmod(key, OUTPUTS)
    uses, length = divmod(key, LENGTHS)
    return (
        uses,
        _LENGTH + length,
        _OUTPUT + output,
        _SHARE + share,
        _LENGTH_OUTPUT + length * OUTPUTS + output,
        _USES_OUTPUT + uses * OUTPUTS + output,
    )


def directives_in_tokens(
    directives: Sequence[Directive], block_size: int, tokens: int
) -> list[tuple[int, int, int, float]]:
    """The same by tokens of a prompt: start, stop, priority, ttl in whole seconds."""
    return [
        (run.start * block_size, min(tokens, run.stop * block_size), run.priority, float(ceil(run.ttl)))
        for run in directives
    ]
