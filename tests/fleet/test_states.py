"""The life of a worker in virtual time: what each rule does, with figures worked out by hand."""

import pytest

from backends.vllm import VLLMDriver
from gateway.config.schema import Ejection, Health
from gateway.fleet.membership import Membership
from gateway.fleet.states import COUNTED, PROBE_PATIENCE, TRANSITIONS, Cause, Event, FailureKind, Life
from gateway.fleet.worker import Worker, WorkerState

RULES = Health(unhealthy_after=2, healthy_after=1, slow_start=10.0, ejection=Ejection())  # 3 failures, 5 s, 300 s, 0.5
NEUTRAL = sorted(set(FailureKind) - COUNTED, key=lambda kind: kind.value)


class Herd:
    """A fleet of lives with its log of transitions."""

    def __init__(self, size, rules=RULES, start_up=100.0):
        self.log = []
        self.membership = Membership(rules.ejection.max_share, self.log.append)
        self.lives = [self.life(n, rules, start_up) for n in range(size)]
        self.membership.replace(self.lives, 0.0)

    def life(self, n, rules=RULES, start_up=100.0):
        worker = Worker(url=f"http://127.0.0.1:{9000 + n}", driver=VLLMDriver(), model="m")
        return Life(worker, self.membership, rules, start_up=start_up, now=0.0)

    def all_ready(self, now=0.0):
        for life in self.lives:
            life.check_ok(now)
        return self

    def states(self):
        return "".join(life.worker.state.value[0] for life in self.lives)

    def routable(self):
        return [life.worker.routable for life in self.lives]


def fail(life, now, times=3, kind=FailureKind.CONNECT):
    for _ in range(times):
        life.request_failed(now, kind)


def test_a_new_worker_is_warming_until_its_first_check_passes():
    herd = Herd(2)
    assert herd.states() == "ww"
    assert herd.routable() == [False, False]
    herd.lives[0].check_ok(1.0)
    assert herd.states() == "rw"
    assert herd.routable() == [True, False]


def test_healthy_after_passes_in_a_row():
    life = Herd(1, Health(healthy_after=3)).lives[0]
    for passed in (True, True, False, True, True):
        life.check_ok(1.0) if passed else life.check_failed(1.0, "no")
    assert life.worker.state is WorkerState.WARMING
    life.check_ok(1.0)
    assert life.worker.state is WorkerState.READY


def test_warming_lasts_as_long_as_the_start_up_may_take_and_then_counts_as_ejected():
    herd = Herd(1)
    life = herd.lives[0]
    life.check_failed(1.0, "refused")
    life.check_failed(100.0, "refused")
    assert life.worker.state is WorkerState.WARMING
    assert life.last_error == "refused"
    life.check_failed(100.1, "refused")
    assert (life.worker.state, life.cause) == (WorkerState.EJECTED, Cause.CHECKS)
    life.check_ok(5000.0)
    assert life.worker.state is WorkerState.READY


def test_two_failed_checks_in_a_row_eject_one_alone_does_not():
    life = Herd(1).all_ready().lives[0]
    life.check_failed(1.0, "503")
    life.check_ok(2.0)
    life.check_failed(3.0, "503")
    assert life.worker.state is WorkerState.READY
    life.check_failed(4.0, "503")
    assert (life.worker.state, life.cause, life.last_error) == (WorkerState.EJECTED, Cause.CHECKS, "503")


def test_failed_checks_eject_beyond_the_share_because_nobody_answers_there():
    herd = Herd(4).all_ready()
    for life in herd.lives:
        life.check_failed(1.0, "refused")
        life.check_failed(3.0, "refused")
    assert herd.states() == "eeee"
    assert not herd.membership.panic
    assert herd.routable() == [False] * 4


@pytest.mark.parametrize("kind", sorted(COUNTED, key=lambda kind: kind.value))
def test_three_failures_in_a_row_eject_for_the_base_time(kind):
    herd = Herd(2).all_ready()
    life = herd.lives[0]
    fail(life, 10.0, 2, kind)
    life.request_ok(10.0)
    fail(life, 10.0, 2, kind)
    assert life.worker.state is WorkerState.READY
    life.request_failed(10.0, kind)
    assert (life.worker.state, life.cause, life.until) == (WorkerState.EJECTED, Cause.REQUESTS, 15.0)
    assert herd.log[-1].seconds == 5.0
    assert herd.routable() == [False, True]


@pytest.mark.parametrize("kind", NEUTRAL)
def test_what_is_not_the_workers_fault_neither_counts_nor_absolves(kind):
    life = Herd(2).all_ready().lives[0]
    fail(life, 1.0, 100, kind)
    assert life.failures == 0
    fail(life, 1.0, 2)
    fail(life, 1.0, 1, kind)
    fail(life, 1.0, 1)
    assert life.worker.state is WorkerState.EJECTED


