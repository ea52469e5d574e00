"""`kv_hints`: the envelope that vLLM takes with a request (protocol 0.1), and three of its actions.

Nothing can be said beside requests: the envelope belongs to the request that its actions are about. vLLM carries it to its scheduler
and its KV connectors; an engine leaves out actions that it does not know, so all that could be of use are sent together.

==================  ==========================================================================================
``kv.retain``       priority 0 to 100 and seconds for ranges of tokens; priorities never rise along the prompt
``vllm.set_priority``  one number for all that is cached of the request, 0: as if nothing was said; never pins
``kv.fetch``        blocks to be taken from a peer's memory, by the hashes of that peer's events
==================  ==========================================================================================

vLLM 0.32 has the envelope in its engine and in its Rust frontend, but not yet in its Python API server, which ignores the field
(`tests/residency_wire/fixtures`); whether a worker takes it shows in its OpenAPI description.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from backends.hints.base import HintCall
from backends.hints.model import Action, Hint, TierName
from backends.hints.one_way import InsideOnly
from backends.hints.openapi import OPENAPI, names_member
from backends.hints.ranges import Directive, directives

FIELD: Final = "kv_hints"
PROTOCOL: Final = "0.1"
VERSION: Final = "1.0"
RETAIN: Final = "kv.retain"
SET_PRIORITY: Final = "vllm.set_priority"
FETCH: Final = "kv.fetch"

MAX_ACTIONS: Final = 16
MAX_DIRECTIVES: Final = 128
"""Of one envelope; vLLM refuses more."""
NEUTRAL: Final = 50
"""The priority of `Hint.priority` and ``kv.retain`` that stands for nothing said; ``vllm.set_priority`` counts from 0."""

_KEPT: Final = frozenset({Action.RETAIN, Action.DEMOTE})

PeerBlocks = Callable[[Hint], tuple[str, Sequence[int]] | None]
"""For a prefetch from a peer: that peer's control endpoint, and its own hashes of the blocks; None: not known."""


class KvHintsDriver(InsideOnly):
    """See the module.

    A body that brings an envelope of its own keeps it: ours are added to its actions, if it is of the same protocol.
    """

    name = "kv-hints"
    field = FIELD

    def __init__(self, *, peer_blocks: PeerBlocks | None = None) -> None:
        """`peer_blocks`: without it, nothing is fetched from peers."""
        self._peer_blocks = peer_blocks

    def probe(self) -> HintCall | None:
        """Its OpenAPI description: does any request have the field?"""
        return OPENAPI

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether the description names the field."""
        return status == 200 and names_member(body, FIELD)

    def inside(self, action: Action, source: TierName | None, target: TierName) -> bool:
        """Retain and demote on the device; prefetch where peers are known."""
        if action in _KEPT:
            return target == "device"
        return action is Action.PREFETCH and self._peer_blocks is not None and source != "device"

    def fields(self, hints: Sequence[Hint], body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The envelope, merged with the client's; nothing where that is of another shape or protocol: its own goes first."""
        actions = self._actions(hints)
        if not actions:
            return {}
        theirs = body.get(FIELD)
        message = f"warmroute/{hints[0].id}"
        if theirs is None:
            return {FIELD: {"protocol_version": PROTOCOL, "message_id": message, "actions": actions}}
        if not isinstance(theirs, dict) or theirs.get("protocol_version") != PROTOCOL:
            return {}
        known = theirs.get("actions")
        if not isinstance(known, list):
            return {}
        room = max(0, MAX_ACTIONS - len(known))
        return {FIELD: {**theirs, "actions": [*known, *actions[:room]]}} if room else {}

    def _actions(self, hints: Sequence[Hint]) -> list[dict[str, Any]]:
        if len(hints) == 1 and (hint := hints[0]).action is Action.RETAIN:
            return _keeping(hints, (Directive(hint.start, hint.stop, hint.priority, hint.ttl),))
        kept = [hint for hint in hints if hint.action in _KEPT]
        actions = [] if not kept else _keeping(kept, directives(kept, MAX_DIRECTIVES))
        for hint in hints:
            if (
                hint.action is Action.PREFETCH
                and len(actions) < MAX_ACTIONS
                and (fetch := self._fetch(hint)) is not None
            ):
                actions.append(fetch)
        return actions

    def _fetch(self, hint: Hint) -> dict[str, Any] | None:
        found = self._peer_blocks(hint) if self._peer_blocks is not None else None
        if found is None or not found[1]:
            return None
        endpoint, hashes = found
        return {
            "action_id": f"kv.fetch/{hint.id}",
            "action_type": FETCH,
            "action_version": VERSION,
            "payload": {"source_control_endpoint": endpoint, "block_hashes": list(hashes)},
        }


_PLACE: Final = frozenset({"start", "end"})


def _keeping(hints: Sequence[Hint], runs: Sequence[Directive]) -> list[dict[str, Any]]:
    """`kv.retain`, and `vllm.set_priority` where one number can say it without taking anything back.

    The highest claim on a block counts. So the number is the last run's, the lowest there is, and only where the runs cover the prompt:
    an engine that knows both actions then does what the ranges say.
    """
    first = hints[0]
    number, subject = first.id, first.subject
    scope = subject.session or f"warmroute/{number}"
    said: list[dict[str, Any]] = []
    for run in runs:
        one: dict[str, Any] = {"start": run.start, "end": run.stop, "priority": run.priority}
        if run.ttl:
            one["duration"] = run.ttl
        said.append(one)
    if any(hint.answer for hint in hints):
        # The tokens to come have no places yet; priorities never rise along them, either.
        said.append({**{key: value for key, value in said[-1].items() if key not in _PLACE}, "covers_output": True})
    actions = [
        {
            "action_id": f"kv.retain/{number}",
            "action_type": RETAIN,
            "action_version": VERSION,
            "payload": {"scope": scope, "directives": said},
        }
    ]
    last = runs[-1]
    value = last.priority - NEUTRAL
    if value and _covers(runs, subject.tokens):
        actions.append(
            {
                "action_id": f"vllm.set_priority/{number}",
                "action_type": SET_PRIORITY,
                "action_version": VERSION,
                "payload": {
                    "target": "request_cached",
                    "location": "local_g1",
                    "claim_id": f"warmroute/{scope}",
                    # Later hints have higher ids: an engine takes a claim's highest revision.
                    "revision": number,
                    "value": value,
                    "ttl_seconds": last.ttl or 3600.0,
                },
            }
        )
    return actions


def _covers(runs: Sequence[Directive], tokens: int) -> bool:
    """Whether they leave out no whole block: 512 tokens is the largest block that any engine has by default."""
    end = 0
    for run in runs:
        if run.start > end:
            return False
        end = run.stop
    return tokens - end < 512
