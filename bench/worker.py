"""The cheapest OpenAI-shaped worker there can be, so that it is never what a benchmark measures.

No cache and no timing model: that is `simulator`. Run as ``python -m bench.worker PORT [PORT ...]``. Streams have `--tokens` chunks; with
`--interval` they are that many seconds apart and each carries the time at which it was written.
"""

import argparse
import asyncio
import time
from typing import Final

import httptools
import uvloop

_EVENT: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
# Without `usage`: counts that are not the prompt's would prove to the gateway that its tokenizer is another one.
_ANSWER: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'
)
_MODELS: Final = (
    b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"bench","max_model_len":131072}]}'
)
_INFO: Final = b'{"model_path":"m","tokenizer_path":"m","is_generation":true,"served_model_name":"m"}'
STAMP: Final = b"@@%d;"
"""What a stamped chunk says: nanoseconds of the monotonic clock when it was written."""


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN: Final = _chunk(_EVENT % b" token")


class _Connection(asyncio.Protocol):
    def __init__(self, tokens: int, interval: float, delay: float) -> None:
        self._tokens = tokens
        self._delay = delay
        self._interval = interval
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._url = b""
        self._streamed = False
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url = self._url
        if url.startswith((b"/v1/chat", b"/v1/completions", b"/generate")):
            stream = b'"stream":true' in self._body[-1] or b'"stream":true' in b"".join(self._body)
            if self._delay:
                asyncio.get_running_loop().call_later(self._delay, self._begin, stream)
            else:
                self._begin(stream)
        elif url.startswith(b"/v1/models"):
            self._transport.write(_answer(_MODELS))
        elif b"info" in url:
            self._transport.write(_answer(_INFO))
        else:
            self._transport.write(_answer(b"{}"))

    def _begin(self, stream: bool) -> None:
        if self._transport.is_closing():
            return
        if stream:
            self._task = asyncio.get_running_loop().create_task(self._stream())
        else:
            self._transport.write(_answer(_ANSWER))

    async def _stream(self) -> None:
        write = self._transport.write
        write(_STREAM)
        for _ in range(self._tokens):
            await asyncio.sleep(self._interval)
            write(_chunk(_EVENT % (STAMP % time.monotonic_ns())) if self._interval else _TOKEN)
        write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for port in arguments.ports:
        await loop.create_server(
            lambda: _Connection(arguments.tokens, arguments.interval, arguments.delay), "127.0.0.1", port, backlog=4096
        )
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=64, help="chunks of a stream (default: 64)")
    parser.add_argument(
        "--interval", type=float, default=0.0, help="seconds between them (default: as fast as it goes)"
    )
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before an answer begins (default: none)")
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
