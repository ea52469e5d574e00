"""API keys: making them, their hashes, and files of them that may change.

Only SHA-256 hashes are kept. A key is 256 random bits, so there is nothing that a slow hash would protect: nobody can go
through the keys that there might be, and a request can't wait for one (docs/adr/0013-keys-are-hashed-once.md).
"""

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import structlog

PREFIX: Final = "wr-"
"""What new keys begin with, so that scanners for leaked secrets can be taught to find them."""
HASH: Final = "sha256:"
MIN_LENGTH: Final = 20
"""Characters of a key that somebody else made: what is shorter can be guessed."""
MAX_BYTES: Final = 4 << 20
"""A file of keys above this is a mistake; 10,000 hashes are 0.7 MiB."""

_ENTROPY: Final = 32
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_KEY: Final = re.compile(r"[\x21-\x7e]+")

_log = structlog.get_logger(__name__)


class KeysError(Exception):
    """A file of keys can't be used; the message names file and line and never shows a key."""


def new_key() -> str:
    """A key that nobody has: 43 random characters behind `PREFIX`."""
    return PREFIX + secrets.token_urlsafe(_ENTROPY)


def digest(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key, usedforsecurity=True).digest()


def hashed(key: str) -> str:
    """A key's hash as the configuration takes it: ``sha256:`` and 64 hexadecimal digits."""
    return HASH + digest(key.encode()).hex()


def parse_hash(text: str) -> bytes | None:
    """The digest in a text as of `hashed`; None when it is none."""
    found = _HASH.fullmatch(text)
    return None if found is None else bytes.fromhex(found[1])


def usable(key: str) -> bool:
    """Whether a key can travel in a header and is long enough."""
    return len(key) >= MIN_LENGTH and _KEY.fullmatch(key) is not None


def read_keys(path: str | os.PathLike[str]) -> frozenset[bytes]:
    """The digests of the keys in a file: a hash or a key on each line, ``#`` begins a comment. Blocks.

    Raises:
        KeysError: it can't be read, or a line is neither.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise KeysError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise KeysError(f"{path}: not UTF-8 text") from None
    if len(raw) > MAX_BYTES:
        raise KeysError(f"{path}: larger than {MAX_BYTES >> 20} MiB")
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        # A key has no blank in it, so whatever stands behind one is a comment too: the owner's name, perhaps.
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        one = parse_hash(words[0])
        if one is None:
            if words[0].startswith(HASH) or not usable(words[0]):
                raise KeysError(
                    f"{path}:{number}: neither a hash (sha256: and 64 hexadecimal digits) nor a key of at least "
                    f"{MIN_LENGTH} characters"
                )
            one = digest(words[0].encode())
        found.add(one)
    return frozenset(found)


def read_files(paths: Iterable[str]) -> dict[str, frozenset[bytes]]:
    """`read_keys` of each file, by path.

    Raises:
        KeysError: one can't be used.
    """
    return {path: read_keys(path) for path in paths}


class KeyFiles:
    """Looks at files of keys and hands on what changes in them. A file that can't be used changes nothing.

    Attributes:
        error: why the files as they are now can't be used, or None.
    """

    __slots__ = ("_paths", "_seen", "_use", "error")

    def __init__(self, paths: Iterable[str], use: Callable[[Mapping[str, frozenset[bytes]]], None]) -> None:
        """Make it before the files are read for the first time, so that no change is missed. Blocks, for as long as a `stat` takes.

        Args:
            paths: the files.
            use: takes all files' digests, or raises KeysError and changes nothing.
        """
        self._paths = tuple(paths)
        self._use = use
        self._seen = self._signatures()
        self.error: str | None = None

    async def look(self) -> None:
        """Read all files if one has changed."""
        if not self._paths:
            return
        # Looked at before reading: what changes in between is seen the next time.
        signatures = await asyncio.to_thread(self._signatures)
        if signatures == self._seen:
            return
        self._seen = signatures
        try:
            self._use(await asyncio.to_thread(read_files, self._paths))
        except KeysError as error:
            self.error = str(error)
            _log.error("a file of keys cannot be used; the keys stay as they were", problem=self.error)
        else:
            self.error = None
            _log.info("keys read again", files=len(self._paths))

    def _signatures(self) -> tuple[tuple[int, ...] | None, ...]:
        """What changes when a file, or what it links to, does; None for one that is away."""
        return tuple(_signature(path) for path in self._paths)


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
