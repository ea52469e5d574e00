"""What the public listener answers: the API's paths and nothing else, the list of models, the ping."""

import orjson
import pytest

from gateway.http.routes import ROUTES

# Every path that vLLM 0.32 serves, from its own route table (GET /openapi.json of a server started with all development
# endpoints), and what older and newer versions and SGLang add. None of them may be reached, with any method.
ADMINISTRATION = [
    "/load",
    "/version",
    "/kv_event_sources",
    "/health",
    "/metrics",
    "/server_info",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/release_kv_cache_memory",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/weight_checker",
    "/get_world_size",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/chat/completions/batch",
    "/v1/responses/r_1",
    "/v1/responses/r_1/cancel",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/generate",
    "/flush_cache",
    "/get_server_info",
    "/update_weights_from_disk",
    "/release_memory_occupation",
    "/set_internal_state",
    "/healthz",
    "/readyz",
    "/workers",
    "/explain",
    "/",
]
TRICKS = (
    "//v1/models",
    "/v1//models",
    "/v1/model",
    "/v1/modelsx",
    "/v1/./chat/completions",
    "/v1/chat/completions/",
    "/v1/chat/../../pause",
    "/v1/%63hat/completions",
    "/v1%2fchat%2fcompletions",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/%2e%2e/pause",
    "/v1/chat/completions/%2e%2e/%2e%2e/%2e%2e/pause",
    "/v1/chat/completions;jsessionid=1",
    "/v1\\chat\\completions",
    "/V1/CHAT/COMPLETIONS",
    "/pause?x=/v1/chat/completions",
    "/pause#/v1/chat/completions",
    "http://gateway/pause",
    "http://gateway//v1/chat/completions",
    "http://gateway",
    "http://gateway?/v1/chat/completions",
    "ftp://gateway/v1/chat/completions",
)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_administration_path_of_a_worker_can_be_reached(start, http, method):
    bench = await start()
    client = await bench.client()
    for path in ADMINISTRATION:
        body = b'{"model":"m"}'
        await client.sends(
            b"%b %b HTTP/1.1\r\nHost: g\r\nContent-Length: 13\r\n\r\n%b" % (method.encode(), path.encode(), body)
        )
        response = await client.receives()
        assert response.status == 404, path
        assert response.json["error"]["code"] == "unknown_url", path
        assert response.json["error"]["type"] == "invalid_request_error"
    assert bench.worker.connections == 0
    assert bench.gateway.metrics.refusals == {"unknown_path": len(ADMINISTRATION)}


@pytest.mark.parametrize("target", TRICKS)
async def test_a_path_is_taken_as_it_is_written(start, http, target):
    """Rows 23 and 24: the raw target decides; nothing is decoded, merged or resolved."""
    bench = await start()
    await bench.refuses(http.post(path=target), 404, closes=False)


@pytest.mark.parametrize("path", ROUTES)
async def test_every_path_of_the_api_is_relayed_with_its_query(start, http, path):
    bench = await start()
    body, fields = b'{"model":"m"}', ""
    if "audio" in path:
        body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
        fields = "Content-Type: multipart/form-data; boundary=x\r\n"
    for target in (path, f"{path}?api-version=2026-01-01&x=%2F..%2Fpause"):
        client = await bench.client()
        await client.sends(http.post(body, path=target, fields=fields))
        worker, request = await bench.worker.receives()
        assert request.start == f"POST {target} HTTP/1.1"
        assert request.body == body
        await worker.sends(http.answer(b"[1]", fields=b"connection: close\r\n"))
        assert (await client.receives()).body == b"[1]"
        await bench.settles()


async def test_a_workers_base_path_stands_before_the_api_path(start, http):
    worker = http.ScriptedWorker()
    await worker.start()
    bench = await start(workers=0, model={"workers": [{"url": f"{worker.url}/tenant/1/", "driver": "openai"}]})
    bench.workers.append(worker)
    client = await bench.client()
    await client.sends(http.post(path=f"{http.CHAT}?a=b"))
    peer, request = await worker.receives()
    assert request.start == "POST /tenant/1/v1/chat/completions?a=b HTTP/1.1"
    await peer.sends(http.answer())
    assert (await client.receives()).status == 200


async def get(bench, path, method="GET"):
    client = await bench.client()
    await client.sends(f"{method} {path} HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n".encode())
    response = await client.head()
    response.body = await client.sees_end()
    return response


@pytest.fixture
async def library(start, http):
    """Two fleets, one of them with names that need escapes."""
    worker, away = http.ScriptedWorker(), http.ScriptedWorker()
    worker.cards = b'{"data":[{"id":"org/m","object":"model","created":7,"owned_by":"vllm","max_model_len":4096}]}'
    away.cards = b"no JSON"
    await worker.start()
    await away.start()
    models = [
        {"name": "org/m", "aliases": ["gpt-4", "m \u00e9"], "workers": [{"url": worker.url}]},
        {"name": "away", "workers": [{"url": away.url}]},
    ]
    bench = await start(workers=0, models=models)
    bench.workers.append(worker)
    # The cards are fetched after the first good health check.
    await http.until(lambda: b"4096" in bench.gateway.proxy._local._cards.models_payload())
    await away.stop()
    return bench


async def test_the_models_of_all_fleets_and_their_aliases_are_listed_even_if_a_worker_is_away(library):
    response = await get(library, "/v1/models")
    assert response.status == 200
    assert response.get("content-type") == "application/json"
    cards = {card["id"]: card for card in response.json["data"]}
    assert list(cards) == ["org/m", "gpt-4", "m \u00e9", "away"]
    assert cards["org/m"]["max_model_len"] == cards["gpt-4"]["max_model_len"] == 4096
    assert cards["gpt-4"]["owned_by"] == "vllm"
    assert cards["away"]["object"] == "model"
    assert (await get(library, "/v1/models?x=1")).json == response.json


async def test_head_tells_what_get_would(library):
    for path in ("/v1/models", "/v1/models/gpt-4", "/ping"):
        whole, head = await get(library, path), await get(library, path, "HEAD")
        assert head.status == whole.status == 200
        assert head.get("content-length") == whole.get("content-length") == str(len(whole.body))
        assert head.body == b""


@pytest.mark.parametrize(
    "path", ["org/m", "org%2Fm", "org%2fm", "gpt-4", "gpt%2D4", "m%20%C3%A9", "away", "gpt-4?x=/y"]
)
async def test_one_model_is_found_by_name_or_alias_as_it_is_or_percent_encoded(library, path):
    response = await get(library, f"/v1/models/{path}")
    assert response.status == 200
    assert response.json["object"] == "model"


@pytest.mark.parametrize(
    "path", ["EVIL", "", "org", "org/m/", "/", "../ping", "../../pause", "%2e%2e", "%00", "%ff", "gpt-4%", "org%252Fm"]
)
async def test_a_model_that_does_not_exist_is_not_found(library, path):
    response = await get(library, f"/v1/models/{path}")
    assert response.status == 404
    assert response.json["error"]["code"] == "model_not_found"
    assert b"EVIL" not in response.body


async def test_ping_says_whether_anybody_can_take_a_request(start, http):
    bench = await start(health={"interval": 0.05, "unhealthy_after": 1})
    for method in ("GET", "POST"):
        response = await get(bench, "/ping", method)
        assert (response.status, response.body) == (200, b"{}")
    bench.worker.healthy = False
    await http.until(lambda: not bench.fleet_workers[0].routable)
    response = await get(bench, "/ping")
    assert response.status == 503
    assert orjson.loads(response.body)["error"]["type"] == "api_error"
