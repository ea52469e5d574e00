"""What holds for a fleet's health whatever happens in whatever order, in virtual time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.vllm import VLLMDriver
from gateway.config.schema import Ejection, Health
from gateway.fleet.membership import Membership
from gateway.fleet.states import (
    COUNTED,
    MAX_PASSES,
    PROBE_PATIENCE,
    TRANSITIONS,
    Cause,
    FailureKind,
    Life,
)
from gateway.fleet.worker import Worker, WorkerState

START_UP = 20.0
ARROWS = {(before, row.after) for (before, _), rows in TRANSITIONS.items() for row in rows}
WORKERS = st.integers(0, 11)


class AnyFleet(RuleBasedStateMachine):
    """Up to twelve workers; checks, requests, drains, removals and time in any order."""

    @initialize(
        size=st.integers(1, 8),
        share=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
        base=st.sampled_from([0.0, 1.0, 5.0]),
        healthy_after=st.integers(1, 3),
        unhealthy_after=st.integers(1, 3),
        failures=st.integers(1, 4),
        panic=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def begin(self, size, share, base, healthy_after, unhealthy_after, failures, panic):
        self.now = 0.0
        self.rules = Health(
            healthy_after=healthy_after,
            unhealthy_after=unhealthy_after,
            slow_start=3.0,
            ejection=Ejection(consecutive_failures=failures, base=base, max=30.0, max_share=share),
        )
        self.log = []
        self.gone = []
        self.leases = []
        self.panics = [False]
        self.membership = Membership(share, self.log.append, panic_share=panic, on_panic=self.panics.append)
        self.lives = []
        for _ in range(size):
            self.add()

    def pick(self, index):
        return self.lives[index % len(self.lives)]

    def snapshot(self, life):
        worker = life.worker
        return (worker.state, worker.routable, worker.probe, life.failures, life.until, life.cause, life.strikes)

    @rule()
    def add(self):
        if len(self.lives) < 12:
            worker = Worker(url=f"http://127.0.0.1:{9000 + len(self.lives)}", driver=VLLMDriver(), model="m")
            self.lives.append(Life(worker, self.membership, self.rules, start_up=START_UP, now=self.now))
            self.membership.replace(self.lives, self.now)

    @rule(index=WORKERS)
    def remove(self, index):
        if len(self.lives) > 1:
            life = self.pick(index)
            life.removed(self.now)
            self.lives.remove(life)
            self.gone.append(life)
            self.membership.replace(self.lives, self.now)

    @rule(index=WORKERS)
    def check_passes(self, index):
        self.pick(index).check_ok(self.now)

    @rule(index=WORKERS, timed_out=st.booleans())
    def check_fails(self, index, timed_out):
        self.pick(index).check_failed(self.now, "no", timed_out=timed_out)

    @rule(index=WORKERS)
    def request_succeeds(self, index):
        self.pick(index).request_ok(self.now)

    @rule(index=WORKERS, kind=st.sampled_from(sorted(COUNTED, key=lambda kind: kind.value)), times=st.integers(1, 5))
    def requests_fail(self, index, kind, times):
        life = self.pick(index)
        before, room = life.worker.state, self.ejected() < self.limit()
        for _ in range(times):
            life.request_failed(self.now, kind)
        if before is WorkerState.READY and not room:
            assert life.worker.state is WorkerState.READY, "the share is used up"

    @rule(index=WORKERS, kind=st.sampled_from(sorted(set(FailureKind) - COUNTED, key=lambda kind: kind.value)))
    def neutral_end_changes_nothing(self, index, kind):
        life = self.pick(index)
        before = self.snapshot(life)
        life.request_failed(self.now, kind)
        assert self.snapshot(life) == before

    @rule(index=WORKERS, seconds=st.sampled_from([0.5, 3.0, 30.0]), status=st.sampled_from([429, 503]))
    def asks_for_a_rest(self, index, seconds, status):
        self.pick(index).rests(self.now, self.now + seconds, status)

    @rule(index=WORKERS, seconds=st.sampled_from([1.0, 15.0]), cause=st.sampled_from(Cause))
    def others_of_its_host_are_ejected(self, index, seconds, cause):
        self.pick(index).suspected(self.now, self.now + seconds, cause)

    @rule(index=WORKERS)
    def is_an_outlier(self, index):
        self.pick(index).outlier(self.now, "fails more than others")

    @rule(index=WORKERS)
    def drain(self, index):
        self.pick(index).drain(self.now)

    @rule(index=WORKERS)
    def undrain(self, index):
        self.pick(index).undrain(self.now)

    @rule(index=WORKERS)
    def gone_ones_hear_more(self, index):
        if self.gone:
            life = self.gone[index % len(self.gone)]
            life.check_ok(self.now)
            life.request_ok(self.now)
            life.undrain(self.now)
            life.request_failed(self.now, FailureKind.CONNECT)

    @rule(index=WORKERS)
    def send(self, index):
        life = self.pick(index)
        worker = life.worker
        if worker.routable:
            trial = worker.probe is True
            if worker.state is WorkerState.EJECTED and not self.membership.panic:
                assert trial
            self.leases.append(worker.acquire())
            assert worker.routable is not trial, "one probe at a time, and only a probe closes the door"

    @rule(index=WORKERS)
    def finish(self, index):
        if self.leases:
            self.leases.pop(index % len(self.leases)).release()

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 5.0, 40.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.membership.tick(self.now)

    @rule(index=WORKERS)
    def a_recovered_worker_is_ready_in_bounded_time(self, index):
        """Every check passes, two seconds apart: the longest way is the ejection, the patience, the passes."""
        life = self.pick(index)
        if life.worker.state is WorkerState.DRAINING:
            life.undrain(self.now)
        deadline = self.now + 30.0 + PROBE_PATIENCE + 2.0 * (MAX_PASSES + 2)
        while life.worker.state is not WorkerState.READY:
            self.now += 2.0
            self.membership.tick(self.now)
            life.check_ok(self.now)
            assert self.now <= deadline
        life.rest_until = life.suspect_until = 0.0
        self.membership.tick(self.now)
        self.membership.changed(self.now)
        assert life.worker.routable

    def ejected(self):
        return sum(life.worker.state is WorkerState.EJECTED for life in self.lives)

    def limit(self):
        return max(1, int(self.rules.ejection.max_share * len(self.lives)))

    @invariant()
    def never_more_than_the_share_ejected_for_requests_except_one(self):
        assert sum(life.cause is Cause.REQUESTS for life in self.lives) <= self.limit()

    @invariant()
    def a_removed_worker_never_returns(self):
        assert all(life.worker.state is WorkerState.GONE and not life.worker.routable for life in self.gone)

    @invariant()
    def only_allowed_arrows(self):
        assert all((entry.before, entry.after) in ARROWS for entry in self.log)
        self.log.clear()

    @invariant()
    def routable_is_what_the_states_say(self):
        ready = [life for life in self.lives if life.worker.state is WorkerState.READY]
        for life in self.lives:
            worker = life.worker
            rests = life.rest_until > self.membership.now
            assert not (rests and worker.routable)
            if worker.state is WorkerState.READY:
                assert worker.routable or rests or life.suspect_until
            elif worker.routable:
                assert life.cause is Cause.REQUESTS
                assert self.membership.panic or (self.now >= life.until and worker.probe is True)
        tryable = [life for life in self.lives if life.cause is Cause.REQUESTS]
        awake = [life for life in tryable if life.rest_until <= self.membership.now]
        if not ready and awake and not any(life.refused for life in tryable):
            assert any(life.worker.routable for life in self.lives), "panic leaves somebody to ask"

    @invariant()
    def a_suspect_is_avoided_only_while_others_take_requests_and_the_share_allows_it(self):
        ready = [life for life in self.lives if life.worker.state is WorkerState.READY]
        avoided = [life for life in ready if life.suspect_until and not life.worker.routable]
        avoided = [life for life in avoided if life.rest_until <= self.membership.now]
        if avoided and all(life.worker.probe is None for life in avoided):
            assert any(life.worker.routable for life in ready)
            assert self.ejected() + len(avoided) <= self.limit()

    @invariant()
    def panics_begin_and_end_in_turn(self):
        assert all(one is not other for one, other in zip(self.panics, self.panics[1:], strict=False))
        assert self.panics[-1] is self.membership.panic

    @invariant()
    def the_books_are_right(self):
        assert self.membership._ejected == self.ejected()
        assert all((life.cause is not None) == (life.worker.state is WorkerState.EJECTED) for life in self.lives)
        assert all(0.0099 <= life.worker.weight <= 1.0 for life in self.lives)
        assert all(life.strikes <= life.ejections for life in self.lives)


AnyFleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyFleet = AnyFleet.TestCase
