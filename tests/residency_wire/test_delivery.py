"""Hints on their way beside requests: to servers that answer, refuse, hang and are not there."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from backends.hints.base import Answer, HintCall
from backends.hints.model import Action, Fate
from backends.hints.warm import WarmDriver
from gateway.residency import delivery as module
from gateway.residency.delivery import LANES, QUEUE, Delivery
from gateway.residency.speakers import Speaker

ENDS = {Fate.SKIPPED, Fate.REFUSED, Fate.FAILED, Fate.ACCEPTED}


class Fetching:
    """A driver of a server that takes operations on and is asked about them."""

    name = "fetching"

    def __init__(self, polls=0):
        self.polls = polls

    def call(self, hint):
        return HintCall("POST", "/fetch", {"id": hint.id}, server="hints", bytes_moved=10)

    def read(self, hint, status, body):
        if status != 200:
            return Answer("refused", detail=f"status {status}")
        if json.loads(body).get("pending"):
            return Answer("pending", then=HintCall("GET", f"/fetch/{hint.id}", server="hints"), detail="not yet")
        return Answer("accepted", moved_tokens=5)


class Books:
    def __init__(self):
        self.fates = {}
        self.told = asyncio.Event()
        self.allowed = True
        self.moved = []

    def tell(self, hint, fate, detail, now):
        assert now > 0
        self.fates.setdefault(hint.id, []).append((fate, detail))
        self.told.set()

    def allow(self, _hint, moved, _now):
        self.moved.append(moved)
        return self.allowed

    def last(self, hint):
        return self.fates[hint.id][-1][0] if hint.id in self.fates else None

    async def end(self, *hints):
        """Wait until the fate of each is an end."""
        while any(self.last(hint) not in ENDS for hint in hints):
            self.told.clear()
            await self.told.wait()


@pytest.fixture
async def books():
    return Books()


@pytest.fixture
async def delivered(session, books):
    @asynccontextmanager
    async def delivered(**options):
        one = Delivery(session, tell=books.tell, allow=books.allow, clock=asyncio.get_running_loop().time, **options)
        try:
            yield one
        finally:
            await one.stop()
            assert one.waiting == 0

    return delivered


async def test_a_hint_is_sent_and_its_answer_is_its_fate(server, books, delivered, make_hint, make_worker):
    hint = make_hint("prefetch")
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(Fetching(), server.url), make_worker())
        assert hint.id not in books.fates, "nothing happens while the caller waits"
        await books.end(hint)
    assert [fate for fate, _ in books.fates[hint.id]] == [Fate.SENT, Fate.ACCEPTED]
    ((method, path, body, headers),) = server.asked
    assert (method, path, body) == ("POST", "/fetch", {"id": hint.id})
    assert headers["user-agent"] == "warmroute-hints"
    assert books.moved == [10]
    assert delivery.latency["fetching"].count == 1


async def test_an_operation_that_takes_a_while_is_asked_about_until_it_is_done(
    server, books, delivered, make_hint, make_worker
):
    answers = iter([True, True, False])
    server.answer = lambda _request, _body: web.json_response({"pending": next(answers)})
    hint = make_hint("prefetch")
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(Fetching(), server.url), make_worker())
        await books.end(hint)
    assert books.last(hint) is Fate.ACCEPTED
    assert [method for method, *_ in server.asked] == ["POST", "GET", "GET"]


async def test_an_operation_that_never_ends_is_given_up(server, books, delivered, make_hint, make_worker, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    server.answer = lambda _request, _body: web.json_response({"pending": True})
    hint = make_hint("prefetch")
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(Fetching(), server.url), make_worker())
        await books.end(hint)
    assert books.fates[hint.id][-1] == (Fate.FAILED, "not yet")


async def test_a_refusal_is_no_failure_and_the_next_hint_is_said(server, books, delivered, make_hint, make_worker):
    server.answer = lambda _request, _body: web.json_response({}, status=400)
    hints = [make_hint("prefetch") for _ in range(4)]
    async with delivered() as delivery:
        for hint in hints:
            delivery.offer(hint, Speaker(Fetching(), server.url), make_worker())
        await books.end(*hints)
    assert {books.last(hint) for hint in hints} == {Fate.REFUSED}
    assert len(server.asked) == 4


async def test_a_server_that_knows_no_such_path_is_named(server, books, delivered, make_hint, make_worker):
    server.answer = lambda _request, _body: web.json_response({}, status=405)
    spurned = []
    hint, speaker, worker = make_hint("prefetch"), Speaker(Fetching(), server.url), make_worker()
    async with delivered(spurned=lambda *who: spurned.append(who)) as delivery:
        delivery.offer(hint, speaker, worker)
        await books.end(hint)
    assert spurned == [(worker, speaker)]


async def test_a_worker_that_hangs_holds_up_its_own_hints_only(
    server, books, delivered, make_hint, make_worker, monkeypatch
):
    monkeypatch.setattr(module, "TIMEOUT", 0.3)
    hung = asyncio.Event()

    async def answer(request, _body):
        if request.path == "/slow/fetch":
            await hung.wait()
        return web.json_response({})

    server.answer = answer
    slow, quick = make_worker("http://127.0.0.1:1"), make_worker("http://127.0.0.1:2")
    quick.id = "quick"
    stuck = [make_hint("prefetch") for _ in range(LANES + QUEUE + 5)]
    other = make_hint("prefetch", worker="quick")
    async with delivered() as delivery:
        for hint in stuck:
            delivery.offer(hint, Speaker(Fetching(), f"{server.url}/slow"), slow)
        # The first have not begun yet, so the queue takes as many as it has room for and no more.
        skipped = [hint for hint in stuck if books.last(hint) is Fate.SKIPPED]
        assert len(skipped) == len(stuck) - QUEUE
        delivery.offer(other, Speaker(Fetching(), server.url), quick)
        await books.end(other)
        assert books.last(other) is Fate.ACCEPTED
        assert sum(path == "/slow/fetch" for _, path, *_ in server.asked) <= LANES
        await books.end(*stuck)
        assert delivery.blocked() == ["w"]
        late = make_hint("prefetch")
        delivery.offer(late, Speaker(Fetching(), server.url), slow)
        assert books.fates[late.id] == [(Fate.SKIPPED, "left alone after failures")]
        hung.set()
    assert {books.last(hint) for hint in stuck} == {Fate.SKIPPED, Fate.FAILED}


async def test_a_server_that_is_not_there_is_left_alone_longer_each_time(books, delivered, make_hint, make_worker):
    now = 100.0

    class Clock:
        def __call__(self):
            return now

    worker, speaker = make_worker(), Speaker(Fetching(), "http://127.0.0.1:9")
    waits = []
    async with delivered() as delivery:
        delivery._clock = Clock()
        for _ in range(9):
            hint = make_hint("prefetch")
            delivery.offer(hint, speaker, worker)
            await books.end(hint)
            assert books.last(hint) is Fate.FAILED
            waits.append(delivery._lanes["w"].blocked_until - now)
            now += waits[-1]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


async def test_what_is_over_budget_is_not_sent(server, books, delivered, make_hint, make_worker):
    books.allowed = False
    hint = make_hint("prefetch")
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(Fetching(), server.url), make_worker())
        await books.end(hint)
    assert books.fates[hint.id] == [(Fate.SKIPPED, "over budget")]
    assert server.asked == []


async def test_a_driver_that_makes_a_mistake_costs_its_hint_and_nothing_else(
    server, books, delivered, make_hint, make_worker
):
    class Broken(Fetching):
        def read(self, hint, status, body):
            raise KeyError(status, body)

    broken, sound = make_hint("prefetch"), make_hint("prefetch")
    async with delivered() as delivery:
        delivery.offer(broken, Speaker(Broken(), server.url), make_worker())
        delivery.offer(sound, Speaker(Fetching(), server.url), make_worker())
        await books.end(broken, sound)
    assert books.fates[broken.id][-1] == (Fate.FAILED, "KeyError")
    assert books.last(sound) is Fate.ACCEPTED


async def test_stopping_ends_every_hint(server, books, delivered, make_hint, make_worker):
    hung = asyncio.Event()

    async def answer(_request, _body):
        await hung.wait()
        return web.json_response({})

    server.answer = answer
    hints = [make_hint("prefetch") for _ in range(10)]
    async with delivered() as delivery:
        for hint in hints:
            delivery.offer(hint, Speaker(Fetching(), server.url), make_worker())
        await server.arrived.wait()
    hung.set()
    assert all(books.last(hint) in ENDS for hint in hints)


# Warm requests.


async def test_a_warm_request_is_the_prompt_with_one_token_to_generate(
    server, books, delivered, make_hint, make_subject, make_worker
):
    usage = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}
    server.answer = lambda _request, _body: web.json_response({"usage": usage})
    about = make_subject(100, salt="salty")
    hint = make_hint("prefetch", about=about, stop=64, source="l2")
    warmed = []
    worker = make_worker(server.url, api_key="secret")
    async with delivered(warmed=warmed.append) as delivery:
        delivery.offer(hint, Speaker(WarmDriver("tiny", priority=100)), worker)
        await books.end(hint)
    ((method, path, body, headers),) = server.asked
    assert (method, path) == ("POST", "/v1/completions")
    assert body == {
        "model": "tiny",
        "prompt": list(range(1000, 1064)),
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "cache_salt": "salty",
        "priority": 100,
    }
    assert headers["authorization"] == "Bearer secret"
    assert warmed == [hint]
    assert (worker.in_flight, worker.pending, worker.backlog) == (0, 0, 0.0)


async def test_a_warm_request_counts_as_its_workers_load_while_it_runs(
    server, books, delivered, make_hint, make_worker
):
    worker = make_worker(server.url)
    seen = []

    def answer(_request, _body):
        seen.append((worker.in_flight, worker.pending_tokens))
        return web.json_response({})

    server.answer = answer
    hint = make_hint("prefetch", source="l1")
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(WarmDriver("tiny")), worker)
        await books.end(hint)
    assert seen == [(1, 100)]
    assert worker.calibration.start == (worker.rate, worker.overhead), "nothing is learned from it"


async def test_a_busy_worker_gets_no_warm_request(server, books, delivered, make_hint, make_worker, monkeypatch):
    monkeypatch.setattr(module, "BUSY_WAIT", 0.05)
    worker = make_worker(server.url)
    lease = worker.acquire(1000)
    hint = make_hint("prefetch", source="l1")
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(WarmDriver("tiny")), worker)
        await books.end(hint)
    lease.release()
    assert books.last(hint) is Fate.SKIPPED
    assert server.asked == []


async def test_without_exact_tokens_nothing_can_be_warmed(
    server, books, delivered, make_hint, make_subject, make_worker
):
    hint = make_hint("prefetch", about=make_subject(exact=False))
    async with delivered() as delivery:
        delivery.offer(hint, Speaker(WarmDriver("tiny")), make_worker(server.url))
        await books.end(hint)
    assert books.fates[hint.id] == [(Fate.SKIPPED, "warm can't say it")]


def test_warm_requests_bring_prompts_to_the_device_and_say_nothing_else():
    driver = WarmDriver("tiny")
    assert driver.beside(Action.PREFETCH, "l2", "device")
    assert not driver.beside(Action.PREFETCH, "l2", "l1")
    assert not driver.beside(Action.RETAIN, None, "device")
    assert not driver.inside(Action.PREFETCH, "l2", "device")
