"""The monitor against real servers: what a fleet of vLLM workers does to it, on loopback."""

import asyncio

import msgspec
import structlog

from gateway.config.schema import Ejection
from gateway.fleet.fleet import Fleets
from gateway.fleet.health import FailureKind
from gateway.fleet.models import ModelCards
from gateway.fleet.worker import WorkerState


def worker_of(fleets, index=0):
    return list(fleets.workers())[index]


async def test_a_healthy_fleet_is_ready_after_the_first_checks_which_run_at_once(told, build, monitored):
    servers = [await told() for _ in range(8)]
    slow = msgspec.structs.replace(build.quick, interval=60.0)
    fleets = build.fleets([server.url for server in servers], health=slow)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0, everyone=True)
        assert [worker.routable for worker in fleets.workers()] == [True] * 8
        assert all(server.asked.count("/health") == 1 for server in servers)


async def test_a_worker_that_refuses_stays_warming_and_says_why(build, monitored, free_port, until):
    fleets = build.fleets([f"http://127.0.0.1:{free_port}"])
    async with monitored(fleets) as monitor:
        assert not await monitor.wait_ready(0.3)
        row = monitor.snapshot()[0]
        assert row["state"] == "warming"
        assert not row["routable"]
        assert row["last_error"] == "GET /health: connection refused"


async def test_a_worker_that_starts_late_becomes_ready(told, build, monitored):
    server = await told()
    await server.stop()
    fleets = build.fleets([server.url])
    async with monitored(fleets) as monitor:
        assert not await monitor.wait_ready(0.2)
        await server.start()
        assert await monitor.wait_ready(5.0)
        assert monitor.snapshot()[0]["last_error"] is None


async def test_a_worker_that_answers_503_is_ejected_and_comes_back_with_200(told, build, monitored, until):
    server = await told()
    fleets = build.fleets([server.url])
    worker = worker_of(fleets)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0)
        server.status = 503
        await until(lambda: worker.state is WorkerState.EJECTED)
        assert not worker.routable
        assert monitor.snapshot()[0]["last_error"] == "health check answered 503"
        server.status = 200
        assert await monitor.wait_ready(5.0)
        assert worker.routable


async def test_a_hanging_worker_is_ejected_by_the_timeout_and_does_not_delay_the_checks_of_others(
    told, build, monitored, until
):
    hanging, fine = await told(), await told()
    fleets = build.fleets([hanging.url, fine.url], health=msgspec.structs.replace(build.quick, timeout=1.0))
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0, everyone=True)
        hanging.status = None
        await hanging.checks(1)
        async with asyncio.timeout(0.9):  # less than the timeout of the one that hangs
            await fine.checks(3)
        await until(lambda: worker_of(fleets).state is WorkerState.EJECTED)
        assert monitor.snapshot()[0]["last_error"] == "GET /health not answered within 1 s"
        assert worker_of(fleets, 1).state is WorkerState.READY


async def test_hundred_hanging_workers_do_not_starve_the_checks_of_a_healthy_one(told, build, monitored, until):
    hanging, fine = await told(), await told()
    patient = msgspec.structs.replace(build.quick, timeout=1.0)
    fleets = build.fleets([fine.url] + [f"{hanging.url}/{n}" for n in range(100)], health=patient)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0, everyone=True)
        hanging.status = None
        await until(lambda: sum(life.misses > 0 for life in monitor._lives.values()) == 100, 20)
        async with asyncio.timeout(0.9):  # less than the timeout that a hundred others are waiting for
            await fine.checks(3)
        assert worker_of(fleets).state is WorkerState.READY


async def test_a_redirect_is_no_health_and_is_not_followed(told, build, monitored):
    server, elsewhere = await told(), await told()
    server.status, server.headers = 302, {"location": elsewhere.url + "/health"}
    fleets = build.fleets([server.url])
    async with monitored(fleets) as monitor:
        assert not await monitor.wait_ready(0.3)
        assert monitor.snapshot()[0]["last_error"] == "health check answered 302"
        assert elsewhere.asked == []