def test_the_nth_ejection_lasts_n_times_as_long_up_to_the_cap():
    herd = Herd(2, Health(ejection=Ejection(base=5.0, max=12.0))).all_ready()
    life, now, lengths = herd.lives[0], 0.0, []
    fail(life, now)
    for _ in range(4):
        lengths.append(life.until - now)
        now = life.until
        herd.membership.tick(now)
        lease = life.worker.acquire()
        life.request_failed(now, FailureKind.SERVER_ERROR)
        lease.release()
    assert lengths == [5.0, 10.0, 12.0, 12.0]
    assert life.ejections == 5


def test_a_strike_is_forgiven_for_each_thirty_seconds_of_being_ready():
    herd = Herd(2).all_ready()
    life = herd.lives[0]
    fail(life, 0.0)
    life.check_ok(5.0)
    fail(life, 6.0)
    assert life.strikes == 2
    life.check_ok(16.0)
    fail(life, 16.0 + 61.0)
    assert life.strikes == 1
    assert life.ejections == 3


def test_many_streams_that_break_at_once_are_one_ejection():
    herd = Herd(2).all_ready()
    fail(herd.lives[0], 1.0, 200, FailureKind.BROKE_OFF)
    assert herd.lives[0].ejections == 1
    assert herd.lives[0].until == 6.0


def test_half_open_lets_exactly_one_request_through():
    herd = Herd(2).all_ready()
    life, worker = herd.lives[0], herd.lives[0].worker
    fail(life, 0.0)
    herd.membership.tick(4.9)
    assert not worker.routable
    herd.membership.tick(5.0)
    assert worker.routable
    lease = worker.acquire()
    assert not worker.routable
    herd.membership.tick(5.25)
    assert not worker.routable
    life.request_ok(6.0)
    lease.release()
    assert worker.state is WorkerState.READY
    assert worker.routable
    assert worker.probe is None


def test_a_probe_that_fails_ejects_for_longer_whichever_is_told_first():
    for release_first in (True, False):
        herd = Herd(2).all_ready()
        life, worker = herd.lives[0], herd.lives[0].worker
        fail(life, 0.0)
        herd.membership.tick(5.0)
        lease = worker.acquire()
        if release_first:
            lease.release()
        life.request_failed(6.0, FailureKind.TIMEOUT)
        lease.release()
        assert (worker.state, worker.routable, life.until) == (WorkerState.EJECTED, False, 16.0)


def test_a_probe_whose_client_leaves_lets_the_next_request_try():
    herd = Herd(2).all_ready()
    life, worker = herd.lives[0], herd.lives[0].worker
    fail(life, 0.0)
    herd.membership.tick(5.0)
    lease = worker.acquire()
    life.request_failed(6.0, FailureKind.CLIENT_GONE)
    lease.release()
    assert (worker.state, worker.routable) == (WorkerState.EJECTED, True)
    worker.acquire()
    assert not worker.routable


def test_a_lease_from_before_the_ejection_is_no_probe():
    herd = Herd(2).all_ready()
    life, worker = herd.lives[0], herd.lives[0].worker
    old = worker.acquire()
    fail(life, 0.0)
    herd.membership.tick(5.0)
    worker.acquire()
    old.release()
    assert not worker.routable


def test_a_success_from_before_the_ejection_does_not_end_it():
    life = Herd(2).all_ready().lives[0]
    fail(life, 0.0)
    life.request_ok(1.0)
    assert life.worker.state is WorkerState.EJECTED


def test_a_passing_check_ends_an_ejection_only_when_its_time_is_over():
    life = Herd(2).all_ready().lives[0]
    fail(life, 0.0)
    life.check_ok(4.9)
    assert life.worker.state is WorkerState.EJECTED
    life.check_ok(5.0)
    assert life.worker.state is WorkerState.READY


def test_a_probe_on_its_way_has_the_first_word_but_not_for_ever():
    herd = Herd(2).all_ready()
    life = herd.lives[0]
    fail(life, 0.0)
    herd.membership.tick(5.0)
    life.worker.acquire()
    life.check_ok(5.0 + PROBE_PATIENCE - 0.1)
    assert life.worker.state is WorkerState.EJECTED
    life.check_ok(5.0 + PROBE_PATIENCE)
    assert life.worker.state is WorkerState.READY


def test_an_ejected_worker_that_stops_answering_checks_is_not_tried_any_more():
    herd = Herd(2).all_ready()
    life = herd.lives[0]
    fail(life, 0.0)
    life.check_failed(1.0, "refused")
    life.check_failed(3.0, "refused")
    assert (life.worker.state, life.cause, life.ejections) == (WorkerState.EJECTED, Cause.CHECKS, 1)
    herd.membership.tick(100.0)
    assert not life.worker.routable
    life.check_ok(101.0)
    assert life.worker.state is WorkerState.READY


def test_half_of_the_fleet_may_be_ejected_and_the_next_stays():
    herd = Herd(4).all_ready()
    for life in herd.lives:
        fail(life, 1.0, 10)
    assert herd.states() == "eerr"
    herd.lives[0].check_ok(6.0)
    fail(herd.lives[2], 6.0, 1)
    assert herd.states() == "reer"


