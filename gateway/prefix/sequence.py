"""Numbered messages in, each batch once and in order out: gaps, replays and restarts of one worker's event stream.

A worker publishes batches with sequence numbers 0, 1, 2, ... on a PUB socket, which drops what a slow reader cannot take, and
keeps the last few thousand for a replay on another socket. `Sequencer` decides what to do with each message and says so in
actions; it opens nothing and reads no clock.

* The first message, or `connect`: ask for a replay from 0, so that what was stored before we came is known.
* A number too far ahead: keep what comes, ask for a replay from the last applied batch on. That batch comes again on purpose:
  if its bytes differ, another process is answering, i.e. the worker was restarted.
* A number that is not ahead of the last live one: the worker was restarted.
* A live message that a replay has brought already (the same bytes under the same number): ignored.
* A replay with a hole, or one that stops without its end: ask for the rest.
* A replay that begins too late, brings too little or never comes: what was known may be wrong, forget it and go on.
"""

import struct
from collections import deque
from collections.abc import Sequence

import msgspec

MAX_HELD = 20_000
"""Live batches kept while a replay runs ..."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""... and their bytes. Beyond either the replay is given up."""
REPLAY_SECONDS = 5.0
"""How long a replay may be silent."""
RESUME_SECONDS = 1.0
"""How long it may be silent once it has brought something new, before the rest is asked for. Its end may be among what was
dropped: vLLM answers through a ROUTER socket that keeps 1,000 messages, and drops what does not fit when many are due (of 10,000
batches of 3 kB each, 3,500 and no end came here)."""
MAX_REPLAYS = 3
"""Replays in a row that bring nothing new, before what is missing counts as lost."""
MAX_FINGERPRINTS = 20_000
"""Batches that a replay brought and whose live copies may still come."""


class Apply(msgspec.Struct, frozen=True, gc=False):
    """The next batch: decode and apply it."""

    payload: bytes


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Nothing known of this worker can be trusted any more. `reason`: ``restarted`` or ``lost``."""

    reason: str


class AskReplay(msgspec.Struct, frozen=True, gc=False):
    """Send this sequence number to the replay socket, a fresh one: no answers to an earlier question may come in between."""

    start: int


Action = Apply | Forget | AskReplay


class Message(msgspec.Struct, frozen=True, gc=False):
    """A batch and its number, as of the wire."""

    seq: int
    payload: bytes


def parse_live(frames: Sequence[bytes]) -> Message | None:
    """``[topic, seq, payload]`` of the PUB socket; None when it is something else."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return Message(struct.unpack(">Q", frames[1])[0], frames[2])


