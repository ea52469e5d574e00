"""Bodies: the model in them chooses the fleet, a renamed model changes nothing else, limits hold, what is broken stays here."""

import asyncio
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.body import MultipartModel, with_model

TWO = {"models": [{"name": "a", "aliases": ["alias", "org/a-\u00e9"]}, {"name": "b", "aliases": []}]}


async def two_fleets(start, http):
    """Fleets a (aliases alias, org/a-\u00e9) and b with a worker each."""
    workers = [http.ScriptedWorker(), http.ScriptedWorker()]
    for worker in workers:
        await worker.start()
    models = [{**model, "workers": [{"url": w.url}]} for model, w in zip(TWO["models"], workers, strict=True)]
    bench = await start(workers=0, models=models)
    bench.workers.extend(workers)
    return bench


async def relayed(bench, http, raw, worker=0):
    """What the worker got."""
    client = await bench.client()
    await client.sends(raw)
    peer, request = await bench.workers[worker].receives()
    await peer.sends(http.answer(fields=b"connection: close\r\n"))
    assert (await client.receives()).status == 200
    await bench.settles()
    return request


ODD_BUT_WHOLE = {
    "blanks and a key order of its own": b' {\n "messages" : [ ] ,\t"model":"m" } \r\n',
    "unknown keys": b'{"model":"m","x":{"y":[1,2,{"z":null}]},"":0}',
    "numbers as they are written": b'{"model":"m","a":1.0,"b":1e5,"c":-0.0,"d":0.10000000000000000555,"e":123456789012345678901234567890}',
    "escapes as they are written": b'{"model":"m","a":"\\u00e9\\/\\ud83d\\ude00\\u0000"}',
    "the model in escapes": b'{"\\u006dodel":"\\u006d"}',
    "messages that are no list": b'{"model":"m","messages":"x"}',
    "content of five kinds": b'{"model":"m","messages":[{"content":null},{"content":{}},{"role":"alien"},[[[[1]]]],{"content":[{"type":"image_url"}]}]}',
    "stream as a string": b'{"model":"m","stream":"true"}',
    "stream as a number": b'{"model":"m","stream":1,"stream_options":{"include_usage":true}}',
    "huge parameters": b'{"model":"m","n":16384,"max_tokens":1000000000,"stop":["a"],"logit_bias":{"1":100}}',
    "special tokens": b'{"model":"m","messages":[{"role":"<|im_start|>system","content":"<|im_end|>"}]}',
    "a repeated key that is not the gateway's": b'{"a":1,"model":"m","a":2}',
    "1,000 levels": b'{"model":"m","x":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "a null model": b'{"model":null}',
    "an empty model": b'{"model":""}',
    "no model": b"{}",
}


@pytest.mark.parametrize("row", ODD_BUT_WHOLE)
async def test_the_worker_judges_byte_for_byte(start, http, row):
    bench = await start()
    assert (await relayed(bench, http, http.post(ODD_BUT_WHOLE[row]))).body == ODD_BUT_WHOLE[row]


UNREADABLE = {
    "an empty body": b"",
    "blanks": b"  \r\n",
    "no JSON": b"EVIL",
    "an array": b'["EVIL"]',
    "a string": b'"EVIL"',
    "a number": b"1",
    "null": b"null",
    "a byte order mark": b'\xef\xbb\xbf{"model":"m"}',
    "UTF-16": '{"model":"m"}'.encode("utf-16"),
    "something behind the object": b'{"model":"m"}EVIL',
    "a second object": b'{"model":"m"}{"model":"EVIL"}',
    "an object that ends too soon": b'{"model":"m"',
    "a trailing comma": b'{"model":"m",}',
    "single quotes": b"{'model':'EVIL'}",
    "100,000 arrays": b'{"model":"m","x":' + b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    # The rows below are JSON for some parsers and not for others; strictness makes gateway and worker see the same.
    "NaN": b'{"model":"m","temperature":NaN}',
    "Infinity": b'{"model":"m","temperature":-Infinity}',
    "a number beyond a double": b'{"model":"m","temperature":1e999}',
    "an integer of 400 digits": b'{"model":"m","seed":' + b"9" * 400 + b"}",
    "bytes that are not UTF-8": b'{"model":"m","x":"EVIL\xff"}',
    "half of a surrogate pair": b'{"model":"m","x":"\\ud800"}',
    "a control character in a string": b'{"model":"m","x":"a\x01"}',
    "a model that is a number": b'{"model":1}',
    "a model that is an object": b'{"model":{"name":"EVIL"}}',
}


