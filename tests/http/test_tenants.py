"""Requests with keys, over real sockets: who is let in, what travels, what is counted."""

import orjson
import pytest

from gateway.admission.keys import hashed, new_key
from gateway.config.schema import Tenant
from gateway.inspector.admin import readiness
from gateway.prompt.blocks import worker_salt

KEY, OTHER = new_key(), new_key()


def field(key=KEY):
    return f"Authorization: Bearer {key}\r\n"


def of(key=KEY, **section):
    return {"keys": [hashed(key)], **section}


def answered(http, prompt=10, output=5, **usage):
    body = {"usage": {"prompt_tokens": prompt, "completion_tokens": output, **usage}}
    return http.answer(orjson.dumps(body), fields=b"connection: close\r\n")


async def relayed(bench, http, fields=None, body=None, path="/v1/chat/completions", answer=None):
    """A request that reaches the worker; what that got, and what the client got."""
    client = await bench.client()
    await client.sends(http.post(body, path=path, fields=field() if fields is None else fields))
    worker, request = await bench.worker.receives()
    await worker.sends(answer or answered(http))
    response = await client.receives()
    await bench.settles()
    return request, response


async def refused(bench, http, fields=None, body=None, path="/v1/chat/completions"):
    client = await bench.client()
    await client.sends(http.post(body, path=path, fields=field() if fields is None else fields))
    return await client.receives()


async def turned_away(bench, http, status, **request):
    """`refused`, and no worker has heard of it; the connection carries another request."""
    reached = sum(worker.connections for worker in bench.workers)
    client = await bench.client()
    await client.sends(http.post(**request))
    refusal = await client.receives()
    assert refusal.status == status, refusal
    assert set(refusal.json["error"]) == {"message", "type", "param", "code"}
    assert "EVIL" not in f"{refusal.start}{refusal.fields}{refusal.body!r}"
    await client.sends(b"GET /ping HTTP/1.1\r\nHost: g\r\n\r\n")
    assert (await client.receives()).status == 200
    await bench.settles()
    assert sum(worker.connections for worker in bench.workers) == reached
    return refusal


async def got(bench, path, fields=""):
    client = await bench.client()
    await client.sends(f"GET {path} HTTP/1.1\r\nHost: g\r\n{fields}\r\n".encode())
    return await client.receives()


def account(bench, name="a"):
    return bench.gateway.proxy.tenants.by_name[name].account


@pytest.mark.parametrize(
    "fields",
    [
        "",
        field(OTHER),
        "Authorization: Basic YTpi\r\n",
        f"Authorization: {KEY}\r\n",
        field() + field(OTHER),
        field() + f"x-api-key: {OTHER}\r\n",
        field("x" * 7000),
    ],
)
async def test_without_its_key_nobody_is_let_in_and_no_worker_hears_of_it(start, http, fields):
    """Row 52."""
    bench = await start(tenants={"a": of()})
    refusal = await turned_away(bench, http, 401, fields=fields)
    assert refusal.json["error"]["code"] == "invalid_api_key"
    assert refusal.get("www-authenticate") == "Bearer"
    assert refusal.get("x-request-id")


async def test_a_body_is_not_read_for_a_stranger(start, http):
    bench = await start(tenants={"a": of()})
    await bench.refuses(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 50000000\r\nExpect: 100-continue\r\n\r\n",
        401,
    )


