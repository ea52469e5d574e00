"""How well a worker's tokens agree with ours, as a record and in sentences."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Standing(enum.Enum):
    """What is known of a worker's tokens."""

    PENDING = "pending"
    """Not compared yet, or not since it was started."""
    EXACT = "exact"
    """All that could be compared was equal, chats among it."""
    MISMATCH = "mismatch"
    """They differ. Prompts of the whole model are matched by their bytes."""
    UNVERIFIED = "unverified"
    """It cannot be asked, or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityStatus:
    """One worker's tokens at one moment.

    Attributes:
        worker: id.
        standing: see `Standing`.
        detail: where they differ, or why they could not be compared; empty when exact.
        since: seconds in this standing.
        compared: probes that were equal in the last round, by name.
        skipped: probes that could not be compared, by name.
        generated: the ids of a request that it really answered were equal.
        proven: see `Parity.proven`.
        observed: answers whose count of prompt tokens was compared, ever.
        wrong: those of them whose count was another one.
    """

    worker: str
    standing: Standing
    detail: str
    since: float
    compared: Sequence[str]
    skipped: Sequence[str]
    generated: bool
    proven: bool
    observed: int
    wrong: int


def sentences(statuses: Sequence[ParityStatus]) -> list[str]:
    """What is wrong, for `/readyz`: one sentence for each worker that disagrees, three at most and a count."""
    wrong = [status for status in statuses if status.standing is Standing.MISMATCH]
    said = [f"{status.detail}: prompts are matched by bytes" for status in wrong[:3]]
    if len(wrong) > len(said):
        said.append(f"the tokenizer disagrees with {len(wrong) - len(said)} more workers")
    return said
