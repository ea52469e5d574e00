import base64
import gzip
import json
from pathlib import Path

import pytest

from gateway.prefix.index import PrefixIndex
from gateway.prefix.sequence import Message
from gateway.prompt.blocks import Hasher

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def hasher():
    return Hasher(seed=20261201)


@pytest.fixture
def index(hasher):
    return PrefixIndex(hasher)


@pytest.fixture(scope="session")
def recording():
    """Reads a recording: its messages by number, and its exchanges in order."""

    def read(name):
        def lines(kind):
            with gzip.open(FIXTURES / f"{name}_{kind}.jsonl.gz", "rt") as file:
                return [json.loads(line) for line in file]

        messages = [Message(row["seq"], base64.b64decode(row["payload_b64"])) for row in lines("kv_events")]
        return {message.seq: message for message in messages}, lines("exchanges")

    return read
