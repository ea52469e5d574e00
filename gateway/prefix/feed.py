"""The feeds of all workers: one owner for every socket, task and tick that keep the prefix index true.

There are three kinds of knowledge, and each match says which it is: ``event`` (the worker said so), ``expected`` (we sent it
there a moment ago) and ``history`` (the worker says nothing; this is what a cache of its size would hold of what it was sent).
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import zmq

from gateway.fleet.fleet import Fleets
from gateway.prefix.feed_status import FeedStatus, sentences
from gateway.prefix.pump import Pump
from gateway.prefix.worker_feed import Parts, WorkerFeed
from gateway.tasks import TaskGroup
from policies.base import NO_MATCH, Match

if TYPE_CHECKING:
    import aiohttp

    from gateway.config.schema import Worker as WorkerSection
    from gateway.fleet.worker import Worker
    from gateway.prefix.index import PrefixIndex
    from gateway.prefix.map import Expectation
    from gateway.prompt.blocks import Chain

TICK = 0.25
"""Seconds between two looks at time limits, states and expired holdings."""
SWEEP = 2000
"""Blocks looked at per tick to clear up after workers that were forgotten; about 0.3 ms."""
MAX_SOCKETS = 65_536
"""ZMQ's own limit is 1,023, enough for 300 workers."""


