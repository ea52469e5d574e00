import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.inspector.access import Access
from gateway.inspector.api import Api
from simulator.server.faults import Faults

LONG = "the river runs under the bridge and past the market " * 40


async def test_the_fleet_shows_workers_load_caches_and_how_right_predictions_were(scene):
    async with scene() as found:
        await found.chat(LONG)
        await found.chat(LONG)
        _, document = await found.get("/api/fleet")
        (fleet,) = document["fleets"]
        assert (fleet["model"], fleet["ready"], fleet["total"], fleet["degraded"]) == ("sim", 2, 2, [])
        assert document["totals"]["accepted"] == document["totals"]["completed"] == 2
        (worker,) = [each for each in fleet["workers"] if each["tokens"]["prompt"]]
        assert worker["truth"]["cached"] == worker["tokens"]["cached"] > 100
        assert worker["feed"]["status"] == "events"
        assert worker["kv"]["device"] >= worker["tokens"]["cached"]
        assert document["prefix"][0]["blocks"] > 0


async def test_one_worker_says_where_each_capability_is_known_from(scene):
    async with scene(1) as found:
        status, worker = await found.get(f"/api/workers/{found.ids[0]}")
        assert status == 200
        assert worker["capabilities"]["block_size"]["origin"] in {"discovered", "assumed"}
        assert worker["feed"]["endpoints"]
        assert (await found.get("/api/workers/nobody"))[0] == 404


async def test_finished_requests_are_listed_latest_first_and_can_be_filtered(scene):
    async with scene() as found:
        first, _ = await found.chat("hello")
        second, _ = await found.chat("hello again")
        found.workers[0].faults = found.workers[1].faults = Faults(error_rate=1.0)
        failed, status = await found.chat("hello for the last time")
        assert status == 500

        async def listed(query=""):
            _, document = await found.get(f"/api/requests?{query}")
            return [row["id"] for row in document["requests"]]

        assert await listed() == [failed, second, first]
        assert await listed("limit=1") == [failed]
        assert await listed("error=true") == [failed]
        assert await listed("error=500") == [failed]
        assert await listed("error=false") == [second, first]
        assert await listed("model=sim&slower_than=0") == [failed, second, first]
        assert await listed("model=other") == await listed("worker=nobody") == await listed("slower_than=100") == []
        by_worker = [await listed(f"worker={name}") for name in found.ids]
        assert sorted({each for some in by_worker for each in some}) == sorted([failed, second, first])


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "slower_than=soon"])
async def test_a_filter_that_makes_no_sense_is_a_400(scene, query):
    async with scene(1, policy="leastload") as found:
        assert (await found.get(f"/api/requests?{query}"))[0] == 400


async def test_a_request_shows_its_candidates_and_why_one_was_chosen(scene):
    async with scene() as found:
        await found.chat(LONG)
        request_id, _ = await found.chat(LONG, "yes", "and then?")
        _, document = await found.get(f"/api/requests/{request_id}")
        (chosen,) = [row for row in document["candidates"] if row["chosen"]]
        assert chosen["worker"] == document["chosen"]
        assert chosen["match"]["device"] > 100
        assert document["reason"].startswith(chosen["worker"])
        assert len(document["candidates"]) == 2
        assert document["predicted"]["cached_tokens"] == document["actual"]["cached_tokens"] > 0
        assert (await found.get("/api/requests/none"))[0] == 404


async def test_a_request_can_be_had_as_otlp_json(scene):
    async with scene(1, policy="leastload") as found:
        request_id, _ = await found.chat("hello")
        async with found.http.get(f"{found.admin}/api/requests/{request_id}/otlp") as answer:
            assert "attachment" in answer.headers["content-disposition"]
            document = await answer.json()
        (spans,) = [scope["spans"] for group in document["resourceSpans"] for scope in group["scopeSpans"]]
        assert all(len(span["traceId"]) == 32 and len(span["spanId"]) == 16 for span in spans)
        roots = [span for span in spans if not span.get("parentSpanId")]
        assert [span["name"] for span in roots] == ["POST /v1/chat/completions"]
        assert {span["parentSpanId"] for span in spans if span not in roots} <= {span["spanId"] for span in spans}
        # Apart from the ids, it is what protobuf itself understands.
        assert ParseDict(document, ExportTraceServiceRequest()).resource_spans[0].scope_spans[0].spans[0].name
        assert (await found.get("/api/requests/none/otlp"))[0] == 404


async def test_prefixes_that_are_met_again_are_counted_with_who_holds_them(scene):
    async with scene() as found:
        for _ in range(3):
            await found.chat(LONG)
        _, document = await found.get("/api/prefixes")
        (prefix,) = document["prefixes"]
        assert (prefix["model"], prefix["hits"]) == ("sim", 2)
        assert prefix["saved_tokens"] == 2 * prefix["tokens"] > 200
        assert [each["tier"] for each in prefix["holders"]] == ["device"]
        assert (await found.get("/api/prefixes?model=other"))[1]["prefixes"] == []
        assert (await found.get("/api/prefixes?limit=-1"))[0] == 400


