"""What reading, asking for and taking out usage costs. Run as ``python -m bench.usage``.

CPU time (`time.process_time`) per call, the least of several rounds, the loop itself taken off: other programs on the machine make a round
slower, never faster. The streamed chunk is one that vLLM 0.32 wrote, 226 bytes with its framing.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import orjson

from gateway.http.body import parse_json
from gateway.http.routes import Dialect
from gateway.http.splice import with_include_usage, with_token_ids
from gateway.http.tail import Tail
from gateway.http.usage import read_usage
from gateway.http.usage_event import UsageStripper

ROUNDS: Final = 40
HEAD: Final = b'data: {"id":"chatcmpl-a89b6218c2091d7c","object":"chat.completion.chunk","created":1796097539,"model":"m","choices":['
TOKEN: Final = (
    HEAD + b'{"index":0,"delta":{"content":"\\n"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
USAGE: Final = (
    HEAD
    + b'],"usage":{"prompt_tokens":9,"total_tokens":15,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":0,'
    b'"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0-1965624b"}\n\n'
)
DONE: Final = b"data: [DONE]\n\n"
OTHER_END: Final = TOKEN.replace(b"]}\n\n", b'],"object":"chat.completion.chunk"}\n\n')
TARGETS_NS: Final = {"Tail.add_chunks": 60, "UsageStripper.chunks, a token's chunk": 150}
"""What the project set itself, in nanoseconds."""


def framed(*events: bytes) -> bytes:
    """Each event in a chunk of its own."""
    return b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])


def cost_ns(work: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    """Nanoseconds of CPU per call."""
    best = empty = float("inf")
    turns: Iterable[int] = range(calls)
    for _ in range(ROUNDS):
        started = time.process_time()
        if len(arguments) == 1:
            (only,) = arguments
            for _turn in turns:
                work(only)
        else:
            for _turn in turns:
                work(*arguments)
        best = min(best, time.process_time() - started)
        started = time.process_time()
        for _turn in turns:
            pass
        empty = min(empty, time.process_time() - started)
    return (best - empty) / calls * 1e9


def chat_body(size: int, **members: Any) -> bytes:
    """A streamed chat request of about `size` bytes, most of it program text."""
    text = 'def work(item):\n    return {"item": item, "list": [1, 2, 3]}\n'
    messages = [{"role": "user", "content": text * 10} for _ in range(size // (len(text) * 10))]
    return orjson.dumps({"model": "m", "stream": True, "messages": messages, **members})


def end_of_stream(dialect: Dialect) -> bytes:
    """The last 8 KiB of an answer's stream."""
    if dialect is Dialect.OPENAI:
        return (TOKEN * 40 + USAGE + DONE)[-8192:]
    usage = {"input_tokens": 2, "output_tokens": 5, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 0}
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": " word"}, "index": 0}
    last = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    tokens = b"event: content_block_delta\ndata: " + orjson.dumps(delta) + b"\n\n"
    return (tokens * 80 + b"event: message_delta\ndata: " + orjson.dumps(last) + b"\n\n")[-8192:]


def stripped_ending(*reads: bytes) -> None:
    """The end of a stream that loses its usage event."""
    stripper = UsageStripper()
    for read in reads:
        stripper.chunks(read)


def rows() -> Iterable[tuple[str, float]]:
    """Names and nanoseconds."""
    chunk = framed(TOKEN)
    yield "a call that does nothing", cost_ns(lambda _data: None, [chunk], 20_000)
    tail = Tail()
    yield "Tail.add_chunks", cost_ns(tail.add_chunks, [chunk], 20_000)
    yield "Tail.add_body", cost_ns(tail.add_body, [TOKEN], 20_000)
    yield "Tail.last after a long stream", cost_ns(tail.last, [], 500)
    stripper = UsageStripper()
    yield "UsageStripper.chunks, a token's chunk", cost_ns(stripper.chunks, [chunk], 20_000)
    yield "UsageStripper.chunks, eight tokens' chunks in one read", cost_ns(stripper.chunks, [chunk * 8], 20_000)
    yield "UsageStripper.chunks, a chunk with another end", cost_ns(stripper.chunks, [framed(OTHER_END)], 5_000)
    yield "UsageStripper.body, a token's event", cost_ns(stripper.body, [TOKEN], 20_000)
    yield (
        "UsageStripper: made, a token, usage and [DONE] in reads of their own",
        cost_ns(stripped_ending, [chunk, framed(USAGE), framed(DONE)], 1_000),
    )
    for dialect in (Dialect.OPENAI, Dialect.ANTHROPIC):
        last = end_of_stream(dialect)
        yield (
            f"read_usage, 8 KiB of a stream ({dialect.value})",
            cost_ns(lambda data, dialect=dialect: read_usage(data, dialect, stream=True), [last], 500),
        )
    without = (TOKEN * 40 + DONE)[-8192:]
    yield (
        "read_usage, 8 KiB of a stream without usage",
        cost_ns(lambda data: read_usage(data, Dialect.OPENAI, stream=True), [without], 500),
    )
    for size in (2_000, 400_000):
        name = f"{size // 1000} KB"
        body = chat_body(size)
        yield f"with_include_usage, {name}, no options", cost_ns(with_include_usage, [body, parse_json(body)], 50)
        refused = chat_body(size, stream_options={"include_usage": False})
        yield (
            f"with_include_usage, {name}, false replaced",
            cost_ns(with_include_usage, [refused, parse_json(refused)], 10),
        )
        ids = orjson.dumps(list(range(100_000, 100_000 + size // 4)))
        yield f"with_token_ids, {name}, {size // 4:,} ids", cost_ns(with_token_ids, [body, parse_json(body), ids], 50)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="bench.usage", description=__doc__).parse_args()
    for name, nanoseconds in rows():
        target = TARGETS_NS.get(name)
        verdict = "" if target is None else f"  (<= {target}: {'met' if nanoseconds <= target else 'MISSED'})"
        print(f"{name:<72}{nanoseconds:>12,.0f} ns{verdict}", flush=True)


if __name__ == "__main__":
    main()
