"""Good inputs for each fuzz target."""

from pathlib import Path

import msgspec
import orjson

ROOT = Path(__file__).parents[2]
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def line(document):
    return b"data: " + orjson.dumps(document) + b"\n\n"


STREAM = (
    line({"id": "c", "choices": [{"index": 0, "delta": {"content": 'say "usage": {'}}]})
    + b": a comment\n\n"
    + line({"id": "c", "choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)
MESSAGES = line({"type": "message_start", "message": {"usage": {"input_tokens": 3}}}) + line(
    {"type": "message_delta", "usage": {"output_tokens": 5}}
)
STORED = ["BlockStored", [11, 12], 10, list(range(32)), 16, None, "GPU"]
EVENTS = [
    STORED,
    ["BlockRemoved", [11], "CPU"],
    ["AllBlocksCleared"],
    {"type": "BlockRemoved", "block_hashes": [b"x" * 32]},
]
SEEDS = {
    "sse": [b"\x05" + STREAM, b"\x10" + STREAM.replace(b"\n", b"\r\n"), b"\x20" + MESSAGES],
    "body": [
        b'{"messages":[{"role":"user","content":"hi"}],"model":"m","n":1.0}',
        b'{"\\u006dodel" : "a\\/b", "x":{"model":"a/b"}}',
        (
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\n'
            b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nbytes\r\n--x--\r\n'
        ),
        # Breaks off in a second `model`: once the end of the first was taken for the end of this one.
        (
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\n'
            b'Content-Disposition: form-data; name="model"\r\n\r\nm\r\n--x\r;--'
        ),
    ],
    "events": [msgspec.msgpack.encode([1.5, EVENTS, 0]), msgspec.msgpack.encode([1.5, [STORED] * 3])],
    "yaml": [
        (ROOT / "config.yaml").read_bytes(),
        b"models:\n  - name: m\n    workers: [{url: 'http://w:1'}, &w {url: http://w:2}, *w]\n",
    ],
}
