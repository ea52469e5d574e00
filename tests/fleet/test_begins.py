"""When the prefill of a request begins, by what was predicted, and when a second attempt is due for it. In virtual time."""

from math import inf

import pytest

from backends.vllm import VLLMDriver
from gateway.config.schema import Capabilities
from gateway.fleet.worker import SOON, Worker
from gateway.http.hedging import OVERDUE, SOONEST, Hedging


def worker(prefill="exclusive"):
    capabilities = Capabilities(prefill=prefill, prefill_rate=1000.0, overhead=0.0, slots=64)
    return Worker(url="http://a:1", driver=VLLMDriver(), model="m", capabilities=capabilities)


def due(lease, now):
    return Hedging._due(lease, now)


def test_a_prompt_on_an_idle_worker_begins_at_once_and_is_left_alone_until_it_takes_twice_as_long_as_predicted():
    one = worker()
    lease = one.acquire(1000, now=10.0)  # a second
    assert one.begins(lease, 10.5) == 10.0
    assert due(lease, 10.5) == 10.0 + OVERDUE
    assert due(lease, 11.99) == pytest.approx(max(12.0, 11.99 + SOONEST))
    assert due(lease, 12.0) == 0.0


def test_a_prompt_behind_another_has_not_begun_as_long_as_that_one_has_brought_nothing():
    one = worker()
    one.acquire(1000, now=10.0)
    behind = one.acquire(100, now=10.0)
    assert one.begins(behind, 10.2) == 11.0
    assert due(behind, 10.2) == 0.0
    assert one.begins(behind, 15.0) == 15.0 + SOON, "the first one hangs, whatever was predicted"
    assert due(behind, 15.0) == 0.0


def test_it_begins_when_the_one_before_it_has_brought_its_first_byte():
    one = worker()
    first = one.acquire(1000, now=10.0)
    behind = one.acquire(1000, now=10.0)
    first.first_byte(10.8)
    assert one.begins(behind, 10.9) == 10.8
    assert due(behind, 10.9) == 10.8 + OVERDUE


def test_where_prompts_share_their_steps_the_prediction_decides():
    one = worker("chunked")
    one.acquire(1000, now=10.0)
    behind = one.acquire(1000, now=10.0)
    assert due(behind, 10.9) == 0.0
    assert one.begins(behind, 11.5) == 11.0
    assert due(behind, 11.5) == 11.0 + OVERDUE


def test_an_answer_that_comes_whole_tells_nothing_once_its_prefill_should_have_begun():
    one = worker()
    lease = one.acquire(1000, now=10.0, streamed=False)
    assert due(lease, 100.0) == inf
    behind = one.acquire(1000, now=10.0, streamed=False)
    assert due(behind, 10.5) == 0.0
    assert due(behind, 11.5) == inf


@pytest.mark.parametrize("end", ["first_byte", "release"])
def test_a_prefill_that_is_over_is_never_hedged(end):
    one = worker()
    lease = one.acquire(1000, now=10.0)
    getattr(lease, end)(10.7)
    assert one.begins(lease, 10.8) is None
    assert due(lease, 10.8) == inf
