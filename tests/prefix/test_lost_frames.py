"""A recorded worker, its frames lost and replayed, against the same recording without any trouble."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.prefix.events import decode
from gateway.prefix.holders import Tier
from gateway.prefix.sequence import Apply, AskReplay, Forget, Sequencer, parse_live, parse_replay

MODEL = "qwen3-tiny"
END = b"\xff" * 8


class Follower:
    """Keeps one worker's `Mirror` in step with what it publishes.

    What `gateway.prefix.stream.Stream` does, without its sockets. Every method returns the sequence number to ask the replay
    socket for, or None when there is nothing to ask.
    """

    def __init__(self, mirror, *, can_replay):
        self.mirror = mirror
        self.sequencer = Sequencer(can_replay=can_replay)
        self.bad_frames = 0
        self.last_heard = None

    def connect(self, now):
        return self._do(self.sequencer.connect(now), now)

    def disconnect(self):
        self.sequencer.disconnect()

    def live(self, frames, now):
        message = parse_live(frames)
        if message is None:
            self.bad_frames += 1
            return None
        self.last_heard = now
        return self._do(self.sequencer.live(message, now), now)

    def replayed(self, frames, now):
        message = parse_replay(frames)
        if message is None:
            self.bad_frames += 1
            return None
        return self._do(self.sequencer.replayed(message, now), now)

    def tick(self, now):
        return self._do(self.sequencer.tick(now), now)

    def _do(self, actions, now):
        start = None
        for action in actions:
            match action:
                case Apply(payload):
                    self.mirror.apply(decode(payload), now)
                case Forget():
                    self.mirror.forget()
                case AskReplay(start):
                    pass
        return start


def frames(message):
    return [b"kv@w@m", message.seq.to_bytes(8, "big"), message.payload]


def predictions(index, exchanges):
    found = []
    for exchange in exchanges:
        root = index.hasher.root(MODEL, None, exchange["cache_salt"])
        chains = index.hasher.chains(root, exchange["prompt_token_ids"], index.block_sizes)
        found.append(index.match(chains))
    return found


@pytest.fixture
def truth(index, recording):
    """What the map says of each recorded prompt once the first 11 batches were applied in order."""
    messages, exchanges = recording("vllm")
    messages = [messages[seq] for seq in range(11)]
    follower = Follower(index.follow("w", MODEL), can_replay=False)
    for message in messages:
        follower.live(frames(message), 0.0)
    expected = predictions(index, exchanges)
    assert sum(len(each) for each in expected) > 10
    index.remove("w")
    return lambda: (messages, exchanges, expected)  # hypothesis prints fixtures, and these are long


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 9)), st.booleans(), st.integers(0, 10))
def test_whatever_was_lost_comes_back_by_replay_in_either_reply_form(index, truth, lost, with_topic, joined):
    messages, exchanges, expected = truth()
    follower = Follower(index.follow("w", MODEL), can_replay=True)

    def answer(start):
        while start is not None:
            topic = [b"topic"] if with_topic else []
            asked, start = start, None
            for message in [*sent[asked:], None]:
                reply = [b"", *topic, *(frames(message)[1:] if message else [END, b""])]
                start = follower.replayed(reply, 0.0) if start is None else start

    sent = messages[:joined]
    answer(follower.connect(0.0))
    for message in messages[joined:]:
        sent = messages[: message.seq + 1]
        if message.seq not in lost:
            answer(follower.live(frames(message), 0.0))
    assert predictions(index, exchanges) == expected
    assert follower.sequencer.losses == follower.sequencer.restarts == follower.bad_frames == 0
    assert follower.mirror.orphans == 0


def test_a_lost_batch_without_a_replay_socket_costs_what_was_known_and_no_more(index, recording):
    messages, _ = recording("vllm")
    follower = Follower(index.follow("w", MODEL), can_replay=False)
    for seq in (0, 1, 2, 3, 5, 6):
        assert follower.live(frames(messages[seq]), 0.0) is None
    assert follower.sequencer.losses == 1
    assert follower.mirror.blocks(Tier.DEVICE) == 12
    assert follower.mirror.orphans == 0


def test_frames_that_are_no_batches_are_counted(index):
    follower = Follower(index.follow("w", MODEL), can_replay=True)
    assert follower.live([b"x"], 0.0) is None
    assert follower.replayed([b"x"], 0.0) is None
    assert follower.bad_frames == 2
    assert follower.live([b"", bytes(8), b"garbage"], 0.0) == 0
    follower.replayed([b"", END, b""], 0.0)
    assert follower.mirror.problems == {"garbage": 1}


def test_a_replay_socket_that_never_answers_is_given_up(index, recording):
    messages, _ = recording("vllm")
    follower = Follower(index.follow("w", MODEL), can_replay=True)
    assert follower.connect(0.0) == 0
    assert follower.live(frames(messages[0]), 0.1) is None
    assert follower.mirror.blocks(Tier.DEVICE) == 0
    assert follower.tick(60.0) is None
    assert follower.mirror.blocks(Tier.DEVICE) == 9
    assert follower.last_heard == 0.1
    follower.disconnect()
    assert follower.live(frames(messages[1]), 61.0) == 0
