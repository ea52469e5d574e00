"""Asks LMCache's coordinator about the chunks that a fleet's prompts are made of. In the background: no request waits for it."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import orjson
import structlog

from backends.hints.base import HintCall
from backends.hints.chunks import ALGORITHM, DEFAULT_CHUNK
from backends.hints.lmcache_coordinator import INSTANCES, LOOKUP, Instance, instances, placements
from gateway.fleet.asking import ask
from gateway.residency.calls import make
from gateway.residency.directory import Directory

if TYPE_CHECKING:
    import aiohttp

    from gateway.config.directory import L2
    from gateway.config.residency import WorkerHints
    from gateway.fleet.worker import Worker
    from gateway.prefix.events import Stored
    from gateway.prefix.index import PrefixIndex
    from gateway.prompt.blocks import Chain
    from gateway.prompt.prompt import Prompt

INTERVAL: Final = 0.5
"""Seconds between two rounds, unless a prompt comes."""
SOONEST: Final = 0.02
"""And at least: prompts that come at the same time are asked about together."""
MOST: Final = 512
"""Chunks of one question: it takes the coordinator 50 ms."""
TIMEOUT: Final = 3.0
DOUBT: Final = 10.0
"""Seconds without an answer after which nothing that was answered before is believed."""
PAUSE: Final = (1.0, 30.0)
"""Seconds until it is asked again after no answer: at first, and (doubling) at most."""
WHO: Final = 10.0
"""Seconds between two questions who has registered."""
PROMPTS: Final = 256
"""Prompts that wait for their names; of more the oldest are not named this time."""
PIECE: Final = 4096
"""Tokens that are named in one go: at most 0.5 ms."""
ANSWER: Final = 8 * 1024 * 1024
"""Bytes read of an answer: 310 for a chunk, and 8 for each of its tokens."""

_log = structlog.get_logger(__name__)


class DirectoryStatus(msgspec.Struct, frozen=True):
    """How well it goes.

    Attributes:
        fleet: name.
        url: of the coordinator.
        status: ``asking``, ``connecting``, ``away`` (nothing is believed) or ``unfit`` (its names can't be computed).
        reason: why, in words; empty while all is well.
        chunk: tokens in each chunk; None: not known yet.
        chunks: that are known by name.
        waiting: chunks to be asked about now.
        counters: see `DirectoryCounters` and `ChunkNames`.
        workers: by worker id, the directory's name of its server.
    """

    fleet: str
    url: str
    status: str
    reason: str
    chunk: int | None
    chunks: int
    waiting: int
    counters: dict[str, int]
    workers: dict[str, str]


class DirectoryFeed:
    """One fleet's. `run` is its task; `saw` and `stored` are called by whoever sees prompts and events.

    Attributes:
        fleet: name.
        section: what is configured.
        directory: what is known; None as long as the chunk size is not.
    """

    def __init__(
        self,
        fleet: str,
        section: "L2",
        index: "PrefixIndex",
        session: "aiohttp.ClientSession",
        clock: Callable[[], float],
        names: Callable[[], Mapping[str, Sequence[str]]],
    ) -> None:
        """Nothing is asked before `run`.

        Args:
            fleet: name.
            section: what is configured.
            index: where knowledge goes.
            session: as of `gateway.fleet.asking.open_session`; not closed here.
            clock: monotonic seconds.
            names: under which names each worker stands in `index`.
        """
        self.fleet = fleet
        self.section = section
        self.directory: Directory | None = None
        self.workers: Sequence[tuple[Worker, WorkerHints]] = ()
        self._index = index
        self._session = session
        self._clock = clock
        self._names = names
        self._url = section.url.rstrip("/")
        self._headers = {"authorization": f"Bearer {section.api_key}"} if section.api_key else {}
        self._prompts: deque[tuple[Prompt, Mapping[int, Chain], str | None]] = deque(maxlen=PROMPTS)
        self._wake = asyncio.Event()
        self._worker_of: dict[str, str] = {}
        self._who_at = -WHO
        self._answered_at: float | None = None
        self._status, self._reason = "connecting", ""
        self._allowed = float(MOST)
        self._allowed_at = clock()

    # -- what others tell -------------------------------------------------------------------------------------------

    def saw(self, prompt: "Prompt", chains: "Mapping[int, Chain]", salt: str | None) -> None:
        """A prompt has come. Costs next to nothing here: the rest is done by `run`."""
        self._prompts.append((prompt, chains, salt))
        self._wake.set()

    def stored(self, event: "Stored", ours: Sequence[int], block_size: int) -> None:
        """A worker has stored chunks in its l1."""
        if self.directory is not None:
            self.directory.names.stored(event, ours, block_size)

    def missing(self, chains: "Mapping[int, Chain]", tokens: int) -> None:
        """A worker did not load what storage was said to have of a prompt, from this token on."""
        if self.directory is not None:
            self.directory.missing(chains, tokens, self._clock())

    # -- its task ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask, until cancelled."""
        first, longest = PAUSE
        pause = first
        try:
            while True:
                if await self._round():
                    pause = first
                    await self._rest()
                else:
                    await asyncio.sleep(pause)
                    pause = min(longest, pause * 2)
        finally:
            self._index.watchers.pop(self.fleet, None)
            if self.directory is not None:
                self.directory.leave()

    def status(self) -> DirectoryStatus:
        """For the admin API."""
        directory = self.directory
        return DirectoryStatus(
            self.fleet,
            self._url,
            self._status,
            self._reason,
            None if directory is None else directory.chunk,
            0 if directory is None else len(directory.names),
            0 if directory is None else directory.waiting,
            {} if directory is None else _counts(directory),
            {worker: instance for instance, worker in self._worker_of.items()},
        )

    def degraded(self) -> list[str]:
        """What works less well than it should, in sentences."""
        if self._status in ("away", "unfit"):
            return [f"LMCache's directory at {self._url} is not used: {self._reason}"]
        return []

    async def _rest(self) -> None:
        """Until the next round: sooner when a prompt has come."""
        try:
            async with asyncio.timeout(INTERVAL):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()
        await asyncio.sleep(SOONEST)

    async def _round(self) -> bool:
        """One question, with what must be known before it; False: nobody answered."""
        now = self._clock()
        if now - self._who_at >= WHO and not await self._who(now):
            return self._doubt("no list of its servers")
        directory = self.directory
        if directory is None:
            return self._status != "unfit"
        directory.workers(self._names(), self._worker_of)
        await self._name(directory)
        rate = self.section.keys_per_second
        self._allowed = min(MOST, self._allowed + rate * (now - self._allowed_at))
        self._allowed_at = now
        wanted = directory.due(now, int(self._allowed / self.section.world_size))
        if not wanted:
            return True
        self._allowed -= len(wanted) * self.section.world_size
        call = HintCall("POST", LOOKUP, {"keys": directory.keys(wanted)}, server="hints")
        said = await make(self._session, call, self._url, self._headers, TIMEOUT, most=ANSWER)
        now = self._clock()
        answers = None if said.status != 200 else placements(said.body)
        if answers is None:
            directory.again(wanted, now)
            return self._doubt(said.error or f"{LOOKUP}: status {said.status}")
        directory.learned(wanted, answers, now)
        self._well(now)
        if directory.waiting and self._allowed >= self.section.world_size:
            self._wake.set()
        return True

    async def _name(self, directory: Directory) -> None:
        """Give names to the chunks of prompts that have come."""
        while self._prompts:
            prompt, chains, salt = self._prompts.popleft()
            first, total = directory.names.known(chains)
            directory.touch(chains, self._clock())
            if first == total:
                continue
            ids = prompt.ids
            step = max(1, PIECE // directory.chunk)
            for start in range(first, total, step):
                directory.names.name(ids, start, min(total, start + step), chains, salt)
                await asyncio.sleep(0)

    # -- who is there -----------------------------------------------------------------------------------------------

    async def _who(self, now: float) -> bool:
        """Which server is which worker's; and, once, how they cut prompts and what they call the model."""
        said = await make(self._session, HintCall("GET", INSTANCES), self._url, self._headers, TIMEOUT)
        there = instances(said.body) if said.status == 200 else None
        if there is None:
            return False
        self._who_at = now
        self._worker_of = _match(there, self.workers)
        if self.directory is None:
            await self._fit(there)
        self._well(self._clock())
        return True

    async def _fit(self, there: Sequence[Instance]) -> None:
        """Find out what must be known to compute names."""
        chunk, model = self.section.chunk, self.section.model
        if chunk is None:
            chunk, algorithm = await self._cut(there)
            if algorithm not in (None, ALGORITHM):
                self._status, self._reason = "unfit", f"its servers name chunks by {algorithm}"
                return
        if model is None:
            model = await self._root()
        if chunk is None or model is None:
            self._who_at = self._clock() - WHO + 1.0  # again in a second: nobody has registered, or is ready
            return
        section = self.section
        self.directory = Directory(
            self.fleet, self._index, model=model, chunk=chunk, world_size=section.world_size, shared=section.shared
        )
        self._index.watchers[self.fleet] = self
        _log.info("asking about l2", model=self.fleet, url=self._url, chunk=chunk, lmcache_model=model)

    async def _cut(self, there: Sequence[Instance]) -> tuple[int | None, str | None]:
        """The chunk size of its servers, and how they make names; the size is LMCache's default where none can be reached."""
        for each in there:
            host = f"[{each.ip}]" if ":" in each.ip else each.ip
            said = await make(self._session, HintCall("GET", "/status"), f"http://{host}:{each.http_port}", {}, TIMEOUT)
            try:
                found = orjson.loads(said.body) if said.status == 200 else {}
            except orjson.JSONDecodeError:
                continue
            if isinstance(found, dict) and type(chunk := found.get("chunk_size")) is int and chunk > 0:
                algorithm = found.get("hash_algorithm")
                return chunk, algorithm if isinstance(algorithm, str) else None
        return (DEFAULT_CHUNK if there else None), None

    async def _root(self) -> str | None:
        """What the engine was started with, as the first worker that is ready says."""
        for worker, _ in self.workers:
            if not worker.routable:
                continue
            answer = await ask(self._session, worker, "/v1/models", TIMEOUT)
            if answer.status != 200:
                continue
            try:
                cards: Any = orjson.loads(answer.body)
                roots = [card["root"] for card in cards["data"] if not card.get("parent")]
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
                continue
            if roots and isinstance(roots[0], str):
                return roots[0]
        return None

    def _well(self, now: float) -> None:
        self._answered_at = now
        if self._status in ("connecting", "away"):
            if self._status == "away":
                _log.info("the directory of l2 answers again", model=self.fleet, url=self._url)
            self._status, self._reason = "asking" if self.directory is not None else "connecting", ""

    def _doubt(self, reason: str) -> bool:
        """There was no answer."""
        since = self._answered_at
        if self._status != "away" and (since is None or self._clock() - since >= DOUBT):
            self._status, self._reason = "away", reason
            _log.warning("the directory of l2 does not answer", model=self.fleet, url=self._url, reason=reason)
            if self.directory is not None:
                self.directory.forget()
        return False


def _counts(directory: Directory) -> dict[str, int]:
    own = {name: getattr(directory.counters, name) for name in directory.counters.__slots__}
    return {"named": directory.names.named, "forgotten": directory.names.forgotten, **own}


def _match(there: Sequence[Instance], workers: "Sequence[tuple[Worker, WorkerHints]]") -> dict[str, str]:
    """Workers' ids by their instances: as configured, else by the address of the hint server."""
    found: dict[str, str] = {}
    by_address = {(each.ip, each.http_port): each.instance_id for each in there}
    names = {each.instance_id for each in there}
    for worker, hints in workers:
        if hints.instance is not None:
            if hints.instance in names:
                found[hints.instance] = worker.id
        elif hints.url is not None:
            parts = urlsplit(hints.url)
            host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
            instance = by_address.get((host, parts.port or (443 if parts.scheme == "https" else 80)))
            if instance is not None:
                found[instance] = worker.id
    return found