def parse_replay(frames: Sequence[bytes]) -> Message | None:
    """An answer of the replay socket to a DEALER: ``[b"", (topic,) seq, payload]``, the topic since vLLM #45177.

    Returns:
        The message, with an empty payload for the end of the replay; None when it is something else.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return Message(struct.unpack(">Q", frames[-2])[0], frames[-1])


class Sequencer:
    """The state of one worker's stream (one data-parallel rank).

    Attributes:
        replaying: whether an answer of the replay socket is awaited.
        gaps, restarts, losses, duplicates: how often each was seen.
    """

    def __init__(self, *, can_replay: bool) -> None:
        """`can_replay`: the worker has a replay socket."""
        self._can_replay = can_replay
        self._started = False  # a batch was applied, or there are none to apply
        self._suspect = False  # the connection broke since the last message
        self._last = -1  # number of the last batch applied
        self._last_fingerprint = 0
        self._last_live = -1  # number of the last live message
        # What replays brought and may still come live, by number. Cleared once live messages are past it.
        self._fingerprints: dict[int, int] = {}
        self._held: deque[Message] = deque()  # live messages that wait for the end of a replay
        self._held_bytes = 0
        self._replays = 0
        self._brought = False  # the running replay brought something
        self._progressed = False  # ... that was new
        self._silent_since = 0.0
        self.replaying = False
        self.gaps = self.restarts = self.losses = self.duplicates = 0

    @property
    def next(self) -> int:
        """The number of the batch that comes next."""
        return self._last + 1

    def connect(self, now: float) -> list[Action]:
        """The sockets are connected, for the first time or again: find out what was missed."""
        if not self._can_replay:
            return []
        self._replays = 0
        return self._ask(now)

    def disconnect(self) -> None:
        """The connection broke. The process that answers next may be another one, at any number."""
        self._suspect = True
        # A replay will bring these again, if they are this process's.
        self._held.clear()
        self._held_bytes = 0

    def live(self, message: Message, now: float) -> list[Action]:
        """A message of the PUB socket."""
        if message.seq <= self._last_live:
            return self._restart(message, now)
        self._last_live = message.seq
        if self.replaying:
            self._hold(message)
            overflow = len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES
            return self._give_up(now) if overflow else []
        if self._can_replay and (self._suspect or not self._started):
            self._hold(message)
            return self._ask(now)
        if self._suspect and self._started:
            self._suspect = False
            self.losses += 1
            return [Forget("lost"), self._apply(message)]
        return self._advance(message, now)

    def replayed(self, message: Message, now: float) -> list[Action]:
        """A message of the replay socket; ignored when no replay was asked for."""
        if not self.replaying:
            return []
        self._silent_since = now
        if not message.payload:
            return self._replay_ended(now)
        seq = message.seq
        first, self._brought = not self._brought, True
        if seq < self._last:
            self.duplicates += 1
            return []
        fingerprint = hash(message.payload)
        if seq == self._last:
            if fingerprint != self._last_fingerprint:
                return self._replaced(now)
            self.duplicates += 1
            return []
        if self._progressed and seq > self._last + 1:
            return self._ask(now)  # a part was dropped on its way: go on from there
        actions: list[Action] = []
        # A beginning behind the last applied batch leaves it open whether that is of the same process.
        if self._last >= 0 and (first or seq > self._last + 1):
            self.losses += 1
            actions.append(Forget("lost"))
        if len(self._fingerprints) >= MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]
        self._fingerprints[seq] = fingerprint
        self._replays = 0
        self._progressed = True
        actions.append(self._apply(message))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Ask a replay that has stopped for the rest, give a silent one up. Call it every second or so."""
        silent = now - self._silent_since
        if not self.replaying or silent <= (RESUME_SECONDS if self._progressed else REPLAY_SECONDS):
            return []
        return self._ask(now) if self._progressed else self._give_up(now)

    def _ask(self, now: float) -> list[Action]:
        self.replaying = True
        self._suspect = False
        self._brought = self._progressed = False
        self._replays += 1
        self._silent_since = now
        return [AskReplay(max(0, self._last))]

    def _apply(self, message: Message) -> Apply:
        self._started = True
        self._last = message.seq
        self._last_fingerprint = hash(message.payload)
        return Apply(message.payload)

    def _advance(self, message: Message, now: float) -> list[Action]:
        """A live message, no replay running."""
        seq = message.seq
        if seq <= self._last:
            if self._fingerprints.pop(seq, None) == hash(message.payload):
                self.duplicates += 1
                return []
            return self._restart(message, now)
        if seq == self._last + 1 or not (self._started or self._can_replay):
            self._replays = 0
            self._fingerprints.clear()
            return [self._apply(message)]
        self.gaps += 1
        if self._can_replay and self._replays < MAX_REPLAYS:
            self._hold(message)
            return self._ask(now)
        self.losses += 1
        self._replays = 0
        self._fingerprints.clear()
        return [Forget("lost"), self._apply(message)]

    def _replay_ended(self, now: float) -> list[Action]:
        if not self._brought and self._last >= 0:
            # Not even the batch that we applied last: this process never published it.
            return self._replaced(now)
        return self._resume(now)

    def _give_up(self, now: float) -> list[Action]:
        """The replay failed: whatever is still missing is lost."""
        self._replays = MAX_REPLAYS
        return self._resume(now)

    def _resume(self, now: float) -> list[Action]:
        """No replay any more: take what was held meanwhile."""
        self.replaying = False
        self._started = True
        held, self._held, self._held_bytes = self._held, deque(), 0
        actions: list[Action] = []
        while held:
            message = held.popleft()
            if message.seq <= self._last:
                # The replay brought it too; or else it is of a process before the one that answered.
                self.duplicates += 1
                continue
            actions += self._advance(message, now)
            if self.replaying:  # another gap behind the one that was closed
                for other in held:
                    self._hold(other)
                break
        return actions

    def _restart(self, message: Message, now: float) -> list[Action]:
        """A live message shows another process."""
        self.restarts += 1
        self._reset()
        self._held.clear()
        self._held_bytes = 0
        self._last_live = message.seq
        if message.seq == 0 or not self._can_replay:
            return [Forget("restarted"), self._apply(message)]
        self._hold(message)
        return [Forget("restarted"), *self._ask(now)]

    def _replaced(self, now: float) -> list[Action]:
        """A replay shows another process; the live messages held are taken for its own."""
        self.restarts += 1
        last_live = self._last_live
        self._reset()
        self._last_live = last_live if self._held else -1
        return [Forget("restarted"), *self._ask(now)]

    def _reset(self) -> None:
        self._started = self._suspect = self.replaying = False
        self._last = self._last_live = -1
        self._fingerprints.clear()
        self._replays = 0

    def _hold(self, message: Message) -> None:
        self._held.append(message)
        self._held_bytes += len(message.payload)
