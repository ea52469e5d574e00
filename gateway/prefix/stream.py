"""One stream of KV events, from its sockets into the worker's mirror, a little at a time.

`Link` reads frames, `Sequencer` puts them in order, `decode` makes events of them, `Mirror` translates and stores them. Here is
what holds these together: when to connect again, when to stop believing, and that no message, however large, keeps the event
loop for more than a few milliseconds.
"""

import asyncio
import functools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog
import zmq

from backends.kv_events import EventSource
from gateway.prefix.events import Batch, Cleared, Event, Removed, Stored, decode
from gateway.prefix.link import CONNECT_SECONDS, Link
from gateway.prefix.pump import Pump
from gateway.prefix.sequence import Action, Apply, AskReplay, Forget, Sequencer, parse_live, parse_replay
from gateway.prompt.blocks import TOKEN_BYTES

if TYPE_CHECKING:
    from gateway.prefix.mirror import Mirror

DOUBT_SECONDS = 1.0
"""How long what a worker held is believed while it can't be said whether it still does: its connection broke, or numbers are
missing and no replay comes."""
RECONNECT = (0.1, 1.0)
"""Seconds until the first and (doubling, with jitter) the later attempts to connect."""
CONNECTING_SECONDS = 2 * CONNECT_SECONDS + 1
"""A connection that does not stand after this many seconds is given up."""
INLINE_PAYLOAD = 96 * 1024
"""Bytes that are decoded in place, in 1 to 2 ms; more goes to a thread."""
PIECE = 512
"""Blocks (or events without blocks) that are applied in one go, in 1 to 2 ms."""
LOSS_SHOWN = 30.0
"""Seconds for which a stream that lost events counts as incomplete."""

_log = structlog.get_logger(__name__)


