import asyncio
import json

import aiohttp
import pytest

from simulator.server import Faults

CHAT = "/v1/chat/completions"


async def set_faults(http, worker, **fields):
    async with http.post(worker.url + "/simulator/faults", json=fields) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def raw(worker, body, *, read=None):
    """What comes back on one connection, and how it ends: None, or the exception."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    got = b""
    try:
        async with asyncio.timeout(5):
            while part := await reader.read(65536):
                got += part
                if read is not None and read(got):
                    break
    except ConnectionResetError as error:
        return got, error
    finally:
        writer.close()
    return got, None


async def test_new_connections_are_refused_and_later_taken_again_on_the_same_port(start, http, chat):
    worker = await start()
    port = worker.port
    await set_faults(http, worker, refuse=True)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await set_faults(http, worker, refuse=False)  # over the connection that stayed
    async with aiohttp.ClientSession() as other, other.get(worker.url + "/health") as response:
        assert response.status == 200
    assert worker.port == port


async def test_a_hanging_worker_takes_requests_and_is_silent(start, http, chat):
    worker = await start()
    await set_faults(http, worker, hang=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), http.post(worker.url + CHAT, json=chat(max_tokens=1)):
            pass
    await set_faults(http, worker, clear=True)
    async with http.post(worker.url + CHAT, json=chat(max_tokens=1)) as response:
        assert response.status == 200


@pytest.mark.parametrize("limit", [0, 1, 100, 700])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_connection_is_reset_after_exactly_so_many_bytes(start, http, chat, limit, stream):
    worker = await start()
    await set_faults(http, worker, reset_after_bytes=limit)
    got, error = await raw(worker, chat(max_tokens=30, stream=stream))
    assert isinstance(error, ConnectionResetError)
    assert len(got) == limit


async def test_all_or_none_or_some_requests_fail_with_the_status_asked_for(start, http, chat):
    worker = await start(seed=7)

    async def statuses(count):
        result = []
        for _ in range(count):
            async with http.post(worker.url + CHAT, json=chat(max_tokens=1)) as response:
                result.append(response.status)
        return result

    await set_faults(http, worker, error_rate=1, error_status=503)
    assert await statuses(3) == [503] * 3
    await set_faults(http, worker, error_rate=0.5)
    assert set(await statuses(40)) == {200, 503}
    await set_faults(http, worker, error_rate=0)
    assert await statuses(3) == [200] * 3


async def test_a_fault_can_hit_a_number_of_requests_and_no_more(start, http, chat):
    worker = await start()
    await set_faults(http, worker, error_rate=1, times=2)
    statuses = []
    for _ in range(4):
        async with http.post(worker.url + CHAT, json=chat(max_tokens=1)) as response:
            statuses.append(response.status)
    assert statuses == [500, 500, 200, 200]


async def test_a_stream_can_stop_without_done_though_http_ends_cleanly(start, http, chat, events_of):
    worker = await start()
    await set_faults(http, worker, stop_after_tokens=3)
    async with http.post(worker.url + CHAT, json=chat(max_tokens=30, stream=True)) as response:
        chunks = events_of(await response.text())
    assert len(chunks) == 1 + 3
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert worker.stats().running == 0


@pytest.mark.parametrize("fault", ["cut_after_tokens", "malformed_after_tokens"])
async def test_a_stream_can_break_off(start, http, chat, fault):
    worker = await start()
    await set_faults(http, worker, **{fault: 2})
    got, _ = await raw(worker, chat(max_tokens=30, stream=True))
    assert got.count(b"data: ") == 1 + 2
    assert not got.endswith(b"0\r\n\r\n")
    assert (b"this is no chunk" in got) == (fault == "malformed_after_tokens")
    assert worker.stats().running == 0


async def test_anthropics_stream_breaks_off_too(start, http, chat):
    worker = await start()
    await set_faults(http, worker, stop_after_tokens=2)
    async with http.post(worker.url + "/v1/messages", json=chat(max_tokens=30, stream=True)) as response:
        text = await response.text()
    assert text.count("content_block_delta") == 2 * 2
    assert "message_stop" not in text


async def test_a_slow_worker_goes_on_from_the_same_moment_at_another_pace(start, http):
    worker = await start(speed=1.0)
    before = worker.clock.now()
    await set_faults(http, worker, slow_factor=1e6)
    assert worker.clock.pace == pytest.approx(1e-6)
    assert before <= worker.clock.now() < before + 5
    await set_faults(http, worker, slow_factor=1)
    assert worker.clock.pace == 1.0


async def test_a_request_under_way_gets_slow_and_fast_again(start, http, chat):
    worker = await start(speed=1.0)
    async with http.post(worker.url + CHAT, json=chat(max_tokens=3000, stream=True)) as response:
        await response.content.readline()
        await set_faults(http, worker, slow_factor=1e9)
        produced = worker.stats().generation_tokens
        await asyncio.sleep(0.05)
        assert worker.stats().generation_tokens == produced
        await set_faults(http, worker, slow_factor=0.0001)
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_an_unknown_or_impossible_fault_is_refused_and_changes_nothing(start, http):
    worker = await start()
    for body in ({"error_rat": 1}, {"error_rate": 2}, {"hang": "yes"}, [], {"slow_factor": 0}, {"error_status": 200}):
        async with http.post(worker.url + "/simulator/faults", json=body) as response:
            assert response.status == 400
    assert worker.faults == Faults()


async def test_neither_state_nor_faults_nor_metrics_are_hit(start, http):
    worker = await start(faults=Faults(hang=True, error_rate=1.0))
    for path in ("/simulator/state", "/metrics"):
        async with http.get(worker.url + path) as response:
            assert response.status == 200


async def test_a_worker_stops_while_requests_hang(start, http, chat, eventually):
    worker = await start(faults=Faults(hang=True))
    request = asyncio.get_running_loop().create_task(http.post(worker.url + CHAT, json=chat()).__aenter__())
    await eventually(lambda: worker.requests)
    async with asyncio.timeout(3):
        await worker.stop()
    with pytest.raises(aiohttp.ClientError):
        await request
