"""Workers with round numbers, and requests whose block keys really are chained."""

from dataclasses import dataclass, replace

import pytest

from simulator.engine import Cleared, Engine, EngineRequest, Profile, Removed, Stored

NEURON = Profile(
    name="neuron-test",
    block_size=32,
    kv_blocks=4096,
    slots=4,
    max_model_len=32_768,
    prefill="exclusive",
    admission="reserve",
    prefill_rate=10_000.0,
    overhead=0.1,
    prefill_buckets=(512, 1024, 2048, 4096, 8192),
    itl_base=0.016,
    itl_per_stream=0.004,
)
GPU = Profile(
    name="gpu-test",
    block_size=16,
    kv_blocks=1000,
    slots=16,
    max_model_len=8192,
    prefill="chunked",
    admission="paged",
    order="priority",
    max_num_batched_tokens=1000,
    prefill_rate=10_000.0,
    overhead=0.05,
    itl_base=0.018,
    itl_per_stream=0.002,
)


@pytest.fixture(scope="session")
def neuron():
    """One prefill at a time, 10,000 tokens/s + 100 ms, 20 ms per token alone and 4 ms more for each further stream."""
    return lambda **changes: replace(NEURON, **changes)


@pytest.fixture(scope="session")
def gpu():
    """1,000 tokens per step, 10,000 tokens/s + 50 ms, 20 ms per token alone and 2 ms more for each further stream."""
    return lambda **changes: replace(GPU, **changes)


@pytest.fixture(scope="session")
def ask():
    """Make a request: its first `shared` blocks are those of `family`, the rest are its own.

    With `after`, an earlier request, its first `shared` blocks are that one's.
    """

    def make(profile, name, prompt, output=1, *, family=None, shared=0, after=None, **fields):
        count = (prompt + output) // profile.block_size
        stem = [(family, index) for index in range(shared)] if after is None else list(after.blocks[:shared])
        keys = (stem + [(name, index) for index in range(len(stem), count)])[:count]
        return EngineRequest(name, prompt, output, keys, **fields)

    return make


@dataclass
class Known:
    """Which keys each tier holds, from nothing but the events; each event is checked as it comes."""

    engine: Engine
    parents: dict
    tiers: dict

    def see(self, outputs, requests=()):
        by_id = {request.id: request for request in requests}
        for output in outputs:
            if isinstance(output, Stored):
                held = self.tiers[output.tier]
                assert not held & set(output.keys), "stored twice"
                if output.request_id is None:
                    assert output.first_block is None
                else:
                    blocks = by_id[output.request_id].blocks
                    last = output.first_block + len(output.keys)
                    assert tuple(blocks[output.first_block : last]) == output.keys
                    assert output.parent == (blocks[output.first_block - 1] if output.first_block else None)
                if output.tier == "device":
                    assert output.parent is None or output.parent in held, "a child without its parent"
                for key, parent in zip(output.keys, (output.parent, *output.keys), strict=False):
                    assert self.parents.setdefault(key, parent) == parent
                held |= set(output.keys)
            elif isinstance(output, Removed):
                held = self.tiers[output.tier]
                for key in output.keys:
                    held.remove(key)
                    if output.tier == "device":
                        assert all(self.parents[other] != key for other in held), "a parent before its child"
            elif isinstance(output, Cleared):
                self.tiers["device"].clear()

    def check(self):
        memory = self.engine.memory
        assert memory.device.keys == self.tiers["device"]
        assert memory.l1.keys == self.tiers["l1"]
        assert memory.l2.keys == self.tiers["l2"]


@pytest.fixture(scope="session")
def known():
    return lambda engine: Known(engine, {}, {"device": set(), "l1": set(), "l2": set()})


@pytest.fixture(scope="session")
def only():
    """The outputs of one type, of one request where a name is given."""

    def pick(outputs, kind, name=None):
        found = [output for output in outputs if isinstance(output, kind)]
        return found if name is None else [output for output in found if output.request_id == name]

    return pick
