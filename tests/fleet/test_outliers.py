"""Success rates, doubt, panic by share and hosts in doubt, in virtual time, with figures worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.vllm import VLLMDriver
from gateway.config.schema import Ejection, Health, Outliers
from gateway.fleet.hosts import MAX_HOSTS, HostWatch
from gateway.fleet.membership import Membership
from gateway.fleet.outliers import outliers
from gateway.fleet.states import Cause, FailureKind, Life
from gateway.fleet.worker import Worker, WorkerState
from policies.base import RouteRequest
from policies.registry import Registry

RULES = Outliers()  # 5 workers, 100 requests, 1.9 deviations, a gap of 5 %
HEALTH = Health(slow_start=0.0)


def herd(size, health=HEALTH, panic_share=0.5):
    panics = []
    membership = Membership(health.ejection.max_share, lambda _: None, panic_share=panic_share, on_panic=panics.append)
    lives = []
    for n in range(size):
        worker = Worker(url=f"http://127.0.0.1:{9000 + n}", driver=VLLMDriver(), model="m")
        lives.append(Life(worker, membership, health, start_up=100.0, now=0.0))
    membership.replace(lives, 0.0)
    for life in lives:
        life.check_ok(0.0)
    return membership, lives, panics


def fail(life, now, times=3, kind=FailureKind.SERVER_ERROR):
    for _ in range(times):
        life.request_failed(now, kind)


def routable(lives):
    return [life.worker.routable for life in lives]


def test_one_of_five_that_always_fails_is_found():
    # Mean 0.8, deviation 0.4: the threshold is 0.8 - 1.9 x 0.4 = 0.04.
    assert outliers([(100, 0)] * 4 + [(0, 100)], RULES) == [(4, 0.0, 0.8)]


def test_of_four_none_can_be_found():
    assert outliers([(100, 0)] * 3 + [(0, 100)], Outliers(min_workers=3)) == []


def test_one_that_fails_every_other_request_among_many_is_found_though_it_never_fails_in_a_row():
    (found,) = outliers([(1000, 2)] * 9 + [(500, 500)], RULES)
    assert (found.place, found.rate) == (9, 0.5)


def test_who_fails_a_little_where_others_never_do_is_no_outlier():
    counts = [(1000, 0)] * 9 + [(990, 10)]
    assert outliers(counts, RULES) == []
    assert len(outliers(counts, Outliers(min_gap=0.0))) == 1, "Envoy's rule alone would take it"


def test_all_fail_alike_is_nobodys_fault():
    assert outliers([(50, 50)] * 10, RULES) == []


def test_who_had_few_requests_is_not_compared():
    assert outliers([(100, 0)] * 5 + [(0, 99)], RULES) == []


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=20))
def test_an_outlier_is_below_every_threshold_and_never_are_all_outliers(counts):
    found = outliers(counts, RULES)
    assert all(each.rate < each.mean - RULES.min_gap for each in found)
    assert len(found) < max(1, len(counts))
    assert [each.rate for each in found] == sorted(each.rate for each in found)


def test_an_outlier_is_ejected_as_far_as_the_share_allows_it():
    _, lives, _ = herd(4)
    for life in lives:
        life.outlier(1.0, "fails more than others")
    assert [life.worker.state for life in lives] == [WorkerState.EJECTED] * 2 + [WorkerState.READY] * 2
    assert lives[0].last_error == "fails more than others"


def test_failures_count_as_slow_requests_and_fade():
    _, (life, _), _ = herd(2)
    life.request_failed(10.0, FailureKind.SERVER_ERROR)
    assert life.worker.weight == pytest.approx(1 / (1 + 0.2 * 9))
    life.request_ok(10.0)
    life.membership.tick(10.0)
    assert life.worker.weight == pytest.approx(1 / (1 + 0.16 * 9))
    life.membership.tick(20.0)
    assert life.worker.weight == pytest.approx(1 / (1 + 0.16 / math.e * 9))
    life.membership.tick(60.0)
    assert life.worker.weight == 1.0


def share_of_a_failing_worker(policy, penalty):
    """Of 400 requests at 100 a second, each 0.1 s long, the share that one of four gets which answers at once, every other time 500."""
    _, lives, _ = herd(4, Health(slow_start=0.0, ejection=Ejection(failure_penalty=penalty)))
    chooser = Registry.default().build(policy, {})
    candidates = [life.worker.candidate for life in lives]
    running, got = [], 0
    for number in range(400):
        now = 1.0 + number * 0.01
        while running and running[0][0] <= now:
            running.pop(0)[1].release()
        if not number % 25:
            lives[0].membership.tick(now)
        worker = chooser.decide(RouteRequest(model="m", now=now), candidates).chosen.worker
        lease = worker.acquire()
        if worker is not lives[0].worker:
            running.append((now + 0.1, lease))
            continue
        lease.release()
        got += 1
        if got % 2:
            lives[0].request_failed(now, FailureKind.SERVER_ERROR)
        else:
            lives[0].request_ok(now)
    assert lives[0].worker.state is WorkerState.READY, "it never fails three times in a row"
    return got / 400


@pytest.mark.parametrize("policy", ["leastload", "p2c", "ttft", "lmetric"])
def test_a_worker_that_fails_at_once_does_not_look_idle(policy):
    """Its fair share is a quarter."""
    assert share_of_a_failing_worker(policy, 1.0) > 0.35
    assert share_of_a_failing_worker(policy, 10.0) < 0.2


def test_the_first_requests_after_a_failure_go_elsewhere():
    _, lives, _ = herd(4)
    chooser = Registry.default().build("leastload", {})
    lives[0].request_failed(1.0, FailureKind.CONNECT)
    for _ in range(3):
        chosen = chooser.decide(RouteRequest(model="m", now=1.0), [life.worker.candidate for life in lives]).chosen
        assert chosen.worker is not lives[0].worker
        chosen.worker.acquire(now=1.0)


def test_a_panic_begins_when_more_than_the_share_is_out_and_is_told_once():
    membership, lives, panics = herd(5)
    fail(lives[0], 1.0)
    for life in lives[1:3]:
        life.check_failed(1.0, "refused")
        assert not membership.panic
        life.check_failed(2.0, "refused")
    assert membership.panic, "three of five"
    assert routable(lives) == [True, False, False, True, True], "never those that fail their checks"
    assert panics == [True]
    lives[0].request_ok(2.5)
    assert lives[0].worker.state is WorkerState.READY
    assert panics == [True, False]


def test_a_worker_that_refuses_connections_is_not_used_in_a_panic_while_another_answers():
    membership, lives, _ = herd(2, Health(slow_start=0.0, ejection=Ejection(max_share=1.0)))
    fail(lives[0], 1.0, kind=FailureKind.CONNECT)
    fail(lives[1], 1.0, kind=FailureKind.SERVER_ERROR)
    assert membership.panic
    assert routable(lives) == [False, True]
    fail(lives[1], 2.0, kind=FailureKind.CONNECT)
    membership.tick(2.0)
    assert routable(lives) == [True, True], "if all do, whoever there is"


def test_a_suspect_is_avoided_until_a_check_passes():
    _, lives, _ = herd(4)
    lives[1].suspected(1.0, 16.0, Cause.CHECKS)
    assert routable(lives) == [True, False, True, True]
    lives[1].check_ok(1.1)
    assert routable(lives) == [True] * 4


def test_one_failed_check_ejects_a_suspect():
    _, lives, _ = herd(4)
    lives[1].suspected(1.0, 16.0, Cause.CHECKS)
    lives[1].check_failed(1.1, "refused")
    assert lives[1].worker.state is WorkerState.EJECTED


def test_where_others_failed_requests_one_request_is_the_proof():
    _, lives, _ = herd(4)
    suspect = lives[1]
    suspect.suspected(1.0, 16.0, Cause.REQUESTS)
    suspect.request_ok(1.05)
    assert not suspect.worker.routable, "that began before"
    suspect.check_ok(1.1)
    assert suspect.worker.routable
    lease = suspect.worker.acquire(now=1.2)
    assert not suspect.worker.routable, "one, and no other before it has ended"
    suspect.request_ok(1.3)
    lease.release(1.3)
    assert suspect.worker.routable
    suspect.worker.acquire(now=1.4)
    assert suspect.worker.routable


def test_one_failed_request_ejects_a_suspect():
    _, lives, _ = herd(4)
    lives[1].suspected(1.0, 16.0, Cause.REQUESTS)
    lives[1].check_ok(1.1)
    fail(lives[1], 1.2, 1)
    assert lives[1].worker.state is WorkerState.EJECTED


def test_suspects_are_avoided_within_the_share_and_never_all():
    _, lives, _ = herd(4)
    fail(lives[0], 1.0)
    for life in lives[1:3]:
        life.suspected(1.0, 16.0, Cause.REQUESTS)
    assert routable(lives) == [False, False, True, True], "two of four are out"
    _, lives, _ = herd(2)
    for life in lives:
        life.suspected(1.0, 16.0, Cause.REQUESTS)
    assert routable(lives) == [True, True]


def test_a_suspicion_ends_by_itself():
    membership, lives, _ = herd(4)
    lives[1].suspected(1.0, 16.0, Cause.REQUESTS)
    membership.tick(15.9)
    assert not lives[1].worker.routable
    membership.tick(16.0)
    assert lives[1].worker.routable


def test_a_rest_ends_by_itself_and_is_no_ejection():
    membership, lives, _ = herd(2)
    lives[0].rests(1.0, 4.0, 429)
    assert routable(lives) == [False, True]
    assert lives[0].worker.state is WorkerState.READY
    membership.tick(4.0)
    assert routable(lives) == [True, True]


def test_a_host_is_in_doubt_when_enough_of_its_workers_are_ejected_in_a_short_time():
    watch = HostWatch()

    def ejected(host, worker, now):
        return watch.ejected(host, worker, now, workers=2, within=5.0)

    assert not ejected("a", "a:1", 1.0)
    assert not ejected("b", "b:1", 1.0)
    assert not ejected("a", "a:1", 2.0), "the same process, in another fleet"
    assert ejected("a", "a:2", 6.0)
    assert not ejected("b", "b:2", 6.1), "too late"


def test_only_so_many_hosts_are_remembered():
    watch = HostWatch()
    for number in range(2 * MAX_HOSTS):
        watch.ejected(f"h{number}", "w", float(number), workers=2, within=5.0)
    assert len(watch._seen) == MAX_HOSTS
