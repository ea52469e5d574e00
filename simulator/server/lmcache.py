"""An LMCache multiprocess server beside a simulated worker, as far as gateways use one: its l1 and l2 are the engine's.

Shaped as LMCache 0.5.6 answers. Chunks have LMCache's names (`backends.hints.chunks`); one is there when all its blocks are. Quotas are
remembered and not enforced; one device (``world_size`` 1) is what the worker has, of others no key is found.
"""

import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import orjson
from aiohttp import web

from backends.hints import chunks
from simulator.engine import TierName

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

MOST_NAMES: Final = 200_000
"""Chunks whose blocks are known by name, those asked for last."""
LARGEST_BODY: Final = 64 * 1024 * 1024
INCARNATION: Final = 1

_Body = TypeVar("_Body", bound=msgspec.Struct)


class RefusalError(Exception):
    """An answer that is no 2xx: FastAPI's ``detail``."""

    def __init__(self, status: int, detail: Any, member: str = "detail") -> None:
        super().__init__(status, detail)
        self.status = status
        self.body = {member: detail}


class Named(msgspec.Struct):
    """A prompt's whole chunks, as all routes name one."""

    model_name: str
    world_size: int
    token_ids: list[int]
    cache_salt: str = ""


class Prefetch(Named):
    """``POST /cache/prefetches``."""

    source_tier: str = "l2"
    target_tier: str = "l1"


class Chunk(msgspec.Struct, frozen=True):
    """One chunk: its blocks' digests and its tokens."""

    digests: Sequence[bytes]
    tokens: Sequence[int]


class Names:
    """Which blocks a chunk is made of, by (name, salt). LMCache's names say nothing of vLLM's blocks."""

    def __init__(self, chunk: int, block_size: int) -> None:
        """`chunk`: tokens in each, whole blocks of `block_size`.

        Raises:
            ValueError: they are not.
        """
        if chunk % block_size:
            raise ValueError(f"LMCache's chunks of {chunk} tokens are no whole blocks of {block_size}")
        self.chunk = chunk
        self._blocks = chunk // block_size
        self._known: OrderedDict[tuple[bytes, str], Chunk] = OrderedDict()

    def note(self, ids: Sequence[int], digests: Sequence[bytes], salt: str | None) -> list[bytes]:
        """Remember the chunks of these tokens; returns their names, first one first."""
        found = chunks.names(ids, self.chunk)
        for index, name in enumerate(found):
            key = name, salt or ""
            if key not in self._known:
                tokens = ids[index * self.chunk : (index + 1) * self.chunk]
                self._known[key] = Chunk(digests[index * self._blocks : (index + 1) * self._blocks], tokens)
            self._known.move_to_end(key)
        while len(self._known) > MOST_NAMES:
            self._known.popitem(last=False)
        return found

    def get(self, name: bytes, salt: str) -> Chunk | None:
        """A chunk by its name; None: nobody has named it."""
        return self._known.get((name, salt))


class HttpServer:
    """An aiohttp application on a port of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its base URL, once it has started."""
        return f"http://{self.host}:{self.port}"

    async def listen(self, app: web.Application) -> None:
        """Serve `app`; a port of 0 becomes the one that was free.

        Raises:
            OSError: the port is in use or not allowed.
        """
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening. May be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


