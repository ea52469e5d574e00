"""A `Metrics` in which everything has been counted at least once, so that every family has a series."""

from dataclasses import dataclass, field

from gateway.admission.limits import Account
from gateway.config.schema import Capabilities
from gateway.fleet.worker import WorkerState
from gateway.prefix.feed_status import FeedStatus
from gateway.prefix.map import PrefixMap
from gateway.prefix.truth import WorkerTruth
from gateway.prompt.parity_status import ParityStatus, Standing
from gateway.telemetry.collector import QueueReading, Readings
from gateway.telemetry.histogram import GATEWAY_BOUNDS, Histogram
from gateway.telemetry.loop import LoopMonitor
from gateway.telemetry.metrics import Metrics, Outcome
from gateway.telemetry.reasons import Reason
from gateway.telemetry.residency import ResidencyReading
from gateway.telemetry.resilience import ResilienceReading

CHAT = "/v1/chat/completions"


@dataclass
class Overloaded:
    """A guard as metrics read it."""

    step: int = 3
    pressures: dict[str, float] = field(default_factory=lambda: {"memory": 1.0})
    refused: dict[str, int] = field(default_factory=lambda: {"memory": 2})
    turned_away: int = 1


@dataclass
class Reading:
    id: str
    state: WorkerState = WorkerState.READY
    in_flight: int = 3
    in_flight_tokens: int = 4000
    pending: int = 1
    pending_tokens: int = 1000
    weight: float = 1.0
    rate: float = 5000.0
    overhead: float = 0.02
    hold: float = 3.0
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(slots=8))


def everything(hyperpod=None):
    metrics = Metrics(["m"], [CHAT], ["w1"], "1.2.3")
    for outcome, error_type in ((Outcome.COMPLETED, None), (Outcome.FAILED, "upstream_connect")):
        metrics.request_started()
        metrics.request_ended("m", CHAT, 200, outcome, 0.5, 0.1, 100, error_type)
    metrics.request_started()
    metrics.decided("m", "kvaware", Reason.HOLDS_MOST, 0.0003)
    metrics.attempt_ended("w1", None, 0.1)
    metrics.attempt_ended("w1", "upstream_connect")
    metrics.answered("w1", 1000, 512, 50)
    metrics.streamed("m", 1.0, 50)
    metrics.paused("m", 0.2)
    metrics.retry("upstream_connect")
    metrics.refused("model_not_found")
    metrics.hyperpod = hyperpod
    truth = WorkerTruth()
    status = FeedStatus(
        worker="w1",
        fleet="m",
        status="events",
        since=1.0,
        lag=0.1,
        counters={"batches": 1, "events": 2, "gaps": 1},
        blocks={"device": 5},
    )
    parity = ParityStatus(
        worker="w1",
        standing=Standing.EXACT,
        detail="",
        since=1.0,
        compared=(),
        skipped=(),
        generated=True,
        proven=True,
        observed=1,
        wrong=0,
    )
    hints = ResidencyReading(
        "m", [("retain", "w1", "retain", "useful", 3)], 1, {"retain": False}, [("w1", "device", 100, 1000)]
    )
    account = Account()
    account.concurrency = 0
    account.enter(0.0)
    metrics.readings = Readings(
        workers=lambda: [("m", Reading("w1"))],
        ejections=lambda: {"w1": 2},
        queues=lambda: {"m": QueueReading(4, 7.5, 1)},
        upstream_sockets=lambda: {"w1": (3, 1)},
        policy_faults=lambda: {"m": 1},
        resilience=lambda: [("m", ResilienceReading(hedges={"won": 1}))],
        dropped=lambda: {"spans": 1, "logs": 2},
        loop=LoopMonitor(),
        overload=Overloaded(),
        tenants=lambda: [("shop", account)],
        feeds=lambda: [status],
        prefix_maps=lambda: {16: PrefixMap(16)},
        parity=lambda: [("m", parity)],
        truth=lambda: [("w1", truth)],
        residencies=lambda: [hints],
        hint_latency=lambda: {"warm": Histogram(GATEWAY_BOUNDS)},
    )
    return metrics


def sample_labels(metrics):
    """Every sample's name and the names of its labels."""
    found = {}
    for family in metrics.snapshot().collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
