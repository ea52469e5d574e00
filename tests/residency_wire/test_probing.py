"""Who understands what: asked when a worker is ready, and again when it may be another process."""

import asyncio

import pytest
from aiohttp import web

from backends.hints.base import HintCall
from backends.hints.model import Action, Hint, Subject
from backends.hints.registry import HINT_DRIVERS, HintTarget
from gateway.fleet.worker import WorkerState
from gateway.residency import probing as module
from gateway.residency.probing import Prober
from gateway.residency.speakers import NOBODY, Speaker, Speakers

VLLM_NEW = b'{"components":{"schemas":{"ChatCompletionRequest":{"properties":{"kv_hints": {"type":"object"}}}}}}'
VLLM_0_32 = b'{"components":{"schemas":{"ChatCompletionRequest":{"properties":{"kv_transfer_params": {}}}}}}'


@pytest.fixture
async def prober(session, monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.01)
    one = Prober(session, asyncio.get_running_loop().time)
    one.start()
    yield one
    await one.stop()


def described(server, text):
    server.answer = lambda _request, _body: web.Response(body=text, content_type="application/json")


def make_hint_of(action):
    return Hint(id=1, action=Action(action), rule="r", worker="w", subject=Subject("m", 10, {}), stop=10, source="l2")


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the prober tells nobody
        await asyncio.sleep(0.005)


def names(prober):
    return [speaker.name for speaker in prober.speakers("w").all]


def target(worker, **fields):
    return HintTarget(worker=worker.id, model="tiny", **fields)


async def test_auto_finds_kv_hints_in_the_description_of_a_worker(server, prober, make_worker):
    described(server, VLLM_NEW)
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["auto"])])
    await until(lambda: names(prober) == ["kv-hints"])
    assert [(method, path) for method, path, *_ in server.asked] == [("GET", "/openapi.json")]


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_auto_finds_nothing_where_the_description_does_not_name_it(server, prober, make_worker, status):
    server.answer = lambda _request, _body: web.Response(body=VLLM_0_32, status=status)
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["auto"])])
    await until(lambda: prober.workers["w"].asked)
    assert prober.speakers("w") is not NOBODY
    assert names(prober) == []
    assert prober.workers["w"].document()["drivers"] == [
        {"driver": "kv-hints", "speaks": False, "how": f"/openapi.json: status {status}, does not speak it", "url": ""}
    ]


async def test_what_is_configured_is_used_without_a_question(server, prober, make_worker):
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["kv-transfer-params", "warm"])])
    assert names(prober) == ["kv-transfer-params", "warm"]
    await asyncio.sleep(0.05)
    assert server.asked == []


async def test_a_configured_hint_server_is_asked_what_it_can_do_with_its_own_key(
    server, prober, make_worker, monkeypatch
):
    seen = []

    class Learning:
        name = "learning"

        def __init__(self):
            self.able = False

        def probe(self):
            return HintCall("GET", "/can", server="hints")

        def speaks(self, status, body):
            self.able = status == 200
            return self.able

        def inside(self, *_):
            return False

        def beside(self, *_):
            return self.able

    monkeypatch.setattr(module, "hint_driver", lambda _name, _target: Learning())
    server.answer = lambda request, _body: seen.append(request.headers.get("authorization")) or web.Response()
    worker = make_worker("http://127.0.0.1:1", api_key="the worker's")
    prober.update([(worker, target(worker, url=server.url, options={"api_key": "the server's"}), ["learning"])])
    assert prober.speakers("w").way(make_hint_of("prefetch"), own=False) is None
    await until(lambda: prober.speakers("w").way(make_hint_of("prefetch"), own=False) is not None)
    assert seen == ["Bearer the server's"]


async def test_none_is_silent(server, prober, make_worker):
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["none"])])
    assert names(prober) == []
    assert prober.speakers("unknown") is NOBODY


async def test_a_worker_that_is_not_ready_is_not_asked_and_one_that_comes_back_is_asked_anew(
    server, prober, make_worker
):
    described(server, VLLM_NEW)
    worker = make_worker(server.url)
    worker.state = WorkerState.WARMING
    prober.update([(worker, target(worker), ["auto"])])
    await asyncio.sleep(0.05)
    assert server.asked == []
    worker.state = WorkerState.READY
    await until(lambda: names(prober) == ["kv-hints"])
    described(server, VLLM_0_32)
    worker.state = WorkerState.EJECTED
    await asyncio.sleep(0.05)
    worker.state = WorkerState.READY
    await until(lambda: names(prober) == [])
    assert len(server.asked) == 2


async def test_a_restart_that_nobody_saw_is_noticed(server, prober, make_worker):
    described(server, VLLM_NEW)
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["auto"])])
    await until(lambda: names(prober) == ["kv-hints"])
    described(server, VLLM_0_32)
    worker.restarted()
    await until(lambda: names(prober) == [])


async def test_a_driver_that_was_refused_is_silent_until_the_worker_is_asked_again(
    server, prober, make_worker, monkeypatch
):
    monkeypatch.setattr(module, "AGAIN", 1.0)
    described(server, VLLM_NEW)
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["auto"])])
    await until(lambda: names(prober) == ["kv-hints"])
    probed = prober.workers["w"]
    probed.refuse(probed.speakers.all[0], asyncio.get_running_loop().time())
    assert names(prober) == []
    assert probed.document()["drivers"][0]["how"] == "refused"
    await until(lambda: names(prober) == ["kv-hints"])


async def test_a_reload_keeps_what_is_known_of_workers_that_stay_as_they_are(server, prober, make_worker):
    described(server, VLLM_NEW)
    worker = make_worker(server.url)
    prober.update([(worker, target(worker), ["auto"])])
    await until(lambda: names(prober) == ["kv-hints"])
    prober.update([(worker, target(worker), ["auto"])])
    assert names(prober) == ["kv-hints"]
    prober.update([(worker, target(worker), ["none"])])
    assert names(prober) == []
    prober.update([])
    assert prober.speakers("w") is NOBODY


async def test_a_worker_that_hangs_delays_nobody_elses_question(server, prober, make_worker):
    hung = asyncio.Event()

    async def answer(request, _body):
        if request.path.startswith("/slow"):
            await hung.wait()
        return web.Response(body=VLLM_NEW)

    server.answer = answer
    slow, quick = make_worker(f"{server.url}/slow"), make_worker(server.url)
    slow.id = "slow"
    prober.update([(slow, target(slow), ["auto"]), (quick, target(quick), ["auto"])])
    await until(lambda: names(prober) == ["kv-hints"])
    assert prober.speakers("slow").all == ()
    hung.set()


def test_the_first_driver_that_can_say_a_hint_says_it(make_hint):
    of = {name: HINT_DRIVERS[name](HintTarget(worker="w", model="m")) for name in ("kv-hints", "warm")}
    both = Speakers([Speaker(of["kv-hints"]), Speaker(of["warm"])])
    retain, fetch = make_hint("retain"), make_hint("prefetch", source="l2")
    own = both.way(retain, own=True)
    assert own is not None
    assert (own.speaker.name, own.inside) == ("kv-hints", True)
    assert both.way(retain, own=False) is None, "an envelope needs its request"
    beside = both.way(fetch, own=True)
    assert beside is not None
    assert (beside.speaker.name, beside.inside) == ("warm", False)
    assert both.way(make_hint("pin"), own=True) is None