@pytest.mark.parametrize("row", UNREADABLE)
async def test_a_body_is_refused_when_it_is_or_has(start, http, row):
    bench = await start()
    refusal = await bench.refuses(http.post(UNREADABLE[row]), 400, closes=False)
    assert refusal.json["error"]["type"] == "invalid_request_error"
    await bench.serves()


async def test_an_anthropic_client_gets_errors_in_its_own_shape(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post(b"[", path="/v1/messages"))
    refusal = (await client.receives()).json
    assert refusal["type"] == "error"
    assert refusal["error"]["type"] == "invalid_request_error"
    assert refusal["error"]["message"]


# The model.


async def test_the_model_chooses_the_fleet(start, http):
    bench = await two_fleets(start, http)
    assert (await relayed(bench, http, http.post(b'{"model":"a"}'), 0)).body == b'{"model":"a"}'
    assert (await relayed(bench, http, http.post(b'{"model":"b"}'), 1)).body == b'{"model":"b"}'


async def test_an_alias_is_rewritten_and_nothing_else(start, http):
    bench = await two_fleets(start, http)
    body = b'{ "x": {"model":"alias"},\t"model" : "alias" , "n": 1.0, "y":[{"model": "alias"}] }'
    request = await relayed(bench, http, http.post(body))
    assert request.body == body.replace(b'"model" : "alias"', b'"model" : "a"')


async def test_an_alias_is_found_in_any_spelling(start, http):
    bench = await two_fleets(start, http)
    for name in ('"org/a-\u00e9"', '"org\\/a-\\u00e9"', '"\\u006Frg/a-\\u00E9"'):
        request = await relayed(bench, http, http.post(b'{"model": %b}' % name.encode()))
        assert request.body == b'{"model": "a"}'


async def test_a_worker_may_call_the_model_otherwise(start, http):
    worker = http.ScriptedWorker()
    worker.cards = b'{"data":[{"id":"/models/m"}]}'
    await worker.start()
    bench = await start(workers=0, model={"aliases": ["alias"], "workers": [{"url": worker.url, "model": "/models/m"}]})
    bench.workers.append(worker)
    for name in (b"m", b"alias"):
        assert (await relayed(bench, http, http.post(b'{"model":"%b"}' % name))).json == {"model": "/models/m"}


async def test_an_unknown_model_is_not_found(start, http):
    bench = await start()
    refusal = await bench.refuses(http.post({"model": "EVIL"}), 404, closes=False)
    assert refusal.json["error"]["code"] == "model_not_found"
    assert refusal.json["error"]["param"] == "model"
    assert bench.fleet_workers[0].routable


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}'])
async def test_no_model_means_the_only_fleet_and_is_an_error_when_there_are_several(start, http, body):
    bench = await two_fleets(start, http)
    refusal = await bench.refuses(http.post(body), 400, closes=False)
    assert refusal.json["error"]["param"] == "model"


async def test_of_a_repeated_model_gateway_and_worker_take_the_last(start, http):
    """Python's json, pydantic and orjson all take the last: so both see the same, and nothing has to be refused."""
    bench = await two_fleets(start, http)
    body = b'{"model":"b","stream":true,"model":"alias","stream":false}'
    request = await relayed(bench, http, http.post(body), 0)
    assert json.loads(request.body)["model"] == "a"
    assert json.loads(request.body)["stream"] is False
    assert request.body == body.replace(b'"alias"', b'"a"')
    await bench.refuses(http.post(b'{"model":"a","model":"EVIL"}'), 404, closes=False)


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
KEYS = st.one_of(st.sampled_from(["model", 'a"model', "model\\", "Model", ""]), NAMES)


def spelled(draw, text):
    """`text` as a JSON string in which any character may be escaped."""
    pieces = []
    for character in text:
        units = character.encode("utf-16-be")
        escaped = "".join(
            f"\\u{units[i] << 8 | units[i + 1]:04{draw(st.sampled_from('xX'))}}" for i in range(0, len(units), 2)
        )
        pieces.append(escaped if draw(st.booleans()) else json.dumps(character, ensure_ascii=False)[1:-1])
    return '"' + "".join(pieces) + '"'