async def test_anthropics_clients_find_their_own_shape(start, http):
    bench = await start(tenants={"a": of(models=["other*"])})
    stranger = await refused(bench, http, "x-api-key: wrong\r\n", path="/v1/messages")
    assert (stranger.status, stranger.json["type"]) == (401, "error")
    assert stranger.json["error"]["type"] == "authentication_error"
    other = await refused(bench, http, f"x-api-key: {KEY}\r\n", path="/v1/messages")
    assert (other.status, other.json["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize("given", [field(), f"X-Api-Key: {KEY}\r\n", field() + f"x-api-key: {KEY}\r\n"])
async def test_the_clients_key_goes_no_further(start, http, given):
    bench = await start(tenants={"a": of()})
    request, response = await relayed(bench, http, given)
    assert response.status == 200
    assert request.get("authorization") is None
    assert KEY not in str(request.fields)


async def test_a_worker_gets_its_own_key_instead(start, http):
    bench = await start(workers=1, tenants={"a": of()})
    bench.fleet_workers[0].api_key = "sk-worker"
    request, _ = await relayed(bench, http, field() + f"x-api-key: {KEY}\r\n")
    assert request.all("authorization") == ["Bearer sk-worker"]
    assert KEY not in str(request.fields)


async def test_connection_cannot_name_a_key_away_before_it_is_looked_at(start, http):
    """Row 21."""
    bench = await start(tenants={"a": of()})
    _, response = await relayed(bench, http, f"x-api-key: {KEY}\r\nConnection: x-api-key, close\r\n")
    assert response.status == 200
    await turned_away(bench, http, 401, fields="x-api-key: EVIL\r\nConnection: x-api-key\r\n")


async def test_without_tenants_keys_are_the_workers_business(start, http):
    bench = await start()
    request, _ = await relayed(bench, http, field() + f"x-api-key: {OTHER}\r\n")
    assert request.get("authorization") == f"Bearer {KEY}"
    assert request.get("x-api-key") == OTHER
    bench.fleet_workers[0].api_key = "sk-worker"
    request, _ = await relayed(bench, http, field() + f"x-api-key: {OTHER}\r\n")
    assert request.all("authorization") == ["Bearer sk-worker"]
    assert request.get("x-api-key") is None


async def test_each_key_sees_and_uses_its_own_models_only(start, http):
    bench = await start(
        model={"aliases": ["gpt"]}, tenants={"a": of(models=["g*"]), "b": of(OTHER)}, headers={"worker": False}
    )
    assert [card["id"] for card in (await got(bench, "/v1/models", field())).json["data"]] == ["gpt"]
    assert [card["id"] for card in (await got(bench, "/v1/models", field(OTHER))).json["data"]] == ["m", "gpt"]
    assert (await got(bench, "/v1/models/m", field())).status == 404
    assert (await got(bench, "/v1/models/gpt", field())).status == 200
    assert (await got(bench, "/v1/models")).status == 401
    assert (await got(bench, "/ping")).status == 200
    refusal = await refused(bench, http)
    assert (refusal.status, refusal.json["error"]["code"]) == (403, "model_not_allowed")
    _, response = await relayed(bench, http, body={"model": "gpt", "messages": []})
    assert response.status == 200


async def test_over_its_rate_a_tenant_is_told_when_to_come_back_and_others_are_not_held_up(start, http):
    bench = await start(tenants={"a": of(requests_per_minute=1), "b": of(OTHER)})
    _, response = await relayed(bench, http)
    assert response.get("x-ratelimit-limit-requests") == "1"
    assert response.get("x-ratelimit-remaining-requests") == "0"
    refusal = await refused(bench, http)
    assert (refusal.status, refusal.json["error"]["type"]) == (429, "requests")
    assert 0 < int(refusal.get("retry-after")) <= 60
    assert refusal.get("x-ratelimit-reset-requests")
    _, response = await relayed(bench, http, field(OTHER))
    assert response.status == 200
    assert response.get("x-ratelimit-limit-requests") is None


async def test_requests_at_once_are_counted_until_their_end_whatever_that_is(start, http):
    bench = await start(tenants={"a": of(concurrency=1)})
    client = await bench.client()
    await client.sends(http.post(fields=field()))
    await bench.worker.receives()
    refusal = await refused(bench, http)
    assert (refusal.status, refusal.get("retry-after")) == (429, "1")
    await client.resets()
    await http.until(lambda: account(bench).in_flight == 0)
    _, response = await relayed(bench, http)
    assert response.status == 200
    # A model that it may not use, a body that is none: neither was ever let in.
    assert (await refused(bench, http, body={"model": "none"})).status == 404
    assert (await refused(bench, http, body=b"{")).status == 400
    assert account(bench).in_flight == 0


async def test_tokens_are_settled_by_what_the_worker_counted_and_a_debt_is_waited_for(start, http):
    bench = await start(tenants={"a": of(tokens_per_minute=1000)})
    await relayed(bench, http, answer=answered(http, prompt=400, output=900))
    assert (account(bench).prompt_tokens, account(bench).output_tokens) == (400, 900)
    refusal = await refused(bench, http)
    assert (refusal.status, refusal.json["error"]["type"]) == (429, "tokens")
    assert int(refusal.get("retry-after")) >= 17
    assert refusal.get("x-ratelimit-remaining-tokens") == "0"


async def test_a_prompt_that_is_larger_than_the_allowance_is_not_to_be_sent_again(start, http):
    bench = await start(tenants={"a": of(tokens_per_minute=100)})
    refusal = await refused(bench, http, body={"model": "m", "messages": [], "x": "y" * 1000})
    assert (refusal.status, refusal.get("x-should-retry"), refusal.get("retry-after")) == (429, "false", None)


async def test_a_worker_that_fails_costs_the_tenant_no_tokens(start, http):
    bench = await start(tenants={"a": of(tokens_per_minute=1000)}, retries={"attempts": 1})
    fail = http.answer(b"{}", status="500 Internal Server Error", fields=b"connection: close\r\n")
    _, response = await relayed(bench, http, body={"model": "m", "x": "y" * 2000}, answer=fail)
    assert response.status == 500
    assert account(bench).tokens.level(0) == 1000


async def test_a_stream_is_asked_for_its_usage_and_the_client_does_not_see_it(start, http):
    bench = await start(tenants={"a": of(tokens_per_minute=1000)})
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}, fields=field()))
    worker, request = await bench.worker.receives()
    assert request.json["stream_options"] == {"include_usage": True}
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
    events = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n'
    await worker.sends(
        http.SSE_HEAD + http.chunk(events) + http.chunk(usage) + http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    )
    await client.head()
    assert b"completion_tokens" not in await client.chunked_body()
    await bench.settles()
    assert (account(bench).prompt_tokens, account(bench).output_tokens) == (7, 2)


