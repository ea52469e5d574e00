"""Every asynchronous test runs on uvloop, as the gateway does."""

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
