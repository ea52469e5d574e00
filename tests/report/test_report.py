"""The report says what the figures say, needs nothing else, and lets nothing of its input through as markup."""

import re
import tomllib
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from html.parser import HTMLParser
from math import nan
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.fleet import FleetOptions, WorkerOptions, replay
from simulator.report import write_html
from simulator.report.axes import clock, from_nothing, linear, logarithmic
from simulator.report.page import html
from simulator.report.plots import shade, ttft_distribution
from simulator.report.reading import balance, distribution, lead, lost, reuse, waiting
from simulator.report.words import exact_seconds, seconds
from simulator.workloads import generate

MADE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
EVIL = "<script>alert('x')</script>&\"</style>"
VOID = {"meta", "br", "path", "line", "rect"}


@dataclass
class Requests:
    arrival: list


@dataclass
class Series:
    times: list
    in_flight: list
    pending: list
    refused: list


@dataclass
class Run:
    policy: str = "p"
    workload: str = "w"
    workers: list = field(default_factory=lambda: ["w0", "w1"])
    profile: str = "explicit"
    seed: int = 7
    duration: float = 100.0
    ttfts: list = field(default_factory=lambda: [0.1, 0.2, 0.4, 1.5])
    figures: dict = field(default_factory=dict)
    queue: list = field(default_factory=lambda: [1, 2, 1, 0, 1, 1, 2, 0, 1, 0])

    @property
    def requests(self):
        return Requests([0.0, 10.0, nan, 90.0])

    @cached_property
    def series(self):
        loads = [[queue] * len(self.workers) for queue in self.queue]
        return Series([10.0 * i for i in range(len(self.queue))], loads, loads, [0] * len(self.queue))

    def summary(self):
        return {
            "requests": 4,
            "refused": 0,
            "failed": 0,
            "hit_rate": 0.5,
            "hit_rate_device": 0.4,
            "hit_rate_l1": 0.1,
            "hit_rate_l2": 0.0,
            "predicted_hit_rate": None,
            "pooled_lru_hit_rate": 0.6,
            "infinite_hit_rate": 0.8,
            "ttft_mean_s": 1.0,
            "ttft_p50_s": 0.2,
            "ttft_p90_s": 2.0,
            "ttft_p99_s": 3.0,
            "output_tokens_per_s": 1234.0,
            "load_max_over_mean": 1.1,
            **self.figures,
        }


class Tags(HTMLParser):
    """Fails where tags do not close in order; keeps names, attributes and text."""

    def __init__(self, document):
        super().__init__()
        self.open, self.names, self.attributes, self.text = [], set(), [], []
        self.feed(document)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def figures(*runs):
    return [(run, run.summary()) for run in runs]


def pair(**slow):
    return Run("fast"), Run("slow", figures={"ttft_mean_s": 4.0, "ttft_p50_s": 1.0, "ttft_p90_s": 9.0, **slow})


def test_the_document_is_well_formed_and_asks_for_nothing_from_elsewhere():
    document = html(pair(), command="warmroute replay x", made=MADE)
    tags = Tags(document)
    assert not tags.names & {"script", "link", "img", "iframe", "object", "base"}
    assert not {name for name, _ in tags.attributes} & {"src", "href", "onload", "onclick"}
    assert "://" not in document
    assert "url(" not in document
    assert "default-src 'none'" in document


def test_names_from_the_input_are_text_and_nothing_else():
    run = Run(EVIL, workload=EVIL, profile=EVIL, workers=[EVIL, EVIL], figures={EVIL: EVIL})
    tags = Tags(html([run, replace(run)], command=EVIL, notes=[EVIL], made=MADE))
    assert "script" not in tags.names
    assert EVIL in "".join(tags.text)


def test_everything_that_makes_the_run_repeatable_is_there():
    text = " ".join(Tags(html(pair(), command="warmroute replay f --seed 7", notes=["A note."], made=MADE)).text)
    for words in (
        "warmroute replay f --seed 7",
        "A note.",
        "2026-01-02 03:04 UTC",
        "Seed 7",
        "2 \N{MULTIPLICATION SIGN} explicit",
        "Python 3",
    ):
        assert words in text  # fmt: skip


