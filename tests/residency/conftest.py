"""Prompts, workers and clocks for residency's rules: real workers of the gateway, prompts that are lists of block hashes."""

from array import array

import pytest

from backends.hints.model import Fate, Subject
from backends.registry import driver_named
from gateway.config.residency import ResidencyConfig
from gateway.config.schema import Capabilities, TierMemory, Tiers
from gateway.fleet.worker import Worker
from gateway.residency.residency import Asked, Residency
from policies.base import NO_MATCH

BLOCK = 16


def make_worker(name="a", **known):
    settings = {
        "block_size": BLOCK,
        "kv_capacity_tokens": 100_000,
        "kv_bytes_per_token": 1_000,
        "tiers": Tiers(
            l1=TierMemory(capacity=200_000_000, bandwidth=100_000_000, latency=0.0),
            l2=TierMemory(capacity=2_000_000_000, bandwidth=10_000_000, latency=0.0),
        ),
    }
    made = Worker(
        url="http://127.0.0.1:9",
        driver=driver_named("vllm"),
        model="m",
        worker_id=name,
        capabilities=Capabilities(**(settings | known)),
    )
    made.routable = True
    return made


def make_subject(conversation, blocks, session="", *, rest=3, common=0):
    """A prompt of so many blocks and `rest` tokens; the first `common` blocks are those of every conversation."""
    hashes = [1 + index for index in range(common)]
    hashes += [10_000 * (1 + conversation) + index for index in range(common, blocks)]
    tokens = blocks * BLOCK + rest
    return Subject("m", tokens, {BLOCK: hashes}, ids=lambda: array("I", range(tokens)), session=session)


class Play:
    """A fleet's residency, its workers and what they hold, driven by hand."""

    def __init__(self, config, names="ab", **known):
        self.workers = [make_worker(name, **known) for name in names]
        self.held = {}
        self.core = Residency(config, workers=lambda: self.workers, holds=self.holds)

    def holds(self, subject):
        return {
            name: match
            for (name, first), match in self.held.items()
            if first == subject.chains[BLOCK][0 if subject.chains[BLOCK][0] < 10_000 else -1]
        }

    def turn(self, subject, now, *, worker=0, match=NO_MATCH, cached=None, took=1.0, stage=None, words=None):
        """One whole request; what it was told to say was said and accepted. Returns the hints of `sent` and of `answered`."""
        asked = Asked(subject, now, stage, words)
        target = self.workers[worker]
        sent = self.core.sent(asked, target, match)
        for hint in sent:
            self.core.ledger.fate(hint, Fate.SENT, "", now)
            self.core.ledger.fate(hint, Fate.ACCEPTED, "", now)
        answered = self.core.answered(asked, target.id, match if cached is None else cached, now + took)
        return sent, answered


@pytest.fixture
def play():
    return Play(ResidencyConfig())


@pytest.fixture(scope="session")
def playing():
    """Makes a `Play` of a configuration."""
    return Play


@pytest.fixture(scope="session")
def worker_of():
    return make_worker


@pytest.fixture(scope="session")
def subject_of():
    return make_subject
