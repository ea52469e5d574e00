"""Several policies give the same results in processes of their own as one after another."""

import pytest

from policies.registry import PolicyError
from simulator.fleet import side_by_side


@pytest.fixture
def work(script):
    for index in range(50):
        script.ask(0.4 * index, [index % 5, *range(10 * index, 10 * index + 3)], 20)
    return script.workload


def test_processes_change_nothing(work, fleet):
    alone = side_by_side(work, fleet(workers=3), ["roundrobin", "kvaware"], jobs=1)
    apart = side_by_side(work, fleet(workers=3), ["roundrobin", "kvaware"], jobs=2)
    for one, two in zip(alone, apart, strict=True):
        assert one.policy == two.policy
        assert {**one.summary(), "wall_s": 0} == {**two.summary(), "wall_s": 0}
        assert one.requests.worker == two.requests.worker


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_goes_over_all_policies(work, fleet, jobs):
    told = []
    side_by_side(
        work, fleet(), ["roundrobin", "kvaware"], jobs=jobs, progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (100, 100)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_mistake_comes_back_as_it_is(work, fleet, jobs):
    with pytest.raises(PolicyError, match="nonsense"):
        side_by_side(work, fleet(), ["roundrobin", "nonsense"], jobs=jobs)


def test_the_time_it_took_is_told(work, fleet):
    (result,) = side_by_side(work, fleet(), ["roundrobin"])
    assert result.wall > 0
