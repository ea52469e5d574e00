"""What a request counts for at its worker, from the decision to its end."""

from itertools import permutations

import pytest

from gateway.fleet.worker import Worker


@pytest.fixture
def worker():
    return Worker(url="http://127.0.0.1:1", driver=None, model="m")


def counts(worker):
    return worker.in_flight, worker.in_flight_tokens, worker.pending, worker.pending_tokens


def test_a_prompt_is_pending_until_its_first_byte_and_in_flight_until_its_end(worker):
    lease = worker.acquire(1000, 300)
    assert counts(worker) == (1, 1000, 1, 300)
    lease.first_byte()
    assert counts(worker) == (1, 1000, 0, 0)
    lease.release()
    assert counts(worker) == (0, 0, 0, 0)


def test_where_nothing_is_known_to_be_held_the_whole_prompt_is_pending(worker):
    lease = worker.acquire(1000)
    assert counts(worker) == (1, 1000, 1, 1000)
    lease.release()
    assert counts(worker) == (0, 0, 0, 0)


@pytest.mark.parametrize("tokens", [(0, None), (1000, 0), (1000, 1000)])
def test_each_request_counts_once_whatever_is_called_how_often_and_in_which_order(worker, tokens):
    for calls in permutations(["first_byte", "first_byte", "release", "release"]):
        other = worker.acquire(7, 3)
        lease = worker.acquire(*tokens)
        for call in calls:
            getattr(lease, call)()
        assert counts(worker) == (1, 7, 1, 3)
        other.release()
        assert counts(worker) == (0, 0, 0, 0)
