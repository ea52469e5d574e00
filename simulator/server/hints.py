"""What a request's body wishes of the caches: ``kv_hints`` and ``kv_transfer_params``, as vLLM reads them.

Of ``kv_hints`` (protocol 0.1) three actions have an effect, all others are left out, as an engine does with those that it does not know:

=====================  =====================================================================================
``kv.retain``          ranges of tokens, each with a priority (0 to 100, 50 is neutral) and seconds
``vllm.set_priority``  one number, 0 is neutral, for all that is cached of the request
``kv.fetch``           blocks to be taken from another worker's memory before they are computed
=====================  =====================================================================================

Where several speak of a block the highest counts. A block belongs to the range that has its first token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from simulator.engine import Retention, TierName

PROTOCOL: Final = "0.1"
MOST_ACTIONS: Final = 16
MOST_DIRECTIVES: Final = 128
NEUTRAL: Final = 50
_FOREVER: Final = float("inf")
_MEDIA: Final[Mapping[str, TierName]] = {"CPU": "l1", "STORAGE": "l2"}


class HintsError(ValueError):
    """What a body says of caches is of the wrong shape; the text says where."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks of another worker.

    Attributes:
        source: its control endpoint, here its URL without a scheme.
        hashes: as in its KV events.
    """

    source: str
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wishes:
    """One request's.

    Attributes:
        retention: what its blocks are worth, by times relative to now.
        offload_tokens, load_tiers: as in `simulator.engine.EngineRequest`.
        fetches: in the order of the body.
    """

    retention: tuple[Retention, ...] = ()
    offload_tokens: int | None = None
    load_tiers: tuple[TierName, ...] | None = None
    fetches: tuple[Fetch, ...] = ()


def read_hints(envelope: Any, transfer: Any, *, prompt_tokens: int, block_size: int) -> Wishes:
    """The wishes in a body's ``kv_hints`` and ``kv_transfer_params``; either may be None.

    Raises:
        HintsError: what is known of them is of the wrong shape.
    """
    retention: tuple[Retention, ...] = ()
    fetches: list[Fetch] = []
    if envelope is not None:
        actions = _actions(envelope)
        base, runs = 0, list[Retention]()
        until = _FOREVER
        for action in actions:
            payload = action.get("payload")
            if not isinstance(payload, dict):
                raise HintsError("kv_hints: an action's payload must be an object")
            match action.get("action_type"):
                case "kv.retain":
                    runs += _directives(payload, prompt_tokens, block_size)
                case "vllm.set_priority":
                    base, until = _number(payload, "value", 0), _seconds(payload, "ttl_seconds")
                case "kv.fetch":
                    fetches.append(_fetch(payload))
        retention = _highest(base, until, runs)
    offload, tiers = _transfer(transfer)
    return Wishes(retention, offload, tiers, tuple(fetches))


def _actions(envelope: Any) -> list[Mapping[str, Any]]:
    """The envelope's actions; none where it is of another protocol."""
    if not isinstance(envelope, dict):
        raise HintsError("kv_hints must be an object")
    if envelope.get("protocol_version") != PROTOCOL:
        return []
    actions = envelope.get("actions")
    if not isinstance(actions, list) or not all(isinstance(action, dict) for action in actions):
        raise HintsError("kv_hints.actions must be a list of objects")
    if len(actions) > MOST_ACTIONS:
        raise HintsError(f"kv_hints.actions has {len(actions)} actions, at most {MOST_ACTIONS} are allowed")
    return actions


def _directives(payload: Mapping[str, Any], prompt_tokens: int, block_size: int) -> list[Retention]:
    directives = payload.get("directives")
    if not isinstance(directives, list) or len(directives) > MOST_DIRECTIVES:
        raise HintsError(f"kv.retain: directives must be a list of at most {MOST_DIRECTIVES}")
    runs = []
    for directive in directives:
        if not isinstance(directive, dict):
            raise HintsError("kv.retain: a directive must be an object")
        priority = _number(directive, "priority", NEUTRAL)
        if not 0 <= priority <= 100:
            raise HintsError("kv.retain: priority must be between 0 and 100")
        start, stop = _number(directive, "start", 0), _number(directive, "end", prompt_tokens)
        if directive.get("covers_output"):
            start, stop = prompt_tokens, 1 << 40
        if not 0 <= start <= stop:
            raise HintsError("kv.retain: start must not be beyond end")
        until = _seconds(directive, "duration")
        runs.append(Retention(-(-start // block_size), -(-stop // block_size), priority, until))
    return runs


def _highest(base: int, until: float, runs: list[Retention]) -> tuple[Retention, ...]:
    """Parts of which the last counts, out of parts of which the highest counts: the lowest first."""
    parts = [Retention(0, 1 << 40, max(0, min(100, NEUTRAL + base)), until)] if base else []
    return tuple(sorted([*parts, *runs], key=lambda part: part.priority))


def _fetch(payload: Mapping[str, Any]) -> Fetch:
    source, hashes = payload.get("source_control_endpoint"), payload.get("block_hashes")
    if not isinstance(source, str) or not isinstance(hashes, list) or not all(type(each) is int for each in hashes):
        raise HintsError("kv.fetch needs source_control_endpoint and block_hashes")
    return Fetch(source.rpartition("//")[2].rstrip("/"), tuple(hashes))


def _transfer(transfer: Any) -> tuple[int | None, tuple[TierName, ...] | None]:
    """``max_offload_tokens`` and ``kv_load_tiers``."""
    if not isinstance(transfer, dict):
        return None, None
    offload, load = transfer.get("max_offload_tokens"), transfer.get("kv_load_tiers")
    if offload is not None and (type(offload) is not int or offload < 0):
        raise HintsError("kv_transfer_params.max_offload_tokens must be a non-negative integer")
    if load is None:
        return offload, None
    if not isinstance(load, list) or not all(isinstance(tier, dict) for tier in load):
        raise HintsError("kv_transfer_params.kv_load_tiers must be a list of objects")
    return offload, tuple(_MEDIA[tier["medium"]] for tier in load if tier.get("medium") in _MEDIA)


def _number(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise HintsError(f"kv_hints: {name} must be an integer")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    """Seconds from now; endless where nothing is said."""
    value = fields.get(name)
    if value is None:
        return _FOREVER
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise HintsError(f"kv_hints: {name} must be a number of seconds")
    return float(value)
