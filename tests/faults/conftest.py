"""The transcripts' gateway and words (`tests/http/conftest.py`), with workers that answer by themselves behind fault proxies."""

import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE.parents[1]):  # `faultproxy`, and `bench` with the clients of the long runs
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from faultproxy import NO_FAULTS, FaultProxy, Faults  # noqa: E402
from sturdy import SturdyWorker  # noqa: E402

_spec = importlib.util.spec_from_file_location("http_transcripts", _HERE.parent / "http" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
transcripts = importlib.util.module_from_spec(_spec)
sys.modules["http_transcripts"] = transcripts  # dataclasses look their module up
_spec.loader.exec_module(transcripts)

start = transcripts.start
http = transcripts.http


class Stage:
    """A gateway whose workers answer by themselves, each behind a proxy that can spoil it."""

    def __init__(self, bench: Any, workers: list[SturdyWorker], proxies: list[FaultProxy]) -> None:
        self.bench = bench
        self.workers = workers
        self.proxies = proxies

    def all_get(self, faults: Faults = NO_FAULTS, **changes: Any) -> None:
        """Set what is done to every worker's connections from now on."""
        for proxy in self.proxies:
            proxy.faults = replace(faults, **changes)


@pytest.fixture
async def stage(start: Any) -> AsyncIterator[Any]:
    """`await stage(workers=2, timeouts={...}, ...)`: see `Stage`; keywords as for `start`. With `direct` no proxies are between."""
    ending = contextlib.AsyncExitStack()

    async def begin(workers: int = 2, *, events: int = 5, direct: bool = False, **sections: Any) -> Stage:
        sturdy = [SturdyWorker(events) for _ in range(workers)]
        proxies = []
        for number, worker in enumerate(sturdy):
            await worker.start()
            ending.push_async_callback(worker.stop)
            proxies.append(proxy := FaultProxy(worker.port, seed=number))
            await proxy.start()
            ending.push_async_callback(proxy.stop)
        urls = [each.url for each in (sturdy if direct else proxies)]
        model = {"workers": [{"url": url, "driver": "vllm"} for url in urls]}
        return Stage(await start(workers=0, model=model, **sections), sturdy, proxies)

    yield begin
    await ending.aclose()


@pytest.fixture
def faults() -> Any:
    """The words of faults."""
    return SimpleNamespace(Faults=Faults, FaultProxy=FaultProxy, NONE=NO_FAULTS)