class LMCacheServer(HttpServer):
    """See the module.

    Attributes:
        worker: whose.
        names: of chunks.
        instance: what a coordinator calls it.
    """

    def __init__(self, worker: "SimulatedWorker", port: int, chunk: int) -> None:
        """Not started yet.

        Raises:
            ValueError: chunks are no whole blocks.
        """
        super().__init__(worker.options.host, port)
        self.worker = worker
        self.names = Names(chunk, worker.profile.block_size)
        self.instance = f"mp-{worker.options.seed}"
        self._jobs: dict[str, tuple[Sequence[bytes], int, int]] = {}
        self._quotas: dict[str, float] = {}

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is in use or not allowed.
        """
        routes: Mapping[str, Mapping[str, Route]] = {
            "/healthcheck": {"GET": self._health},
            "/status": {"GET": self._status},
            "/cache/prefetches": {"POST": self._prefetch},
            "/cache/prefetches/{request_id}": {"GET": self._poll},
            "/cache/objects": {"DELETE": self._delete},
            "/cache/clear": {"POST": self._clear},
            "/quota/{cache_salt}": {"PUT": self._set_quota, "GET": self._get_quota, "DELETE": self._drop_quota},
        }
        await self.listen(application("LMCache HTTP API", routes))

    def resolve(self, named: Named) -> list[tuple[bytes, Chunk]]:
        """The whole chunks of a prompt: names and blocks."""
        size = self.names.chunk
        ids = named.token_ids[: len(named.token_ids) // size * size]
        try:
            digests = self.worker.hasher.chain(ids, salt=named.cache_salt or None)
        except IndexError:
            raise RefusalError(400, "a token id is outside the vocabulary") from None
        found = self.names.note(ids, digests, named.cache_salt)
        return [(name, chunk) for name in found if (chunk := self.names.get(name, named.cache_salt)) is not None]

    def holds(self, tier: TierName, chunk: Chunk) -> bool:
        """Whether a chunk is in l1 or l2, as of now."""
        self.worker.pump.advance()
        memory = self.worker.engine.memory
        held = memory.l1 if tier == "l1" else memory.l2
        return all(digest in held for digest in chunk.digests)

    def submit(self, named: Named) -> dict[str, Any]:
        """Begin to bring a prompt's chunks from l2 to l1; the answer.

        Raises:
            RefusalError: no worker has registered that model.
        """
        if named.model_name != self.worker.options.model:
            raise RefusalError(
                503,
                f"no layout registered for model_name={named.model_name!r} world_size={named.world_size}; "
                "the model has not allocated KV cache on this node yet",
            )
        found = self.resolve(named)
        if not found:
            return {"chunks": 0, "status": "noop"}
        present = next(
            (
                at
                for at, (_, chunk) in enumerate(found)
                if named.world_size != 1 or not (self.holds("l1", chunk) or self.holds("l2", chunk))
            ),
            len(found),
        )
        digests = [digest for _, chunk in found[:present] for digest in chunk.digests]
        if digests:
            self.worker.pump.prefetch(digests, 0, len(digests), "l2", "l1")
        job = uuid.uuid4().hex
        self._jobs[job] = (digests, present, len(found) * named.world_size)
        return {"request_id": job, "chunks": len(found), "status": "submitted"}

    def poll(self, job: str) -> dict[str, Any]:
        """How a prefetch goes; what has ended is told once.

        Raises:
            RefusalError: there is no such prefetch any more.
        """
        if job not in self._jobs:
            raise RefusalError(404, f"unknown prefetch request_id={job!r} (already completed or never submitted)")
        self.worker.pump.advance()
        digests, found, total = self._jobs[job]
        coming = self.worker.engine.prefetcher.transfers.coming
        if any(coming("l1", digest) for digest in digests):
            return {"request_id": job, "status": "pending"}
        del self._jobs[job]
        return {"request_id": job, "status": "completed", "found_keys": found, "total_keys": total}

    def drop(self, wanted: Sequence[Chunk], tiers: Sequence[TierName]) -> tuple[int, int]:
        """Delete chunks. How many copies went, or were in l2 not known to be there; and how many stayed because they are pinned."""
        deleted = skipped = 0
        for tier in tiers:
            for chunk in wanted:
                there = self.holds(tier, chunk)
                self.worker.pump.drop(chunk.digests, tier)
                stays = there and self.holds(tier, chunk)
                skipped += stays
                deleted += not stays and (there or tier == "l2")
        return deleted, skipped

    async def _health(self, _: web.Request) -> Any:
        return {"status": "healthy"}

    async def _status(self, _: web.Request) -> Any:
        l1 = self.worker.engine.memory.l1
        size = self.worker.profile.kv_bytes_per_block
        return {
            "is_healthy": True,
            "engine_type": "MPCacheServer",
            "chunk_size": self.names.chunk,
            "hash_algorithm": chunks.ALGORITHM,
            "active_sessions": 0,
            "storage_manager": {"is_healthy": True, "l1_usage": [len(l1) * size, l1.capacity * size]},
            "active_prefetch_jobs": len(self._jobs),
        }

    async def _prefetch(self, request: web.Request) -> Any:
        wanted = await decoded(request, Prefetch)
        if (wanted.source_tier, wanted.target_tier) != ("l2", "l1"):
            way = f"{wanted.source_tier!r}->{wanted.target_tier!r}"
            raise RefusalError(400, f"unsupported prefetch direction {way}; only 'l2'->'l1'")
        return web.Response(body=orjson.dumps(self.submit(wanted)), status=202, content_type="application/json")

    async def _poll(self, request: web.Request) -> Any:
        return self.poll(request.match_info["request_id"])

    async def _delete(self, request: web.Request) -> Any:
        body = orjson.loads(await request.read())
        keys, tier = body.get("keys"), body.get("tier", "l2")
        if not isinstance(keys, list):
            raise RefusalError(422, [_wrong("list_type", "keys", "Input should be a valid list", keys)])
        tiers: list[TierName] = ["l1", "l2"] if tier == "all" else [tier]
        deleted = skipped = 0
        for key in keys:
            chunk = self.names.get(bytes.fromhex(key["chunk_hash_hex"]), key.get("cache_salt", ""))
            if chunk is None:
                deleted += "l2" in tiers
                continue
            more, stayed = self.drop([chunk], tiers)
            deleted, skipped = deleted + more, skipped + stayed
        return {"deleted": deleted, "skipped": skipped, "ok": True}

    async def _clear(self, request: web.Request) -> Any:
        raw = await request.read()
        tier = (orjson.loads(raw) if raw else {}).get("tier", "l1")
        if tier != "l1":
            raise RefusalError(400, f"tier {tier!r} not supported; only 'l1'")
        worker = self.worker
        worker.pump.drop([key for key in worker.engine.memory.l1.keys if isinstance(key, bytes)], "l1")
        return {"status": "ok", "cleared": {"tier": "l1"}}

    async def _set_quota(self, request: web.Request) -> Any:
        salt = request.match_info["cache_salt"]
        try:
            limit = orjson.loads(await request.read())["limit_gb"]
        except orjson.JSONDecodeError:
            raise RefusalError(400, "invalid JSON body", "error") from None
        except (KeyError, TypeError):
            raise RefusalError(400, "body must be {'limit_gb': <float>}", "error") from None
        if limit < 0:
            raise RefusalError(400, "limit_gb must be non-negative", "error")
        self._quotas[salt] = float(limit)
        return {"cache_salt": salt, "limit_gb": float(limit), "status": "ok"}

    async def _get_quota(self, request: web.Request) -> Any:
        salt = request.match_info["cache_salt"]
        limit = self._quotas.get(salt)
        return {"cache_salt": salt, "limit_gb": limit or 0.0, "current_usage_gb": 0.0, "exists": limit is not None}

    async def _drop_quota(self, request: web.Request) -> Any:
        salt = request.match_info["cache_salt"]
        known = self._quotas.pop(salt, None) is not None
        return {"cache_salt": salt, "status": "removed" if known else "not_found"}


Route = Callable[[web.Request], Awaitable[Any]]


def application(title: str, routes: Mapping[str, Mapping[str, Route]]) -> web.Application:
    """An application whose routes return JSON values or raise `RefusalError`, and which describes itself at ``/openapi.json``."""
    app = web.Application(client_max_size=LARGEST_BODY)
    description = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1.0.0"},
        "paths": {path: {method.lower(): {} for method in methods} for path, methods in routes.items()},
    }

    async def describe(_: web.Request) -> Any:
        return description

    for path, methods in {**routes, "/openapi.json": {"GET": describe}}.items():
        for method, route in methods.items():
            app.router.add_route(method, path, _answered(route))
    return app


def _answered(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            value = await route(request)
        except RefusalError as refusal:
            return web.Response(body=orjson.dumps(refusal.body), status=refusal.status, content_type="application/json")
        if isinstance(value, web.StreamResponse):
            return value
        return web.Response(body=orjson.dumps(value), content_type="application/json")

    return handler


async def decoded(request: web.Request, kind: type[_Body]) -> _Body:
    """The body, as FastAPI would take it.

    Raises:
        RefusalError: 422.
    """
    try:
        body = orjson.loads(await request.read())
        missing = [
            _wrong("missing", field.name, "Field required", body)
            for field in msgspec.structs.fields(kind)
            if field.required and field.name not in body
        ]
        if missing:
            raise RefusalError(422, missing)
        return msgspec.convert(body, kind)
    except (orjson.JSONDecodeError, msgspec.ValidationError, TypeError) as error:
        raise RefusalError(422, [{"type": "value_error", "loc": ["body"], "msg": str(error), "input": None}]) from None


def _wrong(kind: str, name: str, message: str, found: Any) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", name], "msg": message, "input": found}
