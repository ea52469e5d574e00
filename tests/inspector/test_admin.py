import asyncio
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.schema import Admin
from gateway.inspector.access import host_allowed
from gateway.inspector.admin import AdminServer, AdminSources, FleetStatus, ReloadStatus
from gateway.telemetry.metrics import Metrics


class State:
    """What the sources say, to be changed by a test."""

    def __init__(self):
        self.fleets = [FleetStatus("m", 2, 4)]
        self.reload = ReloadStatus()
        self.draining = False
        self.metrics = Metrics(["m"])

    def sources(self):
        return AdminSources(
            fleets=lambda: self.fleets,
            reload=lambda: self.reload,
            draining=lambda: self.draining,
            metrics=self.metrics.scrape,
        )


@pytest.fixture
def state():
    return State()


@pytest.fixture
async def server(state):
    server = AdminServer(Admin(port=0), state.sources(), "1.2.3")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def get(server):
    """GET a path: status, headers, body."""
    async with aiohttp.ClientSession() as session:

        async def ask(path, method="GET", **options):
            async with session.request(method, f"http://127.0.0.1:{server.port}{path}", **options) as answer:
                body = await answer.json() if answer.content_type == "application/json" else await answer.text()
                return answer.status, answer.headers, body

        yield ask


async def test_a_process_that_lives_is_healthy_whatever_its_fleets(get, state):
    state.fleets, state.draining = [], True
    assert (await get("/healthz"))[0] == 200


async def test_ready_with_a_worker(get):
    status, _, report = await get("/readyz")
    assert status == 200
    expected = {
        "ready": True,
        "draining": False,
        "fleets": {"m": {"ready": 2, "total": 4}},
        "degraded": [],
        "information": [],
        "reload": {"ok": True, "error": None, "time": None},
    }
    assert {name: report[name] for name in expected} == expected


async def test_not_ready_without_any_worker(get, state):
    state.fleets = [FleetStatus("m", 0, 4)]
    status, _, report = await get("/readyz")
    assert (status, report["ready"]) == (503, False)
    assert report["degraded"] == ["m: no worker is ready"]


async def test_a_fleet_without_workers_degrades_but_takes_nothing_from_the_others(get, state):
    state.fleets = [FleetStatus("m", 1, 1, ["no KV events from w1"]), FleetStatus("n", 0, 2)]
    status, _, report = await get("/readyz")
    assert (status, report["ready"]) == (200, True)
    assert report["degraded"] == ["m: no KV events from w1", "n: no worker is ready"]


async def test_not_ready_while_draining(get, state):
    state.draining = True
    status, _, report = await get("/readyz")
    assert (status, report["ready"], report["draining"]) == (503, False, True)


async def test_a_bad_file_leaves_the_gateway_ready_and_says_what_is_wrong(get, state):
    state.reload = ReloadStatus(ok=False, error="config.yaml:3:5: unknown key 'modles'", time=1.5)
    status, _, report = await get("/readyz")
    assert status == 200
    assert report["reload"] == {"ok": False, "error": "config.yaml:3:5: unknown key 'modles'", "time": 1.5}
    assert report["degraded"] == ["the configuration file has an error; the previous one is in use"]


async def test_metrics_come_in_the_format_that_is_accepted(get, state):
    state.metrics.request_started()
    status, headers, text = await get("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["warmroute_requests_in_flight"].samples[0].value == 1
    _, headers, text = await get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


async def test_metrics_may_be_rendered_at_once(state):
    sources = replace(state.sources(), metrics=state.metrics.render)
    server = AdminServer(Admin(port=0), sources)
    await server.start()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{server.port}/metrics") as answer:
        assert "warmroute_requests_in_flight 0.0" in await answer.text()
    await server.stop()


@pytest.mark.parametrize("path", ["/nothing", "/healthz/", "/v1/models", "/metrics/..%2f"])
async def test_anything_else_is_a_404_in_json(get, path):
    status, _, body = await get(path)
    assert status == 404
    assert "error" in body


async def test_nothing_can_be_posted(get):
    status, headers, body = await get("/readyz", "POST", data=b"x")
    assert (status, headers["allow"]) == (405, "GET,HEAD")
    assert "error" in body


async def test_head_is_answered_like_get(get):
    assert (await get("/healthz", "HEAD"))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8081", "127.0.0.1.evil.example", "[fe80::1]", "[::1"])
async def test_a_loopback_listener_answers_no_foreign_name(get, host):
    status, _, body = await get("/metrics", headers={"host": host})
    assert status in {400, 421}
    assert "warmroute" not in str(body)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8081", "127.0.0.1:1", "[::1]:8081", "localhost."])
async def test_a_loopback_listener_answers_its_own_names(get, host):
    assert (await get("/healthz", headers={"host": host}))[0] == 200


async def test_two_hosts_are_one_too_many(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
    status = (await reader.read()).split(b"\r\n", 1)[0]
    assert status.split()[1] in {b"400", b"421"}
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("hosts", "bound", "allowed"),
    [
        (["gw.internal:8081"], "0.0.0.0", True),
        ([], "0.0.0.0", True),
        (["gw.internal"], "10.0.0.5", True),
        (["a", "b"], "0.0.0.0", False),
        ([], "127.0.0.1", False),
        ([""], "127.0.0.1", False),
        (["127.0.0.2"], "127.0.0.1", True),
        (["localhost"], "::1", True),
        (["user@localhost"], "localhost", True),
        (["evil.example"], "localhost", False),
        (["localhost:port"], "localhost", True),
    ],
)
def test_which_hosts_are_answered(hosts, bound, allowed):
    assert host_allowed(hosts, bound) is allowed


async def test_a_taken_port_is_an_error_and_leaves_nothing_behind(server, state):
    second = AdminServer(Admin(port=server.port), state.sources())
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()


async def test_after_stop_nobody_listens_and_a_second_stop_does_nothing(state):
    server = AdminServer(Admin(port=0), state.sources())
    await server.start()
    await server.stop()
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)
