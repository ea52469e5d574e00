"""From the start to the end of the feeds: reloads, resyncs, log lines, and nothing left over."""

import asyncio


async def test_a_reload_follows_new_workers_and_forgets_those_that_are_gone(scene, tools, start):
    one, two = await start(), await start()
    section = tools.section_of(one.url)
    async with scene(section) as it:
        await tools.until(lambda: it.status().status == "events")
        (prompt,) = it.prompts(1)
        name = it.status().worker
        await it.complete(one.url, prompt)
        await tools.until(lambda: it.predicted(name, prompt) == 96)
        kept = it.fleets.updated(tools.config_of(section, tools.section_of(two.url)))
        it.feeds.update(kept)
        assert it.predicted(name, prompt) == 96
        await tools.until(lambda: [row.status for row in it.feeds.snapshot()] == ["events", "events"])
        await it.complete(two.url, prompt)
        other = it.feeds.snapshot()[1].worker
        await tools.until(lambda: it.predicted(other, prompt) == 96)
        it.feeds.update(kept.updated(tools.config_of(tools.section_of(two.url))))
        assert [row.worker for row in it.feeds.snapshot()] == [other]
        assert set(it.feeds.match(it.chains(prompt))) == {other}
        assert set(it.index.workers) == {other}


async def test_nothing_is_left_when_it_stops(scene, tools, start):
    workers = [await start() for _ in range(3)]
    async with scene(*(tools.section_of(worker.url) for worker in workers)) as it:
        await tools.until(lambda: all(row.status == "events" for row in it.feeds.snapshot()))
        context = it.feeds._parts.context
        await it.feeds.stop()
        assert context.closed
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("feeds/")] == []
        assert it.feeds.snapshot() == []
        assert it.index.workers == {}
        await it.feeds.stop()


async def test_stopping_in_the_middle_of_connecting_and_replaying_ends(scene, tools, start):
    worker = await start()
    for delay in (0.0, 0.005, 0.02, 0.05):
        async with scene(tools.section_of(worker.url), tools.section_of("http://127.0.0.1:9")) as it:
            await asyncio.sleep(delay)
            async with asyncio.timeout(2):
                await it.feeds.stop()


async def test_a_resync_brings_back_what_can_be_replayed(scene, tools, start):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        (prompt,) = it.prompts(1)
        name = it.status().worker
        await it.complete(worker.url, prompt)
        await tools.until(lambda: it.predicted(name, prompt) == 96)
        assert it.feeds.resync(name)
        assert it.predicted(name, prompt) == 0
        await tools.until(lambda: it.predicted(name, prompt) == 96, 2.0)
        assert not it.feeds.resync("nobody")


async def test_each_change_is_logged_once(scene, tools, start, capsys):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        await asyncio.sleep(0.6)
    lines = [line for line in capsys.readouterr().out.splitlines() if "KV events" in line]
    assert len(lines) == 1
    assert "KV events tell what the worker holds" in lines[0]
