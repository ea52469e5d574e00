"""When a request goes to another worker, and when it must not."""

import asyncio
import random

import orjson
import pytest

BODY = b'{"model":"m", "messages": [{"role":"user","content":"\\u00e4 \xc3\xa4"}],"x":1.0}'


@pytest.fixture
async def worker(http):
    """A worker beside those of the bench."""
    scripted = http.ScriptedWorker()
    await scripted.start()
    yield scripted
    await scripted.stop()


def model_of(*urls):
    return {"workers": [{"url": url, "driver": "vllm"} for url in urls]}


async def test_a_refused_connection_is_retried_on_another_worker(start, http):
    bench = await start(workers=2, policy="roundrobin", health={"interval": 60})
    gone, stays = bench.workers
    await gone.stop()
    client = await bench.client()
    worker = None
    for _ in range(4):
        await client.sends(http.post(BODY))
        worker = worker or await stays.accepts()
        request = await worker.receives()
        assert request.body == BODY
        await worker.sends(http.answer())
        response = await client.receives()
        assert response.status == 200
        assert response.get("x-warmroute-worker") == f"127.0.0.1:{stays.port}"
    await bench.settles()
    assert bench.outcomes == {"completed": 4}
    refused = bench.attempts["upstream_connect"]
    assert refused in {1, 2, 3}  # its turn comes less and less often, and after three it is ejected
    assert bench.gateway.metrics.retries == {"upstream_connect": refused}


async def test_failures_to_connect_are_retried_whatever_the_budget(start, http):
    bench = await start(workers=2, policy="roundrobin", health={"interval": 60}, retries={"budget": 0, "budget_min": 0})
    gone, stays = bench.workers
    await gone.stop()
    clients = [await bench.client() for _ in range(20)]
    async with stays.answering(http.answer()):
        for client in clients:
            await client.sends(http.post())
        assert {(await client.receives()).status for client in clients} == {200}


async def test_when_no_worker_can_be_reached_the_answer_is_503_at_once(start, http):
    bench = await start(workers=3, health={"interval": 60})
    for worker in bench.workers:
        await worker.stop()
    client = await bench.client()
    async with asyncio.timeout(1):
        for _ in range(10):
            await client.sends(http.post())
            response = await client.receives()
            assert response.status == 503
            assert response.get("retry-after") == "1"
            assert response.json["error"]["code"] in {"upstream_connect", "no_healthy_worker"}


async def test_a_syn_that_nobody_answers_is_given_up_and_retried(start, http, black_hole, worker):
    bench = await black_hole(start, worker.url, policy="roundrobin", timeouts={"connect": 0.3})
    clients = [await bench.client() for _ in range(4)]
    began = asyncio.get_running_loop().time()
    async with worker.answering(http.answer()):
        for client in clients:
            await client.sends(http.post())
        assert {(await client.receives()).status for client in clients} == {200}
    assert 0.3 <= asyncio.get_running_loop().time() - began < 2
    assert bench.attempts == {None: 4, "upstream_connect_timeout": 2}


async def test_when_nobody_else_is_left_a_connect_timeout_is_a_504(start, http, black_hole):
    bench = await black_hole(start, timeouts={"connect": 0.2})
    client = await bench.client()
    await client.sends(http.post())
    response = await client.receives()
    assert response.status == 504
    assert response.json["error"]["code"] == "upstream_connect_timeout"
    assert bench.attempts == {"upstream_connect_timeout": 1}


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_fresh_connection_that_ends_without_an_answer_is_not_retried(start, http, how):
    bench = await start(workers=2)
    client = await bench.client()
    await client.sends(http.post())
    scripted, worker, _ = await bench.arrives()
    await (worker.closes() if how == "FIN" else worker.resets())
    response = await client.receives()
    assert response.status == 502
    assert response.json["error"]["code"] == "upstream_reset"
    assert bench.failures(scripted) == 1
    assert sum(worker.connections for worker in bench.workers) == 1


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("retries", [{}, {"attempts": 1, "budget": 0, "budget_min": 0}])
async def test_a_pooled_connection_that_dies_under_a_request_is_replaced_by_a_fresh_one_to_the_same_worker(
    start, http, how, retries
):
    bench = await start(workers=2, policy="session", retries=retries)
    client = await bench.client()
    await client.sends(http.post(BODY, fields="x-session-id: a\r\n"))
    scripted, worker, _ = await bench.arrives()
    await worker.sends(http.answer())
    await client.receives()
    await client.sends(http.post(BODY, fields="x-session-id: a\r\n"))
    assert (await worker.receives()).body == BODY
    await (worker.closes() if how == "FIN" else worker.resets())
    again, worker, request = await bench.arrives()
    assert again is scripted
    assert request.body == BODY
    await worker.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"
    await bench.settles()
    assert bench.outcomes == {"completed": 2}
    assert bench.attempts == {None: 2, "stale_connection": 1}
    assert bench.gateway.metrics.retries == {"stale_connection": 1}
    assert bench.failures(scripted) == 0