async def test_explain_tells_what_each_policy_would_do_and_changes_nothing(scene):
    async with scene() as found:
        first, _ = await found.chat(LONG)
        _, sent = await found.get(f"/api/requests/{first}")
        _, before = await found.get("/api/fleet")
        body = {"model": "sim", "messages": [{"role": "user", "content": LONG}]}
        status, document = await found.post("/api/explain", {"body": body})
        assert status == 200
        assert document["prompt"]["how"] == "exact"
        by_name = {each["policy"]: each for each in document["policies"]}
        assert {"kvaware", "ttft", "leastload", "roundrobin", "session"} <= by_name.keys()
        assert document["policies"][0]["policy"] == "kvaware"
        assert by_name["kvaware"]["active"]
        assert by_name["kvaware"]["chosen"] == sent["chosen"]
        assert [row["worker"] for row in by_name["kvaware"]["candidates"] if row["chosen"]] == [sent["chosen"]]
        _, after = await found.get("/api/fleet")
        assert after["totals"] == before["totals"]
        assert len(found.gateway.decisions.recent(10)) == 1


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"body": []},
        {"body": {"model": "other"}},
        {"body": {"model": "sim"}, "path": "/v1/models"},
        {"body": {"model": "sim"}, "path": "/v1/audio/transcriptions"},
        {"body": {"model": "sim"}, "policies": ["no-such"]},
        {"body": {"model": "sim"}, "policies": "ttft"},
        {"body": {"model": "sim"}, "headers": {"x": 1}},
    ],
)
async def test_a_question_that_cannot_be_answered_is_a_400_that_says_why(scene, question):
    async with scene(1, policy="leastload") as found:
        status, document = await found.post("/api/explain", question)
        assert status == 400
        assert document["error"]


async def test_the_configuration_is_shown_without_secrets(scene):
    secret = "0123456789-very-secret"
    settings = f"telemetry: {{traces: {{headers: {{authorization: {secret}}}}}}}\n"
    admin = f", token: {secret}, links: {{Jaeger: 'https://j/{{trace_id}}', bad: 'javascript:alert(1)'}}"
    async with scene(1, policy="leastload", admin=admin, settings=settings) as found:
        _, document = await found.get("/api/config", headers={"authorization": f"Bearer {secret}"})
        assert [line for line in document["yaml"].splitlines() if secret in line] == []
        assert "policy: leastload" in document["yaml"]
        assert document["links"] == {"Jaeger": "https://j/{trace_id}"}


async def test_a_worker_is_drained_and_taken_back(scene):
    async with scene() as found:
        status, document = await found.post(f"/api/workers/{found.ids[0]}/drain", {})
        assert (status, document["state"]) == (200, "draining")
        for _ in range(4):
            request_id, _ = await found.chat("hello")
            assert (await found.get(f"/api/requests/{request_id}"))[1]["chosen"] == found.ids[1]
        assert (await found.post(f"/api/workers/{found.ids[0]}/undrain", {}))[1]["state"] == "ready"
        assert (await found.post("/api/workers/nobody/drain", {}))[0] == 404


async def test_openapi_describes_exactly_the_routes_that_there_are(scene):
    async with scene(1, policy="leastload") as found:
        _, document = await found.get("/api/openapi.json")
        described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
        runner = found.gateway._admin._runner
        routes = {
            (route.method, route.resource.canonical)
            for route in runner.app.router.routes()
            if route.resource.canonical.startswith("/api/")
        }
        assert described == routes
        operations = [one for operations in document["paths"].values() for one in operations.values()]
        assert len({one["operationId"] for one in operations}) == len(operations)
        for path, operations in document["paths"].items():
            for one in operations.values():
                named = {each["name"] for each in one.get("parameters", ()) if each["in"] == "path"}
                assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}


async def test_every_get_that_is_described_answers(scene):
    async with scene(1, policy="leastload") as found:
        api = Api(found.gateway.inspector, Access("127.0.0.1", None))
        request_id, _ = await found.chat("hello")
        for endpoint in api.endpoints:
            if endpoint.method == "GET" and endpoint.media_type == "application/json":
                known = found.ids[0] if "workers" in endpoint.path else request_id
                assert (await found.get(endpoint.path.replace("{id}", known)))[0] == 200


async def test_a_request_under_way_is_shown_as_running(scene):
    async with scene(1, policy="leastload", speed=1.0) as found:
        url = f"http://127.0.0.1:{found.gateway.port}/v1/chat/completions"
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "stream": True}
        async with found.http.post(url, json=body) as answer:
            await answer.content.readany()
            _, document = await found.get("/api/requests?running=true")
            (row,) = document["running"]
            assert (row["id"], row["outcome"]) == (answer.headers["x-request-id"], "running")
            assert (await found.get(f"/api/requests/{row['id']}"))[1]["chosen"] == found.ids[0]
            assert (await found.get("/api/requests"))[1]["running"] == []
