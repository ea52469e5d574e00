"""An LMCache coordinator over simulated workers' LMCache servers, as far as gateways use one: directory, prefetches, pins, deletes.

Shaped as LMCache 0.5.6 answers. It knows what its servers hold without their events. Pins protect l2 only, are counted, and are taken of
keys that nobody holds, too. Its servers are given, nobody registers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson
from aiohttp import web

from backends.hints import chunks
from simulator.engine import TierName
from simulator.server.lmcache import (
    INCARNATION,
    Chunk,
    HttpServer,
    LMCacheServer,
    Named,
    RefusalError,
    Route,
    application,
    decoded,
)

BACKENDS: Final[Mapping[TierName, str]] = {"l1": "dram", "l2": "fs"}


class Dispatched(Named, kw_only=True):
    """``POST /cache/prefetches`` for one server."""

    instance_id: str


class Delete(Dispatched, kw_only=True):
    """``POST /cache/delete``."""

    tier: str = "all"
    force: bool = False


class LMCacheCoordinator(HttpServer):
    """See the module."""

    def __init__(self, servers: Sequence[LMCacheServer], host: str, port: int) -> None:
        """Of these servers, which have started; not started itself."""
        super().__init__(host, port)
        self._servers = {server.instance: server for server in servers}
        self._pins: dict[tuple[bytes, str, str], int] = {}

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is in use or not allowed.
        """
        routes: Mapping[str, Mapping[str, Route]] = {
            "/healthz": {"GET": self._health},
            "/instances": {"GET": self._instances},
            "/directory/lookup": {"POST": self._lookup},
            "/cache/prefetches": {"POST": self._prefetch},
            "/cache/prefetches/{instance_id}/{request_id}": {"GET": self._poll},
            "/cache/pins": {"POST": self._pin, "DELETE": self._unpin, "GET": self._list},
            "/cache/delete": {"POST": self._delete},
        }
        await self.listen(application("LMCache MP Coordinator", routes))

    async def _health(self, _: web.Request) -> Any:
        return {"status": "healthy"}

    async def _instances(self, _: web.Request) -> Any:
        return {
            "instances": [
                {
                    "instance_id": server.instance,
                    "ip": server.host,
                    "http_port": server.port,
                    "registration_time": 0.0,
                    "metadata": {},
                    "p2p_advertised_url": "",
                    "mq_port": 0,
                }
                for server in self._servers.values()
            ]
        }

    async def _lookup(self, request: web.Request) -> Any:
        body = orjson.loads(await request.read())
        by_keys = "keys" in body
        if by_keys == ("token_ids" in body):
            raise RefusalError(422, [_value_error("supply exactly one of 'keys' or 'token_ids'", body)])
        if by_keys:
            keys = body["keys"]
            try:
                wanted = [(key, bytes.fromhex(key["chunk_hash_hex"])) for key in keys]
            except ValueError as error:
                raise RefusalError(422, [_value_error(str(error), keys, "keys")]) from None
            count = len(wanted)
        else:
            if "model_name" not in body:
                raise RefusalError(422, [_value_error("'model_name' is required with 'token_ids'", body)])
            named = msgspec.convert({"world_size": 1, **body}, Named)
            names = [name for name, _ in self._any.resolve(named)]
            wanted = [
                (key, bytes.fromhex(key["chunk_hash_hex"]))
                for key in chunks.keys(names, named.model_name, named.world_size, named.cache_salt)
            ]
            count = len(names)
        return {"chunks": count, "results": [self._result(key, name) for key, name in wanted]}

    def _result(self, key: Mapping[str, Any], name: bytes) -> dict[str, Any]:
        """Where one key is, misses included."""
        placements = []
        tokens: Sequence[int] = ()
        for server in self._servers.values():
            options = server.worker.options
            chunk = self._chunk(name, key.get("cache_salt", ""))
            if chunk is None or (key["model_name"], key["kv_rank"]) != (options.model, chunks.kv_rank(1, 0)):
                continue
            tokens = chunk.tokens
            size = server.worker.profile.kv_bytes_per_token * server.names.chunk
            placements += [
                {
                    "instance_id": server.instance,
                    "incarnation": INCARNATION,
                    "tier": tier,
                    "backend": backend,
                    "size_bytes": size,
                    "shared": False,
                }
                for tier, backend in BACKENDS.items()
                if server.holds(tier, chunk)
            ]
        return {"key": key, "placements": placements, "token_ids": list(tokens), "access_count": 0}

    async def _prefetch(self, request: web.Request) -> Any:
        wanted = await decoded(request, Dispatched)
        server = self._server(wanted.instance_id)
        try:
            said = server.submit(wanted)
        except RefusalError as refusal:
            why = f"prefetch submit to {server.instance!r} failed: Server error '{refusal.status}'"
            raise RefusalError(502, why) from None
        return {"instance_id": server.instance, "request_id": "", **said}

    async def _poll(self, request: web.Request) -> Any:
        return self._server(request.match_info["instance_id"]).poll(request.match_info["request_id"])

    async def _pin(self, request: web.Request) -> Any:
        named = await decoded(request, Named)
        found = self._any.resolve(named)
        for name, chunk in found:
            key = (name, named.model_name, named.cache_salt)
            self._pins[key] = self._pins.get(key, 0) + 1
            # Of servers with one l2 each holds it; of others each its own.
            for l2 in {id(server.worker.shared): server.worker.shared.l2 for server in self._servers.values()}.values():
                l2.pin(chunk.digests)
        return {"requested": len(found), "affected": len(found), "status": "pinned"}

    async def _unpin(self, request: web.Request) -> Any:
        named = await decoded(request, Named)
        found = self._any.resolve(named)
        for name, chunk in found:
            self._release(name, named.model_name, named.cache_salt, chunk)
        # As the real one: it counts what was named, pinned or not.
        return {"requested": len(found), "affected": len(found), "status": "unpinned"}

    def _release(self, name: bytes, model: str, salt: str, chunk: Chunk) -> bool:
        """Take one pin back. Whether there was one."""
        key = (name, model, salt)
        left = self._pins.get(key, 0) - 1
        if left < 0:
            return False
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]
        for l2 in {id(server.worker.shared): server.worker.shared.l2 for server in self._servers.values()}.values():
            l2.unpin(chunk.digests)
        return True

    async def _list(self, request: web.Request) -> Any:
        salt = request.query.get("cache_salt")
        pins = [
            {"key": chunks.keys([name], model, 1, of)[0], "pin_count": count}
            for (name, model, of), count in self._pins.items()
            if salt is None or of == salt
        ]
        return {"total": len(pins), "pins": pins}

    async def _delete(self, request: web.Request) -> Any:
        wanted = await decoded(request, Delete)
        server = self._server(wanted.instance_id)
        found = server.resolve(wanted)
        if not found:
            return {"instance_id": server.instance, "requested": 0, "affected": 0, "skipped": 0, "status": "noop"}
        if wanted.force:
            for name, chunk in found:
                while self._release(name, wanted.model_name, wanted.cache_salt, chunk):
                    pass
        tiers: list[TierName] = (
            ["l1", "l2"] if wanted.tier == "all" else [tier for tier in BACKENDS if tier == wanted.tier]
        )
        affected, skipped = server.drop([chunk for _, chunk in found], tiers)
        return {
            "instance_id": server.instance,
            "requested": len(found),
            "affected": affected,
            "skipped": skipped,
            "status": "deleted",
        }

    @property
    def _any(self) -> LMCacheServer:
        """One of its servers: names are the same at all."""
        return next(iter(self._servers.values()))

    def _server(self, instance: str) -> LMCacheServer:
        server = self._servers.get(instance)
        if server is None:
            raise RefusalError(404, f"no MP server registered with instance_id={instance!r}")
        return server

    def _chunk(self, name: bytes, salt: str) -> Chunk | None:
        """A chunk that any server knows by name."""
        for server in self._servers.values():
            if (chunk := server.names.get(name, salt)) is not None:
                return chunk
        return None


def _value_error(message: str, found: Any, *where: str) -> dict[str, Any]:
    return {
        "type": "value_error",
        "loc": ["body", *where],
        "msg": f"Value error, {message}",
        "input": found,
        "ctx": {"error": {}},
    }
