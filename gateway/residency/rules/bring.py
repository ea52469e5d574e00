"""Bringing a prompt nearer to where it will be computed: what several rules wish, each for its own reason."""

from typing import TYPE_CHECKING

from backends.hints.model import Action, Hint, Subject
from gateway.residency.rules.base import Voice, last_block

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.hints.model import TierName
    from gateway.residency.ledger import Entry
    from gateway.residency.sessions import Session
    from policies.base import Match, WorkerView


def bring(
    into: list[Hint],
    voice: Voice,
    rule: str,
    subject: Subject,
    worker: "WorkerView",
    match: "Match",
    now: float,
    *,
    stop: int,
    least: int,
    reason: str,
    peers: "Mapping[str, Match] | None" = None,
    session: "Session | None" = None,
) -> "list[Entry]":
    """Prefetches of the first `stop` tokens of a prompt to `worker`: each part to the next faster memory.

    A prompt is held in the order device, l1, l2: what is in l1 comes to the device, what is in l2 to l1. What a peer holds beyond all
    of that comes from there.

    Args:
        into: where hints are appended.
        voice: makes them.
        rule: in whose name.
        subject: the prompt.
        worker: to whom.
        match: what it holds already.
        now: seconds.
        stop: how much of the prompt, in tokens.
        least: parts of fewer tokens stay where they are.
        reason: why.
        peers: what others hold; None: nothing is fetched from them.
        session: whose hints they are.

    Returns:
        Their entries in the books.
    """
    size = worker.capabilities.block_size
    said: list[Entry | None] = []

    def tell(start: int, end: int, source: "TierName", target: "TierName" = "device", peer: str | None = None) -> None:
        said.append(
            voice.say(
                into,
                rule,
                Action.PREFETCH,
                worker.id,
                subject,
                now,
                start=start,
                stop=end,
                source=source,
                target=target,
                peer=peer,
                reason=reason,
                session=session,
                mark=last_block(subject, end, size),
            )
        )

    near, far = min(match.device, stop), min(match.device + match.l1, stop)
    held = min(match.tokens, stop)
    if far - near >= least:
        tell(near, far, "l1")
    if held - far >= least:
        tell(far, held, "l2", "l1")
    best = None
    if peers:
        best = max(
            ((other.device + other.l1, other.l1, name) for name, other in peers.items() if name != worker.id),
            default=None,
        )
    if best is not None and min(best[0], stop) - held >= least:
        more, l1, peer = best
        tell(held, min(more, stop), "l1" if l1 else "device", peer=peer)
    return [entry for entry in said if entry is not None]