async def test_checks_carry_the_workers_key_and_ask_the_configured_path(told, build, monitored):
    server = await told()
    config = build.config([server.url], health=msgspec.structs.replace(build.quick, path="/ping"))
    section = msgspec.structs.replace(config.models[0].workers[0], api_key="k1")
    config = msgspec.structs.replace(config, models=(msgspec.structs.replace(config.models[0], workers=(section,)),))
    async with monitored(Fleets.from_config(config, build.policy)) as monitor:
        assert await monitor.wait_ready(5.0)
    assert server.asked[0] == "/ping"
    assert set(server.authorizations) == {"Bearer k1"}


async def test_each_transition_is_logged_once_however_many_checks_fail(told, build, monitored, until):
    server = await told()
    fleets = build.fleets([server.url])
    with structlog.testing.capture_logs() as logs:
        async with monitored(fleets) as monitor:
            assert await monitor.wait_ready(5.0)
            server.status = 500
            await until(lambda: worker_of(fleets).state is WorkerState.EJECTED)
            await server.checks(5)
    assert [entry["event"] for entry in logs] == ["worker ready", "worker ejected"]


async def test_a_worker_that_never_comes_up_is_logged_once(build, monitored, free_port, until):
    fleets = build.fleets([f"http://127.0.0.1:{free_port}"])
    with structlog.testing.capture_logs() as logs:
        async with monitored(fleets) as monitor:
            await until(lambda: monitor._lives[worker_of(fleets)].misses >= 4)
    assert [entry["event"] for entry in logs] == ["worker not ready yet"]


async def test_failing_requests_eject_a_worker_and_one_probe_brings_it_back(told, build, monitored, until):
    servers = [await told(), await told()]
    health = msgspec.structs.replace(build.quick, interval=60.0)  # checks stay out of it
    fleets = build.fleets([server.url for server in servers], health=health)
    worker = worker_of(fleets)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0, everyone=True)
        for _ in range(3):
            assert worker.routable
            monitor.failed(worker, FailureKind.CONNECT)
        assert worker.state is WorkerState.EJECTED
        assert not worker.routable
        await until(lambda: worker.routable)
        lease = worker.acquire()
        assert not worker.routable, "one probe only"
        monitor.succeeded(worker)
        lease.release()
        assert worker.state is WorkerState.READY
        assert worker.routable


async def test_a_passing_check_brings_a_worker_back_after_its_ejection_is_over(told, build, monitored, until):
    server, other = await told(), await told()
    fleets = build.fleets([server.url, other.url])
    worker = worker_of(fleets)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0, everyone=True)
        for _ in range(3):
            monitor.failed(worker, FailureKind.SERVER_ERROR)
        assert worker.state is WorkerState.EJECTED
        started = asyncio.get_running_loop().time()
        await until(lambda: worker.state is WorkerState.READY)
        assert asyncio.get_running_loop().time() - started >= build.quick.ejection.base - 0.02


async def test_a_flapping_worker_needs_more_passes_each_time(told, build, monitored, until):
    server = await told()
    fleets = build.fleets([server.url])
    worker = worker_of(fleets)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0)
        needed = []
        for _ in range(3):
            server.status = 503
            await until(lambda: worker.state is WorkerState.EJECTED)
            before = server.asked.count("/health")
            server.status = 200
            await until(lambda: worker.state is WorkerState.READY)
            needed.append(server.asked.count("/health") - before)
        assert needed[0] <= 2
        assert needed[2] >= 3
        assert monitor.snapshot()[0]["ejections"] == 3


async def test_drain_and_undrain_by_id(told, build, monitored):
    server = await told()
    fleets = build.fleets([server.url])
    worker = worker_of(fleets)
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0)
        assert monitor.drain(worker.id)
        assert worker.state is WorkerState.DRAINING
        assert not worker.routable
        await server.checks(3)
        assert worker.state is WorkerState.DRAINING
        assert monitor.undrain(worker.id)
        assert worker.routable
        assert not monitor.drain("nobody:1")
        assert not monitor.undrain("nobody:1")


