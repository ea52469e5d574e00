import asyncio

import orjson
import pytest

from gateway.inspector import live


async def frames(answer, *wanted):
    """The data of the first frame of each kind that is `wanted`, in this order."""
    found = []
    kind = None
    async for line in answer.content:
        if line.startswith(b"event: "):
            kind = line[7:].strip().decode()
        elif line.startswith(b"data: ") and kind == wanted[len(found)]:
            found.append(orjson.loads(line[6:]))
            if len(found) == len(wanted):
                return found
    pytest.fail(f"the stream ended after {len(found)} of {wanted}")


async def test_the_fleet_comes_at_once_and_requests_as_they_end(scene):
    async with scene(1, policy="leastload") as found, found.http.get(f"{found.admin}/api/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        (fleet,) = await frames(answer, "fleet")
        assert fleet["fleets"][0]["model"] == "sim"
        request_id, _ = await found.chat("hello")
        (requests,) = await frames(answer, "requests")
        assert [row["id"] for row in requests["requests"]] == [request_id]
        assert requests["more"] is False


async def test_more_requests_than_a_frame_holds_are_cut_and_the_frame_says_so(scene, monkeypatch):
    monkeypatch.setattr(live, "PER_FRAME", 3)
    async with scene(1, policy="leastload") as found, found.http.get(f"{found.admin}/api/live") as answer:
        await frames(answer, "fleet")
        ids = await asyncio.gather(*[found.chat("hello") for _ in range(12)])
        seen = []
        more = False
        while not more or len(seen) < 3:
            (requests,) = await frames(answer, "requests")
            assert len(requests["requests"]) <= 3
            seen += [row["id"] for row in requests["requests"]]
            more = more or requests["more"]
        assert len(seen) == len(set(seen))
        assert set(seen) < {request_id for request_id, _ in ids}


async def test_nothing_is_made_while_nobody_watches(scene):
    async with scene(1, policy="leastload") as found:
        async with found.http.get(f"{found.admin}/api/live") as answer:
            await frames(answer, "fleet")
        asked = 0
        lives = found.gateway.inspector.lives

        def counted():
            nonlocal asked
            asked += 1
            return lives()

        object.__setattr__(found.gateway.inspector, "lives", counted)
        async with asyncio.timeout(5):
            before = -1
            while asked != before:  # the last frame finds that the client is gone
                before = asked
                await asyncio.sleep(live.FLEET_EVERY + 2 * live.REQUESTS_EVERY)


async def test_only_so_many_may_watch(scene, monkeypatch):
    monkeypatch.setattr(live, "MAX_CLIENTS", 1)
    async with scene(1, policy="leastload") as found, found.http.get(f"{found.admin}/api/live") as answer:
        await frames(answer, "fleet")
        assert (await found.get("/api/live"))[0] == 503


async def test_a_client_that_does_not_read_is_cut_off_and_the_others_go_on(scene, monkeypatch):
    monkeypatch.setattr(live, "QUEUE", 2)
    monkeypatch.setattr(live, "FLEET_EVERY", 0.01)
    monkeypatch.setattr(live, "REQUESTS_EVERY", 0.01)
    async with scene(1, policy="leastload") as found:
        real = live._frame
        monkeypatch.setattr(live, "_frame", lambda event, document: real(event, {**document, "padding": "x" * 500_000}))
        reader, writer = await asyncio.open_connection("127.0.0.1", found.gateway.admin_port, limit=1024)
        writer.write(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with found.http.get(f"{found.admin}/api/live", read_bufsize=2**24) as answer:
            await frames(answer, *["fleet"] * 40)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(2**34)
        writer.close()


async def test_a_gateway_that_stops_ends_the_streams(scene):
    async with scene(1, policy="leastload") as found, found.http.get(f"{found.admin}/api/live") as answer:
        await frames(answer, "fleet")
        await found.gateway.stop(0)
        await answer.content.read()
        assert answer.content.at_eof()