async def test_what_a_stream_had_cost_until_the_client_left_is_estimated(start, http):
    bench = await start(tenants={"a": of(tokens_per_minute=1000)})
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}, fields=field()))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD + http.chunk(b"data: 0\n\n"))
    await client.head()
    await client.chunk()
    for number in range(4):
        await worker.sends(http.chunk(b"data: %d\n\n" % number))
        await client.chunk()
    await client.resets()
    await http.until(lambda: account(bench).in_flight == 0)
    assert 3 <= account(bench).output_tokens <= 5


@pytest.mark.parametrize(
    ("raw", "given"),
    [
        (b'{"model":"m","messages":[]}', None),
        (b'{"model":"m","cache_salt":"mine"}', "mine"),
        (b'{"model":"m","cache_salt":"4:else:","cache_salt":"twice"}', "twice"),
        (b'{"model":"m","cache\\u005fsalt":"spelled"}', "spelled"),
        (b'{"model":"m","cache_salt":["no","text"]}', None),
        (b'{"model":"m","cache_salt":null,"x":{"cache_salt":"inner"}}', None),
    ],
)
async def test_a_tenants_salt_goes_over_whatever_the_client_sends(start, http, raw, given):
    """Row 48."""
    bench = await start(tenants={"a": of(cache_salt="tenant-salt")})
    request, _ = await relayed(bench, http, body=raw)
    assert request.json["cache_salt"] == worker_salt("tenant-salt", given)
    assert request.json.get("x") == orjson.loads(raw).get("x")


async def test_a_salt_too_long_to_be_replaced_is_refused(start, http):
    bench = await start(tenants={"a": of(cache_salt="tenant-salt")})
    await turned_away(bench, http, 400, body={"model": "m", "cache_salt": "x" * 5000}, fields=field())
    await turned_away(bench, http, 400, body={"model": "m", "cache_salt": ["x"] * 5000}, fields=field())
    assert account(bench).in_flight == 0


async def test_tenants_with_salts_share_no_prefix_and_one_tenant_does(start, http):
    """Row 48: two tenants, the same prompt, no hit in the map."""
    tenants = {"a": of(cache_salt="salt-of-a"), "b": of(OTHER, cache_salt="salt-of-b")}
    bench = await start(policy="prefixaware", tenants=tenants)

    async def matched(key, words):
        body = {"model": "m", "messages": [{"role": "user", "content": words * 400}]}
        await relayed(bench, http, field(key), body)
        return last(bench).decisions[-1].decision.chosen.match.tokens > 0

    for _ in range(20):  # the first prompts come before the worker's block size is known
        if await matched(KEY, "something else before "):
            break
    found = [await matched(key, "the same words again ") for key in (KEY, KEY, OTHER, OTHER)]
    assert found == [False, True, False, True]