class Feeds:
    """Keeps a `PrefixIndex` true to the workers of a `Fleets`, from `start` to `stop`. Needs to be told of reloads by `update`.

    Asks and is asked like the index itself (`block_sizes`, `match`, `sent`), but speaks of workers where that knows
    data-parallel ranks.

    Attributes:
        index: what is known.
    """

    def __init__(
        self,
        index: "PrefixIndex",
        fleets: Fleets,
        session: "aiohttp.ClientSession",
        *,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Nothing is opened before `start`. Must be built in a running loop.

        Args:
            index: filled here and by `sent`.
            fleets: whose workers to follow.
            session: for questions; not closed here. See `gateway.fleet.asking.open_session`.
            clock: monotonic seconds; default: the loop's time.
            rng: for jitter.
        """
        self.index = index
        self._fleets = fleets
        self._session = session
        self._clock = clock or asyncio.get_running_loop().time
        self._rng = rng or random.Random()
        self._tasks = TaskGroup("feeds")
        self._parts: Parts | None = None
        self._feeds: dict[str, WorkerFeed] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ranks: dict[str, str] = {}  # worker ids by the names of their ranks and guesses, where they differ

    def start(self) -> None:
        """Begin to follow every worker; does nothing when it has begun."""
        if self._parts is not None:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        pump = Pump(self._clock)
        self._parts = Parts(
            index=self.index,
            session=self._session,
            context=context,
            pump=pump,
            clock=self._clock,
            rng=self._rng,
        )
        self._tasks.spawn("pump", pump.run())
        self._tasks.spawn("tick", self._tick())
        self._adopt()

    async def stop(self) -> None:
        """End every task and close every socket; the index forgets all workers. May be called twice."""
        await self._tasks.cancel()
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
        self._running.clear()
        self._ranks.clear()
        if self._parts is not None:
            self._parts.context.destroy(linger=0)
            self._parts = None

    def update(self, fleets: Fleets) -> None:
        """Follow a reload: new workers, workers that are gone, other settings."""
        self._fleets = fleets
        if self._parts is not None:
            self._adopt()

    @property
    def block_sizes(self) -> list[int]:
        """Make chains for these."""
        return self.index.block_sizes

    def match(self, chains: "Mapping[int, Chain]") -> Mapping[str, Match]:
        """What every worker holds of a prompt, by worker id; of several data-parallel ranks the best one. Not to be changed.

        Args:
            chains: the prompt's chain for every block size in `block_sizes`.
        """
        matches = self.index.match(chains)
        if not self._ranks or not matches:
            return matches
        found = dict(matches)
        for name in self._ranks.keys() & found.keys():
            worker_id, match = self._ranks[name], found.pop(name)
            best = found.get(worker_id, NO_MATCH)
            if (match.tokens, match.device) > (best.tokens, best.device):
                found[worker_id] = match
        return found

    def sent(
        self,
        worker: str,
        chains: "Mapping[int, Chain]",
        held: Match = NO_MATCH,
        *,
        by_bytes: bool = False,
    ) -> "Expectation | None":
        """A prompt was sent to a worker that held `held` of it (`match`): believe that it has all of it (`PrefixIndex.sent`).

        With several ranks it is not known which one takes it: nothing is believed until its events come. Of a prompt that is known by its
        bytes only (`by_bytes`) no events come: it is remembered as for a worker that sends none.
        """
        feed = self._feeds.get(worker)
        if feed is None:
            return None
        if by_bytes and feed.remember(chains):
            self._ranks[feed.guess_name] = worker
            return None
        tokens = held.tokens
        for size, chain in chains.items():
            if len(chain.hashes) * size > tokens + size:
                feed.sent()
                break
        return self.index.sent(feed.names[0], chains, held) if len(feed.names) == 1 else None

    def resync(self, worker: str) -> bool:
        """Predictions for this worker were wrong: forget it and ask again for everything. False for unknown workers."""
        feed = self._feeds.get(worker)
        if feed is not None:
            feed.resync(self._clock())
        return feed is not None

    def names(self, fleet: str) -> dict[str, list[str]]:
        """Under which names each worker of a fleet stands in the index: several with data parallelism, none as long as nothing is known of it."""
        return {feed.id: feed.names for feed in self._feeds.values() if feed.fleet == fleet}

    def snapshot(self) -> list[FeedStatus]:
        """Every worker's feed, in the order of the configuration."""
        now = self._clock()
        return [feed.status(now) for feed in self._feeds.values()]

    def degraded(self, fleet: str) -> list[str]:
        """What works less well than it should in a fleet, in sentences."""
        now = self._clock()
        return sentences([feed.status(now) for feed in self._feeds.values() if feed.fleet == fleet])

    def _adopt(self) -> None:
        """Bring the feeds in line with the fleets."""
        assert self._parts is not None
        wanted = {worker.id: (worker, fleet, section) for worker, fleet, section in _members(self._fleets)}
        before, self._feeds = self._feeds, {}
        for worker_id, feed in before.items():
            if wanted.get(worker_id) != (feed.worker, feed.fleet, feed.section):
                self._running.pop(worker_id).cancel()
                feed.close()
        for worker_id, (worker, fleet, section) in wanted.items():
            if worker_id in self._running:
                self._feeds[worker_id] = before[worker_id]
                continue
            feed = self._feeds[worker_id] = WorkerFeed(worker, fleet, section, self._parts)
            self._running[worker_id] = self._tasks.spawn(worker_id, feed.run())

    async def _tick(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(TICK)

    def _look(self) -> None:
        now = self._clock()
        ranks: dict[str, str] = {}
        for feed in self._feeds.values():
            feed.tick(now)
            if feed.guesses:
                ranks[feed.guess_name] = feed.id
            if len(feed.names) > 1:
                ranks.update(dict.fromkeys(feed.names, feed.id))
        self._ranks = ranks
        self.index.tick(now, SWEEP)


def _members(fleets: Fleets) -> "list[tuple[Worker, str, WorkerSection]]":
    """Every worker whose fleet's policy reads matches, with the fleet's name and its section of the configuration.

    For a policy that wants to know only what the gateway itself has sent, no worker is asked for events.
    """
    members = []
    for fleet, model in zip(fleets, fleets.config.models, strict=True):
        knowledge = fleet.knowledge
        for worker, section in zip(fleet.workers, model.workers, strict=True) if knowledge != "none" else ():
            if knowledge == "history":
                section = msgspec.structs.replace(section, kv_events="off", lmcache_events=None)  # noqa: PLW2901
            members.append((worker, fleet.name, section))
    return members
