"""The tenants in effect, through reloads of the configuration and changes of the files that hold their keys."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from gateway.admission.keys import KeyFiles
from gateway.admission.tenants import Index, Tenants, index_of, key_files

if TYPE_CHECKING:
    from gateway.admission.limits import Account
    from gateway.config.schema import Config

LOOK_EVERY: Final = 2.0
"""Seconds between two looks at the files of keys."""
OPEN: Final = "no tenants are configured: whoever reaches the gateway may use every model"

_log = structlog.get_logger(__name__)


class Prepared(NamedTuple):
    """All that may go wrong with a configuration's tenants, done."""

    keys: Index
    files: KeyFiles


class Tenancy:
    """Holds the tenants in effect.

    Attributes:
        current: they; None when none are configured: then nobody is asked for a key.
    """

    __slots__ = ("_clock", "_files", "current")

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._files: KeyFiles | None = None
        self.current: Tenants | None = None

    async def prepare(self, config: "Config") -> Prepared | None:
        """Read the keys of a configuration that is to come into effect; None when it has no tenants.

        Raises:
            KeysError: a file of keys can't be used, or two tenants have the same key.
        """
        return await asyncio.to_thread(self._prepared, config) if config.tenants else None

    def use(self, config: "Config", prepared: Prepared | None) -> None:
        """Let `config` come into effect. Never fails. Requests under way keep their tenant; its account goes on."""
        before = self.current
        if prepared is None:
            self.current = self._files = None
            if before is not None:
                _log.info(OPEN)
        else:
            self.current = Tenants(config, prepared.keys, before, self._clock())
            self._files = prepared.files

    def announce(self) -> None:
        """Say in the log that the gateway is open, if it is: once, when it has started."""
        if self.current is None:
            _log.info(OPEN)

    async def run(self) -> None:
        """Look at the files of keys again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            await self.look()

    async def look(self) -> None:
        """Read the files of keys again if one has changed."""
        if self._files is not None:
            await self._files.look()

    @property
    def degraded(self) -> tuple[str, ...]:
        """What works less well than it should, one short sentence each."""
        files = self._files
        return () if files is None or files.error is None else (f"keys stay as they were: {files.error}",)

    @property
    def information(self) -> tuple[str, ...]:
        """What is worth knowing though nothing is wrong with it."""
        return (OPEN,) if self.current is None else ()

    def accounts(self) -> "Iterable[tuple[str, Account]]":
        """What each tenant has used, by its name."""
        return () if self.current is None else [(name, one.account) for name, one in self.current.by_name.items()]

    def _prepared(self, config: "Config") -> Prepared:
        def use(files: Mapping[str, frozenset[bytes]]) -> None:
            index = index_of(config.tenants, files)
            # After a reload the tenants are others, and have read these files themselves.
            if self.current is not None and self._files is watched:
                self.current.use(index)

        watched = KeyFiles(key_files(config.tenants), use)
        return Prepared(index_of(config.tenants), watched)
