"""Figures are computed from the arrays, and samples stay few."""

import orjson
import pytest

from simulator.fleet import Series, replay
from simulator.fleet.series import SAMPLES


class _Load:
    def __init__(self, in_flight):
        self.in_flight = in_flight
        self.pending = in_flight // 2


@pytest.mark.parametrize("seconds", [10, 479, 480, 5_000, 100_000])
def test_samples_are_at_equal_intervals_and_never_too_many(seconds):
    series = Series()
    for now in range(seconds):
        series.sample(now + 0.5, [_Load(now)], 0)
    gaps = {round(later - earlier, 9) for earlier, later in zip(series.times, series.times[1:], strict=False)}
    assert gaps == {series.interval}
    assert len(series.times) < SAMPLES
    assert len(series.times) > min(seconds - 1, SAMPLES // 2 - 2)
    assert [loads[0] for loads in series.in_flight] == [int(time) for time in series.times]
    assert len(series.pending) == len(series.refused) == len(series.times)


def test_a_sample_shows_the_load_of_its_moment(script, fleet):
    script.ask(0.5, range(30), output=201)
    script.ask(1.5, range(100, 120), output=2)
    series = replay(script.workload, fleet(workers=1), "roundrobin").series
    loads = zip(series.times, series.in_flight, series.pending, strict=True)
    at = {time: (in_flight[0], pending[0]) for time, in_flight, pending in loads}
    # Prefills end at 3.5 and 5.5 s; decoding waits for both and takes 10 ms and 2 s.
    assert [at[time] for time in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)] == [
        (1, 1),
        (2, 2),
        (2, 2),
        (2, 1),
        (2, 1),
        (2, 0),
        (1, 0),
    ]
    assert series.in_flight[-1][0] == 0


def test_percentiles_are_those_of_real_requests(script, fleet):
    for index in range(100):
        script.ask(1000.0 * index, range(index + 1))
    result = replay(script.workload, fleet(workers=1, prefix_caching=False), "roundrobin")
    summary = result.summary()
    assert summary["ttft_p50_s"] == pytest.approx(5.0)
    assert summary["ttft_p90_s"] == pytest.approx(9.0)
    assert summary["ttft_p99_s"] == pytest.approx(9.9)
    assert summary["ttft_mean_s"] == pytest.approx(5.05)
    assert summary["hit_rate"] == 0


def test_load_is_compared_by_computed_tokens(script, fleet):
    script.ask(0.0, range(3))
    script.ask(1.0, range(100, 101))
    result = replay(script.workload, fleet(workers=2), "roundrobin")
    assert sorted(result.computed_by_worker()) == [100, 300]
    assert result.summary()["load_max_over_mean"] == pytest.approx(1.5)


def test_output_is_measured_from_the_first_arrival_to_the_last_end(script, fleet):
    script.ask(100.0, range(10), output=101)
    assert replay(script.workload, fleet(workers=1), "roundrobin").summary()["output_tokens_per_s"] == pytest.approx(
        50.5
    )


def test_a_summary_is_json(script, fleet):
    script.ask(0.0, range(3))
    summary = replay(script.workload, fleet(), "kvaware").summary()
    assert orjson.loads(orjson.dumps(summary)) == summary
    assert {
        "requests",
        "refused",
        "failed",
        "hit_rate",
        "ttft_mean_s",
        "ttft_p50_s",
        "ttft_p90_s",
        "ttft_p99_s",
        "output_tokens_per_s",
        "load_max_over_mean",
        "wall_s",
    } <= summary.keys()
