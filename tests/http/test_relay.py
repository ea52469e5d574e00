"""Transcripts of requests that go well."""


async def test_a_request_reaches_the_worker_and_its_answer_the_client(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post({"model": "m", "messages": [{"role": "user", "content": "hi"}]}))
    worker, request = await bench.worker.receives()
    assert request.start == "POST /v1/chat/completions HTTP/1.1"
    assert request.get("host") == f"127.0.0.1:{bench.worker.port}"
    assert request.json["messages"] == [{"role": "user", "content": "hi"}]
    await worker.sends(http.answer(b'{"id":"1"}'))
    response = await client.receives()
    assert response.status == 200
    assert response.body == b'{"id":"1"}'
    assert response.get("x-warmroute-worker") == f"127.0.0.1:{bench.worker.port}"
    await bench.settles()
    assert bench.outcomes == {"completed": 1}


async def test_both_connections_are_used_again(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"{}"))
    await client.receives()
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(http.answer(b"[1]"))
    assert (await client.receives()).body == b"[1]"
    assert bench.worker.connections == 1


async def test_chunks_of_a_stream_are_relayed_as_they_come(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    head = await client.head()
    assert head.get("transfer-encoding") == "chunked"
    for number in range(5):
        event = b'data: {"n":%d}\n\n' % number
        await worker.sends(http.chunk(event))
        assert await client.chunk() == event
    await worker.sends(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""
    await bench.settles()
    assert bench.outcomes == {"completed": 1}


async def test_an_answer_cut_at_every_byte_arrives_the_same(start, http):
    bench = await start()
    client = await bench.client()
    events = [b'data: {"n":%d}\n\n' % n for n in range(3)]
    raw = http.SSE_HEAD + b"".join(http.chunk(e) for e in events) + b"0\r\n\r\n"
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    for index in range(len(raw)):
        await worker.sends(raw[index : index + 1])
    response = await client.receives()
    assert response.body == b"".join(events)
    # The parser saw the end although it saw it in pieces: the connection is fit for another request.
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200
