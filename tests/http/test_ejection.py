"""Health as requests see it: who is left out, who never is, and how a worker comes back."""

import asyncio

import pytest


def state(bench, scripted=None):
    return bench.fleet_worker(scripted or bench.worker).state.value


async def one_after_the_other(bench, http, count, raw):
    """`count` requests, each answered with `raw` on a connection of its own."""
    for _ in range(count):
        client = await bench.client()
        await client.sends(http.post())
        _, peer, _ = await bench.arrives()
        if raw is None:
            await client.closes()
            await peer.sees_end()
        else:
            await peer.sends(raw)
            await client.receives()


def closing(http, status):
    return http.answer(b"{}", status=f"{status} Some", fields=b"connection: close\r\n")


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599])
async def test_three_failures_in_a_row_eject_a_worker(start, http, status):
    bench = await start(health={"interval": 60}, retries={"statuses": []})
    await one_after_the_other(bench, http, 2, closing(http, status))
    await bench.settles()
    assert state(bench) == "ready"
    await one_after_the_other(bench, http, 1, closing(http, status))
    await bench.settles()
    assert state(bench) == "ejected"


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 429, 501, None])
async def test_what_is_not_the_workers_fault_never_ejects_it(start, http, status):
    bench = await start(health={"interval": 60})
    await one_after_the_other(bench, http, 8, None if status is None else closing(http, status))
    await bench.settles()
    assert state(bench) == "ready"
    assert bench.failures() == 0


async def test_a_success_ends_a_row_of_failures(start, http):
    bench = await start(health={"interval": 60})
    for status in (500, 500, 200, 500, 500):
        await one_after_the_other(bench, http, 1, closing(http, status))
    await bench.settles()
    assert state(bench) == "ready"
    assert bench.failures() == 2


async def test_at_most_a_share_of_a_fleet_is_ejected(start, http):
    bench = await start(workers=4, policy="roundrobin", health={"interval": 60}, retries={"statuses": []})
    await one_after_the_other(bench, http, 40, closing(http, 500))
    await bench.settles()
    assert sorted(state(bench, worker) for worker in bench.workers) == ["ejected", "ejected", "ready", "ready"]


async def test_an_ejected_worker_is_tried_with_one_request_and_comes_back(start, http):
    bench = await start(workers=2, policy="roundrobin", health={"interval": 60, "ejection": {"base": 0.3}})
    bad, _ = bench.workers

    async def arrivals(count):
        """`count` requests at once; those that the good worker got are answered."""
        clients = [await bench.client() for _ in range(count)]
        for client in clients:
            await client.sends(http.post())
        found = []
        for _ in clients:
            scripted, peer, _ = await bench.arrives()
            if scripted is bad:
                found.append(peer)
            else:
                await peer.sends(closing(http, 200))
        return found

    for peer in await arrivals(6):
        await peer.sends(closing(http, 500))
    await http.until(lambda: state(bench, bad) == "ejected")
    assert await arrivals(6) == []
    await http.until(lambda: bench.fleet_worker(bad).routable, 3)
    # Half-open: of the next requests exactly one goes there, and until it has ended no other.
    (probe,) = await arrivals(6)
    assert not bench.fleet_worker(bad).routable
    await probe.sends(closing(http, 200))
    await bench.settles()
    assert state(bench, bad) == "ready"


async def test_when_all_are_ejected_requests_go_to_them_all_the_same(start, http):
    bench = await start(health={"interval": 60})
    await one_after_the_other(bench, http, 3, closing(http, 500))
    await bench.settles()
    assert state(bench) == "ejected"
    await one_after_the_other(bench, http, 1, closing(http, 200))
    await bench.settles()
    assert state(bench) == "ready"


async def test_a_worker_that_comes_back_on_its_port_is_used_again_within_a_probe_interval(start, http):
    interval = 0.3
    bench = await start(health={"interval": interval, "unhealthy_after": 1})
    port = bench.worker.port
    await bench.worker.stop()
    await http.until(lambda: state(bench) == "ejected")
    client = await bench.client()
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(5):
        await client.sends(http.post())
        response = await client.receives()
        assert (response.status, response.get("retry-after")) == (503, "1")
        assert response.json["error"]["code"] == "no_healthy_worker"
    assert loop.time() - began < 0.5
    await bench.worker.start(port)
    began = loop.time()
    await http.until(lambda: bench.fleet_worker(bench.worker).routable)
    assert loop.time() - began < interval * 1.1 + 0.5
    async with bench.worker.answering(http.answer()):
        await client.sends(http.post())
        assert (await client.receives()).status == 200
