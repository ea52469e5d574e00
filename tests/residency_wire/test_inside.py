"""Hints inside requests: what a worker gets to see, and that nobody is the worse for a worker that dislikes them."""

import asyncio
import json

import pytest
from aiohttp import web

from backends.hints.kv_hints import KvHintsDriver
from gateway.residency.ledger import Ledger
from gateway.residency.residency import Residency

LONG = "the sea is wide and the ship is small " * 60


def answered(cached=0):
    """A vLLM-like answer."""
    usage = {"prompt_tokens": 900, "completion_tokens": 2, "total_tokens": 902}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return web.json_response(
        {"choices": [{"message": {"role": "assistant", "content": "yes"}, "index": 0}], "usage": usage}
    )


class Worker:
    """Takes chats; `dislikes(body)` says which bodies it refuses."""

    def __init__(self, server):
        self.server = server
        self.dislikes = lambda _body: False
        server.answer = self.answer

    @property
    def bodies(self):
        return [body for _, path, body, _ in self.server.asked if path == "/v1/chat/completions"]

    def answer(self, request, raw):
        if request.path != "/v1/chat/completions":
            return web.json_response({"data": []}, status=200 if request.path in {"/health", "/v1/models"} else 404)
        if self.dislikes(json.loads(raw)):
            return web.json_response({"error": {"message": "no such field"}}, status=400)
        return answered()


@pytest.fixture
def worker(server):
    return Worker(server)


async def test_a_long_prompt_carries_how_long_it_is_to_be_kept(worker, server, gateway_before):
    scene = await gateway_before([server.url])
    status, _, _ = await scene.chat(LONG, headers={"x-session-id": "s1"})
    assert status == 200
    (body,) = worker.bodies
    envelope = body["kv_hints"]
    assert envelope["protocol_version"] == "0.1"
    retain = envelope["actions"][0]
    assert retain["action_type"] == "kv.retain"
    assert retain["payload"]["scope"] == "s1"
    assert body["messages"][0]["content"] == LONG
    hints = await scene.until(lambda hints: hints and hints[0]["fate"] == "accepted")
    assert hints[0]["rule"] == "retain"


async def test_without_residency_bodies_and_the_clients_own_hints_go_out_untouched(worker, server, gateway_before):
    scene = await gateway_before([server.url], residency="null")
    theirs = {"protocol_version": "0.1", "message_id": "x", "actions": [{"odd": True}]}
    await scene.chat(LONG, kv_hints=theirs)
    await scene.chat(LONG, kv_transfer_params={"max_offload_tokens": 3})
    first, second = worker.bodies
    assert first["kv_hints"] == theirs
    assert "kv_hints" not in second
    assert second["kv_transfer_params"]["max_offload_tokens"] == 3


async def test_a_worker_whose_hints_are_not_managed_gets_the_clients_own_untouched(worker, server, gateway_before):
    scene = await gateway_before([server.url], hints="{driver: none}")
    theirs = {"protocol_version": "0.1", "message_id": "x", "actions": [{"odd": True}]}
    await scene.chat(LONG, kv_hints=theirs)
    assert [body["kv_hints"] for body in worker.bodies] == [theirs]
    assert await scene.hints() == []
    assert (await scene.residency())["fleets"][0]["silent"]
    assert not any("hints" in text for text in await scene.degraded()), "it was asked for"


async def test_a_fleet_whose_workers_understand_no_hints_says_so_and_wishes_nothing(worker, server, gateway_before):
    scene = await gateway_before([server.url], hints="{driver: auto}")
    while not any(path == "/openapi.json" for _, path, *_ in server.asked):  # noqa: ASYNC110 - the prober tells nobody
        await asyncio.sleep(0.01)
    await scene.chat(LONG)
    assert await scene.hints() == []
    text = "sim: residency is on, but none of its workers understands hints: nothing is wished"
    assert text in await scene.degraded()


async def test_the_clients_own_actions_come_along_with_ours(worker, server, gateway_before):
    scene = await gateway_before([server.url])
    action = {"action_id": "a", "action_type": "x.y", "action_version": "1.0", "payload": {}}
    await scene.chat(LONG, kv_hints={"protocol_version": "0.1", "message_id": "mine", "actions": [action]})
    (body,) = worker.bodies
    assert body["kv_hints"]["message_id"] == "mine"
    assert body["kv_hints"]["actions"][0] == action
    assert {each["action_type"] for each in body["kv_hints"]["actions"][1:]} >= {"kv.retain"}


