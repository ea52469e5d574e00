"""A worker's event stream without its sockets: frames in, replays to ask for out."""

from collections.abc import Iterable, Sequence

from gateway.prefix.events import decode
from gateway.prefix.mirror import Mirror
from gateway.prefix.sequence import Action, Apply, AskReplay, Forget, Sequencer, parse_live, parse_replay


class Follower:
    """Keeps one worker's `Mirror` in step with what it publishes.

    Every method returns the sequence number to send to the replay socket, a fresh one, or None when there is nothing to ask.

    Attributes:
        mirror: the worker as its events show it.
        sequencer: where its stream stands.
        bad_frames: messages that were no event batches.
        last_heard: when the last batch came, on the caller's clock; None before the first.
    """

    def __init__(self, mirror: Mirror, *, can_replay: bool) -> None:
        """`can_replay`: the worker has a replay socket."""
        self.mirror = mirror
        self.sequencer = Sequencer(can_replay=can_replay)
        self.bad_frames = 0
        self.last_heard: float | None = None

    def connect(self, now: float) -> int | None:
        """Both sockets are connected, for the first time or again."""
        return self._do(self.sequencer.connect(now), now)

    def disconnect(self) -> None:
        """The connection broke."""
        self.sequencer.disconnect()

    def live(self, frames: Sequence[bytes], now: float) -> int | None:
        """A message of the SUB socket."""
        message = parse_live(frames)
        if message is None:
            self.bad_frames += 1
            return None
        self.last_heard = now
        return self._do(self.sequencer.live(message, now), now)

    def replayed(self, frames: Sequence[bytes], now: float) -> int | None:
        """A message of the replay socket."""
        message = parse_replay(frames)
        if message is None:
            self.bad_frames += 1
            return None
        return self._do(self.sequencer.replayed(message, now), now)

    def tick(self, now: float) -> int | None:
        """Time passes; call it every second or so."""
        return self._do(self.sequencer.tick(now), now)

    def _do(self, actions: Iterable[Action], now: float) -> int | None:
        start: int | None = None
        for action in actions:
            match action:
                case Apply(payload):
                    self.mirror.apply(decode(payload), now)
                case Forget():
                    self.mirror.forget()
                case AskReplay(start):
                    pass
        return start
