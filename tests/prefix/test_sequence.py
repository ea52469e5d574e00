"""The stream of one worker: whatever is lost, repeated or restarted, what is applied is what the worker published."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefix.sequence import (
    REPLAY_SECONDS,
    Apply,
    AskReplay,
    Forget,
    Message,
    Sequencer,
    parse_live,
    parse_replay,
)

END = Message(2**64 - 1, b"")


def message(seq, process=0):
    return Message(seq, b"%d/%d" % (process, seq))


def applied(*seqs, process=0):
    return [Apply(message(seq, process).payload) for seq in seqs]


@pytest.fixture
def stream():
    """A sequencer that has seen batches 0 to 4 live and knows that there was nothing before."""
    sequencer = Sequencer(can_replay=True)
    assert sequencer.connect(0.0) == [AskReplay(0)]
    assert sequencer.replayed(END, 0.0) == []
    for seq in range(5):
        assert sequencer.live(message(seq), 0.0) == applied(seq)
    return sequencer


@pytest.fixture
def without_replay():
    sequencer = Sequencer(can_replay=False)
    assert sequencer.connect(0.0) == []
    assert sequencer.live(message(3), 0.0) == applied(3)
    return sequencer


def test_a_late_start_begins_with_a_replay_and_holds_live_batches_until_it_ends():
    sequencer = Sequencer(can_replay=True)
    assert sequencer.connect(0.0) == [AskReplay(0)]
    assert sequencer.live(message(2), 0.0) == []
    assert sequencer.replayed(message(0), 0.0) == applied(0)
    assert sequencer.replayed(message(1), 0.0) == applied(1)
    assert sequencer.replayed(message(2), 0.0) == applied(2)
    assert sequencer.live(message(3), 0.0) == []
    assert sequencer.replayed(END, 0.0) == applied(3)
    assert sequencer.duplicates == 1
    assert sequencer.restarts == sequencer.losses == sequencer.gaps == 0


def test_a_late_start_after_the_buffer_has_moved_on_takes_what_is_left():
    sequencer = Sequencer(can_replay=True)
    sequencer.connect(0.0)
    assert sequencer.replayed(message(700), 0.0) == applied(700)
    assert sequencer.replayed(END, 0.0) == []
    assert sequencer.live(message(701), 0.0) == applied(701)


def test_a_live_copy_of_a_replayed_batch_is_ignored_even_after_the_replay(stream):
    assert stream.live(message(7), 0.0) == [AskReplay(4)]
    for seq in range(4, 10):
        stream.replayed(message(seq), 0.0)
    assert stream.replayed(END, 0.0) == []
    assert stream.live(message(8), 0.0) == []
    assert stream.live(message(9), 0.0) == []
    assert stream.live(message(10), 0.0) == applied(10)
    assert stream.restarts == 0


def test_a_gap_is_filled_in_order(stream):
    assert stream.live(message(6), 0.0) == [AskReplay(4)]
    assert stream.live(message(7), 0.0) == []
    assert stream.replayed(message(4), 0.0) == []
    assert stream.replayed(message(5), 0.0) == applied(5)
    assert stream.replayed(END, 0.0) == applied(6, 7)
    assert stream.gaps == 1
    assert stream.losses == 0


def test_a_second_gap_while_a_replay_runs_is_filled_too(stream):
    stream.live(message(6), 0.0)
    stream.live(message(8), 0.0)
    assert stream.replayed(message(4), 0.0) == []
    assert stream.replayed(message(5), 0.0) == applied(5)
    assert stream.replayed(END, 0.0) == [*applied(6), AskReplay(6)]
    assert stream.replayed(message(6), 0.0) == []
    assert stream.replayed(message(7), 0.0) == applied(7)
    assert stream.replayed(END, 0.0) == applied(8)


def test_however_many_gaps_there_are_each_is_filled(stream):
    for seq in range(6, 40, 2):
        assert stream.live(message(seq), 0.0) == [AskReplay(seq - 2)]
        stream.replayed(message(seq - 2), 0.0)
        assert stream.replayed(message(seq - 1), 0.0) == applied(seq - 1)
        assert stream.replayed(message(seq), 0.0) == applied(seq)
        assert stream.replayed(END, 0.0) == []
    assert stream.losses == 0


def test_a_replay_that_begins_too_late_makes_us_forget(stream):
    stream.live(message(9), 0.0)
    assert stream.replayed(message(8), 0.0) == [Forget("lost"), *applied(8)]
    assert stream.replayed(END, 0.0) == applied(9)
    assert stream.losses == 1


def test_a_replay_that_cannot_show_the_last_batch_again_may_be_of_another_process(stream):
    stream.disconnect()
    assert stream.connect(0.0) == [AskReplay(4)]
    assert stream.replayed(message(5, process=1), 0.0) == [Forget("lost"), *applied(5, process=1)]


def test_a_gap_without_a_replay_socket_makes_us_forget(without_replay):
    assert without_replay.live(message(4), 0.0) == applied(4)
    assert without_replay.live(message(6), 0.0) == [Forget("lost"), *applied(6)]


def test_a_broken_connection_without_a_replay_socket_makes_us_forget(without_replay):
    without_replay.disconnect()
    assert without_replay.live(message(4), 0.0) == [Forget("lost"), *applied(4)]
    assert without_replay.live(message(5), 0.0) == applied(5)


def test_a_silent_replay_is_given_up_and_what_is_missing_is_lost(stream):
    stream.live(message(6), 10.0)
    assert stream.tick(10.0 + REPLAY_SECONDS) == []
    assert stream.tick(10.1 + REPLAY_SECONDS) == [Forget("lost"), *applied(6)]
    assert stream.live(message(7), 20.0) == applied(7)
    assert stream.tick(99.0) == []


def test_a_number_that_goes_back_to_zero_is_a_restart(stream):
    assert stream.live(message(0, process=1), 0.0) == [Forget("restarted"), *applied(0, process=1)]
    assert stream.live(message(1, process=1), 0.0) == applied(1, process=1)


def test_a_number_that_goes_back_a_little_is_a_restart_whose_beginning_is_replayed(stream):
    assert stream.live(message(2, process=1), 0.0) == [Forget("restarted"), AskReplay(0)]
    assert stream.replayed(message(0, process=1), 0.0) == applied(0, process=1)
    assert stream.replayed(message(1, process=1), 0.0) == applied(1, process=1)
    assert stream.replayed(END, 0.0) == applied(2, process=1)


def test_a_restarted_worker_that_is_already_further_on_is_recognized_by_the_batch_it_replays(stream):
    stream.disconnect()
    assert stream.live(message(5, process=1), 0.0) == [AskReplay(4)]
    assert stream.replayed(message(4, process=1), 0.0) == [Forget("restarted"), AskReplay(0)]
    for seq in range(6):
        assert stream.replayed(message(seq, process=1), 0.0) == applied(seq, process=1)
    assert stream.replayed(END, 0.0) == []
    assert stream.live(message(6, process=1), 0.0) == applied(6, process=1)


def test_a_restarted_worker_that_is_not_that_far_is_recognized_by_its_empty_replay(stream):
    stream.disconnect()
    assert stream.connect(0.0) == [AskReplay(4)]
    assert stream.replayed(END, 0.0) == [Forget("restarted"), AskReplay(0)]
    assert stream.replayed(message(0, process=1), 0.0) == applied(0, process=1)
    assert stream.replayed(END, 0.0) == []
    assert stream.live(message(1, process=1), 0.0) == applied(1, process=1)


def test_a_reconnection_to_the_same_process_forgets_nothing(stream):
    stream.disconnect()
    assert stream.connect(0.0) == [AskReplay(4)]
    assert stream.replayed(message(4), 0.0) == []
    assert stream.replayed(message(5), 0.0) == applied(5)
    assert stream.replayed(END, 0.0) == []
    assert stream.live(message(6), 0.0) == applied(6)


def test_frames_are_read_with_and_without_the_topic():
    seq = (7).to_bytes(8, "big")
    assert parse_live([b"kv@w@m", seq, b"p"]) == Message(7, b"p")
    assert parse_live([b"", b"short", b"p"]) is None
    assert parse_live([seq, b"p"]) is None
    assert parse_replay([b"", b"topic", seq, b"p"]) == parse_replay([b"", seq, b"p"]) == Message(7, b"p")
    assert parse_replay([b"", b"", b"\xff" * 8, b""]) == parse_replay([b"", b"\xff" * 8, b""]) == END
    assert parse_replay([b"p"]) is None
    assert parse_replay([b"", b"nonsense!", b"p"]) is None


class Worker:
    """A publisher with a bounded replay buffer, and a network that loses what it is told to lose."""

    def __init__(self, buffer):
        self.process = 0
        self.buffer = buffer
        self.published = []  # of this process

    def publish(self):
        self.published.append(message(len(self.published), self.process))
        return self.published[-1]

    def restart(self):
        self.process += 1
        self.published = []

    def replay(self, start):
        kept = self.published[-self.buffer :]
        return [each for each in kept if each.seq >= start]


STEPS = st.lists(
    st.sampled_from(["publish"] * 6 + ["lose"] * 2 + ["answer"] * 4 + ["restart", "reconnect"]), min_size=1, max_size=80
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(1, 100), st.booleans(), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_in_the_end_exactly_the_batches_of_the_running_process_are_known(steps, buffer, can_replay, delays):
    """`known` is what a mirror would have: it ends as a contiguous run of the newest process up to its last batch."""
    worker, sequencer = Worker(buffer), Sequencer(can_replay=can_replay)
    known, replies, in_flight = [], [], []
    now = 0.0

    def act(actions):
        nonlocal known, replies
        for action in actions:
            match action:
                case Apply(payload):
                    known.append(payload)
                case Forget():
                    known = []
                case AskReplay(start):
                    replies = [*worker.replay(start), END]

    def answer():
        if replies:
            act(sequencer.replayed(replies.pop(0), now))

    act(sequencer.connect(now))
    for number, step in enumerate([*steps, "reconnect", "publish"]):
        now += 0.1
        match step:
            case "publish":
                in_flight.append(worker.publish())
                if delays[number % len(delays)] == 0:  # live and replayed messages come on different sockets
                    in_flight, arriving = [], in_flight
                    for each in arriving:
                        act(sequencer.live(each, now))
            case "lose":
                worker.publish()
            case "answer":
                answer()
            case "restart" | "reconnect":
                in_flight, replies = [], []
                if step == "restart":
                    worker.restart()
                sequencer.disconnect()
                act(sequencer.connect(now))
    for each in in_flight:
        act(sequencer.live(each, now))
    for _ in range(10):
        while replies:
            answer()
        now += REPLAY_SECONDS + 1
        act(sequencer.tick(now))
        act(sequencer.live(worker.publish(), now))
    while replies:
        answer()
    assert not sequencer.replaying
    expected = [each.payload for each in worker.published]
    assert known
    assert known == expected[-len(known) :]
    if can_replay and len(expected) <= buffer:
        assert known == expected  # what could be replayed was not forgotten for good
        if "restart" not in steps:
            assert sequencer.losses == sequencer.restarts == 0
