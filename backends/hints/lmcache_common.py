"""What LMCache's servers have in common: how they name a prompt, how they say no, and quotas of a tenant's salt."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
import orjson

from backends.hints.base import Answer, HintCall
from backends.hints.openapi import OPENAPI, names_path

if TYPE_CHECKING:
    from backends.hints.model import Hint

GIB: Final = 1024**3
"""LMCache's "GB"."""
MAX_TOKENS: Final = 1_000_000
"""Of one call; LMCache refuses more."""
MAX_SALTS: Final = 10_000
"""Whose quota is remembered as set."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """How LMCache's servers know a worker.

    Attributes:
        model: as given to the engine (``vllm serve MODEL``), not its served name.
        world_size: devices over which it spreads the model.
        chunk: tokens in each chunk; None: the server knows, and leaves out what is no whole chunk.
        instance: what a coordinator or controller calls the worker's LMCache; empty: not known.
        worker: the gateway's id of the worker, host:port as a rule.
        salt_quota: bytes that each tenant's salt may hold; None: no quotas are set.
    """

    model: str
    world_size: int = 1
    chunk: int | None = None
    instance: str = ""
    worker: str = ""
    salt_quota: int | None = None


def tokens(hint: "Hint", place: Place) -> list[int] | None:
    """The prompt up to the end of what a hint is about, in whole chunks where their size is known; None: there is nothing to name.

    LMCache names a chunk by all that is before it, so a call always begins with the first token. An adapter's blocks can't be named:
    LMCache does not tell adapters apart.
    """
    subject = hint.subject
    if subject.ids is None or subject.lora is not None:
        return None
    stop = min(hint.stop, MAX_TOKENS)
    if place.chunk is not None:
        stop -= stop % place.chunk
    return subject.ids()[:stop].tolist() if stop > 0 else None


def named(hint: "Hint", place: Place) -> dict[str, Any] | None:
    """The part of a body that says which prompt is meant, as all routes of the multiprocess mode take it."""
    ids = tokens(hint, place)
    if ids is None:
        return None
    return {
        "model_name": place.model,
        "world_size": place.world_size,
        "token_ids": ids,
        "cache_salt": hint.subject.salt or "",
    }


def parsed(body: bytes) -> Mapping[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def refused(status: int, said: Mapping[str, Any]) -> Answer:
    """No, with the server's own words: ``detail`` (a text, or FastAPI's list of what is wrong) or ``error``."""
    why = said.get("detail") or said.get("error") or ""
    if isinstance(why, list):
        why = "; ".join(str(each.get("msg", "")) for each in why if isinstance(each, dict))
    return Answer("refused", detail=f"status {status}: {why}"[:200])


def number(value: Any) -> int:
    """A count in an answer; 0 for whatever is none."""
    return value if type(value) is int and value >= 0 else 0


class Prefetching:
    """The answers to a prefetch, the same for the server and for the coordinator that hands it on."""

    @staticmethod
    def read(hint: "Hint", status: int, said: Mapping[str, Any], poll: str) -> Answer:
        """What an answer to the call, or to a poll, says.

        Args:
            hint: what was wished.
            status: of the answer.
            said: its body.
            poll: path to ask at, ending with a slash.
        """
        if status == 404 and "prefetch request_id" in str(said.get("detail")):
            # A result is given once. Ours was given to somebody else, or its answer was lost on the way: it has ended.
            return Answer("accepted", detail="ended, its result was read before")
        if status not in (200, 202):
            return refused(status, said)
        state, number_ = said.get("status"), said.get("request_id")
        if state in ("submitted", "pending") and isinstance(number_, str) and number_:
            return Answer("pending", HintCall("GET", poll + quote(number_, safe=""), server="hints"))
        if state == "noop":
            return Answer("refused", moved_tokens=0, detail="not even one whole chunk")
        if state != "completed":
            return Answer("refused", detail=f"unknown state {state!r}"[:200])
        found, total = number(said.get("found_keys")), number(said.get("total_keys"))
        if not found:
            return Answer("refused", moved_tokens=0, detail=f"none of {total} objects was there")
        return Answer("accepted", moved_tokens=hint.stop * min(found, total) // total, detail=f"{found} of {total}")


class Quotas:
    """Sets each salt's quota before the first hint about it.

    A hint's own call comes after the quota's.
    """

    __slots__ = ("_bytes", "_known")

    def __init__(self, quota: int | None) -> None:
        """`quota`: bytes for each salt; None: none are set."""
        self._bytes = quota
        self._known: dict[str, None] = {}

    def before(self, salt: str | None) -> HintCall | None:
        """The call that sets it; None where none is to be set, or it was asked for before."""
        if self._bytes is None or not salt or salt in self._known:
            return None
        if len(self._known) >= MAX_SALTS:
            del self._known[next(iter(self._known))]
        self._known[salt] = None
        return set_quota(salt, self._bytes)


def set_quota(salt: str, limit: int) -> HintCall:
    """Let a salt hold `limit` bytes."""
    return HintCall("PUT", f"/quota/{quote(salt, safe='')}", {"limit_gb": limit / GIB}, server="hints")


def drop_quota(salt: str) -> HintCall:
    """Take a salt's quota back."""
    return HintCall("DELETE", f"/quota/{quote(salt, safe='')}", server="hints")


def is_quota(said: Mapping[str, Any]) -> bool:
    """Whether an answer is one to `set_quota`. A refused quota counts as a refusal of its hint; the next hint is said all the same."""
    return "limit_gb" in said and "cache_salt" in said


DESCRIPTION: Final = HintCall("GET", OPENAPI.path, server="hints")
"""The probe of all of them: which routes there are says who it is, and asking changes nothing."""


def serves(status: int, body: bytes, *paths: str) -> bool:
    """Whether a server's description names all of these routes."""
    return status == 200 and all(names_path(body, path) for path in paths)
