import asyncio
import gc
import mmap
import time

from gateway.telemetry.loop import INTERVAL, Lag, LoopMonitor


async def sampled(monitor, count=1):
    """Wait for further samples."""
    before = len(monitor.lag._samples)
    async with asyncio.timeout(10):
        while len(monitor.lag._samples) < before + count:  # noqa: ASYNC110  # a timer samples, nobody tells
            await asyncio.sleep(INTERVAL / 4)


async def test_a_blocked_loop_shows_as_lag():
    monitor = LoopMonitor()
    monitor.start()
    await sampled(monitor)
    time.sleep(INTERVAL + 0.2)  # noqa: ASYNC251  # blocks on purpose
    await sampled(monitor)
    assert monitor.lag.worst() >= 0.19
    monitor.stop()


async def test_it_samples_at_most_ten_times_a_second():
    monitor = LoopMonitor()
    monitor.start()
    before = time.monotonic()
    await sampled(monitor, 3)
    assert time.monotonic() - before >= 0.29
    monitor.stop()


async def test_collections_are_timed_by_generation():
    monitor = LoopMonitor()
    monitor.start()
    before = sum(monitor.gc_pauses[2].counts)
    gc.collect()
    assert sum(monitor.gc_pauses[2].counts) >= before + 1
    assert monitor.gc_pauses[2].sum > 0
    monitor.stop()


async def test_stop_leaves_no_timer_and_no_callback():
    callbacks = list(gc.callbacks)
    monitor = LoopMonitor()
    monitor.start()
    monitor.start()
    assert len(gc.callbacks) == len(callbacks) + 1
    timer = monitor._timer
    monitor.stop()
    monitor.stop()
    assert gc.callbacks == callbacks
    assert timer.cancelled()
    gc.collect()
    assert sum(monitor.gc_pauses[2].counts) == 0


def test_resident_memory_grows_with_what_is_held():
    before = LoopMonitor().rss()
    # Memory of its own: a bytearray may lie where the process held something before.
    with mmap.mmap(-1, 64 * 1024 * 1024) as held:
        held[::4096] = b"x" * len(range(0, len(held), 4096))
        assert LoopMonitor().rss() > before + 32 * 1024 * 1024


def test_the_worst_lag_is_forgotten_after_a_while():
    lag = Lag()
    assert lag.worst() == 0.0
    lag.add(3.0)
    for _ in range(599):
        lag.add(0.0)
    assert lag.worst() == 3.0
    lag.add(0.0)
    assert lag.worst() == 0.0