class Stream:
    """One publisher (one data-parallel rank) of one worker. Belongs to the event loop that it was made in.

    Attributes:
        source: where it comes from.
        connected: whether the subscription stands.
        greeted: the first connection has brought what could be replayed.
        counters: ``batches``, ``events``, ``garbage``, ``gaps``, ``restarts``, ``losses``, ``duplicates``, ``disconnects``, ``resyncs``.
        lag: seconds from the worker's clock at the latest live batch to ours when it was applied; None before the first.
        heard: when the latest live message came; None before the first.
        queued: see `Pump`.
    """

    def __init__(
        self,
        source: EventSource,
        mirror: "Mirror",
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        pump: Pump,
        clock: Callable[[], float],
        forget: Callable[["Stream"], None],
        connected: Callable[[], None],
        is_lmcache: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        """Connect at the next `tick`.

        Args:
            source: where to.
            mirror: what takes the events.
            context: for the sockets.
            pump: gives it its turn.
            clock: monotonic seconds.
            forget: called when nothing that `mirror` holds can be trusted any more; empties it and resyncs the other streams
                that feed it.
            connected: called whenever the subscription stands again after a break.
            is_lmcache: LMCache's own feed, whose AllBlocksCleared says that its server was started again.
            rng: for the jitter.
        """
        self.source = source
        self.mirror = mirror
        self.connected = False
        self.greeted = False
        self.counters: Counter[str] = Counter()
        self.lag: float | None = None
        self.heard: float | None = None
        self.queued = False
        self._context = context
        self._pump = pump
        self._clock = clock
        self._forget = forget
        self._on_connected = connected
        self._is_lmcache = is_lmcache
        self._rng = rng or random.Random()
        self._loop = asyncio.get_running_loop()
        self._sequencer = Sequencer(can_replay=source.replay_endpoint is not None)
        self._link: Link | None = None
        self._connect_at = 0.0
        self._opened_at = 0.0
        self._epoch = 0
        self._attempts = 0
        self._broke = False
        self._doubt: float | None = None
        self._lost_at: float | None = None
        self._losses = 0
        self._actions: deque[Action] = deque()
        self._pieces: deque[Batch] = deque()
        self._decoding = False
        self._closed = False
        self._faulty = False

    @property
    def next(self) -> int:
        """The number of the batch that comes next."""
        return self._sequencer.next

    def totals(self) -> Counter[str]:
        """`counters` with those of the sequence so far."""
        sequencer = self._sequencer
        return self.counters + Counter(
            gaps=sequencer.gaps, restarts=sequencer.restarts, losses=sequencer.losses, duplicates=sequencer.duplicates
        )

    def state(self, now: float) -> str:
        """``connecting``, ``gap`` or ``events``."""
        if not (self.connected and self.greeted):
            return "connecting"
        lately = self._lost_at is not None and now - self._lost_at < LOSS_SHOWN
        return "gap" if self._doubt is not None or lately else "events"

    def tick(self, now: float) -> None:
        """Connect when it is time, give up what is silent; a few times a second."""
        if self._closed:
            return
        if self._link is None:
            if now >= self._connect_at:
                self._connect(now)
        elif not self.connected and now - self._opened_at > CONNECTING_SECONDS:
            self._disconnected(now)  # e.g. its name can't be resolved, about which ZMQ is silent
        else:
            self._take(self._sequencer.tick(now), now)
        if self._doubt is not None and now - self._doubt > DOUBT_SECONDS:
            self._start_over(now)

    def resync(self, now: float) -> None:
        """Begin anew: the mirror was emptied. What can be replayed is asked for."""
        sequencer = self._sequencer
        self.counters.update(
            resyncs=1,
            gaps=sequencer.gaps,
            restarts=sequencer.restarts,
            losses=sequencer.losses,
            duplicates=sequencer.duplicates,
        )
        self._losses = 0
        self._sequencer = Sequencer(can_replay=self.source.replay_endpoint is not None)
        self._actions.clear()
        self._pieces.clear()
        self._epoch += 1
        self._doubt = None
        self.greeted = False
        if self.connected:
            self._take(self._sequencer.connect(now), now)

    def close(self) -> None:
        """Close the sockets. What comes from a thread after this is ignored."""
        self._closed = True
        self.connected = False
        if self._link is not None:
            self._link.close()
            self._link = None

    # -- the pump's side --------------------------------------------------------------------------------------------

    def work(self, deadline: float) -> bool:
        """See `Worked.work`."""
        clock = self._clock
        while not (self._closed or self._decoding):
            if self._pieces:
                self.mirror.apply(self._pieces.popleft(), clock())
            elif self._actions:
                self._act(self._actions.popleft())
            elif self._link is None or not self._receive(self._link):
                return False
            if clock() >= deadline:
                return True
        return False

    def broke(self, error: Exception) -> None:
        """See `Worked.broke`: forget, begin anew, and say so once."""
        self.counters["faults"] += 1
        if not self._faulty:
            self._faulty = True
            _log.error("KV events could not be taken in", endpoint=self.source.endpoint, exc_info=error)
        if not self._closed:
            self._disconnected(self._clock())
            self._start_over(self._clock())

    def _readable(self) -> None:
        if (self.queued or self._decoding) and self._link is not None:
            self._link.pacify()
        else:
            self._pump.enqueue(self)

    def _receive(self, link: Link) -> bool:
        """Read one message of any kind; False when there is none."""
        now = self._clock()
        frames = link.replayed()
        if frames is not None:
            self._replayed(frames, now)
            return True
        frames = link.receive()
        if frames is not None:
            self._live(frames, now)
            return True
        match link.changed():
            case True:
                self._connected(now)
            case False:
                # What was received before the break is still to be had.
                while (frames := link.receive()) is not None:
                    self._live(frames, now)
                self._disconnected(now)
            case None:
                return False
        return True

    def _live(self, frames: Sequence[bytes], now: float) -> None:
        message = parse_live(frames)
        if message is None:
            self.counters["garbage"] += 1
            return
        self.heard = now
        self._take(self._sequencer.live(message, now), now)

    def _replayed(self, frames: Sequence[bytes], now: float) -> None:
        message = parse_replay(frames)
        if message is None:
            self.counters["garbage"] += 1
            return
        if self._doubt is not None:
            self._doubt = now
        self._take(self._sequencer.replayed(message, now), now)

    def _take(self, actions: list[Action], now: float) -> None:
        """Put actions in line, and see what state the sequence is in."""
        sequencer = self._sequencer
        if not sequencer.replaying:
            if self._link is not None:
                self._link.settled()
            if self.connected:
                self.greeted = True
                self._doubt = None
        elif self._doubt is None and self.greeted:
            self._doubt = now
        if sequencer.losses != self._losses:
            self._losses = sequencer.losses
            self._lost_at = now
        if actions:
            self._actions.extend(actions)
            self._pump.enqueue(self)

    def _act(self, action: Action) -> None:
        match action:
            case Apply(payload):
                self.counters["batches"] += 1
                if len(payload) <= INLINE_PAYLOAD:
                    self._cut(decode(payload))
                else:
                    self._decoding = True
                    future = self._loop.run_in_executor(None, decode, payload)
                    future.add_done_callback(functools.partial(self._decoded, self._epoch))
            case Forget():
                self._forget(self)
            case AskReplay(start):
                try:
                    if self._link is not None:
                        self._link.ask(start)
                except zmq.ZMQError as error:
                    _log.warning("no replay of KV events", endpoint=self.source.replay_endpoint, reason=str(error))

    # -- connecting -------------------------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        try:
            self._link = Link(self._context, self._loop, self.source, self._readable, ipv6=bool(self._attempts % 2))
            self._opened_at = now
        except zmq.ZMQError:
            self._later(now)
            return
        self._pump.enqueue(self)

    def _connected(self, now: float) -> None:
        self.connected = True
        self._attempts = 0
        if self._broke:
            self._broke = False
            self._on_connected()
            if self.source.replay_endpoint is None:
                # What happened meanwhile can't be known, and so neither what is still there.
                self._start_over(now)
                return
        self._take(self._sequencer.connect(now), now)

    def _start_over(self, now: float) -> None:
        """Believe nothing any more and begin anew."""
        self._lost_at = now
        self._forget(self)
        self.resync(now)

    def _disconnected(self, now: float) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self.connected:
            self.connected = False
            self._broke = True
            self.counters["disconnects"] += 1
            self._sequencer.disconnect()
            self._doubt = now
        self._later(now)

    def _later(self, now: float) -> None:
        first, longest = RECONNECT
        self._connect_at = now + min(longest, first * 2**self._attempts) * self._rng.uniform(0.75, 1.0)
        self._attempts = min(self._attempts + 1, 16)

    # -- events -----------------------------------------------------------------------------------------------------

    def _decoded(self, epoch: int, future: "asyncio.Future[Batch]") -> None:
        self._decoding = False
        if self._closed or future.cancelled():
            return
        if epoch == self._epoch:
            self._cut(future.result())
        self._pump.enqueue(self)

    def _cut(self, batch: Batch) -> None:
        """Put a batch in line in pieces that can be applied in one go."""
        self.counters["events"] += len(batch.events)
        if batch.timestamp and not self._sequencer.replaying:
            self.lag = time.time() - batch.timestamp
        events = batch.events
        if self._is_lmcache and any(isinstance(event, Cleared) for event in events):
            self._forget(self)
            last = max(index for index, event in enumerate(events) if isinstance(event, Cleared))
            events = events[last + 1 :]
        piece: list[Event] = []
        size = 0
        problems = batch.problems
        for event in events:
            for part in _parts(event):
                weight = 1 if isinstance(part, Cleared) else max(1, len(part.hashes))
                if piece and size + weight > PIECE:
                    self._pieces.append(Batch(piece, batch.timestamp, batch.rank, problems))
                    piece, size, problems = [], 0, {}
                piece.append(part)
                size += weight
        if piece or problems:
            self._pieces.append(Batch(piece, batch.timestamp, batch.rank, problems))


def _parts(event: Event) -> list[Event]:
    """An event as several that mean the same, each with at most `PIECE` blocks."""
    if isinstance(event, Cleared) or len(event.hashes) <= PIECE:
        return [event]
    hashes = event.hashes
    starts = range(0, len(hashes), PIECE)
    if isinstance(event, Removed):
        return [Removed(hashes[start : start + PIECE], event.tier, event.group) for start in starts]
    step = event.block_size * TOKEN_BYTES
    if not step or len(event.tokens) != len(hashes) * step:
        return [event]  # known by hash only, or to be counted and thrown away
    return [
        Stored(
            hashes[start : start + PIECE],
            hashes[start - 1] if start else event.parent,
            event.tokens[start * step : (start + PIECE) * step],
            event.block_size,
            event.tier,
            event.lora,
            event.extra_keys[start : start + PIECE],
            event.group,
            event.kind,
        )
        for start in starts
    ]