def last(bench):
    return next(iter(bench.gateway.decisions.recent(1)))


@pytest.mark.parametrize("body", [{"model": "m", "priority": -1}, {"model": "m", "priority": 3}])
async def test_priorities_in_bodies_are_held_to_the_ceiling(start, http, body):
    bench = await start(tenants={"a": of()})
    assert (await refused(bench, http, body=body)).status == 403
    assert (await refused(bench, http, body={"model": "m", "priority": "-1"})).status == 400
    _, response = await relayed(bench, http, body={"model": "m", "priority": 0})
    assert response.status == 200


async def test_fields_and_policies_are_set_only_by_those_who_may(start, http):
    choice = {"policy_choice": {"allowed": ["leastload"]}}
    bench = await start(
        model=choice, tenants={"a": of(), "b": of(OTHER, may_set=["stage", "policy", "priority"], priority_ceiling=1)}
    )
    for name, value in (("stage", "x"), ("deadline-ms", "5"), ("priority", "1"), ("policy", "leastload")):
        refusal = await refused(bench, http, f"{field()}X-Warmroute-{name}: {value}\r\n")
        assert (refusal.status, refusal.json["error"]["code"]) == (403, "header_not_allowed")
    for name, value in (("stage", "x"), ("priority", "2"), ("policy", "leastload")):
        _, response = await relayed(bench, http, f"{field(OTHER)}X-Warmroute-{name}: {value}\r\n")
        assert response.status == 200
    assert (await refused(bench, http, f"{field(OTHER)}X-Warmroute-Priority: 0\r\n")).status == 403
    assert (await refused(bench, http, f"{field(OTHER)}X-Warmroute-Priority: soon\r\n")).status == 400


async def test_a_request_is_recorded_under_its_tenants_label_and_counted_under_its_name(start, http):
    bench = await start(tenants={"a": of(tokens_per_minute=1e6)})
    await relayed(bench, http)
    record = last(bench)
    assert record.tenant == bench.gateway.proxy.tenants.by_name["a"].label
    assert KEY not in repr(record.document())
    text = bench.gateway.metrics.render(None)[0].decode()
    assert 'warmroute_tenant_requests_total{tenant="a"} 1.0' in text
    assert 'warmroute_tenant_tokens_total{kind="output",tenant="a"} 5.0' in text


async def test_tenants_come_and_go_by_a_reload_and_accounts_stay(start, http):
    bench = await start()
    ready, report = readiness(bench.gateway._admin_sources())
    assert ready
    assert "may use every model" in report["information"][0]
    assert report["degraded"] == []
    await relayed(bench, http, "")
    await bench.gateway._reconfigure(_with(bench, {"a": of(requests_per_minute=1)}))
    assert (await refused(bench, http, "")).status == 401
    assert readiness(bench.gateway._admin_sources())[1]["information"] == []
    await relayed(bench, http)
    await bench.gateway._reconfigure(_with(bench, {"a": of(requests_per_minute=1), "b": of(OTHER)}))
    assert (await refused(bench, http)).status == 429
    await bench.gateway._reconfigure(_with(bench, {}))
    _, response = await relayed(bench, http, "")
    assert response.status == 200


async def test_a_request_under_way_leaves_the_account_that_it_entered_through_a_reload(start, http):
    bench = await start(tenants={"a": of(concurrency=1)})
    client = await bench.client()
    await client.sends(http.post(fields=field()))
    worker, _ = await bench.worker.receives()
    await bench.gateway._reconfigure(_with(bench, {"a": of(concurrency=1, weight=2)}))
    assert (await refused(bench, http)).status == 429
    await worker.sends(answered(http))
    await client.receives()
    await bench.settles()
    _, response = await relayed(bench, http)
    assert response.status == 200


def _with(bench, tenants):
    import msgspec

    sections = {name: msgspec.convert(section, Tenant) for name, section in tenants.items()}
    return msgspec.structs.replace(bench.gateway.config, tenants=sections)
