"""Header fields between client and worker, by RFC 9110 section 7.6: what travels, what stays, what is added, in both directions."""

import pytest

HOP_BY_HOP = (
    "Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\nProxy-Authenticate: Basic\r\n"
    "TE: trailers\r\nTrailer: X-Sum\r\nUpgrade: foo\r\nAlt-Svc: h2\r\n"
)
HOP_NAMES = {line.split(":")[0].lower() for line in HOP_BY_HOP.splitlines()} | {"connection", "transfer-encoding"}


async def relayed(bench, http, fields="", answer=None, raw=None):
    """One request with `fields`; what the worker got and what the client got."""
    client = await bench.client()
    await client.sends(http.post(fields=fields) if raw is None else raw)
    worker, request = await bench.worker.receives()
    await worker.sends(answer or http.answer(fields=b"connection: close\r\n"))
    response = await client.receives()
    await bench.settles()
    return request, response


def names(message):
    return {name.lower() for name, _ in message.fields}


async def test_end_to_end_fields_travel_with_their_bytes(start, http):
    bench = await start()
    fields = "User-Agent: sdk/1\r\nX-Stainless-Lang: python\r\naccept: a\r\naccept: b\r\nX-Empty:\r\nCookie: a=b\r\n"
    request, _ = await relayed(bench, http, fields)
    assert request.get("user-agent") == "sdk/1"
    assert ("X-Stainless-Lang", "python") in request.fields
    assert request.all("accept") == ["a", "b"]
    assert request.get("x-empty") == ""
    assert request.get("cookie") == "a=b"


async def test_bytes_above_ascii_in_a_value_travel_unchanged(start, http):
    bench = await start()
    request, _ = await relayed(
        bench, http, raw=http.post(fields="X-Name: NAME\r\n").replace(b"NAME", b"J\xf6rg \xe2\x82\xac")
    )
    assert (request.get("x-name") or "").encode("latin-1") == b"J\xf6rg \xe2\x82\xac"


async def test_hop_by_hop_fields_stay_on_their_hop(start, http):
    bench = await start()
    request, response = await relayed(
        bench,
        http,
        HOP_BY_HOP + "Connection: keep-alive, X-Private\r\nX-Private: 1\r\nX-Public: 1\r\n",
        http.answer(
            fields=HOP_BY_HOP.replace("Upgrade: foo\r\n", "").encode()
            + b"Connection: close, X-Internal\r\nX-Internal: 1\r\nX-Open: 1\r\n"
        ),
    )
    assert not names(request) & (HOP_NAMES | {"x-private"})
    assert request.get("x-public") == "1"
    assert not names(response) & (HOP_NAMES | {"x-internal"})
    assert response.get("x-open") == "1"


@pytest.mark.parametrize(
    "connection", ["Connection: x-a, x-b", "Connection: close\r\nConnection: X-A,X-B", "connection:,X-A , x-b,"]
)
async def test_every_field_that_connection_names_is_dropped(start, http, connection):
    bench = await start()
    request, _ = await relayed(bench, http, f"X-A: 1\r\nx-b: 2\r\nX-C: 3\r\n{connection}\r\n")
    assert not names(request) & {"x-a", "x-b"}
    assert request.get("x-c") == "3"


async def test_connection_cannot_name_away_what_the_gateway_adds(start, http):
    """Row 21: `Connection: x-forwarded-for` must not hide who asked, nor may it unframe the request."""
    bench = await start()
    owned = "x-forwarded-for, x-forwarded-proto, via, x-request-id, host, content-length, x-warmroute-worker"
    request, response = await relayed(
        bench,
        http,
        f"Connection: {owned}\r\nX-Request-Id: mine\r\n",
        http.answer(fields=f"Connection: close, {owned}\r\n".encode()),
    )
    for name in ("x-forwarded-for", "x-forwarded-proto", "via", "x-request-id", "host", "content-length"):
        assert len(request.all(name)) == 1
    assert request.get("x-forwarded-for") == "127.0.0.1"
    for name in ("via", "x-request-id", "content-length", "x-warmroute-worker"):
        assert len(response.all(name)) == 1


async def test_connection_can_name_away_authorization_and_trace_context(start, http):
    bench = await start()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    fields = f"Authorization: Bearer x\r\ntraceparent: {parent}\r\ntracestate: a=b\r\n"
    request, _ = await relayed(bench, http, fields)
    assert request.get("traceparent") == parent
    assert request.get("authorization") == "Bearer x"
    request, _ = await relayed(bench, http, fields + "Connection: authorization, traceparent, tracestate\r\n")
    assert not names(request) & {"authorization", "traceparent", "tracestate"}


