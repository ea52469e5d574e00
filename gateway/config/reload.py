"""Puts a changed configuration into effect while requests run: on SIGHUP and when the file changes.

All or nothing: a file is read, checked and applied whole, or the old configuration stays and the mistake is reported. The
file is noticed by inotify on its folder, because editors and Kubernetes replace files instead of writing them, and by a
`stat` every few seconds, because inotify knows nothing of network file systems and may run out of watches.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog
import watchfiles

from gateway.config.load import load
from gateway.config.problems import ConfigError
from gateway.config.schema import Address, Admin, Config
from gateway.config.units import format_size
from gateway.tasks import TaskGroup

DEBOUNCE = 0.2
"""Seconds without a change after which a file counts as written."""
POLL = 2.0
"""Seconds between two looks at the file's size, time and identity."""
_STEP_MS = 200
"""How often the watching thread wakes up; its default of 50 ms costs more than it gains here."""
_WATCH_RETRY = 5.0

_log = structlog.get_logger(__name__)

_Signature = tuple[int, int, int, int] | None


class ConfigWatcher:
    """Watches one file and applies what changes in it.

    Attributes:
        current: the configuration in effect.
        reloads_ok: how often another configuration came into effect.
        reloads_failed: how often a file could not be used.
        last_error: why the file as it is now cannot be used, or None.
        last_reload_time: when `current` came into effect by a reload, seconds since 1970; None before the first.
        warnings: what the file asks for and a reload cannot give; empty when nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        current: Config,
        apply: Callable[[Config], Awaitable[None] | None],
        *,
        load: Callable[[Path], Config] = load,
        debounce: float = DEBOUNCE,
        poll: float = POLL,
        notify: bool = True,
    ) -> None:
        """Nothing is watched before `start`.

        Args:
            path: the file that `current` came from.
            current: the configuration in effect.
            apply: puts another configuration into effect, or raises and leaves everything as it was.
            load: reads the file; raises ConfigError. Runs in a thread.
            debounce: seconds to wait for more changes.
            poll: seconds between two looks at the file.
            notify: whether to use the kernel's file events beside polling.
        """
        self.current = current
        self.reloads_ok = 0
        self.reloads_failed = 0
        self.last_error: str | None = None
        self.last_reload_time: float | None = None
        self.warnings: tuple[str, ...] = ()
        self._path = Path(path)
        self._apply = apply
        self._load = load
        self._debounce = debounce
        self._poll = poll
        self._notify = notify
        self._tasks = TaskGroup("config")
        self._requested = asyncio.Event()
        self._lock = asyncio.Lock()
        self._failed_content: bytes | None = None

    def start(self) -> None:
        """Begin to watch. Must be called in the event loop."""
        self._tasks.spawn("reload", self._reload_on_request())
        self._tasks.spawn("poll", self._watch_by_polling(self._signature()))
        if self._notify:
            logging.getLogger("watchfiles").setLevel(
                logging.WARNING
            )  # else a line for each change of any file beside ours
            self._tasks.spawn("watch", self._watch_by_events())

    async def stop(self) -> None:
        """End watching and wait until it has ended."""
        await self._tasks.cancel()

    def request_reload(self) -> None:
        """Read the file again soon, changed or not: what a SIGHUP handler calls."""
        self._failed_content = None
        self._requested.set()

    async def reload(self) -> bool:
        """Read the file now and apply it if it differs. False when it cannot be used; never raises for that."""
        async with self._lock:
            try:
                wanted = await asyncio.to_thread(self._load, self._path)
            except ConfigError as error:
                await self._failed("the configuration has mistakes; the old one stays", str(error))
                return False
            new = self._with_what_stays(wanted)
            self._failed_content = None
            if new == self.current:
                self.last_error = None
                return True
            try:
                applied = self._apply(new)
                if inspect.isawaitable(applied):
                    await applied
            except Exception as error:  # noqa: BLE001 - whatever goes wrong, the old configuration stays
                await self._failed("the configuration could not be applied; the old one stays", _describe(error))
                return False
            self.current = new
            self.last_error = None
            self.last_reload_time = time.time()
            self.reloads_ok += 1
            _log.info("configuration reloaded", path=str(self._path))
            return True

    async def _failed(self, event: str, reason: str) -> None:
        """Note a failure; the same content is not complained about again unless somebody asks."""
        self.reloads_failed += 1
        self.last_error = reason
        _log.error(event, path=str(self._path), problems=reason)
        self._failed_content = await asyncio.to_thread(self._content)

    def _with_what_stays(self, wanted: Config) -> Config:
        """`wanted` with the listeners and the prefix maps' budget as they are, and a warning (once) if it asks for others."""
        warnings = [
            f"{name} stays at {_format(now)}; restart to move it to {_format(then)}"
            for name, now, then in (
                ("listen", self.current.listen, wanted.listen),
                ("admin", self.current.admin, wanted.admin),
            )
            if (now.host, now.port) != (then.host, then.port)
        ]
        if _secured(self.current.admin) != _secured(wanted.admin):
            warnings.append("the admin listener's token and links stay as they are; restart to change them")
        budget = self.current.prefix.budget
        if wanted.prefix.budget != budget:
            warnings.append(
                f"prefix.budget stays at {format_size(budget)}; restart to make it {format_size(wanted.prefix.budget)}"
            )
        for warning in warnings:
            if warning not in self.warnings:
                _log.warning("a reload cannot change this", path=str(self._path), detail=warning)
        self.warnings = tuple(warnings)
        return msgspec.structs.replace(
            wanted,
            listen=self.current.listen,
            admin=self.current.admin,
            prefix=msgspec.structs.replace(wanted.prefix, budget=budget),
        )

    async def _reload_on_request(self) -> None:
        while True:
            await self._requested.wait()
            self._requested.clear()
            if self._failed_content is not None and self._failed_content == await asyncio.to_thread(self._content):
                continue  # touched, but just as wrong as before
            await self.reload()

    async def _changed(self) -> None:
        """Ask for a reload when the file has been quiet for the debounce time."""
        signature = self._signature()
        while True:
            await asyncio.sleep(self._debounce)
            if signature == (signature := self._signature()):
                self._requested.set()
                return

    async def _watch_by_polling(self, seen: _Signature) -> None:
        while True:
            await asyncio.sleep(self._poll)
            if (now := self._signature()) != seen:
                seen = now
                await self._changed()

    async def _watch_by_events(self) -> None:
        """Follow the folder of the file, and of what it links to, as long as the kernel can."""
        seen = self._signature()
        while True:
            folders = self._folders()
            if not folders:
                await asyncio.sleep(_WATCH_RETRY)
                continue
            try:
                async with contextlib.aclosing(
                    watchfiles.awatch(*folders, watch_filter=None, recursive=False, debounce=_STEP_MS, step=_STEP_MS)
                ) as events:
                    async for _ in events:
                        if (now := self._signature()) != seen:
                            seen = now
                            await self._changed()
                        if self._folders() != folders:
                            break
            except (OSError, RuntimeError) as error:
                _log.warning(
                    "no file events; the file is looked at from time to time", detail=str(error), seconds=self._poll
                )
                return

    def _folders(self) -> list[Path]:
        """The folder of the path as given and that of the file it leads to."""
        return sorted(
            {folder for folder in (self._path.absolute().parent, self._path.resolve().parent) if folder.is_dir()}
        )

    def _signature(self) -> _Signature:
        """What changes when the file does; None when it is away."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def _content(self) -> bytes:
        """The file's bytes; empty when it cannot be read."""
        try:
            return self._path.read_bytes()
        except OSError:
            return b""


def _format(address: Address) -> str:
    return f"{address.host}:{address.port}"


def _secured(admin: Admin) -> tuple[str | None, str | None, dict[str, str]]:
    return admin.token, admin.token_file, admin.links


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