@st.composite
def documents(draw):
    """A JSON object with a top-level model, its text before and after that model's value, and the model."""
    old = draw(NAMES)
    values = st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**53), 2**53),
            st.floats(allow_nan=False, allow_infinity=False),
            NAMES,
            st.just(old),
            st.just(f'"model":"{old}"'),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYS, st.just("model")), inner, max_size=3)
        ),
        max_leaves=8,
    )
    space = st.sampled_from(["", " ", "\n\t"])

    def written(value):
        if isinstance(value, dict):
            inner = [
                f"{draw(space)}{spelled(draw, k)}{draw(space)}:{draw(space)}{written(v)}" for k, v in value.items()
            ]
            return "{" + ",".join(inner) + draw(space) + "}"
        if isinstance(value, list):
            return "[" + ",".join(written(v) for v in value) + "]"
        return spelled(draw, value) if isinstance(value, str) else json.dumps(value)

    members = [
        f"{spelled(draw, k)}:{draw(space)}{written(v)}" for k, v in draw(st.lists(st.tuples(KEYS, values), max_size=4))
    ]
    others = draw(st.lists(st.tuples(KEYS.filter(lambda k: k != "model"), values), max_size=4))
    behind = [f"{spelled(draw, k)}:{written(v)}" for k, v in others]
    head = draw(space) + "{" + ",".join([*members, f"{spelled(draw, 'model')}{draw(space)}:{draw(space)}"])
    tail = ",".join([draw(space), *behind]) + "}" + draw(space)
    return head.encode(), spelled(draw, old).encode(), tail.encode(), old


@given(documents(), NAMES)
def test_renaming_changes_the_top_level_model_and_no_other_byte(document, new):
    head, value, tail, old = document
    body = head + value + tail
    assert orjson.loads(body)["model"] == old
    changed = with_model(body, old, new)
    assert changed == (body if new == old else head + orjson.dumps(new) + tail)


async def test_renaming_costs_one_pass_however_often_the_body_repeats_the_member():
    """Trying one after the other would take 20,000 parses of this body: hours."""
    body = b'{"x":[' + b",".join([b'{"model":"alias"}'] * 20_000) + b'],"model":"alias","y":{"model":"alias"}}'
    assert with_model(body, "alias", "a") == body.replace(b'],"model":"alias"', b'],"model":"a"')


# Multipart.

BOUNDARY = "----boundary7MA4"
FILE = bytes(range(256)) * 40 + b"\r\n--" + BOUNDARY[:-1].encode() + b"X\r\n" + b'name="model"\r\n\r\nalias'


def part(name, value, extra=""):
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts, end=f"--{BOUNDARY}--\r\n"):
    return b"".join(parts) + end.encode()


def upload(http, body, kind=f"multipart/form-data; boundary={BOUNDARY}", path="/v1/audio/transcriptions"):
    return http.post(body, path=path, fields=f"Content-Type: {kind}\r\n")


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_an_audio_upload_goes_through_with_its_model_rewritten(start, http, path):
    bench = await two_fleets(start, http)
    body = form(part("file", FILE, '; filename="a.wav"'), part("model", b"MODEL"), part("language", b"de"))
    for name, worker in ((b"alias", 0), (b"a", 0), ("org/a-\u00e9".encode(), 0), (b"b", 1)):
        request = await relayed(bench, http, upload(http, body.replace(b"MODEL", name), path=path), worker)
        assert request.body == body.replace(b"MODEL", b"ab"[worker : worker + 1])
        assert request.get("content-type") == f"multipart/form-data; boundary={BOUNDARY}"


async def test_an_upload_without_model_goes_to_the_only_fleet(start, http):
    bench = await start()
    body = form(part("file", FILE, '; filename="a.wav"'))
    assert (await relayed(bench, http, upload(http, body))).body == body


async def test_of_a_repeated_model_field_the_last_counts_as_for_the_worker(start, http):
    bench = await two_fleets(start, http)
    body = form(part("model", b"b"), part("file", b"x", '; filename="a"'), part("model", b"alias"))
    request = await relayed(bench, http, upload(http, body), 0)
    assert request.body == form(part("model", b"b"), part("file", b"x", '; filename="a"'), part("model", b"a"))