async def test_reload_watches_the_new_and_lets_go_of_the_removed(told, build, monitored, until):
    first, second = await told(), await told()
    old = build.fleets([first.url])
    leaving = worker_of(old)
    async with monitored(old) as monitor:
        assert await monitor.wait_ready(5.0)
        lease = leaving.acquire()
        new = old.updated(build.config([second.url]))
        monitor.update(new)
        assert await monitor.wait_ready(5.0)
        assert leaving.state is WorkerState.GONE
        assert {row["id"]: row["state"] for row in monitor.snapshot()} == {
            worker_of(new).id: "ready",
            leaving.id: "gone",
        }
        monitor.succeeded(leaving)
        monitor.failed(leaving, FailureKind.CONNECT)
        assert not leaving.routable
        lease.release()
        assert [row["id"] for row in monitor.snapshot()] == [worker_of(new).id]
        await second.checks(1)  # a check of the removed one that was on its way has arrived by now
        asked = len(first.asked)
        await second.checks(4)
        assert len(first.asked) == asked


async def test_reload_takes_over_changed_rules_at_once(told, build, monitored):
    server = await told()
    old = build.fleets([server.url], health=msgspec.structs.replace(build.quick, interval=3600.0))
    async with monitored(old) as monitor:
        assert await monitor.wait_ready(5.0)
        monitor.update(old.updated(build.config([server.url])))
        async with asyncio.timeout(5.0):
            await server.checks(3)


async def test_slow_start_weights_rise_to_one(told, build, monitored, until):
    server = await told()
    fleets = build.fleets([server.url], health=msgspec.structs.replace(build.quick, slow_start=0.8))
    worker = worker_of(fleets)
    seen = []
    async with monitored(fleets) as monitor:
        assert await monitor.wait_ready(5.0)
        assert worker.weight < 1.0
        await until(lambda: seen.append(worker.weight) or worker.weight == 1.0)
    assert seen == sorted(seen)
    assert any(0.2 < weight < 1.0 for weight in seen)


async def test_timeouts_count_nothing_while_requests_succeed(told, build, monitored, until):
    server = await told()
    health = msgspec.structs.replace(build.quick, timeout=0.05, ejection=Ejection())
    fleets = build.fleets([server.url], health=health)
    worker = worker_of(fleets)
    async with monitored(fleets) as monitor:
        await until(lambda: worker.state is WorkerState.READY)
        server.status = None
        for _ in range(6):
            monitor.succeeded(worker)
            await server.checks(1)
            monitor.succeeded(worker)
        assert worker.state is WorkerState.READY
        await until(lambda: worker.state is WorkerState.EJECTED)


async def test_model_cards_come_from_the_workers(told, build, monitored, until):
    server = await told()
    fleets = build.fleets([server.url], aliases=("alias",))
    cards = ModelCards(fleets, created=1)
    async with monitored(fleets, cards=cards) as monitor:
        assert await monitor.wait_ready(5.0)
        await until(lambda: b'"owned_by":"vllm"' in cards.models_payload())
        await server.stop()
        await until(lambda: worker_of(fleets).state is WorkerState.EJECTED)
        assert b'"owned_by":"vllm"' in cards.model_payload("alias"), "an absent worker's card stays"


async def test_a_worker_that_lists_another_model_is_named_once(told, build, monitored, until):
    server = await told()
    server.cards = {"data": [{"id": "other"}]}
    fleets = build.fleets([server.url])
    with structlog.testing.capture_logs() as logs:
        async with monitored(fleets, cards=ModelCards(fleets, created=1)):
            await until(lambda: any(entry["event"] == "worker does not list its model" for entry in logs))
    entry = next(entry for entry in logs if entry["event"] == "worker does not list its model")
    assert (entry["model"], entry["lists"]) == ("m", ["other"])


async def test_stop_leaves_no_task(told, build, monitored):
    server = await told()
    async with monitored(build.fleets([server.url])) as monitor:
        assert await monitor.wait_ready(5.0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("health/")]
