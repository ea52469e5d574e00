"""A workload says what is wrong with it."""

from dataclasses import replace

import pytest

from simulator.workloads import Workload, WorkloadError, WorkRequest

GOOD = WorkRequest("a", 0.0, "s", 20, 5, range(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "a"}, "same id"),
        ({"time": -1.0}, "before that of its predecessor"),
        ({"time": float("nan")}, "before that"),
        ({"prompt_tokens": 0, "blocks": ()}, "0 prompt"),
        ({"output_tokens": 0}, "0 output"),
        ({"blocks": range(3)}, "3 blocks for 20 tokens, 2 of 16"),
        ({"after": "b"}, "no earlier request"),
        ({"after": "z"}, "no earlier request"),
        ({"delay": -0.5}, "delay"),
    ],
)
def test_a_bad_request_is_named(changes, message):
    second = replace(GOOD, id="b", time=1.0)
    Workload("w", 16, [GOOD, second]).validate()
    with pytest.raises(WorkloadError, match=message):
        Workload("w", 16, [GOOD, replace(second, **changes)]).validate()


def test_the_first_requests_leave_nobody_waiting_for_one_that_is_gone():
    requests = [GOOD, replace(GOOD, id="b", after="a"), replace(GOOD, id="c"), replace(GOOD, id="d", after="b")]
    assert [request.id for request in Workload("w", 16, requests).first(3).requests] == ["a", "b", "c"]
    assert len(Workload("w", 16, requests).first(9).requests) == 4