def test_without_a_command_the_process_own_command_line_is_told(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/warmroute", "replay", "a file"])
    assert "warmroute replay &#x27;a file&#x27;" in html([Run()], made=MADE)


def test_equal_results_make_equal_documents():
    assert html(pair(), command="c", made=MADE) == html(pair(), command="c", made=MADE)


def test_the_lead_names_the_best_and_how_far_the_worst_is_away():
    assert lead(figures(*pair())) == (
        "The first token came soonest under fast: after 1.00 s on average; 4.0 times that, 4.00 s, under slow. "
        "No request was refused, and none failed."
    )
    assert "within 2 % of that under slow" in lead(figures(*pair(ttft_mean_s=1.01)))
    assert lead(figures(Run(figures={"ttft_mean_s": None}))) == "No request had an answer."


def test_sentences_hold_the_figures():
    runs = figures(*pair(hit_rate=0.3, load_max_over_mean=2.5, refused=3))
    assert "within 0.20 s under fast and 1.00 s under slow; nine of ten within 2.00 s under fast" in distribution(runs)
    assert "fast reused most: 50.0 %" in reuse(runs)
    assert "83.3 % of what one cache" in reuse(runs)
    assert "l1" in reuse(runs)
    assert "1.10 times the mean of all under fast and 2.50 times under slow" in balance(runs)
    assert lost(runs) == "Refused: 3 under slow, of 4 requests."
    assert (
        lost(figures(*(Run(name, figures={"failed": 2}) for name in "ab")))
        == "Failed: 2 under each policy, of 4 requests."
    )


def test_a_queue_that_grows_to_the_end_is_called_what_it_is():
    steady, growing = Run("steady"), Run("growing", queue=[0, 5, 10, 20, 40, 60, 80, 120, 160, 200])
    assert "Under growing the queue still grew" in waiting(figures(steady, growing))
    assert "still grew" not in waiting(figures(steady))


def test_the_best_of_a_line_is_bold_and_a_draw_is_not():
    document = html(pair(), made=MADE, command="")
    assert "<b>1.00 s</b>" in document
    assert "<b>4.00 s</b>" not in document
    assert "<b>50.0 %</b>" not in document


def test_a_run_without_answers_makes_a_report_too():
    empty = Run(ttfts=[], queue=[], duration=0.0, figures=dict.fromkeys(Run().summary(), None))
    Tags(html([empty], command="", made=MADE))
    with pytest.raises(ValueError, match="at least one"):
        html([])


def test_a_thousand_workers_and_a_hundred_thousand_requests_stay_small():
    random = Random(1)
    workers = [f"w{index}" for index in range(1000)]
    runs = [
        Run(f"p{n}", workers=workers, ttfts=sorted(random.expovariate(1) for _ in range(100_000)), queue=[n + 1] * 480)
        for n in range(3)
    ]
    assert len(html(runs, command="", made=MADE)) < 1_000_000


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=500).map(sorted))
def test_the_distribution_rises_to_the_right_from_nothing_to_all(ttfts):
    drawn = ttft_distribution([Run(ttfts=ttfts)], 528)
    path = re.search(r'<path d="M([^"]+)" class="line', drawn)[1]
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert (points[0][1], points[-1][1]) == (262.0, 8.0)


@given(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9), st.lists(st.floats(0, 1e9), max_size=20))
def test_axes_keep_order_and_marks_inside(one, other, values):
    low, high = min(one, other), max(one, other)
    for axis in (linear(high, ""), logarithmic(low, high, "", str), from_nothing(high, ""), clock(high)):
        marks = [value for value, _ in axis.ticks]
        assert 2 <= len(marks) <= 20
        assert marks == sorted(set(marks))
        assert all(axis.low <= mark <= axis.high * (1 + 1e-9) for mark in marks)
        assert axis.high >= high * (1 - 1e-9)
        places = [axis.at(value) for value in sorted(values)]
        assert places == sorted(places)
        assert all(0 <= place <= 1 for place in places)


@given(st.floats(0, 100), st.floats(0, 100))
def test_more_load_is_never_fainter(one, other):
    levels = [shade(value, 100) for value in sorted([one, other])]
    assert levels == sorted(levels)
    assert all(0 <= level <= 9 for level in levels)
    assert shade(100, 100) == 9
    assert shade(0, 100) == 0 == shade(5, 0)


@pytest.mark.parametrize(
    ("value", "short", "exact"),
    [(0.085, "85 ms", "0.085 s"), (3.2, "3.20 s", "3.20 s"), (12.34, "12.3 s", "12.3 s"), (168, "2.8 min", "168 s"), (7200, "2.0 h", "7,200 s")],
)  # fmt: skip
def test_durations_are_written_for_reading_and_for_comparing(value, short, exact):
    assert (seconds(value), exact_seconds(value)) == (short, exact)


def test_a_real_replay_is_reported(tmp_path):
    workload = generate("chat", users=20, rate=5.0)
    options = FleetOptions(profile=WorkerOptions(block_tokens=64, kv_tokens=64_000).apply(None), workers=3)
    results = [replay(workload, options, policy) for policy in ("roundrobin", "kvaware")]
    write_html(results, tmp_path / "report.html", command="x", made=MADE)
    text = " ".join(Tags((tmp_path / "report.html").read_text()).text)
    assert "Replay of chat" in text
    assert f"{results[1].summary()['hit_rate']:.1%}".replace("%", " %") in text


def test_the_style_is_installed_with_the_package():
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {path for pattern in data["simulator.report"] for path in (root / "simulator/report").glob(pattern)}
    assert root / "simulator/report/style.css" in installed