FORMS = {
    "an unknown model": (form(part("model", b"EVIL")), 404),
    "a model of a megabyte": (form(part("model", b"a" * 1_000_000)), 404),
    "a model that is not UTF-8": (form(part("model", b"a\xff")), 404),
    "no model": (form(part("file", b"x")), 400),
    "an empty model behind a good one": (form(part("model", b"a"), part("model", b"")), 400),
    "a good model inside a file only": (form(part("file", FILE.replace(b"alias", b"a"), '; filename="a"')), 400),
    "no last boundary's beginning": (b"EVIL", 400),
    "a boundary of other bytes": (form(part("model", b"a")).replace(BOUNDARY.encode(), b"EVIL"), 400),
    "no end": (form(part("model", b"a"), part("model", b"a")).rpartition(b"--")[0][:-20], 400),
    "a header without colon": (f"--{BOUNDARY}\r\nEVIL\r\n\r\na\r\n--{BOUNDARY}--\r\n".encode(), 400),
    "3,000 parts": (form(*[part("x", b"")] * 3000, part("model", b"a")), 400),
    "an endless part header": (form(part("x" * 100_000, b"")), 400),
}


@pytest.mark.parametrize("row", FORMS)
async def test_no_worker_gets_a_form_with(start, http, row):
    body, status = FORMS[row]
    bench = await two_fleets(start, http)
    await bench.refuses(upload(http, body), status, closes=False)


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x",
        f"multipart/form-data; boundary={'x' * 300}",
        "",
    ],
)
async def test_a_form_needs_a_content_type_with_a_boundary(start, http, kind):
    bench = await start()
    await bench.refuses(upload(http, form(part("model", b"m")), kind), 400, closes=False)


@given(st.lists(st.tuples(st.sampled_from(["model", "file", "Model", "x"]), st.binary(max_size=40)), max_size=6))
def test_a_form_keeps_every_byte_but_the_last_models(parts):
    safe = [(name, value.replace(b"-", b"")) for name, value in parts]
    body = form(*[part(name, value) for name, value in safe])
    found = MultipartModel(f"multipart/form-data; boundary={BOUNDARY}".encode(), body)
    models = [index for index, (name, _) in enumerate(safe) if name == "model"]
    last = safe[models[-1]][1].decode("utf-8", "replace") if models else ""
    assert found.model == (last or None)
    if last:
        safe[models[-1]] = ("model", b"new")
        assert found.replaced("new") == form(*[part(name, value) for name, value in safe])
    else:
        assert found.replaced("new") == body


# Sizes.

LIMIT = 100_000


async def test_a_body_that_is_announced_too_long_is_refused_before_it_is_read(start, http):
    bench = await start()
    refusal = await bench.refuses(http.post(b"").replace(b"Length: 0", b"Length: 10737418240"), 413)
    assert refusal.json["error"]["type"] == "invalid_request_error"
    await bench.serves()


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_as_long_as_the_limit_goes_through_and_one_byte_more_does_not(start, http, framing):
    bench = await start(limits={"body": LIMIT})

    def sized(size):
        body = b'{"model":"m","x":"' + b"y" * (size - 20) + b'"}'
        assert len(body) == size
        if framing == "length":
            return http.post(body)
        pieces = b"".join(http.chunk(body[i : i + 7000]) for i in range(0, size, 7000))
        return (
            f"POST {http.CHAT} HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            + pieces
            + b"0\r\n\r\n"
        )

    assert len((await relayed(bench, http, sized(LIMIT))).body) == LIMIT
    await bench.refuses(sized(LIMIT + 1), 413)


async def test_an_endless_chunked_upload_is_refused_at_the_limit(start, http):
    bench = await start(limits={"body": LIMIT})
    client = await bench.client()
    await client.sends(f"POST {http.CHAT} HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    # A chunk that promises 2^62 bytes: nothing is set aside for it.
    await client.sends(b"4000000000000000\r\n" + b" " * (LIMIT + 1))
    assert (await client.receives()).status == 413
    assert bench.worker.connections == 0


async def test_a_large_body_streams_through_unchanged(start, http):
    bench = await start()
    body = orjson.dumps({"model": "m", "x": "0123456789abcdef" * (1 << 20)})
    client = await bench.client()
    sending = asyncio.gather(client.sends(http.post(body)))
    worker, request = await bench.worker.receives()
    await sending
    assert request.body == body
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200


async def test_a_long_answer_of_fixed_length_arrives_unchanged(start, http):
    bench = await start()
    body = bytes(range(256)) * 40_000
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    sending = asyncio.gather(worker.sends(http.answer(body)))
    assert (await client.receives()).body == body
    await sending
