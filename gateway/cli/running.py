"""What the commands that run until they are told to stop have in common."""

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvloop

from gateway.overload.readings import raise_descriptors_limit

_COLLECT_AFTER = 50_000
"""Objects allocated between two looks of the cyclic collector; Python's 700 is 20 small requests, and costs 5 % of their CPU."""


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on uvloop, with as many descriptors as the system allows, and return its exit status."""
    raise_descriptors_limit()
    _, *older = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *older)
    return uvloop.run(main)


@contextlib.contextmanager
def stop_signals(reload: Callable[[], None] | None = None) -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set; SIGHUP calls `reload`. A second signal ends the process the hard way."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if reload is not None:
        loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def complain(message: str) -> None:
    """Say on standard error why the command failed."""
    print(f"warmroute: {message}", file=sys.stderr)
