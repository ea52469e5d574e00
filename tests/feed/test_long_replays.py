"""Long replays through a socket that drops what it cannot hold, as vLLM's does: the rest is asked for."""

import threading

import msgspec
import pytest
import zmq

from gateway.prefix.sequence import Apply, AskReplay, Forget, Message, Sequencer

BLOCK = 16
END = Message(2**64 - 1, b"")


def message(seq):
    return Message(seq, b"%d" % seq)


class LossyReplay:
    """A ROUTER that answers with `reach` batches, then drops all but every third, and the end if it dropped anything."""

    def __init__(self, batches, reach):
        self.batches = batches
        self.reach = reach
        self.asked = []
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()

    def _answer(self):
        try:
            while True:
                client, _, start = self.router.recv_multipart()
                first = int.from_bytes(start, "big")
                self.asked.append(first)
                for at, payload in enumerate(self.batches[first:]):
                    if at < self.reach or at % 3 == 0:
                        self.router.send_multipart([client, b"", b"t", (first + at).to_bytes(8, "big"), payload])
                if len(self.batches) - first <= self.reach:
                    self.router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
        except zmq.ContextTerminated:
            self.router.close(linger=0)

    def close(self):
        self.context.term()
        self.thread.join()


@pytest.fixture
def lossy():
    made = []

    def lossy(batches, reach):
        made.append(LossyReplay(batches, reach))
        return made[-1]

    yield lossy
    for each in made:
        each.close()


async def test_a_late_start_behind_a_socket_that_drops_gets_everything_all_the_same(scene, tools, publishers, lossy):
    tokens = [number % 1000 for number in range(500 * BLOCK)]
    batches = [
        msgspec.msgpack.encode(
            [0.0, [["BlockStored", [at + 1], at or None, tokens[at * BLOCK : (at + 1) * BLOCK], BLOCK, None]], 0]
        )
        for at in range(500)
    ]
    replay = lossy(batches, reach=150)
    socket = tools.EventSocket(endpoint=publishers().endpoint, replay_endpoint=f"tcp://127.0.0.1:{replay.port}")
    async with scene(tools.section_of("http://127.0.0.1:9", kv_events=socket)) as it:
        await tools.until(lambda: it.status().blocks["device"] == 500, 4.0)
        assert it.predicted("127.0.0.1:9", [*tokens, 1]) == 500 * BLOCK
        assert replay.asked == [0, 150, 300, 450]
        assert it.status().counters.get("losses", 0) == 0
        await tools.until(lambda: it.status().status == "events")


@pytest.fixture
def asking():
    sequencer = Sequencer(can_replay=True)
    assert sequencer.connect(0.0) == [AskReplay(0)]
    for seq in range(3):
        assert sequencer.replayed(message(seq), 0.0) == [Apply(b"%d" % seq)]
    return sequencer


def test_a_hole_is_asked_for_and_costs_nothing(asking):
    assert asking.replayed(message(7), 0.0) == [AskReplay(2)]
    assert asking.replayed(message(2), 0.0) == []
    assert asking.replayed(message(3), 0.0) == [Apply(b"3")]
    assert asking.replayed(END, 0.0) == []
    assert (asking.losses, asking.replaying) == (0, False)


def test_an_answer_that_stops_is_asked_to_go_on(asking):
    assert asking.tick(0.9) == []
    assert asking.tick(1.1) == [AskReplay(2)]
    assert asking.tick(5.0) == []
    assert asking.tick(6.2) == []  # nothing at all any more: given up
    assert not asking.replaying


def test_a_hole_that_is_still_there_was_really_lost(asking):
    assert asking.replayed(message(7), 0.0) == [AskReplay(2)]
    assert asking.replayed(message(2), 0.0) == []
    assert asking.replayed(message(7), 0.0) == [Forget("lost"), Apply(b"7")]
    assert asking.losses == 1
