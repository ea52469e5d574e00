"""Workers that say when they want to be asked again, and budgets that say when nobody may be."""

import asyncio

import aiohttp
import pytest

from gateway.http.retry_after import retry_after_of

RESTS = {"interval": 60}


def busy(http, status="429 Busy", after=b"30"):
    return http.answer(b"busy", status=status, fields=b"retry-after: %b\r\nconnection: close\r\n" % after)


async def readiness(bench):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{bench.gateway.admin_port}/readyz") as response,
    ):
        return response.status, await response.json()


async def scrape(bench):
    text, _ = bench.gateway.metrics.render(None)
    return text.decode()


@pytest.mark.parametrize("status", ["429 Busy", "503 Busy"])
async def test_a_worker_that_wants_to_be_left_alone_gets_nothing_until_then(start, http, status):
    bench = await start(workers=2, health=RESTS)
    client = await bench.client()
    await client.sends(http.post())
    busy_one, peer, _ = await bench.arrives()
    await peer.sends(busy(http, status, b"1"))
    other, peer, _ = await bench.arrives()
    assert other is not busy_one
    await peer.sends(http.answer(b"[1]"))
    assert (await client.receives()).body == b"[1]"
    before = asyncio.get_running_loop().time()
    view = bench.fleet_worker(busy_one)
    assert not view.routable
    assert view.state.value == "ready"
    _, report = await readiness(bench)
    assert any("Retry-After" in text and view.id in text for text in report["degraded"])
    assert 'warmroute_fleet_workers_resting{model="m"} 1.0' in await scrape(bench)
    for _ in range(6):
        await client.sends(http.post())
        assert (await peer.receives()).body
        await peer.sends(http.answer(b"[2]"))
        assert (await client.receives()).body == b"[2]"
    assert busy_one.connections == 1
    await http.until(lambda: view.routable, 5)
    assert 0.9 < asyncio.get_running_loop().time() - before < 2.5


async def test_when_all_want_to_be_left_alone_the_client_hears_the_soonest_time(start, http):
    bench = await start(workers=2, health=RESTS, retries={"attempts": 1})
    for after in (b"40", b"20"):
        client = await bench.client()
        await client.sends(http.post())
        _, peer, _ = await bench.arrives()
        await peer.sends(busy(http, after=after))
        assert (await client.receives()).status == 429
    client = await bench.client()
    await client.sends(http.post())
    response = await client.receives()
    assert response.status == 429
    assert response.json["error"]["code"] == "workers_busy"
    assert 20 <= int(response.get("retry-after")) <= 22
    assert sum(worker.connections for worker in bench.workers) == 2


async def test_it_is_503_if_one_of_them_said_so(start, http):
    bench = await start(workers=2, health=RESTS, retries={"attempts": 1})
    for status in ("429 Busy", "503 Busy"):
        client = await bench.client()
        await client.sends(http.post())
        _, peer, _ = await bench.arrives()
        await peer.sends(busy(http, status))
        await client.receives()
    client = await bench.client()
    await client.sends(http.post())
    assert (await client.receives()).status == 503


async def test_no_worker_may_ask_for_more_than_the_configured_time(start, http):
    bench = await start(health=RESTS, retries={"retry_after_max": 0.5})
    client = await bench.client()
    await client.sends(http.post())
    peer, _ = await bench.worker.receives()
    await peer.sends(busy(http, after=b"86400"))
    await client.receives()
    assert not bench.fleet_workers[0].routable
    await http.until(lambda: bench.fleet_workers[0].routable, 3)


async def test_with_0_it_is_the_clients_affair(start, http):
    bench = await start(workers=2, health=RESTS, retries={"retry_after_max": 0})
    client = await bench.client()
    await client.sends(http.post())
    _, peer, _ = await bench.arrives()
    await peer.sends(busy(http))
    response = await client.receives()
    assert (response.status, response.get("retry-after")) == (429, "30")
    assert all(worker.routable for worker in bench.fleet_workers)


async def test_an_exhausted_budget_says_so(start, http):
    bench = await start(workers=2, health=RESTS, retries={"budget": 0, "budget_min": 0})
    client = await bench.client()
    await client.sends(http.post())
    _, peer, _ = await bench.arrives()
    await peer.sends(http.answer(b"no", status="503 Busy"))
    assert (await client.receives()).body == b"no"
    await bench.settles()
    assert 'warmroute_retry_budget_exhausted_total{model="m"} 1.0' in await scrape(bench)
    _, report = await readiness(bench)
    assert any("retry budget" in text for text in report["degraded"])
    (record,) = bench.gateway.decisions.recent(10)
    assert record.document()["attempts"][0]["retry_budget_exhausted"] is True


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"7", 7.0),
        (b" 7 ", 7.0),
        (b"0", None),
        (b"-3", None),
        (b"soon", None),
        (b"", None),
        (b"1.5", None),
        (b"99999999999999999999", 86400.0),
        ("٣".encode(), None),
        (b"Tue, 01 Dec 2026 00:00:10 GMT", 10.0),
        (b"Tue, 01 Dec 2026 00:00:10 -0000", None),
        (b"Mon, 30 Nov 2026 00:00:00 GMT", None),
        (b"Tue, 99 Dec 2026 00:00:10 GMT", None),
    ],
)
def test_both_forms_of_the_field_are_read_and_nonsense_is_nothing(value, seconds):
    assert retry_after_of([b"content-type: x\r\n", b"Retry-After: %b\r\n" % value], 1_796_083_200.0) == seconds
