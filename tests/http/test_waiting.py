"""Requests that wait in the gateway and are not like all others: only some workers will do, or a tenant's allowance has paid for them already."""

from gateway.admission.keys import hashed, new_key

KEY = new_key()
AUTH = f"Authorization: Bearer {KEY}\r\n"
CLOSE = b"connection: close\r\n"


async def fleet(start, http, **admission):
    """Two workers of one slot, of which the second alone has the adapter `fine`."""
    workers = [http.ScriptedWorker(), http.ScriptedWorker()]
    for worker in workers:
        await worker.start()
    sections = [
        {"url": worker.url, "driver": "vllm", "capabilities": {"slots": 1, "lora_adapters": adapters}}
        for worker, adapters in zip(workers, ([], ["fine"]), strict=True)
    ]
    policy = {"mine": {"filters": [{"type": "healthy"}, {"type": "lora"}], "picker": {"type": "lowest-cost"}}}
    bench = await start(
        workers=0,
        policies=policy,
        policy="mine",
        model={"workers": sections, "admission": admission, "aliases": ["fine"]},
    )
    bench.workers.extend(workers)
    return bench, *workers


def waiting(bench):
    return len(bench.gateway.proxy.admissions.gates["m"].line)


async def asks(bench, http, fields="", body=None):
    client = await bench.client()
    await client.sends(http.post(body, fields=fields))
    return client


async def test_a_request_that_only_a_full_worker_can_serve_waits_for_that_one(start, http):
    bench, plain, fine = await fleet(start, http)
    holds = await asks(bench, http, body={"model": "fine", "messages": []})
    peer, _ = await fine.receives()
    waits = await asks(bench, http, body={"model": "fine", "messages": []})
    await http.until(lambda: waiting(bench) == 1)
    other = await asks(bench, http)
    other_peer, _ = await plain.receives()
    assert (await finishes(other_peer, other, http)).status == 200, "it holds nobody up that goes elsewhere"
    assert waiting(bench) == 1
    assert fine.arrivals.empty(), "nothing is sent beyond its slots"
    assert plain.arrivals.empty(), "and nothing to who could not serve it"
    await finishes(peer, holds, http)
    peer, _ = await fine.receives()
    assert (await finishes(peer, waits, http)).status == 200


async def test_one_that_only_a_worker_can_serve_that_leaves_the_fleet_is_not_lost(start, http):
    bench, plain, fine = await fleet(start, http)
    holds = await asks(bench, http, body={"model": "fine", "messages": []})
    peer, _ = await fine.receives()
    waits = await asks(bench, http, body={"model": "fine", "messages": []})
    await http.until(lambda: waiting(bench) == 1)
    bench.gateway._health.drain(bench.fleet_worker(fine).id)
    await finishes(peer, holds, http)
    peer, _ = await plain.receives()  # nobody has the adapter now: whoever is there may load it
    assert (await finishes(peer, waits, http)).status == 200


async def finishes(worker, client, http):
    await worker.sends(http.answer(fields=CLOSE))
    return await client.receives()


async def limited(start, http, **admission):
    """One worker of one slot, taken, and a tenant with an allowance of tokens, of which `left` tells."""
    bench = await start(
        tenants={"shop": {"keys": [hashed(KEY)], "tokens_per_minute": 60_000}},
        model={"admission": admission},
    )
    for worker in bench.fleet_workers:
        section = type(bench.gateway.config.models[0].workers[0].capabilities)(slots=1)
        worker.adopt(worker.capabilities.configured(section))
    first = await asks(bench, http, AUTH)
    peer, _ = await bench.worker.receives()
    account = bench.gateway.proxy.tenants.by_name["shop"].account
    return bench, first, peer, lambda: account.tokens._level


LONG = {"model": "m", "messages": [{"role": "user", "content": "word " * 4000}]}
"""Some 5,000 tokens, at four bytes each."""


async def test_a_refused_waiters_tokens_are_given_back(start, http):
    bench, first, peer, left = await limited(start, http, max_wait="200ms")
    before = left()
    client = await asks(bench, http, AUTH, LONG)
    await http.until(lambda: waiting(bench) == 1)
    assert left() < before - 4000, "they are taken when the prompt is known"
    refusal = await client.receives()
    assert (refusal.status, refusal.json["error"]["code"]) == (429, "queue_timeout")
    await http.until(lambda: left() >= before)
    await peer.sends(http.answer(fields=CLOSE))
    assert (await first.receives()).status == 200


async def test_tokens_of_a_client_that_leaves_the_line_are_given_back(start, http):
    bench, first, peer, left = await limited(start, http)
    before = left()
    client = await asks(bench, http, AUTH, LONG)
    await http.until(lambda: waiting(bench) == 1)
    await client.resets()
    await http.until(lambda: waiting(bench) == 0 and left() >= before)
    await peer.sends(http.answer(fields=CLOSE))
    assert (await first.receives()).status == 200
    await bench.settles()
    assert bench.outcomes == {"completed": 1, "client_gone": 1}
