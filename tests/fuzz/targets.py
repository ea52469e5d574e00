"""What is fuzzed: one function of bytes for each reader of foreign bytes. Each docstring is the invariant; breaking it is an `AssertionError`,
and any other exception that gets out breaks it too.

The suite feeds them with hypothesis (`test_targets.py`); with atheris coverage leads the way, for as long as one likes (`coverage_guided.py`).
"""

from collections.abc import Callable
from typing import Final, TypeVar

import orjson

from gateway.config.load import loads
from gateway.config.problems import ConfigError
from gateway.errors import GatewayError
from gateway.http.body import MultipartModel, parse_json, requested_model, with_model
from gateway.http.routes import Dialect
from gateway.http.tail import Tail
from gateway.http.usage import read_usage
from gateway.http.usage_event import UsageStripper
from gateway.prefix.events import decode
from gateway.prefix.index import PrefixIndex
from gateway.prompt.blocks import Hasher

T = TypeVar("T")


def cuts(data: bytes) -> tuple[bytes, list[bytes]]:
    """(all, pieces): the first byte says where the rest is cut, so that a fuzzer can move the cuts."""
    step, rest = (data[0] % 40 + 1, data[1:]) if data else (1, b"")
    return rest, [rest[start : start + step] for start in range(0, len(rest), step)]


def sse(data: bytes) -> None:
    """Whatever a worker streams, in whatever cuts: the stripper loses nothing but usage events, what it lets through does not depend on the cuts,
    the tail keeps the end, and usage is read or not there.
    """
    whole, pieces = cuts(data)
    stripper, at_once = UsageStripper(), UsageStripper()
    passed = b"".join(map(stripper.body, pieces)) + stripper.release()
    assert passed == at_once.body(whole) + at_once.release()
    assert stripper.removed == at_once.removed
    assert len(passed) <= len(whole)
    assert passed == whole or b'"usage"' in whole
    tail = Tail()
    for piece in pieces:
        tail.add_body(piece)
    last = tail.last()
    assert whole.endswith(last)
    assert len(last) >= min(len(whole), 4096)
    for dialect in Dialect:
        for stream in (True, False):
            usage = read_usage(last, dialect, stream=stream, first=tail.first())
            assert usage is None or usage.prompt_tokens >= 0


def _or_refusal(read: Callable[[], T]) -> T | None:
    """What `read` gives, or None when it refuses with status 400."""
    status = 0
    try:
        return read()
    except GatewayError as error:
        status = error.status
    assert status == 400
    return None


def body(data: bytes) -> None:
    """Whatever a client sends as a body: an object, or a `GatewayError` of status 400 without a byte of it. Renaming its model changes what the
    worker reads as the model, and nothing else.
    """
    parsed = _or_refusal(lambda: parse_json(data))
    model = _or_refusal(lambda: requested_model(parsed)) if parsed is not None else None
    if model is not None:
        renamed = with_model(data, model, "other/model")
        assert orjson.loads(renamed) == {**parsed, "model": "other/model"}
    form = _or_refusal(lambda: MultipartModel(b"multipart/form-data; boundary=x", data))
    if form is not None and form.model is not None:
        assert MultipartModel(b"multipart/form-data; boundary=x", form.replaced("other")).model == "other"


def events(data: bytes) -> None:
    """Whatever a worker publishes: a batch in which what made no sense is counted; it can be applied, and the map stays within its budget."""
    batch = decode(data)
    index = PrefixIndex(Hasher(1))
    mirror = index.follow("w", "m")
    mirror.apply(batch, 0.0)
    for prefixes in index.maps.values():
        assert prefixes.bytes <= prefixes.budget


def yaml(data: bytes) -> None:
    """Whatever stands in a configuration file: a `Config`, or a `ConfigError` whose every problem has a place in the text."""
    text = data.decode("utf-8", "replace")
    refusal = None
    try:
        loads(text, environ={})
    except ConfigError as error:
        refusal = error
    if refusal is not None:
        assert refusal.problems
        for problem in refusal.problems:
            assert str(problem)
            assert 0 <= problem.mark.line <= len(text.splitlines()) + 1


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {"sse": sse, "body": body, "events": events, "yaml": yaml}