async def test_a_pooled_connection_that_dies_after_an_answer_has_begun_is_no_stale_one(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer())
    await client.receives()
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(b"HTTP/1.1 200")
    await asyncio.sleep(0.01)
    await worker.closes()
    assert (await client.receives()).status == 502
    assert bench.attempts == {None: 1, "upstream_reset": 1}


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_worker_that_declines_is_asked_once_and_another_answers(start, http, status):
    bench = await start(workers=2, retries={"statuses": [429, 502, 503]})
    client = await bench.client()
    await client.sends(http.post(BODY))
    first, worker, request = await bench.arrives()
    await worker.sends(http.answer(b"busy", status=f"{status} Busy", fields=b"retry-after: 5\r\n"))
    second, worker, again = await bench.arrives()
    assert second is not first
    assert again.body == request.body == BODY
    assert again.get("x-request-id") == request.get("x-request-id")
    await worker.sends(http.answer(b"[1]"))
    response = await client.receives()
    assert (response.status, response.body, response.get("retry-after")) == (200, b"[1]", None)
    await bench.settles()
    assert bench.outcomes == {"completed": 1}
    assert bench.attempts == {None: 1, str(status): 1}
    assert bench.failures(first) == (0 if status == 429 else 1)


@pytest.mark.parametrize("status", [500, 504, 429])
async def test_a_status_that_is_not_configured_is_relayed(start, http, status):
    bench = await start(workers=2)
    client = await bench.client()
    await client.sends(http.post())
    _, worker, _ = await bench.arrives()
    await worker.sends(http.answer(b"theirs", status=f"{status} Oh"))
    response = await client.receives()
    assert (response.status, response.body) == (status, b"theirs")


async def test_the_last_workers_own_words_are_relayed_when_all_decline(start, http):
    bench = await start(workers=3, retries={"attempts": 5, "statuses": [503]})
    client = await bench.client()
    await client.sends(http.post())
    seen = []
    for number in range(3):
        scripted, worker, _ = await bench.arrives()
        seen.append(scripted)
        await worker.sends(
            http.answer(b"no %d" % number, status="503 Busy", fields=b"retry-after: 9\r\nx-why: full\r\n")
        )
    response = await client.receives()
    assert len(set(map(id, seen))) == 3
    assert (response.status, response.body) == (503, b"no 2")
    assert (response.get("retry-after"), response.get("x-why")) == ("9", "full")
    await bench.settles()
    assert bench.outcomes == {"failed": 1}
    assert bench.attempts == {"503": 3}


async def test_a_single_workers_refusal_is_relayed_and_it_is_not_asked_again(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"busy", status="503 Busy"))
    response = await client.receives()
    assert (response.status, response.body) == (503, b"busy")
    assert bench.worker.connections == 1


async def test_attempts_bound_the_workers_that_are_asked(start, http):
    bench = await start(workers=4, retries={"attempts": 2, "budget": 1})
    client = await bench.client()
    await client.sends(http.post())
    for number in range(2):
        _, worker, _ = await bench.arrives()
        await worker.sends(http.answer(b"no %d" % number, status="503 Busy"))
    response = await client.receives()
    assert (response.status, response.body) == (503, b"no 1")
    assert sum(worker.connections for worker in bench.workers) == 2


