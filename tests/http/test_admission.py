"""Requests that wait in the gateway, over real sockets: who goes first, who is refused, what becomes of those that leave."""

import asyncio

import orjson
import pytest

from gateway.admission.keys import hashed, new_key

CLOSE = b"connection: close\r\n"


async def one_slot(start, *, stages=None, admission=None, limits=None, **sections):
    """A gateway whose one worker has one slot."""
    bench = await start(stages=stages or {}, model={"admission": admission or {}}, **sections)
    for worker in bench.fleet_workers:
        section = type(bench.gateway.config.models[0].workers[0].capabilities)(slots=1)
        worker.adopt(worker.capabilities.configured(section))
    return bench


def waiting(bench):
    return len(bench.gateway.proxy.admissions.gates["m"].line)


async def asks(bench, http, fields="", body=None):
    """A client that has sent a request."""
    client = await bench.client()
    await client.sends(http.post(body, fields=fields))
    return client


async def queues(bench, http, fields="", body=None):
    """A client whose request waits in the gateway."""
    before = waiting(bench)
    client = await asks(bench, http, fields, body)
    await http.until(lambda: waiting(bench) == before + 1)
    return client


async def finishes(worker, client, http, text=b'{"ok":true}'):
    await worker.sends(http.answer(text, fields=CLOSE))
    return await client.receives()


async def test_a_second_request_waits_until_the_first_has_ended(start, http):
    bench = await one_slot(start)
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    second = await queues(bench, http)
    assert bench.worker.arrivals.empty()
    assert (await finishes(worker, first, http)).status == 200
    worker, _ = await bench.worker.receives()
    assert (await finishes(worker, second, http)).status == 200
    await bench.settles()
    assert bench.outcomes == {"completed": 2}
    records = bench.gateway.decisions.recent(10)
    assert max(record.queued for record in records) > 0


async def test_the_more_urgent_goes_first_by_header_body_and_stage(start, http):
    bench = await one_slot(start, stages={"planner": {"priority": -5}})
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    clients = {
        "plain": await queues(bench, http, body={"model": "m", "n": "plain"}),
        "later": await queues(bench, http, body={"model": "m", "n": "later", "priority": 3}),
        "header": await queues(bench, http, "x-warmroute-priority: -1\r\n", {"model": "m", "n": "header"}),
        "planner": await queues(bench, http, "x-warmroute-stage: planner\r\n", {"model": "m", "n": "planner"}),
    }
    await finishes(worker, first, http)
    order = []
    for _ in clients:
        worker, request = await bench.worker.receives()
        order.append(request.json["n"])
        await finishes(worker, clients[order[-1]], http)
    assert order == ["planner", "header", "plain", "later"]


async def test_a_waiting_client_that_leaves_is_gone(start, http):
    bench = await one_slot(start)
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    leaves, stays = await queues(bench, http), await queues(bench, http)
    await leaves.resets()
    await http.until(lambda: waiting(bench) == 1)
    await finishes(worker, first, http)
    worker, _ = await bench.worker.receives()
    assert (await finishes(worker, stays, http)).status == 200
    await bench.settles()
    assert bench.outcomes == {"completed": 2, "client_gone": 1}
    assert bench.worker.arrivals.empty()


async def test_a_full_line_is_answered_429_with_a_reason_and_when_to_come_back(start, http):
    bench = await one_slot(start, admission={"max_requests": 1})
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    second = await queues(bench, http)
    refusal = await (await asks(bench, http)).receives()
    assert refusal.status == 429
    assert refusal.json["error"]["code"] == "queue_full"
    assert refusal.json["error"]["type"] == "rate_limit_error"
    assert int(refusal.get("retry-after")) >= 1
    urgent = await asks(bench, http, "x-warmroute-priority: -1\r\n")
    shed = await second.receives()
    assert (shed.status, shed.json["error"]["code"]) == (429, "shed")
    await finishes(worker, first, http)
    worker, _ = await bench.worker.receives()
    assert (await finishes(worker, urgent, http)).status == 200


async def test_limits_of_a_worker_bound_what_it_gets_and_say_how_overflow_is_answered(start, http):
    scripted = http.ScriptedWorker()
    await scripted.start()
    limits = {"max_concurrent": 1, "max_queue": 1, "overflow_status": 503}
    workers = [{"url": scripted.url, "driver": "vllm", "limits": limits}]
    bench = await start(workers=0, model={"workers": workers})
    bench.workers.append(scripted)
    first = await asks(bench, http)
    worker, _ = await scripted.receives()
    second = await queues(bench, http)
    refusal = await (await asks(bench, http)).receives()
    assert (refusal.status, refusal.json["error"]["code"]) == (503, "queue_full")
    await finishes(worker, first, http)
    worker, _ = await scripted.receives()
    assert (await finishes(worker, second, http)).status == 200


async def test_who_waits_past_its_deadline_is_told_at_once(start, http):
    bench = await one_slot(start)
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    late = await queues(bench, http, "x-warmroute-deadline-ms: 50\r\n")
    refusal = await late.receives()
    assert (refusal.status, refusal.json["error"]["code"]) == (429, "deadline_missed")
    assert refusal.get("connection") is None, "the connection is good for another request"
    await finishes(worker, first, http)