async def test_via_grows_by_one_hop_in_both_directions(start, http):
    bench = await start()
    request, response = await relayed(
        bench, http, "Via: 1.0 edge\r\n", http.answer(fields=b"via: 1.1 sidecar\r\nconnection: close\r\n")
    )
    assert ", ".join(request.all("via")) == "1.0 edge, 1.1 warmroute"
    assert ", ".join(response.all("via")) == "1.1 sidecar, 1.1 warmroute"


async def test_forwarded_fields_tell_the_worker_who_asked(start, http):
    bench = await start()
    request, _ = await relayed(bench, http)
    assert request.all("x-forwarded-for") == ["127.0.0.1"]
    assert request.all("x-forwarded-proto") == ["http"]
    # What clients claim stays readable, and stands before what the gateway has seen itself.
    request, _ = await relayed(
        bench, http, "X-Forwarded-For: 1.2.3.4\r\nx-forwarded-for: 5.6.7.8\r\nX-Forwarded-Proto: https\r\n"
    )
    assert request.all("x-forwarded-for") == ["1.2.3.4, 5.6.7.8, 127.0.0.1"]
    assert request.all("x-forwarded-proto") == ["https"]
    request, _ = await relayed(bench, http, "X-Forwarded-Proto: gopher\r\n")
    assert request.all("x-forwarded-proto") == ["http"]


async def test_a_request_id_is_minted_and_each_is_another(start, http):
    bench = await start()
    pairs = [await relayed(bench, http) for _ in range(3)]
    ids = [request.get("x-request-id") for request, _ in pairs]
    assert ids == [response.get("x-request-id") for _, response in pairs]
    assert len(set(ids)) == 3
    assert all(len(each or "") >= 16 for each in ids)


async def test_a_good_request_id_is_kept_and_sent_back_even_if_the_worker_has_its_own(start, http):
    bench = await start()
    request, response = await relayed(
        bench,
        http,
        "X-Request-Id: trace/1.a_b~c:d=e@f|g-h\r\n",
        http.answer(fields=b"X-Request-Id: other\r\nconnection: close\r\n"),
    )
    assert request.all("x-request-id") == response.all("x-request-id") == ["trace/1.a_b~c:d=e@f|g-h"]


@pytest.mark.parametrize("bad", ["", "a b", "a\tb", "x" * 129, "<script>", 'a"b', "a;b", "a\u00e9"])
async def test_a_bad_request_id_is_replaced(start, http, bad):
    bench = await start()
    request, response = await relayed(
        bench, http, raw=http.post(fields="X-Request-Id: ID\r\n").replace(b"ID", bad.encode(), 1)
    )
    assert request.get("x-request-id") == response.get("x-request-id")
    assert request.get("x-request-id") not in {bad, ""}


async def test_errors_carry_the_request_id_too(start, http):
    bench = await start()
    refusal = await bench.refuses(http.post(b"[", fields="X-Request-Id: mine\r\n"), 400, closes=False)
    assert refusal.get("x-request-id") == "mine"
    refusal = await bench.refuses(b"GET /no HTTP/1.1\r\nHost: g\r\nX-Request-Id: mine\r\n\r\n", 404, closes=False)
    assert refusal.get("x-request-id") == "mine"


CHOICES = (
    "X-Worker",
    "X-Worker-Instance-Id",
    "X-Data-Parallel-Rank",
    "X-Data-Parallel-Host-Port",
    "X-Dp-Rank",
    "X-Dynamo-Worker-Instance-Id",
    "X-Dynamo-Prefill-Instance-Id",
    "X-Dynamo-Dp-Rank",
    "X-Prefiller-Host-Port",
    "X-Prefill-Instance-Id",
    "X-Encoder-Hosts-Ports",
    "X-Kv-Cache-Source-Host-Port",
    "X-Gateway-Destination-Endpoint",
    "X-Gateway-Destination-Endpoint-Subset",
    "X-Smg-Target-Worker",
    "X-Warmroute-Worker",
)


@pytest.mark.parametrize("name", CHOICES)
async def test_a_client_cannot_choose_a_worker_or_an_address(start, http, name):
    """Row 22: the field is dropped, and the policy chooses as if it had not been there."""
    bench = await start()
    other = http.ScriptedWorker()
    await other.start()
    try:
        address = f"127.0.0.1:{other.port}"
        request, _ = await relayed(bench, http, raw=http.post(fields=f"{name}: {address}\r\n", host=address))
        assert request.get(name.lower()) is None
        assert request.get("host") == f"127.0.0.1:{bench.worker.port}"
        assert other.connections == 0
    finally:
        await other.stop()


