"""Recorded answers, and how tests frame and cut them."""

import json
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def answers() -> dict[str, dict[str, Any]]:
    """Recorded answers by name; ``body`` is their bytes."""
    lines = (FIXTURES / "answers.jsonl").read_text().splitlines()
    found = {answer["name"]: answer for answer in map(json.loads, lines)}
    for answer in found.values():
        answer["body"] = answer["answer"].encode()
    return found


@pytest.fixture(scope="session")
def raw_chunks() -> list[bytes]:
    """The chunks of a recorded stream, each with its framing; the last chunk, which is empty, left out."""
    body = (FIXTURES / "stream_raw.http").read_bytes().partition(b"\r\n\r\n")[2]
    chunks = []
    while body:
        line, _, rest = body.partition(b"\r\n")
        size = int(line, 16)
        if size:
            chunks.append(body[: len(line) + 2 + size + 2])
        body = rest[size + 2 :]
    return chunks
