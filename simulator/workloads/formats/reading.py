"""Reading trace files, plain or gzip, line by line, with errors that name the place."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from simulator.workloads.workload import WorkloadError

T = TypeVar("T")

LONGEST_LINE = 64 << 20
"""Bytes. The largest known session of Claude Code, in JSON on one line, has some 30 MB."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end), blank lines left out.

    Raises:
        WorkloadError: the file cannot be read, or has a line above `LONGEST_LINE`.
    """
    try:
        with path.open("rb") as plain:
            zipped = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise WorkloadError.at(path, number, f"the line is longer than {LONGEST_LINE} bytes")
                if line := line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise WorkloadError.at(path, None, f"cannot be read: {reason}") from error


def records(path: Path, decoder: msgspec.json.Decoder[T], accepted: str) -> Iterator[tuple[int, T]]:
    """JSON lines.

    Args:
        path: the file.
        decoder: of one line's type.
        accepted: what a line should look like, for the error.

    Raises:
        WorkloadError: with the line's number.
    """
    for number, line in lines(path):
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorkloadError.at(path, number, f"{error}. A line is {accepted}") from error
