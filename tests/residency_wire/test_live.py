"""A whole gateway with residency before simulated workers: what is wished comes true, and nobody pays for it who should not."""

import asyncio
import itertools
import json
import statistics
import time
from contextlib import AsyncExitStack

import pytest

from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import WorkerTokenizer

KEPT = {"cache_control": {"type": "ephemeral"}}
"""What makes a client's wish of a whole prompt, whatever the gateway has learned."""
LONG = "the sea is wide and the ship is small " * 90


@pytest.fixture(scope="session")
def tokenizer():
    return WorkerTokenizer()


@pytest.fixture
async def simulated(tokenizer):
    """`simulated(count, **options)`: running workers."""
    async with AsyncExitStack() as stack:

        async def simulated(count=2, **options):
            workers = []
            for number in range(count):
                settings = {
                    "model": "sim",
                    "speed": 100.0,
                    "seed": number,
                    "profile": "h100-8b",
                    "kv_events": "tcp://127.0.0.1:*",
                    "kv_events_replay": "tcp://127.0.0.1:*",
                } | options
                worker = SimulatedWorker(WorkerOptions(**settings), tokenizer=tokenizer)
                await worker.start()
                stack.push_async_callback(worker.stop)
                workers.append(worker)
            return workers

        yield simulated


async def followed(scene):
    """Wait until every worker's events are followed."""
    while any(feed.status != "events" for feed in scene.gateway.metrics.readings.feeds()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def worker_of(headers):
    return headers["x-warmroute-worker"]


def cached(document):
    return document["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_drained_workers_conversations_are_warm_elsewhere_before_they_go_on(simulated, gateway_before):
    workers = await simulated(2)
    scene = await gateway_before([worker.url for worker in workers], hints="{driver: warm}")
    await followed(scene)
    _, first, headers = await scene.chat(LONG, headers={"x-session-id": "talk"})
    home = worker_of(headers)
    assert cached(first) == 0
    # An event must have said that it is there, or nobody knows what to move.
    await scene.until(lambda _hints: any(feed.blocks["device"] for feed in scene.gateway.metrics.readings.feeds()))
    async with scene.http.post(f"{scene.admin}/api/workers/{home}/drain", json={}) as answer:
        assert answer.status == 200
    hints = await scene.until(lambda hints: any(h["rule"] == "drain" and h["fate"] != "offered" for h in hints))
    (moved,) = [hint for hint in hints if hint["rule"] == "drain"]
    assert moved["worker"] != home
    assert moved["peer"] == home
    await scene.until(lambda hints: any(h["rule"] == "drain" and h["fate"] in {"accepted", "confirmed"} for h in hints))
    _, second, headers = await scene.chat(LONG, "yes", "and then?", headers={"x-session-id": "talk"})
    assert worker_of(headers) == moved["worker"]
    assert cached(second) > 0.8 * first["usage"]["prompt_tokens"]
    hints = await scene.until(lambda hints: any(h["rule"] == "drain" and h["fate"] == "useful" for h in hints))


async def test_without_the_rule_a_drained_workers_conversation_starts_cold(simulated, gateway_before):
    workers = await simulated(2)
    scene = await gateway_before(
        [worker.url for worker in workers], hints="{driver: warm}", residency="{rules: {drain: false}}"
    )
    await followed(scene)
    _, _, headers = await scene.chat(LONG, headers={"x-session-id": "talk"})
    async with scene.http.post(f"{scene.admin}/api/workers/{worker_of(headers)}/drain", json={}) as answer:
        assert answer.status == 200
    _, second, _ = await scene.chat(LONG, "yes", "and then?", headers={"x-session-id": "talk"})
    assert cached(second) == 0


async def test_a_conversation_that_its_client_ends_is_demoted_where_a_driver_can_say_it(server, gateway_before):
    from aiohttp import web

    def answer(request, _body):
        if request.path == "/v1/chat/completions":
            return web.json_response(
                {
                    "choices": [{"message": {"role": "assistant", "content": "yes"}}],
                    "usage": {"prompt_tokens": 800, "completion_tokens": 1},
                }
            )
        return web.json_response({"data": []})

    server.answer = answer
    scene = await gateway_before([server.url])
    await scene.chat(LONG, headers={"x-session-id": "talk"})
    async with scene.http.post(f"{scene.url}/v1/warmroute/sessions/talk/end") as reply:
        assert reply.status == 200
        document = await reply.json()
    assert document["session"] == "talk"
    assert document["hints"] >= 1
    rules = {hint["rule"]: hint for hint in await scene.hints()}
    assert rules["session-end"]["action"] == "demote"
    async with scene.http.get(f"{scene.url}/v1/warmroute/sessions/talk/end") as reply:
        assert reply.status == 405
    async with scene.http.post(f"{scene.url}/v1/warmroute/sessions//end") as reply:
        assert reply.status == 404


async def test_a_tenant_can_end_its_own_conversations_only(server, gateway_before):
    from aiohttp import web

    from gateway.admission.keys import hashed, new_key

    server.answer = lambda request, _body: web.json_response(
        {"choices": [{"message": {"role": "assistant", "content": "yes"}}]} if "chat" in request.path else {"data": []}
    )
    keys = {name: new_key() for name in ("shop", "spy")}
    tenants = "".join(f'  {name}: {{keys: ["{hashed(key)}"]}}\n' for name, key in keys.items())
    scene = await gateway_before([server.url], top=f"tenants:\n{tenants}")
    shop, spy = ({"authorization": f"Bearer {key}"} for key in keys.values())
    await scene.chat(LONG, headers={**shop, "x-session-id": "talk"})
    url = f"{scene.url}/v1/warmroute/sessions/talk/end"
    async with scene.http.post(url) as reply:
        assert reply.status == 401
    async with scene.http.post(url, headers=spy) as reply:
        assert (await reply.json())["hints"] == 0
    async with scene.http.post(url, headers=shop) as reply:
        assert (await reply.json())["hints"] == 1


async def test_the_last_request_of_a_conversation_carries_that_it_is_the_last(server, gateway_before):
    from aiohttp import web

    def answer(request, _body):
        if request.path == "/v1/chat/completions":
            return web.json_response({"choices": [{"message": {"role": "assistant", "content": "yes"}}]})
        return web.json_response({"data": []})

    server.answer = answer
    scene = await gateway_before([server.url])
    await scene.chat(LONG, headers={"x-session-id": "talk", "x-warmroute-session-end": "true"})
    (body,) = [body for _, path, body, _ in server.asked if path == "/v1/chat/completions"]
    (directive,) = body["kv_hints"]["actions"][0]["payload"]["directives"]
    assert directive["priority"] == 0


async def test_the_tick_ends_what_nobody_asked_for(server, gateway_before):
    from aiohttp import web

    server.answer = lambda request, _body: web.json_response(
        {"choices": [{"message": {"role": "assistant", "content": "yes"}}]} if "chat" in request.path else {"data": []}
    )
    residency = "{rules: {retain: {gap: 100ms, shortest: 100ms, longest: 200ms}}}"
    scene = await gateway_before([server.url], residency=residency)
    await scene.chat(LONG)
    hints = await scene.until(lambda hints: hints[0]["fate"] == "wasted")
    assert hints[0]["ttl"] <= 0.2


# A worker or a hint server that behaves badly.


_questions = itertools.count()


async def latencies(scene, count, text=LONG):
    seconds = []
    for _ in range(count):
        number = next(_questions)
        started = time.perf_counter()
        status, _, _ = await scene.chat(f"{number} {text}", prompt_cache_retention="24h")
        seconds.append(time.perf_counter() - started)
        assert status == 200
    return seconds


@pytest.mark.parametrize("behaviour", ["hangs", "refuses", "breaks", "garbage"])
async def test_a_hint_server_that_misbehaves_delays_no_request_and_fails_none(
    server, simulated, gateway_before, behaviour
):
    from aiohttp import web

    forever = asyncio.Event()

    async def answer(request, _body):
        if behaviour == "hangs":
            await forever.wait()
        if behaviour == "breaks":
            request.transport.abort()
        if behaviour == "garbage":
            return web.Response(body=b"\xff{[" * 1000)
        return web.json_response({"error": "no"}, status=500)

    server.answer = answer
    (worker,) = await simulated(1)
    residency = "{budget: {hints_per_second: 1000, pinned_share: 1}}"
    hints = f'{{driver: lmcache-coordinator, url: "{server.url}", instance: w, chunk: 16}}'
    plain = await gateway_before([worker.url], residency="null")
    hinted = await gateway_before([worker.url], hints=hints, residency=residency)
    await followed(hinted)
    differences = []
    for _ in range(5):
        before, after = await latencies(plain, 10), await latencies(hinted, 10)
        differences.append(statistics.median(after) - statistics.median(before))
    assert min(differences) < 0.001
    assert any(method == "POST" for method, *_ in server.asked), "pins were asked for"
    pins = [hint for hint in await hinted.hints() if hint["action"] == "pin"]
    assert pins
    assert {pin["fate"] for pin in pins} <= {"offered", "sent", "failed", "refused", "skipped"}
    forever.set()
    metrics = hinted.gateway.metrics
    assert metrics.accepted == 50
    assert {key[3].value for key in metrics.requests} == {"completed"}


async def test_every_hint_ends_once_and_the_metrics_add_up(simulated, gateway_before):
    workers = await simulated(2)
    residency = "{rules: {client-words: {longest: 1s}}}"
    scene = await gateway_before([w.url for w in workers], hints="{driver: [kv-hints, warm]}", residency=residency)
    await followed(scene)

    async def talk(number):
        texts = [f"{number} {LONG}"]
        for turn in range(4):
            await scene.chat(*texts, headers={"x-session-id": f"talk {number}"}, **KEPT)
            texts += ["yes", f"and {turn}?"]

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(talk(number))
    (ledger,) = [live.core.ledger for live in scene.gateway.proxy.residencies.values()]
    while ledger.open:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert ledger.offered == ledger.ended > 6
    async with scene.http.get(f"{scene.admin}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counts = {}
    for line in lines:
        if line.startswith("warmroute_hints_total{"):
            labels, value = line.split(" ")
            fate = labels.split('fate="')[1].split('"')[0]
            counts[fate] = counts.get(fate, 0) + float(value)
    ends = sum(counts.get(fate, 0) for fate in ("skipped", "refused", "failed", "useful", "wasted"))
    assert counts["offered"] == ends == ledger.offered
    assert counts["useful"] > 0, "turns that came back in time found what was kept"
    assert any(line.startswith('warmroute_hints_open{model="sim"} 0') for line in lines)


async def test_a_request_shows_its_hints_with_their_fates(simulated, gateway_before):
    workers = await simulated(1)
    scene = await gateway_before([worker.url for worker in workers], residency="{}")
    _, _, headers = await scene.chat(LONG, headers={"x-session-id": "talk"}, **KEPT)
    await scene.chat(LONG, "yes", "and then?", headers={"x-session-id": "talk"})
    url = f"{scene.admin}/api/requests/{headers['x-request-id']}"
    async with scene.http.get(url) as answer:
        document = await answer.json()
    (hint,) = document["hints"]
    assert (hint["rule"], hint["action"], hint["way"], hint["driver"]) == (
        "client-words",
        "retain",
        "inside",
        "kv-hints",
    )
    assert hint["fate"] == "useful"
    assert 0 <= hint["at"] < 5


async def test_a_reload_switches_residency_on_and_off(simulated, gateway_before):
    (worker,) = await simulated(1)
    scene = await gateway_before([worker.url], residency="null")
    gateway = scene.gateway
    assert gateway.proxy.residencies == {}
    await scene.chat("0 " + LONG, prompt_cache_retention="24h")
    from msgspec.structs import replace

    from gateway.config.residency import ResidencyConfig, ResidencyRules

    await gateway._reconfigure(replace(gateway.config, residency=ResidencyConfig()))
    await scene.chat("1 " + LONG, prompt_cache_retention="24h")
    core = gateway.proxy.residencies["sim"].core
    assert core.ledger.offered >= 1
    await gateway._reconfigure(replace(gateway.config, grace=1.0))
    assert gateway.proxy.residencies["sim"].core is core, "what was learned stays"
    await gateway._reconfigure(
        replace(gateway.config, residency=ResidencyConfig(rules=ResidencyRules(retain=False, client_words=False)))
    )
    await scene.chat("2 " + LONG, prompt_cache_retention="24h")
    assert gateway.proxy.residencies["sim"].core.ledger.offered == 0
    await gateway._reconfigure(replace(gateway.config, residency=None))
    await scene.chat("3 " + LONG, prompt_cache_retention="24h")
    assert gateway.proxy.residencies == {}


async def test_a_worker_that_a_reload_takes_away_hands_its_conversations_over(simulated, gateway_before):
    workers = await simulated(2)
    scene = await gateway_before([worker.url for worker in workers], hints="{driver: warm}")
    await followed(scene)
    _, first, headers = await scene.chat(LONG, headers={"x-session-id": "talk"})
    home = worker_of(headers)
    await scene.until(lambda _hints: any(feed.blocks["device"] for feed in scene.gateway.metrics.readings.feeds()))
    from msgspec.structs import replace

    gateway = scene.gateway
    (model,) = gateway.config.models
    stays = tuple(worker for worker in model.workers if not worker.url.endswith(home))
    await gateway._reconfigure(replace(gateway.config, models=(replace(model, workers=stays),)))
    await scene.until(lambda hints: any(h["rule"] == "drain" and h["fate"] == "accepted" for h in hints))
    _, second, _ = await scene.chat(LONG, "yes", "and then?", headers={"x-session-id": "talk"})
    assert cached(second) > 0.8 * first["usage"]["prompt_tokens"]


async def test_a_planner_that_starts_brings_its_generators_prompt_along(simulated, gateway_before):
    workers = await simulated(2)
    stages = "stages: {planner: {}, generator: {after: planner, hold: 20s}}\n"
    scene = await gateway_before(
        [worker.url for worker in workers],
        hints="{driver: warm}",
        top=stages,
        model="    admission: {}\n",
        capabilities="{slots: 4}",
    )
    await followed(scene)
    fields = {"x-warmroute-session": "talk", "x-warmroute-stage": "generator"}
    _, _, headers = await scene.chat(LONG, headers=fields)
    home = worker_of(headers)
    await scene.until(lambda _hints: any(feed.blocks["device"] for feed in scene.gateway.metrics.readings.feeds()))
    admissions = scene.gateway.proxy.admissions
    (fleet,) = scene.gateway.inspector.fleets()
    (other,) = [worker for worker in fleet.workers if worker.id != home]
    # What the gate does when the conversation's planner has started and the worker from before has no slot.
    admissions.gates["sim"].reservations.warm("talk", admissions.stages.by_name["generator"], other)
    hints = await scene.until(lambda hints: any(h["rule"] == "planner" and h["fate"] == "accepted" for h in hints))
    (hint,) = [hint for hint in hints if hint["rule"] == "planner"]
    assert (hint["action"], hint["worker"], hint["peer"]) == ("prefetch", other.id, home)


async def test_each_hint_of_a_traced_request_is_an_event_of_its_span(simulated, gateway_before, tmp_path):
    (worker,) = await simulated(1)
    path = tmp_path / "spans.json"
    traces = f"telemetry: {{traces: {{exporter: file, file: {path}, sample: 1}}}}\n"
    scene = await gateway_before([worker.url], top=traces, residency="{}")
    await scene.chat(LONG, **KEPT)
    await scene.gateway.stop(1.0)
    spans = [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    events = [event for span in spans for event in span.get("events", ()) if event["name"] == "warmroute.hint"]
    (event,) = events
    attributes = {each["key"]: next(iter(each["value"].values())) for each in event["attributes"]}
    assert attributes["warmroute.hint.rule"] == "client-words"
    assert attributes["warmroute.hint.way"] == "inside"
    assert attributes["warmroute.hint.fate"] == "accepted"


async def test_a_policy_that_looks_at_no_prompts_makes_residency_say_so(simulated, gateway_before):
    (worker,) = await simulated(1)
    scene = await gateway_before([worker.url], top="policies: {ttft: {preset: leastload}}\n")
    async with scene.http.get(f"{scene.admin}/readyz") as answer:
        degraded = (await answer.json())["degraded"]
    assert any("nobody looks at prompts" in text for text in degraded)
    assert (await scene.chat(LONG))[0] == 200
