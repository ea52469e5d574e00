"""`warmroute demo --tiers`: workers with one storage, each with LMCache's server, and a configuration that knows them."""

import argparse

import pytest

from gateway.cli import demo


def arguments(*words):
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *words])


@pytest.fixture
async def workers_of():
    started = []

    async def workers_of(given):
        found = await demo._start_workers(given)
        started.extend(found)
        return found

    yield workers_of
    for worker in started:
        await worker.stop()


async def test_with_tiers_workers_share_storage_and_the_gateway_is_told_of_it(workers_of):
    given = arguments("--workers", "2", "--tiers")
    one, other = await workers_of(given)
    assert one.engine.memory.l2 is other.engine.memory.l2
    assert one.engine.memory.l1 is not other.engine.memory.l1
    config = demo._config(given, None, [one, other], "http://localhost:9300")
    assert config.residency is not None
    assert config.models[0].l2.url == "http://localhost:9300"
    assert [worker.hints.url for worker in config.models[0].workers] == [one.lmcache.url, other.lmcache.url]


async def test_without_them_there_is_nothing_of_it(workers_of):
    given = arguments("--workers", "1")
    (worker,) = await workers_of(given)
    assert worker.lmcache is None
    assert worker.shared.l2.capacity == 0
    config = demo._config(given, None, [worker], "")
    assert config.residency is None
    assert config.models[0].l2 is None