async def test_a_worker_that_refuses_bodies_with_hints_is_asked_without_and_no_client_notices(
    worker, server, gateway_before
):
    worker.dislikes = lambda body: "kv_hints" in body
    scene = await gateway_before([server.url])
    for turn in range(3):
        status, document, _ = await scene.chat(LONG, f"turn {turn}", LONG)
        assert (status, document["choices"][0]["message"]["content"]) == (200, "yes")
    assert ["kv_hints" in body for body in worker.bodies] == [True, False, False, False]
    hints = await scene.hints()
    assert hints[0]["fate"] == "refused"
    assert {hint["fate"] for hint in hints[1:]} <= {"skipped"}
    (fleet,) = (await scene.residency())["fleets"]
    assert fleet["workers"][0]["drivers"] == [{"driver": "kv-hints", "speaks": False, "how": "refused", "url": ""}]
    assert scene.gateway.metrics.retries == {"hints_refused": 1}


async def test_a_request_that_is_bad_by_itself_is_refused_as_it_would_be_without_hints(worker, server, gateway_before):
    worker.dislikes = lambda body: body.get("temperature") == -1
    scene = await gateway_before([server.url])
    status, document, _ = await scene.chat(LONG, temperature=-1)
    assert (status, document["error"]["message"]) == (400, "no such field")
    assert ["kv_hints" in body for body in worker.bodies] == [True, False]
    (hint,) = await scene.hints()
    assert hint["fate"] == "failed"
    status, _, _ = await scene.chat(LONG)
    assert status == 200
    assert "kv_hints" in worker.bodies[-1], "the hints were not to blame"


async def test_a_worker_that_breaks_off_is_not_asked_twice_for_its_hints(worker, server, gateway_before):
    original = worker.answer

    async def answer(request, raw):
        if request.path == "/v1/chat/completions":
            request.transport.abort()
            await asyncio.sleep(0)
        return original(request, raw)

    server.answer = answer
    scene = await gateway_before([server.url])
    status, _, _ = await scene.chat(LONG)
    assert status == 502
    assert {hint["fate"] for hint in await scene.hints()} == {"failed"}


async def test_a_streamed_answer_after_a_refusal_is_whole(worker, server, gateway_before):
    async def answer(request, raw):
        if request.path != "/v1/chat/completions":
            return web.json_response({"data": []})
        if "kv_hints" in json.loads(raw):
            return web.json_response({"error": {}}, status=422)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in (b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n', b"data: [DONE]\n\n"):
            await response.write(piece)
        await response.write_eof()
        return response

    server.answer = answer
    scene = await gateway_before([server.url])
    body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "stream": True}
    async with scene.http.post(f"{scene.url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")


async def test_cache_control_of_an_anthropic_body_becomes_a_hint(worker, server, gateway_before):
    scene = await gateway_before([server.url], residency="{rules: {retain: false}}")
    original = worker.answer
    seen = []

    def answer(request, raw):
        if request.path == "/v1/messages":
            seen.append(json.loads(raw))
            return web.json_response({"content": [{"type": "text", "text": "yes"}], "usage": {"input_tokens": 900}})
        return original(request, raw)

    server.answer = answer
    content = [
        {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "and now?"},
    ]
    body = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    async with scene.http.post(f"{scene.url}/v1/messages", json=body) as reply:
        assert reply.status == 200
    (sent,) = seen
    assert sent["messages"] == body["messages"], "the client's words go on, too"
    (directive,) = sent["kv_hints"]["actions"][0]["payload"]["directives"]
    assert directive["priority"] == 85
    assert directive["duration"] == 3600.0
    assert "client-words" in {hint["rule"] for hint in await scene.hints()}


@pytest.mark.parametrize("where", ["sent", "answered", "fields", "ledger"])
async def test_a_mistake_in_a_rule_or_a_driver_fails_no_request(worker, server, gateway_before, monkeypatch, where):
    scene = await gateway_before([server.url])
    live = scene.gateway.proxy.residencies["sim"]

    def broken(*_args, **_fields):
        raise ZeroDivisionError

    target, name = {
        "sent": (Residency, "sent"),
        "answered": (Residency, "answered"),
        "fields": (KvHintsDriver, "fields"),
        "ledger": (Ledger, "fate"),
    }[where]
    monkeypatch.setattr(target, name, broken)
    for turn in range(2):
        status, document, _ = await scene.chat(f"{turn} {LONG}")
        assert (status, document["choices"][0]["message"]["content"]) == (200, "yes")
    assert live.faults >= 2
    assert any("residency has failed" in text for text in await scene.degraded())
    monkeypatch.undo()
    live.faults = 0  # they were meant
