"""What LMCache's servers said, and prompts and hints to say to them."""

import gzip
import json
from array import array
from pathlib import Path

import pytest

from backends.hints.model import Action, Hint, Subject
from gateway.prompt.blocks import Hasher

FIXTURES = Path(__file__).parent / "fixtures"


def exchanges(name):
    """The recorded exchanges of one file."""
    return json.loads(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))


def description(name):
    """A server's OpenAPI description, its routes only."""
    return (FIXTURES / f"{name}.openapi.json").read_bytes()


def subject(tokens, *, salt=None, lora=None, session=""):
    ids = array("I", tokens)
    chains = Hasher(1).chains(0, ids, [32])
    return Subject("m", len(ids), {32: chains[32].hashes}, lambda: ids, salt, lora, session)


def hint(action, about, **fields):
    return Hint(
        id=1, action=Action(action), rule="test", worker="127.0.0.1:8000", subject=about,
        **{"stop": about.tokens, **fields},
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_subject():
    """`subject(tokens, salt=..., lora=...)`."""
    return subject


@pytest.fixture(scope="session")
def make_hint():
    """`hint(action, about, start=..., stop=..., source=..., target=...)`, about the whole prompt unless told otherwise."""
    return hint
