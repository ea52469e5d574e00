"""Small workloads and fleets with round numbers."""

from dataclasses import dataclass, field, replace

import pytest

from backends.profiles import Profile
from simulator.fleet import FleetOptions
from simulator.workloads.workload import Workload, WorkRequest

WORKER = Profile(
    name="test",
    block_size=100,
    kv_blocks=1000,
    slots=64,
    max_model_len=100_000,
    prefill="exclusive",
    admission="paged",
    prefill_rate=1000.0,
    overhead=0.0,
    itl_base=0.01,
)


@pytest.fixture(scope="session")
def fleet():
    """1,000 tokens/s, 10 ms per output token, 1,000 blocks of 100 tokens; fields of the worker or of the fleet may differ."""

    def make(**changes):
        own = {name: changes.pop(name) for name in tuple(changes) if name in FleetOptions.__dataclass_fields__}
        own.setdefault("profile", WORKER)
        return FleetOptions(**own | {"profile": replace(own["profile"], **changes)})

    return make


@dataclass
class Script:
    """A workload written down request by request."""

    run_tokens: int = 100
    requests: list = field(default_factory=list)

    def ask(self, time, blocks, output=1, *, tokens=None, **fields):
        """A request for whole runs (or for `tokens`, with the last run short); ids count up."""
        name = f"q{len(self.requests)}"
        fields.setdefault("session", name)
        self.requests.append(
            WorkRequest(
                id=name,
                time=time,
                prompt_tokens=tokens or len(blocks) * self.run_tokens,
                output_tokens=output,
                blocks=list(blocks),
                **fields,
            )
        )
        return name

    @property
    def workload(self):
        work = Workload("script", self.run_tokens, sorted(self.requests, key=lambda request: request.time))
        work.validate()
        return work


@pytest.fixture
def script():
    return Script()


@pytest.fixture(scope="session")
def new_script():
    return Script
