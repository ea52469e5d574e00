"""ttft: the formula, its terms, and what it must never do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Match, RouteRequest
from policies.scorers.ttft import SLOT_SHARE, Ttft, predicted_ttft

PROMPT = RouteRequest(model="m", prompt_tokens=1000, now=100.0)


def costs(*candidates, request=PROMPT, **parameters):
    return list(Ttft(**parameters).score(request, candidates))


def test_an_idle_worker_costs_its_prefill(real):
    assert costs(real(), real(600)) == pytest.approx([1.5, 0.9])


def test_what_was_sent_before_is_waited_for_less_what_has_passed(real):
    busy = real()
    busy.worker.acquire(4000, now=98.0)
    assert costs(busy, real(), congestion_price=0, occupancy=0) == pytest.approx([4.5 - 2.0 + 1.5, 1.5])
    assert predicted_ttft(PROMPT, busy) == pytest.approx(4.0)


def test_a_prefill_that_may_wait_for_blocks_is_not_taken_for_one_under_way(real):
    tight = real(kv_capacity_tokens=5000)
    tight.worker.acquire(4000, now=98.0)
    assert costs(tight, congestion_price=0, occupancy=0) == pytest.approx([4.5 - 2.0 + 1.5])
    tight.worker.acquire(2000, now=98.0)
    assert costs(tight, congestion_price=0, occupancy=0) == pytest.approx([4.5 + 2.5 + 1.5])
    assert predicted_ttft(PROMPT, tight) == pytest.approx(4.5 + 2.5 + 1.5)


def test_what_has_passed_counts_only_where_one_prompt_is_computed_at_a_time(real):
    shared = real(prefill="chunked")
    shared.worker.acquire(4000, now=98.0)
    assert costs(shared, congestion_price=0, occupancy=0) == pytest.approx([4.5 + 1.5])
    assert predicted_ttft(PROMPT, shared) == pytest.approx(4.5 + 1.5)


def test_a_slot_is_not_waited_for_where_blocks_are_what_is_short(real):
    def full(prefill, capacity):
        each = real(prefill=prefill, slots=2, kv_capacity_tokens=capacity)
        for _ in range(2):
            each.worker.acquire(500, now=90.0).first_byte(91.0)
        each.worker.hold = 8.0
        return each

    slot = SLOT_SHARE * 8.0 / 2
    assert costs(full("chunked", 1000), occupancy=0) == pytest.approx([1.5 + slot])
    assert costs(full("chunked", 999), occupancy=0) == pytest.approx([1.5])
    assert costs(full("exclusive", 999), occupancy=0) == pytest.approx([1.5 + slot])


def test_congestion_prices_the_own_prefill_by_the_share_of_busy_workers(real):
    busy = real()
    busy.worker.acquire(4000, now=100.0)
    assert costs(busy, real(900), congestion_price=4, occupancy=0) == pytest.approx([4.5 + 3 * 1.5, 3 * 0.6])


def test_streams_that_would_be_held_back_cost_by_the_share_of_slots_taken(real):
    streaming = real(slots=4)
    for _ in range(2):
        streaming.worker.acquire(1, now=90.0).first_byte(91.0)
    assert costs(streaming, real()) == pytest.approx([1.5 + 1.5 * 2 / 4, 1.5])


def test_a_full_worker_costs_a_share_of_the_time_until_a_slot_is_free(real):
    full = real(slots=2)
    for _ in range(2):
        full.worker.acquire(1, now=90.0).first_byte(91.0)
    full.worker.hold = 8.0
    assert costs(full, real(slots=2), occupancy=0) == pytest.approx([1.5 + SLOT_SHARE * 8.0 / 2, 1.5])
    assert predicted_ttft(PROMPT, full) == pytest.approx(1.5 + 4.0)


def test_cost_is_a_step_function_of_the_match_where_prompts_are_padded_and_segments_count(real):
    shape = {"prefill_buckets": (512, 1024), "segment_size": 512, "block_size": 32}
    assert costs(*(real(held, **shape) for held in (0, 480, 512, 900))) == pytest.approx([1.524, 1.524, 1.012, 1.012])


def test_tiers_are_loaded_only_where_that_is_quicker_than_computing(real):
    quick = real(Match(l1=900), kv_bytes_per_token=1_000_000)
    load = quick.worker.capabilities.load_seconds(900, 0)
    slow = real(Match(device=100, l2=800), kv_bytes_per_token=100_000_000)
    assert costs(quick, slow) == pytest.approx([load + 0.6, 0.5 + 0.9])


def test_speeds_that_differ_by_noise_only_make_no_difference(real):
    workers = [real() for _ in range(5)]
    for each, rate in zip(workers, (990.0, 1005.0, 1000.0, 1010.0, 500.0), strict=True):
        each.worker.rate = rate
    assert costs(*workers) == pytest.approx([1.5] * 4 + [2.5])


def test_without_a_known_prompt_the_least_loaded_is_cheapest(real):
    loaded = real()
    loaded.worker.acquire(now=1.0)
    request = RouteRequest(model="m")
    assert costs(loaded, real(), request=request) == [1.0, 0.0]
    assert predicted_ttft(request, loaded) is None
    assert Ttft().terms(request, [loaded]) == [{"in_flight": 1.0}]


@st.composite
def worlds(draw):
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 3000),
                st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=6),
                st.sampled_from(
                    [
                        {},
                        {"slots": 3},
                        {"prefill": "chunked", "slots": 2, "kv_capacity_tokens": 2000},
                        {"prefill_rate": 3000.0},
                        {"prefill_buckets": (512, 2048), "segment_size": 512, "block_size": 32},
                    ]
                ),
                st.sampled_from([1.0, 0.25]),
            ),
            min_size=1,
            max_size=6,
        )
    )


@given(worlds(), st.integers(1, 5000))
def test_terms_add_up_to_the_cost_and_more_held_is_never_worse(real, world, prompt):
    candidates = []
    for held, sent, section, weight in world:
        each = real(held, **section)
        each.worker.weight = weight
        for tokens, answered in sent:
            lease = each.worker.acquire(tokens, now=99.0)
            if answered:
                lease.first_byte(99.5)
        candidates.append(each)
    request = RouteRequest(model="m", prompt_tokens=prompt, now=100.0)
    scored = costs(*candidates, request=request)
    terms = Ttft().terms(request, candidates)
    assert [sum(each.values()) for each in terms] == pytest.approx(scored)
    assert all(value >= -1e-9 for each in terms for value in each.values())
    bare = [type(each)(each.worker, real().match) for each in candidates]
    assert all(cost <= more + 1e-9 for cost, more in zip(scored, costs(*bare, request=request), strict=True))


@pytest.mark.parametrize("wrong", [{"congestion_price": -1}, {"occupancy": float("nan")}, {"assumed_slots": 0}])
def test_parameters_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Ttft(**wrong)
