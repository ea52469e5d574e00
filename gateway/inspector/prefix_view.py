"""The hottest prefixes with who holds them now."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.inspector.sources import InspectorSources
    from gateway.prefix.hot import HotPrefix
    from gateway.prefix.index import PrefixIndex

HOLDERS: int = 200
"""Holders of one prefix that are listed; `held_by` counts all."""


def prefix_document(sources: "InspectorSources", limit: int, model: str | None = None) -> dict[str, Any]:
    """The `limit` prefixes that saved most of late; of one fleet only, if `model` is given."""
    now = sources.clock()
    index = sources.index()
    every = sources.hot.hottest(len(sources.hot), now)
    chosen = [prefix for prefix in every if model is None or prefix.model == model][:limit]
    return {
        "counted": len(every),
        "hits": sum(prefix.hits for prefix in every),
        "saved_tokens": sum(prefix.saved for prefix in every),
        "prefixes": [_row(prefix, index, now) for prefix in chosen],
    }


def _row(prefix: "HotPrefix", index: "PrefixIndex | None", now: float) -> dict[str, Any]:
    holders = _holders(prefix, index)
    return {
        "id": f"{prefix.block_hash & 0xFFFFFFFFFFFF:012x}",
        "model": prefix.model,
        "tokens": prefix.tokens,
        "block_size": prefix.block_size,
        "hits": prefix.hits,
        "saved_tokens": prefix.saved,
        "first": round(now - prefix.first, 3),
        "last": round(now - prefix.last, 3),
        "held_by": len(holders),
        "holders": holders[:HOLDERS],
    }


def _holders(prefix: "HotPrefix", index: "PrefixIndex | None") -> list[dict[str, str]]:
    """Who holds its last block, and so, engines evicting the end of a prefix first, all of it."""
    prefix_map = index.maps.get(prefix.block_size) if index is not None else None
    if prefix_map is None:
        return []
    held = prefix_map.match([prefix.block_hash], 1).held()
    return [
        {
            "worker": name,
            "tier": "device" if match.device else "l1" if match.l1 else "l2",
            "source": match.source,
        }
        for name, match in sorted(held.items())
    ]
