"""The budget: calls, transfers and pins are never more than it says, whatever is asked."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from backends.hints.model import Action, Fate, Hint, Subject
from gateway.config.residency import ResidencyBudget, Throttle
from gateway.config.schema import Tiers
from gateway.residency.budget import BURST, Budget
from gateway.residency.ledger import Ledger

NUMBERS = count(1)


def hint(action, worker="a", start=0, stop=1600, *, source=None, target="device", ttl=10.0, session="s", peer=None):
    return Hint(
        id=next(NUMBERS),
        action=action,
        rule="r",
        worker=worker,
        subject=Subject("m", stop, {}, session=session),
        start=start,
        stop=stop,
        source=source,
        target=target,
        ttl=ttl,
        peer=peer,
    )


asks = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),
        st.sampled_from([Action.PREFETCH, Action.PIN, Action.DEMOTE, Action.RETAIN]),
        st.integers(1, 60_000),
        st.sampled_from(["device", "l1", "l2"]),
        st.sampled_from(["l1", "l2"]),
        st.one_of(st.just(0.0), st.floats(0.01, 20.0)),
    ),
    max_size=80,
)


@given(asks, st.floats(0.5, 20.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_calls_transfers_and_pins_stay_within_the_budget(worker_of, history, per_second, bandwidth, pinned):
    worker = worker_of("a")
    budget = Budget(
        ResidencyBudget(hints_per_second=per_second, bandwidth_share=bandwidth, pinned_share=pinned), lambda: [worker]
    )
    capacity = {"device": 100_000, "l1": 200_000, "l2": 2_000_000}
    now, calls, seconds, largest, pins = 0.0, 0, 0.0, 0.0, []
    for wait, action, tokens, target, source, ttl in history:
        now += wait
        budget.tick(now)
        asked = hint(action, stop=tokens, source=source, target=target, ttl=ttl)
        if not budget.allow(asked, tokens * 1000 if action is Action.PREFETCH else 0, now):
            continue
        calls += 1
        if action is Action.PREFETCH:
            cost = tokens * 1000 / (100e6 if source == "l1" else 10e6)
            seconds, largest = seconds + cost, max(largest, cost)
        if action is Action.PIN:
            pins.append((now + ttl if ttl else 1e9, target, tokens))
        assert calls <= max(1.0, BURST * per_second) + per_second * now + 1e-6
        # One transfer may be larger than all that is left: else what is large could never be fetched.
        assert seconds <= BURST * bandwidth + bandwidth * now + largest + 1e-6
        for tier, most in capacity.items():
            held = sum(each for until, where, each in pins if where == tier and until > now)
            assert budget.pinned("a", tier) == held <= pinned * most


def test_a_transfer_that_is_larger_than_the_burst_goes_first_and_then_nothing_for_long(worker_of):
    worker = worker_of("a")
    budget = Budget(ResidencyBudget(bandwidth_share=0.2), lambda: [worker])
    # 50 MB over 10 MB/s: 5 s of the storage's bandwidth, at a fifth of it 25 s.
    assert budget.allow(hint(Action.PREFETCH, stop=50_000, source="l2", target="l1"), 50_000_000, 0.0)
    assert not budget.allow(hint(Action.PREFETCH, stop=16, source="l2", target="l1"), 16_000, 22.9)
    assert budget.allow(hint(Action.PREFETCH, stop=16, source="l2", target="l1"), 16_000, 23.1)


def test_what_moves_nothing_costs_a_call_and_no_transfer(worker_of):
    worker = worker_of("a")
    budget = Budget(ResidencyBudget(bandwidth_share=0.0), lambda: [worker])
    assert not budget.allow(hint(Action.PREFETCH, source="l2"), 1, 0.0)
    assert budget.allow(hint(Action.PREFETCH, source="l2"), 0, 0.0)


def test_workers_do_not_share_their_calls_but_share_the_pins_of_shared_storage(worker_of):
    workers = [worker_of(name) for name in "ab"]
    budget = Budget(ResidencyBudget(hints_per_second=0.5, pinned_share=0.5), lambda: workers)
    big = {"stop": 600_000, "target": "l2", "ttl": 100.0}
    assert budget.allow(hint(Action.PIN, "a", **big), 0, 0.0)
    assert not budget.allow(hint(Action.DEMOTE, "a"), 0, 0.0)
    assert not budget.allow(hint(Action.PIN, "b", **big), 0, 0.0), "600 k and 600 k are more than half of 2 M"
    assert budget.allow(hint(Action.PIN, "b", stop=90_000, target="l1"), 0, 0.0)
    assert budget.pinned("a", "l1") == 0
    assert budget.pinned("a", "l2") == budget.pinned("b", "l2") == 600_000


def test_a_pin_is_given_back_when_it_is_taken_back_refused_or_over(worker_of):
    worker = worker_of("a")
    books = Ledger(Throttle(), lambda entry: budget.ended(entry))  # noqa: PLW0108 - made below
    budget = Budget(ResidencyBudget(), lambda: [worker], books.open.__contains__)

    def ask(action, session, ttl=100.0):
        asked = hint(action, session=session, ttl=ttl)
        books.offer(asked)
        assert budget.allow(asked, 0, 0.0)
        return asked

    ask(Action.PIN, "kept")
    ask(Action.PIN, "taken back")
    short = ask(Action.PIN, "over", ttl=5.0)
    refused = ask(Action.PIN, "refused")
    assert budget.pinned("a", "device") == 6400
    ask(Action.UNPIN, "taken back")
    assert budget.pinned("a", "device") == 4800
    books.fate(refused, Fate.REFUSED, "", 0.0)
    assert budget.pinned("a", "device") == 3200
    books.fate(short, Fate.SENT, "", 0.0)
    books.fate(short, Fate.USEFUL, "", 0.0)
    assert budget.pinned("a", "device") == 3200, "a pin that was of use is still a pin"
    budget.tick(5.0)
    assert budget.pinned("a", "device") == 1600


def test_a_hint_that_has_ended_is_not_said_any_more(worker_of):
    worker = worker_of("a")
    books = Ledger(Throttle())
    budget = Budget(ResidencyBudget(), lambda: [worker], books.open.__contains__)
    late = hint(Action.PREFETCH)
    books.offer(late)
    books.fate(late, Fate.SKIPPED, "overtaken", 0.0)
    assert not budget.allow(late, 0, 0.0)


def test_nothing_is_pinned_where_nobody_knows_how_much_there_is(worker_of):
    worker = worker_of("a", kv_capacity_tokens=None, tiers=Tiers(), block_size=None)
    budget = Budget(ResidencyBudget(), lambda: [worker])
    assert not budget.allow(hint(Action.PIN, target="l2"), 0, 0.0)
    assert not budget.allow(hint(Action.PIN, "gone", target="l2"), 0, 0.0)


def test_accounts_and_pins_of_workers_that_are_gone_are_forgotten(worker_of):
    workers = [worker_of("a")]
    budget = Budget(ResidencyBudget(), lambda: workers)
    for number in range(40):
        workers[:] = [worker_of(f"w{number}")]
        assert budget.allow(hint(Action.PIN, f"w{number}", ttl=0.0), 0, 0.0)
        budget.tick(0.0)
    assert len(budget.document()["workers"]) <= 18
    assert len(budget.pins) <= 18
