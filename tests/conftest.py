"""Every asynchronous test runs on uvloop, as the gateway does, and ends in time."""

import asyncio
import functools
import inspect

import pytest
import uvloop
from hypothesis import HealthCheck, settings

_SECONDS = 50

# Other work on the machine makes an example slow; that is no property of the code. Benchmarks hold the figures.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items):
    """pytest-timeout's signal is lost in uvloop, which logs what a signal handler raises: a test that waits for ever would never fail."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj)


def _limited(test):
    @functools.wraps(test)
    async def limited(*args, **keywords):
        async with asyncio.timeout(_SECONDS):
            await test(*args, **keywords)

    return limited