async def test_retries_beyond_the_budget_are_not_made(start, http):
    bench = await start(workers=2, retries={"budget": 0.25, "budget_min": 1}, health={"ejection": {"max_share": 0}})
    clients = [await bench.client() for _ in range(8)]
    for client in clients:
        await client.sends(http.post())
    peers = [(await bench.arrives())[1] for _ in clients]
    for peer in peers:
        await peer.sends(http.answer(b"no", status="503 Busy", fields=b"connection: close\r\n"))
    # 8 are in flight, so 2 may be tried again; both hang for now, and the others get the worker's words.
    second = [(await bench.arrives())[1] for _ in range(2)]
    responses = [asyncio.ensure_future(client.receives()) for client in clients]  # noqa: TID251
    await asyncio.wait(responses, timeout=0.2)
    done = [task.result() for task in responses if task.done()]
    assert [(response.status, response.body) for response in done] == [(503, b"no")] * 6
    for peer in second:
        await peer.sends(http.answer(b"yes"))
    assert [response.status for response in await asyncio.gather(*responses)].count(200) == 2
    await bench.settles()
    assert bench.gateway.metrics.retries == {"upstream_status": 2}


@pytest.mark.parametrize("budget", [1, 2])
async def test_each_retry_of_a_request_counts(start, http, budget):
    bench = await start(workers=3, retries={"budget": 0, "budget_min": budget})
    client = await bench.client()
    await client.sends(http.post())
    for status in ("503 Busy", "503 Busy", "200 OK")[: budget + 1]:
        _, worker, _ = await bench.arrives()
        await worker.sends(http.answer(b"x", status=status))
    assert (await client.receives()).status == (200 if budget == 2 else 503)
    assert bench.gateway.metrics.retries == {"upstream_status": budget}


async def test_a_status_is_never_retried_once_a_stream_has_begun(start, http):
    bench = await start(workers=2)
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    _, worker, _ = await bench.arrives()
    await worker.sends(http.SSE_HEAD)
    await client.head()
    await worker.resets()
    assert b"upstream_reset_midstream" in await client.chunked_body()
    assert sum(worker.connections for worker in bench.workers) == 1


class FlakyWorker(asyncio.Protocol):
    """Answers requests, and closes its connections at random moments when they are idle: sometimes just as the next request comes."""

    def __init__(self, rng, counts):
        self._rng = rng
        self._counts = counts
        self._buffer = b""

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        if self._transport.is_closing():
            return
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self._transport.close()
        elif found and len(body) == int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            self._buffer = b""
            self._counts["answered"] += 1
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            loop = asyncio.get_running_loop()
            chance = self._rng.random()
            if chance < 0.2:
                self._transport.close()
            elif chance < 0.6:
                loop.call_later(self._rng.uniform(0, 0.001), self._close_if_idle)

    def _close_if_idle(self):
        # What is in the kernel's buffer by now is lost with the connection, as it is with uvicorn's keep-alive timer.
        if not self._buffer and not self._transport.is_closing():
            self._counts["closed"] += 1
            self._transport.abort() if self._rng.random() < 0.5 else self._transport.close()


@pytest.mark.parametrize("cycles", [10_000])
async def test_connections_that_are_closed_while_idle_cost_no_request(start, http, cycles):
    rng = random.Random(7)
    counts = {"answered": 0, "closed": 0}
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: FlakyWorker(rng, counts), "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bench = await start(workers=0, model=model_of(url), retries={"attempts": 1})

        async def client(number):
            peer = await bench.client()
            for turn in range(cycles // 10):
                body = orjson.dumps({"model": "m", "turn": [number, turn]})
                await peer.sends(http.post(body))
                response = await peer.receives()
                assert response.status == 200
                assert response.body == body

        await asyncio.gather(*(client(number) for number in range(10)))
        await bench.settles()
        assert bench.outcomes == {"completed": cycles}
        assert counts["closed"] > cycles / 20
        assert bench.attempts["stale_connection"] > 0  # the race did happen