async def test_who_has_waited_too_long_is_told_so(start, http):
    bench = await one_slot(start, admission={"max_wait": "50ms"})
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    refusal = await (await queues(bench, http)).receives()
    assert (refusal.status, refusal.json["error"]["code"]) == (429, "queue_timeout")
    await finishes(worker, first, http)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("x-warmroute-stage: nosuch", "x-warmroute-stage"),
        ("x-warmroute-deadline-ms: soon", "x-warmroute-deadline-ms"),
        ("x-warmroute-deadline-ms: 0", "x-warmroute-deadline-ms"),
        ("x-warmroute-deadline-ms: nan", "x-warmroute-deadline-ms"),
        ("x-warmroute-priority: high", "x-warmroute-priority"),
    ],
)
async def test_fields_that_make_no_sense_are_refused(start, http, field, param):
    bench = await one_slot(start, stages={"planner": {}})
    refusal = await bench.refuses(http.post(fields=f"{field}\r\n"), 400, closes=False)
    assert refusal.json["error"]["param"] == param


async def test_tenants_take_turns_however_much_one_asks(start, http):
    keys = {"flood": new_key(), "other": new_key()}
    bench = await one_slot(start, tenants={name: {"keys": [hashed(key)]} for name, key in keys.items()})

    def of(name):
        return f"Authorization: Bearer {keys[name]}\r\n"

    first = await asks(bench, http, of("flood"))
    worker, _ = await bench.worker.receives()
    floods = [await queues(bench, http, of("flood"), {"model": "m", "n": "flood"}) for _ in range(5)]
    other = await queues(bench, http, of("other"), {"model": "m", "n": "other"})
    await finishes(worker, first, http)
    order = []
    for _ in range(6):
        worker, request = await bench.worker.receives()
        order.append(request.json["n"])
        await finishes(worker, other if order[-1] == "other" else floods.pop(0), http)
    assert order.index("other") <= 1


async def test_a_reload_keeps_those_who_wait(start, http):
    bench = await one_slot(start)
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    second = await queues(bench, http)
    await bench.gateway._reconfigure(bench.gateway.config)
    assert waiting(bench) == 1
    await finishes(worker, first, http)
    worker, _ = await bench.worker.receives()
    assert (await finishes(worker, second, http)).status == 200


async def test_those_who_wait_when_the_gateway_stops_are_answered(start, http):
    bench = await one_slot(start)
    first = await asks(bench, http)
    await bench.worker.receives()
    second = await queues(bench, http)
    await bench.gateway.stop(0.05)
    assert (await first.receives()).status == 503
    assert (await second.receives()).status == 503


async def test_an_idle_fleet_makes_nobody_wait(start, http):
    bench = await one_slot(start)
    async with bench.worker.answering(http.answer()) as requests:
        client = await bench.client()
        for _ in range(5):
            await client.sends(http.post())
            assert (await client.receives()).status == 200
    assert len(requests) == 5
    await bench.settles()
    assert all(record.queued == 0 for record in bench.gateway.decisions.recent(10))


async def test_both_stages_of_a_conversation_are_linked_and_recorded(start, http, tmp_path):
    spans = tmp_path / "spans.jsonl"
    bench = await start(
        stages={"planner": {"priority": -1}, "generator": {"after": "planner"}},
        model={"admission": {}},
        telemetry={"traces": {"exporter": "file", "file": str(spans), "sample": 1.0}},
    )
    async with bench.worker.answering(http.answer()):
        client = await bench.client()
        for stage in ("planner", "generator"):
            await client.sends(http.post(fields=f"x-warmroute-stage: {stage}\r\nx-warmroute-session: s1\r\n"))
            assert (await client.receives()).status == 200
    await bench.settles()
    generator, planner = bench.gateway.decisions.recent(2)
    assert (planner.stage, generator.stage) == ("planner", "generator")
    assert generator.trace.link.span_id == planner.trace.span
    assert generator.trace.link.trace_id == planner.trace.number


async def test_the_line_shows_in_the_metrics(start, http):
    bench = await one_slot(start)
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    second = await queues(bench, http)
    text, _ = await bench.gateway.metrics.scrape(None)
    assert b'warmroute_queue_requests{model="m"} 1' in text
    await finishes(worker, first, http)
    worker, _ = await bench.worker.receives()
    await finishes(worker, second, http)


async def test_many_clients_of_all_kinds_leave_nothing_behind(start, http):
    bench = await one_slot(start, admission={"max_requests": 10}, stages={"fast": {"deadline": "30ms", "priority": -1}})

    async def one(index):
        client = await asks(bench, http, "x-warmroute-stage: fast\r\n" if index % 3 == 0 else "")
        if index % 4 == 1:
            await asyncio.sleep(0.001 * index)
            await client.resets()
            return 0
        return (await client.receives()).status

    async with bench.worker.answering(http.answer(orjson.dumps({"ok": True}))):
        statuses = await asyncio.gather(*(one(index) for index in range(40)))
    assert set(statuses) <= {0, 200, 429}
    await bench.settles()
    assert waiting(bench) == 0
    gate = bench.gateway.proxy.admissions.gates["m"]
    assert not any(gate.room.granted.values())
    assert not any(gate.room.running.values())


async def test_a_look_that_is_due_already_when_the_next_request_comes_to_wait_fails_nobody(start, http, monkeypatch):
    """As after a stop of the loop. Of what is due uvloop makes handles that have no time."""
    bench = await one_slot(start)
    first = await asks(bench, http)
    worker, _ = await bench.worker.receives()
    gate = bench.gateway.proxy.admissions.gates["m"]
    with monkeypatch.context() as late:
        late.setattr(type(gate), "wake", lambda _gate, now: now - 1.0)
        clients = [await asks(bench, http) for _ in range(3)]
        await http.until(lambda: waiting(bench) == 3)
    for client in (first, *clients):
        assert (await finishes(worker, client, http)).status == 200
        if client is not clients[-1]:
            worker, _ = await bench.worker.receives()