async def test_the_authority_of_an_absolute_target_is_no_address(start, http):
    bench = await start()
    other = http.ScriptedWorker()
    await other.start()
    try:
        raw = http.post(path=f"http://127.0.0.1:{other.port}{http.CHAT}?a=b")
        request, response = await relayed(bench, http, raw=raw)
        assert request.start == "POST /v1/chat/completions?a=b HTTP/1.1"
        assert request.get("host") == f"127.0.0.1:{bench.worker.port}"
        assert response.status == 200
        assert other.connections == 0
    finally:
        await other.stop()


async def test_the_clients_authorization_reaches_workers_without_a_key(start, http):
    bench = await start()
    request, _ = await relayed(bench, http, "Authorization: Bearer client\r\n")
    assert request.all("authorization") == ["Bearer client"]


async def test_a_workers_own_key_takes_the_place_of_the_clients_authorization(start, http):
    worker = http.ScriptedWorker()
    await worker.start()
    bench = await start(workers=1, model={"workers": [{"url": worker.url, "driver": "vllm", "api_key": "secret"}]})
    bench.workers.append(worker)
    for fields in (
        "Authorization: Bearer client\r\n",
        "",
        "Authorization: a\r\nAuthorization: b\r\n",
        "Connection: authorization\r\n",
    ):
        client = await bench.client()
        await client.sends(http.post(fields=fields))
        peer, request = await worker.receives()
        assert request.all("authorization") == ["Bearer secret"]
        await peer.sends(http.answer(fields=b"connection: close\r\n"))
        response = await client.receives()
        assert "secret" not in str(response.fields)


async def test_what_a_worker_says_of_itself_does_not_reach_clients(start, http):
    bench = await start()
    _, response = await relayed(
        bench,
        http,
        answer=http.answer(
            fields=b"Server: uvicorn\r\nSet-Cookie: a=b\r\nX-Warmroute-Worker: forged\r\nDate: now\r\nopenai-version: 1\r\nconnection: close\r\n"
        ),
    )
    assert not names(response) & {"server", "set-cookie"}
    assert response.all("x-warmroute-worker") == [f"127.0.0.1:{bench.worker.port}"]
    assert response.get("openai-version") == "1"


async def test_the_workers_name_can_be_left_out(start, http):
    bench = await start(headers={"worker": False})
    _, response = await relayed(bench, http)
    assert response.get("x-warmroute-worker") is None


TRACES = {
    "a good one": ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
    "version ff": ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
    "a trace id of zeros": ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
    "a span id of zeros": ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
    "capitals": ("00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01", False),
    "too short": ("00-0af7-b7ad-01", False),
    "8 KiB": ("00-" + "a" * 8000, False),
}


@pytest.mark.parametrize("row", TRACES)
async def test_trace_context_travels_only_when_it_is_well_formed(start, http, row):
    """Row 51, without an exporter: as it came, or not at all."""
    value, good = TRACES[row]
    bench = await start()
    request, _ = await relayed(bench, http, f"traceparent: {value}\r\ntracestate: vendor=1\r\n")
    assert request.all("traceparent") == ([value] if good else [])
    assert request.all("tracestate") == (["vendor=1"] if good else [])


async def test_a_repeated_traceparent_and_a_huge_tracestate_are_dropped(start, http):
    bench = await start()
    value = TRACES["a good one"][0]
    request, _ = await relayed(bench, http, f"traceparent: {value}\r\ntraceparent: {value}\r\n")
    assert request.all("traceparent") == []
    request, _ = await relayed(bench, http, f"traceparent: {value}\r\ntracestate: a={'x' * 8000}\r\n")
    assert request.all("traceparent") == [value]
    assert request.all("tracestate") == []


async def test_a_keep_alive_connection_survives_errors_whose_request_was_read(start, http):
    bench = await start()
    await bench.refuses(http.post(b"not json"), 400, closes=False)
    await bench.refuses(http.post({"model": "unknown"}), 404, closes=False)
    await bench.refuses(http.post(path="/pause"), 404, closes=False)
    await bench.refuses(http.post(b"not json", fields="Connection: close\r\n"), 400)
    # The body is still on its way: it can't be told from the next request, so the connection ends.
    await bench.refuses(http.post(path="/pause")[:-5], 404)
    await bench.serves()
