"""Each fuzz target on good inputs, on good ones that were bent, and on anything."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from seeds import SEEDS
from targets import TARGETS

BITS = {
    "sse": [b"\n", b"\r\n", b'"usage":{', b"data: ", b"[DONE]", b'"choices":[]', b"\\", b'"', b"}", b"\xff"],
    "body": [b'"model"', b":", b'"', b"\\u00", b"\\", b"{", b"}", b",", b"[" * 1100, b"\xff", b"--x", b"\r\n", b"NaN", b"1e999"],
    "events": [b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x9f", b"\x8f", b"\xcf" + b"\xff" * 8, b"\xa9", b"\xc6\xff\xff\xff\xff"],
    "yaml": [b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"\t", b"${X}", b"? ", b"--- ", b"[", b"{", b"\0", b"9" * 400],
}  # fmt: skip


@st.composite
def bent(draw, name):
    """A good input with up to five random changes."""
    data = draw(st.sampled_from(SEEDS[name]))
    for _ in range(draw(st.integers(0, 5))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 12))
        piece = draw(st.one_of(st.sampled_from(BITS[name]), st.binary(max_size=6), st.just(data[at : at + length] * 2)))
        data = data[:at] + piece + data[at + length :]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_good_inputs(name):
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_the_invariant_holds_for_bent_inputs_and_for_any_bytes(name):
    @settings(max_examples=30 if name == "yaml" else 250, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(bent(name), bent(name), bent(name), st.binary(max_size=400)))
    def holds(data):
        TARGETS[name](data)

    holds()
