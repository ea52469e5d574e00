"""Where a worker's KV events come from and how large its cache is, as far as the worker itself tells."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})  # noqa: S104 - what a worker may have bound, not what we bind
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_SOURCES = 256
"""Data-parallel ranks of one worker that are followed."""

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^:]*):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """A socket that one worker (one data-parallel rank) publishes its KV events on.

    Attributes:
        endpoint: ZMQ address to connect to.
        replay_endpoint: the same for questions about what was missed; None when there is no such socket.
        topic: what to subscribe to; empty for everything.
        rank: data-parallel rank, 0 when there is only one.
        block_size: tokens per block, where the answer says it.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0
    block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What is known about a worker's KV cache. Every field may be unknown (None).

    Attributes:
        block_size: tokens per block.
        blocks: blocks in device memory, of one data-parallel rank.
        prefix_caching: whether prefixes are reused at all.
        started: seconds since 1970 on the worker's clock at which its process started.
        origins: for each field that is known, where it comes from, e.g. ``configured`` or ``/metrics``.
    """

    block_size: int | None = None
    blocks: int | None = None
    prefix_caching: bool | None = None
    started: float | None = None
    origins: Mapping[str, str] | None = None

    def known(self, name: str) -> str:
        """Where a field comes from; empty when it is not known."""
        return (self.origins or {}).get(name, "")


def facts(origin: str, **fields: Any) -> CacheFacts:
    """Facts that all come from `origin`; fields that are None stay unknown."""
    found = {name: value for name, value in fields.items() if value is not None}
    return CacheFacts(**found, origins=dict.fromkeys(found, origin))


def merged(first: CacheFacts, second: CacheFacts) -> CacheFacts:
    """Each field from `first` where it is known there, else from `second`."""
    fields: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in ("block_size", "blocks", "prefix_caching", "started"):
        for each in (first, second):
            if getattr(each, name) is not None:
                fields[name] = getattr(each, name)
                origins[name] = each.known(name)
                break
    return CacheFacts(**fields, origins=origins)


def reachable(endpoint: Any, host: str) -> str | None:
    """The address to connect to for one that a worker on `host` has bound; None when it can't be one over TCP.

    A wildcard becomes `host`, and so does a loopback address unless `host` is one: it was bound for others than us.
    Any other address is taken at its word: vLLM names its node's own address when it chose the port itself.
    """
    found = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if found is None or not 0 < int(found["port"]) < 65536:
        return None
    bound = found["host"].strip("[]")
    if bound in WILDCARDS or (bound in LOOPBACK and host not in LOOPBACK):
        bound = host
    return tcp(bound, int(found["port"]))


def tcp(host: str, port: int) -> str:
    """A ZMQ address; brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
