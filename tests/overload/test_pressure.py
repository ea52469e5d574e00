"""Steps of overload: which there are, when they begin and end, and whom they hit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.overload.pressure import ALL_BUT_HIGHEST, CALM, EVERYTHING, HOLD, LOWEST, SIGNALS, Lag, Steps, refuses

pressures = st.floats(0, 3)
NAMES = [signal.name for signal in SIGNALS]


@pytest.mark.parametrize("signal", SIGNALS, ids=NAMES)
def test_everything_is_refused_exactly_from_the_limit_on(signal):
    assert signal.step(1.0, CALM) == EVERYTHING
    assert signal.step(0.999, CALM) == ALL_BUT_HIGHEST
    assert signal.step(signal.first, CALM) == LOWEST
    assert signal.step(signal.first - 0.001, CALM) == CALM


@given(st.sampled_from(SIGNALS), pressures, st.integers(CALM, EVERYTHING))
def test_a_step_is_never_left_sooner_than_it_would_be_taken(signal, pressure, current):
    assert signal.step(pressure, current) >= signal.step(pressure, CALM)


@given(st.lists(st.tuples(st.sampled_from(NAMES), pressures, st.floats(0.01, 2)), max_size=60))
def test_steps_rise_at_once_and_fall_by_one_after_a_quiet_second(course):
    steps, now, quiet = Steps(), 0.0, 0.0
    for name, pressure, passed in course:
        before, signal = steps.step, next(each for each in SIGNALS if each.name == name)
        wanted = signal.step(pressure, before)
        now += passed
        changed = steps.told({name: pressure}, now)
        assert changed == (steps.step != before)
        if wanted >= before:
            assert steps.step == wanted
            quiet = 0.0
        else:
            assert steps.step in {before, before - 1}
            quiet = quiet or now
            if steps.step < before:
                assert now - quiet >= HOLD
                quiet = now
        assert bool(steps.cause) == bool(steps.step)


def test_a_pressure_just_below_a_step_keeps_it_and_one_well_below_ends_it():
    steps = Steps()
    steps.told({"memory": 1.0}, 0.0)
    for second in range(1, 20):
        assert not steps.told({"memory": 0.97}, float(second))
    assert steps.step == EVERYTHING
    steps.told({"memory": 0.5}, 20.0)
    assert steps.step == EVERYTHING
    assert [steps.told({"memory": 0.5}, 20.0 + second) for second in (0.9, 1.1, 2.2, 3.3, 4.4)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert (steps.step, steps.cause) == (CALM, "")


def test_the_worst_signal_decides_and_is_named():
    steps = Steps()
    steps.told({"memory": 0.91, "descriptors": 1.2, "event_loop": 0.0}, 0.0)
    assert (steps.step, steps.cause) == (EVERYTHING, "descriptors")


@given(st.lists(st.floats(0, 10), min_size=3), st.floats(0.001, 10))
def test_one_late_look_is_no_lag_and_three_are(before, late):
    lag = Lag()
    for each in before:
        lag.add(each)
    assert lag.add(0.0) == 0.0
    assert [lag.add(late) for _ in range(3)] == [0.0, 0.0, late]


@given(st.integers(-100, 100), st.lists(st.integers(-100, 100), min_size=1, unique=True).map(sorted))
def test_lower_classes_go_first_and_the_highest_only_when_everything_does(priority, classes):
    refused = [refuses(step, priority, classes) for step in range(4)]
    assert refused == sorted(refused), "who is refused at a step is refused at the next one"
    assert (refused[CALM], refused[EVERYTHING]) == (False, True)
    assert not any(refuses(step, classes[0], classes) for step in (CALM, LOWEST, ALL_BUT_HIGHEST))
    if len(classes) > 1:
        assert refuses(LOWEST, classes[-1], classes)
