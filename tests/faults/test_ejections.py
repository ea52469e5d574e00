"""Outliers, hosts in doubt and panics on real sockets: what clients, `/readyz`, metrics and the log see of them."""

import asyncio
import contextlib

import aiohttp
import pytest

from gateway.fleet.states import FailureKind

CLOSE = b"connection: close\r\n"


async def degraded(bench):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{bench.gateway.admin_port}/readyz") as response,
    ):
        report = await response.json()
        return report["ready"], " | ".join(report["degraded"])


def metric(bench, name):
    text, _ = bench.gateway.metrics.render(None)
    line = next(line for line in text.decode().splitlines() if line.startswith(f'{name}{{model="m"}}'))
    return float(line.split()[-1])


def state(bench, number):
    return bench.fleet_worker(bench.workers[number]).state.value


async def ask(bench, http, count):
    """`count` requests, one after the other; their statuses."""
    statuses = []
    for _ in range(count):
        client = await bench.client()
        await client.sends(http.post())
        statuses.append((await client.receives()).status)
        await client.closes()
    return statuses


async def test_a_worker_that_fails_every_other_request_is_found_by_its_peers_success(start, http):
    outliers = {"interval": 1.0, "min_requests": 5}
    ejection = {"consecutive_failures": 3, "base": 30, "failure_penalty": 1, "outliers": outliers}
    bench = await start(workers=5, policy="roundrobin", health={"interval": 60, "slow_start": 0, "ejection": ejection})
    *good, bad = bench.workers
    turn = 0

    async def alternates():
        nonlocal turn
        while True:
            peer = await bad.accepts()
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await peer.receives()
                turn += 1
                status = "500 Oh" if turn % 2 else "200 OK"
                await peer.sends(http.answer(b"{}", status=status, fields=CLOSE))

    async with contextlib.AsyncExitStack() as stack:
        for worker in good:
            await stack.enter_async_context(worker.answering(http.answer(b"{}")))
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(alternates())
            async with asyncio.timeout(15):
                while state(bench, 4) != "ejected":
                    await ask(bench, http, 10)
            assert set(await ask(bench, http, 10)) == {200}
            serving.cancel()
    assert metric(bench, "warmroute_outlier_ejections_total") == 1
    life = bench.gateway._health._lives[bench.fleet_worker(bad)]
    assert "of its requests succeeded" in life.last_error


@pytest.fixture
async def racks(start, http):
    """A gateway over six workers, three on host a and three on host b, by configuration; all answer."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(**ejection):
            workers = [http.ScriptedWorker() for _ in range(6)]
            for worker in workers:
                await worker.start()
                stack.push_async_callback(worker.stop)
                await stack.enter_async_context(worker.answering(http.answer(b"{}", fields=CLOSE)))
            urls = [
                {"url": worker.url, "driver": "vllm", "host": "a" if place < 3 else "b"}
                for place, worker in enumerate(workers)
            ]
            health = {"interval": 60, "slow_start": 0, "ejection": {"consecutive_failures": 1, **ejection}}
            bench = await start(workers=0, policy="roundrobin", model={"workers": urls}, health=health)
            return (
                bench,
                workers,
                [next(view for view in bench.fleet_workers if view.port == worker.port) for worker in workers],
            )

        yield begin


async def test_when_two_workers_of_a_host_die_the_third_is_asked_at_once_and_found_dead(racks, http):
    bench, workers, views = await racks()
    workers[2].healthy = False  # its next check is a minute away
    for worker in workers[:2]:
        await worker.stop()
    assert set(await ask(bench, http, 18)) == {200}
    await http.until(lambda: [view.state.value for view in views] == ["ejected"] * 3 + ["ready"] * 3)
    assert views[2].in_flight == 0


async def test_one_that_is_well_proves_it_and_stays(racks, http):
    bench, workers, views = await racks()
    for worker in workers[:2]:
        await worker.stop()
    assert set(await ask(bench, http, 18)) == {200}
    assert [view.state.value for view in views[:2]] == ["ejected"] * 2
    life = bench.gateway._health._lives[views[2]]
    await http.until(lambda: life.cleared)
    before = workers[2].connections
    assert set(await ask(bench, http, 12)) == {200}
    assert workers[2].connections > before
    assert life.suspect_until == 0.0
    assert views[2].state.value == "ready"


async def test_a_suspect_is_said_in_readyz_and_metrics(racks):
    bench, _, views = await racks()
    lives, now = bench.gateway._health._lives, asyncio.get_running_loop().time()
    for view in views[:2]:
        lives[view].request_failed(now, FailureKind.SERVER_ERROR)
    assert not views[2].routable
    assert metric(bench, "warmroute_fleet_workers_suspect") == 1
    ready, said = await degraded(bench)
    assert ready
    assert f"suspect, for others of their host were ejected: {views[2].id}" in said


async def test_a_panic_is_said_in_readyz_metrics_and_the_log_and_requests_are_answered(start, http, capsys):
    bench = await start(
        workers=2, health={"interval": 60, "ejection": {"max_share": 1, "base": 60}}, retries={"statuses": []}
    )
    async with contextlib.AsyncExitStack() as stack:
        for worker in bench.workers:
            await stack.enter_async_context(worker.answering(http.answer(b"{}", status="500 Oh", fields=CLOSE)))
        assert metric(bench, "warmroute_fleet_panic") == 0
        await ask(bench, http, 12)
    assert [state(bench, 0), state(bench, 1)] == ["ejected", "ejected"]
    assert metric(bench, "warmroute_fleet_panic") == 1
    ready, said = await degraded(bench)
    assert "panic" in said
    assert ready, "what is used all the same must not be taken out of service"
    async with contextlib.AsyncExitStack() as stack:
        for worker in bench.workers:
            await stack.enter_async_context(worker.answering(http.answer(b"{}", fields=CLOSE)))
        assert set(await ask(bench, http, 6)) == {200}
    assert metric(bench, "warmroute_fleet_panic") == 0
    log = capsys.readouterr().out
    assert log.count("panic: too many workers are out") == 1
    assert log.count("panic is over") == 1


async def test_a_dead_worker_is_not_asked_in_a_panic_while_another_answers(start, http):
    bench = await start(
        workers=2, health={"interval": 60, "ejection": {"max_share": 1, "base": 60}}, retries={"statuses": []}
    )
    dead, alive = bench.workers
    await dead.stop()
    async with alive.answering(http.answer(b"{}", status="500 Oh", fields=CLOSE)):
        await ask(bench, http, 20)
        assert [state(bench, 0), state(bench, 1)] == ["ejected", "ejected"]
        before = bench.attempts["upstream_connect"]
        await ask(bench, http, 20)
    assert bench.attempts["upstream_connect"] == before