def test_one_may_always_be_ejected_even_the_only_one_and_then_it_is_used_all_the_same():
    herd = Herd(1, Health(ejection=Ejection(max_share=0.0))).all_ready()
    life = herd.lives[0]
    fail(life, 1.0)
    assert life.worker.state is WorkerState.EJECTED
    assert herd.membership.panic
    assert life.worker.routable
    life.worker.acquire()
    assert life.worker.routable, "in panic it is not one probe but everything"
    life.request_ok(1.5)
    assert life.worker.state is WorkerState.READY
    assert not herd.membership.panic


def test_panic_uses_those_ejected_for_requests_and_nobody_else():
    herd = Herd(4, Health(ejection=Ejection(max_share=1.0)))
    for life in herd.lives[:3]:
        life.check_ok(0.0)
    first, second, third, _ = herd.lives
    second.check_failed(1.0, "refused")
    second.check_failed(2.0, "refused")
    third.drain(2.0)
    fail(first, 2.0)
    assert herd.states() == "eedw"
    assert herd.routable() == [True, False, False, False]
    second.check_ok(3.0)
    assert herd.routable() == [False, True, False, False]


def test_failures_in_panic_do_not_lengthen_the_ejection_before_its_end():
    life = Herd(1).all_ready().lives[0]
    fail(life, 1.0, 50)
    assert (life.ejections, life.until) == (1, 6.0)
    fail(life, 6.0, 50)
    assert (life.ejections, life.until) == (2, 16.0)


def test_when_the_fleet_shrinks_the_ejected_beyond_the_share_come_back():
    herd = Herd(4).all_ready()
    fail(herd.lives[0], 1.0)
    fail(herd.lives[1], 2.0)
    assert herd.states() == "eerr"
    herd.membership.replace(herd.lives[:2], 3.0)
    assert herd.states()[:2] == "re"


def test_draining_takes_nothing_and_undrain_returns_at_once_when_checks_pass():
    herd = Herd(2).all_ready()
    life = herd.lives[0]
    life.drain(1.0)
    life.check_ok(2.0)
    fail(life, 2.0, 10)
    life.request_ok(2.0)
    assert (life.worker.state, life.worker.routable) == (WorkerState.DRAINING, False)
    life.undrain(3.0)
    assert (life.worker.state, life.worker.routable) == (WorkerState.READY, True)
    life.drain(4.0)
    life.check_failed(5.0, "refused")
    life.undrain(6.0)
    assert (life.worker.state, life.worker.routable) == (WorkerState.WARMING, False)


def test_slow_start_goes_from_a_tenth_to_one_in_a_straight_line():
    herd = Herd(1).all_ready(now=100.0)
    weights = []
    for now in (100.0, 102.5, 105.0, 109.0, 110.0, 500.0):
        herd.membership.tick(now)
        weights.append(herd.lives[0].worker.weight)
    assert weights == pytest.approx([0.1, 0.325, 0.55, 0.91, 1.0, 1.0])


def test_slow_start_of_zero_is_none():
    assert Herd(1, Health(slow_start=0.0)).all_ready().lives[0].worker.weight == 1.0


def test_a_busy_worker_whose_checks_time_out_stays_while_its_requests_succeed():
    life = Herd(1).all_ready().lives[0]
    for now in range(1, 10):
        life.request_ok(now)
        life.check_failed(now, "timeout", timed_out=True)
    assert life.worker.state is WorkerState.READY
    life.request_ok(10.0)
    life.check_failed(10.0, "refused")
    life.request_ok(11.0)
    life.check_failed(11.0, "refused")
    assert life.worker.state is WorkerState.EJECTED


def test_a_flapping_check_needs_one_more_pass_each_time_up_to_ten():
    life = Herd(2).all_ready().lives[0]
    needed = []
    for now in range(14):
        life.check_failed(now, "no")
        life.check_failed(now, "no")
        passes = 0
        while life.worker.state is WorkerState.EJECTED:
            life.check_ok(now)
            passes += 1
        needed.append(passes)
    assert needed == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 10]


def test_gone_is_the_end():
    life = Herd(2).all_ready().lives[0]
    life.removed(1.0)
    life.check_ok(2.0)
    life.request_ok(2.0)
    life.undrain(2.0)
    fail(life, 2.0)
    assert (life.worker.state, life.worker.routable) == (WorkerState.GONE, False)
    assert not [key for key in TRANSITIONS if key[0] is WorkerState.GONE]


def test_a_worker_that_a_reload_made_gone_is_not_used_in_the_panic_of_its_old_fleet():
    herd = Herd(2, Health(ejection=Ejection(max_share=1.0))).all_ready()
    for life in herd.lives:
        fail(life, 1.0)
    herd.lives[0].worker.state = WorkerState.GONE  # as `Fleets.updated` does before the monitor hears of it
    herd.lives[0].worker.routable = False
    herd.membership.tick(2.0)
    assert herd.routable() == [False, True]


def test_every_state_but_gone_can_be_removed():
    ways = {state for state, event in TRANSITIONS if event is Event.REMOVED}
    assert ways == set(WorkerState) - {WorkerState.GONE}
