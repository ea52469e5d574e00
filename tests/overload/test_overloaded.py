"""A process at its limit refuses new requests, the lowest classes first, and takes them again when that is over."""

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from gateway.inspector.admin import readiness
from gateway.overload.pressure import ALL_BUT_HIGHEST, CALM, EVERYTHING, LOWEST
from gateway.tasks import TaskGroup

GIB = 1 << 30
STAGES = {
    "chat": {"priority": -10, "match": {"headers": {"x-kind": "chat"}}},
    "batch": {"priority": 10, "match": {"headers": {"x-kind": "batch"}}},
}


async def asks(bench, http, fields="", body=None):
    client = await bench.client()
    await client.sends(http.post(body, fields=fields))
    answer = await client.receives()
    await client.closes()
    return answer


def is_refused(answer):
    return (
        answer.status == 503
        and answer.json["error"]["code"] == "gateway_overloaded"
        and 1 <= int(answer.get("retry-after")) <= 33
    )


class Memory:
    """What the guard believes of the process' memory, of a limit of a gibibyte."""

    def __init__(self, bench, http):
        self.share = 0.0
        self._bench, self._http = bench, http
        bench.gateway._guard._rss = lambda: int(self.share * GIB)

    async def takes(self, share, step):
        self.share = share
        await self._http.until(lambda: self._bench.gateway._guard.step == step)


@pytest.fixture
async def short(start, http):
    """`await short(...)`: a bench with a memory that the test sets."""

    async def begin(**sections):
        bench = await start(overload={"memory": GIB, "memory_share": 1.0}, **sections)
        return bench, Memory(bench, http)

    return begin


async def test_the_lowest_class_is_refused_first_then_all_but_the_highest_then_all(short, http):
    bench, memory = await short(stages=STAGES)
    kinds = ("x-kind: chat\r\n", "", "x-kind: batch\r\n")
    async with bench.worker.answering(http.answer()) as reached:
        for share, step, served in ((0.91, LOWEST, 2), (0.96, ALL_BUT_HIGHEST, 1), (1.01, EVERYTHING, 0)):
            await memory.takes(share, step)
            before = len(reached)
            answers = [await asks(bench, http, fields) for fields in kinds]
            assert [answer.status for answer in answers] == [200] * served + [503] * (3 - served)
            assert all(is_refused(answer) for answer in answers[served:])
            assert len(reached) == before + served
        await memory.takes(0.5, CALM)
        assert [(await asks(bench, http, fields)).status for fields in kinds] == [200] * 3
    await bench.settles()
    assert bench.error_types == {"gateway_overloaded": 6}


async def test_a_priority_in_the_body_is_a_class_too(short, http):
    bench, memory = await short()
    async with bench.worker.answering(http.answer()):
        await memory.takes(0.91, LOWEST)
        assert (await asks(bench, http)).status == 200, "of a single class nothing is refused before all is"
        assert is_refused(await asks(bench, http, body={"model": "m", "messages": [], "priority": 5}))
        assert (await asks(bench, http)).status == 200


async def test_when_all_is_refused_no_body_is_waited_for_and_nothing_under_way_suffers(short, http):
    bench, memory = await short()
    async with bench.bystander():
        await memory.takes(1.1, EVERYTHING)
        client = await bench.client()
        await client.sends(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 10000000\r\n\r\n{")
        refusal = await client.receives()
        assert is_refused(refusal)
        assert refusal.get("connection") == "close"
        assert (await asks(bench, http)).get("connection") is None, "one that was read keeps its connection"


async def test_it_is_said_in_readyz_in_the_metrics_and_in_one_line_when_it_begins_and_one_when_it_ends(short, http):
    bench, memory = await short()
    sources = bench.gateway._admin_sources()
    with capture_logs() as lines:
        await memory.takes(1.25, EVERYTHING)
        for _ in range(5):
            assert is_refused(await asks(bench, http))
        ready, report = readiness(sources)
        assert ready, "a fleet of gateways that all say no would leave nobody to say when to come back"
        assert "overloaded: memory at 125% of its limit; all new requests are refused" in report["degraded"]
        text = bench.gateway.metrics.render(None)[0].decode()
        assert "warmroute_overload_step 3.0" in text
        assert 'warmroute_overload_pressure{resource="memory"} 1.25' in text
        assert 'warmroute_overload_refused_total{resource="memory"} 5.0' in text
        assert 'warmroute_refused_total{error_type="gateway_overloaded"} 5.0' in text
        await memory.takes(0.1, CALM)
    said = [line["event"] for line in lines if line["log_level"] in {"error", "warning"}]
    assert said == ["overloaded", "no longer overloaded"]
    assert readiness(sources)[1]["degraded"] == []


async def test_a_reload_can_raise_the_limit_or_switch_it_off(short, http, start):
    bench, memory = await short()
    await memory.takes(1.1, EVERYTHING)
    guard, config = bench.gateway._guard, bench.gateway.config
    guard.configure(type(config.overload)(memory=4 * GIB), [])
    await http.until(lambda: guard.step == CALM)
    await memory.takes(4.4, EVERYTHING)
    guard.configure(type(config.overload)(memory=4 * GIB, memory_share=0.0), [])
    await http.until(lambda: guard.step == CALM)


async def holds_up(seconds, stop):
    """The loop of this process, again and again."""
    while not stop.is_set():
        time.sleep(seconds)  # noqa: ASYNC251 - that is the fault
        await asyncio.sleep(0)


async def test_a_loop_that_is_late_again_and_again_refuses_and_recovers(start, http):
    bench = await start(overload={"lag": 0.15})
    tasks, stop = TaskGroup("test"), asyncio.Event()
    async with bench.worker.answering(http.answer()):
        tasks.spawn("block", holds_up(0.4, stop))
        await http.until(lambda: bench.gateway._guard.step == EVERYTHING)
        assert is_refused(await asks(bench, http))
        assert any("event_loop" in sentence for sentence in bench.gateway._guard.degraded)
        stop.set()
        await http.until(lambda: bench.gateway._guard.step == CALM, 10)
        assert (await asks(bench, http)).status == 200
    await tasks.cancel()


async def test_one_long_stop_of_the_loop_refuses_nobody(start, http):
    bench = await start(overload={"lag": 0.15})
    steps = set()
    async with bench.worker.answering(http.answer()):
        time.sleep(1.0)  # noqa: ASYNC251 - a garbage collection, say
        for _ in range(8):
            await asyncio.sleep(0.05)
            steps.add(bench.gateway._guard.step)
        assert (await asks(bench, http)).status == 200
    assert EVERYTHING not in steps


async def test_time_in_which_the_loop_stood_still_counts_against_no_worker(start, http):
    bench = await start(timeouts={"first_byte": 0.6, "between_chunks": 0.6})
    client, stream = await bench.client(), await bench.client()
    await client.sends(http.post())
    peer, _ = await bench.worker.receives()
    await stream.sends(http.post({"model": "m", "stream": True}))
    streaming, _ = await bench.worker.receives()
    await streaming.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
    await stream.head()
    await stream.chunk()
    time.sleep(1.5)  # noqa: ASYNC251 - the fault
    await asyncio.sleep(0.1)  # the first look at what is overdue
    await peer.sends(http.answer())
    await streaming.sends(http.chunk(b"data: 2\n\n") + b"0\r\n\r\n")
    assert (await client.receives()).status == 200
    assert await stream.chunked_body() == b"data: 2\n\n"
