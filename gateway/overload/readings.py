"""What the kernel says of this process: memory and descriptors, and how much of both it may have. Linux; 0 where nobody knows."""

import contextlib
import ctypes
import os
import resource
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_FDS: Final = "/proc/self/fd"
MOST_DESCRIPTORS: Final = 1 << 20
"""What the kernel itself takes for a large number (`fs.nr_open`)."""
_ENDLESS: Final = 1 << 60
"""Version 1 of cgroups writes "no limit" as a number near the largest."""


def memory_limit(own: Path = _OWN, root: Path = _CGROUP) -> int:
    """Bytes that the control group of this process may have, the strictest of all that it is in; 0: no limit, or none that is known."""
    limits: list[int] = []
    with contextlib.suppress(OSError):
        for line in own.read_text(encoding="ascii", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += _limits_above(root, path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits_above(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=0)


def _limits_above(root: Path, path: str, file: str) -> list[int]:
    """In a container the path may be one of the host's, of which only the root is to be seen."""
    found = []
    here = root / path.lstrip("/")
    for folder in (here, *here.parents):
        if folder == root or root in folder.parents:
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / file).read_text(encoding="ascii"))
                if 0 < limit < _ENDLESS:
                    found.append(limit)
    return found


def descriptors_limit() -> int:
    """Descriptors that this process may have (`ulimit -n`); 0: any number."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 if soft == resource.RLIM_INFINITY else soft


def raise_descriptors_limit(most: int = MOST_DESCRIPTORS) -> None:
    """Let this process have as many descriptors as it may without anybody's leave, at most `most`: shells allow 1,024 by habit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_used() -> int:
    """Open descriptors of this process; 0 where nobody says."""
    try:
        # Since Linux 6.2 the size of the folder is their number. Listing it takes a microsecond for each.
        return os.stat(_FDS).st_size or len(os.listdir(_FDS))  # noqa: PTH116, PTH208 - ten times a second
    except OSError:
        return 0


def give_back_memory() -> None:
    """Ask the C library to return what it keeps of freed memory: large bodies leave holes that it would keep for itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
