import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.keeping_model.hazard import BINS, EDGES, Hazard, age_bin, values


@given(st.floats(0, 1e7))
def test_an_age_lies_between_the_edges_of_its_bin(age):
    found = age_bin(age)
    assert EDGES[found] <= age
    assert age < EDGES[found + 1] or found == BINS - 1


@given(st.lists(st.floats(0.001, 0.999), min_size=BINS, max_size=BINS))
def test_room_is_worth_at_least_what_the_next_bin_alone_brings_and_at_most_the_best_hazard_from_there_on(hazards):
    rates = [h / ((1 - h / 2) * (EDGES[b + 1] - EDGES[b])) for b, h in enumerate(hazards)]
    for begin, worth in enumerate(values(hazards)):
        assert worth >= rates[begin] * (1 - 1e-9)
        assert worth <= max(rates[begin:]) * (1 + 1e-9)


def test_parts_that_come_back_around_a_minute_are_worth_more_just_before_than_long_after():
    hazards = [0.001] * BINS
    hazards[age_bin(50.0)] = 0.9
    worth = values(hazards)
    assert worth[age_bin(33.0)] > worth[0] > worth[age_bin(65.0)] * 5


def test_what_was_seen_is_learned_for_each_fact_apart():
    generator = random.Random(1)
    hazard = Hazard(2)
    for _ in range(4000):
        fact = generator.randrange(2)
        hazard.saw((fact,), 5, generator.random() < (0.05, 0.6)[fact], 1)
    hazard.rebuild()
    rare, often = hazard.row((0,)), hazard.row((1,))
    assert often - rare > 6
    assert hazard.value(often, 20.0) > 3 * hazard.value(rare, 20.0)


@given(st.integers(0, 40), st.floats(1e-6, 0.5))
def test_a_part_is_worth_its_price_within_its_lifetime_only(row, price):
    hazard = Hazard(1)
    life = hazard.lifetime(row, price)
    if life == 0.0:
        assert all(hazard.value(row, edge) < price for edge in EDGES[:-1])
    else:
        assert hazard.value(row, EDGES[age_bin(life * 0.999)]) >= price
        assert all(hazard.value(row, edge) < price for edge in EDGES[:-1] if edge > life)


@pytest.mark.parametrize("row", [0, 20, 40])
def test_a_higher_price_never_keeps_longer(row):
    hazard = Hazard(1)
    lives = [hazard.lifetime(row, 1.3**-power) for power in range(60)]
    assert lives == sorted(lives)
    assert lives[-1] > lives[0]
