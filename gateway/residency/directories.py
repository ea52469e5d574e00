"""The directories of all fleets that have one: built from the configuration, started, reloaded, stopped."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.residency.directory_feed import DirectoryFeed, DirectoryStatus
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    import asyncio

    import aiohttp

    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleets
    from gateway.prefix.feed import Feeds


class Directories:
    """See the module. Without `l2` in any model there is no task and no connection."""

    def __init__(
        self, session: "aiohttp.ClientSession", *, clock: Callable[[], float], feeds: "Callable[[], Feeds | None]"
    ) -> None:
        """Nothing is asked before `start`.

        Args:
            session: as of `gateway.fleet.asking.open_session`; not closed here.
            clock: monotonic seconds, that of `feeds`.
            feeds: what is known of the workers' caches; None: nothing, and no directory is asked.
        """
        self._session = session
        self._clock = clock
        self._feeds = feeds
        self._tasks = TaskGroup("directories")
        self._running = False
        self._asking: dict[str, tuple[DirectoryFeed, asyncio.Task[None] | None]] = {}

    def use(self, config: "Config", fleets: "Fleets") -> None:
        """Take over a configuration. What was learned stays as long as a model's section stays as it is."""
        feeds = self._feeds()
        before, self._asking = self._asking, {}
        for fleet, model in zip(fleets, config.models, strict=True):
            if model.l2 is None or feeds is None or fleet.knowledge in ("none", "history"):
                continue
            kept = before.get(fleet.name)
            if kept is not None and kept[0].section == model.l2:
                feed = kept[0]
                self._asking[fleet.name] = before.pop(fleet.name)
            else:
                feed = DirectoryFeed(
                    fleet.name, model.l2, feeds.index, self._session, self._clock, self._names_of(fleet.name)
                )
                self._asking[fleet.name] = feed, None
            feed.workers = [
                (worker, section.hints) for worker, section in zip(fleet.workers, model.workers, strict=True)
            ]
        for _, task in before.values():
            if task is not None:
                task.cancel()
        if self._running:
            self._start_tasks()

    def start(self) -> None:
        """Begin to ask."""
        self._running = True
        self._start_tasks()

    async def stop(self) -> None:
        """End every question; what was answered is forgotten."""
        self._running = False
        await self._tasks.cancel()
        self._asking = {name: (feed, None) for name, (feed, _) in self._asking.items()}

    def snapshot(self) -> list[DirectoryStatus]:
        """How well it goes with each."""
        return [feed.status() for feed, _ in self._asking.values()]

    def document(self) -> list[dict[str, Any]]:
        """The same, for the admin API."""
        return [msgspec.structs.asdict(each) for each in self.snapshot()]

    def degraded(self, fleet: str) -> list[str]:
        """What works less well than it should, in sentences."""
        found = self._asking.get(fleet)
        return [] if found is None else found[0].degraded()

    def _start_tasks(self) -> None:
        for name, (feed, task) in self._asking.items():
            if task is None:
                self._asking[name] = feed, self._tasks.spawn(name, feed.run())

    def _names_of(self, fleet: str) -> Callable[[], Mapping[str, Sequence[str]]]:
        def names() -> Mapping[str, Sequence[str]]:
            feeds = self._feeds()
            return {} if feeds is None else feeds.names(fleet)

        return names
